// Attention of runs of tokens on sm_90a: the same as prefill.cu, with wgmma, for a bf16 cache and heads of 64 or 128.
//
// A thread block is one warp group that copies and two that compute 64 rows each (rows are tokens times heads of a group).
// Bulk tensor copies bring the stored blocks of keys and values, 16 positions by 64 elements at a time, into swizzled tiles
// of 128 positions, two of each in turn. While a warp group turns scores into weights, its product of the previous tile's
// weights and values runs. What prefill.cu says of tiles holds here: a token's result does not depend on where its prompt
// was cut.

#include "attention/prefill.cuh"
#include "attention/primitives.cuh"
#include "attention/wgmma.cuh"
#include "common/hopper.cuh"
#include "common/order.cuh"
#include "kv_cache/layout.cuh"

// Other architectures have prefill.cu.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace {

using hopper::TensorMap;
using vt::kBlockLen;
using vt::Prefill;
using vt::Run;

constexpr uint32_t kGroup = 128;
constexpr uint32_t kThreads = 3 * kGroup;
constexpr uint32_t kRows = 128;
// Positions in a tile.
constexpr uint32_t kTile = 128;
constexpr uint32_t kTileBlocks = kTile / kBlockLen;
constexpr uint32_t kStages = 2;
// 64 columns of a tile or of the queries.
constexpr uint32_t kPanelBytes = kTile * 128;
constexpr uint32_t kBoxBytes = kBlockLen * 128;

template <uint32_t D>
struct Shared {
    static constexpr uint32_t kPanels = D / 64;
    static constexpr uint32_t kTileBytes = kPanels * kPanelBytes;
    static constexpr uint32_t kQueries = 0;
    static constexpr uint32_t kKeys = kTileBytes;
    static constexpr uint32_t kValues = kKeys + kStages * kTileBytes;
    static constexpr uint32_t kBarriers = kValues + kStages * kTileBytes;
};

// Addresses of barriers: keys arrived, values arrived, keys read, values read, of each stage.
struct Barriers {
    uint32_t first;
    __device__ __forceinline__ uint32_t keys_full(uint32_t stage) const { return first + 8 * stage; }
    __device__ __forceinline__ uint32_t values_full(uint32_t stage) const { return first + 8 * (kStages + stage); }
    __device__ __forceinline__ uint32_t keys_free(uint32_t stage) const { return first + 8 * (2 * kStages + stage); }
    __device__ __forceinline__ uint32_t values_free(uint32_t stage) const { return first + 8 * (3 * kStages + stage); }
};

// Which tile's stage, and the parity of its phase.
__device__ __forceinline__ uint32_t stage_of(uint32_t count) { return count % kStages; }
__device__ __forceinline__ uint32_t parity_of(uint32_t count) { return count / kStages % 2; }

// One warp copies keys, another values: keys are free, and wanted, earlier. A lane copies boxes of one block of every tile.
template <uint32_t D>
__device__ __forceinline__ void copy_tiles(const Prefill& p, const TensorMap& map, const Run& run, uint32_t head,
                                           uint32_t shared, const Barriers& barriers, uint32_t begin, uint32_t end, bool values) {
    using S = Shared<D>;
    const uint32_t lane = threadIdx.x % 32, slot = lane / 4, part = lane % 4;
    const uint32_t* table = p.block_tables + static_cast<uint64_t>(run.sequence) * p.table_stride;
    const uint32_t first_tile = begin / kTile, tiles = (end + kTile - 1) / kTile;
    // Blocks that no row sees are not there to be read.
    const auto wanted = [&](uint32_t block) { return block * kBlockLen < end && (block + 1) * kBlockLen > begin; };
    uint32_t block = first_tile * kTileBlocks + slot;
    uint32_t stored = wanted(block) ? table[block] : 0;
    for (uint32_t tile = first_tile; tile < tiles; ++tile) {
        const uint32_t count = tile - first_tile, stage = stage_of(count);
        const bool here = wanted(block);
        const uint32_t row = p.cache_row + ((stored * 2 + values) * p.kv_heads + head) * kBlockLen;
        block += kTileBlocks;
        stored = wanted(block) ? table[block] : 0;
        const uint32_t boxes = __popc(__ballot_sync(~0u, here && part == 0)) * S::kPanels;
        if (count >= kStages) {
            hopper::barrier_wait(values ? barriers.values_free(stage) : barriers.keys_free(stage), parity_of(count) ^ 1);
        }
        const uint32_t full = values ? barriers.values_full(stage) : barriers.keys_full(stage);
        if (lane == 0) hopper::barrier_expect(full, boxes * kBoxBytes);
        __syncwarp();
        if (here && part < S::kPanels) {
            const uint32_t to = shared + (values ? S::kValues : S::kKeys) + stage * S::kTileBytes + slot * kBoxBytes;
            hopper::copy_box(to + part * kPanelBytes, &map, part * 64, row, full);
        }
    }
}

// Rows that a warp group's lanes hold, and the sums over what they have seen.
template <uint32_t D>
struct State {
    uint32_t positions[2];
    float most[2], weight[2];
    float out[D / 2];
};

