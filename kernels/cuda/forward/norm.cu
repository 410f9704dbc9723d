// RMS norms of the residual stream; norms of heads, rotary embeddings, and the way of keys and values into the cache.
//
// Axes: T tokens, H heads, D elements of a head. A row is reduced by one thread block (a head by one warp) in an order that
// depends on its width alone, so that a token's result does not depend on its neighbours.

#include "common/order.cuh"
#include "forward/floats.cuh"
#include "kv_cache/layout.cuh"

namespace {

using namespace vt;

__device__ __forceinline__ float4 load4(const float* row, uint32_t i) { return reinterpret_cast<const float4*>(row)[i]; }

__device__ __forceinline__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ __forceinline__ float4 scaled(float4 v, float4 w, float factor) {
    return {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
}

__device__ __forceinline__ float inverse_rms(float sum, uint32_t width, float eps) {
    return 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
}

}  // namespace

// out [R, width] = x / sqrt(mean(x^2) + eps) * weight; row r of the result is of row rows[r] of x [T, width], or of row r
// where `rows` is null. One block a row.
extern "C" __global__ void __launch_bounds__(1024)
vt_rms_norm(const float* x, const uint32_t* rows, const float* weight, __nv_bfloat16* out, uint32_t width, float eps) {
    // Fours of a row that a thread keeps in registers; wider rows are read twice.
    constexpr uint32_t kKept = 2;
    __shared__ float partial[32];
    let_next_start();
    const bool kept = width % 4 == 0 && width <= 4 * kKept * blockDim.x;
    float4 weights[kKept], values[kKept];
    if (kept) {
        // Weights do not depend on what runs before.
#pragma unroll
        for (uint32_t j = 0; j < kKept; ++j) {
            const uint32_t i = threadIdx.x + j * blockDim.x;
            if (i < width / 4) weights[j] = load4(weight, i);
        }
    }
    wait_for_previous();
    const uint64_t from = rows == nullptr ? blockIdx.x : rows[blockIdx.x];
    const float* row = x + from * width;
    __nv_bfloat16* to = out + static_cast<uint64_t>(blockIdx.x) * width;
    float sum = 0.0f;
    if (kept) {
#pragma unroll
        for (uint32_t j = 0; j < kKept; ++j) {
            const uint32_t i = threadIdx.x + j * blockDim.x;
            if (i < width / 4) {
                values[j] = load4(row, i);
                sum += squares(values[j]);
            }
        }
        const float factor = inverse_rms(block_sum(sum, partial), width, eps);
#pragma unroll
        for (uint32_t j = 0; j < kKept; ++j) {
            const uint32_t i = threadIdx.x + j * blockDim.x;
            if (i < width / 4) reinterpret_cast<Bf16x4*>(to)[i] = narrow(scaled(values[j], weights[j], factor));
        }
        return;
    }
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) sum += row[i] * row[i];
    const float factor = inverse_rms(block_sum(sum, partial), width, eps);
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) to[i] = __float2bfloat16_rn(row[i] * factor * weight[i]);
}

// residual [T, width] += rms_norm(block) * post; then, where `next` is not null, out = rms_norm(residual) * next. One block
// a row.
extern "C" __global__ void vt_post_norm_add(const float* block, const float* post, float* residual, const float* next,
                                            __nv_bfloat16* out, uint32_t width, float eps) {
    let_next_start();
    wait_for_previous();
    __shared__ float partial[32];
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * width;
    const float* row = block + at;
    float* stream = residual + at;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) sum += row[i] * row[i];
    const float factor = inverse_rms(block_sum(sum, partial), width, eps);
    float next_sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        const float value = stream[i] + row[i] * factor * post[i];
        stream[i] = value;
        next_sum += value * value;
    }
    if (next == nullptr) return;
    const float next_factor = inverse_rms(block_sum(next_sum, partial), width, eps);
    // Every thread reads what it wrote itself.
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        out[at + i] = __float2bfloat16_rn(stream[i] * next_factor * next[i]);
    }
}

// angles [T, half]: cosine and sine of position * inv_freq, times `factor`. The angle is rounded to f32 before its cosine is
// taken, as on the host: at large positions the rounding is part of what models were trained with.
extern "C" __global__ void vt_rotations(const uint32_t* positions, const float* inv_freq, float factor, uint32_t half,
                                        uint32_t tokens, float2* angles) {
    let_next_start();
    wait_for_previous();
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= static_cast<uint64_t>(tokens) * half) return;
    const float angle = static_cast<float>(positions[i / half]) * inv_freq[i % half];
    double sine, cosine;
    sincos(static_cast<double>(angle), &sine, &cosine);
    angles[i] = {static_cast<float>(cosine) * factor, static_cast<float>(sine) * factor};
}

namespace {

constexpr uint32_t kPerLane = 16;

// The heads of a step's rows.
struct Heads {
    __nv_bfloat16* x;  // [T, stride]
    const float *q_norm, *k_norm;  // [D], or null for no norm
    const float2* angles;  // [T, half]
    uint32_t stride, q_at, queries, k_at, keys, dim, half;
    float eps;
};

// One head in the registers of a warp: lane l holds pairs l, l + 32, ... (elements i and i + half), then elements of the
// rest that is not rotated. `D <= 32 * kPerLane`.
struct Head {
    float low[kPerLane / 2], high[kPerLane / 2], rest[kPerLane];

