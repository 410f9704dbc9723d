// Products with few rows: ggml's encodings.

#include "gemm/small_kernels.cuh"

#define LIST(X)                                                                                                                \
    VT_SMALL_BRIEF(X, q4_1, ScaleAndMin<0>)                                                                                    \
    VT_SMALL_BRIEF(X, q5_0, Q5Symmetric)                                                                                       \
    VT_SMALL_BRIEF(X, q5_1, ScaleAndMin<1>)                                                                                    \
    VT_SMALL_BRIEF(X, q2_k, Q2K)                                                                                               \
    VT_SMALL_BRIEF(X, q3_k, Q3K)                                                                                               \
    VT_SMALL_BRIEF(X, q4_k, KQuant<0>)                                                                                         \
    VT_SMALL_BRIEF(X, q5_k, KQuant<1>)                                                                                         \
    VT_SMALL_BRIEF(X, q6_k, Q6K)                                                                                               \
    VT_SMALL_BRIEF(X, iq4_nl, Iq4Nl)                                                                                           \
    VT_SMALL_BRIEF(X, iq4_xs, Iq4Xs)                                                                                           \
    VT_SMALL_BRIEF(X, mxfp4_ggml, Mxfp4Ggml)                                                                                   \
    VT_SMALL_BRIEF(X, nvfp4_ggml, Nvfp4Ggml)

VT_SMALL_KERNELS(LIST)
