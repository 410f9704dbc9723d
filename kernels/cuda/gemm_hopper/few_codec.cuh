// Operands of mma.m16n8k16 from the planes of `marlin-16x64@1`, for products with few tokens: as little work a code as possible.
//
// A lane holds of a tile of 64 rows and 16 columns what codec.cuh describes. Bits n (below 256) of a bf16 are n times 2^-133, so that integer codes
// need only be masked: tokens are raised by a power of two instead, a group's sum starts at -zero times the sum of its tokens, and
// is multiplied by the group's scale in f32. Raised tokens must stay finite: below 2^60.
//
// A codec has:
// - kTileBytes, kBlockWords, kScaleRows, kScaleBytes, kGroup: as `Codec`;
// - kMode: where scales are applied; kShort: what sums are short of, as a power of two;
// - kRaiseLow, kRaiseHigh: powers of two that tokens of columns 0 to 7 and 8 to 15 are raised by; kZeroLow, kZeroHigh: bits that
//   stand for -zero there;
// - `unpack`: the operand of a block; `factors` (kInGroup): scales of the rows l/4 and l/4 + 8 of the four blocks.
#pragma once
#include "codec.cuh"

namespace hopper {

enum class Apply { kInCode, kInGroup, kAtEnd };

struct FewNvfp4 : Nvfp4 {
    static constexpr Apply kMode = Apply::kInCode;
    static constexpr int kRaiseLow = 0, kRaiseHigh = 0;
    static constexpr uint32_t kZeroLow = 0, kZeroHigh = 0;
};

struct FewFp8 {
    static constexpr Apply kMode = Apply::kAtEnd;
    static constexpr int kTileBytes = 1024, kBlockWords = 2, kScaleRows = 0, kScaleBytes = 0, kGroup = 0;
    static constexpr int kRaiseLow = 60, kRaiseHigh = 60, kShort = CodesE4m3::kShort - 60;
    static constexpr uint32_t kZeroLow = 0, kZeroHigh = 0;
    __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t (&a)[4]) { CodesE4m3::unpack(words, a); }
};

struct FewCodesU4b8 {
    static constexpr int kBits = 4;
    // A code at bit 4 is sixteen times as much.
    static constexpr int kRaiseLow = 64, kRaiseHigh = 60, kShort = 133 - 64;
    static constexpr uint32_t kZeroLow = 0x80088008, kZeroHigh = 0x80808080;
    __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t (&a)[4]) {
        constexpr uint32_t even = 0x000F000F, odd = 0x00F000F0;
        const uint32_t low = words[0], high = low >> 8;
        a[0] = low & even;
        a[2] = low & odd;
        a[1] = high & even;
        a[3] = high & odd;
    }
};

struct FewCodesU8b128 {
    static constexpr int kBits = 8;
    static constexpr int kRaiseLow = 60, kRaiseHigh = 60, kShort = 133 - 60;
    static constexpr uint32_t kZeroLow = 0x80808080, kZeroHigh = 0x80808080;
    __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t (&a)[4]) {
        constexpr uint32_t mask = 0x00FF00FF;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            a[half] = words[half] & mask;
            a[half + 2] = words[half] >> 8 & mask;
        }
    }
};

// e2m1 with its own exponents.
template <int Raise>
struct FewCodesE2m1 {
    static constexpr int kBits = 4;
    static constexpr int kRaiseLow = 0, kRaiseHigh = 0, kShort = CodesE2m1::kShort - Raise;
    static constexpr uint32_t kZeroLow = 0, kZeroHigh = 0;
    __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t (&a)[4]) {
        CodesE2m1::unpack(words, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = multiply(a[i], power(Raise));
    }
};

template <bool Half>
struct FewScales16 : Scales16<Half> {
    __device__ __forceinline__ static void factors(const uint32_t* words, float (&to)[4][2]) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            if constexpr (Half) {
                const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[block]));
                to[block][0] = pair.x, to[block][1] = pair.y;
            } else {
                to[block][0] = __uint_as_float(words[block] << 16);
                to[block][1] = __uint_as_float(words[block] & 0xFFFF0000);
            }
        }
    }
};

// 2^(e - 127), 255 is NaN; halved 2^(e - 128).
template <bool Halved>
struct FewScalesE8m0 : ScalesE8m0<Halved> {
    __device__ __forceinline__ static void factors(const uint32_t* words, float (&to)[4][2]) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t byte = words[block / 2] >> (8 * (block % 2) + 16 * half) & 0xFF;
                if constexpr (Halved) {
                    to[block][half] = __uint_as_float(byte < 2 ? 1u << (21 + byte) : (byte - 1) << 23);
                } else {
                    to[block][half] = __uint_as_float(byte == 0 ? 1u << 22 : byte == 255 ? 0x7FFFFFFF : byte << 23);
                }
            }
        }
    }
};

template <class CodesT, class ScalesT, int GroupT>
struct FewGrouped {
    using Scales = ScalesT;
    static constexpr Apply kMode = Apply::kInGroup;
    static constexpr int kGroup = GroupT, kTileBytes = 128 * CodesT::kBits, kBlockWords = CodesT::kBits / 4;
    static constexpr int kScaleRows = 64 / GroupT, kScaleBytes = ScalesT::kBytes;
    static constexpr int kRaiseLow = CodesT::kRaiseLow, kRaiseHigh = CodesT::kRaiseHigh, kShort = CodesT::kShort + ScalesT::kShort;
    static constexpr uint32_t kZeroLow = CodesT::kZeroLow, kZeroHigh = CodesT::kZeroHigh;
    __device__ __forceinline__ static void unpack(const uint32_t* words, uint32_t (&a)[4]) { CodesT::unpack(words, a); }
};

using FewMxfp4 = FewGrouped<FewCodesE2m1<126>, FewScalesE8m0<false>, 32>;
using FewMxfp4Ggml = FewGrouped<FewCodesE2m1<127>, FewScalesE8m0<true>, 32>;
template <bool Half, int Group>
using FewInt4 = FewGrouped<FewCodesU4b8, FewScales16<Half>, Group>;
template <bool Half, int Group>
using FewInt8 = FewGrouped<FewCodesU8b128, FewScales16<Half>, Group>;

}  // namespace hopper
