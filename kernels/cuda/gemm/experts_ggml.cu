// Products of few rows with experts: ggml's encodings.

#include "gemm/experts.cuh"

#define LIST(X)                                                                                                                \
    VT_EXPERTS_4(X, q4_1, ScaleAndMin<0>, ScaleAndMin<0>)                                                                      \
    VT_EXPERTS_8(X, q5_0, Q5Symmetric)                                                                                         \
    VT_EXPERTS_8(X, q5_1, ScaleAndMin<1>)                                                                                      \
    VT_EXPERTS_8(X, q2_k, Q2K)                                                                                                 \
    VT_EXPERTS_8(X, q3_k, Q3K)                                                                                                 \
    VT_EXPERTS_4(X, q4_k, KQuant<0>, KQuant<0>)                                                                                \
    VT_EXPERTS_8(X, q5_k, KQuant<1>)                                                                                           \
    VT_EXPERTS_8(X, q6_k, Q6K)                                                                                                 \
    VT_EXPERTS_4(X, iq4_nl, Iq4Nl, Iq4Nl)                                                                                      \
    VT_EXPERTS_4(X, iq4_xs, Iq4Xs, Iq4Xs)                                                                                      \
    VT_EXPERTS_4(X, mxfp4_ggml, Mxfp4Ggml, Mxfp4Ggml)                                                                          \
    VT_EXPERTS_8(X, nvfp4_ggml, Nvfp4Ggml)

VT_EXPERT_KERNELS(LIST)
