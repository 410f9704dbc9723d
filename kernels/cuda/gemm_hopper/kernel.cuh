// out[m, n] = (out[m, n] +) factor[n] * sum over k of x[m, k] * weight[n, k] + bias[n]: bf16 activations, quantised weights.
//
// M tokens, N out-features (padded to 64), K in-features (a multiple of 64). The weights are wgmma's A operand and never touch shared memory as
// bf16: a tile of the plane holds, for each lane, the A fragments of four blocks of 16 rows, and which rows of N a warp's 16 rows
// of an instruction are is free. So warp w of a warpgroup takes Blocks adjacent blocks of 16 rows, unpacks them in registers, and instruction b
// multiplies block b of all four warps with the tokens of a step, which lie in shared memory as the B operand. The result has rows of N and
// columns of tokens; it is transposed on its way out.
//
// Two producer threads fill a ring of stages (one step: 64 columns of K) by bulk copies, one with weights, which are nobody's result
// and on their way while the kernel before this one still runs, one with tokens. The consumer warpgroups share the tokens of a
// stage and have rows of N of their own. Blocks of a cluster are neighbours along N and send each other their share of the tokens.
#pragma once
#include "codec.cuh"
#include "common/hopper.cuh"
#include "common/order.cuh"
#include "schedule.cuh"
#include "wgmma.cuh"

