// Attention of single tokens on sm_90: the same units, arithmetic and order as decode.cu, fed by bulk copies. For heads of 64
// elements in bf16 and of 128 in bf16 and E4M3, with up to eight query heads each.
//
// Of a thread block, one warp copies stored blocks into a ring in shared memory, far ahead of their use and across units;
// four compute; three merge the four's sums, head by head, and write them, so that the others do not wait for that. A
// sequence's last chunk collects what the chunks before leave, unless that is left to the kernel that decode.cu has for it: waiting
// is quickest where units are few, and holds up the units behind where they are many.
//
// The kernel may be given the heads as they were projected. Then it norms and rotates them itself, writes the token's key and
// value into the cache, and needs nothing else of the step: what the cache holds of earlier steps is on its way before the
// kernel waits for the product before it.

#include "attention/own_token.cuh"
#include "common/fresh.cuh"
#include "common/hopper.cuh"
#include "common/order.cuh"

// Other architectures have decode.cu.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace {

using hopper::TensorMap;
using vt::Decode;
using vt::kBlockLen;
using vt::kWarps;
using vt::Unit;

// Warps that merge: eight in all, so that two blocks leave each thread 128 registers.
constexpr uint32_t kMergers = 3;
constexpr uint32_t kCopier = kWarps, kFirstMerger = kWarps + 1;
constexpr uint32_t kThreads = 32 * (kFirstMerger + kMergers);
constexpr uint32_t kMostStages = 16;
// Bytes of a row of a box, and of a box of 16 positions.
constexpr uint32_t kRowBytes = 128, kBoxBytes = kBlockLen * kRowBytes;

template <typename T, uint32_t D>
struct Ring {
    static constexpr uint32_t kBoxes = D * sizeof(T) / kRowBytes;
    // Keys, then values.
    static constexpr uint32_t kStageBytes = 2 * kBoxes * kBoxBytes;
    static constexpr uint32_t kBytes = 65536, kStages = kBytes / kStageBytes;
    static_assert(kStages <= kMostStages, "barriers for every stage");
    static_assert(kStages % kWarps == 0, "a stage is one warp's");
};

// Addresses of barriers: a stage is filled, a stage is read, sums are there, sums are read.
struct Barriers {
    uint32_t first;
    __device__ __forceinline__ uint32_t full(uint32_t stage) const { return first + 8 * stage; }
    __device__ __forceinline__ uint32_t free(uint32_t stage) const { return first + 8 * (kMostStages + stage); }
    __device__ __forceinline__ uint32_t summed(uint32_t i) const { return first + 8 * (2 * kMostStages + i); }
    __device__ __forceinline__ uint32_t merged(uint32_t i) const { return first + 8 * (2 * kMostStages + 2 + i); }
};

// Address of an element of a row in swizzled boxes.
template <typename T>
__device__ __forceinline__ uint32_t place_of(uint32_t rows, uint32_t row, uint32_t element) {
    const uint32_t byte = element * sizeof(T);
    return rows + byte / kRowBytes * kBoxBytes + row * kRowBytes + (byte / 16 % 8 ^ row % 8) * 16 + byte % 16;
}

// Eight elements from `element` on.
template <typename T>
__device__ __forceinline__ void read_eight(uint32_t rows, uint32_t row, uint32_t element, uint32_t (&pairs)[4]) {
    const uint32_t at = place_of<T>(rows, row, element);
    vt::Eight<T> eight;
    if constexpr (sizeof(T) == 2) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(eight.raw.x), "=r"(eight.raw.y), "=r"(eight.raw.z), "=r"(eight.raw.w)
                     : "r"(at));
    } else {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(eight.raw.x), "=r"(eight.raw.y) : "r"(at));
    }
    eight.widen(pairs);
}

// Keys and values of a block in the ring, as the products want them.
template <typename T>
struct RingKeys {
    uint32_t rows, g, t;
    __device__ __forceinline__ void widen(uint32_t r, uint32_t i, uint32_t (&pairs)[4]) const {
        read_eight<T>(rows, g + 8 * r, 32 * i + 8 * t, pairs);
    }
};

