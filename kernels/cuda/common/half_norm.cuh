// Half of an RMS norm, left by the product that computes what is to be normed, for the product that takes the norm: rows times the
// norm's weights, in bf16, and sums of squares of the rows themselves. What is still missing, 1 / sqrt(mean of squares + eps), is
// one factor for a row, which the second product multiplies onto its sums. A launch less, and a chain of accesses less.
#pragma once

#include <cuda_bf16.h>

#include "common/types.cuh"

/// Columns of a sum of squares. Mirrored in src/cuda/gemm/input.rs.
constexpr u32 SQUARED = 16;

/// Leaves four columns of a row, from `column` on: `next` and `squares` are the row's. Four lanes side by side have 16 columns.
__device__ __forceinline__ void leave_half_norm(u16 *next, float *squares, u32 column, float4 v, float4 weight) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(v.x * weight.x, v.y * weight.y);
    const __nv_bfloat162 high = __floats2bfloat162_rn(v.z * weight.z, v.w * weight.w);
    *reinterpret_cast<uint2 *>(next + column) =
        make_uint2(*reinterpret_cast<const u32 *>(&low), *reinterpret_cast<const u32 *>(&high));
    float sum = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    const u32 lanes = 0xFu << (threadIdx.x & 28);
    sum += __shfl_xor_sync(lanes, sum, 1);
    sum += __shfl_xor_sync(lanes, sum, 2);
    if (threadIdx.x % 4 == 0) {
        squares[column / SQUARED] = sum;
    }
}

/// What a row of `width` columns is still to be multiplied by; for a whole warp. Sums have one order.
__device__ __forceinline__ float half_norm_factor(const float *squares, u32 width, float eps) {
    float sum = 0;
    for (u32 i = threadIdx.x % 32; i < width / SQUARED; i += 32) {
        sum += squares[i];
    }
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    }
    return 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
}
