// The router of a mixture of experts together with the norm before it, and, for few tokens, with the choice of the experts
// and the order of their rows: a step of decoding waits for launches more than for work.
//
// Scores are products of f32 activations: each is the sum of two bf16 numbers, and so is each weight that is not bf16.
// What choosing between two experts depends on is then the residual stream alone. Weights are the A operand (16 experts by
// 16 of K), tokens the B operand; lane `l` reads eight elements along K of experts `l / 4` and `l / 4 + 8` and of token
// `l / 4`, from the same place, as in gemm/rows.cu. Warps take turns along K, in the same way whatever the number of tokens.

#include "common/async.cuh"
#include "common/order.cuh"
#include "moe/choose.cuh"

#include <cuda_fp16.h>

using namespace moe;

namespace {

constexpr uint32_t kThreads = 512, kWarps = kThreads / kWarp, kUnit = 32, kMostExperts = kWarp * kMostPerLane;
// Tokens, at most, whose rows are put in order here.
constexpr uint32_t kFewTokens = 64;

// Mirrored by `Router` in src/cuda/moe.rs.
struct Router {
    // f32 [T, width], [width]; [E, width] of the kernel's type.
    const float* x;
    const float* norm;
    const void* weight;
    // [T, width]: x / rms(x) * norm.
    __nv_bfloat16* normed;
    // Blocks that are done: of each eight tokens, then such groups; zero before and after.
    uint32_t* done;
    // Scores are written to `route.logits`, whatever its constness.
    Route route;
    Sort sort;
    uint32_t width;
    float eps;
};

// v = high + low, as far as 16 bits of mantissa go; two of each in a word.
__device__ __forceinline__ void split(float a, float b, uint32_t& high, uint32_t& low) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    const float2 rounded = __bfloat1622float2(h);
    const __nv_bfloat162 l = __floats2bfloat162_rn(__fsub_rn(a, rounded.x), __fsub_rn(b, rounded.y));
    high = *reinterpret_cast<const uint32_t*>(&h);
    low = *reinterpret_cast<const uint32_t*>(&l);
}

struct Split {
    uint4 high, low;
};

__device__ __forceinline__ Split split(float4 a, float4 b) {
    Split s;
    split(a.x, a.y, s.high.x, s.low.x);
    split(a.z, a.w, s.high.y, s.low.y);
    split(b.x, b.y, s.high.z, s.low.z);
    split(b.z, b.w, s.high.w, s.low.w);
    return s;
}

// Eight weights as they are stored, and what is multiplied.
struct OfBf16 {
    static constexpr bool kExact = true;
    uint4 raw;
    __device__ __forceinline__ void load(const void* row, uint32_t k, bool valid) {
        raw = valid ? __ldg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(row) + k)) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ Split operand() const { return {raw, make_uint4(0, 0, 0, 0)}; }
    static constexpr uint32_t kBytes = 2;
};

struct OfF16 {
    static constexpr bool kExact = false;
    uint4 raw;
    __device__ __forceinline__ void load(const void* row, uint32_t k, bool valid) {
        raw = valid ? __ldg(reinterpret_cast<const uint4*>(static_cast<const __half*>(row) + k)) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ static float2 pair(uint32_t w) { return __half22float2(*reinterpret_cast<const __half2*>(&w)); }
    __device__ __forceinline__ Split operand() const {
        const float2 a = pair(raw.x), b = pair(raw.y), c = pair(raw.z), d = pair(raw.w);
        return split(make_float4(a.x, a.y, b.x, b.y), make_float4(c.x, c.y, d.x, d.y));
    }
    static constexpr uint32_t kBytes = 2;
};

struct OfF32 {
    static constexpr bool kExact = false;
    float4 raw[2];
    __device__ __forceinline__ void load(const void* row, uint32_t k, bool valid) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(row) + k);
        raw[0] = valid ? __ldg(from) : make_float4(0, 0, 0, 0);
        raw[1] = valid ? __ldg(from + 1) : make_float4(0, 0, 0, 0);
    }
    __device__ __forceinline__ Split operand() const { return split(raw[0], raw[1]); }
    static constexpr uint32_t kBytes = 4;
};

__device__ __forceinline__ float4 times(float4 a, float4 b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}

__device__ __forceinline__ void multiply_units(float (&acc)[4], uint4 a, uint4 b, uint4 x) {
    const uint32_t lower[4] = {a.x, b.x, a.y, b.y}, upper[4] = {a.z, b.z, a.w, b.w};
    multiply_add(acc, lower, x.x, x.y);
    multiply_add(acc, upper, x.z, x.w);
}

