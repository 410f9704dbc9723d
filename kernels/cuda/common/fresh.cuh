// Reads past the first-level cache and whatever was read before.
#pragma once

/// What memory holds now, whatever was read from there before. Each of the four is read as a whole.
__device__ __forceinline__ float4 load_fresh(const float *from) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

/// The same of two.
__device__ __forceinline__ float2 load_fresh(const float2 *from) {
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
    return v;
}
