//! IQ4_NL and IQ4_XS: four-bit codes into a table of sixteen values.

use super::{BlockFormat, high_nibbles, join_nibbles, low_nibbles};
use crate::encoding::{EncodingSpec, ScalePlane, ScaleType, Span};
use crate::tile::CodePlane;

const Q4: CodePlane = CodePlane { name: "q4", bits: 4, shift: 0 };

/// What a code stands for: `kvalues_iq4nl` of ggml.
pub const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

const fn as_f32() -> [f32; 16] {
    let mut table = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = VALUES[i] as f32;
        i += 1;
    }
    table
}

const TABLE: [f32; 16] = as_f32();

/// `w = d * table[code]`, groups of 32.
static IQ4_NL_SPEC: EncodingSpec = EncodingSpec {
    decode: "iq4_nl.ggml@1",
    encoding: "iq4_nl",
    codes: &[Q4],
    scales: &[ScalePlane { name: "d", dtype: ScaleType::F16, span: Span::Group }],
    min_compute_capability: 80,
    decode_row: |row, out| by_table(row.codes, out, |g| row.f16(0, g)),
};

/// `w = (d * (sc - 32)) * table[code]`, groups of 32, d per 256.
static IQ4_XS_SPEC: EncodingSpec = EncodingSpec {
    decode: "iq4_xs.ggml@1",
    encoding: "iq4_xs",
    codes: &[Q4],
    scales: &[
        ScalePlane { name: "sc", dtype: ScaleType::U8, span: Span::Group },
        ScalePlane { name: "d", dtype: ScaleType::F16, span: Span::Super(256) },
    ],
    min_compute_capability: 80,
    decode_row: |row, out| by_table(row.codes, out, |g| row.f16(1, g / 8) * (f32::from(row.u8(0, g)) - 32.0)),
};

fn by_table(codes: &[u8], out: &mut [f32], factor: impl Fn(usize) -> f32) {
    for (g, (codes, values)) in codes.chunks(32).zip(out.chunks_mut(32)).enumerate() {
        let scale = factor(g);
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = scale * TABLE[usize::from(code & 15)];
        }
    }
}

/// Block: d, 16 bytes of nibbles.
pub(super) static IQ4_NL: BlockFormat = BlockFormat {
    name: "iq4_nl.ggml@1",
    ggml_type: 20,
    weights: 32,
    bytes: 18,
    group_size: 32,
    spec: &IQ4_NL_SPEC,
    codes16: |block, i, out| match i {
        0 => low_nibbles(&block[2..], out),
        _ => high_nibbles(&block[2..], out),
    },
    scale: |block, _, _, out| out.copy_from_slice(&block[..2]),
    join: |codes, scales, block| {
        block[..2].copy_from_slice(scales[0]);
        join_nibbles(codes, &mut block[2..]);
    },
};

/// Block: d, u16 of upper two scale bits, 4 bytes of lower scale nibbles, 128 bytes of nibbles in chunks of 32 codes.
pub(super) static IQ4_XS: BlockFormat = BlockFormat {
    name: "iq4_xs.ggml@1",
    ggml_type: 23,
    weights: 256,
    bytes: 136,
    group_size: 32,
    spec: &IQ4_XS_SPEC,
    codes16: |block, i, out| match i % 2 {
        0 => low_nibbles(&block[8 + i / 2 * 16..], out),
        _ => high_nibbles(&block[8 + i / 2 * 16..], out),
    },
    scale: |block, plane, i, out| match plane {
        0 => {
            let low = block[4 + i / 2] >> (i % 2 * 4) & 15;
            let high = block[2 + i / 4] >> (i % 4 * 2) & 3;
            out[0] = low | high << 4;
        }
        _ => out.copy_from_slice(&block[..2]),
    },
    join: |codes, scales, block| {
        block[..2].copy_from_slice(scales[1]);
        block[2..8].fill(0);
        for (i, sc) in scales[0].iter().enumerate() {
            block[4 + i / 2] |= (sc & 15) << (i % 2 * 4);
            block[2 + i / 4] |= (sc >> 4 & 3) << (i % 4 * 2);
        }
        for (codes, bytes) in codes.chunks_exact(32).zip(block[8..].chunks_exact_mut(16)) {
            join_nibbles(codes, bytes);
        }
    },
};