namespace hopper {

constexpr int kStep = 64;
constexpr int kMaxParts = 8;

// Types of `Arguments::row_scale_type`.
constexpr uint32_t kRowScaleNone = 0, kRowScaleF32 = 1, kRowScaleBf16 = 2, kRowScaleF16 = 3;

// How few.cuh cuts a product. Mirrored by `Cut` in src/cuda/gemm/hopper/few.rs.
struct FewCut {
    uint32_t steps;                // of K
    uint32_t tiles;                // along N
    uint32_t slices, slice_steps;  // of a tile along K; steps of one, which the last may have fewer of
    uint32_t left;                 // tile columns behind the tiles
    uint32_t pieces, piece_steps;  // the same of such a column
};

// Mirrored by `Arguments` in src/cuda/gemm/hopper/mod.rs.
struct Arguments {
    // bf16 [M, K], box of kStep x (tokens of a tile / blocks of a cluster), swizzled by 128 bytes. Of few.cuh [K / kStep, M, kStep],
    // box of one of its steps, which have several times kStep columns.
    TensorMap x;
    // Bytes of a tile's codes (in units of 8), tiles along N, tile rows, experts; box of kStep columns.
    TensorMap codes;
    // Bytes of a tile's scales within K, tiles along N, groups, experts; box of kStep columns. Unused without such scales.
    TensorMap scales;
    const uint8_t* row_scales;  // of a part or of a row, or null
    const float* bias;          // [N], or null
    void* out;                  // [M, N], bf16 or f32
    float* partial;             // per worker and block of its cluster: sums of a tile that another worker owns
    uint32_t* flags;            // per worker, block of its cluster and warpgroup: 1 while its sums wait to be read; 0 between launches
    const uint32_t* offsets;    // [experts + 1], or null
    uint64_t expert_stride;     // bytes from the planes of an expert to those of the next
    uint64_t out_stride;        // elements
    uint32_t experts;
    uint32_t m, n;
    uint32_t group_size;         // columns of a scale
    uint32_t row_scale_type;
    uint32_t row_scale_of_part;  // 1: row_scales has an element a part
    uint32_t row_scale_divides;  // 1: the value is divided by it
    uint32_t parts;
    uint32_t part_end[kMaxParts];  // row after the last of each part
    uint32_t out_f32;
    uint32_t accumulate;  // 1: add to what `out` holds (f32)
    Schedule schedule;
    FewCut few;
    const uint8_t *code_plane, *scale_plane;
    // Of few.cuh, with common/half_norm.cuh. Where `squares` [M, K / SQUARED] is not null, x is half of a norm. Where `next` [M, N] is
    // not null, half of one is left there and in `next_squares` [M, N / SQUARED], with `norm_weight` [N]; out is of f32 then.
    const float* squares;
    const float* norm_weight;
    uint16_t* next;
    float* next_squares;
    float eps;
    uint32_t k;
};

// Blocks: blocks of 16 rows of a warp. Tokens: of a tile. Groups: consumer warpgroups. Cluster: blocks of a cluster. Batch: times 16 columns that
// are unpacked and multiplied together. Depth: batches whose fragments are alive at once; one less are being multiplied while the
// next is unpacked.
template <class CodecT, int BlocksT, int TokensT, int GroupsT, int StagesT, int ClusterT, int BatchT, int DepthT>
struct Shape {
    using Codec = CodecT;
    static constexpr int kBlocks = BlocksT, kTokens = TokensT, kGroups = GroupsT, kStages = StagesT, kCluster = ClusterT;
    static constexpr int kBatch = BatchT, kDepth = DepthT;
    static_assert(4 / kBatch % kDepth == 0, "fragments have fixed registers");
    static constexpr int kRows = 64 * kBlocks * kGroups;  // of N, of one block
    static constexpr int kTiles = kRows / 64;
    // Registers move from the producers' warpgroup to the consumers.
    static constexpr int kThreads = 128 * kGroups + 128;
    static constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kGroups == 2 ? 232 : 160;
    static_assert(kGroups == 2 || kGroups == 3, "consumer warpgroups");
    static constexpr int kTokenBytes = kTokens * kStep * 2;
    static constexpr int kCodeRow = kTiles * Codec::kTileBytes;  // 16 columns
    static constexpr int kCodeBytes = 4 * kCodeRow;
    static constexpr int kScaleRow = kRows * Codec::kScaleBytes;
    static constexpr int kScaleBytes = Codec::kScaleRows * kScaleRow;
    // A warp's way out: 16 tokens times its rows, in f32 or bf16; the padding keeps rows on different banks.
    static constexpr int kPitchF32 = 16 * kBlocks + 4;
    static constexpr int kPitchBf16 = 16 * kBlocks + 8;
    static constexpr int kOutBytes = 4 * kGroups * 16 * kPitchF32 * 4;
    static constexpr int kSharedBytes =
        1024 + kStages * (kTokenBytes + kCodeBytes + kScaleBytes) + kOutBytes + 16 * kStages;
    static constexpr int kPartialFloats = kRows * kTokens;  // of one block
    static_assert(kTokens % (8 * kCluster) == 0 && kTokens / kCluster <= 256, "a box has at most 256 rows");
    static_assert(kSharedBytes <= 232448, "shared memory of a block");
};

template <class S>
struct Shared {
    uint8_t *tokens, *codes, *scales, *out;
    uint64_t *full, *empty;
    __device__ __forceinline__ explicit Shared(uint8_t* raw) {
        tokens = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
        codes = tokens + S::kStages * S::kTokenBytes;
        scales = codes + S::kStages * S::kCodeBytes;
        out = scales + S::kStages * S::kScaleBytes;
        full = reinterpret_cast<uint64_t*>(out + S::kOutBytes);
        empty = full + S::kStages;
    }
};

// Place in the ring; the parity flips each time round.
template <int Stages>
struct Ring {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) stage = 0, parity ^= 1;
    }
};

