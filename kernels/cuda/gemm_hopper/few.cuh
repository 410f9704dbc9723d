// Products with few tokens on Hopper, limited by the reading of the weights: mma.sync, whose warps wait for nobody.
//
// What is computed, the planes and `Arguments` are those of kernel.cuh. A block has one tile of the product: 64 rows of N for
// each of `Columns` tile columns, all tokens, and a slice of K, in steps of `Halves` times 64 columns. `Shares` warps have the same tile column
// and share the columns of a step. One producer thread fills the ring of steps with weights, which are nobody's result and on their
// way while the kernel before this one still runs, another with tokens. A warp takes what it needs of a step into registers and
// gives it back before it computes. At the end the warps' sums are added up through shared memory, where the ring was.
//
// A tile has one slice, or several: then each block ends up with some rows of its tile, gives the others' sums to the blocks that
// those belong to, through the workspace, and adds up what it is given. Tile columns that are left over where every multiprocessor
// has a tile are cut into pieces along K that blocks do first. Each of a column's blocks adds up a part of it while its last steps
// are on their way. What is added up is always added in the same order.
//
// Blocks wait for each other at the end: all of a launch must find room on the device at once.
#pragma once
#include "common/fresh.cuh"
#include "common/half_norm.cuh"
#include "few_codec.cuh"
#include "kernel.cuh"

