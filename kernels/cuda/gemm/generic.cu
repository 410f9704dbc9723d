// Products with a matrix of any kind: weights are decoded to f32 by their own formula and multiplied in f32.
//
// The kernel of last resort, for whatever the fast ones are not made for, and the measure that they are tested against. Any
// M, N, K. A block computes 64 columns for 32 rows at a time.

#include "gemm/raw.cuh"
#include "gemm/request.cuh"
#include "gemm/tiled.cuh"

constexpr u32 THREADS = 256, BLOCK_N = 64, BLOCK_M = 32, BLOCK_K = 32;
/// Rows per thread.
constexpr u32 THREAD_M = BLOCK_M / (THREADS / BLOCK_N);

struct Rows {
    const u8 *data;
    /// A `ScaleType`: f16, bf16 or f32.
    u32 type;
    u32 n, k;
};

/// Eight weights of column `n` from `k` on, `BLOCK_N + 1` apart.
__device__ __forceinline__ void weights(const Tiled &w, u64 expert_bytes, u32 n, u32 k, float *out) {
    decode_eight(w, expert_bytes, n, k, out, BLOCK_N + 1);
}

__device__ __forceinline__ void weights(const Rows &w, u64 expert_bytes, u32 n, u32 k, float *out) {
    const ScalePlane as_plane{nullptr, w.type, 0, 0, 0};
    for (u32 i = 0; i < 8; ++i) {
        const u64 at = static_cast<u64>(n) * w.k + k + i;
        out[i * (BLOCK_N + 1)] = k + i < w.k ? scale_value(as_plane, w.data + expert_bytes, at) : 0;
    }
}

__device__ __forceinline__ void weights(const Raw &w, u64 expert_bytes, u32 n, u32 k, float *out) {
    const u64 block = static_cast<u64>(n) * (w.k / w.weights) + k / w.weights;
    float eight[8];
    raw_eight(w, w.blocks + expert_bytes + block * w.bytes, k % w.weights / 8, eight);
    for (u32 i = 0; i < 8; ++i) {
        out[i * (BLOCK_N + 1)] = eight[i];
    }
}

template <class Matrix> __device__ __forceinline__ void multiply(const Matrix &w, const Request &r) {
    __shared__ float tile[BLOCK_K][BLOCK_N + 1];
    __shared__ float rows[BLOCK_M][BLOCK_K];
    const u32 column = threadIdx.x % BLOCK_N, part = threadIdx.x / BLOCK_N;
    const u32 n = blockIdx.x * BLOCK_N + column;
    const u64 expert_bytes = blockIdx.z * r.expert_stride;
    const RowRange range = rows_of(r, blockIdx.z);
    for (u32 m0 = range.first + blockIdx.y * BLOCK_M; m0 < range.end; m0 += gridDim.y * BLOCK_M) {
        float acc[THREAD_M] = {};
        for (u32 k0 = 0; k0 < w.k; k0 += BLOCK_K) {
            __syncthreads();
            float *eight = &tile[8 * part][column];
            if (n < w.n && k0 + 8 * part < w.k) {
                weights(w, expert_bytes, n, k0 + 8 * part, eight);
            } else {
                for (u32 i = 0; i < 8; ++i) {
                    eight[i * (BLOCK_N + 1)] = 0;
                }
            }
            for (u32 i = threadIdx.x; i < BLOCK_M * BLOCK_K; i += THREADS) {
                const u32 m = m0 + i / BLOCK_K, k = k0 + i % BLOCK_K;
                const bool inside = m < range.end && k < w.k;
                rows[i / BLOCK_K][i % BLOCK_K] = inside ? bf16_bits(__ldg(r.x + static_cast<u64>(m) * r.x_stride + k)) : 0;
            }
            __syncthreads();
            for (u32 k = 0; k < BLOCK_K; ++k) {
                const float weight = tile[k][column];
                for (u32 i = 0; i < THREAD_M; ++i) {
                    acc[i] = fmaf(rows[THREAD_M * part + i][k], weight, acc[i]);
                }
            }
        }
        for (u32 i = 0; i < THREAD_M; ++i) {
            const u32 m = m0 + THREAD_M * part + i;
            if (m < range.end && n < w.n) {
                store(r, m, n, r.bias ? acc[i] + r.bias[n] : acc[i]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
vt_gemm_generic_tiled(const __grid_constant__ Tiled w, const __grid_constant__ Request r) {
    multiply(w, r);
}

extern "C" __global__ void __launch_bounds__(THREADS)
vt_gemm_generic_rows(const __grid_constant__ Rows w, const __grid_constant__ Request r) {
    multiply(w, r);
}

extern "C" __global__ void __launch_bounds__(THREADS)
vt_gemm_generic_raw(const __grid_constant__ Raw w, const __grid_constant__ Request r) {
    multiply(w, r);
}
