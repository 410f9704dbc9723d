// Products with row-major bf16 matrices: weights go from memory to the tensor cores as they are.
//
// A block computes 16 columns for up to 64 rows; its warps take turns along K. Lane `l` reads eight elements along K of columns
// `l / 4` and `l / 4 + 8` and of row `l / 4` of the activations, from the same place: which of them meet in one product
// does not matter, as long as both operands agree.

#include "common/async.cuh"
#include "common/order.cuh"
#include "gemm/request.cuh"

constexpr u32 WARPS = 8, THREADS = 32 * WARPS, COLUMNS = 16, UNIT = 32, AT_ONCE = 4;

struct Rows {
    const u8 *data;
    u32 type;
    u32 n, k;
};

/// Eight elements from `k` on, or zeros beyond K (a multiple of eight).
__device__ __forceinline__ uint4 eight(const u16 *row, bool valid, u32 k, u32 end) {
    return valid && k < end ? __ldg(reinterpret_cast<const uint4 *>(row + k)) : make_uint4(0, 0, 0, 0);
}

template <u32 MB> __device__ __forceinline__ void multiply_rows(const Rows &w, const Request &r) {
    __shared__ float sums[WARPS][8 * MB][COLUMNS + 1];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    let_next_start();
    if (r.offsets) {
        wait_for_previous();
    }
    const RowRange range = rows_of(r, blockIdx.z);
    const u16 *data = reinterpret_cast<const u16 *>(w.data + blockIdx.z * r.expert_stride);
    const u32 n0 = blockIdx.x * COLUMNS;
    const u16 *first = data + static_cast<u64>(n0 + g) * w.k, *second = first + static_cast<u64>(8) * w.k;
    const bool has_first = n0 + g < w.n, has_second = n0 + g + 8 < w.n;
    wait_for_previous();
    for (u32 m0 = range.first + blockIdx.y * (8 * MB); m0 < range.end; m0 += gridDim.y * (8 * MB)) {
        float acc[MB][4] = {};
        for (u32 k0 = warp * (UNIT * AT_ONCE); k0 < w.k; k0 += WARPS * UNIT * AT_ONCE) {
            uint4 a[AT_ONCE][2];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const u32 k = k0 + UNIT * i + 8 * q;
                a[i][0] = eight(first, has_first, k, w.k);
                a[i][1] = eight(second, has_second, k, w.k);
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const u32 k = k0 + UNIT * i + 8 * q;
                const u32 lower[4] = {a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y};
                const u32 upper[4] = {a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w};
#pragma unroll
                for (u32 m = 0; m < MB; ++m) {
                    const u32 row = m0 + 8 * m + g;
                    const uint4 b = eight(r.x + static_cast<u64>(row) * r.x_stride, row < range.end, k, w.k);
                    multiply_add(acc[m], lower, b.x, b.y);
                    multiply_add(acc[m], upper, b.z, b.w);
                }
            }
        }
#pragma unroll
        for (u32 m = 0; m < MB; ++m) {
            sums[warp][8 * m + 2 * q][g] = acc[m][0];
            sums[warp][8 * m + 2 * q + 1][g] = acc[m][1];
            sums[warp][8 * m + 2 * q][g + 8] = acc[m][2];
            sums[warp][8 * m + 2 * q + 1][g + 8] = acc[m][3];
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < 8 * MB * COLUMNS; i += THREADS) {
            const u32 row = m0 + i / COLUMNS, column = n0 + i % COLUMNS;
            if (row < range.end && column < w.n) {
                float value = r.bias ? r.bias[column] : 0.0f;
#pragma unroll
                for (u32 s = 0; s < WARPS; ++s) {
                    value += sums[s][i / COLUMNS][i % COLUMNS];
                }
                store(r, row, column, value);
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
vt_gemm_rows_8(const __grid_constant__ Rows w, const __grid_constant__ Request r) {
    multiply_rows<1>(w, r);
}

extern "C" __global__ void __launch_bounds__(THREADS)
vt_gemm_rows_64(const __grid_constant__ Rows w, const __grid_constant__ Request r) {
    multiply_rows<8>(w, r);
}