namespace hopper {

// Slices of a tile and pieces of a column, at most.
constexpr int kMaxSlices = 8;

template <class CodecT, int TokensT, int ColumnsT, int SharesT, int HalvesT>
struct FewShape {
    using Codec = CodecT;
    static constexpr int kTokens = TokensT, kColumns = ColumnsT, kShares = SharesT, kHalves = HalvesT;
    static_assert(kTokens == 8 || kTokens == 16, "tokens of one or two instructions");
    static_assert(4 * kHalves % kShares == 0, "a step has four times 16 columns a half");
    static constexpr int kRows = 64 * kColumns;
    static constexpr int kWarps = kColumns * kShares, kConsumers = 32 * kWarps, kThreads = kConsumers + 64;
    // Times 16 columns of a warp in a step, and those that are in registers at once.
    static constexpr int kUnits = 4 * kHalves / kShares, kAtOnce = kUnits > 2 ? 2 : kUnits;
    static constexpr int kTokenHalf = kTokens * kStep * 2, kTokenBytes = kHalves * kTokenHalf;
    static constexpr int kCodeRow = kColumns * Codec::kTileBytes, kCodeHalf = 4 * kCodeRow, kCodeBytes = kHalves * kCodeHalf;
    static constexpr int kScaleRow = kRows * Codec::kScaleBytes, kScaleHalf = Codec::kScaleRows * kScaleRow;
    static constexpr int kScaleBytes = kHalves * kScaleHalf;
    static constexpr int kStageBytes = kTokenBytes + kCodeBytes + kScaleBytes;
    // A warp's sums of a token are 16 bytes longer, against bank conflicts.
    static constexpr int kPitch = kRows + 4, kSumBytes = kShares * kTokens * kPitch * 4;
    // What a block may have. As many steps as there is room for.
    static constexpr int kRoom = 232448;
    static constexpr int kFit = (kRoom - 1024 - 8 * kRows - 4 * kTokens) / (kStageBytes + 16), kStages = kFit < 12 ? kFit : 12;
    static constexpr int kRing = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
    static constexpr int kFactorBytes = 8 * kRows + 4 * kTokens, kSharedBytes = 1024 + kRing + kFactorBytes + 16 * kStages;
    static_assert(kSharedBytes <= kRoom && kStages >= 2, "shared memory of a block");
    // Quads of rows.
    static constexpr int kRowQuads = kRows / 4;
    static_assert(kConsumers % kRowQuads == 0 && kConsumers >= kRows, "a thread adds up quads of the same rows, and has a row");
    // Whether blocks do pieces of columns that are left over.
    static constexpr bool kPieces = kColumns == 4;
    // Quads of a warp's sums of a tile column that a lane holds.
    static constexpr int kLaneQuads = 4 * (kTokens / 8);
};

template <class S>
struct FewShared {
    uint8_t *tokens, *codes, *scales;
    float* sums;
    // What the tile's rows are multiplied by, and what is added then.
    float *factors, *biases;
    // What tokens are multiplied by, where they are half of a norm.
    float* token_factors;
    uint64_t *full, *empty;
    __device__ __forceinline__ explicit FewShared(uint8_t* raw) {
        tokens = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
        codes = tokens + S::kStages * S::kTokenBytes;
        scales = codes + S::kStages * S::kCodeBytes;
        sums = reinterpret_cast<float*>(tokens);
        factors = reinterpret_cast<float*>(tokens + S::kRing);
        biases = factors + S::kRows;
        token_factors = biases + S::kRows;
        full = reinterpret_cast<uint64_t*>(token_factors + S::kTokens);
        empty = full + S::kStages;
    }
};

// What a block does: steps of its tile, and of a piece of a column that is left over.
struct FewWork {
    uint32_t tile, slice, begin, steps;
    uint32_t column, piece, piece_begin, piece_steps;
    __device__ __forceinline__ explicit FewWork(const FewCut& cut) {
        tile = blockIdx.x % cut.tiles, slice = blockIdx.x / cut.tiles;
        begin = slice * cut.slice_steps, steps = min(cut.steps - begin, cut.slice_steps);
        column = piece = piece_begin = piece_steps = 0;
        if (blockIdx.x < cut.left * cut.pieces) {
            column = blockIdx.x % cut.left, piece = blockIdx.x / cut.left;
            piece_begin = piece * cut.piece_steps, piece_steps = min(cut.steps - piece_begin, cut.piece_steps);
        }
    }
};

// Row of the plane of scales for a column of K.
template <class Codec>
__device__ __forceinline__ uint32_t scale_row(const Arguments& arguments, uint32_t column) {
    return Codec::kGroup == 64 ? column / arguments.group_size : column / Codec::kGroup;
}

// Starts copying a step's weights, a box of codes and one of scales for each half: larger boxes are slower. What lies beyond K or N
// arrives as zeros, and counts.
template <class S>
__device__ __forceinline__ void few_copy_weights(const Arguments& arguments, const FewShared<S>& shared, uint32_t stage,
                                                 uint32_t tile, uint32_t step) {
    using Codec = typename S::Codec;
    uint64_t* full = &shared.full[stage];
    barrier_expect(full, S::kCodeBytes + S::kScaleBytes);
#pragma unroll
    for (uint32_t i = 0; i < S::kHalves; ++i) {
        const uint32_t column = (S::kHalves * step + i) * kStep;
        copy_box(shared.codes + stage * S::kCodeBytes + i * S::kCodeHalf, &arguments.codes, 0, tile * S::kColumns, column / 16, 0, full);
        if constexpr (Codec::kScaleRows != 0) {
            copy_box(shared.scales + stage * S::kScaleBytes + i * S::kScaleHalf, &arguments.scales, 0, tile * S::kColumns,
                     scale_row<Codec>(arguments, column), 0, full);
        }
    }
}

// The same of one tile column of a piece, whose steps are whole.
template <class S>
__device__ __forceinline__ void few_copy_piece(const Arguments& arguments, const FewShared<S>& shared, uint32_t stage,
                                               uint32_t column, uint32_t step) {
    using Codec = typename S::Codec;
    constexpr uint32_t tile_scales = 64 * Codec::kScaleBytes;
    uint64_t* full = &shared.full[stage];
    barrier_expect(full, 4 * S::kHalves * Codec::kTileBytes + S::kHalves * Codec::kScaleRows * tile_scales);
    const uint64_t columns = arguments.n / 64;
#pragma unroll 1
    for (uint32_t unit = 0; unit < 4 * S::kHalves; ++unit) {
        copy_run(shared.codes + stage * S::kCodeBytes + unit * Codec::kTileBytes,
                 arguments.code_plane + ((4 * S::kHalves * step + unit) * columns + column) * Codec::kTileBytes, Codec::kTileBytes, full);
    }
    if constexpr (Codec::kScaleRows != 0) {
#pragma unroll 1
        for (uint32_t row = 0; row < S::kHalves * Codec::kScaleRows; ++row) {
            const uint32_t k = step * S::kHalves * kStep + row * (kStep / Codec::kScaleRows);
            copy_run(shared.scales + stage * S::kScaleBytes + row * tile_scales,
                     arguments.scale_plane + (scale_row<Codec>(arguments, k) * columns + column) * tile_scales, tile_scales, full);
        }
    }
}

template <class S, bool Tokens>
__device__ __forceinline__ void few_produce(const Arguments& arguments, const FewShared<S>& shared, const FewWork& work) {
    if constexpr (Tokens) wait_for_previous();
    Ring<S::kStages> ring;
    for (uint32_t i = 0; i < work.piece_steps + work.steps; ++i) {
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        const bool piece = S::kPieces && i < work.piece_steps;
        const uint32_t step = piece ? work.piece_begin + i : work.begin + i - work.piece_steps;
        if constexpr (Tokens) {
            barrier_expect(&shared.full[ring.stage], S::kTokenBytes);
            copy_box(shared.tokens + ring.stage * S::kTokenBytes, &arguments.x, 0, 0, S::kHalves * step, &shared.full[ring.stage]);
        } else if (piece) {
            few_copy_piece<S>(arguments, shared, ring.stage, arguments.few.tiles * S::kColumns + work.column, step);
        } else {
            few_copy_weights<S>(arguments, shared, ring.stage, work.tile, step);
        }
        ring.advance();
    }
    if constexpr (!Tokens) let_next_start();
}

// d = a * b + c.
__device__ __forceinline__ void multiply_onto(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Some of a warp's columns of a step, in registers.
template <class S>
struct FewUnits {
    using Codec = typename S::Codec;
    static constexpr int kOctets = S::kTokens / 8;
    // Units of a group, and groups.
    static constexpr int kGroupUnits = Codec::kGroup == 0 || Codec::kGroup / 16 > S::kAtOnce ? S::kAtOnce : Codec::kGroup / 16;
    static constexpr int kGroups = S::kAtOnce / kGroupUnits;
    static constexpr int kScaleWords = Codec::kScaleBytes == 2 ? 4 : 2;

    uint32_t codes[S::kAtOnce][4 * Codec::kBlockWords];
    uint32_t scales[kGroups][kScaleWords];
    uint32_t tokens[S::kAtOnce][kOctets][2];

    // Reads units from `first` on, of one of `Width` tile columns that lie side by side.
    template <int Width>
    __device__ __forceinline__ void read(const FewShared<S>& shared, uint32_t stage, int column, int first, int lane) {
        const uint8_t* from = shared.codes + stage * S::kCodeBytes + column * Codec::kTileBytes + lane * (Codec::kTileBytes / 32);
        const uint32_t token = lane % 8 + (kOctets == 2 ? lane / 16 * 8 : 0);
        const uint32_t row = shared_address(shared.tokens) + stage * S::kTokenBytes + token * 128;
#pragma unroll
        for (int u = 0; u < S::kAtOnce; ++u) {
            const int unit = first + u;
            read_words<4 * Codec::kBlockWords>(codes[u], from + unit * (Width * Codec::kTileBytes));
            // Rows of 128 bytes, whose pieces of 16 are swizzled by the row.
            const uint32_t at = row + unit / 4 * S::kTokenHalf + (((unit % 4 * 2 + lane / 8 % 2) ^ token % 8) << 4);
            if constexpr (kOctets == 2) {
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(tokens[u][0][0]), "=r"(tokens[u][0][1]), "=r"(tokens[u][1][0]), "=r"(tokens[u][1][1])
                             : "r"(at));
            } else {
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                             : "=r"(tokens[u][0][0]), "=r"(tokens[u][0][1])
                             : "r"(at));
            }
        }
        if constexpr (Codec::kScaleRows != 0) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                const int unit = first + g * kGroupUnits;
                const int scales_at = (unit / 4 * Codec::kScaleRows + unit % 4 * 16 / Codec::kGroup) * Width + column;
                const uint8_t* tile = shared.scales + stage * S::kScaleBytes + scales_at * 64 * Codec::kScaleBytes;
                Codec::Scales::template read<4>(scales[g], tile, lane, 0);
            }
        }
    }

    __device__ __forceinline__ void multiply_all(float (&sums)[4][kOctets][4]) {
#pragma unroll
        for (int u = 0; u < S::kAtOnce; ++u) {
#pragma unroll
            for (int i = 0; i < kOctets; ++i) {
                if constexpr (Codec::kRaiseLow != 0) {
                    tokens[u][i][0] = multiply(tokens[u][i][0], power(Codec::kRaiseLow));
                    tokens[u][i][1] = multiply(tokens[u][i][1], power(Codec::kRaiseHigh));
                }
            }
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            const int first = g * kGroupUnits;
            if constexpr (Codec::kMode == Apply::kInGroup) {
                float start[kOctets][4], factors[4][2];
                const uint32_t zero[4] = {Codec::kZeroLow, Codec::kZeroLow, Codec::kZeroHigh, Codec::kZeroHigh};
#pragma unroll
                for (int i = 0; i < kOctets; ++i) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) start[i][e] = 0;
                    if constexpr (Codec::kZeroLow != 0) {
#pragma unroll
                        for (int u = first; u < first + kGroupUnits; ++u) {
                            multiply_onto(start[i], zero, tokens[u][i][0], tokens[u][i][1], start[i]);
                        }
                    }
                }
                Codec::Scales::factors(scales[g], factors);
#pragma unroll
                for (int block = 0; block < 4; ++block) {
                    float sum[kOctets][4];
#pragma unroll
                    for (int u = first; u < first + kGroupUnits; ++u) {
                        uint32_t a[4];
                        Codec::unpack(codes[u] + block * Codec::kBlockWords, a);
#pragma unroll
                        for (int i = 0; i < kOctets; ++i) {
                            multiply_onto(sum[i], a, tokens[u][i][0], tokens[u][i][1], u == first ? start[i] : sum[i]);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < kOctets; ++i) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) sums[block][i][e] = fmaf(sum[i][e], factors[block][e / 2], sums[block][i][e]);
                    }
                }
            } else {
                uint32_t pairs[4][2];
                if constexpr (Codec::kMode == Apply::kInCode) Codec::Scales::template prepare<4>(scales[g], 0, pairs);
#pragma unroll
                for (int u = first; u < first + kGroupUnits; ++u) {
#pragma unroll
                    for (int block = 0; block < 4; ++block) {
                        uint32_t a[4];
                        if constexpr (Codec::kMode == Apply::kInCode) {
                            Codec::unpack(codes[u] + block * Codec::kBlockWords, pairs[block], a);
                        } else {
                            Codec::unpack(codes[u] + block * Codec::kBlockWords, a);
                        }
#pragma unroll
                        for (int i = 0; i < kOctets; ++i) {
                            multiply_onto(sums[block][i], a, tokens[u][i][0], tokens[u][i][1], sums[block][i]);
                        }
                    }
                }
            }
        }
    }
};

