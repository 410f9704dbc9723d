// Where a key or a value lies in the paged cache. The Rust side of the same layout is `src/cuda/kv_cache.rs`.
//
// A layer is [blocks][2][kv_heads][16][D]: keys, then values, of 16 positions; a head's 16 keys are one contiguous run.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace vt {

// Positions in a block.
constexpr uint32_t kBlockLen = 16;

// Elements between the keys of a block's head and its values.
__device__ __forceinline__ uint64_t values_offset(uint32_t kv_heads, uint32_t dim) {
    return static_cast<uint64_t>(kv_heads) * kBlockLen * dim;
}

// First element of the keys of a head in a block.
__device__ __forceinline__ uint64_t keys_of(uint32_t block, uint32_t kv_heads, uint32_t head, uint32_t dim) {
    return (static_cast<uint64_t>(block) * 2 * kv_heads + head) * kBlockLen * dim;
}

// Eight stored elements, and as pairs of bf16. E4M3 becomes bf16 exactly.
template <typename T>
struct Eight;

template <>
struct Eight<__nv_bfloat16> {
    uint4 raw;
    __device__ __forceinline__ void load(const __nv_bfloat16* from) { raw = *reinterpret_cast<const uint4*>(from); }
    __device__ __forceinline__ void clear() { raw = make_uint4(0, 0, 0, 0); }
    __device__ __forceinline__ void widen(uint32_t (&pairs)[4]) const {
        pairs[0] = raw.x, pairs[1] = raw.y, pairs[2] = raw.z, pairs[3] = raw.w;
    }
};

// Two E4M3 codes in bytes 1 and 3 of `codes` as bf16: the seven bits below the sign are exponent and mantissa in both, so
// that moving them leaves a number that is 2^120 too small (127 - 7), subnormal ones included.
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t codes) {
    uint32_t moved = (codes & 0x80008000u) | ((codes >> 4) & 0x07F007F0u);
    __nv_bfloat162 value;
    *reinterpret_cast<uint32_t*>(&value) = moved;
    // 0x7B80 is 2^120.
    __nv_bfloat162 factor;
    *reinterpret_cast<uint32_t*>(&factor) = 0x7B807B80u;
    value = __hmul2(value, factor);
    return *reinterpret_cast<uint32_t*>(&value);
}

template <>
struct Eight<__nv_fp8_e4m3> {
    uint2 raw;
    __device__ __forceinline__ void load(const __nv_fp8_e4m3* from) { raw = *reinterpret_cast<const uint2*>(from); }
    __device__ __forceinline__ void clear() { raw = make_uint2(0, 0); }
    __device__ __forceinline__ void widen(uint32_t (&pairs)[4]) const {
        pairs[0] = widen_e4m3(__byte_perm(raw.x, 0, 0x1404));
        pairs[1] = widen_e4m3(__byte_perm(raw.x, 0, 0x3424));
        pairs[2] = widen_e4m3(__byte_perm(raw.y, 0, 0x1404));
        pairs[3] = widen_e4m3(__byte_perm(raw.y, 0, 0x3424));
    }
};

}  // namespace vt
