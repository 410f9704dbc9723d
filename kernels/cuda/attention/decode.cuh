// What both decode kernels share: how sequences are cut into units of work, the arithmetic of a block of positions, and the
// merging of a chunk's sums, which happen in the same order in both.
//
// The products are S^T = K Q^T and O^T = V^T P^T: the 16-row operands of mma.sync are keys and values, and its 8 columns
// are query heads. The order of elements along a summed dimension is free, so that each lane takes 8 contiguous elements.

#pragma once

#include "attention/primitives.cuh"
#include "kv_cache/layout.cuh"

namespace vt {

// Warps that share a chunk's blocks.
constexpr uint32_t kWarps = 4;
// Chunks are the smallest of 128, 256, 512 and 1024 positions of which 32 cover the sequence, or 1024.
constexpr uint32_t kLeastChunkLog = 7;
constexpr uint32_t kMostChunkLog = 10;
constexpr uint32_t kFewChunks = 32;

struct Decode {
    // Queries, rows of bf16 `stride` elements apart, heads [H, D] at `queries_at`.
    const __nv_bfloat16* x;
    // [T, H * D], rows `out_stride` apart.
    __nv_bfloat16* out;
    // The layer's part of the cache.
    const void* cache;
    // Of each sequence: its row in x and out, the positions in the cache (its own token included; 0: no sequence), its blocks.
    const uint32_t* rows;
    const uint32_t* lengths;
    const uint32_t* block_tables;
    // [B + 1], for the kernel that merges chunks: the first chunk of each sequence, among all.
    uint32_t* firsts;
    // Per chunk and query head, [D] sums; the largest score and the sum of weights. decode_hopper.cu: zero between launches.
    float* partial;
    float2* stats;
    uint32_t stride, queries_at, out_stride;
    uint32_t sequences, table_stride;
    uint32_t kv_heads, group, dim;
    // Positions that a token sees; 0: all.
    uint32_t window;
    Scores scores;
    float value_scale;
    // Of the cache as rows of a head's elements, the first of this layer.
    uint32_t cache_row;
    // decode_hopper.cu: chunks are merged by another kernel, which leaves zeros in place of their sums.
    uint32_t apart;
    // decode_hopper.cu: the rows hold the heads as they were projected. Cosines and sines [T, D / 2] turn queries and keys;
    // null: queries are ready, and the cache holds the token.
    const float2* angles;
    // Weights [D] of the norms before that, or null, and what they add to the mean square.
    const float *q_norm, *k_norm;
    float eps;
    // First columns of keys and values, and what a stored E4M3 key or value is multiplied by when it is read.
    uint32_t keys_at, values_at;
    float store_key_scale, store_value_scale;
    // Query heads from a key/value head's first to the next one's: more than `group` where a launch takes a part of each group,
    // whose first head is the first in x and out. decode_hopper.cu: `group`.
    uint32_t group_stride;
};

struct Chunks {
    uint32_t log, first, count, begin;
};

// How the visible positions of a sequence are cut.
__device__ __forceinline__ Chunks chunks_of(uint32_t length, uint32_t window) {
    Chunks c{};
    if (length == 0) return c;
    c.begin = window != 0 && length > window ? length - window : 0;
    const uint32_t visible = length - c.begin;
    c.log = kLeastChunkLog;
    while (c.log < kMostChunkLog && (visible >> c.log) >= kFewChunks) ++c.log;
    c.first = c.begin >> c.log;
    c.count = ((length - 1) >> c.log) + 1 - c.first;
    return c;
}

// prefix[i] = chunks of the sequences before i, for i up to `sequences`.
template <uint32_t Threads>
__device__ __forceinline__ void count_chunks(const Decode& p, uint32_t* prefix) {
    __shared__ uint32_t sums[Threads / 32];
    const uint32_t each = (p.sequences + Threads - 1) / Threads;
    const uint32_t first = threadIdx.x * each;
    uint32_t own = 0;
    for (uint32_t i = first; i < min(first + each, p.sequences); ++i) own += chunks_of(p.lengths[i], p.window).count;
    uint32_t inclusive = own;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, inclusive, step);
        if (threadIdx.x % 32 >= step) inclusive += other;
    }
    if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = inclusive;
    __syncthreads();
    uint32_t sum = inclusive - own;
    for (uint32_t w = 0; w < threadIdx.x / 32; ++w) sum += sums[w];
    if (threadIdx.x == 0) prefix[0] = 0;
    for (uint32_t i = first; i < min(first + each, p.sequences); ++i) {
        sum += chunks_of(p.lengths[i], p.window).count;
        prefix[i + 1] = sum;
        if (blockIdx.x == 0) p.firsts[i + 1] = sum;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) p.firsts[0] = 0;
    __syncthreads();
}