__device__ __forceinline__ void add(float4& to, float4 more) { to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w; }

// -0 instead of 0, which means that nothing is there yet.
__device__ __forceinline__ float4 marked(float4 v) {
    return make_float4(v.x == 0 ? -0.0f : v.x, v.y == 0 ? -0.0f : v.y, v.z == 0 ? -0.0f : v.z, v.w == 0 ? -0.0f : v.w);
}

// Adds what `Most` blocks at most, those that `where` has an address of, leave in the workspace, as soon as it is there, and puts
// zeros in its place.
template <int Most, class Where>
__device__ __forceinline__ void few_collect(float4& to, Where where) {
    float4 given[Most];
    bool complete;
    do {
        complete = true;
#pragma unroll
        for (int i = 0; i < Most; ++i) {
            if (const float4* from = where(i)) given[i] = load_fresh(reinterpret_cast<const float*>(from));
        }
#pragma unroll
        for (int i = 0; i < Most; ++i) {
            const float4 v = given[i];
            complete = complete && (where(i) == nullptr || (__float_as_uint(v.x) != 0 && __float_as_uint(v.y) != 0 &&
                                                            __float_as_uint(v.z) != 0 && __float_as_uint(v.w) != 0));
        }
    } while (!complete);
#pragma unroll
    for (int i = 0; i < Most; ++i) {
        if (float4* from = where(i)) {
            __stcg(from, make_float4(0, 0, 0, 0));
            add(to, given[i]);
        }
    }
}

