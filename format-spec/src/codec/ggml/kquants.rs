//! Q2_K to Q6_K: super-blocks of 256 with f16 factors and small integer sub-scales.
//!
//! The factors stay apart (`d`, `dmin` per 256 weights; `sc`, `mn` per group), because their product does not fit f16. The six-bit
//! sub-scales of Q3_K, Q4_K and Q5_K take a byte each in the planes; those of Q2_K, two nibbles, stay in one byte.

use super::{BlockFormat, BlockScales};
use crate::encoding::{EncodingSpec, MatrixRow, ScalePlane, ScaleType, Span};
use crate::tile::CodePlane;

const SUPER: usize = 256;
const Q2: CodePlane = CodePlane { name: "q2", bits: 2, shift: 0 };
const Q4: CodePlane = CodePlane { name: "q4", bits: 4, shift: 0 };
/// Third bit over two.
const H1_OVER_2: CodePlane = CodePlane { name: "h1", bits: 1, shift: 2 };
/// Fifth bit over four.
const H1_OVER_4: CodePlane = CodePlane { name: "h1", bits: 1, shift: 4 };
/// Two bits over four.
const H2: CodePlane = CodePlane { name: "h2", bits: 2, shift: 4 };

const D: ScalePlane = ScalePlane { name: "d", dtype: ScaleType::F16, span: Span::Super(256) };
const DMIN: ScalePlane = ScalePlane { name: "dmin", dtype: ScaleType::F16, span: Span::Super(256) };
const SC: ScalePlane = ScalePlane { name: "sc", dtype: ScaleType::U8, span: Span::Group };
const SC_SIGNED: ScalePlane = ScalePlane { name: "sc", dtype: ScaleType::I8, span: Span::Group };
const SC_MN: ScalePlane = ScalePlane { name: "scmn", dtype: ScaleType::U8, span: Span::Group };
const MN: ScalePlane = ScalePlane { name: "mn", dtype: ScaleType::U8, span: Span::Group };

/// `w = (d * (scmn & 15)) * code - dmin * (scmn >> 4)`, groups of 16.
static Q2_K_SPEC: EncodingSpec = EncodingSpec {
    decode: "q2_k.ggml@1",
    encoding: "q2_k",
    codes: &[Q2],
    scales: &[SC_MN, D, DMIN],
    min_compute_capability: 80,
    decode_row: |row, out| {
        affine(row, out, 16, |g| {
            let both = row.u8(0, g);
            let s = g * 16 / SUPER;
            (row.f16(1, s) * f32::from(both & 15), row.f16(2, s) * f32::from(both >> 4))
        });
    },
};

/// `w = (d * (sc - 32)) * (code - 4)`, groups of 16.
static Q3_K_SPEC: EncodingSpec = EncodingSpec {
    decode: "q3_k.ggml@1",
    encoding: "q3_k",
    codes: &[Q2, H1_OVER_2],
    scales: &[SC, D],
    min_compute_capability: 80,
    decode_row: |row, out| {
        centred(row, out, 4.0, |g| row.f16(1, g * 16 / SUPER) * (f32::from(row.u8(0, g)) - 32.0));
    },
};

/// `w = (d * sc) * code - dmin * mn`, groups of 32.
static Q4_K_SPEC: EncodingSpec = EncodingSpec {
    decode: "q4_k.ggml@1",
    encoding: "q4_k",
    codes: &[Q4],
    scales: &[SC, MN, D, DMIN],
    min_compute_capability: 80,
    decode_row: decode_scale_and_minimum,
};

/// The formula of Q4_K with five-bit codes.
static Q5_K_SPEC: EncodingSpec = EncodingSpec {
    decode: "q5_k.ggml@1",
    encoding: "q5_k",
    codes: &[Q4, H1_OVER_4],
    scales: &[SC, MN, D, DMIN],
    min_compute_capability: 80,
    decode_row: decode_scale_and_minimum,
};

/// `w = (d * sc) * (code - 32)`, groups of 16, `sc` signed.
static Q6_K_SPEC: EncodingSpec = EncodingSpec {
    decode: "q6_k.ggml@1",
    encoding: "q6_k",
    codes: &[Q4, H2],
    scales: &[SC_SIGNED, D],
    min_compute_capability: 80,
    decode_row: |row, out| {
        centred(row, out, 32.0, |g| row.f16(1, g * 16 / SUPER) * f32::from(row.u8(0, g).cast_signed()));
    },
};

fn decode_scale_and_minimum(row: &MatrixRow<'_>, out: &mut [f32]) {
    affine(row, out, 32, |g| {
        let s = g * 32 / SUPER;
        (row.f16(2, s) * f32::from(row.u8(0, g)), row.f16(3, s) * f32::from(row.u8(1, g)))
    });
}

