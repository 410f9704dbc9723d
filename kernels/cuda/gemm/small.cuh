// Products with few rows, limited by the reading of the weights: every chip from sm_80 on.
//
// The weights are the A operand (16 columns by 16 of K), the activations the B operand (8 rows of activations). The matrix is
// cut into groups of adjacent tile columns and units of 32 along K; all units, group after group, are divided evenly among
// the blocks. A block's warps take turns at its units, each through a ring of its own in shared memory that it fills by
// asynchronous copies. Where a group's K is divided between blocks, each leaves its sums in the workspace for the one that
// began the group, which adds them in order: results do not depend on timing.
#pragma once

#include "common/async.cuh"
#include "common/fresh.cuh"
#include "common/half_norm.cuh"
#include "common/order.cuh"
#include "gemm/encodings.cuh"
#include "gemm/inputs.cuh"
#include "gemm/request.cuh"
#include "gemm/tiled.cuh"

/// How a product is divided. Mirrored by `Plan` in src/cuda/gemm/params.rs.
struct Plan {
    /// Sums of unfinished groups, all zero before and after a launch.
    float *workspace;
    /// Units of 32 along K, groups of tile columns, blocks that share them.
    u32 units, groups, blocks;
    /// Units of activations in shared memory; whether they are all of K from its start, or follow the block's own units.
    u32 x_units, x_whole;
    /// log2 of units per row of each scale plane (0 for rows of 32 and of 16).
    u32 shifts[MAX_SCALE_PLANES];
    /// What sums are multiplied by at the end: 0 nothing, 1 a value per part, 2 its inverse, 3 a value per column; in that plane.
    u32 factor, factor_plane;
    /// What is added to zero points.
    u32 zero_add;
};

/// Elements of padding between rows of activations in shared memory, against bank conflicts.
constexpr u32 X_PADDING = 8;
/// Words of padding between rows of sums.
constexpr u32 SUM_PADDING = 4;

/// Sizes that follow from the shape of a block: `MB` times 8 rows, `NT` tile columns a warp, `WN` warps side by side along N,
/// `WK` taking turns along K, `D` units in flight per warp.
template <class E, u32 MB, u32 NT, u32 WN, u32 WK, u32 D> struct Shape {
    static constexpr u32 WARPS = WN * WK, THREADS = 32 * WARPS, COLUMNS = 64 * NT * WN;
    static constexpr u32 TILE0 = 128 * E::BITS0, TILE1 = 128 * E::BITS1;
    __host__ __device__ static constexpr u32 scale_offset(u32 plane) {
        u32 at = 2 * NT * (TILE0 + TILE1);
        for (u32 i = 0; i < plane; ++i) {
            at += E::rows(i) * NT * 64 * E::size(i);
        }
        return at;
    }
    static constexpr u32 STAGE = scale_offset(E::PLANES), RING = WARPS * D * STAGE;
    static constexpr u32 SUM_ROW = COLUMNS + SUM_PADDING, SUMS = WK * 8 * SUM_ROW * 4;
    /// Bytes before the activations: ring, sums, zeros that stand for rows that are not there, and factors of rows.
    static constexpr u32 ZEROS = 64, ROW_FACTORS = 32, FIXED = RING + SUMS + ZEROS + ROW_FACTORS;
};

