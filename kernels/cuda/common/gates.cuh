// Gates of a feed-forward network.
#pragma once

namespace vt {

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// GELU in its tanh form.
__device__ __forceinline__ float gelu_tanh(float x) {
    constexpr float kRoot = 0.7978845608028654f;  // sqrt(2 / pi)
    return 0.5f * x * (1.0f + tanhf(kRoot * (x + 0.044715f * x * x * x)));
}

// Codes of `Gate` in the launches: 0 SiLU, 1 GELU.
__device__ __forceinline__ float gate(unsigned kind, float g, float u) { return (kind == 0 ? silu(g) : gelu_tanh(g)) * u; }

}  // namespace vt
