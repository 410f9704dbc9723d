// Attention of runs of tokens (prompts, chunks of prompts) over the paged cache.
//
// One thread block computes consecutive tokens of one sequence for all query heads of one key/value head: rows are tokens
// times heads, so that a load of keys serves the whole group. Keys and values pass through shared memory 64 positions at a
// time, from the first that any row sees to the last, with the online softmax of Milakov and Gimelshein (arXiv 1805.02867)
// in f32 and the products on tensor cores. Tiles of positions begin at multiples of 64 and a tile that a row does not see
// leaves the row exactly as it was, so that a token's result depends neither on where its prompt was cut nor on neighbours.

#include "attention/prefill.cuh"
#include "attention/primitives.cuh"
#include "common/order.cuh"
#include "kv_cache/layout.cuh"

namespace {

using vt::find_run;
using vt::kBlockLen;
using vt::Prefill;
using vt::Run;

constexpr uint32_t kWarps = 4;
constexpr uint32_t kThreads = kWarps * 32;
// Positions in a tile.
constexpr uint32_t kTile = 64;
constexpr uint32_t kTileBlocks = kTile / kBlockLen;

// D: elements of a head, rounded up. Rows: 16-row products of one warp.
template <uint32_t D, uint32_t Rows>
struct Shape {
    static constexpr uint32_t kRows = kWarps * 16 * Rows;
    // 16 bytes more than the elements: an odd number of 16-byte units from row to row, so that eight rows of a matrix lie in
    // different banks.
    static constexpr uint32_t kRowBytes = D * 2 + 16;
    static constexpr uint32_t kQueryBytes = kRows * kRowBytes;
    static constexpr uint32_t kTileBytes = kTile * kRowBytes;
};

// Where the stored blocks of a tile lie, read ahead of the copy that needs them.
struct TileBlocks {
    uint32_t stored[kTileBlocks];

    __device__ __forceinline__ void load(const uint32_t* table, uint32_t tile, uint32_t end) {
#pragma unroll
        for (uint32_t i = 0; i < kTileBlocks; ++i) {
            const uint32_t block = tile * kTileBlocks + i;
            stored[i] = block * kBlockLen < end ? table[block] : 0;
        }
    }
};

// Copies of tiles of keys or values. Positions outside begin .. end and elements beyond the head become zero.
template <typename T, uint32_t D>
struct Tile {
    static constexpr uint32_t kEights = D / 8, kRowBytes = D * 2 + 16, kEach = kTile * kEights / kThreads;

    // Row and first element of this thread's i-th eight elements: threads that copy one row are neighbours.
    static __device__ __forceinline__ uint32_t row(uint32_t i) { return i * (kThreads / kEights) + threadIdx.x / kEights; }
    static __device__ __forceinline__ uint32_t element() { return threadIdx.x % kEights * 8; }

    // Starts copying: bf16 to the tile at `to`, other types to `staging`, where each thread finds its own later.
    static __device__ __forceinline__ void copy(const Prefill& p, const T* heads, const TileBlocks& blocks, uint32_t to,
                                                uint32_t staging, uint32_t tile, uint32_t begin, uint32_t end) {
        const uint64_t block_elements = static_cast<uint64_t>(2) * p.kv_heads * kBlockLen * p.dim;
        const uint32_t d = element();
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) {
            // A pass over the block's threads covers a part of a block of the cache, or two.
            uint32_t stored;
            if constexpr (kThreads / kEights <= kBlockLen) {
                stored = blocks.stored[i * (kThreads / kEights) / kBlockLen];
            } else {
                static_assert(kThreads / kEights == 2 * kBlockLen, "two blocks a pass");
                stored = row(i) % (2 * kBlockLen) < kBlockLen ? blocks.stored[2 * i] : blocks.stored[2 * i + 1];
            }
            const uint32_t position = tile * kTile + row(i);
            const bool valid = position >= begin && position < end && d < p.dim;
            const T* from = valid ? heads + stored * block_elements + row(i) % kBlockLen * p.dim + d : heads;
            if constexpr (sizeof(T) == 2) vt::copy_async(to + row(i) * kRowBytes + d * 2, from, valid);
            else vt::copy_async_8(staging + (i * kThreads + threadIdx.x) * 8, from, valid);
        }
    }

