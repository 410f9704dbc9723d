//! Inner loops, one file per instruction set with the same function names, behind one dispatcher.
//!
//! `portable` is the readable version; the others must agree with it and are tested against it. Axes: K along which
//! products are summed, a *strip* of 32 of it (two tiles); N in a *panel* of 64 columns (one tile column) in the order
//! of [`crate::fragment`]; M rows of activations.
//!
//! This folder is a room for `unsafe`: calls into functions compiled for an instruction set, and their unaligned loads.

use std::ops::Range;

use vt_bundle::tile::TILE_N;

use crate::context::Isa;
use crate::recipe::STRIP_K;
use crate::weight::RowsWeight;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod elementwise;
mod generic;
mod portable;

/// Quads of codes in a strip.
pub(crate) const STRIP_QUADS: usize = STRIP_K / 4;
/// Quads of codes in one tile.
pub(crate) const TILE_QUADS: usize = STRIP_QUADS / 2;

/// Unsigned codes of one strip and panel: `[quad][position][4]`, quads in fragment order, positions in panel order.
#[repr(C, align(64))]
#[derive(Debug, Clone)]
pub(crate) struct CodePanel(pub [[[u8; 4]; TILE_N]; STRIP_QUADS]);

impl CodePanel {
    /// All codes 0.
    pub const fn new() -> Self {
        Self([[[0; 4]; TILE_N]; STRIP_QUADS])
    }
}

/// Decoded weights of one strip and panel: `[k][position]`, `k` in fragment order.
#[repr(C, align(64))]
#[derive(Debug, Clone)]
pub(crate) struct FloatPanel(pub [[f32; TILE_N]; STRIP_K]);

impl FloatPanel {
    /// All weights 0.
    pub const fn new() -> Self {
        Self([[0.0; TILE_N]; STRIP_K])
    }
}

/// Scales of one strip and panel, in panel order.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales {
    /// Factors, per tile of the strip where `halves` is set, else only the first.
    pub d: [[f32; TILE_N]; 2],
    /// Additive terms, likewise; read only where `min` is set.
    pub m: [[f32; TILE_N]; 2],
    /// Whether the two tiles have scales of their own.
    pub halves: bool,
    /// Whether there are additive terms.
    pub min: bool,
    /// The code that stands for zero.
    pub zero: i32,
}

impl Scales {
    /// All scales 0.
    pub const fn new(halves: bool, min: bool, zero: i32) -> Self {
        Self { d: [[0.0; TILE_N]; 2], m: [[0.0; TILE_N]; 2], halves, min, zero }
    }
}

/// Accumulators of one row of activations, in panel order.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Acc(pub [f32; TILE_N]);

/// Quantised activations as inner loops see them: rows of `[K]` codes in fragment order with K padded to the strip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActivationRows<'a> {
    /// `[M, K]`.
    pub codes: &'a [i8],
    /// One per tile, `[M, K / 16]`.
    pub scales: &'a [f32],
    /// Sums of the codes of every 16, `[M, K / 16]`.
    pub sums: &'a [i32],
    /// Padded K.
    pub k: usize,
}

/// Where a strip lies and how much of it there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strip {
    /// Index of the strip along K.
    pub index: usize,
    /// Tiles in it: 2, or 1 at the end of an odd number of tiles.
    pub tiles: usize,
}

macro_rules! dispatch {
    ($isa:expr, $name:ident($($arg:expr),*)) => {
        match $isa {
            Isa::Portable => portable::$name($($arg),*),
            // SAFETY: a `Context` holds an instruction set only where the machine has it.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::$name($($arg),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::$name($($arg),*) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => portable::$name($($arg),*),
        }
    };
}

/// Unpacks one tile of a plane of `bits` bits into one half of a panel: adds (bitwise or) `bits << shift`.
/// The first plane of an encoding (`shift` 0) overwrites.
pub(crate) fn unpack_tile(isa: Isa, bits: u32, shift: u32, tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    match (bits, shift) {
        (4, 0) => dispatch!(isa, unpack_q4(tile, out)),
        (8, 0) => dispatch!(isa, unpack_q8(tile, out)),
        _ => dispatch!(isa, unpack_bits(bits, shift, tile, out)),
    }
}

