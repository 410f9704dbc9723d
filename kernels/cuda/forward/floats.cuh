// Float types of bundles and of activations, and sums over a thread block.
//
// Axes: T tokens.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace vt {

// Codes of `FloatType` in the launches.
constexpr uint32_t kF32 = 0, kF16 = 1, kBf16 = 2;

// Element `i` of floats of a type that only the launch knows, exactly.
__device__ __forceinline__ float load_float(const void* data, uint32_t type, uint64_t i) {
    if (type == kF32) return static_cast<const float*>(data)[i];
    if (type == kF16) return __half2float(static_cast<const __half*>(data)[i]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
}

// The sum over all lanes, in every lane; the order of additions is fixed.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, offset);
    return value;
}

// The sum over all threads of a block of whole warps, in every thread; `partial` holds 32 floats, and may be used again
// after the next barrier. The order of additions depends on the block's size alone.
__device__ __forceinline__ float block_sum(float value, float* partial) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = warp_sum(value);
    __syncthreads();
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

// Four bf16 as they lie in memory.
struct alignas(8) Bf16x4 {
    __nv_bfloat162 low, high;
};

__device__ __forceinline__ Bf16x4 narrow(float4 v) {
    return {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
}

}  // namespace vt
