// Attention of single tokens over the paged cache: one query a sequence.
//
// A sequence's positions are cut into chunks whose length depends on that sequence alone, so that its result does not
// depend on its neighbours. A unit of work is one chunk of one key/value head, computed by four warps for all query heads
// of the group; a fixed grid takes units in turn. Warps take blocks of 16 positions in turn, load the next block (of the
// next unit, where this one ends) while they compute, and their sums are merged in order by one of them. A second kernel
// merges the chunks of sequences that have several, in order too.
//
// Keys and values go from memory straight into the registers that mma.sync wants.

#include "attention/decode.cuh"
#include "common/order.cuh"

namespace {

using vt::Decode;
using vt::kBlockLen;
using vt::kWarps;
using vt::Unit;

constexpr uint32_t kThreads = kWarps * 32;

// Keys of a block as loaded: rows lane / 4 and 8 more, and of every 32 elements 8 at 8 (lane % 4).
template <typename T, uint32_t D>
struct Keys {
    vt::Eight<T> eights[2][D / 32];

    __device__ __forceinline__ void widen(uint32_t r, uint32_t i, uint32_t (&pairs)[4]) const { eights[r][i].widen(pairs); }

    __device__ __forceinline__ void load(const T* head, uint32_t dim, uint32_t lane) {
        const uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
        for (uint32_t i = 0; i < D / 32; ++i) {
            const uint32_t d = 32 * i + 8 * t;
#pragma unroll
            for (uint32_t r = 0; r < 2; ++r) {
                if (d < dim) eights[r][i].load(head + (g + 8 * r) * dim + d);
                else eights[r][i].clear();
            }
        }
    }
};

// Values of a block: positions 2 t, 2 t + 1, 2 t + 8, 2 t + 9 for t = lane % 4, and of every 64 elements 8 at 8 (lane / 4).
template <typename T, uint32_t D>
struct Values {
    vt::Eight<T> eights[4][D / 64];

    __device__ __forceinline__ void widen(uint32_t r, uint32_t i, uint32_t (&pairs)[4]) const { eights[r][i].widen(pairs); }

    // Positions outside begin .. end hold anything, a NaN of an earlier owner included: a weight of 0 is not enough.
    __device__ __forceinline__ void load(const T* head, uint32_t dim, uint32_t lane, uint32_t position, uint32_t begin,
                                         uint32_t end) {
        const uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
        for (uint32_t r = 0; r < 4; ++r) {
            const uint32_t slot = 2 * t + (r & 1) + 8 * (r >> 1);
            const bool visible = position + slot >= begin && position + slot < end;
#pragma unroll
            for (uint32_t i = 0; i < D / 64; ++i) {
                const uint32_t d = 64 * i + 8 * g;
                if (visible && d < dim) eights[r][i].load(head + slot * dim + d);
                else eights[r][i].clear();
            }
        }
    }
};

// A warp's next block in its stream of blocks, through all units of its thread block.
struct Place {
    uint32_t index;
    Unit unit;
    uint32_t block, end;
    // Where the block is stored.
    uint32_t stored;

    __device__ __forceinline__ void enter(const Decode& p, const uint32_t* prefix, uint32_t warp) {
        unit = vt::unit_of(p, prefix, index);
        block = unit.begin / kBlockLen + warp;
        end = (unit.end + kBlockLen - 1) / kBlockLen;
    }

    // Finds the stored block, in the next unit that has one for this warp if this unit has no more.
    __device__ __forceinline__ void settle(const Decode& p, const uint32_t* prefix, uint32_t units, uint32_t warp) {
        while (block >= end) {
            index += gridDim.x;
            if (index >= units) return;
            enter(p, prefix, warp);
        }
        stored = p.block_tables[static_cast<uint64_t>(unit.sequence) * p.table_stride + block];
    }
};

template <typename T, uint32_t D, uint32_t Columns>
__device__ __forceinline__ void decode(const Decode& p) {
    extern __shared__ __align__(16) uint8_t shared[];
    // Two, so that one warp merges a unit while the others compute the next.
    vt::Merge<D, Columns>* merges = reinterpret_cast<vt::Merge<D, Columns>*>(shared);
    uint32_t* prefix = reinterpret_cast<uint32_t*>(shared + 2 * sizeof(vt::Merge<D, Columns>));
    // The registers of a head of 256 elements do not hold the next block too.
    constexpr bool kAhead = D * Columns <= 128;

    let_next_start();
    wait_for_previous();
    vt::count_chunks<kThreads>(p, prefix);
    const uint32_t units = prefix[p.sequences] * p.kv_heads;
    // The same in all lanes, which the compiler cannot see otherwise.
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint64_t to_values = vt::values_offset(p.kv_heads, p.dim);
    if (blockIdx.x >= units) return;

    const auto head_of = [&](const Place& place) {
        return static_cast<const T*>(p.cache) + vt::keys_of(place.stored, p.kv_heads, place.unit.head, p.dim);
    };
    Place next;
    next.index = blockIdx.x;
    next.enter(p, prefix, warp);
    Unit unit = next.unit;
    next.settle(p, prefix, units, warp);
    vt::Queries<D, Columns> q;
    Keys<T, D> keys;
    Values<T, D> values;
    if (next.index < units) {
        q.load(p, next.unit, lane);
        if (kAhead) {
            keys.load(head_of(next), p.dim, lane);
            values.load(head_of(next) + to_values, p.dim, lane, next.block * kBlockLen, next.unit.begin, next.unit.end);
        }
    }
    uint32_t turn = 0;
    for (uint32_t index = blockIdx.x; index < units; index += gridDim.x, ++turn) {
        if (index != blockIdx.x) unit = vt::unit_of(p, prefix, index);
        vt::Sums<D, Columns> sums;
        sums.clear();
        while (next.index == index) {
            const uint32_t position = next.block * kBlockLen;
            const T* head = head_of(next);
            next.block += kWarps;
            next.settle(p, prefix, units, warp);
            const bool more = next.index < units;
            if (!kAhead) keys.load(head, p.dim, lane);
            float s[Columns][4];
            vt::multiply_keys<D>(keys, q, s);
            if (!kAhead) values.load(head + to_values, p.dim, lane, position, unit.begin, unit.end);
            if (kAhead && more) keys.load(head_of(next), p.dim, lane);
            if (more && next.index != index) q.load(p, next.unit, lane);
            uint32_t weights[Columns][2];
            vt::weigh(p, s, position, unit.begin, unit.end, lane, sums, weights);
            vt::multiply_values<D>(values, weights, sums);
            if (kAhead && more) {
                values.load(head_of(next) + to_values, p.dim, lane, next.block * kBlockLen, next.unit.begin, next.unit.end);
            }
        }

        vt::Merge<D, Columns>& merge = merges[turn % 2];
        vt::store(p, sums, merge, warp, lane);
        __syncthreads();
        if (warp == turn % kWarps) {
            vt::merge_warps<1>(p, unit, merge, 0, lane,
                               [&](uint64_t record, uint32_t, uint32_t d, float4 sum, float most, float weight) {
                                   *reinterpret_cast<float4*>(p.partial + record * p.dim + d) = sum;
                                   if (d == 0) p.stats[record] = make_float2(most, weight);
                               });
        }
    }
}

}  // namespace