/// Keeps the compiler from working out a value again where it is used: there are registers for it.
__device__ __forceinline__ void keep(u32 &value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void keep(const u8 *&value) { asm volatile("" : "+l"(value)); }

template <class E, u32 MB, u32 NT, u32 WN, u32 WK, u32 D> struct SmallProduct {
    using S = Shape<E, MB, NT, WN, WK, D>;

    const Tiled &w;
    const Request &r;
    const Plan &p;
    u64 expert_bytes;
    u32 lane, wn, wk;
    /// Shared memory.
    u32 ring, zeros, x, x_pitch;
    float *sums, *row_factors;
    /// First row and number of rows, first unit and number of units.
    u32 m0, rows, first, count;
    /// The next unit to be copied: its number within the block's, its group, and its place along K.
    u32 ahead, ahead_group, ahead_unit;
    /// What this lane copies of the group's unit 0: of both tile rows of the code planes, and of the scale planes.
    const u8 *codes0[2], *codes1[2], *scales[E::PLANES ? E::PLANES : 1];
    /// Bytes from one unit's codes to the next one's.
    u32 step0, step1;
    /// Where this lane finds its row of activations in shared memory, and the bytes to the next unit.
    u32 x_row[MB], x_step[MB];
    /// Where it finds its codes and scales in a stage.
    u32 lane_codes, lane_scales;
    float acc[NT][MB][4][4];

    __device__ __forceinline__ u32 tile_column(u32 group) const {
        const u32 column = group * (NT * WN) + wn * NT;
        // Warps beyond the last column repeat the first, and are not heard.
        return column < w.n / 64 ? column : 0;
    }

    /// Finds the lane's places in the planes for the group that is copied next.
    __device__ __forceinline__ void enter_group() {
        const u32 column = tile_column(ahead_group);
        const u64 row = w.n / 64;
#pragma unroll
        for (u32 s = 0; s < 2; ++s) {
            codes0[s] = w.codes[0].data + expert_bytes + (s * row + column) * S::TILE0 + 16 * lane;
            if constexpr (E::BITS1 != 0) {
                codes1[s] = w.codes[1].data + expert_bytes + (s * row + column) * S::TILE1 + 16 * lane;
            }
        }
        enter_scales<0>(column);
    }

    template <u32 I> __device__ __forceinline__ void enter_scales(u32 column) {
        if constexpr (I < E::PLANES) {
            constexpr u32 SIZE = E::size(I), PIECES = NT * 64 * SIZE / 16;
            // The two rows of a unit, where there are two, are copied by lanes side by side.
            const u64 row = E::rows(I) == 2 ? lane / PIECES * w.n * SIZE : 0;
            scales[I] = w.scales[I].data + expert_bytes + row + 64 * column * SIZE + 16 * (lane % PIECES);
            enter_scales<I + 1>(column);
        }
    }

    /// Starts copying `Bytes` bytes, this lane's pieces of 16.
    template <u32 Bytes> __device__ __forceinline__ void copy_run(u32 to, const u8 *from) const {
        if constexpr (Bytes >= 512) {
#pragma unroll
            for (u32 i = 0; i < Bytes / 512; ++i) {
                copy_16(to + 512 * i, from + 512 * i);
            }
        }
        if constexpr (Bytes % 512 != 0) {
            copy_16_if(16 * lane < Bytes % 512, to + Bytes / 512 * 512, from + Bytes / 512 * 512);
        }
    }

    /// Starts copying the next of the warp's units into a stage.
    __device__ __forceinline__ void fetch(u32 stage) {
        if (ahead >= count) {
            return;
        }
        const u32 to = stage + lane_codes;
        const u64 unit = ahead_unit;
#pragma unroll
        for (u32 s = 0; s < 2; ++s) {
            copy_run<NT * S::TILE0>(to + s * NT * S::TILE0, codes0[s] + unit * step0);
            if constexpr (E::BITS1 != 0) {
                copy_run<NT * S::TILE1>(to + 2 * NT * S::TILE0 + s * NT * S::TILE1, codes1[s] + unit * step1);
            }
        }
        fetch_scales<0>(to);
        ahead += WK;
        ahead_unit += WK;
        if (ahead_unit >= p.units) {
            do {
                ahead_unit -= p.units;
                ++ahead_group;
            } while (ahead_unit >= p.units);
            enter_group();
        }
    }

    /// Starts copying what scale planes from `I` on hold for the unit.
    template <u32 I> __device__ __forceinline__ void fetch_scales(u32 to) const {
        if constexpr (I < E::PLANES) {
            constexpr u32 SIZE = E::size(I), ROWS = E::rows(I), PIECES = ROWS * NT * 64 * SIZE / 16;
            static_assert(PIECES <= 32, "a lane copies one piece");
            const u64 row = ROWS == 2 ? ahead_unit : ahead_unit >> p.shifts[I];
            const u32 step = ROWS * SIZE * w.n;
            copy_16_if(PIECES == 32 || lane < PIECES, to + S::scale_offset(I), scales[I] + row * step);
            fetch_scales<I + 1>(to);
        }
    }

    /// Starts copying the activations of units `from` to `end` (counted along K) to slots from `slot` on.
    __device__ __forceinline__ void fetch_x(u32 from, u32 end, u32 slot) const {
        const u32 per_row = 4 * (end - from), warp = threadIdx.x / 32;
        // A row or a share of one for each warp.
        const u32 rows_at_once = min(rows, S::WARPS), shares = S::WARPS / rows_at_once;
        if (warp >= rows_at_once * shares) {
            return;
        }
        for (u32 row = warp % rows_at_once; row < rows; row += rows_at_once) {
            const u16 *source = r.x + static_cast<u64>(m0 + row) * r.x_stride + 32 * from;
            const u32 to = x + row * x_pitch + 64 * slot;
            for (u32 c = warp / rows_at_once * 32 + lane; c < per_row; c += 32 * shares) {
                copy_16(to + 16 * c, source + 8 * c);
            }
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (u32 t = 0; t < NT; ++t)
#pragma unroll
            for (u32 b = 0; b < MB; ++b)
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        acc[t][b][j][i] = 0;
                    }
    }

    /// Loads what the lane owns of `Bits` bits of every code of a tile.
    template <u32 Bits> __device__ __forceinline__ static void load_plane(u32 at, u32 (&words)[Bits]) {
        if constexpr (Bits == 1) {
            words[0] = load_shared_4(at);
        } else if constexpr (Bits == 2) {
            const uint2 v = load_shared_8(at);
            words[0] = v.x;
            words[1] = v.y;
        } else {
#pragma unroll
            for (u32 i = 0; i < Bits / 4; ++i) {
                const uint4 v = load_shared_16(at + 16 * i);
                words[4 * i] = v.x;
                words[4 * i + 1] = v.y;
                words[4 * i + 2] = v.z;
                words[4 * i + 3] = v.w;
            }
        }
    }

    __device__ __forceinline__ void load_words(u32 stage, u32 t, u32 step, Words<E::BITS0, E::BITS1> &words) const {
        load_plane<E::BITS0>(stage + (step * NT + t) * S::TILE0 + lane_codes * E::BITS0 / 4, words.first);
        if constexpr (E::BITS1 != 0) {
            const u32 at = stage + 2 * NT * S::TILE0 + (step * NT + t) * S::TILE1 + lane_codes * E::BITS1 / 4;
            load_plane<E::BITS1>(at, words.second);
        }
    }

    /// Addresses of the lane's elements of the scale planes from `I` on, for tile `t` and half `step` of a unit.
    template <u32 I> __device__ __forceinline__ void places(u32 *at, u32 stage, u32 t, u32 step) const {
        if constexpr (I < E::PLANES) {
            const u32 row = E::rows(I) == 2 ? step : 0;
            at[I] = stage + S::scale_offset(I) + (row * NT + t) * 64 * E::size(I) + lane_scales * E::size(I);
            places<I + 1>(at, stage, t, step);
        }
    }

    /// Multiplies the unit in `stage` with the activations in `slot`; `refill` starts the next copy into the stage, as soon as
    /// its contents are in registers.
    template <class Refill> __device__ __forceinline__ void multiply_unit(u32 stage, u32 slot, Refill refill) {
        constexpr bool IN_CODE = E::MODE == Apply::IN_CODE, IN_GROUP = E::MODE == Apply::IN_GROUP;
        Words<E::BITS0, E::BITS1> words[NT][2];
        uint2 bytes[NT][2];
        Eight factors[NT][E::GROUPS], addends[NT][E::GROUPS];
#pragma unroll
        for (u32 t = 0; t < NT; ++t)
#pragma unroll
            for (u32 s = 0; s < 2; ++s) {
                load_words(stage, t, s, words[t][s]);
                if constexpr (IN_CODE) {
                    bytes[t][s] = load_shared_8(stage + S::scale_offset(0) + (s * NT + t) * 64 + lane_scales);
                }
                if constexpr (IN_GROUP) {
                    if (s < E::GROUPS) {
                        u32 at[E::PLANES];
                        places<0>(at, stage, t, s);
                        E::scales(at, factors[t][s], addends[t][s], p.zero_add);
                    }
                }
            }
        u32 b[MB][4];
#pragma unroll
        for (u32 m = 0; m < MB; ++m) {
            load_matrices(b[m], x_row[m] + slot * x_step[m]);
        }
        __syncwarp();
        refill();
        if constexpr (E::RAISE != 0) {
#pragma unroll
            for (u32 m = 0; m < MB; ++m)
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    b[m][i] = multiply_pairs(b[m][i], power_pair(E::RAISE));
                }
        }
        float x_sums[MB][E::GROUPS][4];
        if constexpr (E::MIN) {
            // Sums of activations: products with ones.
            constexpr u32 ONE = power_pair(0);
            const u32 ones[4] = {ONE, ONE, ONE, ONE};
#pragma unroll
            for (u32 m = 0; m < MB; ++m) {
                multiply(x_sums[m][0], ones, b[m][0], b[m][1]);
                if constexpr (E::GROUPS == 2) {
                    multiply(x_sums[m][1], ones, b[m][2], b[m][3]);
                } else {
                    multiply_add(x_sums[m][0], ones, b[m][2], b[m][3]);
                }
            }
        }
#pragma unroll
        for (u32 t = 0; t < NT; ++t) {
            u32 pairs[2][4];
            if constexpr (IN_CODE) {
                E::pairs(bytes[t][0], pairs[0]);
                E::pairs(bytes[t][1], pairs[1]);
            }
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                u32 a[2][4];
                E::expand(words[t][0], j, pairs[0][j], a[0]);
                E::expand(words[t][1], j, pairs[1][j], a[1]);
#pragma unroll
                for (u32 m = 0; m < MB; ++m) {
                    if constexpr (!IN_GROUP) {
                        multiply_add(acc[t][m][j], a[0], b[m][0], b[m][1]);
                        multiply_add(acc[t][m][j], a[1], b[m][2], b[m][3]);
                    } else if constexpr (E::GROUPS == 2) {
                        float sum[2][4];
                        multiply(sum[0], a[0], b[m][0], b[m][1]);
                        multiply(sum[1], a[1], b[m][2], b[m][3]);
                        add_scaled(acc[t][m][j], sum[0], factors[t][0][j]);
                        add_scaled(acc[t][m][j], sum[1], factors[t][1][j]);
                    } else {
                        float sum[4];
                        multiply(sum, a[0], b[m][0], b[m][1]);
                        multiply_add(sum, a[1], b[m][2], b[m][3]);
                        add_scaled(acc[t][m][j], sum, factors[t][0][j]);
                    }
                    if constexpr (E::MIN) {
#pragma unroll
                        for (u32 s = 0; s < E::GROUPS; ++s) {
                            add_scaled(acc[t][m][j], x_sums[m][s], addends[t][s][j]);
                        }
                    }
                }
            }
        }
    }

    /// Adds a group's sums, times the factors of columns g and g + 8.
    __device__ static __forceinline__ void add_scaled(float (&to)[4], const float (&sum)[4], float2 factor) {
        to[0] = fmaf(factor.x, sum[0], to[0]);
        to[1] = fmaf(factor.x, sum[1], to[1]);
        to[2] = fmaf(factor.y, sum[2], to[2]);
        to[3] = fmaf(factor.y, sum[3], to[3]);
    }

    /// What sums of four padded columns of a tile are multiplied by.
    __device__ __forceinline__ void factors_of(u32 column, float4 &out) const {
        const float power = __uint_as_float(static_cast<u32>(127 - E::EXPONENT) << 23);
        out = make_float4(power, power, power, power);
        if (p.factor == 0 || column >= w.n) {
            return;
        }
        const ScalePlane &plane = w.scales[p.factor_plane];
        const u8 *data = plane.data + expert_bytes;
        if (p.factor == 3) {
            out = make_float4(power * scale_value(plane, data, column), power * scale_value(plane, data, column + 1),
                              power * scale_value(plane, data, column + 2), power * scale_value(plane, data, column + 3));
            return;
        }
        const float scale = scale_value(plane, data, part_of(w, column)), factor = p.factor == 2 ? power / scale : power * scale;
        out = make_float4(factor, factor, factor, factor);
    }

    /// Place of the sums that the block of range `range` leaves for another.
    __device__ __forceinline__ float *left(u32 range) const {
        return p.workspace + static_cast<u64>(range) * (8 * MB * S::COLUMNS);
    }

    /// Quads of columns of eight rows that a thread adds up: `threadIdx.x + THREADS * e`.
    static constexpr u32 ROW_QUADS = S::COLUMNS / 4, PER_THREAD = (8 * ROW_QUADS + S::THREADS - 1) / S::THREADS;
    static_assert(S::THREADS % ROW_QUADS == 0, "all quads of a thread are of the same columns");
    using Quads = float4[MB][PER_THREAD];

    /// Calls `each(m, e, i)` for the quads that the thread adds up and that there are: `i` counts within the eight rows.
    template <class Each> __device__ __forceinline__ void for_quads(Each each) const {
#pragma unroll
        for (u32 m = 0; m < MB; ++m) {
            const u32 here = (rows > 8 * m ? min(rows - 8 * m, 8) : 0) * ROW_QUADS;
#pragma unroll
            for (u32 e = 0; e < PER_THREAD; ++e) {
                if (threadIdx.x + S::THREADS * e < here) {
                    each(m, e, threadIdx.x + S::THREADS * e);
                }
            }
        }
    }

    /// Adds up the warps' sums of a group of which the block did units `begin` to `end` along K, and stores or leaves them.
    __device__ __forceinline__ void reduce(u32 group, u32 begin, u32 end, u32 range) {
        const u32 g = lane / 4, q = lane % 4;
        Quads value;
        const u32 own = threadIdx.x / ROW_QUADS * S::SUM_ROW + threadIdx.x % ROW_QUADS * 4;
#pragma unroll
        for (u32 m = 0; m < MB; ++m) {
            float *mine = sums + wk * (8 * S::SUM_ROW) + wn * (64 * NT) + 2 * q * S::SUM_ROW + g;
#pragma unroll
            for (u32 t = 0; t < NT; ++t)
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    float *at = mine + 64 * t + 16 * j;
                    at[0] = acc[t][m][j][0];
                    at[S::SUM_ROW] = acc[t][m][j][1];
                    at[8] = acc[t][m][j][2];
                    at[S::SUM_ROW + 8] = acc[t][m][j][3];
                }
            __syncthreads();
#pragma unroll
            for (u32 e = 0; e < PER_THREAD; ++e) {
                float4 sum = make_float4(0, 0, 0, 0);
                if (8 * m + (threadIdx.x + S::THREADS * e) / ROW_QUADS < rows && threadIdx.x + S::THREADS * e < 8 * ROW_QUADS) {
                    const float *from = sums + own + S::THREADS / ROW_QUADS * e * S::SUM_ROW;
#pragma unroll
                    for (u32 s = 0; s < WK; ++s) {
                        add(sum, *reinterpret_cast<const float4 *>(from + s * (8 * S::SUM_ROW)));
                    }
                }
                value[m][e] = sum;
            }
            __syncthreads();
        }
        clear();
        if (begin != 0) {
            float *to = left(range);
            for_quads([&](u32 m, u32 e, u32 i) {
                __stcg(reinterpret_cast<float4 *>(to + m * 8 * S::COLUMNS) + i, marked(value[m][e]));
            });
            return;
        }
        const u32 column = group * S::COLUMNS + threadIdx.x % ROW_QUADS * 4;
        float4 factor, bias = make_float4(0, 0, 0, 0);
        const bool inside = column < w.n;
        factors_of(column, factor);
        if (r.bias && inside) {
            bias = make_float4(r.bias[column], r.bias[column + 1], r.bias[column + 2], r.bias[column + 3]);
        }
        const bool leaves_norm = MAKES_INPUTS && r.next && inside;
        Quads before;
        float4 weight;
        if (leaves_norm) {
            weight = __ldg(reinterpret_cast<const float4 *>(r.weight + column));
            for_quads([&](u32 m, u32 e, u32 i) {
                before[m][e] = r.accumulate ? *result(i / ROW_QUADS, column) : make_float4(0, 0, 0, 0);
            });
        }
        // The blocks of the following ranges did the rest of the group, in order, each as its first piece.
        const u64 all = static_cast<u64>(p.units) * p.groups, last = static_cast<u64>(group + 1) * p.units;
        u64 done = static_cast<u64>(group) * p.units + end;
        for (u32 other = range + 1; done < last; ++other) {
            collect(left(other), value);
            done = all * (other + 1) / p.blocks;
        }
        if (inside) {
            for_quads([&](u32 m, u32 e, u32 i) {
                float4 v = value[m][e];
                if (MAKES_INPUTS && r.input == INPUT_WEIGHTED) {
                    const float row_factor = row_factors[i / ROW_QUADS];
                    v = make_float4(v.x * row_factor, v.y * row_factor, v.z * row_factor, v.w * row_factor);
                }
                float4 out = make_float4(fmaf(v.x, factor.x, bias.x), fmaf(v.y, factor.y, bias.y), fmaf(v.z, factor.z, bias.z),
                                         fmaf(v.w, factor.w, bias.w));
                if (leaves_norm) {
                    add(out, before[m][e]);
                    *result(i / ROW_QUADS, column) = out;
                    leave_for_norm(i / ROW_QUADS, column, out, weight);
                } else {
                    store_quad(r, m0 + 8 * m + i / ROW_QUADS, column, out);
                }
            });
        }
    }

    /// Four columns of the f32 result.
    __device__ __forceinline__ float4 *result(u32 row, u32 column) const {
        return reinterpret_cast<float4 *>(static_cast<float *>(r.out) + static_cast<u64>(m0 + row) * r.out_stride + column);
    }

    /// Leaves four columns of the result for the norm that follows: times its weights, and the sum of squares of the 16 columns
    /// that four lanes have.
    __device__ __forceinline__ void leave_for_norm(u32 row, u32 column, float4 v, float4 weight) const {
        leave_half_norm(r.next + static_cast<u64>(m0 + row) * w.n, r.squares + static_cast<u64>(m0 + row) * (w.n / SQUARED), column,
                        v, weight);
    }

    /// What rows of INPUT_WEIGHTED are still to be multiplied by.
    __device__ __forceinline__ void find_row_factors() const {
        const u32 row = threadIdx.x / 32, k = 32 * p.units;
        if (row < rows) {
            const float factor = half_norm_factor(r.squares + static_cast<u64>(m0 + row) * (k / SQUARED), k, r.eps);
            if (lane == 0) {
                row_factors[row] = factor;
            }
        }
    }

    __device__ static __forceinline__ void add(float4 &to, float4 more) {
        to.x += more.x;
        to.y += more.y;
        to.z += more.z;
        to.w += more.w;
    }

    /// -0 instead of 0, which means that nothing is there yet.
    __device__ static __forceinline__ float4 marked(float4 v) {
        return make_float4(v.x == 0 ? -0.0f : v.x, v.y == 0 ? -0.0f : v.y, v.z == 0 ? -0.0f : v.z, v.w == 0 ? -0.0f : v.w);
    }

    /// Adds the sums that another block leaves, as soon as they are there, and puts zeros in their place.
    __device__ __forceinline__ void collect(float *from, Quads &value) const {
        Quads more;
        bool complete;
        do {
            complete = true;
            for_quads([&](u32 m, u32 e, u32 i) { more[m][e] = load_fresh(from + m * 8 * S::COLUMNS + 4 * i); });
            for_quads([&](u32 m, u32 e, u32) {
                const float4 v = more[m][e];
                complete = complete && __float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0 && __float_as_uint(v.z) != 0 &&
                           __float_as_uint(v.w) != 0;
            });
        } while (!complete);
        for_quads([&](u32 m, u32 e, u32 i) {
            __stcg(reinterpret_cast<float4 *>(from + m * 8 * S::COLUMNS) + i, make_float4(0, 0, 0, 0));
            add(value[m][e], more[m][e]);
        });
    }

    __device__ __forceinline__ void run(u8 *shared) {
        lane = threadIdx.x % 32;
        const u32 warp = threadIdx.x / 32;
        wn = warp % WN;
        wk = warp / WN;
        // A block waits for those of the following ranges only: they have lower numbers and are started before.
        const u32 range = p.blocks - 1 - blockIdx.x;
        const u64 all = static_cast<u64>(p.units) * p.groups;
        first = static_cast<u32>(all * range / p.blocks);
        count = static_cast<u32>(all * (range + 1) / p.blocks) - first;
        ring = shared_address(shared) + warp * (D * S::STAGE);
        sums = reinterpret_cast<float *>(shared + S::RING);
        zeros = shared_address(shared) + S::RING + S::SUMS;
        row_factors = sums + (S::SUMS + S::ZEROS) / 4;
        x = zeros + S::ZEROS + S::ROW_FACTORS;
        x_pitch = 64 * p.x_units + 2 * X_PADDING;
        if (threadIdx.x < 16) {
            sums[S::SUMS / 4 + threadIdx.x] = 0;
        }
        const u32 chunk = p.x_whole ? count : p.x_units;
        step0 = w.n / 32 * S::TILE0;
        step1 = w.n / 32 * S::TILE1;
        lane_codes = 16 * lane;
        lane_scales = 8 * (lane / 4);
        keep(step0);
        keep(lane_codes);
        keep(lane_scales);
        ahead = wk;
        ahead_group = (first + wk) / p.units;
        ahead_unit = (first + wk) % p.units;
        enter_group();
#pragma unroll
        for (u32 m = 0; m < MB; ++m) {
            const u32 row = 8 * m + lane % 8;
            x_row[m] = (row < rows ? x + row * x_pitch : zeros) + 16 * (lane / 8);
            x_step[m] = row < rows ? 64 : 0;
            keep(x_row[m]);
            keep(x_step[m]);
        }
#pragma unroll 1
        for (u32 d = 0; d < D; ++d) {
            fetch(ring + d * S::STAGE);
            copy_commit();
        }
        NormWeights<S::THREADS> norm_weights;
        if (MAKES_INPUTS && r.input == INPUT_NORMED) {
            norm_weights.load(r, slots_of(0, min(chunk, count)));
        }
        // The weights are nobody's result: their way began while the kernel before this one was still at work.
        wait_for_previous();
        if (makes_inputs()) {
            make_inputs(0, min(chunk, count), norm_weights);
        } else if (p.x_whole) {
            fetch_x(0, p.units, 0);
        } else {
            fetch_chunk(0, min(chunk, count));
        }
        copy_commit();
        if (MAKES_INPUTS && r.input == INPUT_WEIGHTED) {
            find_row_factors();
        }
        copy_wait<0>();
        __syncthreads();
        clear();
        u32 stage = ring, i = wk, begin = 0;
        const u32 ring_end = ring + D * S::STAGE;
        for (u32 start = 0; start < count; start += chunk) {
            const u32 stop = min(start + chunk, count);
            if (start != 0) {
                __syncthreads();
                if (makes_inputs()) {
                    if (r.input == INPUT_NORMED) {
                        norm_weights.load(r, slots_of(start, stop));
                    }
                    make_inputs(start, stop, norm_weights);
                } else {
                    fetch_chunk(start, stop);
                }
                copy_commit();
                copy_wait<0>();
                __syncthreads();
            }
            while (begin < stop) {
                const u32 group = (first + begin) / p.units;
                const u32 end = min(stop, (group + 1) * p.units - first);
                const u32 skipped = p.x_whole ? group * p.units - first : start;
                for (; i < end; i += WK) {
                    copy_wait<D - 1>();
                    __syncwarp();
                    const u32 slot = i - skipped;
                    multiply_unit(stage, slot, [&] {
                        fetch(stage);
                        copy_commit();
                    });
                    stage = stage + S::STAGE == ring_end ? ring : stage + S::STAGE;
                }
                const u32 done = first + end - group * p.units;
                begin = end;
                if (done == p.units || end == count) {
                    const u32 from = first > group * p.units ? first - group * p.units : 0;
                    reduce(group, from, done, range);
                }
            }
        }
    }

    /// Whether the kernel makes activations where it is asked to, takes half a norm, and leaves one.
    static constexpr bool MAKES_INPUTS = MB == 1;

    __device__ __forceinline__ bool makes_inputs() const {
        return MAKES_INPUTS && (r.input == INPUT_NORMED || r.input == INPUT_GATED);
    }

    /// Slots of the block's units `from` to `end`, or of all units.
    __device__ __forceinline__ Slots slots_of(u32 from, u32 end) const {
        return p.x_whole ? Slots{0, p.units, p.units} : Slots{(first + from) % p.units, end - from, p.units};
    }

    /// Makes the activations of the block's units `from` to `end`.
    __device__ __forceinline__ void make_inputs(u32 from, u32 end, const NormWeights<S::THREADS> &weights) const {
        const Slots slots = slots_of(from, end);
        if (r.input == INPUT_NORMED) {
            norm_rows<S::THREADS>(r, m0, rows, slots, x, x_pitch, weights, sums);
        } else {
            gate_rows<S::THREADS>(r, m0, rows, slots, x, x_pitch);
        }
    }

    /// Activations of the block's units `from` to `end`, in slots from 0 on.
    __device__ __forceinline__ void fetch_chunk(u32 from, u32 end) const {
        for (u32 i = from; i < end;) {
            const u32 unit = (first + i) % p.units, more = min(end - i, p.units - unit);
            fetch_x(unit, unit + more, i - from);
            i += more;
        }
    }
};

template <class E, u32 MB, u32 NT, u32 WN, u32 WK, u32 D>
__device__ __forceinline__ void small_product(const Tiled &w, const Request &r, const Plan &p) {
    extern __shared__ __align__(128) u8 shared[];
    let_next_start();
    // One matrix, no more rows than a block takes at once.
    SmallProduct<E, MB, NT, WN, WK, D> product{w, r, p, 0};
    product.m0 = 0;
    product.rows = r.m;
    product.run(shared);
}