template <typename T>
struct RingValues {
    uint32_t rows, g, t;
    // Places of the block that are visible; the others hold anything, a NaN of an earlier owner included.
    uint32_t first, end;
    __device__ __forceinline__ void widen(uint32_t r, uint32_t i, uint32_t (&pairs)[4]) const {
        const uint32_t slot = 2 * t + (r & 1) + 8 * (r >> 1);
        read_eight<T>(rows, slot, 64 * i + 8 * g, pairs);
        if (slot < first || slot >= end) pairs[0] = pairs[1] = pairs[2] = pairs[3] = 0;
    }
};

__device__ __forceinline__ uint32_t first_block(const Unit& u) { return u.begin / kBlockLen; }
__device__ __forceinline__ uint32_t end_block(const Unit& u) { return (u.end + kBlockLen - 1) / kBlockLen; }

// Stages of the ring that a unit takes: those of its blocks, and empty ones up to a multiple of the warps. So a stage is always
// the same warp's. A warp that came to a stage whose last owner is still waiting for it would take the phase before that for its
// own: a barrier tells no more than whether the number of its phase is odd.
__device__ __forceinline__ uint32_t stages_of(uint32_t blocks) { return (blocks + kWarps - 1) / kWarps * kWarps; }

template <typename T, uint32_t D>
__device__ __forceinline__ void copy_blocks(const Decode& p, const TensorMap& map, const uint32_t* prefix, uint32_t units,
                                            uint32_t ring, const Barriers& barriers, uint32_t lane) {
    using R = Ring<T, D>;
    // Stage by stage, counted through all units.
    uint32_t count = 0;
    for (uint32_t index = blockIdx.x; index < units; index += gridDim.x) {
        const Unit u = vt::unit_of(p, prefix, index);
        const uint32_t* table = p.block_tables + static_cast<uint64_t>(u.sequence) * p.table_stride;
        const uint32_t first = first_block(u), end = end_block(u), past = first + stages_of(end - first);
        for (uint32_t base = first; base < past; base += 32) {
            const uint32_t stored = base + lane < end ? table[base + lane] : 0, here = min(32u, past - base);
            for (uint32_t i = 0; i < here; ++i, ++count) {
                const uint32_t stage = count % R::kStages, block = __shfl_sync(~0u, stored, i);
                if (count >= R::kStages) hopper::barrier_wait(barriers.free(stage), (count / R::kStages & 1) ^ 1);
                if (base + i >= end) {
                    if (lane == 0) hopper::barrier_arrive(barriers.full(stage));
                    continue;
                }
                if (lane == 0) hopper::barrier_expect(barriers.full(stage), R::kStageBytes);
                __syncwarp();
                if (lane < 2 * R::kBoxes) {
                    const uint32_t values = lane / R::kBoxes, box = lane % R::kBoxes;
                    const uint32_t row = p.cache_row + ((block * 2 + values) * p.kv_heads + u.head) * kBlockLen;
                    hopper::copy_box(ring + stage * R::kStageBytes + lane * kBoxBytes, &map, box * (kRowBytes / sizeof(T)), row,
                                 barriers.full(stage));
                }
            }
        }
    }
}

