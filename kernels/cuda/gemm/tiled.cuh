// A matrix in tile order (format-spec/SPEC.md, sections 4 and 6), element by element: every encoding, bit for bit.
//
// Mirrored by `Tiled` in src/cuda/gemm/params.rs.
#pragma once

#include "common/types.cuh"

constexpr u32 MAX_CODE_PLANES = 3;
constexpr u32 MAX_SCALE_PLANES = 4;
constexpr u32 MAX_PARTS = 16;

/// Formulas of the encodings; numbers as in src/cuda/gemm/params.rs.
enum Formula : u32 {
    E2M1_TIMES_E4M3_TIMES_GLOBAL = 0,
    E2M1_TIMES_E4M3_OVER_GLOBAL = 1,
    E2M1_TIMES_SCALE = 2,
    E4M3_TIMES_SCALE = 3,
    INTEGER = 4,
    INTEGER_ZEROS = 5,
    SCALE_AND_MIN = 6,
    Q2_K = 7,
    Q3_K = 8,
    Q4_K = 9,
    Q6_K = 10,
    IQ4_NL = 11,
    IQ4_XS = 12,
    MXFP4_GGML = 13,
    NVFP4_GGML = 14,
};

enum ScaleType : u32 { T_E4M3 = 0, T_E8M0 = 1, T_U8 = 2, T_I8 = 3, T_F16 = 4, T_BF16 = 5, T_F32 = 6 };

enum Span : u32 { S_GROUP = 0, S_CHANNEL = 1, S_PART = 2, S_BLOCK = 3 };

struct CodePlane {
    const u8 *data;
    u32 bits, shift;
};

struct ScalePlane {
    const u8 *data;
    u32 type, span;
    /// Codes along K of one element (groups, super-blocks, blocks).
    u32 reach;
    /// Elements along K (blocks).
    u32 columns;
};

struct Part {
    /// First padded row, logical rows, and rows of blocks of the parts before.
    u32 start, rows, blocks_above;
};

struct Tiled {
    CodePlane codes[MAX_CODE_PLANES];
    ScalePlane scales[MAX_SCALE_PLANES];
    Part parts[MAX_PARTS];
    u32 code_planes, part_count;
    u32 formula;
    /// What `INTEGER` subtracts from codes, and `INTEGER_ZEROS` adds to zero points.
    u32 zero;
    /// Padded rows, columns, rows of a block.
    u32 n, k, block_rows;
    /// Scales stay the same from a multiple of this along K to the next.
    u32 step;
};

/// Part of a padded row.
__device__ __forceinline__ u32 part_of(const Tiled &w, u32 n) {
    u32 part = 0;
    while (part + 1 < w.part_count && w.parts[part + 1].start <= n) {
        ++part;
    }
    return part;
}

/// The code of row `n` (padded), column `k`.
__device__ __forceinline__ u32 code_at(const Tiled &w, u64 expert_bytes, u32 n, u32 k) {
    const u32 r = k % 16, c = n % 64;
    const u32 lane = 4 * (c % 8) + (r % 8) / 2, j = c / 16, half = (c / 8) % 2, odd = r % 2, high = r / 8;
    const u64 tile = static_cast<u64>(k / 16) * (w.n / 64) + n / 64;
    u32 code = 0;
    for (u32 p = 0; p < w.code_planes; ++p) {
        const CodePlane &plane = w.codes[p];
        const u32 slot = 32 * lane + 8 * j + (plane.bits == 8 ? 4 * half + high + 2 * odd : high + 2 * half + 4 * odd);
        const u32 bit = slot * plane.bits;
        const u32 byte = __ldg(plane.data + expert_bytes + tile * (128 * plane.bits) + bit / 8);
        code |= (byte >> (bit % 8) & ((1u << plane.bits) - 1)) << plane.shift;
    }
    return code;
}

__device__ __forceinline__ float scale_value(const ScalePlane &plane, const u8 *data, u64 i) {
    switch (plane.type) {
    case T_E4M3: return e4m3_bits(__ldg(data + i));
    case T_E8M0: return e8m0_bits(__ldg(data + i));
    case T_U8: return static_cast<float>(__ldg(data + i));
    case T_I8: return static_cast<float>(static_cast<int8_t>(__ldg(data + i)));
    case T_F16: return f16_bits(__ldg(reinterpret_cast<const u16 *>(data) + i));
    case T_BF16: return bf16_bits(__ldg(reinterpret_cast<const u16 *>(data) + i));
    default: return __ldg(reinterpret_cast<const float *>(data) + i);
    }
}

/// Index of the element of a scale plane for padded row `n`, column `k`.
__device__ __forceinline__ u64 scale_index(const Tiled &w, const ScalePlane &plane, u32 n, u32 k) {
    switch (plane.span) {
    case S_GROUP: {
        const u32 c = n % 64;
        u32 g = 8 * (c % 8) + c / 8;
        if (plane.type <= T_I8) {
            g = g % 4 == 1 ? g + 1 : g % 4 == 2 ? g - 1 : g;
        }
        return static_cast<u64>(k / plane.reach) * w.n + (n - c + g);
    }
    case S_CHANNEL: return n;
    case S_PART: return part_of(w, n);
    default: {
        // Padding has no blocks; the last row's do, since nobody reads these products.
        const Part &part = w.parts[part_of(w, n)];
        const u32 row = min(n - part.start, part.rows - 1);
        return static_cast<u64>(part.blocks_above + row / w.block_rows) * plane.columns + k / plane.reach;
    }
    }
}

