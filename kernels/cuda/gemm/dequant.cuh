// Codes of a tile as operands of the tensor cores, and their scales: what the fast kernels share.
//
// Lane `l` of a warp owns row quad `q = l % 4` and column `g = l / 4` of a tile of 16 (K) x 64 (N). For each block `j` of 16
// columns the four registers of an A operand of mma.m16n8k16 hold weights of columns `g`, `g + 8`, `g`, `g + 8` of the block,
// for K rows `2q, 2q + 1` (the first two) and `2q + 8, 2q + 9`. That is how codes lie in a tile: see format-spec/src/tile.rs.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162 *>(&a), *reinterpret_cast<const __nv_bfloat162 *>(&b));
    return *reinterpret_cast<const u32 *>(&product);
}

__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b) {
    const __nv_bfloat162 difference =
        __hsub2(*reinterpret_cast<const __nv_bfloat162 *>(&a), *reinterpret_cast<const __nv_bfloat162 *>(&b));
    return *reinterpret_cast<const u32 *>(&difference);
}

/// Both halves the lower, or the upper, half of `pair`.
__device__ __forceinline__ u32 twice_lower(u32 pair) { return __byte_perm(pair, pair, 0x1010); }
__device__ __forceinline__ u32 twice_upper(u32 pair) { return __byte_perm(pair, pair, 0x3232); }

/// A pair of bf16 with equal halves: 2^exponent.
__host__ __device__ constexpr u32 power_pair(int exponent) { return static_cast<u32>(127 + exponent) * 0x00800080u; }

/// E2M1 codes of a word as bf16, times 2^-126, exact: a product moves the sign and the rest to their places at once.
__device__ __forceinline__ void expand_e2m1(u32 word, u32 (&a)[4]) {
    constexpr u32 FIELD = 0x000F000F, PLACES = 0x81C081C0;
    const u32 upper = word >> 8;
    // Fields from the lowest: column g rows low and high, then column g + 8; the same for odd rows in the upper half.
    a[0] = ((word & FIELD) * 0x1040) & PLACES;
    a[2] = ((word & (FIELD << 4)) * 0x104) & PLACES;
    a[1] = ((upper & FIELD) * 0x1040) & PLACES;
    a[3] = ((upper & (FIELD << 4)) * 0x104) & PLACES;
}

/// E4M3 values of two bytes, exact.
__device__ __forceinline__ float2 e4m3_pair(u32 bytes) {
#if __CUDA_ARCH__ >= 890
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(bytes)));
    return __half22float2(*reinterpret_cast<const __half2 *>(&halves));
#else
    return make_float2(e4m3_bits(bytes & 0xFF), e4m3_bits(bytes >> 8 & 0xFF));
#endif
}

/// Exact differences of small integers: `bits` below 128 in each half, less `Zero`.
template <u32 Zero> __device__ __forceinline__ u32 integer_pair(u32 bits) {
    // 128 + n is a bf16 whose lowest bits are n.
    return subtract_pairs(bits | 0x43004300, 0x43004300 + Zero * 0x00010001);
}

/// Four-bit codes less `Zero`, with more bits of the code at the places of `High` (see `high_bits`).
template <u32 Zero, class High> __device__ __forceinline__ void expand_u4(u32 word, const High &high, u32 (&a)[4]) {
    constexpr u32 MASK = 0x000F000F;
    a[0] = integer_pair<Zero>((word & MASK) | high.template at<0>());
    a[2] = integer_pair<Zero>(((word >> 4) & MASK) | high.template at<1>());
    a[1] = integer_pair<Zero>(((word >> 8) & MASK) | high.template at<2>());
    a[3] = integer_pair<Zero>(((word >> 12) & MASK) | high.template at<3>());
}

/// No further bits.
struct NoBits {
    template <u32 I> __device__ __forceinline__ u32 at() const { return 0; }
};

