// Products with few rows: encodings of integers.

#include "gemm/small_kernels.cuh"

#define LIST(X)                                                                                                                \
    VT_SMALL_FULL(X, u4_f16, U4F16, U4F16)                                                                                     \
    VT_SMALL_FULL(X, u4_bf16, U4Bf16, U4Bf16)                                                                                  \
    VT_SMALL_BRIEF(X, u4_f32, U4F32)                                                                                           \
    VT_SMALL_FULL(X, u8_f16, U8F16, U8F16)                                                                                     \
    VT_SMALL_FULL(X, u8_bf16, U8Bf16, U8Bf16)                                                                                  \
    VT_SMALL_BRIEF(X, u8_f32, U8F32)                                                                                           \
    VT_SMALL_BRIEF(X, u4_f16_zeros, U4F16Zeros)                                                                                \
    VT_SMALL_BRIEF(X, u4_bf16_zeros, U4Bf16Zeros)                                                                              \
    VT_SMALL_BRIEF(X, u8_f16_zeros, U8F16Zeros)                                                                                \
    VT_SMALL_BRIEF(X, u8_bf16_zeros, U8Bf16Zeros)                                                                              \
    VT_SMALL_BRIEF(X, u8_tensor, Int8Tensor)

VT_SMALL_KERNELS(LIST)
