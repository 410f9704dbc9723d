//! NVFP4: E2M1 codes, an E4M3 scale per group of 16 (or 32) along K, one f32 scale per tensor.
//!
//! Inputs: packed weight U8 `[N, K/2]` (low nibble first), block scales E4M3 `[N, K/group]`, global scale F32 (one
//! element). ModelOpt multiplies by the global scale, compressed-tensors divides by it; in f32 these differ, so they are
//! two formulas over the same planes. Source: NVIDIA ModelOpt 0.47 `nvfp4_tensor.py`, compressed-tensors 0.20.

use crate::codec::{Band, CodeRows, Codec, MatrixShape};
use crate::encoding::{EncodingSpec, MatrixRow, ScalePlane, ScaleType, Span};
use crate::float8::{E2M1, E4M3};
use crate::tile::CodePlane;

/// Input index of the packed codes.
const WEIGHT: usize = 0;
/// Input and plane index of the block scales and of the global scale.
const INPUT_SCALES: usize = 1;
const INPUT_GLOBAL: usize = 2;
const PLANE_SCALES: usize = 0;
const PLANE_GLOBAL: usize = 1;

const CODES: &[CodePlane] = &[CodePlane { name: "q4", bits: 4, shift: 0 }];
const SCALES: &[ScalePlane] = &[
    ScalePlane { name: "scales", dtype: ScaleType::E4M3, span: Span::Group },
    ScalePlane { name: "global", dtype: ScaleType::F32, span: Span::Part },
];

/// `w = e2m1(code) * (e4m3(scale) * global)`, each operation rounded to f32.
pub static MODELOPT_SPEC: EncodingSpec = EncodingSpec {
    decode: "nvfp4.modelopt@1",
    encoding: "e2m1",
    codes: CODES,
    scales: SCALES,
    min_compute_capability: 80,
    decode_row: |row, out| decode(row, out, |scale, global| scale * global),
};

/// `w = e2m1(code) * (e4m3(scale) / global)`, each operation rounded to f32.
pub static COMPRESSED_TENSORS_SPEC: EncodingSpec = EncodingSpec {
    decode: "nvfp4.compressed-tensors@1",
    encoding: "e2m1",
    codes: CODES,
    scales: SCALES,
    min_compute_capability: 80,
    decode_row: |row, out| decode(row, out, |scale, global| scale / global),
};

fn decode(row: &MatrixRow<'_>, out: &mut [f32], combine: impl Fn(f32, f32) -> f32) {
    let global = row.f32(PLANE_GLOBAL, 0);
    for (g, (codes, values)) in row.codes.chunks(row.group_size).zip(out.chunks_mut(row.group_size)).enumerate() {
        let scale = combine(E4M3[row.u8(PLANE_SCALES, g) as usize], global);
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = E2M1[(code & 15) as usize] * scale;
        }
    }
}

/// Codec of one way of storing NVFP4.
pub struct Nvfp4 {
    name: &'static str,
    spec: &'static EncodingSpec,
    /// Codes `[K/2, N]` and scales `[K/group, N]`, two codes along K in a byte.
    transposed: bool,
}

/// ModelOpt: `weight`, `weight_scale`, `weight_scale_2`.
pub static MODELOPT: Nvfp4 = Nvfp4 { name: "nvfp4.modelopt@1", spec: &MODELOPT_SPEC, transposed: false };
/// compressed-tensors: `weight_packed`, `weight_scale`, `weight_global_scale`.
pub static COMPRESSED_TENSORS: Nvfp4 =
    Nvfp4 { name: "nvfp4.compressed-tensors@1", spec: &COMPRESSED_TENSORS_SPEC, transposed: false };
/// ModelOpt on models with stacked experts (gpt-oss, Llama 4), one expert: `gate_up_proj`, `gate_up_proj_weight_scale`,
/// `gate_up_proj_weight_scale_2`.
pub static MODELOPT_TRANSPOSED: Nvfp4 =
    Nvfp4 { name: "nvfp4.modelopt.transposed@1", spec: &MODELOPT_SPEC, transposed: true };

impl Codec for Nvfp4 {
    fn name(&self) -> &'static str {
        self.name
    }

    fn spec(&self) -> &'static EncodingSpec {
        self.spec
    }

    fn inputs(&self) -> usize {
        3
    }

    fn input_bytes(&self, shape: &MatrixShape, input: usize) -> Option<u64> {
        let n = shape.n as u64;
        match input {
            WEIGHT => n.checked_mul(shape.k as u64 / 2),
            INPUT_SCALES => n.checked_mul(shape.k as u64 / shape.group_size as u64),
            _ => Some(4),
        }
    }

    fn codes16(&self, shape: &MatrixShape, inputs: &[&[u8]], row: usize, k0: usize, out: &mut [u8; 16]) {
        // K is a multiple of the group size and so of 16.
        let weight = inputs[WEIGHT];
        if self.transposed {
            let bytes: [u8; 8] = std::array::from_fn(|i| weight[(k0 / 2 + i) * shape.n + row]);
            return super::unpack_nibbles(&bytes, out);
        }
        super::unpack_nibbles(&weight[row * (shape.k / 2) + k0 / 2..][..8], out);
    }

    fn scale(&self, shape: &MatrixShape, inputs: &[&[u8]], plane: usize, row: usize, column: usize, out: &mut [u8]) {
        match plane {
            PLANE_SCALES if self.transposed => out[0] = inputs[INPUT_SCALES][column * shape.n + row],
            PLANE_SCALES => out[0] = inputs[INPUT_SCALES][row * (shape.k / shape.group_size) + column],
            _ => out.copy_from_slice(inputs[INPUT_GLOBAL]),
        }
    }

    fn code_rows<'a>(&self, _: &MatrixShape, inputs: &[&'a [u8]]) -> Option<CodeRows<'a>> {
        (!self.transposed).then_some(CodeRows::Nibbles(inputs[WEIGHT]))
    }

    fn scale_rows<'a>(&self, _: &MatrixShape, inputs: &[&'a [u8]], plane: usize) -> Option<&'a [u8]> {
        (!self.transposed && plane == PLANE_SCALES).then_some(inputs[INPUT_SCALES])
    }

    fn unit_rows(&self, _: &MatrixShape, input: usize) -> Option<usize> {
        (input != INPUT_GLOBAL && !self.transposed).then_some(1)
    }

    fn join(&self, shape: &MatrixShape, input: usize, band: &Band, out: &mut [u8]) {
        match input {
            WEIGHT if self.transposed => {
                let mut packed = vec![0; band.codes.len() / 2];
                super::pack_nibbles(&band.codes, &mut packed);
                super::transpose(&packed, band.rows, shape.k / 2, out);
            }
            INPUT_SCALES if self.transposed => {
                super::transpose(&band.scales[PLANE_SCALES], band.rows, shape.k / shape.group_size, out);
            }
            WEIGHT => super::pack_nibbles(&band.codes, out),
            INPUT_SCALES => out.copy_from_slice(&band.scales[PLANE_SCALES]),
            _ => out.copy_from_slice(band.row_scales(PLANE_GLOBAL, 0)),
        }
    }
}