// A unit of work, the same in every thread of a block.
struct Unit {
    // The sequence, its row, and the key/value head.
    uint32_t sequence, row, head;
    // Positions of the chunk that are visible.
    uint32_t begin, end;
    // Index of the chunk among all, of the sequence's first, and how many it has.
    uint32_t chunk, first_chunk, chunks;
};

__device__ __forceinline__ Unit unit_of(const Decode& p, const uint32_t* prefix, uint32_t index) {
    Unit u;
    u.chunk = index / p.kv_heads;
    u.head = index % p.kv_heads;
    uint32_t low = 0, high = p.sequences;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (prefix[middle] <= u.chunk) low = middle;
        else high = middle;
    }
    u.sequence = low;
    u.row = p.rows[low];
    u.first_chunk = prefix[low];
    u.chunks = prefix[low + 1] - u.first_chunk;
    const uint32_t length = p.lengths[low];
    const Chunks c = chunks_of(length, p.window);
    const uint32_t start = (c.first + u.chunk - u.first_chunk) << c.log;
    u.begin = max(start, c.begin);
    u.end = min(start + (1u << c.log), length);
    return u;
}

// Sums over the blocks of one warp, for `Columns` times 8 query heads.
template <uint32_t D, uint32_t Columns>
struct Sums {
    // Of heads 2 t and 2 t + 1 of each column: the largest score, and this lane's part of the sum of weights.
    float most[Columns][2], weight[Columns][2];
    // O^T: [16 elements, 8 heads] each; see `store`.
    float values[Columns][D / 16][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (uint32_t c = 0; c < Columns; ++c) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) most[c][i] = -INFINITY, weight[c][i] = 0.0f;
#pragma unroll
            for (uint32_t m = 0; m < D / 16; ++m) {
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) values[c][m][i] = 0.0f;
            }
        }
    }
};

template <uint32_t D, uint32_t Columns>
struct Queries {
    uint32_t pairs[Columns][D / 32][4];

    __device__ __forceinline__ void load(const Decode& p, const Unit& u, uint32_t lane) {
        const uint32_t g = lane / 4, t = lane % 4;
        const __nv_bfloat16* row = p.x + static_cast<uint64_t>(u.row) * p.stride + p.queries_at +
                                   u.head * p.group_stride * p.dim;
#pragma unroll
        for (uint32_t c = 0; c < Columns; ++c) {
            const uint32_t head = 8 * c + g;
#pragma unroll
            for (uint32_t i = 0; i < D / 32; ++i) {
                const uint32_t d = 32 * i + 8 * t;
                uint4 eight = make_uint4(0, 0, 0, 0);
                if (head < p.group && d < p.dim) eight = *reinterpret_cast<const uint4*>(row + head * p.dim + d);
                pairs[c][i][0] = eight.x, pairs[c][i][1] = eight.y, pairs[c][i][2] = eight.z, pairs[c][i][3] = eight.w;
            }
        }
    }
};

// S^T = K Q^T of one block. `Keys` gives what lane (g, t) holds of its rows g and g + 8: of every 32 elements 8 at 8 t.
template <uint32_t D, uint32_t Columns, typename Keys>
__device__ __forceinline__ void multiply_keys(const Keys& keys, const Queries<D, Columns>& q, float (&s)[Columns][4]) {
#pragma unroll
    for (uint32_t c = 0; c < Columns; ++c) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) s[c][i] = 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < D / 32; ++i) {
        uint32_t upper[4], lower[4];
        keys.widen(0, i, upper);
        keys.widen(1, i, lower);
#pragma unroll
        for (uint32_t c = 0; c < Columns; ++c) {
            mma(s[c], upper[0], lower[0], upper[1], lower[1], q.pairs[c][i][0], q.pairs[c][i][1]);
            mma(s[c], upper[2], lower[2], upper[3], lower[3], q.pairs[c][i][2], q.pairs[c][i][3]);
        }
    }
}

