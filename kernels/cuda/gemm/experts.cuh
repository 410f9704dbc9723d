// Products of few rows with many matrices, the experts of a layer: which of them have rows is known on the device only.
//
// The rows of each expert are cut into tiles of `8 * MB`. Tiles, groups of two tile columns and units of 32 along K form one
// line, expert after expert, that is divided evenly among the blocks, as in `small.cuh`; experts without rows are not on it.
// So the device reads only what was chosen, with all multiprocessors, however few or many that is.
//
// Rows of activations may be taken by an index (rows of tokens, by pair), and the two columns of a group may be a gate and
// its partner, of which act(gate) * up is stored.
#pragma once

#include "common/gates.cuh"
#include "gemm/encodings_more.cuh"
#include "gemm/small.cuh"

/// How a grouped product is divided, and what is done beside it. Mirrored by `ExpertPlan` in src/cuda/gemm/experts.rs.
struct ExpertPlan {
    /// `groups` of one tile; `x_units` is all of K where `x_whole`, or the units that are copied at a time.
    Plan plan;
    /// u32 per row, or null: row r of the product reads row `pairs[r] / top_k` of x instead of row r.
    const u32 *pairs;
    u32 top_k;
    /// Matrices.
    u32 experts;
    /// 0: columns as they are; 1 + kind: the first half are gates of the second half.
    u32 gate;
    /// Blocks take whole groups, so that sums have one order whatever the rows.
    u32 whole;
    /// The rows of the experts are older than the launch before this one.
    u32 settled;
};

/// Warps of a block: side by side along N, and taking turns along K.
constexpr u32 EXPERT_WN = 2, EXPERT_WK = 4;

