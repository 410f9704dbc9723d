// Encodings whose scales need a computation of their own: microscaling formats, zero points, and ggml's types.
#pragma once

#include "gemm/encodings.cuh"

/// Operands of E2M1 codes, times 2^(Exponent).
template <int Exponent> __device__ __forceinline__ void expand_e2m1_raised(u32 word, u32 (&a)[4]) {
    expand_e2m1(word, a);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        a[i] = multiply_pairs(a[i], power_pair(126 + Exponent));
    }
}

/// MXFP4: E2M1 codes, a power of two per 32.
struct Mxfp4 : Encoding<4, 0, 1, Apply::IN_GROUP, 1, false> {
    __host__ __device__ static constexpr u32 size(u32) { return 1; }
    __host__ __device__ static constexpr u32 rows(u32) { return 1; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) {
        expand_e2m1_raised<0>(w.first[j], a);
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) { bytes_at(at[0], d, e8m0_bits); }
};

/// ggml's MXFP4: doubled codes, halved scales (2^(e - 128), below e = 2 one bit of the mantissa).
struct Mxfp4Ggml : Encoding<4, 0, 1, Apply::IN_GROUP, 1, false> {
    __host__ __device__ static constexpr u32 size(u32) { return 1; }
    __host__ __device__ static constexpr u32 rows(u32) { return 1; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) {
        expand_e2m1_raised<1>(w.first[j], a);
    }
    __device__ static __forceinline__ float scale(u32 e) {
        return __uint_as_float(e < 2 ? 1u << (21 + e) : (e - 1) << 23);
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) { bytes_at(at[0], d, scale); }
};

/// ggml's NVFP4: doubled codes, half an unsigned E4M3 per 16 whose 0x7F is 0.
struct Nvfp4Ggml : Encoding<4, 0, 1, Apply::IN_GROUP, 2, false> {
    __host__ __device__ static constexpr u32 size(u32) { return 1; }
    __host__ __device__ static constexpr u32 rows(u32) { return 2; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) {
        expand_e2m1_raised<1>(w.first[j], a);
    }
    __device__ static __forceinline__ float scale(u32 b) {
        const float half = __uint_as_float((b & 0x7F) << 20) * __uint_as_float((127 + 119) << 23);
        return b == 0x7F ? 0.0f : half;
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) { bytes_at(at[0], d, scale); }
};

/// MXFP8: E4M3 codes, a power of two per 32.
struct Mxfp8 : Encoding<8, 0, 1, Apply::IN_GROUP, 1, false> {
    __host__ __device__ static constexpr u32 size(u32) { return 1; }
    __host__ __device__ static constexpr u32 rows(u32) { return 1; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) {
        expand_e4m3(w.first[2 * j], w.first[2 * j + 1], a);
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) { bytes_at(at[0], d, e8m0_bits); }
};

/// Integer codes with a zero point per group: `(code - (zero + add)) * d`, by way of the sum of the activations.
template <u32 Bits, class Scale> struct Zeros : Encoding<Bits, 0, 2, Apply::IN_GROUP, 1, true> {
    __host__ __device__ static constexpr u32 size(u32 plane) { return plane == 0 ? Scale::SIZE : 1; }
    __host__ __device__ static constexpr u32 rows(u32) { return 1; }
    __device__ static __forceinline__ void expand(const Words<Bits, 0> &w, u32 j, u32, u32 (&a)[4]) {
        expand_centred<Bits>(w, j, a);
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &m, u32 add) {
        // Codes are less the middle of their range.
        const int middle = (Bits == 4 ? 8 : 128) - static_cast<int>(add);
        Scale::at(at[0], d);
        bytes_at(at[1], m, [&](u32 zero) { return static_cast<float>(middle - static_cast<int>(zero)); });
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            m[j] = make_float2(m[j].x * d[j].x, m[j].y * d[j].y);
        }
    }
};

// Names of integer encodings for lists of kernels: a template's arguments have commas, which a macro does not take.
using U4F16 = Symmetric<4, F16, 1>;
using U4Bf16 = Symmetric<4, Bf16, 1>;
using U4F32 = Symmetric<4, F32, 1>;
using U8F16 = Symmetric<8, F16, 1>;
using U8Bf16 = Symmetric<8, Bf16, 1>;
using U8F32 = Symmetric<8, F32, 1>;
using U4F16Zeros = Zeros<4, F16>;
using U4Bf16Zeros = Zeros<4, Bf16>;
using U8F16Zeros = Zeros<8, F16>;
using U8Bf16Zeros = Zeros<8, Bf16>;

/// Q5_0: four bits and one, less 16.
struct Q5Symmetric : Encoding<4, 1, 1, Apply::IN_GROUP, 1, false> {
    __host__ __device__ static constexpr u32 size(u32) { return 2; }
    __host__ __device__ static constexpr u32 rows(u32) { return 1; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) {
        expand_u4<16>(w.first[j], OneBit<4>(w.second[0], j), a);
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) { F16::at(at[0], d); }
};

/// Q4_1 (`Extra` = 0) and Q5_1 (1): `code * d + m`.
template <u32 Extra> struct ScaleAndMin : Encoding<4, Extra, 2, Apply::IN_GROUP, 1, true> {
    __host__ __device__ static constexpr u32 size(u32) { return 2; }
    __host__ __device__ static constexpr u32 rows(u32) { return 1; }
    __device__ static __forceinline__ void expand(const Words<4, Extra> &w, u32 j, u32, u32 (&a)[4]) {
        if constexpr (Extra == 0) {
            expand_u4<0>(w.first[j], NoBits{}, a);
        } else {
            expand_u4<0>(w.first[j], OneBit<4>(w.second[0], j), a);
        }
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &m, u32) {
        F16::at(at[0], d);
        F16::at(at[1], m);
    }
};