/// Fields of one bit: those of even rows in the lower four bits of each half, put at bit `Shift`.
template <u32 Shift> struct OneBit {
    u32 fields;

    /// Block `j` of a lane's word of a 1-bit plane.
    __device__ __forceinline__ OneBit(u32 word, u32 j) {
        const u32 byte = (word >> (8 * j)) & 0xFF;
        fields = byte | byte << 12;
    }

    template <u32 I> __device__ __forceinline__ u32 at() const {
        const u32 moved = I <= Shift ? fields << (Shift - I) : fields >> (I - Shift);
        return moved & (0x00010001u << Shift);
    }
};

/// Fields of two bits, the same way.
template <u32 Shift> struct TwoBits {
    u32 fields;

    /// Block `j` of a lane's two words of a 2-bit plane.
    __device__ __forceinline__ TwoBits(const u32 *words, u32 j) {
        const u32 half = (words[j / 2] >> (16 * (j % 2))) & 0xFFFF;
        fields = (half & 0xFF) | (half & 0xFF00) << 8;
    }

    template <u32 I> __device__ __forceinline__ u32 at() const {
        const u32 moved = 2 * I <= Shift ? fields << (Shift - 2 * I) : fields >> (2 * I - Shift);
        return moved & (0x00030003u << Shift);
    }
};

/// Two bytes (the lower one of each half) less 128, exact: 128 + the lower seven bits, less 128 or 256.
__device__ __forceinline__ u32 expand_bytes(u32 word) {
    return subtract_pairs((word & 0x007F007F) | 0x43004300, (word & 0x00800080) ^ 0x43804380);
}

/// Four-bit codes into ggml's table of sixteen values: two tables of eight bytes (128 + value), then the one that bit 3 names.
__device__ __forceinline__ u32 iq4_bytes(u32 codes) {
    const u32 index = codes & 0x7777;
    const u32 lower = __byte_perm(0x3F2D1801, 0x766A5D4F, index);
    const u32 upper = __byte_perm(0xA6998D81, 0xF1D9C5B5, index);
    return __byte_perm(lower, upper, 0x3210 | ((codes & 0x8888) >> 1));
}

__device__ __forceinline__ void expand_iq4(u32 word, u32 (&a)[4]) {
    const u32 even = iq4_bytes(word & 0xFFFF), odd = iq4_bytes(word >> 16);
    const u32 first = __byte_perm(even, odd, 0x5410), second = __byte_perm(even, odd, 0x7632);
    a[0] = expand_bytes(first);
    a[2] = expand_bytes(first >> 8);
    a[1] = expand_bytes(second);
    a[3] = expand_bytes(second >> 8);
}

/// 8-bit codes less 128 of the words of columns g and g + 8.
__device__ __forceinline__ void expand_u8(u32 first, u32 second, u32 (&a)[4]) {
    a[0] = expand_bytes(first);
    a[1] = expand_bytes(second);
    a[2] = expand_bytes(first >> 8);
    a[3] = expand_bytes(second >> 8);
}

/// E4M3 bytes in the upper half of each 16 bits as bf16, times 2^-120, exact (NaN becomes 480).
__device__ __forceinline__ u32 place_e4m3(u32 upper) { return (upper & 0x80008000) | ((upper >> 4) & 0x07F007F0); }
/// The same for the lower half.
__device__ __forceinline__ u32 place_e4m3_lower(u32 lower) {
    return ((lower << 8) & 0x80008000) | ((lower << 4) & 0x07F007F0);
}

/// E4M3 codes of the words of columns g and g + 8.
__device__ __forceinline__ void expand_e4m3(u32 first, u32 second, u32 (&a)[4]) {
    constexpr u32 UP = power_pair(120);
    a[0] = multiply_pairs(place_e4m3_lower(first), UP);
    a[1] = multiply_pairs(place_e4m3_lower(second), UP);
    a[2] = multiply_pairs(place_e4m3(first), UP);
    a[3] = multiply_pairs(place_e4m3(second), UP);
}
