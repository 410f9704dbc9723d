//! Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: blocks of 32 with one f16 scale, and for the `_1` types one f16 minimum.

use super::{BlockFormat, BlockScales, high_nibbles, join_nibbles, low_nibbles};
use crate::encoding::{EncodingSpec, MatrixRow, ScalePlane, ScaleType, Span};
use crate::tile::CodePlane;

const Q4: CodePlane = CodePlane { name: "q4", bits: 4, shift: 0 };
const H1: CodePlane = CodePlane { name: "h1", bits: 1, shift: 4 };
const Q8: CodePlane = CodePlane { name: "q8", bits: 8, shift: 0 };
const D: ScalePlane = ScalePlane { name: "d", dtype: ScaleType::F16, span: Span::Group };
const M: ScalePlane = ScalePlane { name: "m", dtype: ScaleType::F16, span: Span::Group };

const GROUP: usize = 32;
/// Plane indices.
const PLANE_D: usize = 0;
const PLANE_M: usize = 1;

const fn spec(
    decode: &'static str,
    encoding: &'static str,
    codes: &'static [CodePlane],
    scales: &'static [ScalePlane],
    decode_row: fn(&MatrixRow<'_>, &mut [f32]),
) -> EncodingSpec {
    EncodingSpec { decode, encoding, codes, scales, min_compute_capability: 80, decode_row }
}

static Q4_0_SPEC: EncodingSpec = spec("q4_0.ggml@1", "q4_0", &[Q4], &[D], |row, out| decode_offset(row, out, 8.0));
static Q4_1_SPEC: EncodingSpec = spec("q4_1.ggml@1", "q4_1", &[Q4], &[D, M], decode_minimum);
static Q5_0_SPEC: EncodingSpec = spec("q5_0.ggml@1", "q5_0", &[Q4, H1], &[D], |row, out| decode_offset(row, out, 16.0));
static Q5_1_SPEC: EncodingSpec = spec("q5_1.ggml@1", "q5_1", &[Q4, H1], &[D, M], decode_minimum);
static Q8_0_SPEC: EncodingSpec = spec("q8_0.ggml@1", "q8_0", &[Q8], &[D], |row, out| decode_offset(row, out, 128.0));

/// `w = (code - offset) * d`.
fn decode_offset(row: &MatrixRow<'_>, out: &mut [f32], offset: f32) {
    for (g, (codes, values)) in row.codes.chunks(GROUP).zip(out.chunks_mut(GROUP)).enumerate() {
        let d = row.f16(PLANE_D, g);
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = (f32::from(code) - offset) * d;
        }
    }
}

/// `w = code * d + m`, two roundings.
fn decode_minimum(row: &MatrixRow<'_>, out: &mut [f32]) {
    for (g, (codes, values)) in row.codes.chunks(GROUP).zip(out.chunks_mut(GROUP)).enumerate() {
        let (d, m) = (row.f16(PLANE_D, g), row.f16(PLANE_M, g));
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = f32::from(code) * d + m;
        }
    }
}

/// Half `i` of 16 bytes of nibbles.
fn nibbles16(bytes: &[u8], i: usize, out: &mut [u8; 16]) {
    if i == 0 { low_nibbles(bytes, out) } else { high_nibbles(bytes, out) }
}

/// Adds the fifth bits of half `i`: bits `16 i ..` of a little-endian u32.
fn fifth_bits(word: &[u8], i: usize, out: &mut [u8; 16]) {
    let bits = u16::from_le_bytes([word[2 * i], word[2 * i + 1]]);
    for (j, code) in out.iter_mut().enumerate() {
        *code |= ((bits >> j & 1) as u8) << 4;
    }
}

fn join_fifth_bits(codes: &[u8], word: &mut [u8]) {
    let bits = codes.iter().enumerate().fold(0u32, |bits, (j, code)| bits | u32::from(code >> 4 & 1) << j);
    word.copy_from_slice(&bits.to_le_bytes());
}