/// `w = scale * code - minimum` with both per group.
fn affine(row: &MatrixRow<'_>, out: &mut [f32], group: usize, factors: impl Fn(usize) -> (f32, f32)) {
    for (g, (codes, values)) in row.codes.chunks(group).zip(out.chunks_mut(group)).enumerate() {
        let (scale, minimum) = factors(g);
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = scale * f32::from(code) - minimum;
        }
    }
}

/// `w = scale * (code - centre)`, groups of 16.
fn centred(row: &MatrixRow<'_>, out: &mut [f32], centre: f32, factor: impl Fn(usize) -> f32) {
    for (g, (codes, values)) in row.codes.chunks(16).zip(out.chunks_mut(16)).enumerate() {
        let scale = factor(g);
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = scale * (f32::from(code) - centre);
        }
    }
}

/// Where the two-bit fields of codes `16 i ..` lie: first byte, and shift.
///
/// A half of 128 codes shares 32 bytes, in four planes of 32 codes.
fn two_bit_place(i: usize) -> (usize, u32) {
    (i / 8 * 32 + i % 2 * 16, (i % 8 / 2 * 2) as u32)
}

fn join_two_bits(codes: &[u8], out: &mut [u8]) {
    out.fill(0);
    for (i, codes) in codes.chunks_exact(16).enumerate() {
        let (at, shift) = two_bit_place(i);
        for (byte, code) in out[at..].iter_mut().zip(codes) {
            *byte |= (code & 3) << shift;
        }
    }
}

/// Block: 16 bytes `scmn`, 64 of codes, d, dmin.
pub(super) static Q2_K: BlockFormat = BlockFormat {
    name: "q2_k.ggml@1",
    ggml_type: 10,
    weights: SUPER,
    bytes: 84,
    group_size: 16,
    spec: &Q2_K_SPEC,
    codes16: |block, i, out| {
        let (at, shift) = two_bit_place(i);
        for (code, byte) in out.iter_mut().zip(&block[16 + at..]) {
            *code = byte >> shift & 3;
        }
    },
    scale: |block, plane, i, out| match plane {
        0 => out[0] = block[i],
        _ => out.copy_from_slice(&block[80 + 2 * (plane - 1)..][..2]),
    },
    join: |codes, scales, block| {
        block[..16].copy_from_slice(scales[0]);
        join_two_bits(codes, &mut block[16..80]);
        block[80..82].copy_from_slice(scales[1]);
        block[82..].copy_from_slice(scales[2]);
    },
};

/// Block: 32 bytes of third bits, 64 of the lower two, 12 of scales, d.
pub(super) static Q3_K: BlockFormat = BlockFormat {
    name: "q3_k.ggml@1",
    ggml_type: 11,
    weights: SUPER,
    bytes: 110,
    group_size: 16,
    spec: &Q3_K_SPEC,
    codes16: |block, i, out| {
        let (at, shift) = two_bit_place(i);
        for (l, code) in out.iter_mut().enumerate() {
            *code = block[32 + at + l] >> shift & 3 | (block[i % 2 * 16 + l] >> (i / 2) & 1) << 2;
        }
    },
    scale: |block, plane, i, out| match plane {
        0 => {
            let low = block[96 + i % 8] >> (i / 8 * 4) & 15;
            let high = block[104 + i % 4] >> (i / 4 * 2) & 3;
            out[0] = low | high << 4;
        }
        _ => out.copy_from_slice(&block[108..]),
    },
    join: |codes, scales, block| {
        block[..32].fill(0);
        for (i, codes) in codes.chunks_exact(16).enumerate() {
            for (byte, code) in block[i % 2 * 16..].iter_mut().zip(codes) {
                *byte |= (code >> 2 & 1) << (i / 2);
            }
        }
        join_two_bits(codes, &mut block[32..96]);
        block[96..108].fill(0);
        for (i, sc) in scales[0].iter().enumerate() {
            block[96 + i % 8] |= (sc & 15) << (i / 8 * 4);
            block[104 + i % 4] |= (sc >> 4 & 3) << (i / 4 * 2);
        }
        block[108..].copy_from_slice(scales[1]);
    },
};

/// Six-bit scale (`minimum` false) or minimum `i` of 8 in the 12 bytes of Q4_K and Q5_K.
fn six_bits(packed: &[u8], i: usize, minimum: bool) -> u8 {
    let own = if minimum { 4 } else { 0 };
    if i < 4 {
        packed[own + i] & 63
    } else {
        let nibble = packed[4 + i] >> (if minimum { 4 } else { 0 }) & 15;
        nibble | packed[own + i - 4] >> 6 << 4
    }
}

fn join_six_bits(sc: &[u8], mn: &[u8], packed: &mut [u8]) {
    for i in 0..4 {
        packed[i] = sc[i] & 63 | sc[i + 4] >> 4 << 6;
        packed[4 + i] = mn[i] & 63 | mn[i + 4] >> 4 << 6;
        packed[8 + i] = sc[i + 4] & 15 | mn[i + 4] << 4;
    }
}

