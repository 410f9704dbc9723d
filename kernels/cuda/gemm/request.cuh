// What every GEMM kernel is given besides the matrix: activations, result, and the rows of a group.
//
// out [M, N'] (+)= x [M, K] * W [N', K]^T (+ bias [N']). Mirrored by `Request` in src/cuda/gemm/params.rs.
#pragma once

#include "common/types.cuh"

/// What `x` of a request holds.
enum Input : u32 { INPUT_ROWS, INPUT_NORMED, INPUT_GATED, INPUT_WEIGHTED };

struct Request {
    /// bf16 `[M, x_stride]`; f32 where they are to be normed. INPUT_WEIGHTED: times a norm's weights, but not yet divided by the
    /// root of the mean square.
    const u16 *x;
    /// f32 or bf16 `[M, out_stride]`.
    void *out;
    /// f32 `[N']`, or null.
    const float *bias;
    /// Rows of each expert as `offsets[e] .. offsets[e + 1]` of x and out; null: all M rows, one matrix.
    const u32 *offsets;
    /// Bytes from one expert's planes to the next one's.
    u64 expert_stride;
    u32 m, x_stride, out_stride;
    /// Columns that are written.
    u32 n;
    u32 out_bf16;
    /// Adds to what is there (f32 only).
    u32 accumulate;
    /// An `Input`. Kernels that make no activations are given INPUT_ROWS.
    u32 input;
    /// Of INPUT_NORMED and INPUT_WEIGHTED: what is added to the mean square.
    float eps;
    /// Of INPUT_NORMED the weights, f32 `[K]`; where `next` is wanted those of the norm that follows, f32 `[N']`.
    const float *weight;
    /// Of INPUT_GATED: the gate, and the elements from a gate to what it is multiplied with.
    u32 gate, up_at;
    /// Where not null: bf16 `[M, N']`, the f32 result times `weight`, for a product that takes INPUT_WEIGHTED.
    u16 *next;
    /// Sums of squares, as in common/half_norm.cuh, as the product before left them or as this one is to leave them: f32
    /// `[M, K / 16]` of INPUT_WEIGHTED, `[M, N' / 16]` beside `next`.
    float *squares;
};

/// Rows that a block of threads works on.
struct RowRange {
    u32 first, end;
};

__device__ __forceinline__ RowRange rows_of(const Request &r, u32 expert) {
    return r.offsets ? RowRange{r.offsets[expert], r.offsets[expert + 1]} : RowRange{0, r.m};
}

/// Writes one element, which includes the bias.
__device__ __forceinline__ void store(const Request &r, u32 row, u32 column, float value) {
    const u64 at = static_cast<u64>(row) * r.out_stride + column;
    if (r.out_bf16) {
        static_cast<u16 *>(r.out)[at] = to_bf16(value);
    } else {
        float *out = static_cast<float *>(r.out) + at;
        *out = r.accumulate ? *out + value : value;
    }
}

/// Writes four elements side by side, at once where they lie for it.
__device__ __forceinline__ void store_quad(const Request &r, u32 row, u32 column, float4 v) {
    const u64 at = static_cast<u64>(row) * r.out_stride + column;
    const u64 address = reinterpret_cast<u64>(r.out) + at * (r.out_bf16 ? 2 : 4);
    if (address % (r.out_bf16 ? 8 : 16) != 0) {
        store(r, row, column, v.x);
        store(r, row, column + 1, v.y);
        store(r, row, column + 2, v.z);
        store(r, row, column + 3, v.w);
    } else if (r.out_bf16) {
        *reinterpret_cast<uint2 *>(address) =
            make_uint2(to_bf16(v.x) | static_cast<u32>(to_bf16(v.y)) << 16, to_bf16(v.z) | static_cast<u32>(to_bf16(v.w)) << 16);
    } else {
        float4 *out = reinterpret_cast<float4 *>(address);
        if (r.accumulate) {
            const float4 before = *out;
            v = make_float4(before.x + v.x, before.y + v.y, before.z + v.z, before.w + v.w);
        }
        *out = v;
    }
}
