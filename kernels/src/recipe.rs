//! How fast kernels decode an encoding: `w = d[n] * (code - zero) + m[n]` with small integer codes, or
//! `w = d[n] * e4m3(code)`.
//!
//! Integer codes go through integer dot products where activations are quantised. An encoding without a recipe is
//! decoded to f32 by its own [`decode_row`](vt_bundle::encoding::EncodingSpec::decode_row), a strip at a time.
//! Recipes agree with `decode_row` up to the rounding of f32 products; the tests compare the two.

use vt_bundle::encoding::Span;
use vt_bundle::layout::TiledMatrix;
use vt_bundle::tile::{TILE_K, TILE_N};

use crate::context::Isa;
use crate::fragment::PANEL_COLUMN;
use crate::simd::{self, Scales};
use crate::weight::TiledWeight;

/// Codes along K of one strip: two tiles, the block in which activations are quantised.
pub(crate) const STRIP_K: usize = 2 * TILE_K;

/// What the codes stand for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Codes {
    /// Unsigned integers, after a table where there is one; `zero` is subtracted.
    Integer {
        /// Maps 4-bit codes.
        table: Option<&'static [u8; 16]>,
        /// The code that stands for zero.
        zero: i32,
    },
    /// 8-bit floats.
    E4m3,
}

/// Fills the scales of the strip at `k0` of tile column `tile_n`.
type ScaleRule = fn(weight: &TiledWeight<'_>, isa: Isa, tile_n: usize, k0: usize, scales: &mut Scales);

/// How an encoding is decoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recipe {
    /// What the codes are.
    pub codes: Codes,
    /// Whether the two tiles of a strip have scales of their own (groups of 16).
    pub halves: bool,
    /// Whether there is an additive term `m`.
    pub min: bool,
    /// Extent along K, a multiple of [`STRIP_K`], within which the scales stay the same.
    pub reach: usize,
    /// How the scales are computed.
    pub scales: ScaleRule,
}

/// `2 * value + 12` of the E2M1 codes: all are whole numbers in `0..=24`, with zero at 12.
const E2M1_TABLE: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

impl Recipe {
    /// The recipe for a matrix, where its encoding and group sizes have one.
    pub fn find(matrix: &TiledMatrix) -> Option<Self> {
        let zero = |zero| Codes::Integer { table: None, zero };
        let group = matrix.group_size as usize;
        let (codes, min, scales): (Codes, bool, ScaleRule) = match matrix.spec.decode {
            "ggml.q8_0@1" => (zero(128), false, scale_f16),
            "ggml.q4_1@1" => (zero(0), true, scale_and_min_f16),
            "nvfp4.modelopt@1" => {
                (Codes::Integer { table: Some(&E2M1_TABLE), zero: 12 }, false, |w, isa, tile_n, k0, out| {
                    scale_e4m3(w, isa, tile_n, k0, out, |global| global * 0.5)
                })
            }
            "nvfp4.compressed-tensors@1" => {
                (Codes::Integer { table: Some(&E2M1_TABLE), zero: 12 }, false, |w, isa, tile_n, k0, out| {
                    scale_e4m3(w, isa, tile_n, k0, out, |global| 0.5 / global)
                })
            }
            _ => return None,
        };
        let halves = group == TILE_K;
        if !halves && !group.is_multiple_of(STRIP_K) {
            return None;
        }
        Some(Self { codes, halves, min, reach: group.max(STRIP_K), scales })
    }
}

/// The bytes of one group row of a [`Span::Group`] plane that belong to a tile column.
fn group_row<'a>(weight: &TiledWeight<'a>, plane: usize, tile_n: usize, k0: usize) -> &'a [u8] {
    let scale = &weight.matrix.spec.scales[plane];
    debug_assert_eq!(scale.span, Span::Group);
    let row = k0 / weight.matrix.group_size as usize;
    let at = row * weight.matrix.padded_n() as usize + tile_n * TILE_N;
    let size = scale.dtype.bytes();
    &weight.scales[plane][at * size..(at + TILE_N) * size]
}

/// Plane 0: f16 scales of groups of 32 or more.
fn scale_f16(weight: &TiledWeight<'_>, isa: Isa, tile_n: usize, k0: usize, scales: &mut Scales) {
    simd::grouped_f16(isa, group_row(weight, 0, tile_n, k0), &mut scales.d[0]);
}

/// Plane 0: f16 scales, plane 1: f16 minima, of groups of 32 or more.
fn scale_and_min_f16(weight: &TiledWeight<'_>, isa: Isa, tile_n: usize, k0: usize, scales: &mut Scales) {
    simd::grouped_f16(isa, group_row(weight, 0, tile_n, k0), &mut scales.d[0]);
    simd::grouped_f16(isa, group_row(weight, 1, tile_n, k0), &mut scales.m[0]);
}

/// Plane 0: E4M3 scales of groups of 16 or more; plane 1: one f32 per part, made a factor by `factor`.
fn scale_e4m3(
    weight: &TiledWeight<'_>,
    isa: Isa,
    tile_n: usize,
    k0: usize,
    scales: &mut Scales,
    factor: impl Fn(f32) -> f32,
) {
    let part = weight.matrix.part_of((tile_n * TILE_N) as u64);
    let global = &weight.scales[1][4 * part..4 * part + 4];
    let factor = factor(f32::from_le_bytes([global[0], global[1], global[2], global[3]]));
    let group = weight.matrix.group_size as usize;
    let k = weight.matrix.k as usize;
    for (half, d) in scales.d.iter_mut().enumerate() {
        let k0 = k0 + half * TILE_K;
        // The second half lies in the same group where groups are longer, and nowhere where K ends.
        if half == 1 && (group > TILE_K || k0 >= k) {
            break;
        }
        simd::grouped_e4m3(isa, group_row(weight, 0, tile_n, k0), factor, d);
    }
}

/// Scales of any plane by the geometry's own index, for spans that change rarely.
#[allow(dead_code)]
pub(crate) fn scale_by_index(
    weight: &TiledWeight<'_>,
    plane: usize,
    tile_n: usize,
    column: usize,
    get: impl Fn(&[u8], usize) -> f32,
    out: &mut [f32; TILE_N],
) {
    let scale = &weight.matrix.spec.scales[plane];
    for (value, c) in out.iter_mut().zip(PANEL_COLUMN) {
        let row = tile_n * TILE_N + c;
        let part = &weight.matrix.parts[weight.matrix.part_of(row as u64)];
        // Rows of padding have no blocks of their own; any scale does, since nobody reads their products.
        let row = (row as u64).min(part.start + part.rows - 1);
        let at = weight.matrix.scale_index(scale, row, column as u64) as usize;
        *value = get(weight.scales[plane], at);
    }
}
