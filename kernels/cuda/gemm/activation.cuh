// act(gate) * up: the activations of gated networks; numbers of kinds as `Gate` in src/activation.rs is given to kernels.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// GELU in its tanh form.
__device__ __forceinline__ float gelu_tanh(float x) {
    constexpr float kRoot = 0.7978845608028654f;  // sqrt(2 / pi)
    return 0.5f * x * (1.0f + tanhf(kRoot * (x + 0.044715f * x * x * x)));
}

constexpr u32 kSilu = 0;

__device__ __forceinline__ float gate(u32 kind, float g, float u) { return (kind == kSilu ? silu(g) : gelu_tanh(g)) * u; }