/// The f16 planes stand at the start of every block, in the order of the planes.
fn leading_f16(block: &[u8], plane: usize, _: usize, out: &mut [u8]) {
    out.copy_from_slice(&block[2 * plane..2 * plane + 2]);
}

/// Block: d, 16 bytes of nibbles.
pub(super) static Q4_0: BlockFormat = BlockFormat {
    name: "q4_0.ggml@1",
    ggml_type: 2,
    weights: 32,
    bytes: 18,
    group_size: GROUP,
    spec: &Q4_0_SPEC,
    codes16: |block, i, out| nibbles16(&block[2..], i, out),
    scale: leading_f16,
    join: |codes, scales: &BlockScales<'_>, block| {
        block[..2].copy_from_slice(scales[PLANE_D]);
        join_nibbles(codes, &mut block[2..]);
    },
};

/// Block: d, m, 16 bytes of nibbles.
pub(super) static Q4_1: BlockFormat = BlockFormat {
    name: "q4_1.ggml@1",
    ggml_type: 3,
    weights: 32,
    bytes: 20,
    group_size: GROUP,
    spec: &Q4_1_SPEC,
    codes16: |block, i, out| nibbles16(&block[4..], i, out),
    scale: leading_f16,
    join: |codes, scales, block| {
        block[..2].copy_from_slice(scales[PLANE_D]);
        block[2..4].copy_from_slice(scales[PLANE_M]);
        join_nibbles(codes, &mut block[4..]);
    },
};

/// Block: d, 32 fifth bits, 16 bytes of nibbles.
pub(super) static Q5_0: BlockFormat = BlockFormat {
    name: "q5_0.ggml@1",
    ggml_type: 6,
    weights: 32,
    bytes: 22,
    group_size: GROUP,
    spec: &Q5_0_SPEC,
    codes16: |block, i, out| {
        nibbles16(&block[6..], i, out);
        fifth_bits(&block[2..6], i, out);
    },
    scale: leading_f16,
    join: |codes, scales, block| {
        block[..2].copy_from_slice(scales[PLANE_D]);
        join_fifth_bits(codes, &mut block[2..6]);
        join_nibbles(codes, &mut block[6..]);
    },
};

/// Block: d, m, 32 fifth bits, 16 bytes of nibbles.
pub(super) static Q5_1: BlockFormat = BlockFormat {
    name: "q5_1.ggml@1",
    ggml_type: 7,
    weights: 32,
    bytes: 24,
    group_size: GROUP,
    spec: &Q5_1_SPEC,
    codes16: |block, i, out| {
        nibbles16(&block[8..], i, out);
        fifth_bits(&block[4..8], i, out);
    },
    scale: leading_f16,
    join: |codes, scales, block| {
        block[..2].copy_from_slice(scales[PLANE_D]);
        block[2..4].copy_from_slice(scales[PLANE_M]);
        join_fifth_bits(codes, &mut block[4..8]);
        join_nibbles(codes, &mut block[8..]);
    },
};

/// Block: d, 32 signed bytes. The code is the byte with its top bit flipped (biased by 128, as Marlin's 8-bit kernels expect).
pub(super) static Q8_0: BlockFormat = BlockFormat {
    name: "q8_0.ggml@1",
    ggml_type: 8,
    weights: 32,
    bytes: 34,
    group_size: GROUP,
    spec: &Q8_0_SPEC,
    codes16: |block, i, out| {
        for (code, byte) in out.iter_mut().zip(&block[2 + 16 * i..]) {
            *code = byte ^ 0x80;
        }
    },
    scale: leading_f16,
    join: |codes, scales, block| {
        block[..2].copy_from_slice(scales[PLANE_D]);
        for (byte, code) in block[2..].iter_mut().zip(codes) {
            *byte = code ^ 0x80;
        }
    },
};