// Scores of a block become weights relative to the running maximum, as operands of the product with the values; what has
// been summed up is rescaled where the maximum grew.
template <uint32_t D, uint32_t Columns>
__device__ __forceinline__ void weigh(const Decode& p, float (&s)[Columns][4], uint32_t position, uint32_t begin, uint32_t end,
                                      uint32_t lane, Sums<D, Columns>& sums, uint32_t (&weights)[Columns][2]) {
    const uint32_t upper = position + lane / 4, lower = upper + 8;
    const bool upper_visible = upper >= begin && upper < end, lower_visible = lower >= begin && lower < end;
#pragma unroll
    for (uint32_t c = 0; c < Columns; ++c) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            float a = upper_visible ? p.scores(s[c][i]) : -INFINITY;
            float b = lower_visible ? p.scores(s[c][i + 2]) : -INFINITY;
            float most = fmaxf(a, b);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
            most = fmaxf(most, sums.most[c][i]);
            // A block of this warp always has a visible position, so that `most` is finite here or the scores are not numbers.
            const float factor = exp2_fast((sums.most[c][i] - most) * p.scores.log2_scale);
            sums.most[c][i] = most;
            const float shift = most * p.scores.log2_scale;
            a = exp2_fast(fmaf(a, p.scores.log2_scale, -shift));
            b = exp2_fast(fmaf(b, p.scores.log2_scale, -shift));
            sums.weight[c][i] = sums.weight[c][i] * factor + (a + b);
            s[c][i] = a, s[c][i + 2] = b;
            // As a rule the maximum stays.
            if (__any_sync(~0u, factor != 1.0f)) {
#pragma unroll
                for (uint32_t m = 0; m < D / 16; ++m) {
                    sums.values[c][m][i] *= factor;
                    sums.values[c][m][i + 2] *= factor;
                }
            }
        }
        weights[c][0] = transpose(pack(s[c][0], s[c][1]));
        weights[c][1] = transpose(pack(s[c][2], s[c][3]));
    }
}

// O^T += V^T P^T of one block. `Values` gives what lane (g, t) holds of positions 2 t, 2 t + 1, 2 t + 8, 2 t + 9: of every 64
// elements 8 at 8 g. They become rows g and g + 8 of four products.
template <uint32_t D, uint32_t Columns, typename Values>
__device__ __forceinline__ void multiply_values(const Values& v, const uint32_t (&weights)[Columns][2],
                                                Sums<D, Columns>& sums) {
#pragma unroll
    for (uint32_t i = 0; i < D / 64; ++i) {
        uint32_t rows[4][4];
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) v.widen(r, i, rows[r]);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
            const uint32_t a0 = __byte_perm(rows[0][j], rows[1][j], 0x5410), a1 = __byte_perm(rows[0][j], rows[1][j], 0x7632);
            const uint32_t a2 = __byte_perm(rows[2][j], rows[3][j], 0x5410), a3 = __byte_perm(rows[2][j], rows[3][j], 0x7632);
#pragma unroll
            for (uint32_t c = 0; c < Columns; ++c) {
                mma(sums.values[c][4 * i + j], a0, a1, a2, a3, weights[c][0], weights[c][1]);
            }
        }
    }
}

// Shared memory for the sums of all warps: per warp and head, D sums, the largest score, the sum of weights.
template <uint32_t D, uint32_t Columns>
struct Merge {
    static constexpr uint32_t kHeads = 8 * Columns;
    // Four floats more than the elements, so that the heads of neighbouring lanes lie in different banks.
    float values[kWarps][kHeads][D + 4];
    float most[kWarps][kHeads];
    float weight[kWarps][kHeads];
};