/// Asks for the cache lines of `bytes`. A hint: it changes nothing but time.
pub(crate) fn prefetch(isa: Isa, bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Portable {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for line in bytes.chunks(64) {
            // SAFETY: prefetching has no effect that a program can see, at any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (isa, bytes);
}

/// Replaces every code (below 16) by its table entry.
pub(crate) fn apply_table(isa: Isa, table: &[u8; 16], panel: &mut CodePanel) {
    dispatch!(isa, apply_table(table, panel))
}

/// 64 f16 scales in grouped order to f32 in panel order.
pub(crate) fn grouped_f16(isa: Isa, bytes: &[u8], out: &mut [f32; TILE_N]) {
    dispatch!(isa, grouped_f16(bytes, out))
}

/// 64 bytes in grouped-interleaved order to panel order.
pub(crate) fn grouped_bytes(isa: Isa, bytes: &[u8], out: &mut [u8; TILE_N]) {
    dispatch!(isa, grouped_bytes(bytes, out))
}

/// 64 E4M3 scales in grouped-interleaved order to f32 in panel order, times `factor`.
pub(crate) fn grouped_e4m3(isa: Isa, bytes: &[u8], factor: f32, out: &mut [f32; TILE_N]) {
    dispatch!(isa, grouped_e4m3(bytes, factor, out))
}

/// Decodes integer codes: `d * (code - zero) + m`.
pub(crate) fn expand_integer(isa: Isa, panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    dispatch!(isa, expand_integer(panel, scales, out))
}

/// Decodes E4M3 codes: `d * e4m3(code)`.
pub(crate) fn expand_e4m3(isa: Isa, panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    dispatch!(isa, expand_e4m3(panel, scales, out))
}

/// Adds the product of one strip with rows `rows` of quantised activations to `acc[0 .. rows.len()]`.
pub(crate) fn dot_integer(
    isa: Isa,
    panel: &CodePanel,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    rows: Range<usize>,
    acc: &mut [Acc],
) {
    debug_assert!(rows.end * x.k <= x.codes.len() && rows.len() <= acc.len());
    dispatch!(isa, dot_integer(panel, scales, strip, x, rows, acc))
}

/// Whether [`dot_direct`] is worth its while.
pub(crate) fn has_direct(isa: Isa) -> bool {
    isa != Isa::Avx2
}

/// Most rows that [`dot_direct`] takes.
pub(crate) const DIRECT_M: usize = 2;

/// [`dot_integer`] of one or two rows of activations with 4-bit tiles as they are: codes go from the tile to the product
/// in registers. `acc` has one element per row, and gets bit for bit what [`dot_integer`] would give.
#[allow(clippy::too_many_arguments)]
pub(crate) fn dot_direct(
    isa: Isa,
    tiles: [&[u8]; 2],
    table: Option<&[u8; 16]>,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    acc: &mut [Acc],
) {
    dispatch!(isa, dot_direct(tiles, table, scales, strip, x, acc))
}

/// Adds the product of the first `len` rows (in order of K, not of fragments) of a strip with activations to `acc`.
///
/// `x` is `[acc.len(), stride]` and starts at the strip's first element of the first row.
pub(crate) fn dot_float(isa: Isa, panel: &FloatPanel, len: usize, x: &[f32], stride: usize, acc: &mut [Acc]) {
    debug_assert!(len <= STRIP_K && (acc.is_empty() || (acc.len() - 1) * stride + len <= x.len()));
    dispatch!(isa, dot_float(panel, len, x, stride, acc))
}

/// Writes accumulators in natural column order.
pub(crate) fn store(isa: Isa, acc: &Acc, out: &mut [f32; TILE_N]) {
    dispatch!(isa, store(acc, out))
}

/// Quantises one row into fragment order; see [`crate::quantise`].
pub(crate) fn quantise_row(isa: Isa, x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
    dispatch!(isa, quantise_row(x, codes, scales, sums))
}

/// Rows of activations that [`dot_rows`] takes at once, at most.
pub(crate) const ROWS_M: usize = 4;
/// Rows of weights that [`dot_rows`] takes at once, at most.
pub(crate) const ROWS_N: usize = 4;

/// Dot products of up to 4 rows of activations `x` `[M, K]` with up to 4 rows of a row-major matrix.
pub(crate) fn dot_rows(
    isa: Isa,
    weight: &RowsWeight<'_>,
    columns: Range<usize>,
    x: &[f32],
    rows: Range<usize>,
) -> [[f32; ROWS_N]; ROWS_M] {
    debug_assert!(columns.len() <= ROWS_N && rows.len() <= ROWS_M && rows.end * weight.k <= x.len());
    dispatch!(isa, dot_rows(weight, columns, x, rows))
}

/// `out = silu(gate) * up`, all of one length.
pub(crate) fn silu_mul(isa: Isa, gate: &[f32], up: &[f32], out: &mut [f32]) {
    dispatch!(isa, silu_mul(gate, up, out))
}

/// `out = gelu(gate) * up` with the tanh form of GELU, all of one length.
pub(crate) fn gelu_mul(isa: Isa, gate: &[f32], up: &[f32], out: &mut [f32]) {
    dispatch!(isa, gelu_mul(gate, up, out))
}

/// `x += y`.
pub(crate) fn add(isa: Isa, x: &mut [f32], y: &[f32]) {
    dispatch!(isa, add(x, y))
}

/// `values *= factor`.
pub(crate) fn scale(isa: Isa, values: &mut [f32], factor: f32) {
    dispatch!(isa, scale(values, factor))
}

/// The sum of products of two vectors of one length.
pub(crate) fn dot(isa: Isa, x: &[f32], y: &[f32]) -> f32 {
    debug_assert_eq!(x.len(), y.len());
    dispatch!(isa, dot(x, y))
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`.
pub(crate) fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    dispatch!(isa, rms_norm(x, weight, eps, out))
}

/// [`rms_norm`] onto its input.
pub(crate) fn rms_norm_in_place(isa: Isa, x: &mut [f32], weight: &[f32], eps: f32) {
    dispatch!(isa, rms_norm_in_place(x, weight, eps))
}

/// Rotates the pairs `(i, i + half)` of a head by the angles given, `half = cos.len()`.
pub(crate) fn rotate_half(isa: Isa, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    dispatch!(isa, rotate_half(head, cos, sin))
}

/// The largest value, NaN ignored; minus infinity of none.
pub(crate) fn max(isa: Isa, values: &[f32]) -> f32 {
    dispatch!(isa, max(values))
}

/// `values = e^(values - shift)`, minus infinity to 0; returns their sum.
pub(crate) fn exp_and_sum(isa: Isa, values: &mut [f32], shift: f32) -> f32 {
    dispatch!(isa, exp_and_sum(values, shift))
}

/// `values = cap * tanh(values / cap)`.
pub(crate) fn soft_cap(isa: Isa, values: &mut [f32], cap: f32) {
    dispatch!(isa, soft_cap(values, cap))
}

/// Partial sums of a score, in every kernel: element `d` of a head goes to sum `d % SCORE_CHAINS`. More would hide the
/// latency of additions better where there are few rows, but a score must not depend on how many rows there are.
pub(crate) const SCORE_CHAINS: usize = 2;

/// Scores of one block of keys `[D][16]` for rows of queries `[R][D]`, to `out[r * stride + slot]`.
pub(crate) fn scores(isa: Isa, q: &[f32], keys: &[f32], head_dim: usize, out: &mut [f32], stride: usize) {
    dispatch!(isa, scores(q, keys, head_dim, out, stride))
}

/// Adds the first slots of a block of values `[slots][D]`, weighted with `weights[r * stride + slot]`, to rows `out`
/// `[R][D]`.
pub(crate) fn weighted_values(
    isa: Isa,
    weights: &[f32],
    stride: usize,
    values: &[f32],
    head_dim: usize,
    out: &mut [f32],
) {
    dispatch!(isa, weighted_values(weights, stride, values, head_dim, out))
}

/// f16 bits to f32, exactly.
pub(crate) fn widen_f16(isa: Isa, bits: &[u16], out: &mut [f32]) {
    dispatch!(isa, widen_f16(bits, out))
}

/// E4M3 codes to f32, times `factor`.
pub(crate) fn widen_e4m3(isa: Isa, codes: &[u8], factor: f32, out: &mut [f32]) {
    dispatch!(isa, widen_e4m3(codes, factor, out))
}

/// f32 to the bits of the nearest f16, ties to even.
pub(crate) fn narrow_f16(isa: Isa, values: &[f32], out: &mut [u16]) {
    dispatch!(isa, narrow_f16(values, out))
}