// Scores of a tile become weights; the factors are what earlier sums are multiplied by.
template <uint32_t D>
__device__ __forceinline__ void weigh(const Prefill& p, float (&s)[kTile / 2], uint32_t tile, bool all_visible, uint32_t t,
                                      State<D>& state, float (&factor)[2]) {
    if (p.scores.cap != 0.0f) {
#pragma unroll
        for (uint32_t i = 0; i < kTile / 2; ++i) s[i] = p.scores(s[i]);
    }
    if (!all_visible) {
#pragma unroll
        for (uint32_t i = 0; i < kTile / 2; ++i) {
            const uint32_t key = tile * kTile + i / 4 * 8 + 2 * t + i % 2, own = state.positions[i / 2 % 2];
            if (key > own || (p.window != 0 && key + p.window <= own)) s[i] = -INFINITY;
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
        float most = state.most[r];
#pragma unroll
        for (uint32_t n = 0; n < kTile / 8; ++n) most = fmaxf(most, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        // Where nothing has been visible yet, any finite number keeps the differences defined.
        const float base = most == -INFINITY ? 0.0f : most, shift = base * p.scores.log2_scale;
        // Exactly 1 where the maximum stays.
        factor[r] = vt::exp2_fast((state.most[r] - base) * p.scores.log2_scale);
        state.most[r] = most;
        float sum = 0.0f;
#pragma unroll
        for (uint32_t n = 0; n < kTile / 8; ++n) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                float& v = s[4 * n + 2 * r + i];
                v = vt::exp2_fast(fmaf(v, p.scores.log2_scale, -shift));
                sum += v;
            }
        }
        state.weight[r] = state.weight[r] * factor[r] + sum;
    }
}

// Writes zeros over the positions of a tile of values that no row sees: they hold anything, and a weight of 0 is not enough.
template <uint32_t D>
__device__ __forceinline__ void clear_unseen(uint32_t values, uint32_t tile, uint32_t begin, uint32_t end, uint32_t thread) {
    const uint32_t first = begin > tile * kTile ? begin - tile * kTile : 0, last = min(end - tile * kTile, kTile);
    for (uint32_t i = thread; i < kTile * D / 8; i += 2 * kGroup) {
        const uint32_t row = i / (D / 8), unit = i % (D / 8);
        if (row >= first && row < last) continue;
        const uint32_t at = values + unit / 8 * kPanelBytes + row * 128 + (unit % 8 ^ row % 8) * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
}

template <uint32_t D>
__device__ __forceinline__ void compute(const Prefill& p, const Run& run, uint32_t head, uint32_t shared,
                                        const Barriers& barriers, uint32_t begin, uint32_t end) {
    using S = Shared<D>;
    const uint32_t group = threadIdx.x / kGroup - 1, thread = threadIdx.x % kGroup;
    const uint32_t warp = thread / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t rows = run.tokens * p.group, first_row = group * 64;
    const uint32_t queries = shared + S::kQueries + first_row * 128;

    // The group's own 64 rows of queries, in swizzled units of 16 bytes.
    for (uint32_t i = thread; i < 64 * (D / 8); i += kGroup) {
        const uint32_t row = i / (D / 8), unit = i % (D / 8), of_run = first_row + row;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (of_run < rows) {
            const uint64_t token = run.row + of_run / p.group;
            v = *reinterpret_cast<const uint4*>(p.x + p.queries_at + token * p.stride +
                                                (head * p.group + of_run % p.group) * D + unit * 8);
        }
        const uint32_t at = queries + unit / 8 * kPanelBytes + row * 128 + (unit % 8 ^ row % 8) * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    }
    hopper::publish_shared();
    hopper::named_barrier(1 + group, kGroup);

    State<D> state;
    // Rows beyond the run see what the last row sees.
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
        state.positions[r] = run.position + min(first_row + warp * 16 + g + 8 * r, rows - 1) / p.group;
        state.most[r] = -INFINITY, state.weight[r] = 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < D / 2; ++i) state.out[i] = 0.0f;
    const uint32_t first_position = run.position + min(first_row, rows - 1) / p.group;
    const uint32_t last_position = run.position + min(first_row + 63, rows - 1) / p.group;
    const uint32_t first_tile = begin / kTile, tiles = (end + kTile - 1) / kTile;

    float s[kTile / 2];
    uint32_t weights[kTile / 16][4];
    for (uint32_t tile = first_tile; tile < tiles; ++tile) {
        const uint32_t count = tile - first_tile, stage = stage_of(count);
        const uint32_t keys = shared + S::kKeys + stage * S::kTileBytes;
        hopper::barrier_wait(barriers.keys_full(stage), parity_of(count));
        vt::pin(s);
        hopper::wgmma_fence();
#pragma unroll
        for (uint32_t k = 0; k < D / 16; ++k) {
            const uint32_t offset = k / 4 * kPanelBytes + k % 4 * 32;
            vt::multiply(s, vt::matrix_of(queries + offset, 16), vt::matrix_of(keys + offset, 16), k != 0);
        }
        hopper::wgmma_commit();
        if (count != 0) {
            // The previous tile's values, while the scores are being weighed.
            const uint32_t before = count - 1;
            const uint32_t values = shared + S::kValues + stage_of(before) * S::kTileBytes;
            hopper::barrier_wait(barriers.values_full(stage_of(before)), parity_of(before));
            if (before == 0 && begin > first_tile * kTile) {
                clear_unseen<D>(values, first_tile, begin, end, threadIdx.x - kGroup);
                hopper::publish_shared();
                hopper::named_barrier(3, 2 * kGroup);
            }
            vt::pin(state.out);
            hopper::wgmma_fence();
#pragma unroll
            for (uint32_t k = 0; k < kTile / 16; ++k) {
                vt::multiply_transposed(state.out, weights[k], vt::matrix_of(values + k * 2048, kPanelBytes));
            }
            hopper::wgmma_commit();
            hopper::wgmma_wait<1>();
        } else {
            hopper::wgmma_wait<0>();
        }
        vt::pin(s);
        if (thread == 0) hopper::barrier_arrive(barriers.keys_free(stage));
        const bool all_visible =
            (tile + 1) * kTile <= first_position + 1 && (p.window == 0 || tile * kTile + p.window > last_position);
        float factor[2];
        weigh<D>(p, s, tile, all_visible, t, state, factor);
        hopper::wgmma_wait<0>();
        vt::pin(state.out);
        if (count != 0 && thread == 0) hopper::barrier_arrive(barriers.values_free(stage_of(count - 1)));
#pragma unroll
        for (uint32_t i = 0; i < D / 2; ++i) state.out[i] *= factor[i / 2 % 2];
#pragma unroll
        for (uint32_t k = 0; k < kTile / 16; ++k) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) weights[k][i] = vt::pack(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
        }
    }

    const uint32_t last = tiles - 1 - first_tile;
    const uint32_t values = shared + S::kValues + stage_of(last) * S::kTileBytes;
    hopper::barrier_wait(barriers.values_full(stage_of(last)), parity_of(last));
    if (end < tiles * kTile || (last == 0 && begin > first_tile * kTile)) {
        clear_unseen<D>(values, tiles - 1, begin, end, threadIdx.x - kGroup);
        hopper::publish_shared();
        hopper::named_barrier(3, 2 * kGroup);
    }
    vt::pin(state.out);
    hopper::wgmma_fence();
