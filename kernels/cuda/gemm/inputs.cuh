// Activations that a product with few rows makes itself from what the step before left: a launch less, of a kernel that does
// next to nothing. Every block makes those that it multiplies.
#pragma once

#include "common/async.cuh"
#include "common/gates.cuh"
#include "gemm/request.cuh"

/// Where units of 32 along K go: slot `s` of a row's units in shared memory holds unit `base + s`, from the first again behind
/// the last.
struct Slots {
    u32 base, count, units;

    __device__ __forceinline__ u32 unit(u32 slot) const {
        const u32 unit = base + slot;
        return unit < units ? unit : unit - units;
    }
};

__device__ __forceinline__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ __forceinline__ void store_shared_8(u32 to, u32 first, u32 second) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ void store_shared_16(u32 to, const u32 (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    return to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16;
}

/// Norm weights that a thread will want, loaded before there is anything to multiply them with.
template <u32 Threads> struct NormWeights {
    static constexpr u32 KEPT = 3;
    float4 kept[KEPT];

    __device__ __forceinline__ static float4 at(const Request &r, const Slots &slots, u32 c) {
        return __ldg(reinterpret_cast<const float4 *>(r.weight) + 8 * slots.unit(c / 8) + c % 8);
    }

    __device__ __forceinline__ void load(const Request &r, const Slots &slots) {
#pragma unroll
        for (u32 j = 0; j < KEPT; ++j) {
            const u32 c = threadIdx.x + Threads * j;
            if (c < 8 * slots.count) {
                kept[j] = at(r, slots, c);
            }
        }
    }
};

/// bf16 rows at the shared address `x`, `pitch` bytes apart: f32 rows `m0 .. m0 + rows`, normed. `weights` are those of the
/// slots from the first on. `scratch`: a float per warp and row. Sums have one order, whatever the number of rows.
template <u32 Threads>
__device__ __forceinline__ void norm_rows(const Request &r, u32 m0, u32 rows, const Slots &slots, u32 x, u32 pitch,
                                          const NormWeights<Threads> &weights, float *scratch) {
    constexpr u32 WARPS = Threads / 32;
    const u32 quads = 8 * slots.units;
    const auto row_at = [&](u32 row) {
        return reinterpret_cast<const float4 *>(reinterpret_cast<const float *>(r.x) + static_cast<u64>(m0 + row) * r.x_stride);
    };
    for (u32 row = 0; row < rows; ++row) {
        const float4 *from = row_at(row);
        float sum = 0;
#pragma unroll 4
        for (u32 c = threadIdx.x; c < quads; c += Threads) {
            sum += squares(from[c]);
        }
#pragma unroll
        for (u32 step = 16; step > 0; step /= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
        }
        if (threadIdx.x % 32 == 0) {
            scratch[row * WARPS + threadIdx.x / 32] = sum;
        }
    }
    __syncthreads();
    for (u32 row = 0; row < rows; ++row) {
        const float4 *from = row_at(row);
        float sum = 0;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) {
            sum += scratch[row * WARPS + w];
        }
        const float factor = 1.0f / sqrtf(sum / static_cast<float>(4 * quads) + r.eps);
        const auto put = [&](u32 c, float4 w) {
            const float4 v = from[8 * slots.unit(c / 8) + c % 8];
            store_shared_8(x + row * pitch + 8 * c, bf16_pair(v.x * factor * w.x, v.y * factor * w.y),
                           bf16_pair(v.z * factor * w.z, v.w * factor * w.w));
        };
#pragma unroll
        for (u32 j = 0; j < NormWeights<Threads>::KEPT; ++j) {
            const u32 c = threadIdx.x + Threads * j;
            if (c < 8 * slots.count) {
                put(c, weights.kept[j]);
            }
        }
        for (u32 c = threadIdx.x + Threads * NormWeights<Threads>::KEPT; c < 8 * slots.count; c += Threads) {
            put(c, NormWeights<Threads>::at(r, slots, c));
        }
    }
}

/// The same of rows of gates and of what they are multiplied with, `up_at` elements behind.
template <u32 Threads>
__device__ __forceinline__ void gate_rows(const Request &r, u32 m0, u32 rows, const Slots &slots, u32 x, u32 pitch) {
    for (u32 row = 0; row < rows; ++row) {
        const u16 *from = r.x + static_cast<u64>(m0 + row) * r.x_stride;
        for (u32 c = threadIdx.x; c < 4 * slots.count; c += Threads) {
            const u32 at = 32 * slots.unit(c / 4) + 8 * (c % 4);
            const uint4 g = *reinterpret_cast<const uint4 *>(from + at);
            const uint4 u = *reinterpret_cast<const uint4 *>(from + r.up_at + at);
            const u32 gates[4] = {g.x, g.y, g.z, g.w}, ups[4] = {u.x, u.y, u.z, u.w};
            u32 out[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float low = vt::gate(r.gate, bf16_bits(gates[i]), bf16_bits(ups[i]));
                const float high = vt::gate(r.gate, bf16_bits(gates[i] >> 16), bf16_bits(ups[i] >> 16));
                out[i] = bf16_pair(low, high);
            }
            store_shared_16(x + row * pitch + 16 * c, out);
        }
    }
}
