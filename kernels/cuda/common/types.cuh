// Short names, and exact conversions between small float formats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

/// The f32 whose upper half is `bits`.
__device__ __forceinline__ float bf16_bits(u32 bits) { return __uint_as_float(bits << 16); }

/// The f32 of IEEE binary16 `bits`.
__device__ __forceinline__ float f16_bits(u16 bits) { return __half2float(__ushort_as_half(bits)); }

/// OCP E4M3: bias 7, subnormals, 0x7F and 0xFF NaN.
__device__ __forceinline__ float e4m3_bits(u32 b) {
    const u32 sign = (b & 0x80) << 24, magnitude = b & 0x7F;
    if (magnitude == 0x7F) {
        return __uint_as_float(sign | 0x7FC00000);
    }
    // The fields in their places of a binary32 are 2^-120 times the value, subnormals included.
    return __uint_as_float(sign | (magnitude << 20)) * __uint_as_float((127 + 120) << 23);
}

/// OCP E8M0: 2^(e - 127); e = 0 is a subnormal, 255 NaN.
__device__ __forceinline__ float e8m0_bits(u32 e) {
    return __uint_as_float(e == 0 ? 0x00400000 : e == 255 ? 0x7FC00000 : e << 23);
}

/// `value` rounded to the upper half of a binary32.
__device__ __forceinline__ u16 to_bf16(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
