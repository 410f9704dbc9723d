//! Microscaling formats: E2M1 or E4M3 codes with an E8M0 scale per 32 along K.
//!
//! Inputs: packed weight U8 `[N, K/2]` (low nibble first; gpt-oss's `[N, K/32, 16]` blocks are the same bytes) or F8_E4M3
//! `[N, K]`, scales U8 or F8_E8M0 `[N, K/32]`. Exponent 0 is 2^-127 here; ggml's MXFP4 has tables of its own. Sources: OCP
//! Microscaling Formats 1.0, ModelOpt 0.47 `mxfp4_tensor.py` and `mxfp8_tensor.py`, transformers 5 `mxfp4.py`.

use crate::codec::{Band, CodeRows, Codec, MatrixShape};
use crate::encoding::{EncodingSpec, MatrixRow, ScalePlane, ScaleType, Span};
use crate::float8::{E2M1, E4M3, e8m0};
use crate::tile::CodePlane;

const WEIGHT: usize = 0;
const SCALES: &[ScalePlane] = &[ScalePlane { name: "scales", dtype: ScaleType::E8M0, span: Span::Group }];

/// `w = e2m1(code) * 2^(scale - 127)`, rounded once to f32 (exact but for underflow).
pub static MXFP4_SPEC: EncodingSpec = EncodingSpec {
    decode: "mxfp4@1",
    encoding: "e2m1",
    codes: &[CodePlane { name: "q4", bits: 4, shift: 0 }],
    scales: SCALES,
    min_compute_capability: 80,
    decode_row: |row, out| decode(row, out, |code| E2M1[(code & 15) as usize]),
};

/// `w = e4m3(code) * 2^(scale - 127)`, rounded once to f32 (exact but for underflow).
pub static MXFP8_SPEC: EncodingSpec = EncodingSpec {
    decode: "mxfp8@1",
    encoding: "e4m3",
    codes: &[CodePlane { name: "q8", bits: 8, shift: 0 }],
    scales: SCALES,
    min_compute_capability: 80,
    decode_row: |row, out| decode(row, out, |code| E4M3[code as usize]),
};

fn decode(row: &MatrixRow<'_>, out: &mut [f32], value_of: impl Fn(u8) -> f32) {
    for (g, (codes, values)) in row.codes.chunks(row.group_size).zip(out.chunks_mut(row.group_size)).enumerate() {
        let scale = e8m0(row.u8(0, g));
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = value_of(code) * scale;
        }
    }
}

/// Codec of one of the two formats.
pub struct Mx {
    spec: &'static EncodingSpec,
}

/// E2M1 codes.
pub static MXFP4: Mx = Mx { spec: &MXFP4_SPEC };
/// E4M3 codes.
pub static MXFP8: Mx = Mx { spec: &MXFP8_SPEC };

impl Mx {
    fn packed(&self) -> bool {
        self.spec.codes[0].bits == 4
    }
}

impl Codec for Mx {
    fn name(&self) -> &'static str {
        self.spec.decode
    }

    fn spec(&self) -> &'static EncodingSpec {
        self.spec
    }

    fn inputs(&self) -> usize {
        2
    }

    fn input_bytes(&self, shape: &MatrixShape, input: usize) -> Option<u64> {
        let k = shape.k as u64;
        let row = match input {
            WEIGHT if self.packed() => k / 2,
            WEIGHT => k,
            _ => k / shape.group_size as u64,
        };
        row.checked_mul(shape.n as u64)
    }

    fn codes16(&self, shape: &MatrixShape, inputs: &[&[u8]], row: usize, k0: usize, out: &mut [u8; 16]) {
        // K is a multiple of the group size and so of 16.
        let at = row * shape.k + k0;
        if self.packed() {
            super::unpack_nibbles(&inputs[WEIGHT][at / 2..][..8], out);
        } else {
            out.copy_from_slice(&inputs[WEIGHT][at..at + 16]);
        }
    }

    fn scale(&self, shape: &MatrixShape, inputs: &[&[u8]], _: usize, row: usize, column: usize, out: &mut [u8]) {
        out[0] = inputs[1][row * (shape.k / shape.group_size) + column];
    }

    fn code_rows<'a>(&self, _: &MatrixShape, inputs: &[&'a [u8]]) -> Option<CodeRows<'a>> {
        let rows = inputs[WEIGHT];
        Some(if self.packed() { CodeRows::Nibbles(rows) } else { CodeRows::Bytes(rows) })
    }

    fn scale_rows<'a>(&self, _: &MatrixShape, inputs: &[&'a [u8]], _: usize) -> Option<&'a [u8]> {
        Some(inputs[1])
    }

    fn unit_rows(&self, _: &MatrixShape, _: usize) -> Option<usize> {
        Some(1)
    }

    fn join(&self, _: &MatrixShape, input: usize, band: &Band, out: &mut [u8]) {
        match input {
            WEIGHT if self.packed() => super::pack_nibbles(&band.codes, out),
            WEIGHT => out.copy_from_slice(&band.codes),
            _ => out.copy_from_slice(&band.scales[0]),
        }
    }
}
