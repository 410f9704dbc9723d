// A decoding sequence's own token as it was projected: the norm and the rotation of its query heads in registers, and of its
// key head on the way to the cache, where its value goes too. For heads all of whose elements are rotated.

#pragma once

#include "attention/decode.cuh"

namespace vt {

// Norm weights of queries and of keys in shared memory, [2][D].
template <uint32_t Threads, uint32_t D>
__device__ __forceinline__ void load_weights(const Decode& p, float* weights) {
    for (uint32_t i = threadIdx.x; i < 2 * D; i += Threads) {
        const float* from = i < D ? p.q_norm : p.k_norm;
        if (from != nullptr) weights[i] = from[i % D];
    }
}

__device__ __forceinline__ float norm_factor(const Decode& p, float squares) {
    return 1.0f / sqrtf(squares / static_cast<float>(p.dim) + p.eps);
}

// Cosines and sines of a row, as the operands of products want them: lane (g, t) uses those of elements 8 t to 8 t + 7 of every
// 32, as seven others do, and holds an eighth of them.
template <uint32_t D>
struct Turns {
    static constexpr uint32_t kEach = D / 64;
    float2 own[kEach];

    __device__ __forceinline__ void load(const Decode& p, uint32_t row, uint32_t lane) {
        const uint32_t first = kEach * (lane / 4), d = 32 * (first / 8) + 8 * (lane % 4) + first % 8;
        const float2* from = p.angles + static_cast<uint64_t>(row) * (D / 2) + d;
#pragma unroll
        for (uint32_t c = 0; c < kEach; ++c) own[c] = from[c];
    }

    // Of element 32 i + 8 t + j.
    __device__ __forceinline__ float2 of(uint32_t i, uint32_t j, uint32_t lane) const {
        const uint32_t index = 8 * i + j, source = 4 * (index / kEach) + lane % 4;
        const float2 turn = own[index % kEach];
        return make_float2(__shfl_sync(~0u, turn.x, source), __shfl_sync(~0u, turn.y, source));
    }
};

__device__ __forceinline__ void turn_pair(float2 turn, float& low, float& high) {
    const float a = low, b = high;
    low = a * turn.x - b * turn.y;
    high = b * turn.x + a * turn.y;
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Norms and rotates the heads in place; `weights` are those of the query norm.
template <uint32_t D>
__device__ __forceinline__ void prepare_queries(const Decode& p, const float* weights, const Turns<D>& turns, uint32_t lane,
                                                Queries<D, 1>& q) {
    float v[D / 32][8];
#pragma unroll
    for (uint32_t i = 0; i < D / 32; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) v[i][2 * j] = low_half(q.pairs[0][i][j]), v[i][2 * j + 1] = high_half(q.pairs[0][i][j]);
    }
    if (p.q_norm != nullptr) {
        float squares = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < D / 32; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < 8; ++j) squares += v[i][j] * v[i][j];
        }
        squares += __shfl_xor_sync(~0u, squares, 1);
        squares += __shfl_xor_sync(~0u, squares, 2);
        const float factor = norm_factor(p, squares);
#pragma unroll
        for (uint32_t i = 0; i < D / 32; ++i) {
#pragma unroll
            for (uint32_t j = 0; j < 8; j += 4) {
                const float4 w = *reinterpret_cast<const float4*>(weights + 32 * i + 8 * (lane % 4) + j);
                v[i][j] *= factor * w.x, v[i][j + 1] *= factor * w.y, v[i][j + 2] *= factor * w.z, v[i][j + 3] *= factor * w.w;
            }
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < D / 64; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) turn_pair(turns.of(i, j, lane), v[i][j], v[i + D / 64][j]);
    }
#pragma unroll
    for (uint32_t i = 0; i < D / 32; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) q.pairs[0][i][j] = pack(v[i][2 * j], v[i][2 * j + 1]);
    }
}

// `N` elements as they are stored, in the low bytes.
template <uint32_t N>
__device__ __forceinline__ uint64_t stored(const float (&values)[N], float, const __nv_bfloat16*) {
    uint64_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        bits |= static_cast<uint64_t>(__bfloat16_as_ushort(__float2bfloat16_rn(values[i]))) << (16 * i);
    }
    return bits;
}

// As a value that was bf16 before: what is stored does not depend on which kernel stores it.
template <uint32_t N>
__device__ __forceinline__ uint64_t stored(const float (&values)[N], float scale, const __nv_fp8_e4m3*) {
    uint64_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        const float rounded = __bfloat162float(__float2bfloat16_rn(values[i]));
        bits |= static_cast<uint64_t>(__nv_cvt_float_to_fp8(__fdiv_rn(rounded, scale), __NV_SATFINITE, __NV_E4M3)) << (8 * i);
    }
    return bits;
}

