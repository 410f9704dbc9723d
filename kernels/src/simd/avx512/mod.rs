//! Inner loops for AVX-512 F, BW, DQ, VL, VBMI and VNNI.
//!
//! Loops over registers are indexed: a closure given to an iterator or to `array::map` is called from code that is
//! compiled without the instruction set, and would pass them in memory.

#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use vt_bundle::tile::{ScaleOrder, TILE_K, TILE_N};

use super::{Acc, ActivationRows, CodePanel, DirectAcc, FloatPanel, ROWS_M, ROWS_N, Scales, Strip, TILE_QUADS};
use crate::fragment::{FRAGMENT_ROW, PANEL_COLUMN};
use crate::quantise::{ACTIVATION_BLOCK, scale_of};
use crate::recipe::STRIP_K;
use crate::weight::{FloatType, RowsWeight};

mod attention;

pub(super) use attention::{scores, weighted_values};

super::elementwise::instances!(true, #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]);

/// Elements of a zmm register of 32-bit lanes.
const LANES: usize = 16;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_u8(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: 64 readable bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_quads(quads: &[[u8; 4]; LANES]) -> __m512i {
    // SAFETY: 64 readable bytes.
    unsafe { _mm512_loadu_si512(quads.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn store_quads(quads: &mut [[u8; 4]; LANES], value: __m512i) {
    // SAFETY: 64 writable bytes.
    unsafe { _mm512_storeu_si512(quads.as_mut_ptr().cast(), value) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_f32(values: &[f32; LANES]) -> __m512 {
    // SAFETY: 16 readable floats.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn store_f32(values: &mut [f32; LANES], value: __m512) {
    // SAFETY: 16 writable floats.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), value) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_f16(bytes: &[u8; 32]) -> __m512 {
    // SAFETY: 32 readable bytes.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) })
}

/// The bytes of a table of 64 as a register.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn indices(table: &[u8; 64]) -> __m512i {
    load_u8(table)
}

/// The four registers of one row of a panel.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn quarters<T>(row: &[T; TILE_N]) -> &[[T; LANES]; 4] {
    // SAFETY: an array of 64 is laid out as four arrays of 16.
    unsafe { &*std::ptr::from_ref(row).cast() }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn quarters_mut<T>(row: &mut [T; TILE_N]) -> &mut [[T; LANES]; 4] {
    // SAFETY: an array of 64 is laid out as four arrays of 16.
    unsafe { &mut *std::ptr::from_mut(row).cast() }
}

/// Transposes a 4 x 4 matrix of 128-bit lanes.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn transpose_lanes([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab_low, cd_low) = (_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0x44>(c, d));
    let (ab_high, cd_high) = (_mm512_shuffle_i64x2::<0xEE>(a, b), _mm512_shuffle_i64x2::<0xEE>(c, d));
    [
        _mm512_shuffle_i64x2::<0x88>(ab_low, cd_low),
        _mm512_shuffle_i64x2::<0xDD>(ab_low, cd_low),
        _mm512_shuffle_i64x2::<0x88>(ab_high, cd_high),
        _mm512_shuffle_i64x2::<0xDD>(ab_high, cd_high),
    ]
}

/// First bits of the bytes `[2q, 2q + 8, 2q + 1, 2q + 9]` of column `16 j + t`, or of column + 8 where `high`, in the
/// 8-byte pieces of a 4-bit tile.
const fn nibble_shifts(high: bool) -> [u8; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        let within = [0, 4, 16, 20][i % 4] + if high { 8 } else { 0 };
        table[i] = (within + 32 * (i / 4 % 2)) as u8;
        i += 1;
    }
    table
}

const SHIFTS_LOW: [u8; 64] = nibble_shifts(false);
const SHIFTS_HIGH: [u8; 64] = nibble_shifts(true);

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn unpack_q4(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    let words = tile.as_chunks::<64>().0;
    let mask = _mm512_set1_epi8(15);
    // Register t holds lanes 4t .. 4t + 3: one 128-bit lane per quad, in it j = 0 .. 3.
    for (h, shifts) in [indices(&SHIFTS_LOW), indices(&SHIFTS_HIGH)].into_iter().enumerate() {
        for half in 0..2 {
            let codes =
                |i: usize| _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, load_u8(&words[4 * half + i])), mask);
            let quads = transpose_lanes([codes(0), codes(1), codes(2), codes(3)]);
            for (out, quad) in out.iter_mut().zip(quads) {
                store_quads(&mut quarters_mut(out)[2 * h + half], quad);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn unpack_q8(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    let words = tile.as_chunks::<64>().0;
    // Register 2t + q / 2 holds quads q and q + 1 of column t + 8 jj, jj = 2 j + h; two of them make
    // [h 0: t, t + 1; h 1: t, t + 1] of one quad.
    let even = _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 1, 3, 5, 7, 17, 19, 21, 23);
    let odd = _mm512_add_epi32(even, _mm512_set1_epi32(8));
    for (q, out) in out.iter_mut().enumerate() {
        let pick = if q % 2 == 0 { even } else { odd };
        let pair = |t: usize| {
            let (a, b) = (load_u8(&words[2 * t + q / 2]), load_u8(&words[2 * t + 2 + q / 2]));
            _mm512_permutex2var_epi32(a, pick, b)
        };
        let out = quarters_mut(out);
        for half in 0..2 {
            let (a, b) = (pair(4 * half), pair(4 * half + 2));
            store_quads(&mut out[half], _mm512_shuffle_i64x2::<0x44>(a, b));
            store_quads(&mut out[2 + half], _mm512_shuffle_i64x2::<0xEE>(a, b));
        }
    }
}

/// For quad `q` and four neighbouring `t`: which bytes of a 1- or 2-bit tile hold the codes of the 16 positions, one byte
/// per code. `lane_bytes` is the size of a lane's word.
const fn bit_sources(q: usize, lane_bytes: usize) -> [u8; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        let (t, j, e) = (i / 16, i / 4 % 4, i % 4);
        // A word has `lane_bytes / 4` bytes per j; the odd rows of a column are in the upper half of its fields.
        let per_j = lane_bytes / 4;
        table[i] = ((4 * t + q) * lane_bytes + per_j * j + e / 2 * (per_j - 1)) as u8;
        i += 1;
    }
    table
}

const SOURCES_1: [[u8; 64]; TILE_QUADS] = [bit_sources(0, 4), bit_sources(1, 4), bit_sources(2, 4), bit_sources(3, 4)];
const SOURCES_2: [[u8; 64]; TILE_QUADS] = [bit_sources(0, 8), bit_sources(1, 8), bit_sources(2, 8), bit_sources(3, 8)];

/// The bit of each code within its byte of a 1-bit tile: fields 0, 1, 4, 5 of the column, 2, 3, 6, 7 of column + 8.
const fn single_bits(h: usize) -> [u8; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = 1 << ([0, 1, 4, 5][i % 4] + 2 * h);
        i += 1;
    }
    table
}

/// First bits of the codes within each 8 bytes gathered from a 2-bit tile.
const fn pair_shifts(h: usize) -> [u8; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = (8 * (i % 8) + 4 * h + 2 * (i % 2)) as u8;
        i += 1;
    }
    table
}

const SINGLE_BITS: [[u8; 64]; 2] = [single_bits(0), single_bits(1)];
const PAIR_SHIFTS: [[u8; 64]; 2] = [pair_shifts(0), pair_shifts(1)];

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn unpack_bits(bits: u32, shift: u32, tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    if bits > 2 {
        return super::portable::unpack_bits(bits, shift, tile, out);
    }
    let parts = tile.as_chunks::<64>().0;
    let place = _mm_cvtsi32_si128(shift as i32);
    for (q, out) in out.iter_mut().enumerate() {
        let out = quarters_mut(out);
        for half in 0..2 {
            let gathered = match bits {
                1 => _mm512_permutexvar_epi8(indices(&SOURCES_1[q]), load_u8(&parts[half])),
                _ => {
                    let (a, b) = (load_u8(&parts[2 * half]), load_u8(&parts[2 * half + 1]));
                    _mm512_permutex2var_epi8(a, indices(&SOURCES_2[q]), b)
                }
            };
            for h in 0..2 {
                let codes = match bits {
                    1 => {
                        let set = _mm512_test_epi8_mask(gathered, indices(&SINGLE_BITS[h]));
                        _mm512_maskz_set1_epi8(set, 1)
                    }
                    _ => {
                        let codes = _mm512_multishift_epi64_epi8(indices(&PAIR_SHIFTS[h]), gathered);
                        _mm512_and_si512(codes, _mm512_set1_epi8(3))
                    }
                };
                // No code leaves its byte: the highest bit of a plane is below bit 8.
                let codes = _mm512_sll_epi16(codes, place);
                let out = &mut out[2 * h + half];
                let before = if shift == 0 { _mm512_setzero_si512() } else { load_quads(out) };
                store_quads(out, _mm512_or_si512(before, codes));
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn apply_table(table: &[u8; 16], panel: &mut CodePanel) {
    // SAFETY: 16 readable bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    for row in &mut panel.0 {
        for quads in quarters_mut(row) {
            let codes = load_quads(quads);
            store_quads(quads, _mm512_shuffle_epi8(table, codes));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn grouped_f16(bytes: &[u8], out: &mut [f32; TILE_N]) {
    let bytes = bytes.as_chunks::<32>().0;
    let out = quarters_mut(out);
    // Positions 8 t + 2 j + h: even ones are h = 0.
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for half in 0..2 {
        let (a, b) = (load_f16(&bytes[2 * half]), load_f16(&bytes[2 * half + 1]));
        store_f32(&mut out[half], _mm512_permutex2var_ps(a, even, b));
        store_f32(&mut out[2 + half], _mm512_permutex2var_ps(a, odd, b));
    }
}

/// Where the byte of each panel position lies in a row of 8-bit scales.
const BYTE_POSITION: [u8; TILE_N] = {
    let mut table = [0; TILE_N];
    let mut p = 0;
    while p < TILE_N {
        table[p] = ScaleOrder::GroupedInterleaved.position(PANEL_COLUMN[p]) as u8;
        p += 1;
    }
    table
};

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn grouped(bytes: &[u8]) -> __m512i {
    match bytes.first_chunk::<TILE_N>() {
        Some(bytes) => _mm512_permutexvar_epi8(indices(&BYTE_POSITION), load_u8(bytes)),
        None => _mm512_setzero_si512(),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn grouped_bytes(bytes: &[u8], out: &mut [u8; TILE_N]) {
    // SAFETY: 64 writable bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), grouped(bytes)) }
}

/// E4M3 in 16-bit lanes to f16 of 2^-8 times the value: the exponents' biases are 7 and 15, so that the bits fit as they
/// are, subnormals too.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn e4m3_to_f16(codes: __m512i) -> __m512i {
    let magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7F));
    let sign = _mm512_slli_epi16::<8>(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)));
    let bits = _mm512_or_si512(_mm512_slli_epi16::<7>(magnitude), sign);
    let nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F));
    _mm512_mask_mov_epi16(bits, nan, _mm512_set1_epi16(0x7E00))
}

/// What [`e4m3_to_f16`] leaves to multiply with.
const E4M3_FACTOR: f32 = 256.0;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn grouped_e4m3(bytes: &[u8], factor: f32, out: &mut [f32; TILE_N]) {
    let codes = grouped(bytes);
    let factor = _mm512_set1_ps(factor * E4M3_FACTOR);
    let low = e4m3_to_f16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes)));
    let high = e4m3_to_f16(_mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64::<1>(codes)));
    let out = quarters_mut(out);
    for (i, codes) in [low, high].into_iter().enumerate() {
        let (a, b) = (_mm512_castsi512_si256(codes), _mm512_extracti64x4_epi64::<1>(codes));
        store_f32(&mut out[2 * i], _mm512_mul_ps(_mm512_cvtph_ps(a), factor));
        store_f32(&mut out[2 * i + 1], _mm512_mul_ps(_mm512_cvtph_ps(b), factor));
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn expand_integer(panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    let (zero, byte) = (_mm512_set1_epi32(scales.zero), _mm512_set1_epi32(255));
    for (q, quads) in panel.0.iter().enumerate() {
        let half = if scales.halves { q / TILE_QUADS } else { 0 };
        for (c, quads) in quarters(quads).iter().enumerate() {
            let d = load_f32(&quarters(&scales.d[half])[c]);
            let m = if scales.min { load_f32(&quarters(&scales.m[half])[c]) } else { _mm512_setzero_ps() };
            let mut codes = load_quads(quads);
            for out in &mut out.0[4 * q..4 * q + 4] {
                let code = _mm512_sub_epi32(_mm512_and_si512(codes, byte), zero);
                store_f32(&mut quarters_mut(out)[c], _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), d, m));
                codes = _mm512_srli_epi32::<8>(codes);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn expand_e4m3(panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    let byte = _mm512_set1_epi16(255);
    for (q, quads) in panel.0.iter().enumerate() {
        let half = if scales.halves { q / TILE_QUADS } else { 0 };
        for (c, quads) in quarters(quads).iter().enumerate() {
            let d = _mm512_mul_ps(load_f32(&quarters(&scales.d[half])[c]), _mm512_set1_ps(E4M3_FACTOR));
            let codes = load_quads(quads);
            // Bytes 0 and 2 of every four in 16-bit lanes, then bytes 1 and 3.
            let even = e4m3_to_f16(_mm512_and_si512(codes, byte));
            let odd = e4m3_to_f16(_mm512_srli_epi16::<8>(codes));
            let parts = [even, odd, _mm512_srli_epi32::<16>(even), _mm512_srli_epi32::<16>(odd)];
            for (out, part) in out.0[4 * q..4 * q + 4].iter_mut().zip(parts) {
                let values = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(part));
                store_f32(&mut quarters_mut(out)[c], _mm512_mul_ps(values, d));
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn dot_integer(
    panel: &CodePanel,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    rows: Range<usize>,
    acc: &mut [Acc],
) {
    // What the unchecked reads below rely on.
    let end = strip.index * STRIP_K + strip.tiles * TILE_K;
    assert!(end <= x.k && rows.end * x.k <= x.codes.len() && rows.len() <= acc.len());
    assert!(rows.end * x.k <= x.sums.len() * TILE_K && rows.end * x.k <= x.scales.len() * TILE_K);
    if strip.tiles == 2 && !scales.halves {
        let segment = Segment::new(panel, scales, 0, 0, strip);
        if scales.min {
            segment.rows::<2, true>(x, rows, acc)
        } else {
            segment.rows::<2, false>(x, rows, acc)
        }
        return;
    }
    for tile in 0..strip.tiles {
        let segment = Segment::new(panel, scales, tile, if scales.halves { tile } else { 0 }, strip);
        if scales.min {
            segment.rows::<1, true>(x, rows.clone(), acc);
        } else {
            segment.rows::<1, false>(x, rows.clone(), acc);
        }
    }
}

/// One or two tiles of a panel that share the scales of the weights; activations have a scale per tile.
struct Segment<'a> {
    quads: &'a [[[u8; 4]; TILE_N]],
    d: &'a [f32; TILE_N],
    m: &'a [f32; TILE_N],
    zero: i32,
    /// First code along K.
    k0: usize,
}

impl<'a> Segment<'a> {
    fn new(panel: &'a CodePanel, scales: &'a Scales, tile: usize, at: usize, strip: Strip) -> Self {
        Self {
            quads: &panel.0[tile * TILE_QUADS..],
            d: &scales.d[at],
            m: &scales.m[at],
            zero: scales.zero,
            k0: strip.index * STRIP_K + tile * TILE_K,
        }
    }

    /// Rows of activations in groups whose sums fit in the registers.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    #[inline]
    fn rows<const TILES: usize, const MIN: bool>(&self, x: &ActivationRows<'_>, rows: Range<usize>, acc: &mut [Acc]) {
        let (mut row, mut left) = (rows.start, &mut acc[..rows.len()]);
        while !left.is_empty() {
            let size = match left.len() {
                6.. => 6,
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
            let (group, rest) = std::mem::take(&mut left).split_at_mut(size);
            match size {
                6 => self.group::<6, TILES, MIN>(x, row, group),
                4 => self.group::<4, TILES, MIN>(x, row, group),
                2 => self.group::<2, TILES, MIN>(x, row, group),
                _ => self.group::<1, TILES, MIN>(x, row, group),
            }
            (row, left) = (row + size, rest);
        }
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    #[inline]
    fn group<const R: usize, const TILES: usize, const MIN: bool>(
        &self,
        x: &ActivationRows<'_>,
        row: usize,
        acc: &mut [Acc],
    ) {
        let start = row * x.k + self.k0;
        // SAFETY: `dot_integer` has checked that all rows have sums and scales up to the end of the strip; the pointers
        // are to the elements of this segment in the first row.
        let (codes, sums, scales) = unsafe {
            (x.codes.as_ptr().add(start), x.sums.as_ptr().add(start / TILE_K), x.scales.as_ptr().add(start / TILE_K))
        };
        let (d, m) = (quarters(self.d), quarters(self.m));
        // Half of the columns at a time: their sums, as integers and as floats, and the weights fit in the registers.
        for half in 0..2 {
            let mut values = [[_mm512_setzero_ps(); 2]; R];
            for tile in 0..TILES {
                let mut dots = [[_mm512_setzero_si512(); 2]; R];
                for r in 0..R {
                    // SAFETY: row + r is one of the rows checked.
                    let sum = unsafe { *sums.add(r * (x.k / TILE_K) + tile) };
                    dots[r] = [_mm512_set1_epi32(-self.zero * sum); 2];
                }
                for q in 0..TILE_QUADS {
                    let quads = quarters(&self.quads[tile * TILE_QUADS + q]);
                    let weights = [load_quads(&quads[2 * half]), load_quads(&quads[2 * half + 1])];
                    let at = tile * TILE_K + 4 * q;
                    for r in 0..R {
                        // SAFETY: as above; four codes of this row, at any alignment.
                        let a = _mm512_set1_epi32(unsafe { codes.add(r * x.k + at).cast::<i32>().read_unaligned() });
                        for c in 0..2 {
                            dots[r][c] = _mm512_dpbusd_epi32(dots[r][c], weights[c], a);
                        }
                    }
                }
                for r in 0..R {
                    // SAFETY: as above.
                    let scale = _mm512_set1_ps(unsafe { *scales.add(r * (x.k / TILE_K) + tile) });
                    for c in 0..2 {
                        values[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][c]), scale, values[r][c]);
                    }
                }
            }
            for r in 0..R {
                let acc = quarters_mut(&mut acc[r].0);
                let mut term = 0.0;
                for tile in 0..TILES {
                    let at = r * (x.k / TILE_K) + tile;
                    // SAFETY: as above.
                    term += unsafe { *sums.add(at) as f32 * *scales.add(at) };
                }
                for c in 0..2 {
                    let at = 2 * half + c;
                    let mut value = _mm512_fmadd_ps(values[r][c], load_f32(&d[at]), load_f32(&acc[at]));
                    if MIN {
                        value = _mm512_fmadd_ps(load_f32(&m[at]), _mm512_set1_ps(term), value);
                    }
                    store_f32(&mut acc[at], value);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn dot_direct(
    tiles: [&[u8]; 2],
    table: Option<&[u8; 16]>,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    row: usize,
    acc: &mut DirectAcc,
) {
    match table {
        None => dot_direct_of::<false>(tiles, &[0; 16], scales, strip, x, row, acc),
        Some(table) => dot_direct_of::<true>(tiles, table, scales, strip, x, row, acc),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn dot_direct_of<const TABLE: bool>(
    tiles: [&[u8]; 2],
    table: &[u8; 16],
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    row: usize,
    acc: &mut DirectAcc,
) {
    let start = row * x.k + strip.index * STRIP_K;
    if strip.tiles == 2 && !scales.halves {
        direct_tiles::<TABLE, 2>(tiles, table, scales, 0, x, start, acc);
    } else {
        for tile in 0..strip.tiles {
            let at = if scales.halves { tile } else { 0 };
            direct_tiles::<TABLE, 1>([tiles[tile]; 2], table, scales, at, x, start + tile * TILE_K, acc);
        }
    }
}

/// The first `TILES` tiles, which share scale `at` of the weights; `start` is the first of their activations.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn direct_tiles<const TABLE: bool, const TILES: usize>(
    tiles: [&[u8]; 2],
    table: &[u8; 16],
    scales: &Scales,
    at: usize,
    x: &ActivationRows<'_>,
    start: usize,
    acc: &mut DirectAcc,
) {
    let (low, high, mask) = (indices(&SHIFTS_LOW), indices(&SHIFTS_HIGH), _mm512_set1_epi8(15));
    // SAFETY: 16 readable bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    let spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    let zeros = _mm512_set1_epi8(scales.zero as i8);
    let mut term = 0.0;
    let mut activations = [_mm512_setzero_si512(); TILES];
    // What the zero point takes off: per quad, as the sums of quads are.
    let mut starts = [_mm512_setzero_si512(); TILES];
    let mut factors = [_mm512_setzero_ps(); TILES];
    for i in 0..TILES {
        let codes = &x.codes[start + i * TILE_K..start + (i + 1) * TILE_K];
        // SAFETY: 16 readable bytes.
        let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
        activations[i] = _mm512_permutexvar_epi32(spread, _mm512_castsi128_si512(codes));
        let offset = _mm512_dpbusd_epi32(_mm512_setzero_si512(), zeros, activations[i]);
        starts[i] = _mm512_sub_epi32(_mm512_setzero_si512(), offset);
        let factor = x.scales[start / TILE_K + i];
        factors[i] = _mm512_set1_ps(factor);
        term += x.sums[start / TILE_K + i] as f32 * factor;
    }
    let words = [tiles[0].as_chunks::<64>().0, tiles[1].as_chunks::<64>().0];
    for t in 0..8 {
        let mut values = [_mm512_setzero_ps(); 2];
        for i in 0..TILES {
            let word = load_u8(&words[i][t]);
            let mut a = _mm512_and_si512(_mm512_multishift_epi64_epi8(low, word), mask);
            let mut b = _mm512_and_si512(_mm512_multishift_epi64_epi8(high, word), mask);
            if TABLE {
                (a, b) = (_mm512_shuffle_epi8(table, a), _mm512_shuffle_epi8(table, b));
            }
            let a = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(starts[i], a, activations[i]));
            let b = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(starts[i], b, activations[i]));
            values[0] = _mm512_fmadd_ps(a, factors[i], values[0]);
            values[1] = _mm512_fmadd_ps(b, factors[i], values[1]);
        }
        for h in 0..2 {
            // The same four columns for each of the four quads.
            // SAFETY: positions 32 h + 4 t to 32 h + 4 t + 3 are within the 64.
            let d = _mm512_broadcast_f32x4(unsafe { _mm_loadu_ps(scales.d[at].as_ptr().add(32 * h + 4 * t)) });
            let acc = acc.words[h][t].as_flattened_mut();
            if let Some(acc) = acc.first_chunk_mut::<LANES>() {
                store_f32(acc, _mm512_fmadd_ps(values[h], d, load_f32(acc)));
            }
        }
    }
    if scales.min {
        let sum = _mm512_set1_ps(term);
        let m = quarters(&scales.m[at]);
        for (terms, m) in quarters_mut(&mut acc.terms).iter_mut().zip(m) {
            store_f32(terms, _mm512_fmadd_ps(load_f32(m), sum, load_f32(terms)));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn gather_direct(direct: &DirectAcc) -> Acc {
    let mut acc = Acc(direct.terms);
    for h in 0..2 {
        for t in 0..8 {
            let mut sum = _mm_setzero_ps();
            for quad in &direct.words[h][t] {
                // SAFETY: 4 readable floats.
                sum = _mm_add_ps(sum, unsafe { _mm_loadu_ps(quad.as_ptr()) });
            }
            let at = 32 * h + 4 * t;
            // SAFETY: positions at to at + 3 are within the 64.
            unsafe {
                let to = acc.0.as_mut_ptr().add(at);
                _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), sum));
            }
        }
    }
    acc
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn store(acc: &Acc, out: &mut [f32; TILE_N]) {
    let acc = quarters(&acc.0);
    let acc = [load_f32(&acc[0]), load_f32(&acc[1]), load_f32(&acc[2]), load_f32(&acc[3])];
    let out = quarters_mut(out);
    // Column 16 j + 8 h + t is at 4 t + j of register 2 h + t / 4: eight t of j, then eight of j + 1.
    let first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    for pair in 0..2 {
        let pick = _mm512_add_epi32(first, _mm512_set1_epi32(2 * pair));
        let low = _mm512_permutex2var_ps(acc[0], pick, acc[1]);
        let high = _mm512_permutex2var_ps(acc[2], pick, acc[3]);
        store_f32(&mut out[2 * pair as usize], _mm512_shuffle_f32x4::<0x44>(low, high));
        store_f32(&mut out[2 * pair as usize + 1], _mm512_shuffle_f32x4::<0xEE>(low, high));
    }
}

/// [`FRAGMENT_ROW`] for a byte shuffle.
const FRAGMENT_BYTES: [u8; TILE_K] = {
    let mut table = [0; TILE_K];
    let mut i = 0;
    while i < TILE_K {
        table[i] = FRAGMENT_ROW[i] as u8;
        i += 1;
    }
    table
};

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn quantise_row(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
    // SAFETY: 16 readable bytes.
    let order = unsafe { _mm_loadu_si128(FRAGMENT_BYTES.as_ptr().cast()) };
    let codes = codes.as_chunks_mut::<ACTIVATION_BLOCK>().0;
    for (block, ((codes, scale), sum)) in codes.iter_mut().zip(scales).zip(sums).enumerate() {
        let values = load_up_to(x, block * ACTIVATION_BLOCK);
        // As integers, so that a NaN is the largest of all.
        let bits = _mm512_castps_si512(_mm512_abs_ps(values));
        let (d, inverse) = scale_of(f32::from_bits(_mm512_reduce_max_epu32(bits)));
        *scale = d;
        let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(inverse)));
        let bytes = _mm512_cvtsepi32_epi8(rounded);
        // SAFETY: 16 writable bytes.
        unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm_shuffle_epi8(bytes, order)) };
        // Sums of bytes raised by 128, in two halves.
        let raised = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
        *sum = _mm_cvtsi128_si32(raised) + _mm_extract_epi32::<2>(raised) - 128 * ACTIVATION_BLOCK as i32;
    }
}

/// Sixteen floats from `at` on, zeros beyond the end.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_up_to(x: &[f32], at: usize) -> __m512 {
    let rest = x.get(at..).unwrap_or(&[]);
    match rest.first_chunk::<LANES>() {
        Some(values) => load_f32(values),
        // SAFETY: only the lanes of existing elements are read.
        None => unsafe { _mm512_maskz_loadu_ps(mask_of(rest.len()), rest.as_ptr()) },
    }
}

/// The first `len` lanes; `len` is below 16.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn mask_of(len: usize) -> __mmask16 {
    ((1u32 << len) - 1) as __mmask16
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn dot_rows(
    weight: &RowsWeight<'_>,
    columns: Range<usize>,
    x: &[f32],
    rows: Range<usize>,
) -> [[f32; ROWS_N]; ROWS_M] {
    let mut dots = [[0.0; ROWS_N]; ROWS_M];
    match rows.len() {
        1 => dot_rows_of::<1>(weight, columns, x, rows.start, &mut dots),
        2 => dot_rows_of::<2>(weight, columns, x, rows.start, &mut dots),
        3 => dot_rows_of::<3>(weight, columns, x, rows.start, &mut dots),
        _ => dot_rows_of::<4>(weight, columns, x, rows.start, &mut dots),
    }
    dots
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn dot_rows_of<const R: usize>(
    weight: &RowsWeight<'_>,
    columns: Range<usize>,
    x: &[f32],
    row: usize,
    dots: &mut [[f32; ROWS_N]; ROWS_M],
) {
    let k = weight.k;
    // Where fewer rows of weights are left, the last is read again and its products ignored.
    let data: [&[u8]; ROWS_N] = std::array::from_fn(|n| weight.row((columns.start + n).min(columns.end - 1)));
    let x: [&[f32]; R] = std::array::from_fn(|r| &x[(row + r) * k..(row + r + 1) * k]);
    let mut sums = [[_mm512_setzero_ps(); ROWS_N]; R];
    for at in (0..k).step_by(LANES) {
        let mut weights = [_mm512_setzero_ps(); ROWS_N];
        for n in 0..ROWS_N {
            weights[n] = widen_up_to(weight.dtype, data[n], at);
        }
        for r in 0..R {
            let x = load_up_to(x[r], at);
            for n in 0..ROWS_N {
                sums[r][n] = _mm512_fmadd_ps(x, weights[n], sums[r][n]);
            }
        }
    }
    for r in 0..R {
        for n in 0..ROWS_N {
            dots[r][n] = _mm512_reduce_add_ps(sums[r][n]);
        }
    }
}

/// Sixteen elements from `at` on as f32, zeros beyond the end.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn widen_up_to(dtype: FloatType, data: &[u8], at: usize) -> __m512 {
    let rest = &data[at * dtype.bytes()..];
    match dtype {
        FloatType::F32 => {
            let mask = mask_of_up_to_16(rest.len() / 4);
            // SAFETY: only the lanes of existing elements are read.
            unsafe { _mm512_maskz_loadu_ps(mask, rest.as_ptr().cast()) }
        }
        FloatType::F16 => {
            let mask = mask_of_up_to_16(rest.len() / 2);
            // SAFETY: only the lanes of existing elements are read.
            _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, rest.as_ptr().cast()) })
        }
        FloatType::Bf16 => {
            let mask = mask_of_up_to_16(rest.len() / 2);
            // SAFETY: only the lanes of existing elements are read.
            let bits = unsafe { _mm256_maskz_loadu_epi16(mask, rest.as_ptr().cast()) };
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn mask_of_up_to_16(len: usize) -> __mmask16 {
    if len >= LANES { __mmask16::MAX } else { mask_of(len) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn widen_f16(bits: &[u16], out: &mut [f32]) {
    let (chunks, rest) = bits.as_chunks::<LANES>();
    let (wide, tail) = out.as_chunks_mut::<LANES>();
    for (bits, out) in chunks.iter().zip(wide) {
        // SAFETY: 32 readable bytes.
        store_f32(out, _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) }));
    }
    super::portable::widen_f16(rest, tail);
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn narrow_f16(values: &[f32], out: &mut [u16]) {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let (wide, tail) = out.as_chunks_mut::<LANES>();
    for (values, out) in chunks.iter().zip(wide) {
        let bits = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(load_f32(values));
        // SAFETY: 32 writable bytes.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bits) };
    }
    super::portable::narrow_f16(rest, tail);
}
