// Kernels and the table of them that the host reads: one definition of their shapes.
#pragma once

#include "gemm/encodings_more.cuh"
#include "gemm/small.cuh"

/// A kernel, as the host looks it up. Mirrored by `Entry` in src/cuda/gemm/small.rs.
struct SmallKernel {
    char name[40];
    /// Rows and columns of a block, its threads, and its bytes of shared memory besides the activations.
    u32 rows, columns, threads, fixed_bytes;
};

/// Units in flight per warp: as many as asked for, or what there is room for beside the activations.
template <class E, u32 MB, u32 NT, u32 WN, u32 WK, u32 D> struct Depth {
    using One = Shape<E, MB, NT, WN, WK, 1>;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
    // Of 99 KB.
    static constexpr u32 ROOM = 80 << 10;
#else
    static constexpr u32 ROOM = 160 << 10;
#endif
    static constexpr u32 FIT = ROOM > One::SUMS ? (ROOM - One::SUMS) / One::RING : 0;
    static constexpr u32 VALUE = D <= FIT ? D : FIT >= 2 ? FIT : 2;
};

/// `X(name, tag, encoding, rows, NT, WN, WK, D)` for each kernel of a list.
#define VT_SMALL_KERNEL(NAME, TAG, ENCODING, ROWS, NT, WN, WK, D)                                                              \
    extern "C" __global__ void __launch_bounds__(32 * (WN) * (WK), 1)                                                          \
        vt_gemm_##NAME##_##ROWS##_##TAG(const __grid_constant__ Tiled w, const __grid_constant__ Request r,                    \
                                        const __grid_constant__ Plan p) {                                                      \
        small_product<ENCODING, ROWS / 8, NT, WN, WK, Depth<ENCODING, ROWS / 8, NT, WN, WK, D>::VALUE>(w, r, p);                   \
    }
#define VT_SMALL_ENTRY(NAME, TAG, ENCODING, ROWS, NT, WN, WK, D)                                                               \
    SmallKernel{"vt_gemm_" #NAME "_" #ROWS "_" #TAG, ROWS, 64 * (NT) * (WN), 32 * (WN) * (WK),                                 \
                Shape<ENCODING, ROWS / 8, NT, WN, WK, Depth<ENCODING, ROWS / 8, NT, WN, WK, D>::VALUE>::FIXED},

/// Compiles a list `LIST(X)` and its table.
#define VT_SMALL_KERNELS(LIST)                                                                                                 \
    LIST(VT_SMALL_KERNEL)                                                                                                      \
    extern "C" __constant__ SmallKernel vt_gemm_small_kernels[] = {LIST(VT_SMALL_ENTRY)};

/// Few rows and many, a tile column or several side by side, for matrices with few and with many columns.
#define VT_SMALL_FULL(X, NAME, FEW, ENCODING)                                                                                  \
    X(NAME, narrow, FEW, 8, 1, 1, 12, 5)                                                                                       \
    X(NAME, wide, FEW, 8, 1, 4, 4, 4)                                                                                          \
    X(NAME, narrow, ENCODING, 16, 1, 2, 8, 3)                                                                                  \
    X(NAME, wide, ENCODING, 16, 1, 4, 4, 4)                                                                                    \
    X(NAME, narrow, ENCODING, 64, 1, 1, 8, 3)                                                                                  \
    X(NAME, wide, ENCODING, 64, 1, 2, 4, 4)

/// Kernels for encodings that are less in a hurry.
#define VT_SMALL_BRIEF(X, NAME, ENCODING)                                                                                      \
    X(NAME, narrow, ENCODING, 8, 1, 1, 12, 5)                                                                                  \
    X(NAME, narrow, ENCODING, 16, 1, 1, 12, 4)                                                                                 \
    X(NAME, narrow, ENCODING, 32, 1, 1, 8, 4)
