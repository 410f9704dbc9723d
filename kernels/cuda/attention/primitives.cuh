// Tensor-core and copy instructions that attention uses (PTX ISA: mma.sync, ldmatrix, movmatrix, cp.async).

#pragma once

#include <cstdint>

namespace vt {

// d [16, 8] += a [16, 16] * b [16, 8], bf16 into f32. With g = lane / 4 and t = lane % 4, `a` holds pairs along k: rows g and
// g + 8 at k = 2t, then the same at k = 2t + 8; `b` holds pairs along k of column g at k = 2t and 2t + 8; `d` holds
// columns 2t and 2t + 1 of row g, then of row g + 8.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which each lane holds the pair at row lane / 4, columns 2 (lane % 4).
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices; lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// Copies 16 bytes, or writes zeros without reading where `valid` is false.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
    const uint32_t bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The same for 8 bytes.
__device__ __forceinline__ void copy_async_8(uint32_t to, const void* from, bool valid) {
    const uint32_t bytes = valid ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Left` groups of copies are under way.
template <int Left>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// `low` in the lower half.
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

constexpr float kLog2E = 1.4426950408889634f;

// tanh with an absolute error of some 1e-7.
__device__ __forceinline__ float tanh_fast(float x) {
    const float e = exp2_fast(x * (2.0f * kLog2E));
    return 1.0f - __fdividef(2.0f, e + 1.0f);
}

// Scores as base-2 logarithms of weights: the product of query and key times `scale`, capped where there is a cap. What a
// kernel keeps is `score * log2_scale`.
struct Scores {
    // Without a cap, log2(e) * scale; with one, log2(e).
    float log2_scale;
    // 0: none.
    float cap;
    // scale / cap.
    float scale_over_cap;

    __device__ __forceinline__ float operator()(float product) const {
        return cap == 0.0f ? product : cap * tanh_fast(product * scale_over_cap);
    }
};

}  // namespace vt
