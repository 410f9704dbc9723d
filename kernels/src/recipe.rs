//! How fast kernels decode an encoding: `w = d[n] * (code - zero) + m[n]` with small integer codes, or
//! `w = d[n] * e4m3(code)`.
//!
//! Integer codes go through integer dot products where activations are quantised. An encoding without a recipe is
//! decoded to f32 by its own [`decode_row`](vt_bundle::encoding::EncodingSpec::decode_row), a strip at a time.
//! Recipes agree with `decode_row` up to the rounding of f32 products; the tests compare the two.

use vt_bundle::codec::ggml::{half_e8m0, half_ue4m3};
use vt_bundle::encoding::{ScaleType, Span};
use vt_bundle::float8::{E4M3, e8m0};
use vt_bundle::layout::TiledMatrix;
use vt_bundle::tile::{ScaleOrder, TILE_K, TILE_N};

use crate::context::Isa;
use crate::fragment::PANEL_COLUMN;
use crate::simd::{self, Scales};
use crate::weight::{FloatType, TiledWeight};

/// Codes along K of one strip: two tiles, the shortest group of most encodings.
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

/// Computes the scales of a strip.
type ScaleRule = fn(strip: StripPlace<'_, '_>, scales: &mut Scales);

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
/// The values of ggml's IQ4 table plus 127.
const IQ4_TABLE: [u8; 16] = [0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240];

impl Recipe {
    /// The recipe for a matrix, where its encoding and group sizes have one.
    pub fn find(matrix: &TiledMatrix) -> Option<Self> {
        let zero = |zero| Codes::Integer { table: None, zero };
        let e2m1 = Codes::Integer { table: Some(&E2M1_TABLE), zero: 12 };
        let iq4 = Codes::Integer { table: Some(&IQ4_TABLE), zero: 127 };
        let (codes, min, scales): (Codes, bool, ScaleRule) = match matrix.spec.decode {
            "q4_0.ggml@1" => (zero(8), false, scale_f16),
            "q5_0.ggml@1" => (zero(16), false, scale_f16),
            "q8_0.ggml@1" => (zero(128), false, scale_f16),
            "iq4_nl.ggml@1" => (iq4, false, scale_f16),
            "q4_1.ggml@1" | "q5_1.ggml@1" => (zero(0), true, scale_and_min_f16),
            "q4_k.ggml@1" | "q5_k.ggml@1" => (zero(0), true, |strip, out| {
                strip.product(0, 2, f32::from, &mut out.d);
                strip.product(1, 3, |mn| -f32::from(mn), &mut out.m);
            }),
            "q2_k.ggml@1" => (zero(0), true, |strip, out| {
                strip.product(0, 1, |both| f32::from(both & 15), &mut out.d);
                strip.product(0, 2, |both| -f32::from(both >> 4), &mut out.m);
            }),
            "q3_k.ggml@1" => (zero(4), false, |strip, out| {
                strip.product(0, 1, |sc| f32::from(sc) - 32.0, &mut out.d);
            }),
            "q6_k.ggml@1" => (zero(32), false, |strip, out| {
                strip.product(0, 1, |sc| f32::from(sc.cast_signed()), &mut out.d);
            }),
            "iq4_xs.ggml@1" => (iq4, false, |strip, out| {
                strip.product(0, 1, |sc| f32::from(sc) - 32.0, &mut out.d);
            }),
            "mxfp4.ggml@1" => (e2m1, false, |strip, out| strip.bytes(0, half_e8m0, &mut out.d)),
            "nvfp4.ggml@1" => (e2m1, false, |strip, out| strip.bytes(0, half_ue4m3, &mut out.d)),
            "nvfp4.modelopt@1" => (e2m1, false, |strip, out| strip.e4m3(0, strip.part_f32(1) * 0.5, &mut out.d)),
            "nvfp4.compressed-tensors@1" => {
                (e2m1, false, |strip, out| strip.e4m3(0, 0.5 / strip.part_f32(1), &mut out.d))
            }
            "mxfp4@1" => (e2m1, false, |strip, out| strip.bytes(0, |e| 0.5 * e8m0(e), &mut out.d)),
            "mxfp8@1" => (Codes::E4m3, false, scale_alone),
            other => match other.strip_suffix("@1")?.rsplit_once('.')?.0 {
                "fp8.tensor" | "fp8.channel" | "fp8.block" => (Codes::E4m3, false, scale_alone),
                "int4.symmetric" => (zero(8), false, scale_alone),
                "int8.symmetric" | "int8.symmetric.tensor" => (zero(128), false, scale_alone),
                "int4.zeros" => (zero(8), true, |strip, out| strip.scale_and_zero(8.0, out)),
                "int8.zeros" => (zero(128), true, |strip, out| strip.scale_and_zero(128.0, out)),
                "int4.zeros-minus-one" => (zero(8), true, |strip, out| strip.scale_and_zero(7.0, out)),
                "int8.zeros-minus-one" => (zero(128), true, |strip, out| strip.scale_and_zero(127.0, out)),
                _ => return None,
            },
        };
        // Scales stay the same over the whole of K where nothing divides it.
        let (k, group) = (matrix.k as usize, matrix.group_size as usize);
        let mut reach = usize::MAX;
        for plane in matrix.spec.scales {
            let own = match plane.span {
                Span::Group => group,
                Span::Super(span) => span as usize,
                Span::Block => matrix.block[1] as usize,
                Span::Channel | Span::Part => continue,
            };
            reach = reach.min(if own >= k { usize::MAX } else { own });
        }
        let halves = reach == TILE_K;
        if reach != usize::MAX && !halves && !reach.is_multiple_of(STRIP_K) {
            return None;
        }
        Some(Self { codes, halves, min, reach: reach.max(STRIP_K), scales })
    }
}