// The share of a stage that one of the two producers copies: the tokens, or codes and scales. What lies beyond N or M arrives as
// zeros, and counts.
template <class S, bool Tokens>
__device__ __forceinline__ void produce(const Arguments& arguments, const Shared<S>& shared, uint32_t rank, uint32_t worker,
                                        uint32_t workers) {
    using Codec = typename S::Codec;
    // Who has which tokens of an expert is a result of earlier work.
    if (Tokens || arguments.offsets != nullptr) wait_for_previous();
    Walk<S::kTokens> walk(arguments.schedule, arguments.m, arguments.offsets, arguments.experts, worker, workers);
    Segment segment;
    Ring<S::kStages> ring;
    while (walk.next(segment)) {
        const int tile = (segment.tile_n * S::kCluster + rank) * S::kTiles;
        const int token = segment.token + rank * (S::kTokens / S::kCluster);
        for (uint32_t step = segment.begin; step < segment.end; ++step) {
            const uint32_t s = ring.stage;
            barrier_wait(&shared.empty[s], ring.parity ^ 1);
            if constexpr (Tokens) {
                barrier_expect(&shared.full[s], S::kTokenBytes);
                uint8_t* tokens = shared.tokens + s * S::kTokenBytes + rank * (S::kTokenBytes / S::kCluster);
                if constexpr (S::kCluster == 1) {
                    copy_box(tokens, &arguments.x, step * kStep, token, &shared.full[s]);
                } else {
                    copy_box_multicast(tokens, &arguments.x, step * kStep, token, &shared.full[s], (1 << S::kCluster) - 1);
                }
            } else {
                barrier_expect(&shared.full[s], S::kCodeBytes + S::kScaleBytes);
                copy_box(shared.codes + s * S::kCodeBytes, &arguments.codes, 0, tile, 4 * step, segment.expert, &shared.full[s]);
                if constexpr (Codec::kScaleRows != 0) {
                    const uint32_t group = Codec::kGroup == 64 ? step * kStep / arguments.group_size : step * Codec::kScaleRows;
                    copy_box(shared.scales + s * S::kScaleBytes, &arguments.scales, 0, tile, group, segment.expert, &shared.full[s]);
                }
            }
            ring.advance();
        }
    }
    if constexpr (!Tokens) let_next_start();
}

// Gives a stage back to the producers that fill it.
template <class S>
__device__ __forceinline__ void release(const Shared<S>& shared, uint32_t stage, int lane) {
    if constexpr (S::kCluster == 1) {
        if (lane == 0) barrier_arrive(&shared.empty[stage]);
    } else {
        if (lane < S::kCluster) barrier_arrive_remote(&shared.empty[stage], lane);
    }
}

// Sums of a warp: block b, element 4 i + 2 h + e is row 16 b + 8 h + lane / 4 of its rows, token 8 i + 2 (lane % 4) + e.
template <class S>
using Sums = float[S::kBlocks][S::kTokens / 2];

// Leaves the sums in the workspace and says so.
template <class S>
__device__ __forceinline__ void leave(const Arguments& arguments, const Sums<S>& sums, uint32_t block, int group) {
    const int thread = threadIdx.x % 128;
    float4* to = reinterpret_cast<float4*>(arguments.partial + uint64_t{block} * S::kPartialFloats) +
                 group * (S::kPartialFloats / S::kGroups / 4) + thread;
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < S::kTokens / 8; ++i) {
            __stcg(to + 128 * (b * (S::kTokens / 8) + i),
                   make_float4(sums[b][4 * i], sums[b][4 * i + 1], sums[b][4 * i + 2], sums[b][4 * i + 3]));
        }
    }
    __threadfence();
    named_barrier(1 + group, 128);
    if (thread == 0) {
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(arguments.flags + block * S::kGroups + group) : "memory");
    }
}

// Adds the sums that `count` workers from `first` on have left, in their order, and takes the flags down for the next launch.
template <class S>
__device__ __forceinline__ void collect(const Arguments& arguments, Sums<S>& sums, uint32_t first, uint32_t count, uint32_t rank,
                                        int group) {
    constexpr int quads = S::kBlocks * S::kTokens / 8;  // groups of four sums of a thread
    constexpr int together = quads < 16 ? 16 / quads : 1;  // workers whose sums are under way at once
    const int thread = threadIdx.x % 128;
    for (uint32_t done = 0; done < count; done += together) {
        const uint32_t now = min(count - done, uint32_t{together});
        if (thread < now) {
            uint32_t* flag = arguments.flags + ((first + done + thread) * S::kCluster + rank) * S::kGroups + group;
            uint32_t value;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
            } while (value == 0);
            *flag = 0;
        }
        named_barrier(1 + group, 128);
        float4 other[together][quads];
#pragma unroll
        for (int w = 0; w < together; ++w) {
            const uint64_t block = (first + done + w) * S::kCluster + rank;
            const float4* from = reinterpret_cast<const float4*>(arguments.partial + block * S::kPartialFloats) +
                                 group * (S::kPartialFloats / S::kGroups / 4) + thread;
#pragma unroll
            for (int i = 0; i < quads; ++i) {
                if (w < now) other[w][i] = __ldcg(from + 128 * i);
            }
        }
#pragma unroll
        for (int w = 0; w < together; ++w) {
            if (w >= now) break;
#pragma unroll
            for (int i = 0; i < quads; ++i) {
                float* to = &sums[i / (S::kTokens / 8)][4 * (i % (S::kTokens / 8))];
                to[0] += other[w][i].x, to[1] += other[w][i].y, to[2] += other[w][i].z, to[3] += other[w][i].w;
            }
        }
    }
}

