// From the planes of `marlin-16x64@1` to fragments of wgmma's A operand, in registers.
//
// Of a tile of 64 rows (N) and 16 columns (K), lane l owns rows l/4 + 8 half + 16 j and columns 2 (l%4) + odd + 8 high: just what it
// holds of the A fragments of the four blocks j of 16 rows. A warp works on B adjacent blocks, starting at `first`.
//
// A codec says how many bytes a tile of codes and an element of the scales take, unpacks the codes of a block into four registers of two
// bf16 (a0: half 0, high 0; a1: half 1, high 0; a2: half 0, high 1; a3: half 1, high 1), times a scale a row, and
// names the power of two that the result is short of.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace hopper {

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
__device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
// The lower or the upper half twice.
__device__ __forceinline__ uint32_t both_low(uint32_t pair) {
    uint32_t out;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(out) : "r"(pair));
    return out;
}
__device__ __forceinline__ uint32_t both_high(uint32_t pair) {
    uint32_t out;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(out) : "r"(pair));
    return out;
}
// Both halves the bf16 nearest to `value`.
__device__ __forceinline__ uint32_t twice(float value) {
    uint32_t out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(out) : "f"(value));
    return out;
}
// bf16 2^exponent in both halves.
__device__ constexpr uint32_t power(int exponent) {
    return static_cast<uint32_t>(exponent + 127) << 7 | static_cast<uint32_t>(exponent + 127) << 23;
}

// Reads Words 32-bit words that are aligned to their size.
template <int Words>
__device__ __forceinline__ void read_words(uint32_t* to, const uint8_t* from) {
    if constexpr (Words == 1) {
        to[0] = *reinterpret_cast<const uint32_t*>(from);
    } else if constexpr (Words == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        to[0] = v.x, to[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < Words; i += 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(from + 4 * i);
            to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------- codes

// e2m1, one word a block. The three bits below the sign, put where bf16 has the lowest bits of its exponent and the highest of its
// mantissa, are the value times 2^-126, subnormal 0.5 included.
struct CodesE2m1 {
    static constexpr int kBits = 4;
    static constexpr int kShort = 126;
    __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t (&a)[4]) {
        // A code times 2^12 + 2^6 has its sign at bit 15 and the rest from bit 6 on.
        constexpr uint32_t even = 0x000F000F, odd = 0x00F000F0, wanted = 0x81C081C0;
        const uint32_t low = words[0], high = low >> 8;
        a[0] = (low & even) * 0x1040 & wanted;
        a[2] = (low & odd) * 0x0104 & wanted;
        a[1] = (high & even) * 0x1040 & wanted;
        a[3] = (high & odd) * 0x0104 & wanted;
    }
};

// code - 8, one word a block: bits 0x4300 | code are 128 + code.
struct CodesU4b8 {
    static constexpr int kBits = 4;
    static constexpr int kShort = 0;
    __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t (&a)[4]) {
        const uint32_t w = words[0];
        constexpr uint32_t mask = 0x000F000F, base = 0x43004300, zero = 0x43084308;
        a[0] = subtract((w & mask) | base, zero);
        a[2] = subtract(((w >> 4) & mask) | base, zero);
        a[1] = subtract(((w >> 8) & mask) | base, zero);
        a[3] = subtract(((w >> 12) & mask) | base, zero);
    }
};

// e4m3, two words a block (half 0 and half 1): the value times 2^-120 in bf16, subnormals included.
struct CodesE4m3 {
    static constexpr int kBits = 8;
    static constexpr int kShort = 120;
    __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t (&a)[4]) {
        constexpr uint32_t sign = 0x80008000, rest = 0x07F007F0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t w = words[half];
            a[half] = ((w << 8) & sign) | ((w << 4) & rest);
            a[half + 2] = (w & sign) | ((w >> 4) & rest);
        }
    }
};