template <typename T, uint32_t D>
__device__ __forceinline__ void compute(const Decode& p, const uint32_t* prefix, uint32_t units, uint32_t ring,
                                        const Barriers& barriers, vt::Merge<D, 1>* merges, const float* weights, uint32_t warp,
                                        uint32_t lane) {
    using R = Ring<T, D>;
    const uint32_t g = lane / 4, t = lane % 4;
    const bool projected = p.angles != nullptr;
    uint32_t count = 0, turn = 0;
    Unit u = vt::unit_of(p, prefix, blockIdx.x);
    vt::Queries<D, 1> q;
    vt::Turns<D> turns;
    wait_for_previous();
    q.load(p, u, lane);
    if (projected) turns.load(p, u.row, lane);
    for (uint32_t index = blockIdx.x; index < units; ++turn) {
        const uint32_t first = first_block(u), end = end_block(u), stages = stages_of(end - first);
        // The last block of the last chunk holds the token itself.
        const bool has_token =
            projected && u.chunk + 1 == u.first_chunk + u.chunks && (end - 1 - first) % kWarps == warp;
        vt::OwnToken<T, D> token;
        if (has_token) token.load(p, u, lane);
        if (projected) vt::prepare_queries(p, weights, turns, lane, q);
        // The next unit's queries are on their way while this one is computed.
        index += gridDim.x;
        Unit following = u;
        vt::Queries<D, 1> following_q;
        vt::Turns<D> following_turns;
        if (index < units) {
            following = vt::unit_of(p, prefix, index);
            following_q.load(p, following, lane);
            if (projected) following_turns.load(p, following.row, lane);
        }
        vt::Sums<D, 1> sums;
        sums.clear();
        uint32_t block = first + warp;
        for (; block < end; block += kWarps) {
            const uint32_t n = count + block - first, stage = n % R::kStages, position = block * kBlockLen;
            hopper::barrier_wait(barriers.full(stage), n / R::kStages & 1);
            const uint32_t keys = ring + stage * R::kStageBytes, values = keys + R::kStageBytes / 2;
            if (has_token && block + 1 == end) {
                const uint32_t slot = (u.end - 1) % kBlockLen;
                token.write(p, u, weights + D, slot, lane, [&](bool value, uint32_t element) {
                    return place_of<T>(value ? values : keys, slot, element);
                });
                // Before the next copy into the stage.
                hopper::publish_shared();
                __syncwarp();
            }
            float s[1][4];
            vt::multiply_keys<D>(RingKeys<T>{keys, g, t}, q, s);
            uint32_t relative[1][2];
            vt::weigh(p, s, position, u.begin, u.end, lane, sums, relative);
            const uint32_t from = u.begin > position ? u.begin - position : 0, to = u.end - position;
            vt::multiply_values<D>(RingValues<T>{values, g, t, from, to}, relative, sums);
            __syncwarp();
            if (lane == 0) hopper::barrier_arrive(barriers.free(stage));
        }
        if (block < first + stages) {
            const uint32_t n = count + block - first, stage = n % R::kStages;
            hopper::barrier_wait(barriers.full(stage), n / R::kStages & 1);
            if (lane == 0) hopper::barrier_arrive(barriers.free(stage));
        }
        count += stages;
        if (turn >= 2) hopper::barrier_wait(barriers.merged(turn % 2), (turn / 2 & 1) ^ 1);
        vt::store(p, sums, merges[turn % 2], warp, lane);
        hopper::barrier_arrive(barriers.summed(turn % 2));
        u = following;
        q = following_q;
        turns = following_turns;
    }
}

// -0 instead of 0, which means that nothing is there yet.
__device__ __forceinline__ float marked(float v) { return v == 0.0f ? -0.0f : v; }

// Leaves a chunk's sums of a head for the sequence's last chunk.
__device__ __forceinline__ void leave(const Decode& p, uint64_t record, uint32_t d, float4 sum, float most, float weight) {
    const float4 v = make_float4(marked(sum.x), marked(sum.y), marked(sum.z), marked(sum.w));
    __stcg(reinterpret_cast<float4*>(p.partial + record * p.dim + d), v);
    if (d == 0) __stcg(p.stats + record, make_float2(marked(most), marked(weight)));
}

__device__ __forceinline__ bool there(float v) { return __float_as_uint(v) != 0; }

// Adds the last chunk's sums of a head to those that the chunks before leave, in order and as soon as they are there, puts zeros
// in their place, and writes the result. Chunks before are units before: whoever computes them waits for nobody behind.
template <uint32_t D>
__device__ __forceinline__ void collect(const Decode& p, const Unit& u, uint32_t head, uint32_t d, float4 own, float own_most,
                                        float own_weight) {
    constexpr uint32_t kAtOnce = 4, kLanes = D == 128 ? ~0u : (1u << (D / 4)) - 1;
    const uint32_t heads = p.kv_heads * p.group, before = u.chunks - 1;
    vt::Merged merged;
    for (uint32_t base = 0; base < before; base += kAtOnce) {
        float4 v[kAtOnce];
        float2 stat[kAtOnce];
        const auto record_of = [&](uint32_t i) { return static_cast<uint64_t>(u.first_chunk + base + i) * heads + head; };
        bool complete;
        do {
            complete = true;
#pragma unroll
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                if (base + i >= before) continue;
                v[i] = load_fresh(p.partial + record_of(i) * p.dim + d);
                stat[i] = load_fresh(p.stats + record_of(i));
            }
#pragma unroll
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                if (base + i >= before) continue;
                complete = complete && there(v[i].x) && there(v[i].y) && there(v[i].z) && there(v[i].w) && there(stat[i].x) &&
                           there(stat[i].y);
            }
        } while (!complete);
        // All lanes have read what one of them clears.
        __syncwarp(kLanes);
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if (base + i >= before) continue;
            __stcg(reinterpret_cast<float4*>(p.partial + record_of(i) * p.dim + d), make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            if (d == 0) __stcg(p.stats + record_of(i), make_float2(0.0f, 0.0f));
            merged.add(p, v[i], stat[i]);
        }
    }
    merged.add(p, own, make_float2(own_most, own_weight));
    vt::write_out(p, u.row, head, d, merged.sum, merged.weight);
}