// What row n is multiplied by.
template <int Short>
__device__ __forceinline__ float row_factor(const Arguments& arguments, uint32_t expert, uint32_t n) {
    const float power = __uint_as_float(static_cast<uint32_t>(Short + 127) << 23);
    if (arguments.row_scale_type == kRowScaleNone) return power;
    uint32_t index = n;
    if (arguments.row_scale_of_part != 0) {
        index = 0;
        while (index + 1 < arguments.parts && n >= arguments.part_end[index]) ++index;
    }
    const uint8_t* scales = arguments.row_scales + expert * arguments.expert_stride;
    float scale;
    if (arguments.row_scale_type == kRowScaleF32) {
        scale = reinterpret_cast<const float*>(scales)[index];
    } else if (arguments.row_scale_type == kRowScaleBf16) {
        scale = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(scales)[index]);
    } else {
        scale = __half2float(reinterpret_cast<const __half*>(scales)[index]);
    }
    return power * (arguments.row_scale_divides != 0 ? 1.0f / scale : scale);
}

// Scales the sums, turns them round through the warp's own part of shared memory, and stores whole runs of a token's row.
template <class S>
__device__ __forceinline__ void store(const Arguments& arguments, Sums<S>& sums, uint8_t* out, uint32_t first_row,
                                      const Segment& segment, int lane) {
    if (first_row >= arguments.n) return;
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t n = first_row + 16 * b + 8 * h + lane / 4;
            const float factor = row_factor<S::Codec::kShort>(arguments, segment.expert, n);
            const float bias = arguments.bias != nullptr ? arguments.bias[n] : 0.0f;
#pragma unroll
            for (int i = 0; i < S::kTokens / 8; ++i) {
#pragma unroll
                for (int e = 0; e < 2; ++e) sums[b][4 * i + 2 * h + e] = fmaf(sums[b][4 * i + 2 * h + e], factor, bias);
            }
        }
    }
    if (arguments.out_f32 != 0) {
        float* buffer = reinterpret_cast<float*>(out);
        constexpr int per_row = 4 * S::kBlocks;  // lanes that read a token's run, four elements each
#pragma unroll
        for (int chunk = 0; chunk < S::kTokens / 16; ++chunk) {
#pragma unroll
            for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
                for (int q = 0; q < 8; ++q) {
                    const int i = q / 4, h = q / 2 % 2, e = q % 2;
                    buffer[(8 * i + 2 * (lane % 4) + e) * S::kPitchF32 + 16 * b + 8 * h + lane / 4] = sums[b][8 * chunk + q];
                }
            }
            __syncwarp();
#pragma unroll
            for (int pass = 0; pass < per_row / 2; ++pass) {
                const int row = pass * (32 / per_row) + lane / per_row, column = 4 * (lane % per_row);
                const uint32_t token = segment.token + 16 * chunk + row;
                if (token < segment.token_end) {
                    float4 v = *reinterpret_cast<const float4*>(buffer + row * S::kPitchF32 + column);
                    float4* to = reinterpret_cast<float4*>(static_cast<float*>(arguments.out) + token * arguments.out_stride +
                                                           first_row + column);
                    if (arguments.accumulate != 0) {
                        const float4 old = *to;
                        v.x += old.x, v.y += old.y, v.z += old.z, v.w += old.w;
                    }
                    *to = v;
                }
            }
            __syncwarp();
        }
    } else {
        __nv_bfloat16* buffer = reinterpret_cast<__nv_bfloat16*>(out);
        constexpr int per_row = 2 * S::kBlocks;  // lanes that read a token's run, eight elements each
#pragma unroll
        for (int chunk = 0; chunk < S::kTokens / 16; ++chunk) {
            // Four 8 x 8 matrices at a time, (half, token octet) of one block; lane l names row l % 8 of matrix l / 8.
#pragma unroll
            for (int b = 0; b < S::kBlocks; ++b) {
                uint32_t packed[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const float low = sums[b][8 * chunk + 2 * q], high = sums[b][8 * chunk + 2 * q + 1];
                    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[q]) : "f"(high), "f"(low));
                }
                const int matrix = lane / 8;
                const uint32_t to = shared_address(buffer + (8 * (matrix / 2) + lane % 8) * S::kPitchBf16 + 16 * b + 8 * (matrix % 2));
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(packed[0]),
                             "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                             : "memory");
            }
            __syncwarp();
