// Raw ggml blocks (layout ggml-raw@1), eight weights at a time.
//
// Formulas with their order of operations: format-spec/src/codec/ggml/raw.rs, which names their source. The codebooks come
// from there too, packed as one u16 per entry.
#pragma once

#include "common/types.cuh"

/// Numbers of src/cuda/gemm/params.rs.
enum RawFormat : u32 {
    IQ2_XXS = 0,
    IQ2_XS = 1,
    IQ2_S = 2,
    IQ3_XXS = 3,
    IQ3_S = 4,
    IQ1_S = 5,
    IQ1_M = 6,
    TQ1_0 = 7,
    TQ2_0 = 8,
    Q1_0 = 9,
    Q2_0 = 10,
};

struct Raw {
    const u8 *blocks;
    /// Codebook of the format, or null.
    const u16 *grid;
    u32 format, weights, bytes;
    u32 n, k;
};

__device__ __forceinline__ u32 byte_at(const u8 *block, u32 at) { return __ldg(block + at); }

__device__ __forceinline__ u32 u16_at(const u8 *block, u32 at) { return byte_at(block, at) | byte_at(block, at + 1) << 8; }

__device__ __forceinline__ u32 u32_at(const u8 *block, u32 at) { return u16_at(block, at) | u16_at(block, at + 2) << 16; }

/// Seven stored signs and an eighth that makes the number of minus signs even.
__device__ __forceinline__ u32 signs_of(u32 seven) {
    seven &= 127;
    return seven | (__popc(seven) & 1) << 7;
}

__device__ __forceinline__ float signed_by(float value, u32 signs, u32 place) {
    return signs >> place & 1 ? -value : value;
}

/// Levels 8, 25, 43 of the IQ2 grids.
__device__ __forceinline__ void grid_eight(float (&y)[8], float scale, u32 entry, u32 signs) {
    for (u32 j = 0; j < 8; ++j) {
        const u32 level = entry >> (2 * j) & 3;
        y[j] = signed_by(scale * (level == 0 ? 8.0f : level == 1 ? 25.0f : level == 2 ? 43.0f : 0.0f), signs, j);
    }
}

/// Levels -1, 0, 1 of the IQ1 grid, and an eighth more or less.
__device__ __forceinline__ void ternary(float (&y)[8], float scale, u32 entry, float delta) {
    for (u32 j = 0; j < 8; ++j) {
        const u32 level = entry >> (2 * j) & 3;
        y[j] = scale * ((level == 0 ? -1.0f : level == 2 ? 1.0f : 0.0f) + delta);
    }
}