template <class E, u32 MB, u32 D> struct ExpertProduct : SmallProduct<E, MB, 1, EXPERT_WN, EXPERT_WK, D> {
    using Base = SmallProduct<E, MB, 1, EXPERT_WN, EXPERT_WK, D>;
    using S = typename Base::S;
    using Quads = typename Base::Quads;
    static constexpr u32 WK = EXPERT_WK;
    static_assert(S::THREADS == 256 && S::COLUMNS == 128, "a warp adds up one row of eight, a lane four columns");

    const ExpertPlan &e;
    /// In shared memory, `[experts + 1]`: tiles before each expert, and its first row.
    const u32 *tiles, *starts;
    /// The block's run of units on the line.
    u32 begin, end;
    /// Where the copies are: end of their segment along K, and where the next segment begins on the line.
    u32 ahead_end, ahead_next;

    /// A run of units of one group.
    struct Segment {
        u32 expert, row, rows, group, from, to;
        u32 tile;
    };

    /// Where the range of block `range` begins on the line.
    __device__ __forceinline__ u32 start_of(u32 range) const {
        const u32 groups = tiles[e.experts] * this->p.groups, step = e.whole ? this->p.units : 1;
        const u32 all = e.whole ? groups : groups * this->p.units;
        const u32 share = all / this->p.blocks, more = all % this->p.blocks;
        return (range * share + min(range, more)) * step;
    }

    /// The segment that begins at `position` on the line.
    __device__ __forceinline__ Segment segment_at(u32 position) const {
        Segment s;
        const u32 group = position / this->p.units;
        s.from = position - group * this->p.units;
        s.to = min(this->p.units, s.from + (end - position));
        s.tile = group / this->p.groups;
        s.group = group - s.tile * this->p.groups;
        u32 before = 0;
        for (u32 i = this->lane; i < e.experts; i += 32) {
            before += tiles[i + 1] <= s.tile;
        }
        // The expert of the tile is the first whose tiles end behind it.
        s.expert = __reduce_add_sync(~0u, before);
        s.row = starts[s.expert] + (s.tile - tiles[s.expert]) * (8 * MB);
        s.rows = min(starts[s.expert + 1] - s.row, 8 * MB);
        return s;
    }

    /// The warp's first unit from `from` on: warps take turns by the place along K, so that sums do not depend on where a
    /// run begins.
    __device__ __forceinline__ u32 own_unit(u32 from) const { return from + (this->wk - from) % WK; }

    /// Tile column of the warp in a group; one beyond the last repeats the first, and is not heard.
    __device__ __forceinline__ u32 column_of(u32 group) const {
        const u32 all = this->w.n / 64, column = e.gate ? group + this->wn * (all / 2) : 2 * group + this->wn;
        return column < all ? column : 0;
    }

    /// Goes to the next segment in which the warp has a unit to copy.
    __device__ __forceinline__ void enter_segment() {
        while (ahead_next < end) {
            const Segment s = segment_at(ahead_next);
            ahead_next += s.to - s.from;
            this->ahead_unit = own_unit(s.from);
            ahead_end = s.to;
            if (this->ahead_unit < s.to) {
                const u64 bytes = s.expert * this->r.expert_stride;
                const u32 column = column_of(s.group);
                const u64 row = this->w.n / 64;
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    this->codes0[i] = this->w.codes[0].data + bytes + (i * row + column) * S::TILE0 + 16 * this->lane;
                    if constexpr (E::BITS1 != 0) {
                        this->codes1[i] = this->w.codes[1].data + bytes + (i * row + column) * S::TILE1 + 16 * this->lane;
                    }
                }
                this->expert_bytes = bytes;
                this->template enter_scales<0>(column);
                return;
            }
        }
        this->ahead_unit = ahead_end = 0;
    }

    /// Starts copying the next of the warp's units into a stage.
    __device__ __forceinline__ void fetch_next(u32 stage) {
        if (this->ahead_unit >= ahead_end) {
            return;
        }
        const u32 to = stage + this->lane_codes;
        const u64 unit = this->ahead_unit;
#pragma unroll
        for (u32 s = 0; s < 2; ++s) {
            this->template copy_run<S::TILE0>(to + s * S::TILE0, this->codes0[s] + unit * this->step0);
            if constexpr (E::BITS1 != 0) {
                this->template copy_run<S::TILE1>(to + 2 * S::TILE0 + s * S::TILE1, this->codes1[s] + unit * this->step1);
            }
        }
        this->template fetch_scales<0>(to);
        this->ahead_unit += WK;
        if (this->ahead_unit >= ahead_end) {
            enter_segment();
        }
    }

    /// Copies the activations of the segment's rows, units `from` to `to` along K, to slots from `slot` on.
    __device__ __forceinline__ void copy_rows(const Segment &s, u32 from, u32 to, u32 slot) const {
        const u32 per_row = 4 * (to - from), warp = threadIdx.x / 32;
        // A row or a share of one for each warp.
        const u32 at_once = min(s.rows, S::WARPS), shares = S::WARPS / at_once;
        if (warp >= at_once * shares) {
            return;
        }
        for (u32 row = warp % at_once; row < s.rows; row += at_once) {
            const u32 source = e.pairs ? __ldcg(e.pairs + s.row + row) / e.top_k : s.row + row;
            const uint4 *x = reinterpret_cast<const uint4 *>(this->r.x + static_cast<u64>(source) * this->r.x_stride + 32 * from);
            const u32 place = this->x + row * this->x_pitch + 64 * slot;
#pragma unroll 4
            for (u32 c = warp / at_once * 32 + this->lane; c < per_row; c += 32 * shares) {
                const uint4 v = __ldcg(x + c);
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place + 16 * c), "r"(v.x), "r"(v.y), "r"(v.z),
                             "r"(v.w)
                             : "memory");
            }
        }
    }

    /// Where the lane finds its rows, of which the segment has some.
    __device__ __forceinline__ void place_rows(const Segment &s) {
        this->rows = s.rows;
        this->m0 = s.row;
#pragma unroll
        for (u32 m = 0; m < MB; ++m) {
            const u32 row = 8 * m + this->lane % 8;
            this->x_row[m] = (row < s.rows ? this->x + row * this->x_pitch : this->zeros) + 16 * (this->lane / 8);
            this->x_step[m] = row < s.rows ? 64 : 0;
        }
    }

    /// Adds up the warps' sums of a segment, and stores them or leaves them to the block that began the group.
    __device__ __forceinline__ void finish(const Segment &s, u32 position, u32 range) {
        const u32 g = this->lane / 4, q = this->lane % 4, warp = threadIdx.x / 32;
        Quads value;
#pragma unroll
        for (u32 m = 0; m < MB; ++m) {
            float *at = this->sums + this->wk * (8 * S::SUM_ROW) + this->wn * 64 + 2 * q * S::SUM_ROW + g;
#pragma unroll
            for (u32 j = 0; j < 4; ++j, at += 16) {
                at[0] = this->acc[0][m][j][0];
                at[S::SUM_ROW] = this->acc[0][m][j][1];
                at[8] = this->acc[0][m][j][2];
                at[S::SUM_ROW + 8] = this->acc[0][m][j][3];
            }
            __syncthreads();
            float4 sum = make_float4(0, 0, 0, 0);
            if (8 * m + warp < s.rows) {
#pragma unroll
                for (u32 i = 0; i < WK; ++i) {
                    const float *from = this->sums + i * (8 * S::SUM_ROW) + warp * S::SUM_ROW + 4 * this->lane;
                    Base::add(sum, *reinterpret_cast<const float4 *>(from));
                }
            }
            value[m][0] = sum;
            __syncthreads();
        }
        if (s.from != 0) {
            float *to = this->left(range);
            this->for_quads([&](u32 m, u32 i, u32 at) {
                __stcg(reinterpret_cast<float4 *>(to + m * 8 * S::COLUMNS) + at, Base::marked(value[m][i]));
            });
            return;
        }
        const u32 half = this->w.n / 2;
        const u32 column = e.gate ? s.group * 64 + 4 * (this->lane % 16) + (this->lane < 16 ? 0 : half)
                                  : s.group * S::COLUMNS + 4 * this->lane;
        const bool inside = column < this->w.n;
        float4 factor, bias = make_float4(0, 0, 0, 0);
        this->expert_bytes = s.expert * this->r.expert_stride;
        this->factors_of(column, factor);
        if (this->r.bias && inside) {
            bias = *reinterpret_cast<const float4 *>(this->r.bias + static_cast<u64>(s.expert) * this->w.n + column);
        }
        // The blocks of the following ranges did the rest of the group, in order, each as its first piece.
        const u32 last = position - s.from + this->p.units;
        u32 done = position + (s.to - s.from);
        for (u32 other = range + 1; done < last; ++other) {
            this->collect(this->left(other), value);
            done = start_of(other + 1);
        }
        this->for_quads([&](u32 m, u32 i, u32) {
            const float4 v = value[m][i];
            const float4 out = make_float4(v.x * factor.x, v.y * factor.y, v.z * factor.z, v.w * factor.w);
            const u32 row = s.row + 8 * m + warp;
            if (e.gate) {
                float4 up;
                up.x = __shfl_down_sync(~0u, out.x, 16);
                up.y = __shfl_down_sync(~0u, out.y, 16);
                up.z = __shfl_down_sync(~0u, out.z, 16);
                up.w = __shfl_down_sync(~0u, out.w, 16);
                const u32 kind = e.gate - 1;
                const float4 inner = make_float4(vt::gate(kind, out.x, up.x), vt::gate(kind, out.y, up.y), vt::gate(kind, out.z, up.z),
                                                 vt::gate(kind, out.w, up.w));
                if (this->lane < 16) {
                    store_quad(this->r, row, column, inner);
                }
            } else if (inside) {
                store_quad(this->r, row, column, out);
            }
        });
    }

    __device__ __forceinline__ void run(u8 *shared, u32 range) {
        const u32 warp = threadIdx.x / 32;
        this->wn = warp % EXPERT_WN;
        this->wk = warp / EXPERT_WN;
        this->ring = shared_address(shared) + warp * (D * S::STAGE);
        this->sums = reinterpret_cast<float *>(shared + S::RING);
        this->zeros = shared_address(shared) + S::RING + S::SUMS;
        this->x = (shared_address(starts + e.experts + 1) + 15) / 16 * 16;
        this->x_pitch = 64 * this->p.x_units + 2 * X_PADDING;
        this->step0 = this->w.n / 32 * S::TILE0;
        this->step1 = this->w.n / 32 * S::TILE1;
        this->lane_codes = 16 * this->lane;
        this->lane_scales = 8 * (this->lane / 4);
        begin = start_of(range);
        end = start_of(range + 1);
        ahead_next = begin;
        enter_segment();
#pragma unroll 1
        for (u32 d = 0; d < D; ++d) {
            fetch_next(this->ring + d * S::STAGE);
            copy_commit();
        }
        if (e.settled) {
            wait_for_previous();
            let_next_start();
        }
        u32 stage = this->ring, tile = ~0u;
        const u32 ring_end = this->ring + D * S::STAGE;
        for (u32 position = begin; position < end;) {
            const Segment s = segment_at(position);
            if (this->p.x_whole && s.tile != tile) {
                // All of K where other groups of the tile follow.
                const bool more = end - position > s.to - s.from;
                copy_rows(s, more ? 0 : s.from, more ? this->p.units : s.to, more ? 0 : s.from);
                __syncthreads();
                tile = s.tile;
            }
            place_rows(s);
            this->clear();
            u32 unit = own_unit(s.from);
            for (u32 from = s.from; from < s.to;) {
                const u32 to = this->p.x_whole ? s.to : min(s.to, from + this->p.x_units);
                if (!this->p.x_whole) {
                    __syncthreads();
                    copy_rows(s, from, to, 0);
                    __syncthreads();
                }
                const u32 skipped = this->p.x_whole ? 0 : from;
                for (; unit < to; unit += WK) {
                    copy_wait<D - 1>();
                    __syncwarp();
                    this->multiply_unit(stage, unit - skipped, [&] {
                        fetch_next(stage);
                        copy_commit();
                    });
                    stage = stage + S::STAGE == ring_end ? this->ring : stage + S::STAGE;
                }
                from = to;
            }
            finish(s, position, range);
            position += s.to - s.from;
        }
    }
};