#pragma unroll
            for (int pass = 0; pass < per_row / 2; ++pass) {
                const int row = pass * (32 / per_row) + lane / per_row, column = 8 * (lane % per_row);
                const uint32_t token = segment.token + 16 * chunk + row;
                if (token < segment.token_end) {
                    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(arguments.out) + token * arguments.out_stride + first_row +
                                              column) = *reinterpret_cast<const uint4*>(buffer + row * S::kPitchBf16 + column);
                }
            }
            __syncwarp();
        }
    }
}

template <class S>
__device__ __forceinline__ void consume(const Arguments& arguments, const Shared<S>& shared, int group, uint32_t rank, uint32_t worker,
                                        uint32_t workers) {
    using Codec = typename S::Codec;
    constexpr int words = S::kBlocks * Codec::kBlockWords;
    constexpr int scale_words = Codec::Scales::template kWords<S::kBlocks>;
    constexpr int scale_rows = Codec::kScaleRows == 0 ? 1 : Codec::kScaleRows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int tile = group * S::kBlocks + warp * S::kBlocks / 4;  // of the block's
    const int first = warp * S::kBlocks % 4;                      // block within the tile
    const uint8_t* my_codes = shared.codes + tile * Codec::kTileBytes + lane * (Codec::kTileBytes / 32) + first * Codec::kBlockWords * 4;
    const uint8_t* my_scales = shared.scales + tile * 64 * Codec::kScaleBytes;
    uint8_t* out = shared.out + (group * 4 + warp) * 16 * S::kPitchF32 * 4;

    wait_for_previous();
    Walk<S::kTokens> walk(arguments.schedule, arguments.m, arguments.offsets, arguments.experts, worker, workers);
    Segment segment;
    Ring<S::kStages> ring;
    while (walk.next(segment)) {
        Sums<S> sums;
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < S::kTokens / 2; ++i) sums[b][i] = 0.0f;
        }
        uint32_t a[S::kDepth][S::kBatch][S::kBlocks][4];
        uint32_t last = 0;
        for (uint32_t step = segment.begin; step < segment.end; ++step) {
            barrier_wait(&shared.full[ring.stage], ring.parity);
            uint32_t codes[4][words], raw_scales[scale_rows][scale_words], scales[S::kBlocks][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                read_words<words>(codes[i], my_codes + ring.stage * S::kCodeBytes + i * S::kCodeRow);
            }
#pragma unroll
            for (int i = 0; i < Codec::kScaleRows; ++i) {
                Codec::Scales::template read<S::kBlocks>(raw_scales[i], my_scales + ring.stage * S::kScaleBytes + i * S::kScaleRow,
                                                         lane, first);
            }
            // The same for all lanes, which the shuffle tells the compiler: descriptors are built in uniform registers.
            const uint32_t tokens =
                __shfl_sync(0xFFFFFFFF, tile_descriptor(shared_address(shared.tokens + ring.stage * S::kTokenBytes)), 0);
#pragma unroll
            for (int batch = 0; batch < 4 / S::kBatch; ++batch) {
                uint32_t(&fragments)[S::kBatch][S::kBlocks][4] = a[batch % S::kDepth];
#pragma unroll
                for (int j = 0; j < S::kBatch; ++j) {
                    const int i = batch * S::kBatch + j;
                    if constexpr (Codec::kScaleRows != 0) {
                        if (i * 16 % Codec::kGroup == 0) {
                            Codec::Scales::template prepare<S::kBlocks>(raw_scales[i * 16 / Codec::kGroup], first, scales);
                        }
                    }
#pragma unroll
                    for (int b = 0; b < S::kBlocks; ++b) {
                        Codec::unpack(codes[i] + b * Codec::kBlockWords, scales[b], fragments[j][b]);
#pragma unroll
                        for (int r = 0; r < 4; ++r) hold(fragments[j][b][r]);
                    }
                }
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < S::kBatch; ++j) {
#pragma unroll
                    for (int b = 0; b < S::kBlocks; ++b) {
                        // 16 columns are 32 bytes, and a descriptor counts 16.
                        wgmma<S::kTokens>(sums[b], fragments[j][b], tokens + 2 * (batch * S::kBatch + j));
                    }
                }
                wgmma_commit();
                wgmma_wait<S::kDepth - 1>();
                // What is done by now includes the last instructions of the stage before, or of this one.
                if constexpr (S::kDepth == 1) {
                    if (batch == 4 / S::kBatch - 1) release<S>(shared, ring.stage, lane);
                } else {
                    if (batch == S::kDepth - 2 && step != segment.begin) release<S>(shared, last, lane);
                }
            }
            last = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
            for (int i = 0; i < S::kTokens / 2; ++i) hold(sums[b][i]);
        }
        if constexpr (S::kDepth > 1) release<S>(shared, last, lane);

        if (segment.begin != 0) {
            leave<S>(arguments, sums, worker * S::kCluster + rank, group);
            continue;
        }
        if (segment.end != arguments.schedule.steps) {
            const uint64_t tile_end =
                Walk<S::kTokens>::start(arguments.schedule, worker + 1, workers) - segment.end + arguments.schedule.steps;
            uint32_t others = 1;
            while (Walk<S::kTokens>::start(arguments.schedule, worker + others + 1, workers) < tile_end) ++others;
            collect<S>(arguments, sums, worker + 1, others, rank, group);
        }
        const uint32_t row = (segment.tile_n * S::kCluster + rank) * S::kRows + (group * 4 + warp) * 16 * S::kBlocks;
        store<S>(arguments, sums, out, row, segment, lane);
    }
}

