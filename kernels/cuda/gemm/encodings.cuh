// Encodings as the fast kernels read them: planes per tile, operands, and scales per group.
//
// An encoding is a type with:
// - `BITS0`, `BITS1`: bits of the code planes (0: no such plane);
// - `PLANES`, `size(i)`, `rows(i)`: scale planes that have a row of columns per group or super-block, their bytes per element
//   and their rows per 32 codes along K (2 where groups are of 16);
// - `MODE`: where scales are applied, `GROUPS`: groups per 32 codes, `MIN`: whether there is an addend;
// - `EXPONENT`: sums are 2^EXPONENT times the products; `RAISE`: activations are multiplied by 2^RAISE;
// - `expand`: the operand of a block of 16 columns;
// - `scales` (IN_GROUP): factors and addends of a group for columns g and g + 8 of the four blocks, from the addresses of the
//   lane's eight elements of each plane; or `pairs` (IN_CODE).
#pragma once

#include "common/async.cuh"
#include "gemm/dequant.cuh"

enum class Apply {
    /// Codes are multiplied by their scale, where that is exact in bf16.
    IN_CODE,
    /// Sums of a group are multiplied by its scale in f32.
    IN_GROUP,
    /// Sums of a whole column are multiplied at the end.
    AT_END,
};

/// What a lane owns of a tile's code planes.
template <u32 Bits0, u32 Bits1> struct Words {
    u32 first[Bits0];
    u32 second[Bits1 ? Bits1 : 1];
};

/// Eight scale elements in order of the four blocks, columns g and g + 8.
using Eight = float2[4];

/// Eight bytes of a scale plane, each through `value`: they lie interleaved.
template <class Value> __device__ __forceinline__ void bytes_at(u32 at, Eight &out, Value value) {
    const uint2 words = load_shared_8(at);
    out[0] = make_float2(value(words.x & 0xFF), value(words.x >> 16 & 0xFF));
    out[1] = make_float2(value(words.x >> 8 & 0xFF), value(words.x >> 24));
    out[2] = make_float2(value(words.y & 0xFF), value(words.y >> 16 & 0xFF));
    out[3] = make_float2(value(words.y >> 8 & 0xFF), value(words.y >> 24));
}

/// Scale elements of a float type.
struct F16 {
    static constexpr u32 SIZE = 2;
    __device__ static __forceinline__ float2 pair(u32 word) {
        return __half22float2(*reinterpret_cast<const __half2 *>(&word));
    }
    __device__ static __forceinline__ void at(u32 at, Eight &out) {
        const uint4 words = load_shared_16(at);
        out[0] = pair(words.x);
        out[1] = pair(words.y);
        out[2] = pair(words.z);
        out[3] = pair(words.w);
    }
};

struct Bf16 {
    static constexpr u32 SIZE = 2;
    __device__ static __forceinline__ float2 pair(u32 word) {
        return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000));
    }
    __device__ static __forceinline__ void at(u32 at, Eight &out) {
        const uint4 words = load_shared_16(at);
        out[0] = pair(words.x);
        out[1] = pair(words.y);
        out[2] = pair(words.z);
        out[3] = pair(words.w);
    }
};

struct F32 {
    static constexpr u32 SIZE = 4;
    __device__ static __forceinline__ void at(u32 at, Eight &out) {
        for (u32 i = 0; i < 2; ++i) {
            const uint4 words = load_shared_16(at + 16 * i);
            out[2 * i] = make_float2(__uint_as_float(words.x), __uint_as_float(words.y));
            out[2 * i + 1] = make_float2(__uint_as_float(words.z), __uint_as_float(words.w));
        }
    }
};

/// Defaults.
template <u32 Bits0, u32 Bits1, u32 Planes, Apply Mode, u32 Groups, bool Min> struct Encoding {
    static constexpr u32 BITS0 = Bits0, BITS1 = Bits1, PLANES = Planes, GROUPS = Groups;
    static constexpr Apply MODE = Mode;
    static constexpr bool MIN = Min;
    static constexpr int EXPONENT = 0, RAISE = 0;
    using W = Words<Bits0, Bits1>;
};

