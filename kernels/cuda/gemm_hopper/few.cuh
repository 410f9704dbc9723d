// Products with few tokens on Hopper, limited by the reading of the weights: mma.sync, whose warps wait for nobody.
//
// What is computed, the planes and `Arguments` are those of kernel.cuh. A block has one tile of the product: 64 rows of N for
// each of `Columns` tile columns, all tokens, all of K in steps of 128 columns. `Shares` warps have the same tile column and
// share the columns of a step. One producer thread fills the ring of steps with weights, which are nobody's result and on
// their way while the kernel before this one still runs, another with tokens. A warp takes what it needs of a step into
// registers and gives it back before it computes. At the end the warps' sums are added up through shared memory, always in
// the same order.
#pragma once
#include "few_codec.cuh"
#include "kernel.cuh"

namespace hopper {

template <class CodecT, int TokensT, int ColumnsT, int SharesT, int StagesT>
struct FewShape {
    using Codec = CodecT;
    static constexpr int kTokens = TokensT, kColumns = ColumnsT, kShares = SharesT, kStages = StagesT;
    static_assert(kTokens == 8 || kTokens == 16, "tokens of one or two instructions");
    static_assert(8 % kShares == 0, "a step has eight times 16 columns");
    static constexpr int kRows = 64 * kColumns;
    static constexpr int kWarps = kColumns * kShares, kConsumers = 32 * kWarps, kThreads = kConsumers + 64;
    // Times 16 columns of a warp in a step, and those that are in registers at once.
    static constexpr int kUnits = 8 / kShares, kAtOnce = kUnits > 2 ? 2 : kUnits;
    static constexpr int kTokenHalf = kTokens * kStep * 2, kTokenBytes = 2 * kTokenHalf;
    static constexpr int kCodeRow = kColumns * Codec::kTileBytes, kCodeHalf = 4 * kCodeRow, kCodeBytes = 2 * kCodeHalf;
    static constexpr int kScaleRow = kRows * Codec::kScaleBytes, kScaleHalf = Codec::kScaleRows * kScaleRow;
    static constexpr int kScaleBytes = 2 * kScaleHalf;
    // A warp's sums of a token are 16 bytes longer, against bank conflicts.
    static constexpr int kPitch = kRows + 4, kSumBytes = kShares * kTokens * kPitch * 4;
    static constexpr int kSharedBytes = 1024 + kStages * (kTokenBytes + kCodeBytes + kScaleBytes) + kSumBytes + 16 * kStages;
    static_assert(kSharedBytes <= 232448, "shared memory of a block");
    // Quads of rows.
    static constexpr int kRowQuads = kRows / 4;
    static_assert(kConsumers % kRowQuads == 0, "a thread adds up quads of the same rows");
};

template <class S>
struct FewShared {
    uint8_t *tokens, *codes, *scales;
    float* sums;
    uint64_t *full, *empty;
    __device__ __forceinline__ explicit FewShared(uint8_t* raw) {
        tokens = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
        codes = tokens + S::kStages * S::kTokenBytes;
        scales = codes + S::kStages * S::kCodeBytes;
        sums = reinterpret_cast<float*>(scales + S::kStages * S::kScaleBytes);
        full = reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(sums) + S::kSumBytes);
        empty = full + S::kStages;
    }
};