/// Codes `16 i ..` from nibbles in chunks of 64 codes that share 32 bytes: low nibbles first, then high.
fn chunk_nibbles(bytes: &[u8], i: usize, out: &mut [u8; 16]) {
    let bytes = &bytes[i / 4 * 32 + i % 2 * 16..];
    let shift = i % 4 / 2 * 4;
    for (code, byte) in out.iter_mut().zip(bytes) {
        *code = byte >> shift & 15;
    }
}

fn join_chunk_nibbles(codes: &[u8], out: &mut [u8]) {
    for (codes, bytes) in codes.chunks_exact(64).zip(out.chunks_exact_mut(32)) {
        super::join_nibbles(codes, bytes);
    }
}

/// Scale planes of Q4_K and Q5_K: d, dmin, then the 12 packed bytes.
fn scale_and_minimum(block: &[u8], plane: usize, i: usize, out: &mut [u8]) {
    match plane {
        0 | 1 => out[0] = six_bits(&block[4..16], i, plane == 1),
        _ => out.copy_from_slice(&block[2 * (plane - 2)..][..2]),
    }
}

fn join_scale_and_minimum(scales: &BlockScales<'_>, block: &mut [u8]) {
    block[..2].copy_from_slice(scales[2]);
    block[2..4].copy_from_slice(scales[3]);
    join_six_bits(scales[0], scales[1], &mut block[4..16]);
}

/// Block: d, dmin, 12 bytes of scales and minima, 128 of nibbles.
pub(super) static Q4_K: BlockFormat = BlockFormat {
    name: "q4_k.ggml@1",
    ggml_type: 12,
    weights: SUPER,
    bytes: 144,
    group_size: 32,
    spec: &Q4_K_SPEC,
    codes16: |block, i, out| chunk_nibbles(&block[16..], i, out),
    scale: scale_and_minimum,
    join: |codes, scales, block| {
        join_scale_and_minimum(scales, block);
        join_chunk_nibbles(codes, &mut block[16..]);
    },
};

/// Block: d, dmin, 12 bytes of scales and minima, 32 of fifth bits (bit g for group g), 128 of nibbles.
pub(super) static Q5_K: BlockFormat = BlockFormat {
    name: "q5_k.ggml@1",
    ggml_type: 13,
    weights: SUPER,
    bytes: 176,
    group_size: 32,
    spec: &Q5_K_SPEC,
    codes16: |block, i, out| {
        chunk_nibbles(&block[48..], i, out);
        for (code, byte) in out.iter_mut().zip(&block[16 + i % 2 * 16..]) {
            *code |= (byte >> (i / 2) & 1) << 4;
        }
    },
    scale: scale_and_minimum,
    join: |codes, scales, block| {
        join_scale_and_minimum(scales, block);
        block[16..48].fill(0);
        for (g, codes) in codes.chunks_exact(32).enumerate() {
            for (byte, code) in block[16..48].iter_mut().zip(codes) {
                *byte |= (code >> 4 & 1) << g;
            }
        }
        join_chunk_nibbles(codes, &mut block[48..]);
    },
};

/// Where codes `16 i ..` of Q6_K lie: first byte and shift of the low nibbles, first byte and shift of the upper two bits.
///
/// A half of 128 codes has 64 bytes of nibbles (planes 0 and 1 low, 2 and 3 high) and 32 of upper bits (two per plane).
fn six_bit_place(i: usize) -> (usize, u32, usize, u32) {
    let (half, plane, part) = (i / 8, i % 8 / 2, i % 2);
    (half * 64 + plane % 2 * 32 + part * 16, (plane / 2 * 4) as u32, 128 + half * 32 + part * 16, (2 * plane) as u32)
}

/// Block: 128 bytes of nibbles, 64 of upper bits, 16 signed scales, d.
pub(super) static Q6_K: BlockFormat = BlockFormat {
    name: "q6_k.ggml@1",
    ggml_type: 14,
    weights: SUPER,
    bytes: 210,
    group_size: 16,
    spec: &Q6_K_SPEC,
    codes16: |block, i, out| {
        let (low, low_shift, high, high_shift) = six_bit_place(i);
        for (l, code) in out.iter_mut().enumerate() {
            *code = block[low + l] >> low_shift & 15 | (block[high + l] >> high_shift & 3) << 4;
        }
    },
    scale: |block, plane, i, out| match plane {
        0 => out[0] = block[192 + i],
        _ => out.copy_from_slice(&block[208..]),
    },
    join: |codes, scales, block| {
        block[..192].fill(0);
        for (i, codes) in codes.chunks_exact(16).enumerate() {
            let (low, low_shift, high, high_shift) = six_bit_place(i);
            for (l, code) in codes.iter().enumerate() {
                block[low + l] |= (code & 15) << low_shift;
                block[high + l] |= (code >> 4 & 3) << high_shift;
            }
        }
        block[192..208].copy_from_slice(scales[0]);
        block[208..].copy_from_slice(scales[1]);
    },
};
