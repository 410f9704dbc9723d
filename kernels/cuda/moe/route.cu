// Mixtures of experts: which experts a token takes, the order in which experts find their tokens, and the sums back.
//
// A pair is a token and one of its experts: pair t * top_k + j. Rows of the experts' products are pairs sorted by expert,
// and within an expert by token, so that nothing here depends on how threads happen to run.

#include <cuda_bf16.h>

#include <cstdint>

namespace {

constexpr uint32_t kWarp = 32;
// Experts of one lane, at most.
constexpr uint32_t kMostPerLane = 16;

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

struct Route {
    // Router's logits, rows of f32 `stride` elements apart, experts from `at`.
    const float* logits;
    // [T, top_k], in order of the experts' indices.
    uint32_t* experts;
    float* weights;
    uint32_t stride, at, tokens, count, top_k, normalise;
};

}  // namespace

// Softmax over all experts, then the `top_k` most likely, the first of equals first: one warp a token. A row of NaN takes
// experts in order, with weights that are NaN, so that everything after it stays in bounds and the logits show it.
extern "C" __global__ void __launch_bounds__(128) vt_moe_route(const __grid_constant__ Route p) {
    const uint32_t token = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (token >= p.tokens) return;
    const float* row = p.logits + static_cast<uint64_t>(token) * p.stride + p.at;
    float own[kMostPerLane];
    float most = -INFINITY;
#pragma unroll
    for (uint32_t i = 0; i < kMostPerLane; ++i) {
        const uint32_t expert = i * kWarp + lane;
        own[i] = expert < p.count ? row[expert] : -INFINITY;
        most = fmaxf(most, own[i]);
    }
    most = warp_max(most);
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kMostPerLane; ++i) {
        own[i] = i * kWarp + lane < p.count ? __expf(own[i] - most) : 0.0f;
        sum += own[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (uint32_t i = 0; i < kMostPerLane; ++i) own[i] /= sum;

    // Bit i: expert i * 32 + lane is taken.
    uint32_t taken = 0;
    // Lane j holds choice j.
    uint32_t expert_of_lane = 0xFFFFFFFFu;
    float weight_of_lane = 0.0f;
    for (uint32_t j = 0; j < p.top_k; ++j) {
        // Larger is better: the weight's bits (weights are not negative; NaN counts as less than 0), then the lower index.
        uint64_t best = 0;
        float weight = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < kMostPerLane; ++i) {
            const uint32_t expert = i * kWarp + lane;
            if (expert >= p.count || (taken >> i & 1)) continue;
            const uint32_t bits = own[i] >= 0.0f ? __float_as_uint(own[i]) + 2 : 1;
            const uint64_t key = static_cast<uint64_t>(bits) << 32 | (0xFFFFFFFFu - expert);
            if (key > best) best = key, weight = own[i];
        }
#pragma unroll
        for (uint32_t step = 16; step > 0; step /= 2) {
            const uint64_t other = __shfl_xor_sync(~0u, best, step);
            const float other_weight = __shfl_xor_sync(~0u, weight, step);
            if (other > best) best = other, weight = other_weight;
        }
        const uint32_t expert = 0xFFFFFFFFu - static_cast<uint32_t>(best);
        if (expert % kWarp == lane) taken |= 1u << (expert / kWarp);
        if (lane == j) expert_of_lane = expert, weight_of_lane = weight;
    }
    if (p.normalise) {
        // In order of choice, as the formula is written.
        float total = 0.0f;
        for (uint32_t j = 0; j < p.top_k; ++j) total += __shfl_sync(~0u, weight_of_lane, j);
        weight_of_lane /= total;
    }
    // Place among the choices, by index.
    uint32_t place = 0;
    for (uint32_t j = 0; j < p.top_k; ++j) place += __shfl_sync(~0u, expert_of_lane, j) < expert_of_lane;
    if (lane < p.top_k) {
        const uint64_t at = static_cast<uint64_t>(token) * p.top_k + place;
        p.experts[at] = expert_of_lane;
        p.weights[at] = weight_of_lane;
    }
}

struct Sort {
    // Expert of each pair.
    const uint32_t* experts;
    // [E + 1]: rows of expert e are offsets[e] .. offsets[e + 1].
    uint32_t* offsets;
    // Of each row, its pair; of each pair, its row.
    uint32_t* pairs;
    uint32_t* rows;
    uint32_t count;
};

