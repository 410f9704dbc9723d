// Names of the kernels: vt_hopper_<encoding>_<shape>, shapes as in SHAPES of src/cuda/gemm/hopper/schedule.rs.
#pragma once
#include "kernel.cuh"

// Nobody asks for these kernels on other architectures.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VT_HOPPER_KERNEL(NAME, CLUSTER, ...)
#else
#define VT_HOPPER_KERNEL(NAME, CLUSTER, ...)                                                                                   \
    using NAME##_shape = hopper::Shape<__VA_ARGS__>;                                                                           \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(NAME##_shape::kThreads, 1)                    \
        NAME(const __grid_constant__ hopper::Arguments arguments) {                                                            \
        hopper::gemm<NAME##_shape>(arguments);                                                                                 \
    }
#endif

// Arguments of Shape: blocks, tokens, groups, stages, cluster, batch, depth. S4 and S8 are stages for codes of 4 and of 8 bits.
#define VT_HOPPER_SHAPES(ENCODING, STAGES, ...)                                                               \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b1_t16, 1, __VA_ARGS__, 1, 16, 2, STAGES(24, 16), 1, 2, 2)        \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b2_t16, 1, __VA_ARGS__, 2, 16, 2, STAGES(16, 9), 1, 2, 2)         \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b2_t16_g3, 1, __VA_ARGS__, 2, 16, 3, STAGES(10, 6), 1, 2, 2)      \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b1_t32, 1, __VA_ARGS__, 1, 32, 2, STAGES(16, 12), 1, 2, 2)        \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b2_t32, 1, __VA_ARGS__, 2, 32, 2, STAGES(12, 8), 1, 2, 2)         \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b1_t64, 1, __VA_ARGS__, 1, 64, 2, STAGES(10, 8), 1, 2, 2)         \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b2_t64, 1, __VA_ARGS__, 2, 64, 2, STAGES(8, 6), 1, 2, 2)          \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b1_t128, 1, __VA_ARGS__, 1, 128, 2, STAGES(8, 6), 1, 2, 2)        \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b2_t128, 1, __VA_ARGS__, 2, 128, 2, STAGES(6, 5), 1, 1, 2)        \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b1_t256, 1, __VA_ARGS__, 1, 256, 2, STAGES(5, 4), 1, 1, 2)        \
    VT_HOPPER_KERNEL(vt_hopper_##ENCODING##_b1_t256_c2, 2, __VA_ARGS__, 1, 256, 2, STAGES(5, 4), 2, 2, 2)
#define VT_HOPPER_STAGES_4(S4, S8) S4
#define VT_HOPPER_STAGES_8(S4, S8) S8
// Codes of 4 and of 8 bits.
#define VT_HOPPER_4(ENCODING, ...) VT_HOPPER_SHAPES(ENCODING, VT_HOPPER_STAGES_4, __VA_ARGS__)
#define VT_HOPPER_8(ENCODING, ...) VT_HOPPER_SHAPES(ENCODING, VT_HOPPER_STAGES_8, __VA_ARGS__)