/// The place of a strip: what a scale rule needs to find its elements.
#[derive(Clone, Copy)]
pub(crate) struct StripPlace<'w, 'a> {
    pub weight: &'w TiledWeight<'a>,
    pub isa: Isa,
    pub tile_n: usize,
    pub k0: usize,
}

impl StripPlace<'_, '_> {
    /// The bytes of a group or super-block plane that belong to the tile column at `k`.
    fn row(&self, plane: usize, k: usize) -> &[u8] {
        self.weight.scale_row(plane, k, self.tile_n).unwrap_or(&[0; 4 * TILE_N])
    }

    /// Where the scales of the strip begin along K: once, or at each tile where groups are of 16. The last tile of an
    /// odd number has no second.
    fn starts(&self) -> impl Iterator<Item = usize> + use<> {
        let (k0, k, group) = (self.k0, self.weight.matrix.k as usize, self.weight.matrix.group_size as usize);
        let second = (group == TILE_K && k0 + TILE_K < k).then_some(k0 + TILE_K);
        std::iter::once(k0).chain(second)
    }

    /// A group plane of f16.
    fn f16(&self, plane: usize, out: &mut [[f32; TILE_N]; 2]) {
        for (k, out) in self.starts().zip(out) {
            simd::grouped_f16(self.isa, self.row(plane, k), out);
        }
    }

    /// A group plane of E4M3, times `factor`.
    fn e4m3(&self, plane: usize, factor: f32, out: &mut [[f32; TILE_N]; 2]) {
        for (k, out) in self.starts().zip(out) {
            simd::grouped_e4m3(self.isa, self.row(plane, k), factor, out);
        }
    }