// Stores four rows of a token.
__device__ __forceinline__ void few_store(const Arguments& arguments, uint32_t token, uint32_t n, float4 v) {
    const uint64_t to = token * arguments.out_stride + n;
    if (arguments.out_f32 != 0) {
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(arguments.out) + to);
        if (arguments.accumulate != 0) add(v, *out);
        *out = v;
    } else {
        uint2 packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.x) : "f"(v.y), "f"(v.x));
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed.y) : "f"(v.w), "f"(v.z));
        *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(arguments.out) + to) = packed;
    }
}

// Tile column and share of a warp: those that share a column are on different schedulers.
template <class S>
__device__ __forceinline__ int few_column(int warp) {
    return S::kColumns % 2 != 0 ? warp % S::kColumns : warp / S::kShares;
}
template <class S>
__device__ __forceinline__ int few_share(int warp) {
    return S::kColumns % 2 != 0 ? warp / S::kColumns : warp % S::kShares;
}

// Adds up the sums of the block's warps, and those of the tile's blocks, and stores the results.
template <class S>
__device__ __forceinline__ void few_finish(const Arguments& arguments, const FewShared<S>& shared, const FewWork& work,
                                           const float (&sums)[4][S::kTokens / 8][4], float own_factor, float own_bias) {
    const int lane = threadIdx.x % 32, column = few_column<S>(threadIdx.x / 32), share = few_share<S>(threadIdx.x / 32);
    float* mine = shared.sums + (share * S::kTokens + 2 * (lane % 4)) * S::kPitch + 64 * column + lane / 4;
    // Nobody reads the ring any more.
    named_barrier(1, S::kConsumers);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int i = 0; i < S::kTokens / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) mine[(8 * i + e % 2) * S::kPitch + 16 * block + e / 2 * 8] = sums[block][i][e];
        }
    }
    if (threadIdx.x < S::kRows) shared.factors[threadIdx.x] = own_factor, shared.biases[threadIdx.x] = own_bias;
    named_barrier(1, S::kConsumers);
    const auto sum = [&](uint32_t token, uint32_t quad) {
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < S::kShares; ++s) {
            add(v, *reinterpret_cast<const float4*>(shared.sums + (s * S::kTokens + token) * S::kPitch + 4 * quad));
        }
        return v;
    };
    const uint32_t tokens = min(arguments.m, uint32_t{S::kTokens}), slices = arguments.few.slices;
    // What block `slice` of the tile gives away.
    const auto given = [&](uint32_t slice, uint32_t token, uint32_t quad) {
        const uint64_t block = uint64_t{slice} * arguments.few.tiles + work.tile;
        return reinterpret_cast<float4*>(arguments.partial) + (block * S::kTokens + token) * S::kRowQuads + quad;
    };
    // The rows that this block ends up with, in quads.
    const uint32_t first = work.slice * S::kRowQuads / slices, count = (work.slice + 1) * S::kRowQuads / slices - first;
    if (slices > 1) {
        const uint32_t quad = threadIdx.x % S::kRowQuads;
        if (quad - first >= count) {
            for (uint32_t token = threadIdx.x / S::kRowQuads; token < tokens; token += S::kConsumers / S::kRowQuads) {
                __stcg(given(work.slice, token, quad), marked(sum(token, quad)));
            }
        }
    }
    const uint32_t at_once = S::kConsumers / count, quad = first + threadIdx.x % count;
    const uint32_t n = work.tile * S::kRows + 4 * quad;
    if (threadIdx.x >= at_once * count) return;
    const float4 factor = reinterpret_cast<const float4*>(shared.factors)[quad], bias = reinterpret_cast<const float4*>(shared.biases)[quad];
    for (uint32_t token = threadIdx.x / count; token < tokens; token += at_once) {
        float4 v = sum(token, quad), before = make_float4(0, 0, 0, 0), weight = before;
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(arguments.out) + token * arguments.out_stride + n);
        const bool leaves_norm = arguments.next != nullptr && n < arguments.n;
        if (leaves_norm) {
            // On their way while the other slices arrive.
            weight = *reinterpret_cast<const float4*>(arguments.norm_weight + n);
            if (arguments.accumulate != 0) before = *out;
        }
        if (slices > 1) {
            few_collect<kMaxSlices - 1>(v, [&](uint32_t i) {
                return i + 1 < slices ? given(i < work.slice ? i : i + 1, token, quad) : nullptr;
            });
        }
        if (arguments.squares != nullptr) {
            const float half = shared.token_factors[token];
            v = make_float4(v.x * half, v.y * half, v.z * half, v.w * half);
        }
        v = make_float4(fmaf(v.x, factor.x, bias.x), fmaf(v.y, factor.y, bias.y), fmaf(v.z, factor.z, bias.z),
                        fmaf(v.w, factor.w, bias.w));
        if (leaves_norm) {
            add(v, before);
            *out = v;
            leave_half_norm(arguments.next + uint64_t{token} * arguments.n, arguments.next_squares + token * (arguments.n / SQUARED), n, v,
                            weight);
        } else if (n < arguments.n) {
            few_store(arguments, token, n, v);
        }
    }
}