__device__ __forceinline__ void multiply_eight(Eight &to, const Eight &by, float sign) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        to[j] = make_float2(to[j].x * by[j].x * sign, to[j].y * by[j].y * sign);
    }
}

/// Q4_K (`Extra` = 0) and Q5_K (1): `(d * sc) * code - dmin * mn`; planes sc, mn, d, dmin.
template <u32 Extra> struct KQuant : Encoding<4, Extra, 4, Apply::IN_GROUP, 1, true> {
    __host__ __device__ static constexpr u32 size(u32 plane) { return plane < 2 ? 1 : 2; }
    __host__ __device__ static constexpr u32 rows(u32) { return 1; }
    __device__ static __forceinline__ void expand(const Words<4, Extra> &w, u32 j, u32, u32 (&a)[4]) {
        if constexpr (Extra == 0) {
            expand_u4<0>(w.first[j], NoBits{}, a);
        } else {
            expand_u4<0>(w.first[j], OneBit<4>(w.second[0], j), a);
        }
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &m, u32) {
        const auto number = [](u32 b) { return static_cast<float>(b); };
        Eight super;
        bytes_at(at[0], d, number);
        F16::at(at[2], super);
        multiply_eight(d, super, 1);
        bytes_at(at[1], m, number);
        F16::at(at[3], super);
        multiply_eight(m, super, -1);
    }
};

/// Q6_K: four bits and two, less 32; planes sc (signed, per 16) and d.
struct Q6K : Encoding<4, 2, 2, Apply::IN_GROUP, 2, false> {
    __host__ __device__ static constexpr u32 size(u32 plane) { return plane == 0 ? 1 : 2; }
    __host__ __device__ static constexpr u32 rows(u32 plane) { return plane == 0 ? 2 : 1; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) {
        expand_u4<32>(w.first[j], TwoBits<4>(w.second, j), a);
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) {
        Eight super;
        bytes_at(at[0], d, [](u32 b) { return static_cast<float>(static_cast<int8_t>(b)); });
        F16::at(at[1], super);
        multiply_eight(d, super, 1);
    }
};

/// Operands of codes of two bits and `High`, less `Zero`.
template <u32 Zero, class High> __device__ __forceinline__ void expand_u2(const u32 *words, u32 j, const High &high, u32 (&a)[4]) {
    const TwoBits<0> low(words, j);
    a[0] = integer_pair<Zero>(low.template at<0>() | high.template at<0>());
    a[2] = integer_pair<Zero>(low.template at<1>() | high.template at<1>());
    a[1] = integer_pair<Zero>(low.template at<2>() | high.template at<2>());
    a[3] = integer_pair<Zero>(low.template at<3>() | high.template at<3>());
}

/// Q2_K: `(d * (scmn % 16)) * code - dmin * (scmn / 16)`; planes scmn (per 16), d, dmin.
struct Q2K : Encoding<2, 0, 3, Apply::IN_GROUP, 2, true> {
    __host__ __device__ static constexpr u32 size(u32 plane) { return plane == 0 ? 1 : 2; }
    __host__ __device__ static constexpr u32 rows(u32 plane) { return plane == 0 ? 2 : 1; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) {
        expand_u2<0>(w.first, j, NoBits{}, a);
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &m, u32) {
        Eight super;
        bytes_at(at[0], d, [](u32 b) { return static_cast<float>(b % 16); });
        F16::at(at[1], super);
        multiply_eight(d, super, 1);
        bytes_at(at[0], m, [](u32 b) { return static_cast<float>(b / 16); });
        F16::at(at[2], super);
        multiply_eight(m, super, -1);
    }
};

/// Q3_K: two bits and one, less 4; planes sc (less 32, per 16) and d.
struct Q3K : Encoding<2, 1, 2, Apply::IN_GROUP, 2, false> {
    __host__ __device__ static constexpr u32 size(u32 plane) { return plane == 0 ? 1 : 2; }
    __host__ __device__ static constexpr u32 rows(u32 plane) { return plane == 0 ? 2 : 1; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) {
        expand_u2<4>(w.first, j, OneBit<2>(w.second[0], j), a);
    }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) {
        Eight super;
        bytes_at(at[0], d, [](u32 b) { return static_cast<float>(static_cast<int>(b) - 32); });
        F16::at(at[1], super);
        multiply_eight(d, super, 1);
    }
};

/// IQ4_NL: a table of sixteen values, d per 32.
struct Iq4Nl : Encoding<4, 0, 1, Apply::IN_GROUP, 1, false> {
    __host__ __device__ static constexpr u32 size(u32) { return 2; }
    __host__ __device__ static constexpr u32 rows(u32) { return 1; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) { expand_iq4(w.first[j], a); }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) { F16::at(at[0], d); }
};

/// IQ4_XS: the same table; planes sc (less 32, per 32) and d.
struct Iq4Xs : Encoding<4, 0, 2, Apply::IN_GROUP, 1, false> {
    __host__ __device__ static constexpr u32 size(u32 plane) { return plane == 0 ? 1 : 2; }
    __host__ __device__ static constexpr u32 rows(u32) { return 1; }
    __device__ static __forceinline__ void expand(const W &w, u32 j, u32, u32 (&a)[4]) { expand_iq4(w.first[j], a); }
    __device__ static __forceinline__ void scales(const u32 *at, Eight &d, Eight &, u32) {
        Eight super;
        bytes_at(at[0], d, [](u32 b) { return static_cast<float>(static_cast<int>(b) - 32); });
        F16::at(at[1], super);
        multiply_eight(d, super, 1);
    }
};
