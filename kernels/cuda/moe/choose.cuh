// Which experts a token takes: softmax over all of them, and the choice of the likeliest, by one warp.
#pragma once

#include "common/types.cuh"

namespace moe {

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

// Softmax over all experts, then the `top_k` most likely, the first of equals first, by one warp; lane j gets the choice that
// is j-th in order of the experts' indices. A row of NaN takes experts in order, with weights that are NaN, so that everything
// after it stays in bounds and the logits show it. `PerLane` times 32 experts at most.
template <uint32_t PerLane>
__device__ __forceinline__ void choose(const Route& p, uint32_t token, uint32_t lane, uint32_t& expert_of_lane,
                                       float& weight_of_lane) {
    const float* row = p.logits + static_cast<uint64_t>(token) * p.stride + p.at;
    float own[PerLane];
    float most = -INFINITY;
#pragma unroll
    for (uint32_t i = 0; i < PerLane; ++i) {
        const uint32_t expert = i * kWarp + lane;
        own[i] = expert < p.count ? __ldcg(row + expert) : -INFINITY;
        most = fmaxf(most, own[i]);
    }
    most = warp_max(most);
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < PerLane; ++i) {
        own[i] = i * kWarp + lane < p.count ? __expf(own[i] - most) : 0.0f;
        sum += own[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (uint32_t i = 0; i < PerLane; ++i) own[i] /= sum;

    // Bit i: expert i * 32 + lane is taken.
    uint32_t taken = 0, chosen = 0xFFFFFFFFu;
    // Of lane j, choice j in order of likelihood.
    float weight_chosen = 0.0f;
    for (uint32_t j = 0; j < p.top_k; ++j) {
        // Larger is better; weights are not negative, and NaN counts as less than 0.
        uint32_t best = 0, expert = 0xFFFFFFFFu;
#pragma unroll
        for (uint32_t i = 0; i < PerLane; ++i) {
            const uint32_t bits = own[i] >= 0.0f ? __float_as_uint(own[i]) + 2 : 1;
            if (i * kWarp + lane < p.count && !(taken >> i & 1) && bits > best) best = bits, expert = i * kWarp + lane;
        }
        const uint32_t largest = __reduce_max_sync(~0u, best);
        expert = __reduce_min_sync(~0u, best == largest ? expert : 0xFFFFFFFFu);
        float weight = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < PerLane; ++i) {
            if (expert / kWarp == i) weight = own[i];
        }
        weight = __shfl_sync(~0u, weight, expert % kWarp);
        if (expert % kWarp == lane) taken |= 1u << (expert / kWarp);
        if (lane == j) chosen = expert, weight_chosen = weight;
    }
    if (p.normalise) {
        // In order of choice, as the formula is written.
        float total = 0.0f;
        for (uint32_t j = 0; j < p.top_k; ++j) total += __shfl_sync(~0u, weight_chosen, j);
        weight_chosen /= total;
    }
    // Place among the choices, by index.
    uint32_t place = 0;
    for (uint32_t j = 0; j < p.top_k; ++j) place += __shfl_sync(~0u, chosen, j) < chosen;
    for (uint32_t j = 0; j < p.top_k; ++j) {
        const uint32_t to = __shfl_sync(~0u, place, j);
        const uint32_t expert = __shfl_sync(~0u, chosen, j);
        const float weight = __shfl_sync(~0u, weight_chosen, j);
        if (lane == to) expert_of_lane = expert, weight_of_lane = weight;
    }
}

__device__ __forceinline__ void choose(const Route& p, uint32_t token, uint32_t lane, uint32_t& expert, float& weight) {
    if (p.count <= 4 * kWarp) choose<4>(p, token, lane, expert, weight);
    else choose<kMostPerLane>(p, token, lane, expert, weight);
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

}  // namespace moe
