// Products of few rows with experts: encodings of floats.

#include "gemm/experts.cuh"

#define LIST(X)                                                                                                                \
    VT_EXPERTS_4(X, nvfp4, Nvfp4Few, Nvfp4)                                                                                    \
    VT_EXPERTS_4(X, mxfp4, Mxfp4, Mxfp4)                                                                                       \
    VT_EXPERTS_8(X, fp8, Fp8)                                                                                                  \
    VT_EXPERTS_8(X, mxfp8, Mxfp8)

VT_EXPERT_KERNELS(LIST)