// Merges some heads of every unit.
template <uint32_t D>
__device__ __forceinline__ void merge_units(const Decode& p, const uint32_t* prefix, uint32_t units, const Barriers& barriers,
                                            const vt::Merge<D, 1>* merges, uint32_t which, uint32_t lane) {
    uint32_t turn = 0;
    for (uint32_t index = blockIdx.x; index < units; index += gridDim.x, ++turn) {
        const Unit u = vt::unit_of(p, prefix, index);
        if (turn == 0) wait_for_previous();
        hopper::barrier_wait(barriers.summed(turn % 2), turn / 2 & 1);
        const bool last = u.chunk + 1 == u.first_chunk + u.chunks;
        vt::merge_warps<kMergers>(
            p, u, merges[turn % 2], which, lane,
            [&](uint64_t record, uint32_t head, uint32_t d, float4 sum, float most, float weight) {
                if (p.apart == 0 && last) collect<D>(p, u, head, d, sum, most, weight);
                else leave(p, record, d, sum, most, weight);
            });
        hopper::barrier_arrive(barriers.merged(turn % 2));
    }
}

template <typename T, uint32_t D>
__device__ __forceinline__ void decode(const Decode& p, const TensorMap& map) {
    extern __shared__ uint8_t dynamic[];
    __shared__ __align__(16) float weights[2 * D];
    using R = Ring<T, D>;
    // Swizzled boxes are aligned to 1024 bytes.
    uint8_t* aligned = dynamic + (1024 - vt::shared_address(dynamic) % 1024) % 1024;
    const uint32_t ring = vt::shared_address(aligned);
    vt::Merge<D, 1>* merges = reinterpret_cast<vt::Merge<D, 1>*>(aligned + R::kBytes);
    const Barriers barriers{ring + R::kBytes + 2 * static_cast<uint32_t>(sizeof(vt::Merge<D, 1>))};
    uint32_t* prefix = reinterpret_cast<uint32_t*>(aligned + R::kBytes + 2 * sizeof(vt::Merge<D, 1>) + 8 * (2 * kMostStages + 4));

    let_next_start();
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < R::kStages; ++i) {
            hopper::barrier_init(barriers.full(i), 1);
            hopper::barrier_init(barriers.free(i), 1);
        }
        for (uint32_t i = 0; i < 2; ++i) {
            hopper::barrier_init(barriers.summed(i), kWarps * 32);
            hopper::barrier_init(barriers.merged(i), kMergers * 32);
        }
        hopper::barrier_init_fence();
    }
    // Lengths and tables were sent before the step, and the weights are the model's.
    if (p.angles != nullptr) vt::load_weights<kThreads, D>(p, weights);
    else wait_for_previous();
    // Ends with a barrier of the block.
    vt::count_chunks<kThreads>(p, prefix);
    const uint32_t units = prefix[p.sequences] * p.kv_heads;
    if (blockIdx.x >= units) {
        // A kernel is over when all of its blocks are: one of them must have waited, or the next would begin too early.
        if (blockIdx.x == 0) wait_for_previous();
        return;
    }
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (warp == kCopier) {
        copy_blocks<T, D>(p, map, prefix, units, ring, barriers, lane);
        return;
    }
    if (warp < kWarps) compute<T, D>(p, prefix, units, ring, barriers, merges, weights, warp, lane);
    else merge_units<D>(p, prefix, units, barriers, merges, warp - kFirstMerger, lane);
}

}  // namespace

#define VT_DECODE(TYPE, NAME, D)                                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                     \
        vt_decode_hopper_##NAME##_##D(const __grid_constant__ Decode p, const __grid_constant__ TensorMap map) {  \
        decode<TYPE, D>(p, map);                                                                                  \
    }

VT_DECODE(__nv_bfloat16, bf16, 64)
VT_DECODE(__nv_bfloat16, bf16, 128)
VT_DECODE(__nv_fp8_e4m3, e4m3, 128)

#endif
