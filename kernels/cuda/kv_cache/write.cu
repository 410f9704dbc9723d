// Writes the keys and values of a step's tokens into the paged cache.

#include "common/order.cuh"
#include "kv_cache/layout.cuh"

namespace {

struct Write {
    // Rows of bf16, `stride` elements apart; row t holds keys [kv_heads, D] at `keys_at` and values at `values_at`.
    const __nv_bfloat16* x;
    // Of each token, block * 16 + slot; 0xFFFFFFFF writes nothing.
    const uint32_t* slots;
    // The layer's part of the cache.
    void* cache;
    uint32_t stride, keys_at, values_at;
    uint32_t tokens, kv_heads, dim;
    // What a stored E4M3 value is multiplied by when it is read.
    float key_scale, value_scale;
};

__device__ __forceinline__ void store(__nv_bfloat16* to, uint4 eight, float) { *reinterpret_cast<uint4*>(to) = eight; }

__device__ __forceinline__ void store(__nv_fp8_e4m3* to, uint4 eight, float scale) {
    const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&eight);
    uint16_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 pair = __bfloat1622float2(pairs[i]);
        pair.x = __fdiv_rn(pair.x, scale);
        pair.y = __fdiv_rn(pair.y, scale);
        codes[i] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }
    *reinterpret_cast<uint2*>(to) =
        make_uint2(codes[0] | static_cast<uint32_t>(codes[1]) << 16, codes[2] | static_cast<uint32_t>(codes[3]) << 16);
}

// One thread moves eight elements.
template <typename T>
__device__ __forceinline__ void write(const Write& p) {
    const uint32_t eights = p.kv_heads * p.dim / 8;
    const uint64_t index = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t token = index / (2 * eights);
    if (token >= p.tokens) return;
    const uint32_t slot = p.slots[token];
    if (slot == 0xFFFFFFFFu) return;
    uint32_t element = static_cast<uint32_t>(index % (2 * eights));
    const bool value = element >= eights;
    element = (value ? element - eights : element) * 8;
    const uint4 eight = *reinterpret_cast<const uint4*>(p.x + token * p.stride + (value ? p.values_at : p.keys_at) + element);
    const uint32_t head = element / p.dim, d = element % p.dim;
    uint64_t at = vt::keys_of(slot / vt::kBlockLen, p.kv_heads, head, p.dim) + (slot % vt::kBlockLen) * p.dim + d;
    if (value) at += vt::values_offset(p.kv_heads, p.dim);
    store(static_cast<T*>(p.cache) + at, eight, value ? p.value_scale : p.key_scale);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) vt_kv_write_bf16(const __grid_constant__ Write p) {
    let_next_start();
    wait_for_previous();
    write<__nv_bfloat16>(p);
}

extern "C" __global__ void __launch_bounds__(256) vt_kv_write_e4m3(const __grid_constant__ Write p) {
    let_next_start();
    wait_for_previous();
    write<__nv_fp8_e4m3>(p);
}

struct BlockCopy {
    void* cache;
    uint64_t layer_bytes, block_bytes;
    uint32_t from, to;
};

// Copies a block of every layer: grid (parts of a block, layers).
extern "C" __global__ void __launch_bounds__(256) vt_kv_copy_block(const __grid_constant__ BlockCopy p) {
    let_next_start();
    wait_for_previous();
    uint8_t* layer = static_cast<uint8_t*>(p.cache) + blockIdx.y * p.layer_bytes;
    const uint64_t at = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
    if (at >= p.block_bytes) return;
    *reinterpret_cast<uint4*>(layer + p.to * p.block_bytes + at) =
        *reinterpret_cast<const uint4*>(layer + p.from * p.block_bytes + at);
}