template <class S, bool Tokens>
__device__ __forceinline__ void few_produce(const Arguments& arguments, const FewShared<S>& shared) {
    using Codec = typename S::Codec;
    if (Tokens) wait_for_previous();
    Ring<S::kStages> ring;
    const int tile = blockIdx.x * S::kColumns;
    for (uint32_t step = 0; step < arguments.schedule.steps; ++step) {
        const uint32_t s = ring.stage;
        barrier_wait(&shared.empty[s], ring.parity ^ 1);
        barrier_expect(&shared.full[s], Tokens ? S::kTokenBytes : S::kCodeBytes + S::kScaleBytes);
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            // What lies beyond K, N or M arrives as zeros, and counts.
            const uint32_t column = (2 * step + half) * kStep;
            if constexpr (Tokens) {
                copy_box(shared.tokens + s * S::kTokenBytes + half * S::kTokenHalf, &arguments.x, column, 0, &shared.full[s]);
            } else {
                copy_box(shared.codes + s * S::kCodeBytes + half * S::kCodeHalf, &arguments.codes, 0, tile, column / 16, 0,
                         &shared.full[s]);
                if constexpr (Codec::kScaleRows != 0) {
                    const uint32_t group = Codec::kGroup == 64 ? column / arguments.group_size : column / Codec::kGroup;
                    copy_box(shared.scales + s * S::kScaleBytes + half * S::kScaleHalf, &arguments.scales, 0, tile, group, 0,
                             &shared.full[s]);
                }
            }
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

    __device__ __forceinline__ void read(const FewShared<S>& shared, uint32_t stage, int column, int first, int lane) {
        const uint8_t* from = shared.codes + stage * S::kCodeBytes + column * Codec::kTileBytes + lane * (Codec::kTileBytes / 32);
        const uint32_t token = lane % 8 + (kOctets == 2 ? lane / 16 * 8 : 0);
        const uint32_t row = shared_address(shared.tokens) + stage * S::kTokenBytes + token * 128;
#pragma unroll
        for (int u = 0; u < S::kAtOnce; ++u) {
            const int unit = first + u;
            read_words<4 * Codec::kBlockWords>(codes[u], from + unit * S::kCodeRow);
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
                const int scale_row = unit / 4 * Codec::kScaleRows + unit % 4 * 16 / Codec::kGroup;
                const uint8_t* tile = shared.scales + stage * S::kScaleBytes + scale_row * S::kScaleRow + column * 64 * Codec::kScaleBytes;
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

// Adds up the sums of the block's warps and stores the results.
template <class S>
__device__ __forceinline__ void few_finish(const Arguments& arguments, const FewShared<S>& shared,
                                           const float (&sums)[4][S::kTokens / 8][4], uint32_t row, float4 factor, float4 bias) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = warp % S::kColumns, share = warp / S::kColumns;
    float* mine = shared.sums + (share * S::kTokens + 2 * (lane % 4)) * S::kPitch + 64 * column + lane / 4;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int i = 0; i < S::kTokens / 8; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) mine[(8 * i + e % 2) * S::kPitch + 16 * block + e / 2 * 8] = sums[block][i][e];
        }
    }
    named_barrier(1, S::kConsumers);
    const uint32_t n = blockIdx.x * S::kRows + row, tokens = min(arguments.m, uint32_t{S::kTokens});
    if (n >= arguments.n) return;
    for (uint32_t token = threadIdx.x / S::kRowQuads; token < tokens; token += S::kConsumers / S::kRowQuads) {
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < S::kShares; ++s) {
            add(v, *reinterpret_cast<const float4*>(shared.sums + (s * S::kTokens + token) * S::kPitch + row));
        }
        v = make_float4(fmaf(v.x, factor.x, bias.x), fmaf(v.y, factor.y, bias.y), fmaf(v.z, factor.z, bias.z),
                        fmaf(v.w, factor.w, bias.w));
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
}

template <class S>
__device__ __forceinline__ void few_consume(const Arguments& arguments, const FewShared<S>& shared) {
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const int column = warp % S::kColumns, share = warp / S::kColumns;
    // What rows are multiplied by comes from afar, and is here when the weights are.
    float4 factor = make_float4(0, 0, 0, 0), bias = factor;
    const uint32_t row = threadIdx.x % S::kRowQuads * 4, n = blockIdx.x * S::kRows + row;
    if (n < arguments.n) {
        factor = make_float4(row_factor<S::Codec::kShort>(arguments, 0, n), row_factor<S::Codec::kShort>(arguments, 0, n + 1),
                             row_factor<S::Codec::kShort>(arguments, 0, n + 2), row_factor<S::Codec::kShort>(arguments, 0, n + 3));
        if (arguments.bias != nullptr) {
            bias = make_float4(arguments.bias[n], arguments.bias[n + 1], arguments.bias[n + 2], arguments.bias[n + 3]);
        }
    }
    wait_for_previous();
    float sums[4][S::kTokens / 8][4] = {};
    Ring<S::kStages> ring;
    for (uint32_t step = 0; step < arguments.schedule.steps; ++step) {
        barrier_wait(&shared.full[ring.stage], ring.parity);
#pragma unroll
        for (int unit = 0; unit < S::kUnits; unit += S::kAtOnce) {
            FewUnits<S> now;
            now.read(shared, ring.stage, column, share * S::kUnits + unit, lane);
            if (unit + S::kAtOnce == S::kUnits) {
                __syncwarp();
                if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
            }
            now.multiply_all(sums);
        }
        ring.advance();
    }
    few_finish<S>(arguments, shared, sums, row, factor, bias);
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
    if (threadIdx.x < S::kConsumers) {
        few_consume<S>(arguments, shared);
    } else if (threadIdx.x == S::kConsumers) {
        few_produce<S, false>(arguments, shared);
    } else if (threadIdx.x == S::kConsumers + 32) {
        few_produce<S, true>(arguments, shared);
    }
}

}  // namespace hopper
