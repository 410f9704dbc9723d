// Products with row-major bf16 matrices of many rows, such as a head, on Hopper: memory sets the pace, whatever the number of
// tokens up to 128.
//
// A block computes 128 columns for up to 64 tokens, or 192 for up to 128, so that activations are fetched half as often. One thread
// copies tiles of 64 along K of the matrix and of the activations into a ring; 16 columns a warp, the others load the matrix's as
// the A operand of wgmma, the activations' are the B operand where they lie. The matrix's first tiles are on their way before the
// kernel before this one has ended.

#include "common/async.cuh"
#include "common/hopper.cuh"
#include "common/order.cuh"
#include "gemm/request.cuh"
#include "gemm_hopper/wgmma.cuh"

// Other architectures have gemm/rows.cu.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace {

constexpr u32 STEP = 64, ROW_BYTES = 2 * STEP, ALIGN = 1024;

/// Mirrored by `SHAPES` in src/cuda/gemm/hopper/rows.rs.
template <u32 TOKENS> struct Ring {
    static constexpr u32 STAGES = TOKENS <= 16 ? 6 : TOKENS == 64 ? 4 : 5, WARPS = TOKENS == 128 ? 12 : 8;
    static constexpr u32 COLUMNS = 16 * WARPS, THREADS = 32 * (WARPS + 1), BLOCKS = TOKENS == 128 ? 1 : 2;
    static constexpr u32 MATRIX = COLUMNS * ROW_BYTES, BYTES = MATRIX + TOKENS * ROW_BYTES;
};

template <u32 TOKENS>
__device__ __forceinline__ void multiply_rows(const hopper::TensorMap &w, const hopper::TensorMap &x, const Request &r, u32 k) {
    using R = Ring<TOKENS>;
    constexpr u32 COLUMNS = R::COLUMNS, WARPS = R::WARPS;
    extern __shared__ u8 dynamic[];
    __shared__ u64 full[R::STAGES], free[R::STAGES];
    u8 *ring = dynamic + (ALIGN - shared_address(dynamic) % ALIGN) % ALIGN;
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 n0 = blockIdx.x * COLUMNS, m0 = blockIdx.y * TOKENS, steps = (k + STEP - 1) / STEP;
    let_next_start();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < R::STAGES; ++i) {
            hopper::barrier_init(full + i, 1);
            hopper::barrier_init(free + i, WARPS);
        }
        hopper::barrier_init_fence();
    }
    __syncthreads();
    if (warp == WARPS) {
        if (lane != 0) {
            return;
        }
        const auto copy_matrix = [&](u32 step) {
            const u32 stage = step % R::STAGES;
            hopper::barrier_expect(full + stage, R::BYTES);
            hopper::copy_box(ring + stage * R::BYTES, &w, step * STEP, n0, full + stage);
        };
        const auto copy_x = [&](u32 step) {
            const u32 stage = step % R::STAGES;
            hopper::copy_box(ring + stage * R::BYTES + R::MATRIX, &x, step * STEP, m0, full + stage);
        };
        const u32 ahead = min(R::STAGES, steps);
        for (u32 step = 0; step < ahead; ++step) {
            copy_matrix(step);
        }
        wait_for_previous();
        for (u32 step = 0; step < ahead; ++step) {
            copy_x(step);
        }
        for (u32 step = ahead; step < steps; ++step) {
            hopper::barrier_wait(free + step % R::STAGES, (step / R::STAGES - 1) & 1);
            copy_matrix(step);
            copy_x(step);
        }
        return;
    }
    wait_for_previous();
    float acc[TOKENS / 2];
#pragma unroll
    for (u32 i = 0; i < TOKENS / 2; ++i) {
        acc[i] = 0;
    }
    // The row of the matrix that the lane gives ldmatrix, and the 16 bytes of it: rows l % 8, then 8 more, then the next 16 bytes.
    const u32 row = 16 * warp + lane % 8 + lane / 8 % 2 * 8, piece = lane / 16;
    for (u32 step = 0; step < steps; ++step) {
        const u32 stage = step % R::STAGES, at = shared_address(ring + stage * R::BYTES);
        hopper::barrier_wait(full + stage, step / R::STAGES & 1);
        u32 a[STEP / 16][4];
#pragma unroll
        for (u32 i = 0; i < STEP / 16; ++i) {
            load_matrices(a[i], at + row * ROW_BYTES + ((2 * i + piece) ^ (row % 8)) * 16);
        }
        const u32 b = hopper::tile_descriptor(at + R::MATRIX);
        hopper::wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < STEP / 16; ++i) {
            hopper::wgmma<TOKENS>(acc, a[i], b + 2 * i);
        }
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; ++i) {
            hopper::hold(acc[i]);
        }
        if (lane == 0) {
            hopper::barrier_arrive(free + stage);
        }
    }
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const u32 column = n0 + 16 * warp + lane / 4 + 8 * h;
        if (column >= r.n) {
            continue;
        }
        const float bias = r.bias ? r.bias[column] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < TOKENS / 8; ++i) {
#pragma unroll
            for (u32 e = 0; e < 2; ++e) {
                const u32 token = m0 + 8 * i + 2 * (lane % 4) + e;
                if (token < r.m) {
                    store(r, token, column, acc[4 * i + 2 * h + e] + bias);
                }
            }
        }
    }
}

}  // namespace

#define VT_ROWS(TOKENS)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(Ring<TOKENS>::THREADS, Ring<TOKENS>::BLOCKS)                                  \
        vt_hopper_rows_##TOKENS(const __grid_constant__ hopper::TensorMap w, const __grid_constant__ hopper::TensorMap x,      \
                                const __grid_constant__ Request r, u32 k) {                                                    \
        multiply_rows<TOKENS>(w, x, r, k);                                                                                     \
    }

VT_ROWS(16)
VT_ROWS(32)
VT_ROWS(64)
VT_ROWS(128)

#endif
