// Mixtures of experts: which experts a token takes, the order in which experts find their tokens, and the sums back.
//
// A pair is a token and one of its experts: pair t * top_k + j. Rows of the experts' products are pairs sorted by expert,
// and within an expert by token, so that nothing here depends on how threads happen to run.

#include "common/order.cuh"
#include "moe/choose.cuh"

#include <cuda_bf16.h>

#include <cstdint>

using namespace moe;

// One warp a token.
extern "C" __global__ void __launch_bounds__(128) vt_moe_route(const __grid_constant__ Route p) {
    let_next_start();
    wait_for_previous();
    const uint32_t token = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (token >= p.tokens) return;
    uint32_t expert = 0;
    float weight = 0.0f;
    choose(p, token, lane, expert, weight);
    if (lane < p.top_k) {
        p.experts[static_cast<uint64_t>(token) * p.top_k + lane] = expert;
        p.weights[static_cast<uint64_t>(token) * p.top_k + lane] = weight;
    }
}

// A stable counting sort, one thread block an expert: it counts the pairs of lower experts, then numbers its own.
extern "C" __global__ void __launch_bounds__(1024) vt_moe_sort(const __grid_constant__ Sort p) {
    constexpr uint32_t kThreads = 1024, kWarps = kThreads / kWarp;
    __shared__ uint32_t counts[2][kWarps];
    let_next_start();
    wait_for_previous();
    const uint32_t expert = blockIdx.x, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    // Four pairs at a time; pairs beyond the end belong to no expert.
    const auto load = [&](uint32_t first) {
        if (first + 4 <= p.count) return *reinterpret_cast<const uint4*>(p.experts + first);
        uint4 four = make_uint4(~0u, ~0u, ~0u, ~0u);
        if (first < p.count) four.x = p.experts[first];
        if (first + 1 < p.count) four.y = p.experts[first + 1];
        if (first + 2 < p.count) four.z = p.experts[first + 2];
        return four;
    };
    uint32_t lower = 0;
#pragma unroll 4
    for (uint32_t first = threadIdx.x * 4; first < p.count; first += kThreads * 4) {
        const uint4 e = load(first);
        lower += (e.x < expert) + (e.y < expert) + (e.z < expert) + (e.w < expert);
    }
    lower = __reduce_add_sync(~0u, lower);
    if (lane == 0) counts[0][warp] = lower;
    __syncthreads();
    uint32_t row = __reduce_add_sync(~0u, counts[0][lane]);
    if (threadIdx.x == 0) {
        p.offsets[expert] = row;
        if (expert + 1 == gridDim.x) p.offsets[gridDim.x] = p.count;
    }
    __syncthreads();
    uint32_t turn = 0;
    for (uint32_t base = 0; base < p.count; base += kThreads * 4, turn ^= 1) {
        const uint32_t first = base + threadIdx.x * 4;
        const uint4 e = load(first);
        const uint32_t own[4] = {e.x == expert, e.y == expert, e.z == expert, e.w == expert};
        const uint32_t sum = own[0] + own[1] + own[2] + own[3];
        uint32_t inclusive = sum;
#pragma unroll
        for (uint32_t step = 1; step < kWarp; step *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, inclusive, step);
            if (lane >= step) inclusive += other;
        }
        // Two arrays in turn: a warp may be a pass ahead of one that still reads.
        if (lane == kWarp - 1) counts[turn][warp] = inclusive;
        __syncthreads();
        const uint32_t of_lane = counts[turn][lane];
        uint32_t at = row + __reduce_add_sync(~0u, lane < warp ? of_lane : 0) + inclusive - sum;
        row += __reduce_add_sync(~0u, of_lane);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (own[i] == 0) continue;
            p.pairs[at] = first + i;
            p.rows[first + i] = at;
            ++at;
        }
    }
}

struct RouteAndSort {
    Route route;
    Sort sort;
};

// Both in one thread block, for up to 64 tokens: a step of decoding waits for launches more than for work.
extern "C" __global__ void __launch_bounds__(1024) vt_moe_route_few(const __grid_constant__ RouteAndSort p) {
    constexpr uint32_t kThreads = 1024, kWarps = kThreads / kWarp, kMostExperts = kWarp * kMostPerLane;
    // Bit t: token t takes the expert.
    __shared__ unsigned long long takers[kMostExperts];
    __shared__ uint32_t starts[kMostExperts], sums[kWarps];
    const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (threadIdx.x < kMostExperts) takers[threadIdx.x] = 0;
    __syncthreads();
    let_next_start();
    wait_for_previous();
    const uint32_t top_k = p.route.top_k;
    uint32_t experts[2] = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t token = i * kWarps + warp;
        if (token >= p.route.tokens) continue;
        float weight = 0.0f;
        choose(p.route, token, lane, experts[i], weight);
        if (lane < top_k) {
            const uint32_t pair = token * top_k + lane;
            p.route.experts[pair] = experts[i];
            p.route.weights[pair] = weight;
            atomicOr(takers + experts[i], 1ull << token);
        }
    }
    __syncthreads();
    const uint32_t own = threadIdx.x < kMostExperts ? __popcll(takers[threadIdx.x]) : 0;
    uint32_t inclusive = own;
#pragma unroll
    for (uint32_t step = 1; step < kWarp; step *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    if (lane == kWarp - 1) sums[warp] = inclusive;
    __syncthreads();
    const uint32_t start = __reduce_add_sync(~0u, lane < warp ? sums[lane] : 0) + inclusive - own;
    if (threadIdx.x < kMostExperts) starts[threadIdx.x] = start;
    // Experts beyond the layer's have no pairs, so that the next one's start is the end.
    if (threadIdx.x <= p.route.count) p.sort.offsets[threadIdx.x] = start;
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t token = i * kWarps + warp;
        if (token >= p.route.tokens || lane >= top_k) continue;
        const uint32_t row = starts[experts[i]] + __popcll(takers[experts[i]] & ((1ull << token) - 1));
        const uint32_t pair = token * top_k + lane;
        p.sort.pairs[row] = pair;
        p.sort.rows[pair] = row;
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
    // The next kernel does not start early: its blocks would take the place of some of these many.
    wait_for_previous();
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
    let_next_start();
    wait_for_previous();
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