// code - 128, two words a block. With t the code's highest bit and r the others: (128 + r) - (256 - 128 t).
struct CodesU8b128 {
    static constexpr int kBits = 8;
    static constexpr int kShort = 0;
    __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t (&a)[4]) {
        constexpr uint32_t rest = 0x007F007F, top = 0x00800080, base = 0x43004300;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t low = words[half], high = low >> 8;
            a[half] = subtract((low & rest) | base, (~low & top) | base);
            a[half + 2] = subtract((high & rest) | base, (~high & top) | base);
        }
    }
};

// --------------------------------------------------------------------------------------------------------------- scales

// No scales within K.
struct ScalesNone {
    static constexpr int kBytes = 0;
    static constexpr int kShort = 0;
    template <int Blocks>
    static constexpr int kWords = 1;
    template <int Blocks>
    __device__ __forceinline__ static void read(uint32_t*, const uint8_t*, int, int) {}
};

// e4m3 without sign. Raw bits moved to bf16's place are the value times 2^-120, which a multiplication makes times 2^7. The product
// with a code of e2m1 is then times 2^-119: a multiple of 2^-129 with six significant bits, which bf16 holds exactly.
struct ScalesE4m3 {
    static constexpr int kBytes = 1;
    static constexpr int kShort = -7;
    template <int Blocks>
    static constexpr int kWords = Blocks == 4 ? 2 : 1;

    template <int Blocks>
    __device__ __forceinline__ static void read(uint32_t* words, const uint8_t* tile, int lane, int first) {
        read_words<kWords<Blocks>>(words, tile + 8 * (lane / 4) + 4 * (first / 2));
    }
    template <int Blocks>
    __device__ __forceinline__ static void prepare(const uint32_t* words, int first, uint32_t (&scales)[Blocks][2]) {
        // Bytes of a word: (block 0, half 0), (block 1, half 0), (block 0, half 1), (block 1, half 1).
#pragma unroll
        for (int pair = 0; pair < kWords<Blocks>; ++pair) {
            const uint32_t w = Blocks == 1 ? words[0] >> (8 * (first & 1)) : words[pair];
            const uint32_t even = multiply((w << 4) & 0x07F007F0, power(127));
            scales[2 * pair][0] = both_low(even);
            scales[2 * pair][1] = both_high(even);
            if constexpr (Blocks > 1) {
                const uint32_t odd = multiply((w >> 4) & 0x07F007F0, power(127));
                scales[2 * pair + 1][0] = both_low(odd);
                scales[2 * pair + 1][1] = both_high(odd);
            }
        }
    }
};

// 16-bit floats; a lane's eight of a tile are adjacent, (block, half) in order. Those that bf16 cannot hold are rounded to it.
template <bool Half>
struct Scales16 {
    static constexpr int kBytes = 2;
    static constexpr int kShort = 0;
    template <int Blocks>
    static constexpr int kWords = Blocks;

    template <int Blocks>
    __device__ __forceinline__ static void read(uint32_t* words, const uint8_t* tile, int lane, int first) {
        read_words<Blocks>(words, tile + 16 * (lane / 4) + 4 * first);
    }
    template <int Blocks>
    __device__ __forceinline__ static void prepare(const uint32_t* words, int, uint32_t (&scales)[Blocks][2]) {
#pragma unroll
        for (int block = 0; block < Blocks; ++block) {
            if constexpr (Half) {
                const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[block]));
                scales[block][0] = twice(pair.x);
                scales[block][1] = twice(pair.y);
            } else {
                scales[block][0] = both_low(words[block]);
                scales[block][1] = both_high(words[block]);
            }
        }
    }
};
using ScalesBf16 = Scales16<false>;
using ScalesF16 = Scales16<true>;

// 32-bit floats, rounded to bf16.
struct ScalesF32 {
    static constexpr int kBytes = 4;
    static constexpr int kShort = 0;
    template <int Blocks>
    static constexpr int kWords = 2 * Blocks;