#define VT_DECODE(TYPE, NAME, D, COLUMNS, BLOCKS)                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)                                               \
        vt_decode_##NAME##_##D##_##COLUMNS(const __grid_constant__ Decode p) {                                   \
        decode<TYPE, D, COLUMNS>(p);                                                                             \
    }

VT_DECODE(__nv_bfloat16, bf16, 64, 1, 4)
VT_DECODE(__nv_bfloat16, bf16, 64, 2, 3)
VT_DECODE(__nv_bfloat16, bf16, 128, 1, 3)
VT_DECODE(__nv_bfloat16, bf16, 128, 2, 2)
VT_DECODE(__nv_bfloat16, bf16, 256, 1, 2)
VT_DECODE(__nv_bfloat16, bf16, 256, 2, 1)
VT_DECODE(__nv_fp8_e4m3, e4m3, 64, 1, 4)
VT_DECODE(__nv_fp8_e4m3, e4m3, 64, 2, 3)
VT_DECODE(__nv_fp8_e4m3, e4m3, 128, 1, 3)
VT_DECODE(__nv_fp8_e4m3, e4m3, 128, 2, 2)
VT_DECODE(__nv_fp8_e4m3, e4m3, 256, 1, 2)
VT_DECODE(__nv_fp8_e4m3, e4m3, 256, 2, 1)

// Merges the chunks of sequences that have several, in order: one warp a query head of a sequence. After decode_hopper.cu it
// leaves zeros behind.
extern "C" __global__ void __launch_bounds__(kThreads) vt_decode_merge(const __grid_constant__ Decode p) {
    let_next_start();
    wait_for_previous();
    const uint32_t heads = p.kv_heads * p.group, lane = threadIdx.x % 32;
    const uint32_t index = blockIdx.x * kWarps + threadIdx.x / 32, sequence = index / heads, head = index % heads;
    if (sequence >= p.sequences) return;
    const uint32_t first_chunk = p.firsts[sequence], chunks = p.firsts[sequence + 1] - first_chunk;
    if (chunks < 2) return;
    const uint64_t first = static_cast<uint64_t>(first_chunk) * heads + head;
    // A lane holds 4 elements of each 128.
    vt::Merged merged[2];
    for (uint32_t base = 0; base < chunks; base += 32) {
        float2 own = make_float2(-INFINITY, 0.0f);
        if (base + lane < chunks) {
            float2* place = p.stats + first + (base + lane) * heads;
            own = *place;
            if (p.apart != 0) *place = make_float2(0.0f, 0.0f);
        }
        const uint32_t count = min(32u, chunks - base);
        float* from = p.partial + (first + static_cast<uint64_t>(base) * heads) * p.dim + lane * 4;
        constexpr uint32_t kAtOnce = 4;
        for (uint32_t some = 0; some < count; some += kAtOnce) {
            float4 v[kAtOnce][2];
            const auto place = [&](uint32_t c, uint32_t i) {
                return reinterpret_cast<float4*>(from + static_cast<uint64_t>(some + c) * heads * p.dim + 128 * i);
            };
#pragma unroll
            for (uint32_t c = 0; c < kAtOnce; ++c) {
#pragma unroll
                for (uint32_t i = 0; i < 2; ++i) {
                    if (some + c < count && 128 * i + lane * 4 < p.dim) v[c][i] = *place(c, i);
                }
            }
#pragma unroll
            for (uint32_t c = 0; c < kAtOnce; ++c) {
                if (some + c >= count) break;
                const float2 stat = make_float2(__shfl_sync(~0u, own.x, some + c), __shfl_sync(~0u, own.y, some + c));
#pragma unroll
                for (uint32_t i = 0; i < 2; ++i) {
                    if (128 * i + lane * 4 >= p.dim) continue;
                    merged[i].add(p, v[c][i], stat);
                    if (p.apart != 0) *place(c, i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
            }
        }
    }
    const uint32_t to = head / p.group * p.group_stride + head % p.group;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t d = 128 * i + lane * 4;
        if (d < p.dim) vt::write_out(p, p.rows[sequence], to, d, merged[i].sum, merged[i].weight);
    }
}