// Scores of `Experts` times 16 experts and `Tokens` times 8 tokens; `Ahead` units of weights of a warp are read at once.
template <class Weight, uint32_t Experts, uint32_t Tokens, uint32_t Ahead>
__device__ __forceinline__ void scores(const Router& p) {
    __shared__ float sums[kWarps][Experts * 16][9];
    __shared__ float squares[kWarps][Tokens * 8], factors[Tokens * 8];
    const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, q = lane % 4;
    const uint32_t expert0 = blockIdx.x * (Experts * 16), token0 = blockIdx.y * (Tokens * 8);
    const uint32_t units = (p.width + kUnit - 1) / kUnit;
    const uint64_t row_bytes = static_cast<uint64_t>(p.width) * Weight::kBytes;
    Weight weights[Ahead][Experts][2];
    const auto load = [&](uint32_t first) {
#pragma unroll
        for (uint32_t i = 0; i < Ahead; ++i) {
            const uint32_t k = (first + kWarps * i) * kUnit + 8 * q;
#pragma unroll
            for (uint32_t e = 0; e < Experts; ++e) {
#pragma unroll
                for (uint32_t h = 0; h < 2; ++h) {
                    const uint32_t expert = expert0 + 16 * e + 8 * h + g;
                    const uint8_t* row = static_cast<const uint8_t*>(p.weight) + expert * row_bytes;
                    weights[i][e][h].load(row, k, expert < p.route.count && k < p.width);
                }
            }
        }
    };
    // Weights do not depend on what runs before.
    load(warp);
    wait_for_previous();
    float acc[Experts][Tokens][4] = {}, square[Tokens] = {};
    for (uint32_t first = warp; first < units; first += kWarps * Ahead) {
        if (first != warp) load(first);
#pragma unroll
        for (uint32_t i = 0; i < Ahead; ++i) {
            const uint32_t k = (first + kWarps * i) * kUnit + 8 * q;
            const bool inside = k < p.width;
            const float4* norm = reinterpret_cast<const float4*>(p.norm + k);
            const float4 zero = make_float4(0, 0, 0, 0), n0 = inside ? __ldg(norm) : zero, n1 = inside ? __ldg(norm + 1) : zero;
#pragma unroll
            for (uint32_t t = 0; t < Tokens; ++t) {
                const uint32_t token = token0 + 8 * t + g;
                const bool here = inside && token < p.route.tokens;
                const float4* from = reinterpret_cast<const float4*>(p.x + static_cast<uint64_t>(token) * p.width + k);
                float4 a = here ? __ldcg(from) : zero, b = here ? __ldcg(from + 1) : zero;
                // Each operation as it is written: few tokens and many give the same bits.
                for (const float v : {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}) square[t] = fmaf(v, v, square[t]);
                a = times(a, n0);
                b = times(b, n1);
                const Split x = split(a, b);
#pragma unroll
                for (uint32_t e = 0; e < Experts; ++e) {
                    const Split first_half = weights[i][e][0].operand(), second = weights[i][e][1].operand();
                    multiply_units(acc[e][t], first_half.high, second.high, x.high);
                    multiply_units(acc[e][t], first_half.high, second.high, x.low);
                    if constexpr (!Weight::kExact) multiply_units(acc[e][t], first_half.low, second.low, x.high);
                }
            }
        }
    }
#pragma unroll
    for (uint32_t t = 0; t < Tokens; ++t) {
        square[t] += __shfl_xor_sync(~0u, square[t], 1);
        square[t] += __shfl_xor_sync(~0u, square[t], 2);
        if (q == 0) squares[warp][8 * t + g] = square[t];
    }
    float* scores = const_cast<float*>(p.route.logits) + p.route.at;
#pragma unroll
    for (uint32_t t = 0; t < Tokens; ++t) {
#pragma unroll
        for (uint32_t e = 0; e < Experts; ++e) {
            sums[warp][16 * e + g][2 * q] = acc[e][t][0];
            sums[warp][16 * e + g][2 * q + 1] = acc[e][t][1];
            sums[warp][16 * e + g + 8][2 * q] = acc[e][t][2];
            sums[warp][16 * e + g + 8][2 * q + 1] = acc[e][t][3];
        }
        __syncthreads();
        if (t == 0 && threadIdx.x < Tokens * 8) {
            float sum = 0.0f;
#pragma unroll
            for (uint32_t w = 0; w < kWarps; ++w) sum += squares[w][threadIdx.x];
            factors[threadIdx.x] = 1.0f / sqrtf(sum / static_cast<float>(p.width) + p.eps);
        }
        float score = 0.0f;
        const uint32_t expert = threadIdx.x / 8, token = 8 * t + threadIdx.x % 8;
        if (threadIdx.x < Experts * 128) {
#pragma unroll
            for (uint32_t w = 0; w < kWarps; ++w) score += sums[w][expert][threadIdx.x % 8];
        }
        __syncthreads();
        if (threadIdx.x < Experts * 128 && expert0 + expert < p.route.count && token0 + token < p.route.tokens) {
            scores[static_cast<uint64_t>(token0 + token) * p.route.stride + expert0 + expert] = score * factors[token];
        }
    }
    // The blocks of the same tokens share the writing of their norms.
    const uint32_t tokens = min(p.route.tokens - token0, Tokens * 8), quads = p.width / 4;
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < tokens * quads; i += gridDim.x * kThreads) {
        const uint32_t token = i / quads, quad = i % quads;
        const uint64_t at = static_cast<uint64_t>(token0 + token) * quads + quad;
        const float4 v = __ldcg(reinterpret_cast<const float4*>(p.x) + at), n = __ldg(reinterpret_cast<const float4*>(p.norm) + quad);
        const float factor = factors[token];
        const __nv_bfloat162 low = __floats2bfloat162_rn(v.x * factor * n.x, v.y * factor * n.y);
        const __nv_bfloat162 high = __floats2bfloat162_rn(v.z * factor * n.z, v.w * factor * n.w);
        reinterpret_cast<uint2*>(p.normed)[at] =
            make_uint2(*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high));
    }
}