/// Fills the tables of tiles: exclusive sums over the experts, by 256 threads.
template <u32 ROWS> __device__ __forceinline__ void tables_of(const u32 *offsets, u32 experts, u32 *tiles, u32 *starts) {
    constexpr u32 EACH = 2;
    __shared__ u32 sums[8];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * EACH;
    u32 start[EACH + 1], before[EACH], sum = 0;
#pragma unroll
    for (u32 i = 0; i <= EACH; ++i) {
        start[i] = __ldcg(offsets + min(first + i, experts));
    }
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        before[i] = sum;
        sum += (start[i + 1] - start[i] + ROWS - 1) / ROWS;
    }
    u32 inclusive = sum;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, inclusive, step);
        inclusive += lane >= step ? other : 0;
    }
    if (lane == 31) {
        sums[warp] = inclusive;
    }
    __syncthreads();
    u32 base = inclusive - sum;
    for (u32 i = 0; i < warp; ++i) {
        base += sums[i];
    }
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        if (first + i <= experts) {
            tiles[first + i] = base + before[i];
            starts[first + i] = start[i];
        }
    }
    // The last thread's experts may end with the table.
    if (first + EACH == experts) {
        tiles[experts] = base + sum;
        starts[experts] = start[EACH];
    }
    __syncthreads();
}