// Where a share of a piece leaves quad `i` of a lane's sums.
template <class S>
__device__ __forceinline__ float4* few_piece_sums(const Arguments& arguments, uint32_t column, uint32_t piece, uint32_t share, uint32_t i,
                                                  uint32_t lane) {
    const uint32_t at = ((column * arguments.few.pieces + piece) * S::kShares + share) * S::kLaneQuads + i;
    return reinterpret_cast<float4*>(arguments.partial) + at * 32 + lane;
}

// Adds up a part of a column that was left over and stores it; for a whole warp.
template <class S>
__device__ __forceinline__ void few_finish_column(const Arguments& arguments, const FewWork& work) {
    const uint32_t lane = threadIdx.x % 32, pieces = arguments.few.pieces;
    for (uint32_t i = work.piece; i < S::kLaneQuads; i += pieces) {
        float4 v = make_float4(0, 0, 0, 0);
        constexpr uint32_t together = 8 / S::kShares;
        for (uint32_t piece = 0; piece < pieces; piece += together) {
            few_collect<8>(v, [&](uint32_t j) {
                const uint32_t from = piece + j / S::kShares;
                return from < pieces ? few_piece_sums<S>(arguments, work.column, from, j % S::kShares, i, lane) : nullptr;
            });
        }
        const uint32_t row = (arguments.few.tiles * S::kColumns + work.column) * 64 + i / (S::kTokens / 8) * 16 + lane / 4;
        const uint32_t token = i % (S::kTokens / 8) * 8 + lane % 4 * 2;
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            const uint32_t n = row + e / 2 * 8, t = token + e % 2;
            if (t >= arguments.m) continue;
            const float bias = arguments.bias != nullptr ? arguments.bias[n] : 0.0f;
            const float value = fmaf(values[e], row_factor<S::Codec::kShort>(arguments, 0, n), bias);
            const uint64_t to = t * arguments.out_stride + n;
            if (arguments.out_f32 != 0) {
                float* out = static_cast<float*>(arguments.out) + to;
                *out = arguments.accumulate != 0 ? *out + value : value;
            } else {
                static_cast<__nv_bfloat16*>(arguments.out)[to] = __float2bfloat16_rn(value);
            }
        }
    }
}

