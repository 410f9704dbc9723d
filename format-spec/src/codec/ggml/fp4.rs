//! MXFP4 and NVFP4 as ggml defines them: E2M1 codes with E8M0 or unsigned E4M3 scales.
//!
//! They are encodings of their own. ggml's table holds doubled values and gives +0 for code 8, its MXFP4 scale is halved (so that
//! exponents 0 and 1 are subnormal f32), and its NVFP4 scale byte ignores bit 7 except that 0x7f is zero while 0xff is not.

use super::{BlockFormat, join_nibbles};
use crate::encoding::{EncodingSpec, ScalePlane, ScaleType, Span};
use crate::tile::CodePlane;

const Q4: CodePlane = CodePlane { name: "q4", bits: 4, shift: 0 };

/// Twice the E2M1 value of a code; code 8 is +0.
const DOUBLED: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// `w = doubled[code] * 2^(e - 128)`, groups of 32.
static MXFP4_SPEC: EncodingSpec = EncodingSpec {
    decode: "mxfp4.ggml@1",
    encoding: "e2m1",
    codes: &[Q4],
    scales: &[ScalePlane { name: "scales", dtype: ScaleType::E8M0, span: Span::Group }],
    min_compute_capability: 80,
    decode_row: |row, out| doubled(row.codes, out, 32, |g| half_e8m0(row.u8(0, g))),
};

/// `w = doubled[code] * (ue4m3(scale) * 0.5)`, groups of 16.
static NVFP4_SPEC: EncodingSpec = EncodingSpec {
    decode: "nvfp4.ggml@1",
    encoding: "e2m1",
    codes: &[Q4],
    scales: &[ScalePlane { name: "scales", dtype: ScaleType::U8, span: Span::Group }],
    min_compute_capability: 80,
    decode_row: |row, out| doubled(row.codes, out, 16, |g| half_ue4m3(row.u8(0, g))),
};

fn doubled(codes: &[u8], out: &mut [f32], group: usize, factor: impl Fn(usize) -> f32) {
    for (g, (codes, values)) in codes.chunks(group).zip(out.chunks_mut(group)).enumerate() {
        let scale = factor(g);
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = DOUBLED[usize::from(code & 15)] * scale;
        }
    }
}

/// `2^(e - 128)`.
pub fn half_e8m0(e: u8) -> f32 {
    match e {
        // Below the normal range of f32: one bit of the mantissa.
        0 | 1 => f32::from_bits(1 << (21 + e)),
        _ => f32::from_bits((u32::from(e) - 1) << 23),
    }
}

/// Half the value of ggml's unsigned E4M3 (bias 7).
pub fn half_ue4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(byte >> 3 & 15), u32::from(byte & 7));
    match (exponent, mantissa) {
        _ if byte == 0x7f => 0.0,
        // mantissa * 2^-9, halved.
        (0, _) => mantissa as f32 * f32::from_bits((127 - 10) << 23),
        // (1 + mantissa / 8) * 2^(exponent - 7), halved.
        _ => f32::from_bits((exponent + 127 - 8) << 23 | mantissa << 20),
    }
}

/// Block: e, 16 bytes of nibbles.
pub(super) static MXFP4: BlockFormat = BlockFormat {
    name: "mxfp4.ggml@1",
    ggml_type: 39,
    weights: 32,
    bytes: 17,
    group_size: 32,
    spec: &MXFP4_SPEC,
    codes16: |block, i, out| match i {
        0 => super::low_nibbles(&block[1..], out),
        _ => super::high_nibbles(&block[1..], out),
    },
    scale: |block, _, _, out| out[0] = block[0],
    join: |codes, scales, block| {
        block[0] = scales[0][0];
        join_nibbles(codes, &mut block[1..]);
    },
};

/// Block: four scales, 8 bytes of nibbles for each (low nibbles are the first eight codes).
pub(super) static NVFP4: BlockFormat = BlockFormat {
    name: "nvfp4.ggml@1",
    ggml_type: 40,
    weights: 64,
    bytes: 36,
    group_size: 16,
    spec: &NVFP4_SPEC,
    codes16: |block, i, out| {
        for (j, byte) in block[4 + 8 * i..][..8].iter().enumerate() {
            out[j] = byte & 15;
            out[j + 8] = byte >> 4;
        }
    },
    scale: |block, _, i, out| out[0] = block[i],
    join: |codes, scales, block| {
        block[..4].copy_from_slice(scales[0]);
        for (codes, bytes) in codes.chunks_exact(16).zip(block[4..].chunks_exact_mut(8)) {
            join_nibbles(codes, bytes);
        }
    },
};