// Writes `Bytes` of `bits` to shared and to device memory.
template <uint32_t Bytes>
__device__ __forceinline__ void put(uint32_t shared, void* global, uint64_t bits) {
    static_assert(Bytes == 2 || Bytes == 4 || Bytes == 8, "one store");
    if constexpr (Bytes == 2) {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(static_cast<uint16_t>(bits)) : "memory");
        *static_cast<uint16_t*>(global) = static_cast<uint16_t>(bits);
    } else if constexpr (Bytes == 4) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(static_cast<uint32_t>(bits)) : "memory");
        *static_cast<uint32_t*>(global) = static_cast<uint32_t>(bits);
    } else {
        asm volatile("st.shared.u64 [%0], %1;" ::"r"(shared), "l"(bits) : "memory");
        *static_cast<uint64_t*>(global) = bits;
    }
}

// Key and value of one head of the token, over a warp: lane l holds elements E l onwards of each half of the key, and elements
// 2 E l onwards of the value.
template <typename T, uint32_t D>
struct OwnToken {
    static constexpr uint32_t E = D / 64;
    __nv_bfloat16 low[E], high[E], value[2 * E];
    float2 turns[E];
    // Where the token is stored.
    uint32_t block;

    __device__ __forceinline__ void load(const Decode& p, const Unit& u, uint32_t lane) {
        const uint64_t row = u.row;
        block = p.block_tables[static_cast<uint64_t>(u.sequence) * p.table_stride + (u.end - 1) / kBlockLen];
        const __nv_bfloat16* x = p.x + row * p.stride + u.head * D;
        load_some<E>(low, x + p.keys_at + E * lane);
        load_some<E>(high, x + p.keys_at + D / 2 + E * lane);
        load_some<2 * E>(value, x + p.values_at + 2 * E * lane);
#pragma unroll
        for (uint32_t e = 0; e < E; ++e) turns[e] = p.angles[row * (D / 2) + E * lane + e];
    }

    template <uint32_t N>
    static __device__ __forceinline__ void load_some(__nv_bfloat16 (&to)[N], const __nv_bfloat16* from) {
        if constexpr (N == 1) {
            to[0] = from[0];
        } else {
#pragma unroll
            for (uint32_t i = 0; i < N; i += 2) {
                const __nv_bfloat162 pair = reinterpret_cast<const __nv_bfloat162*>(from)[i / 2];
                to[i] = pair.x, to[i + 1] = pair.y;
            }
        }
    }

    // Norms and rotates the key, then writes both into the cache, and to the places in shared memory that `place(values,
    // element)` gives. `weights` are those of the key norm.
    template <typename Place>
    __device__ __forceinline__ void write(const Decode& p, const Unit& u, const float* weights, uint32_t slot, uint32_t lane,
                                          Place place) const {
        float a[E], b[E], v[2 * E];
        float squares = 0.0f;
#pragma unroll
        for (uint32_t e = 0; e < E; ++e) {
            a[e] = __bfloat162float(low[e]), b[e] = __bfloat162float(high[e]);
            squares += a[e] * a[e] + b[e] * b[e];
        }
        if (p.k_norm != nullptr) {
#pragma unroll
            for (uint32_t step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
            const float factor = norm_factor(p, squares);
#pragma unroll
            for (uint32_t e = 0; e < E; ++e) {
                a[e] *= factor * weights[E * lane + e];
                b[e] *= factor * weights[D / 2 + E * lane + e];
            }
        }
#pragma unroll
        for (uint32_t e = 0; e < E; ++e) turn_pair(turns[e], a[e], b[e]);
#pragma unroll
        for (uint32_t i = 0; i < 2 * E; ++i) v[i] = __bfloat162float(value[i]);
        T* keys = static_cast<T*>(const_cast<void*>(p.cache)) + keys_of(block, p.kv_heads, u.head, D) + slot * D;
        T* values = keys + values_offset(p.kv_heads, D);
        const T* type = nullptr;
        constexpr uint32_t kKey = E * sizeof(T), kValue = 2 * E * sizeof(T);
        put<kKey>(place(false, E * lane), keys + E * lane, stored(a, p.store_key_scale, type));
        put<kKey>(place(false, D / 2 + E * lane), keys + D / 2 + E * lane, stored(b, p.store_key_scale, type));
        put<kValue>(place(true, 2 * E * lane), values + 2 * E * lane, stored(v, p.store_value_scale, type));
    }
};

}  // namespace vt