/// NVFP4: E2M1 codes, E4M3 scales per 16. Products of the two are exact in bf16. They are 2^-119 times their value: sums below
/// 2^-7 of it lose what is below 2^-30.
struct Nvfp4 : Encoding<4, 0, 1, Apply::IN_CODE, 2, false> {
    static constexpr int EXPONENT = -119;
    __host__ __device__ static constexpr u32 size(u32) { return 1; }
    __host__ __device__ static constexpr u32 rows(u32) { return 2; }

    /// Scales of columns g and g + 8 of the four blocks, times 2^7 (bits in their places are 2^-120 times the value).
    __device__ static __forceinline__ void pairs(uint2 bytes, u32 (&out)[4]) {
        constexpr u32 RAISE_SCALE = power_pair(127);
        out[0] = multiply_pairs(place_e4m3_lower(bytes.x), RAISE_SCALE);
        out[1] = multiply_pairs(place_e4m3(bytes.x), RAISE_SCALE);
        out[2] = multiply_pairs(place_e4m3_lower(bytes.y), RAISE_SCALE);
        out[3] = multiply_pairs(place_e4m3(bytes.y), RAISE_SCALE);
    }

    __device__ static __forceinline__ void expand(const W &w, u32 j, u32 pair, u32 (&a)[4]) {
        expand_e2m1(w.first[j], a);
        const u32 lower = twice_lower(pair), upper = twice_upper(pair);
        a[0] = multiply_pairs(a[0], lower);
        a[2] = multiply_pairs(a[2], lower);
        a[1] = multiply_pairs(a[1], upper);
        a[3] = multiply_pairs(a[3], upper);
    }
};

/// NVFP4 for up to eight rows: one multiplication per sum is less work than one per code. Codes are 2^-126 times their value,
/// so that activations are raised (they must stay below 2^67).
struct Nvfp4Few : Encoding<4, 0, 1, Apply::IN_GROUP, 2, false> {
    static constexpr int EXPONENT = -66, RAISE = 60;
    __host__ __device__ static constexpr u32 size(u32) { return 1; }
    __host__ __device__ static constexpr u32 rows(u32) { return 2; }

    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) { expand_e2m1(w.first[j], a); }

    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) {
        const uint2 words = load_shared_8(at[0]);
        interleaved(words.x, d[0], d[1]);
        interleaved(words.y, d[2], d[3]);
    }

    __device__ static __forceinline__ void interleaved(u32 word, float2 &first, float2 &second) {
        const float2 lower = e4m3_pair(word), upper = e4m3_pair(word >> 16);
        first = make_float2(lower.x, upper.x);
        second = make_float2(lower.y, upper.y);
    }
};

/// FP8: E4M3 codes; one scale per tensor or channel, at the end.
struct Fp8 : Encoding<8, 0, 0, Apply::AT_END, 1, false> {
    __host__ __device__ static constexpr u32 size(u32) { return 0; }
    __host__ __device__ static constexpr u32 rows(u32) { return 0; }

    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) {
        expand_e4m3(w.first[2 * j], w.first[2 * j + 1], a);
    }
};

/// Integer codes of 4 or 8 bits less 8 or 128.
template <u32 Bits> __device__ __forceinline__ void expand_centred(const Words<Bits, 0> &w, u32 j, u32 (&a)[4]) {
    if constexpr (Bits == 4) {
        expand_u4<8>(w.first[j], NoBits{}, a);
    } else {
        expand_u8(w.first[2 * j], w.first[2 * j + 1], a);
    }
}

/// Integer codes with a symmetric zero and one scale per group, of 32 or more codes (`Groups` = 1) or of 16 (2).
template <u32 Bits, class Scale, u32 Groups> struct Symmetric : Encoding<Bits, 0, 1, Apply::IN_GROUP, Groups, false> {
    __host__ __device__ static constexpr u32 size(u32) { return Scale::SIZE; }
    __host__ __device__ static constexpr u32 rows(u32) { return Groups; }

    __device__ static __forceinline__ void expand(const Words<Bits, 0> &w, u32 j, u32, u32 (&a)[4]) {
        expand_centred<Bits>(w, j, a);
    }

    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) { Scale::at(at[0], d); }
};

/// 8-bit integer codes with one scale per tensor, at the end.
struct Int8Tensor : Encoding<8, 0, 0, Apply::AT_END, 1, false> {
    __host__ __device__ static constexpr u32 size(u32) { return 0; }
    __host__ __device__ static constexpr u32 rows(u32) { return 0; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) { expand_centred<8>(w, j, a); }
};