template <class S>
__device__ __forceinline__ void gemm(const Arguments& arguments) {
    extern __shared__ uint8_t raw[];
    const Shared<S> shared(raw);
    const uint32_t rank = S::kCluster == 1 ? 0 : cluster_rank();
    const uint32_t worker = blockIdx.x / S::kCluster, workers = gridDim.x / S::kCluster;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kStages; ++i) {
            barrier_init(&shared.full[i], 2);
            barrier_init(&shared.empty[i], 4 * S::kGroups * S::kCluster);
        }
        barrier_init_fence();
        prefetch_map(&arguments.x);
        prefetch_map(&arguments.codes);
        if constexpr (S::Codec::kScaleRows != 0) prefetch_map(&arguments.scales);
    }
    __syncthreads();
    if constexpr (S::kCluster > 1) cluster_sync();
    // The warpgroup index is the same for a whole warp; the compiler has to know.
    const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    if (group == S::kGroups) {
        registers_give<S::kProducerRegisters>();
        if (threadIdx.x == 128 * S::kGroups) produce<S, false>(arguments, shared, rank, worker, workers);
        if (threadIdx.x == 128 * S::kGroups + 32) produce<S, true>(arguments, shared, rank, worker, workers);
        __syncwarp();
    } else {
        registers_take<S::kConsumerRegisters>();
        consume<S>(arguments, shared, group, rank, worker, workers);
    }
    // Nobody leaves while others may still send to it.
    if constexpr (S::kCluster > 1) cluster_sync();
}

}  // namespace hopper