    // Once the thread's copies are there: makes them bf16, in the tile.
    static __device__ __forceinline__ void finish(uint32_t to, uint32_t staging) {
        if constexpr (sizeof(T) == 1) {
#pragma unroll
            for (uint32_t i = 0; i < kEach; ++i) {
                vt::Eight<T> eight;
                asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                             : "=r"(eight.raw.x), "=r"(eight.raw.y)
                             : "r"(staging + (i * kThreads + threadIdx.x) * 8)
                             : "memory");
                uint32_t pairs[4];
                eight.widen(pairs);
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + row(i) * kRowBytes + element() * 2),
                             "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                             : "memory");
            }
        }
    }
};

template <uint32_t Rows>
struct Softmax {
    // Of rows g and g + 8 of each product: the largest score, and this lane's part of the sum of weights.
    float most[Rows][2], weight[Rows][2];
};

template <typename T, uint32_t D, uint32_t Rows>
__device__ __forceinline__ void prefill(const Prefill& p) {
    using S = Shape<D, Rows>;
    extern __shared__ __align__(16) uint8_t shared[];
    const uint32_t queries = vt::shared_address(shared);
    const uint32_t keys = queries + S::kQueryBytes, values = keys + S::kTileBytes, staging = values + S::kTileBytes;
    const uint32_t head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t g = lane / 4, t = lane % 4;

    let_next_start();
    wait_for_previous();
    Run run;
    if (!find_run(p, S::kRows / p.group, blockIdx.y, run)) return;
    const uint32_t rows = run.tokens * p.group;
    const uint32_t end = run.position + run.tokens;
    const uint32_t begin = p.window != 0 && run.position + 1 > p.window ? run.position + 1 - p.window : 0;
    const uint32_t first_tile = begin / kTile, tiles = (end + kTile - 1) / kTile;
    const uint32_t* table = p.block_tables + static_cast<uint64_t>(run.sequence) * p.table_stride;
    const T* key_heads = static_cast<const T*>(p.cache) + vt::keys_of(0, p.kv_heads, head, p.dim);
    const T* value_heads = key_heads + vt::values_offset(p.kv_heads, p.dim);

    TileBlocks blocks;
    blocks.load(table, first_tile, end);
    for (uint32_t index = threadIdx.x; index < S::kRows * (D / 8); index += kThreads) {
        const uint32_t row = index / (D / 8), d = index % (D / 8) * 8;
        const bool valid = row < rows && d < p.dim;
        const __nv_bfloat16* from = p.x + p.queries_at;
        if (valid) {
            from += static_cast<uint64_t>(run.row + row / p.group) * p.stride + (head * p.group + row % p.group) * p.dim + d;
        }
        vt::copy_async(queries + row * S::kRowBytes + d * 2, from, valid);
    }
    Tile<T, D>::copy(p, key_heads, blocks, keys, staging, first_tile, begin, end);
    vt::commit_copies();

    // Positions of this lane's rows; rows beyond the run see what the last row sees.
    uint32_t positions[Rows][2];
#pragma unroll
    for (uint32_t m = 0; m < Rows; ++m) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t row = min(warp * 16 * Rows + m * 16 + g + 8 * i, rows - 1);
            positions[m][i] = run.position + row / p.group;
        }
    }
    // Of the warp's rows, the first and the last position: tiles in which every row sees everything need no mask.
    const uint32_t warp_first = run.position + min(warp * 16 * Rows, rows - 1) / p.group;
    const uint32_t warp_last = run.position + min((warp + 1) * 16 * Rows - 1, rows - 1) / p.group;

    Softmax<Rows> state;
    float out[Rows][D / 8][4];
