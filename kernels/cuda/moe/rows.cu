// What stands beside the products of routed experts: vectors that multiply their inputs, and factors and biases of their results.
//
// Rows are pairs sorted by expert, as in moe/route.cu. A launch is for some experts of a layer, `first` to `end`: the rows of the
// others are left alone.

#include "common/order.cuh"
#include "forward/floats.cuh"

using namespace vt;

namespace {

// Floats of one expert. Mirrored by `ExpertVector` in src/cuda/moe_rows.rs.
struct Vector {
    // Null: the expert has none.
    const void* data;
    // A code of floats.cuh.
    uint32_t type;
    uint32_t unused;
};

// Whose rows a launch is for.
struct Routed {
    // The pair of each row, and the expert of each pair.
    const uint32_t* pairs;
    const uint32_t* experts;
    uint32_t first, end;
};

struct Inputs {
    Routed routed;
    const __nv_bfloat16* x;
    // `[E]`, or null.
    const Vector* vectors;
    __nv_bfloat16* out;
    uint32_t stride, out_stride, width;
    // Experts of a token where `x` has a row for each token; 0 where it has one for each pair, in order of the experts.
    uint32_t top_k;
};

struct Results {
    Routed routed;
    const float* x;
    // `[E]` of one number each and of `width` numbers each; either may be null.
    const Vector* factors;
    const Vector* biases;
    void* out;
    uint32_t stride, at, width, out_type, out_stride, out_at;
};

}  // namespace

// out[r, i] = x[r, i] * vector[i], rounded to bf16: grid (rows, parts of a row). `out` may be `x`, element for element.
extern "C" __global__ void __launch_bounds__(256) vt_moe_inputs(const __grid_constant__ Inputs p) {
    let_next_start();
    wait_for_previous();
    const uint32_t pair = p.routed.pairs[blockIdx.x], expert = p.routed.experts[pair];
    if (expert < p.routed.first || expert >= p.routed.end) return;
    const uint64_t source = p.top_k != 0 ? pair / p.top_k : blockIdx.x;
    const Vector vector = p.vectors != nullptr ? p.vectors[expert] : Vector{};
    const __nv_bfloat16* row = p.x + source * p.stride;
    __nv_bfloat16* to = p.out + static_cast<uint64_t>(blockIdx.x) * p.out_stride;
    for (uint32_t i = blockIdx.y * blockDim.x + threadIdx.x; i < p.width; i += gridDim.y * blockDim.x) {
        if (vector.data == nullptr) {
            to[i] = row[i];
        } else {
            to[i] = __float2bfloat16_rn(__bfloat162float(row[i]) * load_float(vector.data, vector.type, i));
        }
    }
}

// out[r, out_at + i] = x[r, at + i] * factor + bias[i]: grid (rows, parts of a row). `out` may be `x`, element for element.
extern "C" __global__ void __launch_bounds__(256) vt_moe_results(const __grid_constant__ Results p) {
    let_next_start();
    wait_for_previous();
    const uint32_t expert = p.routed.experts[p.routed.pairs[blockIdx.x]];
    if (expert < p.routed.first || expert >= p.routed.end) return;
    const Vector factor = p.factors != nullptr ? p.factors[expert] : Vector{};
    const Vector bias = p.biases != nullptr ? p.biases[expert] : Vector{};
    const float by = factor.data != nullptr ? load_float(factor.data, factor.type, 0) : 1.0f;
    const float* row = p.x + static_cast<uint64_t>(blockIdx.x) * p.stride + p.at;
    const uint64_t to = static_cast<uint64_t>(blockIdx.x) * p.out_stride + p.out_at;
    for (uint32_t i = blockIdx.y * blockDim.x + threadIdx.x; i < p.width; i += gridDim.y * blockDim.x) {
        float value = row[i] * by;
        if (bias.data != nullptr) value += load_float(bias.data, bias.type, i);
        if (p.out_type == kF32) {
            static_cast<float*>(p.out)[to + i] = value;
        } else {
            static_cast<__nv_bfloat16*>(p.out)[to + i] = __float2bfloat16_rn(value);
        }
    }
}
