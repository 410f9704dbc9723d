// Products with few rows: encodings of floats.

#include "gemm/small_kernels.cuh"

#define LIST(X)                                                                                                                \
    VT_SMALL_FULL(X, nvfp4, Nvfp4Few, Nvfp4)                                                                                   \
    VT_SMALL_FULL(X, fp8, Fp8, Fp8)                                                                                            \
    VT_SMALL_BRIEF(X, mxfp4, Mxfp4)                                                                                            \
    VT_SMALL_BRIEF(X, mxfp8, Mxfp8)

VT_SMALL_KERNELS(LIST)
