// What both prefill kernels take, and how their thread blocks find their tokens.

#pragma once

#include "attention/primitives.cuh"
#include "kv_cache/layout.cuh"

namespace vt {

struct Prefill {
    // Queries, rows of bf16 `stride` elements apart, heads [H, D] at `queries_at`.
    const __nv_bfloat16* x;
    // [T, H * D], rows `out_stride` apart.
    __nv_bfloat16* out;
    // The layer's part of the cache; the tokens' own keys and values are in it.
    const void* cache;
    // Rows of sequence i are starts[i] .. starts[i + 1].
    const uint32_t* starts;
    // Of each sequence: the positions in the cache, its own tokens included, and its blocks.
    const uint32_t* lengths;
    const uint32_t* block_tables;
    uint32_t stride, queries_at, out_stride;
    uint32_t sequences, table_stride;
    uint32_t kv_heads, group, dim;
    // Of the cache as rows of a head's elements, the first of this layer.
    uint32_t cache_row;
    // Positions that a token sees; 0: all.
    uint32_t window;
    Scores scores;
    float value_scale;
};

// Consecutive tokens of a sequence.
struct Run {
    uint32_t sequence;
    // Row of x of its first token, position of it, tokens.
    uint32_t row, position, tokens;
};

// Finds the tokens of thread block `index`, counted from the last tile of the last sequence: in a long prompt the tiles
// with the most work begin first. False where there is none.
__device__ __forceinline__ bool find_run(const Prefill& p, uint32_t tokens_per_tile, uint32_t index, Run& run) {
    __shared__ Run found;
    __shared__ bool any;
    if (threadIdx.x < 32) {
        const uint32_t lane = threadIdx.x;
        if (lane == 0) any = false;
        __syncwarp();
        uint32_t before = 0;
        for (uint32_t base = 0; base < p.sequences && before <= index; base += 32) {
            const uint32_t back = base + lane;
            const uint32_t i = p.sequences - 1 - min(back, p.sequences - 1);
            const uint32_t start = p.starts[i], tokens = back < p.sequences ? p.starts[i + 1] - start : 0;
            const uint32_t tiles = (tokens + tokens_per_tile - 1) / tokens_per_tile;
            uint32_t inclusive = tiles;
#pragma unroll
            for (uint32_t step = 1; step < 32; step *= 2) {
                const uint32_t other = __shfl_up_sync(~0u, inclusive, step);
                if (lane >= step) inclusive += other;
            }
            const uint32_t end = before + inclusive;
            if (index < end && index >= end - tiles) {
                const uint32_t tile = end - 1 - index;
                const uint32_t first = tile * tokens_per_tile;
                found = {i, start + first, p.lengths[i] - tokens + first, min(tokens_per_tile, tokens - first)};
                any = true;
            }
            before = __shfl_sync(~0u, end, 31);
        }
    }
    __syncthreads();
    run = found;
    return any;
}

}  // namespace vt