    // Calls visit(element, value) for every element that the lane holds.
    template <class Visit>
    __device__ __forceinline__ void each(const Heads& p, Visit visit) {
        const uint32_t lane = threadIdx.x % 32, tail = p.dim - 2 * p.half;
#pragma unroll
        for (uint32_t j = 0; j < kPerLane / 2; ++j) {
            const uint32_t i = lane + 32 * j;
            if (i < p.half) {
                visit(i, low[j]);
                visit(i + p.half, high[j]);
            }
        }
        if (tail == 0) return;
#pragma unroll
        for (uint32_t j = 0; j < kPerLane; ++j) {
            const uint32_t i = lane + 32 * j;
            if (i < tail) visit(2 * p.half + i, rest[j]);
        }
    }

    __device__ __forceinline__ void load(const Heads& p, const __nv_bfloat16* row) {
        each(p, [&](uint32_t i, float& value) { value = __bfloat162float(row[i]); });
    }

    __device__ __forceinline__ void norm(const Heads& p, const float* weight) {
        if (weight == nullptr) return;
        float sum = 0.0f;
        each(p, [&](uint32_t, float& value) { sum += value * value; });
        const float factor = inverse_rms(warp_sum(sum), p.dim, p.eps);
        each(p, [&](uint32_t i, float& value) { value *= factor * weight[i]; });
    }

    __device__ __forceinline__ void rotate(const Heads& p, uint64_t token) {
        const float2* angle = p.angles + token * p.half;
#pragma unroll
        for (uint32_t j = 0; j < kPerLane / 2; ++j) {
            const uint32_t i = threadIdx.x % 32 + 32 * j;
            if (i < p.half) {
                const float2 turn = angle[i];
                const float a = low[j], b = high[j];
                low[j] = a * turn.x - b * turn.y;
                high[j] = b * turn.x + a * turn.y;
            }
        }
    }
};

// Where keys and values of a layer go.
struct Store {
    void* cache;
    const uint32_t* slots;  // [T]: block * 16 + place, or kNoSlot
    uint32_t v_at;
    float key_scale, value_scale;
};

constexpr uint32_t kNoSlot = 0xFFFFFFFF;

__device__ __forceinline__ void put(__nv_bfloat16* to, float value, float) { *to = __float2bfloat16_rn(value); }

// As a value that was bf16 before: what is stored does not depend on which kernel stores it.
__device__ __forceinline__ void put(__nv_fp8_e4m3* to, float value, float scale) {
    const float rounded = __bfloat162float(__float2bfloat16_rn(value));
    to->__x = __nv_cvt_float_to_fp8(__fdiv_rn(rounded, scale), __NV_SATFINITE, __NV_E4M3);
}

template <typename T>
__device__ __forceinline__ void heads_to_cache(const Heads& p, const Store& store) {
    const uint32_t index = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (index >= p.queries + 2 * p.keys) return;
    const uint64_t token = blockIdx.x;
    __nv_bfloat16* row = p.x + token * p.stride;
    Head head;
    if (index < p.queries) {
        row += p.q_at + index * p.dim;
        head.load(p, row);
        head.norm(p, p.q_norm);
        head.rotate(p, token);
        head.each(p, [&](uint32_t i, float& value) { row[i] = __float2bfloat16_rn(value); });
        return;
    }
    const bool is_key = index < p.queries + p.keys;
    const uint32_t kv_head = (index - p.queries) % p.keys;
    const uint32_t slot = store.slots[token];
    if (slot == kNoSlot) return;
    head.load(p, row + (is_key ? p.k_at : store.v_at) + kv_head * p.dim);
    uint64_t at = keys_of(slot / kBlockLen, p.keys, kv_head, p.dim) + (slot % kBlockLen) * p.dim;
    if (is_key) {
        head.norm(p, p.k_norm);
        head.rotate(p, token);
    } else {
        at += values_offset(p.keys, p.dim);
    }
    T* to = static_cast<T*>(store.cache) + at;
    const float scale = is_key ? store.key_scale : store.value_scale;
    head.each(p, [&](uint32_t i, float& value) { put(to + i, value, scale); });
}

}  // namespace

// Norms and rotates the query heads in place, and the key heads into the cache, where the values go too. One warp a head:
// grid (tokens, heads / warps of a block).
extern "C" __global__ void vt_heads_to_cache_bf16(const __grid_constant__ Heads p, const __grid_constant__ Store store) {
    let_next_start();
    wait_for_previous();
    heads_to_cache<__nv_bfloat16>(p, store);
}

extern "C" __global__ void vt_heads_to_cache_e4m3(const __grid_constant__ Heads p, const __grid_constant__ Store store) {
    let_next_start();
    wait_for_previous();
    heads_to_cache<__nv_fp8_e4m3>(p, store);
}