template <uint32_t D, uint32_t Columns>
__device__ __forceinline__ void store(const Decode& p, const Sums<D, Columns>& sums, Merge<D, Columns>& merge, uint32_t warp,
                                      uint32_t lane) {
    const uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
    for (uint32_t c = 0; c < Columns; ++c) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t head = 8 * c + 2 * t + i;
            float weight = sums.weight[c][i];
            weight += __shfl_xor_sync(~0u, weight, 4);
            weight += __shfl_xor_sync(~0u, weight, 8);
            weight += __shfl_xor_sync(~0u, weight, 16);
            if (head >= p.group) continue;
            if (g == 0) merge.most[warp][head] = sums.most[c][i], merge.weight[warp][head] = weight;
#pragma unroll
            for (uint32_t j = 0; j < D / 64; ++j) {
                float4* to = reinterpret_cast<float4*>(&merge.values[warp][head][64 * j + 8 * g]);
                const float(*v)[4] = &sums.values[c][4 * j];
                to[0] = make_float4(v[0][i], v[0][i + 2], v[1][i], v[1][i + 2]);
                to[1] = make_float4(v[2][i], v[2][i + 2], v[3][i], v[3][i + 2]);
            }
        }
    }
}

// Weight of sums relative to `most`, in units of 1; 0 where nothing was visible.
__device__ __forceinline__ float relative(const Decode& p, float own, float most) {
    return own == -INFINITY ? 0.0f : exp2_fast((own - most) * p.scores.log2_scale);
}

// Chunks of a head, merged one after the other: four elements, the largest score, the sum of weights. Every kernel merges like
// this, so that a sequence's result does not depend on which one does.
struct Merged {
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    float most = -INFINITY, weight = 0.0f;

    __device__ __forceinline__ void add(const Decode& p, float4 v, float2 stat) {
        const float larger = fmaxf(most, stat.x);
        const float old = relative(p, most, larger), fresh = relative(p, stat.x, larger);
        sum.x = rescaled(sum.x, old, v.x, fresh), sum.y = rescaled(sum.y, old, v.y, fresh);
        sum.z = rescaled(sum.z, old, v.z, fresh), sum.w = rescaled(sum.w, old, v.w, fresh);
        weight = rescaled(weight, old, stat.y, fresh);
        most = larger;
    }

    // Not left to the compiler, which might round differently from kernel to kernel.
    static __device__ __forceinline__ float rescaled(float a, float old, float b, float fresh) {
        return __fmaf_rn(b, fresh, __fmul_rn(a, old));
    }
};

__device__ __forceinline__ void write_out(const Decode& p, uint32_t row, uint32_t head, uint32_t d, float4 sum, float weight) {
    const float factor = p.value_scale / weight;
    __nv_bfloat16* to = p.out + static_cast<uint64_t>(row) * p.out_stride + head * p.dim + d;
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack(sum.x * factor, sum.y * factor), pack(sum.z * factor, sum.w * factor));
}

// One of `Mergers` warps merges the sums of all warps for its heads, in order, and writes the result where there is one chunk.
// Otherwise it calls `leave(record, head, d, sum, most, weight)` with what the lane has of the chunk.
template <uint32_t Mergers, uint32_t D, uint32_t Columns, typename Leave>
__device__ __forceinline__ void merge_warps(const Decode& p, const Unit& u, const Merge<D, Columns>& merge, uint32_t which,
                                            uint32_t lane, Leave leave) {
    const uint32_t heads = p.kv_heads * p.group;
    for (uint32_t h = which; h < p.group; h += Mergers) {
        const uint32_t head = u.head * p.group + h;
        float most = merge.most[0][h], weight = 0.0f, factor[kWarps];
#pragma unroll
        for (uint32_t w = 1; w < kWarps; ++w) most = fmaxf(most, merge.most[w][h]);
#pragma unroll
        for (uint32_t w = 0; w < kWarps; ++w) {
            factor[w] = relative(p, merge.most[w][h], most);
            weight += merge.weight[w][h] * factor[w];
        }
        const uint64_t record = static_cast<uint64_t>(u.chunk) * heads + head;
        for (uint32_t d = lane * 4; d < p.dim; d += 128) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (uint32_t w = 0; w < kWarps; ++w) {
                const float4 v = *reinterpret_cast<const float4*>(&merge.values[w][h][d]);
                sum.x += v.x * factor[w], sum.y += v.y * factor[w], sum.z += v.z * factor[w], sum.w += v.w * factor[w];
            }
            if (u.chunks == 1) write_out(p, u.row, u.head * p.group_stride + h, d, sum, weight);
            else leave(record, head, d, sum, most, weight);
        }
    }
}

}  // namespace vt