/// What a formula needs of the scales: mostly a factor and an addend.
struct Scales {
    float d, m;
};

__device__ __forceinline__ float scale_at(const Tiled &w, u64 expert_bytes, u32 plane, u32 n, u32 k) {
    return scale_value(w.scales[plane], w.scales[plane].data + expert_bytes, scale_index(w, w.scales[plane], n, k));
}

__device__ __forceinline__ Scales scales_at(const Tiled &w, u64 expert_bytes, u32 n, u32 k) {
    const auto at = [&](u32 plane) { return scale_at(w, expert_bytes, plane, n, k); };
    const float first = at(0);
    switch (w.formula) {
    case E2M1_TIMES_E4M3_TIMES_GLOBAL: return {__fmul_rn(first, at(1)), 0};
    case E2M1_TIMES_E4M3_OVER_GLOBAL: return {__fdiv_rn(first, at(1)), 0};
    case INTEGER_ZEROS: return {first, at(1) + static_cast<float>(w.zero)};
    case SCALE_AND_MIN: return {first, at(1)};
    case Q2_K: {
        const u32 both = static_cast<u32>(first);
        return {__fmul_rn(at(1), static_cast<float>(both % 16)), __fmul_rn(at(2), static_cast<float>(both / 16))};
    }
    case Q3_K:
    case IQ4_XS: return {__fmul_rn(at(1), first - 32.0f), 0};
    case Q4_K: return {__fmul_rn(at(2), first), __fmul_rn(at(3), at(1))};
    case Q6_K: return {__fmul_rn(at(1), first), 0};
    case MXFP4_GGML: {
        // 2^(e - 128): one bit of the mantissa where that is below the normal range.
        const u64 i = scale_index(w, w.scales[0], n, k);
        const u32 e = __ldg(w.scales[0].data + expert_bytes + i);
        return {__uint_as_float(e < 2 ? 1u << (21 + e) : (e - 1) << 23), 0};
    }
    case NVFP4_GGML: {
        const u32 b = static_cast<u32>(first);
        const float value = __uint_as_float((b & 0x7F) << 20) * __uint_as_float((127 + 119) << 23);
        return {b == 0x7F ? 0.0f : value, 0};
    }
    default: return {first, 0};
    }
}

/// E2M1: 0 0.5 1 1.5 2 3 4 6, then the negatives.
__device__ __forceinline__ float e2m1(u32 code) {
    // Exponent and mantissa in their places of a binary32 are 2^-126 times the value.
    const float magnitude = __uint_as_float((code & 7) << 22) * __uint_as_float((127 + 126) << 23);
    return code & 8 ? -magnitude : magnitude;
}

__device__ __forceinline__ float iq4_value(u32 code) {
    // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, a byte each.
    const u32 words[4] = {0xBFAD9881, 0xF6EADDCF, 0x26190D01, 0x71594535};
    const u32 word = code < 8 ? (code < 4 ? words[0] : words[1]) : (code < 12 ? words[2] : words[3]);
    return static_cast<float>(static_cast<int8_t>(word >> (8 * (code % 4))));
}

/// The value of a code: one IEEE operation at a time, in the order of the specification.
__device__ __forceinline__ float decode(const Tiled &w, u32 code, Scales s) {
    const float c = static_cast<float>(code);
    switch (w.formula) {
    case E2M1_TIMES_E4M3_TIMES_GLOBAL:
    case E2M1_TIMES_E4M3_OVER_GLOBAL:
    case E2M1_TIMES_SCALE: return __fmul_rn(e2m1(code), s.d);
    case E4M3_TIMES_SCALE: return __fmul_rn(e4m3_bits(code), s.d);
    case INTEGER: return __fmul_rn(c - static_cast<float>(w.zero), s.d);
    case INTEGER_ZEROS: return __fmul_rn(c - s.m, s.d);
    case SCALE_AND_MIN: return __fadd_rn(__fmul_rn(c, s.d), s.m);
    case Q2_K:
    case Q4_K: return __fsub_rn(__fmul_rn(s.d, c), s.m);
    case Q3_K: return __fmul_rn(s.d, c - 4.0f);
    case Q6_K: return __fmul_rn(s.d, c - 32.0f);
    case IQ4_NL:
    case IQ4_XS: return __fmul_rn(s.d, iq4_value(code));
    default: return __fmul_rn(code == 8 ? 0.0f : 2.0f * e2m1(code), s.d);
    }
}

/// Eight weights of padded row `n` from `k` (a multiple of eight, below K) on, `stride` apart in `out`; columns beyond K
/// are 0.
__device__ __forceinline__ void decode_eight(const Tiled &w, u64 expert_bytes, u32 n, u32 k, float *out, u32 stride) {
    Scales s{0, 0};
    // One copy of the formulas is enough: they are long.
#pragma unroll 1
    for (u32 i = 0; i < 8; ++i, out += stride) {
        if (k + i >= w.k) {
            *out = 0;
            continue;
        }
        if (i == 0 || (k + i) % w.step == 0) {
            s = scales_at(w, expert_bytes, n, k + i);
        }
        *out = decode(w, code_at(w, expert_bytes, n, k + i), s);
    }
}
