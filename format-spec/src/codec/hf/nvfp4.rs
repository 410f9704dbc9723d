//! NVFP4: E2M1 codes, an E4M3 scale per group of 16 (or 32) along K, one f32 scale per tensor.
//!
//! Inputs: packed weight U8 `[N, K/2]` (low nibble first), block scales E4M3 `[N, K/group]`, global scale F32 (one
//! element). ModelOpt multiplies by the global scale, compressed-tensors divides by it; in f32 these differ, so they are
//! two formulas over the same planes. Source: NVIDIA ModelOpt 0.47 `nvfp4_tensor.py`, compressed-tensors 0.20.

use crate::codec::{Band, Codec, MatrixShape};
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

/// Codec of one of the two writers.
pub struct Nvfp4 {
    name: &'static str,
    spec: &'static EncodingSpec,
}

/// ModelOpt: `weight`, `weight_scale`, `weight_scale_2`.
pub static MODELOPT: Nvfp4 = Nvfp4 { name: "nvfp4.modelopt@1", spec: &MODELOPT_SPEC };
/// compressed-tensors: `weight_packed`, `weight_scale`, `weight_global_scale`.
pub static COMPRESSED_TENSORS: Nvfp4 = Nvfp4 { name: "nvfp4.compressed-tensors@1", spec: &COMPRESSED_TENSORS_SPEC };

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
        let at = row * (shape.k / 2) + k0 / 2;
        for (pair, &byte) in out.chunks_exact_mut(2).zip(&inputs[WEIGHT][at..at + 8]) {
            pair[0] = byte & 15;
            pair[1] = byte >> 4;
        }
    }

    fn scale(&self, shape: &MatrixShape, inputs: &[&[u8]], plane: usize, row: usize, column: usize, out: &mut [u8]) {
        match plane {
            PLANE_SCALES => out[0] = inputs[INPUT_SCALES][row * (shape.k / shape.group_size) + column],
            _ => out.copy_from_slice(inputs[INPUT_GLOBAL]),
        }
    }

    fn unit_rows(&self, _: &MatrixShape, input: usize) -> Option<usize> {
        (input != INPUT_GLOBAL).then_some(1)
    }

    fn join(&self, _: &MatrixShape, input: usize, band: &Band, out: &mut [u8]) {
        match input {
            WEIGHT => {
                for (byte, pair) in out.iter_mut().zip(band.codes.chunks_exact(2)) {
                    *byte = pair[0] | pair[1] << 4;
                }
            }
            INPUT_SCALES => out.copy_from_slice(&band.scales[PLANE_SCALES]),
            _ => out.copy_from_slice(band.row_scales(PLANE_GLOBAL, 0)),
        }
    }
}