// A stable counting sort, one thread block an expert: it counts the pairs of lower experts, then numbers its own.
extern "C" __global__ void __launch_bounds__(256) vt_moe_sort(const __grid_constant__ Sort p) {
    constexpr uint32_t kThreads = 256, kWarps = kThreads / kWarp;
    __shared__ uint32_t counts[kWarps];
    __shared__ uint32_t start;
    const uint32_t expert = blockIdx.x, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    uint32_t lower = 0;
    for (uint32_t i = threadIdx.x; i < p.count; i += kThreads) lower += p.experts[i] < expert;
    lower = __reduce_add_sync(~0u, lower);
    if (lane == 0) counts[warp] = lower;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t sum = 0;
        for (uint32_t w = 0; w < kWarps; ++w) sum += counts[w];
        start = sum;
        p.offsets[expert] = sum;
        if (expert + 1 == gridDim.x) p.offsets[gridDim.x] = p.count;
    }
    __syncthreads();
    uint32_t row = start;
    for (uint32_t base = 0; base < p.count; base += kThreads) {
        const uint32_t pair = base + threadIdx.x;
        const bool own = pair < p.count && p.experts[pair] == expert;
        const uint32_t ballot = __ballot_sync(~0u, own);
        if (lane == 0) counts[warp] = __popc(ballot);
        __syncthreads();
        uint32_t before = 0, all = 0;
#pragma unroll
        for (uint32_t w = 0; w < kWarps; ++w) {
            before += w < warp ? counts[w] : 0;
            all += counts[w];
        }
        if (own) {
            const uint32_t at = row + before + __popc(ballot & ((1u << lane) - 1));
            p.pairs[at] = pair;
            p.rows[pair] = at;
        }
        row += all;
        __syncthreads();
    }
}

struct Gather {
    // [T, width] rows of bf16 `stride` elements apart.
    const __nv_bfloat16* x;
    const uint32_t* pairs;
    // [T * top_k, width].
    __nv_bfloat16* out;
    uint32_t stride, out_stride, width, top_k;
};

// Row r of `out` is the token of the r-th pair: grid (pairs, parts of a row).
extern "C" __global__ void __launch_bounds__(128) vt_moe_gather(const __grid_constant__ Gather p) {
    const uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (column >= p.width) return;
    const uint64_t token = p.pairs[blockIdx.x] / p.top_k;
    *reinterpret_cast<uint4*>(p.out + static_cast<uint64_t>(blockIdx.x) * p.out_stride + column) =
        *reinterpret_cast<const uint4*>(p.x + token * p.stride + column);
}

struct Combine {
    // Rows of the experts, f32 or bf16, `stride` elements apart.
    const void* y;
    const uint32_t* rows;
    const float* weights;
    // [T, width], f32.
    float* out;
    uint32_t stride, out_stride, width, top_k, accumulate;
};

namespace {

__device__ __forceinline__ float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }

__device__ __forceinline__ float4 load_four(const __nv_bfloat16* from) {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.x));
    const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.y));
    return make_float4(low.x, low.y, high.x, high.y);
}

// Each token's experts in order of their indices: grid (tokens, parts of a row).
template <typename T>
__device__ __forceinline__ void combine(const Combine& p) {
    const uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (column >= p.width) return;
    const uint64_t token = blockIdx.x;
    float4* out = reinterpret_cast<float4*>(p.out + token * p.out_stride + column);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint32_t j = 0; j < p.top_k; ++j) {
        const uint64_t pair = token * p.top_k + j;
        const float weight = p.weights[pair];
        const float4 v = load_four(static_cast<const T*>(p.y) + static_cast<uint64_t>(p.rows[pair]) * p.stride + column);
        sum.x += weight * v.x, sum.y += weight * v.y, sum.z += weight * v.z, sum.w += weight * v.w;
    }
    if (p.accumulate) {
        const float4 old = *out;
        sum.x += old.x, sum.y += old.y, sum.z += old.z, sum.w += old.w;
    }
    *out = sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128) vt_moe_combine_f32(const __grid_constant__ Combine p) { combine<float>(p); }

extern "C" __global__ void __launch_bounds__(128) vt_moe_combine_bf16(const __grid_constant__ Combine p) {
    combine<__nv_bfloat16>(p);
}