    template <int Blocks>
    __device__ __forceinline__ static void read(uint32_t* words, const uint8_t* tile, int lane, int first) {
        read_words<2 * Blocks>(words, tile + 32 * (lane / 4) + 8 * first);
    }
    template <int Blocks>
    __device__ __forceinline__ static void prepare(const uint32_t* words, int, uint32_t (&scales)[Blocks][2]) {
#pragma unroll
        for (int block = 0; block < Blocks; ++block) {
            scales[block][0] = twice(__uint_as_float(words[2 * block]));
            scales[block][1] = twice(__uint_as_float(words[2 * block + 1]));
        }
    }
};

// Powers of two without sign or mantissa: 2^(e - 127), 255 is NaN. The codes of e2m1 first get their own exponents back, so that every
// product that bf16 holds is exact. Halved, as ggml has them beside doubled codes: 2^(e - 128), and 255 is a number.
template <bool Halved>
struct ScalesE8m0 {
    static constexpr int kBytes = 1;
    static constexpr int kShort = Halved ? 1 : 0;
    template <int Blocks>
    static constexpr int kWords = ScalesE4m3::kWords<Blocks>;

    template <int Blocks>
    __device__ __forceinline__ static void read(uint32_t* words, const uint8_t* tile, int lane, int first) {
        ScalesE4m3::read<Blocks>(words, tile, lane, first);
    }
    template <int Blocks>
    __device__ __forceinline__ static void prepare(const uint32_t* words, int first, uint32_t (&scales)[Blocks][2]) {
#pragma unroll
        for (int block = 0; block < Blocks; ++block) {
            const int j = Blocks == 1 ? (first & 1) : block;
            const uint32_t w = words[block / 2] >> (8 * (j & 1));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t byte = (w >> (16 * half)) & 0xFF;
                uint32_t bits;
                if constexpr (Halved) {
                    bits = byte < 2 ? 0x0020 << byte : (byte - 1) << 7;
                } else {
                    bits = byte == 0 ? 0x0040 : byte == 255 ? 0x7FFF : byte << 7;
                }
                scales[block][half] = bits | bits << 16;
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------- codec

// Group: columns of a scale, at most 64; 64 stands for every multiple of it; 0 for none.
// Raise: power of two that the codes are multiplied by before the scale (0 none).
template <class CodesT, class ScalesT, int GroupT, int RaiseT>
struct Codec {
    using Codes = CodesT;
    using Scales = ScalesT;
    static constexpr int kGroup = GroupT;
    static constexpr int kTileBytes = 1024 * Codes::kBits / 8;
    static constexpr int kBlockWords = Codes::kBits / 4;
    // Rows of the scale plane within 64 columns.
    static constexpr int kScaleRows = GroupT == 0 ? 0 : 64 / GroupT;
    static constexpr int kScaleBytes = Scales::kBytes;
    // What the weights in registers are short of, as a power of two.
    static constexpr int kShort = Codes::kShort + Scales::kShort - RaiseT;

    __device__ __forceinline__ static void unpack(const uint32_t* words, const uint32_t (&scales)[2], uint32_t (&a)[4]) {
        Codes::unpack(words, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (RaiseT != 0) a[i] = multiply(a[i], power(RaiseT));
            if constexpr (GroupT != 0) a[i] = multiply(a[i], scales[i & 1]);
        }
    }
};

using Nvfp4 = Codec<CodesE2m1, ScalesE4m3, 16, 0>;
using Mxfp4 = Codec<CodesE2m1, ScalesE8m0<false>, 32, 126>;
using Mxfp4Ggml = Codec<CodesE2m1, ScalesE8m0<true>, 32, 127>;
using Fp8 = Codec<CodesE4m3, ScalesNone, 0, 120>;
template <class ScalesT, int Group>
using Int4 = Codec<CodesU4b8, ScalesT, Group, 0>;
template <class ScalesT, int Group>
using Int8 = Codec<CodesU8b128, ScalesT, Group, 0>;

}  // namespace hopper