// Whether the block is the last of `count` to come here; takes the count down for the next launch.
__device__ __forceinline__ bool is_last(uint32_t* done, uint32_t count) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(done, 1) + 1 == count;
        if (last) *done = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The last block of eight tokens chooses their experts, and the last of those puts all rows in order.
__device__ __forceinline__ void choose_and_sort(const Router& p) {
    // Bit t: token t takes the expert.
    __shared__ unsigned long long takers[kMostExperts];
    __shared__ uint32_t starts[kMostExperts], totals[kWarps];
    // Expert of each pair.
    __shared__ uint16_t chosen[kFewTokens * kWarp];
    if (!is_last(p.done + blockIdx.y, gridDim.x)) return;
    const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, top_k = p.route.top_k;
    const uint32_t token = blockIdx.y * 8 + warp;
    takers[threadIdx.x] = 0;
    __syncthreads();
    if (warp < 8 && token < p.route.tokens) {
        uint32_t expert = 0;
        float weight = 0.0f;
        choose(p.route, token, lane, expert, weight);
        if (lane < top_k) {
            p.route.experts[token * top_k + lane] = expert;
            p.route.weights[token * top_k + lane] = weight;
            if (gridDim.y == 1) {
                atomicOr(takers + expert, 1ull << token);
                chosen[token * top_k + lane] = static_cast<uint16_t>(expert);
            }
        }
    }
    const uint32_t pairs = p.route.tokens * top_k;
    if (gridDim.y > 1) {
        if (!is_last(p.done + gridDim.y, gridDim.y)) return;
        for (uint32_t i = threadIdx.x; i < pairs; i += kThreads) {
            const uint32_t expert = __ldcg(p.route.experts + i);
            atomicOr(takers + expert, 1ull << (i / top_k));
            chosen[i] = static_cast<uint16_t>(expert);
        }
    }
    __syncthreads();
    const uint32_t own = __popcll(takers[threadIdx.x]);
    uint32_t inclusive = own;
#pragma unroll
    for (uint32_t step = 1; step < kWarp; step *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    if (lane == kWarp - 1) totals[warp] = inclusive;
    __syncthreads();
    const uint32_t start = __reduce_add_sync(~0u, lane < warp && lane < kWarps ? totals[lane] : 0) + inclusive - own;
    starts[threadIdx.x] = start;
    // Experts beyond the layer's have no pairs, so that the next one's start is the end.
    if (threadIdx.x <= p.route.count) p.sort.offsets[threadIdx.x] = start;
    if (threadIdx.x == 0 && p.route.count == kMostExperts) p.sort.offsets[kMostExperts] = pairs;
    __syncthreads();
    for (uint32_t pair = threadIdx.x; pair < pairs; pair += kThreads) {
        const uint32_t expert = chosen[pair];
        const uint32_t row = starts[expert] + __popcll(takers[expert] & ((1ull << (pair / top_k)) - 1));
        p.sort.pairs[row] = pair;
        p.sort.rows[pair] = row;
    }
}

template <class Weight>
__device__ __forceinline__ void few(const Router& p) {
    let_next_start();
    scores<Weight, 1, 1, 16 / (2 * Weight::kBytes)>(p);
    choose_and_sort(p);
}

template <class Weight>
__device__ __forceinline__ void many(const Router& p) {
    let_next_start();
    scores<Weight, 2, Weight::kExact ? 4 : 2, 1>(p);
}

}  // namespace

#define VT_ROUTER(NAME, WEIGHT)                                                                                                \
    extern "C" __global__ void __launch_bounds__(512) vt_moe_router_few_##NAME(const __grid_constant__ Router p) {             \
        few<WEIGHT>(p);                                                                                                        \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(512) vt_moe_router_many_##NAME(const __grid_constant__ Router p) {            \
        many<WEIGHT>(p);                                                                                                       \
    }

VT_ROUTER(bf16, OfBf16)
VT_ROUTER(f16, OfF16)
VT_ROUTER(f32, OfF32)
