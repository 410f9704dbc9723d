// A plain read of device memory: what products with few rows are measured against.

#include "common/types.cuh"

constexpr u32 THREADS = 512, AT_ONCE = 8;

/// Reads `count` pieces of 16 bytes; writes their sum where it is a value that none has, so that nothing is left out.
extern "C" __global__ void __launch_bounds__(THREADS) vt_measure_read(const uint4 *from, u64 count, u32 *sink) {
    const u64 stride = static_cast<u64>(gridDim.x) * THREADS;
    u64 i = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    u32 sum = 0;
    for (; i + (AT_ONCE - 1) * stride < count; i += AT_ONCE * stride) {
        uint4 v[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) {
            v[j] = __ldcs(from + i + j * stride);
        }
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; ++j) {
            sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
        }
    }
    for (; i < count; i += stride) {
        const uint4 v = __ldcs(from + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9E3779B9) {
        *sink = sum;
    }
}
