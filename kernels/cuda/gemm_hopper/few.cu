// Names of the kernels: vt_few_<encoding>_<shape>, shapes as in SHAPES of src/cuda/gemm/hopper/few.rs.
#include "few.cuh"

// Nobody asks for these kernels on other architectures.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VT_FEW_KERNEL(NAME, ...)
#else
#define VT_FEW_KERNEL(NAME, ...)                                                                        \
    using NAME##_shape = hopper::FewShape<__VA_ARGS__>;                                                 \
    extern "C" __global__ void __launch_bounds__(NAME##_shape::kThreads, 1)                             \
        NAME(const __grid_constant__ hopper::Arguments arguments) {                                     \
        hopper::few<NAME##_shape>(arguments);                                                           \
    }
#endif
// Arguments of FewShape: tokens, columns, shares, halves.
#define VT_FEW(ENCODING, ...)                                          \
    VT_FEW_KERNEL(vt_few_##ENCODING##_n2_t8, __VA_ARGS__, 8, 2, 4, 2)   \
    VT_FEW_KERNEL(vt_few_##ENCODING##_n2_t16, __VA_ARGS__, 16, 2, 4, 2) \
    VT_FEW_KERNEL(vt_few_##ENCODING##_n3_t8, __VA_ARGS__, 8, 3, 4, 2)   \
    VT_FEW_KERNEL(vt_few_##ENCODING##_n3_t16, __VA_ARGS__, 16, 3, 4, 2) \
    VT_FEW_KERNEL(vt_few_##ENCODING##_n4_t8, __VA_ARGS__, 8, 4, 2, 2)   \
    VT_FEW_KERNEL(vt_few_##ENCODING##_n4_t16, __VA_ARGS__, 16, 4, 2, 2)

VT_FEW(nvfp4, hopper::FewNvfp4)
VT_FEW(mxfp4, hopper::FewMxfp4)
VT_FEW(mxfp4_ggml, hopper::FewMxfp4Ggml)
VT_FEW(fp8, hopper::FewFp8)
VT_FEW(int4_f16_g32, hopper::FewInt4<true, 32>)
VT_FEW(int4_bf16_g32, hopper::FewInt4<false, 32>)
VT_FEW(int4_f16_g64, hopper::FewInt4<true, 64>)
VT_FEW(int4_bf16_g64, hopper::FewInt4<false, 64>)
VT_FEW(int8_f16_g32, hopper::FewInt8<true, 32>)
VT_FEW(int8_bf16_g32, hopper::FewInt8<false, 32>)
VT_FEW(int8_f16_g64, hopper::FewInt8<true, 64>)
VT_FEW(int8_bf16_g64, hopper::FewInt8<false, 64>)
