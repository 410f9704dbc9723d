//! Formats of safetensors checkpoints: ModelOpt, compressed-tensors, FP8 in DeepSeek's form, GPTQ, AWQ and relatives.

use super::Codec;
use crate::encoding::EncodingSpec;

pub mod fp8;
pub mod integer;
pub mod mx;
pub mod nvfp4;

const FP8_SPECS: [&EncodingSpec; 10] = [
    &fp8::TENSOR_F32,
    &fp8::TENSOR_BF16,
    &fp8::TENSOR_F16,
    &fp8::CHANNEL_F32,
    &fp8::CHANNEL_BF16,
    &fp8::CHANNEL_F16,
    &fp8::BLOCK_F32,
    &fp8::BLOCK_BF16,
    &fp8::BLOCK_F16,
    &fp8::BLOCK_E8M0,
];

/// Encodings of this family.
pub(crate) const SPECS: &[&EncodingSpec] = &{
    let groups: [&[&EncodingSpec]; 5] = [
        &[&nvfp4::MODELOPT_SPEC, &nvfp4::COMPRESSED_TENSORS_SPEC, &mx::MXFP4_SPEC, &mx::MXFP8_SPEC],
        &FP8_SPECS,
        &integer::f32::SPECS,
        &integer::bf16::SPECS,
        &integer::f16::SPECS,
    ];
    let mut all = [&nvfp4::MODELOPT_SPEC; 4 + FP8_SPECS.len() + 3 * integer::f32::SPECS.len()];
    let (mut g, mut at) = (0, 0);
    while g < groups.len() {
        let mut i = 0;
        while i < groups[g].len() {
            all[at] = groups[g][i];
            (at, i) = (at + 1, i + 1);
        }
        g += 1;
    }
    all
};

const FP4_CODECS: [&dyn Codec; 5] =
    [&nvfp4::MODELOPT, &nvfp4::COMPRESSED_TENSORS, &nvfp4::MODELOPT_TRANSPOSED, &mx::MXFP4, &mx::MXFP8];

/// Codecs of this family.
pub const CODECS: &[&dyn Codec] = &{
    let integers = [&integer::f32::CODECS, &integer::bf16::CODECS, &integer::f16::CODECS];
    let mut all = [FP4_CODECS[0]; FP4_CODECS.len() + fp8::COUNT + 3 * integer::COUNT];
    let mut i = 0;
    while i < all.len() {
        let after_fp8 = i.wrapping_sub(FP4_CODECS.len() + fp8::COUNT);
        all[i] = if i < FP4_CODECS.len() {
            FP4_CODECS[i]
        } else if i < FP4_CODECS.len() + fp8::COUNT {
            &fp8::CODECS[i - FP4_CODECS.len()]
        } else {
            &integers[after_fp8 / integer::COUNT][after_fp8 % integer::COUNT]
        };
        i += 1;
    }
    all
};

/// Eight bytes of nibbles, low first, as sixteen codes.
fn unpack_nibbles(bytes: &[u8], out: &mut [u8; 16]) {
    for (pair, &byte) in out.chunks_exact_mut(2).zip(bytes) {
        pair[0] = byte & 15;
        pair[1] = byte >> 4;
    }
}

/// The inverse of [`unpack_nibbles`] for any even number of codes.
fn pack_nibbles(codes: &[u8], out: &mut [u8]) {
    for (byte, pair) in out.iter_mut().zip(codes.chunks_exact(2)) {
        *byte = pair[0] | pair[1] << 4;
    }
}

/// `out[c][r] = from[r][c]` for `from` of `rows` by `columns` bytes.
fn transpose(from: &[u8], rows: usize, columns: usize, out: &mut [u8]) {
    for (r, row) in from.chunks_exact(columns).take(rows).enumerate() {
        for (c, &value) in row.iter().enumerate() {
            out[c * rows + r] = value;
        }
    }
}