template <class E, u32 MB, u32 D>
__device__ __forceinline__ void expert_product(const Tiled &w, const Request &r, const ExpertPlan &plan) {
    using P = ExpertProduct<E, MB, D>;
    extern __shared__ __align__(128) u8 shared[];
    if (!plan.settled) {
        wait_for_previous();
        let_next_start();
    }
    u32 *tiles = reinterpret_cast<u32 *>(shared + P::S::FIXED), *starts = tiles + plan.experts + 1;
    if (threadIdx.x < 16) {
        reinterpret_cast<u32 *>(shared + P::S::FIXED)[-16 + static_cast<int>(threadIdx.x)] = 0;
    }
    tables_of<8 * MB>(r.offsets, plan.experts, tiles, starts);
    P product{{w, r, plan.plan}, plan};
    product.tiles = tiles;
    product.starts = starts;
    product.lane = threadIdx.x % 32;
    // A block waits for those of the following ranges only: they have lower numbers and are started before.
    product.run(shared, plan.plan.blocks - 1 - blockIdx.x);
}

/// `X(name, encoding, rows, D, blocks)` for each kernel of a list: `blocks` of a multiprocessor.
#define VT_EXPERT_KERNEL(NAME, ENCODING, ROWS, D, BLOCKS)                                                                      \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS)                                                                  \
        vt_experts_##NAME##_##ROWS(const __grid_constant__ Tiled w, const __grid_constant__ Request r,                         \
                                   const __grid_constant__ ExpertPlan p) {                                                     \
        expert_product<ENCODING, ROWS / 8, D>(w, r, p);                                                                        \
    }
#define VT_EXPERT_ENTRY(NAME, ENCODING, ROWS, D, BLOCKS)                                                                       \
    ExpertKernel{"vt_experts_" #NAME "_" #ROWS, ROWS, BLOCKS, Shape<ENCODING, ROWS / 8, 1, EXPERT_WN, EXPERT_WK, D>::FIXED},

/// A kernel, as the host looks it up. Mirrored by `Entry` in src/cuda/gemm/experts.rs.
struct ExpertKernel {
    char name[40];
    /// Rows of a tile, blocks of a multiprocessor, and bytes of shared memory besides tables and activations.
    u32 rows, blocks, fixed_bytes;
};

/// Compiles a list `LIST(X)` and its table.
#define VT_EXPERT_KERNELS(LIST)                                                                                                \
    LIST(VT_EXPERT_KERNEL)                                                                                                     \
    extern "C" __constant__ ExpertKernel vt_expert_kernels[] = {LIST(VT_EXPERT_ENTRY)};

/// For an expert's few rows and for more: encodings of at most 4 bits, and of more, which get fewer units in flight.
#define VT_EXPERTS_4(X, NAME, FEW, ENCODING)                                                                                   \
    X(NAME, FEW, 8, 4, 2)                                                                                                      \
    X(NAME, ENCODING, 16, 3, 2)                                                                                                \
    X(NAME, ENCODING, 32, 4, 1)
#define VT_EXPERTS_8(X, NAME, ENCODING)                                                                                        \
    X(NAME, ENCODING, 8, 3, 2)                                                                                                 \
    X(NAME, ENCODING, 16, 3, 1)                                                                                                \
    X(NAME, ENCODING, 32, 3, 1)
