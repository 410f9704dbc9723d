//! Integer weights: unsigned codes with a fixed or stored zero point and float scales along K.
//!
//! Whatever the storage, the planes hold `q` in 0..=15 or 0..=255, as Marlin's `u4b8`, `u8b128` and `u4` do: two's complement
//! codes have their sign bit turned, which is undone on the way back. A scale per row is a group of K. Sources: ModelOpt
//! 0.47 `quant_utils.py` (INT4), compressed-tensors 0.20 `pack_quantized.py`, AutoGPTQ and AutoAWQ `qlinear`.

use crate::codec::{Band, Codec, MatrixShape};
use crate::encoding::{EncodingSpec, MatrixRow, ScalePlane, ScaleType, Span};
use crate::tile::CodePlane;

const Q4: &[CodePlane] = &[CodePlane { name: "q4", bits: 4, shift: 0 }];
const Q8: &[CodePlane] = &[CodePlane { name: "q8", bits: 8, shift: 0 }];

const WEIGHT: usize = 0;
const INPUT_SCALES: usize = 1;
const PLANE_SCALES: usize = 0;
const PLANE_ZEROS: usize = 1;

/// `w = (q - zero) * scale` with one scale (and zero point) per `group_size` codes, or per part.
fn decode(
    row: &MatrixRow<'_>,
    out: &mut [f32],
    group_size: usize,
    zero: impl Fn(usize) -> i32,
    scale: impl Fn(usize) -> f32,
) {
    for (g, (codes, values)) in row.codes.chunks(group_size).zip(out.chunks_mut(group_size)).enumerate() {
        let (zero, scale) = (zero(g), scale(g));
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = (i32::from(code) - zero) as f32 * scale;
        }
    }
}

/// Where the codes and zero points of a format lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    /// U8 `[N/2, K]`, row 2i low, row 2i+1 high, two's complement.
    PairedRows,
    /// I8 `[N, K]`; zero points I8 like the scales, `[N, G]`.
    Bytes,
    /// I32 words along K, `[N, K / per word]`; zero points packed along N, `[N / per word, G]`.
    WordsAlongK,
    /// I32 words along K, `[K / per word, N]`; scales `[G, N]`; zero points packed along N, `[G, N / per word]`.
    Gptq,
    /// I32 words along N in AWQ's order, `[K, N / per word]`; scales `[G, N]`; zero points `[G, N / per word]`.
    Awq,
}

/// Codec of one storage format with one type of scales.
pub struct Integer {
    name: &'static str,
    spec: &'static EncodingSpec,
    storage: Storage,
}

/// Number of codecs with one type of scales.
pub(super) const COUNT: usize = 14;

