// RMS norms of the residual stream, norms of heads, and rotary embeddings.
//
// Axes: T tokens, H heads, D elements of a head. A row is reduced by one thread block (a head by one warp) in an order that
// depends on its width alone, so that a token's result does not depend on its neighbours.

#include "forward/floats.cuh"

namespace {

using namespace vt;

__device__ __forceinline__ float4 load4(const float* row, uint32_t i) { return reinterpret_cast<const float4*>(row)[i]; }

__device__ __forceinline__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ __forceinline__ float4 scaled(float4 v, float4 w, float factor) {
    return {v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
}

__device__ __forceinline__ float inverse_rms(float sum, uint32_t width, float eps) {
    return 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
}

}  // namespace

// out [R, width] = x / sqrt(mean(x^2) + eps) * weight; row r of the result is of row rows[r] of x [T, width], or of row r
// where `rows` is null. One block a row.
extern "C" __global__ void vt_rms_norm(const float* x, const uint32_t* rows, const float* weight, __nv_bfloat16* out,
                                       uint32_t width, float eps) {
    __shared__ float partial[32];
    const uint64_t from = rows == nullptr ? blockIdx.x : rows[blockIdx.x];
    const float* row = x + from * width;
    __nv_bfloat16* to = out + static_cast<uint64_t>(blockIdx.x) * width;
    float sum = 0.0f;
    if (width % 4 == 0) {
        for (uint32_t i = threadIdx.x; i < width / 4; i += blockDim.x) sum += squares(load4(row, i));
        const float factor = inverse_rms(block_sum(sum, partial), width, eps);
        for (uint32_t i = threadIdx.x; i < width / 4; i += blockDim.x) {
            reinterpret_cast<Bf16x4*>(to)[i] = narrow(scaled(load4(row, i), load4(weight, i), factor));
        }
        return;
    }
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) sum += row[i] * row[i];
    const float factor = inverse_rms(block_sum(sum, partial), width, eps);
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) to[i] = __float2bfloat16_rn(row[i] * factor * weight[i]);
}

// residual [T, width] += rms_norm(block) * post; then, where `next` is not null, out = rms_norm(residual) * next. One block
// a row.
extern "C" __global__ void vt_post_norm_add(const float* block, const float* post, float* residual, const float* next,
                                            __nv_bfloat16* out, uint32_t width, float eps) {
    __shared__ float partial[32];
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * width;
    const float* row = block + at;
    float* stream = residual + at;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) sum += row[i] * row[i];
    const float factor = inverse_rms(block_sum(sum, partial), width, eps);
    float next_sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        const float value = stream[i] + row[i] * factor * post[i];
        stream[i] = value;
        next_sum += value * value;
    }
    if (next == nullptr) return;
    const float next_factor = inverse_rms(block_sum(next_sum, partial), width, eps);
    // Every thread reads what it wrote itself.
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        out[at + i] = __float2bfloat16_rn(stream[i] * next_factor * next[i]);
    }
}

// angles [T, half]: cosine and sine of position * inv_freq, times `factor`. The angle is rounded to f32 before its cosine is
// taken, as on the host: at large positions the rounding is part of what models were trained with.
extern "C" __global__ void vt_rotations(const uint32_t* positions, const float* inv_freq, float factor, uint32_t half,
                                        uint32_t tokens, float2* angles) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= static_cast<uint64_t>(tokens) * half) return;
    const float angle = static_cast<float>(positions[i / half]) * inv_freq[i % half];
    double sine, cosine;
    sincos(static_cast<double>(angle), &sine, &cosine);
    angles[i] = {static_cast<float>(cosine) * factor, static_cast<float>(sine) * factor};
}

// Norms and rotates heads in place: of each row of x [T, stride], `queries` heads at `q_at` and `keys` at `k_at`, D elements
// each. Norm weights are [D], or null for no norm. The first 2 * half elements are rotated, element i with i + half, by
// angles [T, half]. One warp a head; `D <= 32 * kPerLane`.
extern "C" __global__ void vt_norm_rotate_heads(__nv_bfloat16* x, uint32_t stride, uint32_t q_at, uint32_t queries,
                                                uint32_t k_at, uint32_t keys, uint32_t dim, const float* q_norm,
                                                const float* k_norm, float eps, const float2* angles, uint32_t half) {
    constexpr uint32_t kPerLane = 16;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= queries + keys) return;
    const bool is_query = head < queries;
    const uint64_t token = blockIdx.x;
    const uint32_t column = is_query ? q_at + head * dim : k_at + (head - queries) * dim;
    __nv_bfloat16* row = x + token * stride + column;
    const float* weight = is_query ? q_norm : k_norm;

    // Lane l holds pairs l, l + 32, ... (elements i and i + half), then elements of the rest that is not rotated.
    float low[kPerLane / 2], high[kPerLane / 2], rest[kPerLane];
    const uint32_t pairs = half, tail = dim - 2 * half;
    float sum = 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < kPerLane / 2; ++j) {
        const uint32_t i = lane + 32 * j;
        if (i < pairs) {
            low[j] = __bfloat162float(row[i]);
            high[j] = __bfloat162float(row[i + half]);
            sum += low[j] * low[j] + high[j] * high[j];
        }
    }
    if (tail != 0 && weight != nullptr) {
#pragma unroll
        for (uint32_t j = 0; j < kPerLane; ++j) {
            const uint32_t i = lane + 32 * j;
            if (i < tail) {
                rest[j] = __bfloat162float(row[2 * half + i]);
                sum += rest[j] * rest[j];
            }
        }
    }
    const float factor = weight == nullptr ? 1.0f : inverse_rms(warp_sum(sum), dim, eps);
    const float2* angle = angles + token * half;
#pragma unroll
    for (uint32_t j = 0; j < kPerLane / 2; ++j) {
        const uint32_t i = lane + 32 * j;
        if (i < pairs) {
            float a = low[j], b = high[j];
            if (weight != nullptr) {
                a *= factor * weight[i];
                b *= factor * weight[i + half];
            }
            const float2 turn = angle[i];
            row[i] = __float2bfloat16_rn(a * turn.x - b * turn.y);
            row[i + half] = __float2bfloat16_rn(b * turn.x + a * turn.y);
        }
    }
    if (tail != 0 && weight != nullptr) {
#pragma unroll
        for (uint32_t j = 0; j < kPerLane; ++j) {
            const uint32_t i = lane + 32 * j;
            if (i < tail) row[2 * half + i] = __float2bfloat16_rn(rest[j] * factor * weight[2 * half + i]);
        }
    }
}