// Adds a stage's products to a warp's sums.
template <class S, int Width>
__device__ __forceinline__ void few_multiply(const FewShared<S>& shared, uint32_t stage, int column, int share, int lane,
                                             float (&sums)[4][S::kTokens / 8][4]) {
#pragma unroll
    for (int unit = 0; unit < S::kUnits; unit += S::kAtOnce) {
        FewUnits<S> now;
        now.template read<Width>(shared, stage, column, share * S::kUnits + unit, lane);
        if (unit + S::kAtOnce == S::kUnits) {
            __syncwarp();
            if (lane == 0) barrier_arrive(&shared.empty[stage]);
        }
        now.multiply_all(sums);
    }
}

template <class S>
__device__ __forceinline__ void few_consume(const Arguments& arguments, const FewShared<S>& shared, const FewWork& work) {
    // Kept, rather than read again in every step.
    uint32_t kept = threadIdx.x % 32;
    hold(kept);
    const int lane = kept;
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const int column = few_column<S>(warp), share = few_share<S>(warp);
    // What a row is multiplied by comes from afar, and is here when the weights are.
    float factor = 0, bias = 0;
    const uint32_t n = work.tile * S::kRows + threadIdx.x;
    if (threadIdx.x < S::kRows && n < arguments.n) {
        factor = row_factor<S::Codec::kShort>(arguments, 0, n);
        if (arguments.bias != nullptr) bias = arguments.bias[n];
    }
    wait_for_previous();
    if (arguments.squares != nullptr) {
        // Seen by others after the barriers at the end.
        const uint32_t k = arguments.k;
        for (uint32_t token = warp; token < min(arguments.m, uint32_t{S::kTokens}); token += S::kWarps) {
            const float half = half_norm_factor(arguments.squares + token * (k / SQUARED), k, arguments.eps);
            if (lane == 0) shared.token_factors[token] = half;
        }
    }
    float sums[4][S::kTokens / 8][4] = {};
    Ring<S::kStages> ring;
    if (S::kPieces && work.piece_steps != 0) {
        // One column's warps do it, on all four schedulers, and the others go on.
        const bool mine = column == 0;
        for (uint32_t step = 0; step < work.piece_steps; ++step) {
            barrier_wait(&shared.full[ring.stage], ring.parity);
            if (mine) {
                few_multiply<S, 1>(shared, ring.stage, 0, share, lane, sums);
            } else if (lane == 0) {
                barrier_arrive(&shared.empty[ring.stage]);
            }
            ring.advance();
        }
        if (mine) {
#pragma unroll
            for (int i = 0; i < S::kLaneQuads; ++i) {
                float(&v)[4] = sums[i / (S::kTokens / 8)][i % (S::kTokens / 8)];
                __stcg(few_piece_sums<S>(arguments, work.column, work.piece, share, i, lane), marked(make_float4(v[0], v[1], v[2], v[3])));
                v[0] = v[1] = v[2] = v[3] = 0;
            }
        }
    }
    for (uint32_t step = 0; step < work.steps; ++step) {
        barrier_wait(&shared.full[ring.stage], ring.parity);
        few_multiply<S, S::kColumns>(shared, ring.stage, column, share, lane, sums);
        ring.advance();
    }
    few_finish<S>(arguments, shared, work, sums, factor, bias);
}

template <class S>
__device__ __forceinline__ void few(const Arguments& arguments) {
    extern __shared__ uint8_t raw[];
    const FewShared<S> shared(raw);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kStages; ++i) {
            barrier_init(&shared.full[i], 2);
            barrier_init(&shared.empty[i], S::kWarps);
        }
        barrier_init_fence();
        prefetch_map(&arguments.x);
        prefetch_map(&arguments.codes);
        if constexpr (S::Codec::kScaleRows != 0) prefetch_map(&arguments.scales);
    }
    __syncthreads();
    const FewWork work(arguments.few);
    if (threadIdx.x < S::kConsumers) {
        few_consume<S>(arguments, shared, work);
    } else if (threadIdx.x == S::kConsumers + 32) {
        few_produce<S, true>(arguments, shared, work);
    } else if (threadIdx.x < S::kConsumers + 32) {
        if (threadIdx.x == S::kConsumers) few_produce<S, false>(arguments, shared, work);
        __syncwarp();
        if (S::kPieces && work.piece_steps != 0) {
            wait_for_previous();
            few_finish_column<S>(arguments, work);
        }
    }
}

}  // namespace hopper