/// Specs and codecs with one type of scales.
macro_rules! with_scales {
    ($module:ident, $suffix:literal, $dtype:ident, $get:ident) => {
        #[doc = concat!("Integer encodings with ", $suffix, " scales.")]
        pub mod $module {
            use super::*;

            const SCALES: ScalePlane = ScalePlane { name: "scales", dtype: ScaleType::$dtype, span: Span::Group };
            const ZEROS: ScalePlane = ScalePlane { name: "zeros", dtype: ScaleType::U8, span: Span::Group };
            const TENSOR: ScalePlane = ScalePlane { name: "scales", dtype: ScaleType::$dtype, span: Span::Part };

            const fn spec(
                decode: &'static str,
                encoding: &'static str,
                codes: &'static [CodePlane],
                scales: &'static [ScalePlane],
                decode_row: fn(&MatrixRow<'_>, &mut [f32]),
            ) -> EncodingSpec {
                EncodingSpec { decode, encoding, codes, scales, min_compute_capability: 80, decode_row }
            }

            fn fixed<const ZERO: i32>(row: &MatrixRow<'_>, out: &mut [f32]) {
                decode(row, out, row.group_size, |_| ZERO, |g| row.$get(PLANE_SCALES, g));
            }

            fn stored<const MORE: i32>(row: &MatrixRow<'_>, out: &mut [f32]) {
                let zero = |g| i32::from(row.u8(PLANE_ZEROS, g)) + MORE;
                decode(row, out, row.group_size, zero, |g| row.$get(PLANE_SCALES, g));
            }

            fn tensor(row: &MatrixRow<'_>, out: &mut [f32]) {
                decode(row, out, out.len().max(1), |_| 128, |_| row.$get(PLANE_SCALES, 0));
            }

            /// `w = (q - 8) * scale`.
            pub static SYMMETRIC4: EncodingSpec =
                spec(concat!("int4.symmetric.", $suffix, "@1"), "u4b8", Q4, &[SCALES], fixed::<8>);
            /// `w = (q - 128) * scale`.
            pub static SYMMETRIC8: EncodingSpec =
                spec(concat!("int8.symmetric.", $suffix, "@1"), "u8b128", Q8, &[SCALES], fixed::<128>);
            /// `w = (q - 128) * scale`, one scale for the tensor.
            pub static TENSOR8: EncodingSpec =
                spec(concat!("int8.symmetric.tensor.", $suffix, "@1"), "u8b128", Q8, &[TENSOR], tensor);
            /// `w = (q - zero) * scale`.
            pub static ZEROS4: EncodingSpec =
                spec(concat!("int4.zeros.", $suffix, "@1"), "u4", Q4, &[SCALES, ZEROS], stored::<0>);
            /// `w = (q - zero) * scale`.
            pub static ZEROS8: EncodingSpec =
                spec(concat!("int8.zeros.", $suffix, "@1"), "u8", Q8, &[SCALES, ZEROS], stored::<0>);
            /// `w = (q - (zero + 1)) * scale`: GPTQ's first form.
            pub static MINUS_ONE4: EncodingSpec =
                spec(concat!("int4.zeros-minus-one.", $suffix, "@1"), "u4", Q4, &[SCALES, ZEROS], stored::<1>);
            /// `w = (q - (zero + 1)) * scale`: GPTQ's first form.
            pub static MINUS_ONE8: EncodingSpec =
                spec(concat!("int8.zeros-minus-one.", $suffix, "@1"), "u8", Q8, &[SCALES, ZEROS], stored::<1>);

            /// Encodings with this type of scales.
            pub(crate) const SPECS: [&EncodingSpec; 7] =
                [&SYMMETRIC4, &SYMMETRIC8, &TENSOR8, &ZEROS4, &ZEROS8, &MINUS_ONE4, &MINUS_ONE8];

            const fn codec(name: &'static str, spec: &'static EncodingSpec, storage: Storage) -> Integer {
                Integer { name, spec, storage }
            }

            /// Storage formats with this type of scales.
            pub static CODECS: [Integer; COUNT] = [
                codec(concat!("int4.modelopt.", $suffix, "@1"), &SYMMETRIC4, Storage::PairedRows),
                codec(concat!("int8.", $suffix, "@1"), &SYMMETRIC8, Storage::Bytes),
                codec(concat!("int8.tensor.", $suffix, "@1"), &TENSOR8, Storage::Bytes),
                codec(concat!("int8.zeros.", $suffix, "@1"), &ZEROS8, Storage::Bytes),
                codec(concat!("int4.packed.", $suffix, "@1"), &SYMMETRIC4, Storage::WordsAlongK),
                codec(concat!("int8.packed.", $suffix, "@1"), &SYMMETRIC8, Storage::WordsAlongK),
                codec(concat!("int4.packed.zeros.", $suffix, "@1"), &ZEROS4, Storage::WordsAlongK),
                codec(concat!("int8.packed.zeros.", $suffix, "@1"), &ZEROS8, Storage::WordsAlongK),
                codec(concat!("int4.gptq.", $suffix, "@1"), &MINUS_ONE4, Storage::Gptq),
                codec(concat!("int8.gptq.", $suffix, "@1"), &MINUS_ONE8, Storage::Gptq),
                codec(concat!("int4.gptq-v2.", $suffix, "@1"), &ZEROS4, Storage::Gptq),
                codec(concat!("int8.gptq-v2.", $suffix, "@1"), &ZEROS8, Storage::Gptq),
                codec(concat!("int4.awq.", $suffix, "@1"), &ZEROS4, Storage::Awq),
                codec(concat!("int8.awq.", $suffix, "@1"), &ZEROS8, Storage::Awq),
            ];
        }
    };
}

with_scales!(f32, "f32", F32, f32);
with_scales!(bf16, "bf16", Bf16, bf16);
with_scales!(f16, "f16", F16, f16);

impl Integer {
    fn bits(&self) -> usize {
        self.spec.codes[0].bits as usize
    }

    /// Codes of one 32-bit word.
    fn per_word(&self) -> usize {
        32 / self.bits()
    }

    fn scale_bytes(&self) -> usize {
        self.spec.scales[PLANE_SCALES].dtype.bytes()
    }

    fn columns_of_scales(&self, shape: &MatrixShape) -> usize {
        match self.spec.scales[PLANE_SCALES].span {
            Span::Group => shape.k / shape.group_size,
            _ => 1,
        }
    }

    /// Word and field of the code at row `n`, column `k`.
    fn code_at(&self, shape: &MatrixShape, n: usize, k: usize) -> (usize, usize) {
        let per_word = self.per_word();
        match self.storage {
            Storage::Gptq => (k / per_word * shape.n + n, k % per_word),
            Storage::Awq => (k * (shape.n / per_word) + n / per_word, awq_field(n % per_word, per_word)),
            _ => (n * (shape.k / per_word) + k / per_word, k % per_word),
        }
    }

    /// Word and field of the zero point of row `n` and group `g`, of `groups`.
    fn zero_at(&self, shape: &MatrixShape, n: usize, g: usize, groups: usize) -> (usize, usize) {
        let per_word = self.per_word();
        match self.storage {
            Storage::Gptq => (g * (shape.n / per_word) + n / per_word, n % per_word),
            Storage::Awq => (g * (shape.n / per_word) + n / per_word, awq_field(n % per_word, per_word)),
            _ => (n / per_word * groups + g, n % per_word),
        }
    }

    fn get(&self, words: &[u8], (word, field): (usize, usize)) -> u8 {
        let bit = field * self.bits();
        let byte = words[4 * word + bit / 8];
        if self.bits() == 8 { byte } else { (byte >> (bit % 8)) & 15 }
    }

    fn put(&self, words: &mut [u8], (word, field): (usize, usize), value: u8) {
        let bit = field * self.bits();
        words[4 * word + bit / 8] |= value << (bit % 8);
    }
}

/// The field of column `i` within an AWQ word: the packer takes columns in the order 0, 2, 4, 6, 1, 3, 5, 7 (0, 2, 1, 3).
fn awq_field(i: usize, per_word: usize) -> usize {
    i / 2 + (i % 2) * (per_word / 2)
}

impl Codec for Integer {
    fn name(&self) -> &'static str {
        self.name
    }

    fn spec(&self) -> &'static EncodingSpec {
        self.spec
    }

    fn inputs(&self) -> usize {
        1 + self.spec.scales.len()
    }

    fn input_bytes(&self, shape: &MatrixShape, input: usize) -> Option<u64> {
        let (n, k) = (shape.n as u64, shape.k as u64);
        match input {
            WEIGHT => n.checked_mul(k)?.checked_mul(self.bits() as u64).map(|bits| bits / 8),
            INPUT_SCALES => {
                let rows = if self.spec.scales[PLANE_SCALES].span == Span::Group { n } else { 1 };
                rows.checked_mul(self.columns_of_scales(shape) as u64)?.checked_mul(self.scale_bytes() as u64)
            }
            _ => n.checked_mul(k / shape.group_size as u64)?.checked_mul(self.bits() as u64).map(|bits| bits / 8),
        }
    }

    fn codes16(&self, shape: &MatrixShape, inputs: &[&[u8]], row: usize, k0: usize, out: &mut [u8; 16]) {
        let width = (shape.k - k0).min(16);
        let (codes, rest) = out.split_at_mut(width);
        rest.fill(0);
        match self.storage {
            Storage::PairedRows => {
                let bytes = &inputs[WEIGHT][row / 2 * shape.k + k0..][..width];
                for (code, &byte) in codes.iter_mut().zip(bytes) {
                    *code = (if row.is_multiple_of(2) { byte & 15 } else { byte >> 4 }) ^ 8;
                }
            }
            Storage::Bytes => {
                for (code, &byte) in codes.iter_mut().zip(&inputs[WEIGHT][row * shape.k + k0..]) {
                    *code = byte ^ 0x80;
                }
            }
            _ => {
                for (i, code) in codes.iter_mut().enumerate() {
                    *code = self.get(inputs[WEIGHT], self.code_at(shape, row, k0 + i));
                }
            }
        }
    }

    fn scale(&self, shape: &MatrixShape, inputs: &[&[u8]], plane: usize, row: usize, column: usize, out: &mut [u8]) {
        let groups = self.columns_of_scales(shape);
        if plane == PLANE_ZEROS {
            out[0] = match self.storage {
                Storage::Bytes => inputs[2][row * groups + column] ^ 0x80,
                _ => self.get(inputs[2], self.zero_at(shape, row, column, groups)),
            };
            return;
        }
        let index = match (self.spec.scales[PLANE_SCALES].span, self.storage) {
            (Span::Group, Storage::Gptq | Storage::Awq) => column * shape.n + row,
            (Span::Group, _) => row * groups + column,
            _ => 0,
        };
        out.copy_from_slice(&inputs[INPUT_SCALES][index * out.len()..][..out.len()]);
    }

    fn unit_rows(&self, _: &MatrixShape, input: usize) -> Option<usize> {
        match (self.storage, input) {
            (Storage::Gptq | Storage::Awq, _) => None,
            (_, INPUT_SCALES) => (self.spec.scales[PLANE_SCALES].span == Span::Group).then_some(1),
            (Storage::PairedRows, WEIGHT) => Some(2),
            (Storage::WordsAlongK, 2) => Some(self.per_word()),
            _ => Some(1),
        }
    }

    fn join(&self, shape: &MatrixShape, input: usize, band: &Band, out: &mut [u8]) {
        let (k, groups) = (shape.k, self.columns_of_scales(shape));
        match (input, self.storage) {
            (WEIGHT, Storage::PairedRows) => {
                for (bytes, rows) in out.chunks_exact_mut(k).zip(band.codes.chunks_exact(2 * k)) {
                    let (low, high) = rows.split_at(k);
                    for ((byte, low), high) in bytes.iter_mut().zip(low).zip(high) {
                        *byte = (low ^ 8) | (high ^ 8) << 4;
                    }
                }
            }
            (WEIGHT, Storage::Bytes) => {
                for (byte, code) in out.iter_mut().zip(&band.codes) {
                    *byte = code ^ 0x80;
                }
            }
            (WEIGHT, _) => {
                out.fill(0);
                for n in 0..band.rows {
                    for (i, &code) in band.row_codes(n, k).iter().enumerate() {
                        self.put(out, self.code_at(shape, n, i), code);
                    }
                }
            }
            (INPUT_SCALES, _) if self.spec.scales[PLANE_SCALES].span != Span::Group => {
                out.copy_from_slice(band.row_scales(PLANE_SCALES, 0));
            }
            (INPUT_SCALES, Storage::Gptq | Storage::Awq) => {
                let width = self.scale_bytes();
                for n in 0..band.rows {
                    for (g, element) in band.row_scales(PLANE_SCALES, n).chunks_exact(width).enumerate() {
                        out[(g * shape.n + n) * width..][..width].copy_from_slice(element);
                    }
                }
            }
            (INPUT_SCALES, _) => out.copy_from_slice(&band.scales[PLANE_SCALES]),
            (_, Storage::Bytes) => {
                for (byte, zero) in out.iter_mut().zip(&band.scales[PLANE_ZEROS]) {
                    *byte = zero ^ 0x80;
                }
            }
            (_, _) => {
                out.fill(0);
                for n in 0..band.rows {
                    for (g, &zero) in band.row_scales(PLANE_ZEROS, n).iter().enumerate() {
                        self.put(out, self.zero_at(shape, n, g, groups), zero);
                    }
                }
            }
        }
    }
}