/// Weights `8 * l` to `8 * l + 7` of a block.
__device__ inline void raw_eight(const Raw &w, const u8 *block, u32 l, float (&y)[8]) {
    const u32 i0 = 8 * l;
    switch (w.format) {
    case IQ2_XXS: {
        const u32 at = 2 + 8 * (l / 4), word = u32_at(block, at + 4);
        const float db = f16_bits(u16_at(block, 0)) * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
        grid_eight(y, db, __ldg(w.grid + byte_at(block, at + l % 4)), signs_of(word >> (7 * (l % 4))));
        break;
    }
    case IQ2_XS: {
        const u32 word = u16_at(block, 2 + 2 * l), scale = byte_at(block, 66 + l / 4) >> (l / 2 % 2 * 4) & 15;
        const float db = f16_bits(u16_at(block, 0)) * (0.5f + static_cast<float>(scale)) * 0.25f;
        grid_eight(y, db, __ldg(w.grid + (word & 511)), signs_of(word >> 9));
        break;
    }
    case IQ2_S: {
        const u32 upper = byte_at(block, 66 + l / 4) >> (2 * (l % 4)) & 3, index = byte_at(block, 2 + l) | upper << 8;
        const u32 scale = byte_at(block, 74 + l / 4) >> (l / 2 % 2 * 4) & 15;
        const float db = f16_bits(u16_at(block, 0)) * (0.5f + static_cast<float>(scale)) * 0.25f;
        grid_eight(y, db, __ldg(w.grid + index), byte_at(block, 34 + l));
        break;
    }
    case IQ3_XXS:
    case IQ3_S:
        for (u32 q = 0; q < 2; ++q) {
            const u32 quad = 2 * l + q;
            const float d = f16_bits(u16_at(block, 0));
            float scale;
            u32 entry, signs;
            if (w.format == IQ3_XXS) {
                const u32 word = u32_at(block, 66 + quad / 8 * 4);
                scale = d * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
                entry = __ldg(w.grid + byte_at(block, 2 + quad));
                signs = signs_of(word >> (7 * (quad % 8 / 2)));
            } else {
                const u32 s = byte_at(block, 106 + quad / 16) >> (quad / 8 % 2 * 4) & 15;
                scale = d * static_cast<float>(1 + 2 * s);
                entry = __ldg(w.grid + (byte_at(block, 2 + quad) | (byte_at(block, 66 + quad / 8) >> (quad % 8) & 1) << 8));
                signs = byte_at(block, 74 + quad / 2);
            }
            for (u32 j = 0; j < 4; ++j) {
                const u32 level = entry >> (3 * j) & 7;
                // 4 12 20 28 36 44 52 62, or 1 3 5 .. 15.
                const float value = w.format == IQ3_S ? static_cast<float>(2 * level + 1)
                                                      : static_cast<float>(8 * level + 4 + (level == 7 ? 2 : 0));
                y[4 * q + j] = signed_by(scale * value, signs, 4 * q + j);
            }
        }
        break;
    case IQ1_S: {
        const u32 word = u16_at(block, 34 + l / 4 * 2);
        const float dl = f16_bits(u16_at(block, 0)) * static_cast<float>(2 * (word >> 12 & 7) + 1);
        const u32 index = byte_at(block, 2 + l) | (word >> (3 * (l % 4)) & 7) << 8;
        ternary(y, dl, __ldg(w.grid + index), word & 0x8000 ? -0.125f : 0.125f);
        break;
    }
    case IQ1_M: {
        u32 bits = 0;
        for (u32 i = 0; i < 4; ++i) {
            bits |= u16_at(block, 48 + 2 * i) >> 12 << (4 * i);
        }
        const u32 scale = u16_at(block, 48 + l / 8 * 2) >> (l / 2 % 4 * 3) & 7;
        const u32 nibble = byte_at(block, 32 + l / 2) >> (l % 2 * 4) & 15;
        const float dl = f16_bits(bits) * static_cast<float>(2 * scale + 1);
        ternary(y, dl, __ldg(w.grid + (byte_at(block, l) | (nibble & 7) << 8)), nibble & 8 ? -0.125f : 0.125f);
        break;
    }
    case TQ1_0: {
        const float d = f16_bits(u16_at(block, 52));
        for (u32 j = 0; j < 8; ++j) {
            const u32 i = i0 + j;
            // 32 bytes of five digits, 16 of five, 4 of four; the same digit of all bytes together.
            const u32 first = i < 160 ? 0 : i < 240 ? 32 : 48, width = i < 160 ? 32 : i < 240 ? 16 : 4;
            const u32 within = i - (i < 160 ? 0 : i < 240 ? 160 : 240), digit = within / width;
            const u32 power = digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
            const u32 q = (byte_at(block, first + within % width) * power) & 255;
            y[j] = (static_cast<float>(q * 3 >> 8) - 1.0f) * d;
        }
        break;
    }
    case TQ2_0: {
        const float d = f16_bits(u16_at(block, 64));
        for (u32 j = 0; j < 8; ++j) {
            const u32 i = i0 + j, q = byte_at(block, i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2) & 3;
            y[j] = (static_cast<float>(q) - 1.0f) * d;
        }
        break;
    }
    case Q1_0: {
        const float d = f16_bits(u16_at(block, 0));
        for (u32 j = 0; j < 8; ++j) {
            y[j] = byte_at(block, 2 + l) >> j & 1 ? d : -d;
        }
        break;
    }
    default: {
        const float d = f16_bits(u16_at(block, 0));
        for (u32 j = 0; j < 8; ++j) {
            const u32 q = byte_at(block, 2 + (i0 + j) / 4) >> (2 * (j % 4)) & 3;
            y[j] = (static_cast<float>(q) - 1.0f) * d;
        }
    }
    }
}
