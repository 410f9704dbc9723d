// Element-wise kernels between the products of a decoder layer.
//
// Axes: T tokens, R rows of logits, K in-features, V rows of the head. Grids are (rows, columns): x has no limit that a step
// could reach.

#include "common/gates.cuh"
#include "common/order.cuh"
#include "forward/floats.cuh"

namespace {

using namespace vt;

struct alignas(16) Bf16x8 {
    __nv_bfloat162 pairs[4];
};

}  // namespace

// out [len] = x + offset, as f32; `type` of x.
extern "C" __global__ void vt_widen(const void* x, uint32_t type, float offset, float* out, uint32_t len) {
    let_next_start();
    wait_for_previous();
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < len) out[i] = load_float(x, type, i) + offset;
}

// out [T, width] = gate(g) * u; row t of x [T, stride] holds g at `gate_at` and u at `up_at`. `wide` where all of them are
// multiples of 8.
extern "C" __global__ void vt_gated(const __nv_bfloat16* x, uint32_t stride, uint32_t gate_at, uint32_t up_at, uint32_t width,
                                    uint32_t kind, uint32_t wide, __nv_bfloat16* out) {
    let_next_start();
    wait_for_previous();
    const __nv_bfloat16* row = x + static_cast<uint64_t>(blockIdx.x) * stride;
    __nv_bfloat16* to = out + static_cast<uint64_t>(blockIdx.x) * width;
    const uint32_t first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;
    if (wide != 0) {
        for (uint32_t i = first; i < width / 8; i += step) {
            const Bf16x8 g = reinterpret_cast<const Bf16x8*>(row + gate_at)[i];
            const Bf16x8 u = reinterpret_cast<const Bf16x8*>(row + up_at)[i];
            Bf16x8 result;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 a = __bfloat1622float2(g.pairs[j]), b = __bfloat1622float2(u.pairs[j]);
                result.pairs[j] = __floats2bfloat162_rn(gate(kind, a.x, b.x), gate(kind, a.y, b.y));
            }
            reinterpret_cast<Bf16x8*>(to)[i] = result;
        }
        return;
    }
    for (uint32_t i = first; i < width; i += step) {
        to[i] = __float2bfloat16_rn(gate(kind, __bfloat162float(row[gate_at + i]), __bfloat162float(row[up_at + i])));
    }
}

// out [T, K] = x [T, K] * scale [K].
extern "C" __global__ void vt_scale_inputs(const __nv_bfloat16* x, const float* scale, uint32_t width, __nv_bfloat16* out) {
    let_next_start();
    wait_for_previous();
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * width;
    for (uint32_t i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
        out[at + i] = __float2bfloat16_rn(__bfloat162float(x[at + i]) * scale[i]);
    }
}

// Columns of a product into their place: of each row, out[to_at + i] = x[from_at + i] * scale + bias[i] (+ what is there,
// where `accumulate`). `scale` is one number on the device, `bias` [width]; either may be null. `out_type` is kF32 or kBf16;
// only f32 accumulates.
extern "C" __global__ void vt_place_columns(const float* x, uint32_t from_stride, uint32_t from_at, uint32_t width,
                                            const float* scale, const float* bias, void* out, uint32_t out_type,
                                            uint32_t to_stride, uint32_t to_at, uint32_t accumulate) {
    let_next_start();
    wait_for_previous();
    const float* row = x + static_cast<uint64_t>(blockIdx.x) * from_stride + from_at;
    const uint64_t to = static_cast<uint64_t>(blockIdx.x) * to_stride + to_at;
    const float factor = scale == nullptr ? 1.0f : *scale;
    for (uint32_t i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
        float value = row[i] * factor;
        if (bias != nullptr) value += bias[i];
        if (out_type == kF32) {
            float* place = static_cast<float*>(out) + to + i;
            *place = accumulate != 0 ? *place + value : value;
        } else {
            static_cast<__nv_bfloat16*>(out)[to + i] = __float2bfloat16_rn(value);
        }
    }
}

// x = cap * tanh(x / cap), of the first `width` columns of x [R, stride].
extern "C" __global__ void vt_soft_cap(float* x, uint32_t stride, uint32_t width, float cap) {
    let_next_start();
    wait_for_previous();
    float* row = x + static_cast<uint64_t>(blockIdx.x) * stride;
    for (uint32_t i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
        row[i] = cap * tanhf(row[i] / cap);
    }
}