#pragma unroll
    for (uint32_t m = 0; m < Rows; ++m) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) state.most[m][i] = -INFINITY, state.weight[m][i] = 0.0f;
#pragma unroll
        for (uint32_t n = 0; n < D / 8; ++n) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) out[m][n][i] = 0.0f;
        }
    }
    // Addresses of this lane's rows of matrices. Queries: rows 0 to 15, then 16 bytes on. Keys: rows 0 to 7 at 0 and 16
    // bytes, then rows 8 to 15. Values: rows 0 to 15 at 0, then at 16 bytes.
    const uint32_t query_row = queries + (warp * 16 * Rows + lane % 16) * S::kRowBytes + lane / 16 * 16;
    const uint32_t key_row = keys + (lane % 8 + lane / 16 * 8) * S::kRowBytes + lane / 8 % 2 * 16;
    const uint32_t value_row = values + lane % 16 * S::kRowBytes + lane / 16 * 16;

    vt::wait_copies<0>();
    Tile<T, D>::finish(keys, staging);
    __syncthreads();
    for (uint32_t tile = first_tile; tile < tiles; ++tile) {
        Tile<T, D>::copy(p, value_heads, blocks, values, staging, tile, begin, end);
        vt::commit_copies();
        blocks.load(table, tile + 1, end);

        float s[Rows][kTile / 8][4];
#pragma unroll
        for (uint32_t m = 0; m < Rows; ++m) {
#pragma unroll
            for (uint32_t n = 0; n < kTile / 8; ++n) {
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < D / 16; ++k) {
            uint32_t q[Rows][4];
#pragma unroll
            for (uint32_t m = 0; m < Rows; ++m) vt::load_matrices(q[m], query_row + m * 16 * S::kRowBytes + k * 32);
#pragma unroll
            for (uint32_t n = 0; n < kTile / 16; ++n) {
                uint32_t b[4];
                vt::load_matrices(b, key_row + n * 16 * S::kRowBytes + k * 32);
#pragma unroll
                for (uint32_t m = 0; m < Rows; ++m) {
                    vt::mma(s[m][2 * n], q[m][0], q[m][1], q[m][2], q[m][3], b[0], b[1]);
                    vt::mma(s[m][2 * n + 1], q[m][0], q[m][1], q[m][2], q[m][3], b[2], b[3]);
                }
            }
        }
        vt::wait_copies<0>();
        Tile<T, D>::finish(values, staging);
        __syncthreads();
        if (tile + 1 < tiles) Tile<T, D>::copy(p, key_heads, blocks, keys, staging, tile + 1, begin, end);
        vt::commit_copies();

        const uint32_t position = tile * kTile;
        if (p.scores.cap != 0.0f) {
#pragma unroll
            for (uint32_t m = 0; m < Rows; ++m) {
#pragma unroll
                for (uint32_t n = 0; n < kTile / 8; ++n) {
#pragma unroll
                    for (uint32_t i = 0; i < 4; ++i) s[m][n][i] = p.scores(s[m][n][i]);
                }
            }
        }
        const bool all_visible = position + kTile <= warp_first + 1 && (p.window == 0 || position + p.window > warp_last);
        if (!all_visible) {
#pragma unroll
            for (uint32_t m = 0; m < Rows; ++m) {
#pragma unroll
                for (uint32_t n = 0; n < kTile / 8; ++n) {
#pragma unroll
                    for (uint32_t i = 0; i < 4; ++i) {
                        const uint32_t key = position + 8 * n + 2 * t + i % 2, own = positions[m][i / 2];
                        if (key > own || (p.window != 0 && key + p.window <= own)) s[m][n][i] = -INFINITY;
                    }
                }
            }
        }

#pragma unroll
        for (uint32_t m = 0; m < Rows; ++m) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                float most = state.most[m][i];
#pragma unroll
                for (uint32_t n = 0; n < kTile / 8; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * i], s[m][n][2 * i + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                // Where nothing has been visible yet, any finite number keeps the differences defined.
                const float base = most == -INFINITY ? 0.0f : most, shift = base * p.scores.log2_scale;
                // Exactly 1 where the maximum stays.
                const float factor = vt::exp2_fast((state.most[m][i] - base) * p.scores.log2_scale);
                state.most[m][i] = most;
                float sum = 0.0f;
#pragma unroll
                for (uint32_t n = 0; n < kTile / 8; ++n) {
                    s[m][n][2 * i] = vt::exp2_fast(fmaf(s[m][n][2 * i], p.scores.log2_scale, -shift));
                    s[m][n][2 * i + 1] = vt::exp2_fast(fmaf(s[m][n][2 * i + 1], p.scores.log2_scale, -shift));
                    sum += s[m][n][2 * i] + s[m][n][2 * i + 1];
                }
                state.weight[m][i] = state.weight[m][i] * factor + sum;
#pragma unroll
                for (uint32_t n = 0; n < D / 8; ++n) {
                    out[m][n][2 * i] *= factor;
                    out[m][n][2 * i + 1] *= factor;
                }
            }
        }

#pragma unroll
        for (uint32_t k = 0; k < kTile / 16; ++k) {
            uint32_t a[Rows][4];
#pragma unroll
            for (uint32_t m = 0; m < Rows; ++m) {
                a[m][0] = vt::pack(s[m][2 * k][0], s[m][2 * k][1]);
                a[m][1] = vt::pack(s[m][2 * k][2], s[m][2 * k][3]);
                a[m][2] = vt::pack(s[m][2 * k + 1][0], s[m][2 * k + 1][1]);
                a[m][3] = vt::pack(s[m][2 * k + 1][2], s[m][2 * k + 1][3]);
            }
#pragma unroll
            for (uint32_t n = 0; n < D / 16; ++n) {
                uint32_t b[4];
                vt::load_matrices_transposed(b, value_row + k * 16 * S::kRowBytes + n * 32);
#pragma unroll
                for (uint32_t m = 0; m < Rows; ++m) {
                    vt::mma(out[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    vt::mma(out[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
        vt::wait_copies<0>();
        if (tile + 1 < tiles) Tile<T, D>::finish(keys, staging);
        __syncthreads();
    }

#pragma unroll
    for (uint32_t m = 0; m < Rows; ++m) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            float weight = state.weight[m][i];
            weight += __shfl_xor_sync(~0u, weight, 1);
            weight += __shfl_xor_sync(~0u, weight, 2);
            const float factor = p.value_scale / weight;
            const uint32_t row = warp * 16 * Rows + m * 16 + g + 8 * i;
            if (row >= rows) continue;
            __nv_bfloat16* to = p.out + static_cast<uint64_t>(run.row + row / p.group) * p.out_stride +
                                (head * p.group + row % p.group) * p.dim;
#pragma unroll
            for (uint32_t n = 0; n < D / 8; ++n) {
                const uint32_t d = 8 * n + 2 * t;
                if (d < p.dim) {
                    *reinterpret_cast<uint32_t*>(to + d) = vt::pack(out[m][n][2 * i] * factor, out[m][n][2 * i + 1] * factor);
                }
            }
        }
    }
}

}  // namespace

#define VT_PREFILL(TYPE, NAME, D, ROWS)                                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                     \
        vt_prefill_##NAME##_##D(const __grid_constant__ Prefill p) {                                              \
        prefill<TYPE, D, ROWS>(p);                                                                                \
    }

VT_PREFILL(__nv_bfloat16, bf16, 32, 2)
VT_PREFILL(__nv_bfloat16, bf16, 64, 2)
VT_PREFILL(__nv_bfloat16, bf16, 128, 2)
VT_PREFILL(__nv_bfloat16, bf16, 256, 1)
VT_PREFILL(__nv_fp8_e4m3, e4m3, 32, 2)
VT_PREFILL(__nv_fp8_e4m3, e4m3, 64, 2)
VT_PREFILL(__nv_fp8_e4m3, e4m3, 128, 2)
VT_PREFILL(__nv_fp8_e4m3, e4m3, 256, 1)