#pragma unroll
    for (uint32_t k = 0; k < kTile / 16; ++k) {
        vt::multiply_transposed(state.out, weights[k], vt::matrix_of(values + k * 2048, kPanelBytes));
    }
    hopper::wgmma_commit();
    hopper::wgmma_wait<0>();
    vt::pin(state.out);

#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
        float weight = state.weight[r];
        weight += __shfl_xor_sync(~0u, weight, 1);
        weight += __shfl_xor_sync(~0u, weight, 2);
        const float factor = p.value_scale / weight;
        const uint32_t row = first_row + warp * 16 + g + 8 * r;
        if (row >= rows) continue;
        __nv_bfloat16* to = p.out + static_cast<uint64_t>(run.row + row / p.group) * p.out_stride +
                            (head * p.group + row % p.group) * D + 2 * t;
#pragma unroll
        for (uint32_t n = 0; n < D / 8; ++n) {
            *reinterpret_cast<uint32_t*>(to + 8 * n) =
                vt::pack(state.out[4 * n + 2 * r] * factor, state.out[4 * n + 2 * r + 1] * factor);
        }
    }
}

template <uint32_t D>
__device__ __forceinline__ void prefill(const Prefill& p, const TensorMap& map) {
    extern __shared__ uint8_t dynamic[];
    // Swizzled units are aligned to themselves.
    const uint32_t shared = (vt::shared_address(dynamic) + 1023) / 1024 * 1024;
    const Barriers barriers{shared + Shared<D>::kBarriers};
    const uint32_t head = blockIdx.x;
    let_next_start();
    wait_for_previous();
    Run run;
    if (!vt::find_run(p, kRows / p.group, blockIdx.y, run)) return;
    const uint32_t end = run.position + run.tokens;
    const uint32_t begin = p.window != 0 && run.position + 1 > p.window ? run.position + 1 - p.window : 0;
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < kStages; ++stage) {
            hopper::barrier_init(barriers.keys_full(stage), 1);
            hopper::barrier_init(barriers.values_full(stage), 1);
            hopper::barrier_init(barriers.keys_free(stage), 2);
            hopper::barrier_init(barriers.values_free(stage), 2);
        }
        hopper::barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < kGroup) {
        hopper::registers_give<24>();
        const uint32_t warp = threadIdx.x / 32;
        if (warp < 2) copy_tiles<D>(p, map, run, head, shared, barriers, begin, end, warp == 1);
    } else {
        hopper::registers_take<240>();
        compute<D>(p, run, head, shared, barriers, begin, end);
    }
}

}  // namespace

#define VT_PREFILL(D)                                                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                     \
        vt_prefill_hopper_##D(const __grid_constant__ Prefill p, const __grid_constant__ TensorMap map) {         \
        prefill<D>(p, map);                                                                                       \
    }

VT_PREFILL(64)
VT_PREFILL(128)

#endif
