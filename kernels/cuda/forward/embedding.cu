// Rows of the embedding by token, whatever it is stored as.
//
// Axes: T tokens, K elements of a row. Grids are (tokens, columns); a thread decodes eight elements.

#include "common/order.cuh"
#include "gemm/raw.cuh"
#include "gemm/tiled.cuh"

namespace {

// Writes eight elements of a row from `k` on, those below K, times `scale`.
__device__ __forceinline__ void put(float* row, u32 k, u32 width, const float (&eight)[8], float scale) {
    for (u32 i = 0; i < 8 && k + i < width; ++i) row[k + i] = scale == 1.0f ? eight[i] : eight[i] * scale;
}

__device__ __forceinline__ u32 first_column() { return 8 * (blockIdx.y * blockDim.x + threadIdx.x); }

}  // namespace

// out [T, K] = rows of floats `data` [V, K]; `type` is a `ScaleType`.
extern "C" __global__ void vt_embed_floats(const u8* data, u32 type, u32 width, const u32* tokens, float scale, float* out) {
    let_next_start();
    wait_for_previous();
    const ScalePlane plane{nullptr, type, 0, 0, 0};
    const u64 from = static_cast<u64>(tokens[blockIdx.x]) * width;
    const u32 k = first_column();
    float eight[8];
    for (u32 i = 0; i < 8 && k + i < width; ++i) eight[i] = scale_value(plane, data, from + k + i);
    put(out + static_cast<u64>(blockIdx.x) * width, k, width, eight, scale);
}

// The same of a matrix in tile order.
extern "C" __global__ void vt_embed_tiled(const __grid_constant__ Tiled w, const u32* tokens, float scale, float* out) {
    let_next_start();
    wait_for_previous();
    const u32 k = first_column();
    if (k >= w.k) return;
    float eight[8];
    decode_eight(w, 0, tokens[blockIdx.x], k, eight, 1);
    put(out + static_cast<u64>(blockIdx.x) * w.k, k, w.k, eight, scale);
}

// The same of raw ggml blocks.
extern "C" __global__ void vt_embed_raw(const __grid_constant__ Raw w, const u32* tokens, float scale, float* out) {
    let_next_start();
    wait_for_previous();
    const u32 k = first_column();
    if (k >= w.k) return;
    const u64 block = static_cast<u64>(tokens[blockIdx.x]) * (w.k / w.weights) + k / w.weights;
    float eight[8];
    raw_eight(w, w.blocks + block * w.bytes, k % w.weights / 8, eight);
    put(out + static_cast<u64>(blockIdx.x) * w.k, k, w.k, eight, scale);
}