    /// A group plane of bytes.
    fn bytes(&self, plane: usize, value: impl Fn(u8) -> f32, out: &mut [[f32; TILE_N]; 2]) {
        let mut bytes = [0u8; TILE_N];
        for (k, out) in self.starts().zip(out) {
            simd::grouped_bytes(self.isa, self.row(plane, k), &mut bytes);
            out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = value(byte));
        }
    }

    /// Sub-scales of a k-quant, a group plane of bytes, times the super-blocks' f16.
    fn product(&self, plane: usize, super_plane: usize, value: impl Fn(u8) -> f32, out: &mut [[f32; TILE_N]; 2]) {
        let mut factors = [0.0f32; TILE_N];
        simd::grouped_f16(self.isa, self.row(super_plane, self.k0), &mut factors);
        self.bytes(plane, value, out);
        for (_, out) in self.starts().zip(out) {
            out.iter_mut().zip(factors).for_each(|(out, factor)| *out *= factor);
        }
    }

    /// A plane of floats of any type and span.
    fn floats(&self, plane: usize, out: &mut [[f32; TILE_N]; 2]) {
        let matrix = self.weight.matrix;
        let scale = &matrix.spec.scales[plane];
        let data = self.weight.scales[plane];
        let first = self.tile_n * TILE_N;
        let part_at = matrix.part_of(first as u64);
        match scale.span {
            Span::Group | Span::Super(_) if scale.dtype == ScaleType::F16 => self.f16(plane, out),
            Span::Group | Span::Super(_) => {
                for (k, out) in self.starts().zip(out) {
                    let row = self.row(plane, k);
                    for (out, c) in out.iter_mut().zip(PANEL_COLUMN) {
                        *out = float(scale.dtype, row, scale.order().position(c));
                    }
                }
            }
            Span::Part => out[0] = [float(scale.dtype, data, part_at); TILE_N],
            Span::Channel => {
                debug_assert_eq!(scale.order(), ScaleOrder::Natural);
                for (out, c) in out[0].iter_mut().zip(PANEL_COLUMN) {
                    *out = float(scale.dtype, data, first + c);
                }
            }
            Span::Block => {
                let part = &matrix.parts[part_at];
                let columns = matrix.scale_columns(scale) as usize;
                let column = self.k0 as u64 / matrix.block[1];
                let base = matrix.scale_index(scale, part.start, column) as usize;
                for (out, c) in out[0].iter_mut().zip(PANEL_COLUMN) {
                    // Rows of padding have no blocks; any scale does, since nobody reads their products.
                    let row = ((first + c) as u64 - part.start).min(part.rows - 1);
                    *out = float(scale.dtype, data, base + (row / matrix.block[0]) as usize * columns);
                }
            }
        }
    }

    /// Plane 0: floats, plane 1: zero points in bytes. The codes are taken relative to `middle` of their range, so that
    /// `m = (middle - zero) * d` stays small.
    fn scale_and_zero(&self, middle: f32, scales: &mut Scales) {
        self.floats(0, &mut scales.d);
        self.bytes(1, |zero| middle - f32::from(zero), &mut scales.m);
        for (m, d) in scales.m.as_flattened_mut().iter_mut().zip(scales.d.as_flattened()) {
            *m *= d;
        }
    }

    /// The f32 of the part that the tile column belongs to.
    fn part_f32(&self, plane: usize) -> f32 {
        let part = self.weight.matrix.part_of((self.tile_n * TILE_N) as u64);
        let s = &self.weight.scales[plane][4 * part..4 * part + 4];
        f32::from_le_bytes([s[0], s[1], s[2], s[3]])
    }
}

/// Element `i` of a plane, as f32.
fn float(dtype: ScaleType, data: &[u8], i: usize) -> f32 {
    match dtype {
        ScaleType::F32 => FloatType::F32.get(data, i),
        ScaleType::F16 => FloatType::F16.get(data, i),
        ScaleType::Bf16 => FloatType::Bf16.get(data, i),
        ScaleType::E4M3 => E4M3[usize::from(data[i])],
        ScaleType::E8M0 => e8m0(data[i]),
        ScaleType::U8 => f32::from(data[i]),
        ScaleType::I8 => f32::from(data[i].cast_signed()),
    }
}

/// Plane 0: scales of any kind.
fn scale_alone(strip: StripPlace<'_, '_>, scales: &mut Scales) {
    strip.floats(0, &mut scales.d);
}

/// Plane 0: f16 scales.
fn scale_f16(strip: StripPlace<'_, '_>, scales: &mut Scales) {
    strip.f16(0, &mut scales.d);
}

/// Plane 0: f16 scales, plane 1: f16 minima.
fn scale_and_min_f16(strip: StripPlace<'_, '_>, scales: &mut Scales) {
    strip.f16(0, &mut scales.d);
    strip.f16(1, &mut scales.m);
}
