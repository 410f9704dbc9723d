// Finding elements of a row of logits by their place in the order of likelihood, without sorting the row.
//
// The order is that of the host's sampler: larger logits first, of equals the lower id. It is held in one 64-bit key. Weights
// are e^((logit - largest) / temperature) as fixed-point numbers of 44 bits after the point, so that sums are exact: they do
// not depend on the order in which threads add, and the choice is the same whatever the batch. A row of 2^19 weights of 1
// still fits.
//
// A first pass, over which several thread blocks share a row, sorts tokens into buckets by their distance from the largest
// logit, 64 buckets per factor of e. Which bucket holds the element at a given count or sum of weights follows from a prefix
// sum; within it, the element is found from its key, eight bits at a time. One thread block does that for a row; it reads the
// row once more, for the tokens of the buckets that matter.

#pragma once

#include <cstdint>

namespace vt {

constexpr uint32_t kThreads = 1024;
constexpr uint32_t kBuckets = 2048;
constexpr float kBucketsPerE = 64.0f;
// Tokens of a bucket that are kept; larger buckets are read from the row again.
constexpr uint32_t kListed = 2048;
constexpr double kOne = 17592186044416.0;  // 2^44

// Larger is more likely. Of all floats but NaN.
__device__ __forceinline__ uint32_t ordered(float logit) {
    const uint32_t bits = __float_as_uint(logit);
    return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

__device__ __forceinline__ float unordered(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}

__device__ __forceinline__ uint64_t key_of(float logit, uint32_t id) {
    return static_cast<uint64_t>(ordered(logit)) << 32 | (0xFFFFFFFFu - id);
}

__device__ __forceinline__ uint32_t id_of(uint64_t key) { return 0xFFFFFFFFu - static_cast<uint32_t>(key); }

// e^(-i / 2) and e^(-i / 64): their products are e to a bucket's distance.
struct Powers {
    double large[kBuckets / 32], small[32];

    // By the first threads of a block, which then has to synchronise.
    __device__ __forceinline__ void fill() {
        if (threadIdx.x < kBuckets / 32) large[threadIdx.x] = exp(-0.5 * threadIdx.x);
        else if (threadIdx.x < kBuckets / 32 + 32) small[threadIdx.x % 32] = exp((threadIdx.x % 32) * (-1.0 / kBucketsPerE));
    }
};

// A weight as a fixed-point number.
__device__ __forceinline__ uint64_t fixed(double weight) { return static_cast<uint64_t>(weight * kOne); }

// A row and how its logits become weights.
struct View {
    const float* logits;
    // Bit i of word i / 32: token i is allowed; null allows all.
    const uint32_t* mask;
    uint32_t size;
    float largest;
    // 1 / temperature.
    double scale;
    float bucket_scale;
    // Tokens below it are not candidates.
    double least;

    // Weights in the last bucket, below e^-31.98, are 0 in fixed point.
    __device__ __forceinline__ uint32_t bucket(float logit) const {
        return min(__float2uint_rz((largest - logit) * bucket_scale), kBuckets - 1);
    }

    // The weight of a logit in that bucket: e to the bucket's distance, in two factors, times e to the rest, of at most 1/64
    // but for the rounding of f32, by its series; a relative error of 1e-13.
    __device__ __forceinline__ double weight(float logit, uint32_t bucket, const Powers& powers) const {
        const double distance = (static_cast<double>(largest) - static_cast<double>(logit)) * scale;
        const double x = fma(static_cast<double>(bucket), 1.0 / kBucketsPerE, -distance);
        double series = fma(x, 1.0 / 720.0, 1.0 / 120.0);
        series = fma(x, series, 1.0 / 24.0);
        series = fma(x, series, 1.0 / 6.0);
        series = fma(x, series, 0.5);
        series = fma(x, series, 1.0);
        series = fma(x, series, 1.0);
        return series * (powers.large[bucket / 32] * powers.small[bucket % 32]);
    }

    // Calls f(id, logit) for every id in begin .. end, the same number of times in every thread; ids that are not allowed or
    // beyond the end have a logit of minus infinity.
    template <typename F>
    __device__ __forceinline__ void each(uint32_t begin, uint32_t end, F f) const {
        constexpr uint32_t kAtOnce = 8;
        for (uint32_t base = begin; base < end; base += kThreads * kAtOnce) {
            float logit[kAtOnce];
#pragma unroll
            for (uint32_t j = 0; j < kAtOnce; ++j) {
                const uint32_t id = base + j * kThreads + threadIdx.x;
                const bool allowed = id < end && (mask == nullptr || (mask[id / 32] >> (id % 32) & 1));
                logit[j] = allowed ? logits[id] : -INFINITY;
            }
#pragma unroll
            for (uint32_t j = 0; j < kAtOnce; ++j) f(base + j * kThreads + threadIdx.x, logit[j]);
        }
    }
};

// 64-bit sums in shared memory as two halves: the hardware adds 32 bits at a time.
struct Sum {
    uint32_t low, high;

    __device__ __forceinline__ void add(uint64_t value) {
        const uint32_t v = static_cast<uint32_t>(value);
        uint32_t carry = static_cast<uint32_t>(value >> 32);
        if (v != 0) carry += atomicAdd(&low, v) > 0xFFFFFFFFu - v;
        if (carry != 0) atomicAdd(&high, carry);
    }
    __device__ __forceinline__ uint64_t value() const { return static_cast<uint64_t>(high) << 32 | low; }
};

// Of weights, which are 2^44 at most: half of the bits at a time, so that sums of 32 fit the hardware's 32 bits.
__device__ __forceinline__ uint64_t warp_sum(uint64_t weight) {
    const uint32_t low = __reduce_add_sync(~0u, static_cast<uint32_t>(weight) & 0x3FFFFF);
    const uint32_t high = __reduce_add_sync(~0u, static_cast<uint32_t>(weight >> 22));
    return (static_cast<uint64_t>(high) << 22) + low;
}

struct Shared {
    Powers powers;
    uint32_t count[kBuckets];
    Sum weight[kBuckets];
    uint64_t list[kListed];
    uint32_t digit_count[256];
    Sum digit_weight[256];
    uint64_t warps[32];
    // Entries of the list, or more than fit.
    uint32_t listed;
    // What a search found; see `find_place`.
    uint32_t place;
    uint64_t before_count, before_weight;
    uint64_t found;
};

// Adds to a digit's count and weight; called by whole warps. Where a warp agrees on the digit, as it does in rows of equal
// logits, it adds once.
__device__ __forceinline__ void tally(uint32_t* counts, Sum* weights, bool valid, uint32_t digit, uint64_t weight) {
    const uint32_t active = __ballot_sync(~0u, valid);
    if (active == 0) return;
    const uint32_t first = __shfl_sync(~0u, digit, __ffs(active) - 1);
    if (__all_sync(~0u, !valid || digit == first)) {
        const uint64_t sum = warp_sum(valid ? weight : 0);
        if (threadIdx.x % 32 == 0) {
            atomicAdd(counts + first, __popc(active));
            weights[first].add(sum);
        }
    } else if (valid) {
        atomicAdd(counts + digit, 1);
        weights[digit].add(weight);
    }
}

// Sum over the threads up to and including this one.
__device__ __forceinline__ uint64_t scan(Shared& s, uint64_t own) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t v = own;
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
        const uint64_t other = __shfl_up_sync(~0u, v, step);
        if (lane >= step) v += other;
    }
    __syncthreads();
    if (lane == 31) s.warps[warp] = v;
    __syncthreads();
    if (warp == 0) {
        uint64_t sum = s.warps[lane];
#pragma unroll
        for (uint32_t step = 1; step < 32; step *= 2) {
            const uint64_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        s.warps[lane] = sum;
    }
    __syncthreads();
    return warp == 0 ? v : v + s.warps[warp - 1];
}

enum class By { kCount, kWeight };

// Finds the place, of `Places` in shared memory from the first or from the last, at which the running sum exceeds `target`;
// leaves it in s.place and the sums before it in s.before_*. The caller knows that there is one.
template <uint32_t Places, bool Backwards>
__device__ __forceinline__ void find_place(Shared& s, const uint32_t* counts, const Sum* weights, By by, uint64_t target) {
    constexpr uint32_t kEach = Places > kThreads ? Places / kThreads : 1;
    uint64_t own_count = 0, own_weight = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t n = threadIdx.x * kEach + i;
        if (n >= Places) break;
        const uint32_t place = Backwards ? Places - 1 - n : n;
        own_count += counts[place];
        own_weight += weights[place].value();
    }
    const uint64_t count = scan(s, own_count) - own_count, weight = scan(s, own_weight) - own_weight;
    const uint64_t before = by == By::kCount ? count : weight, own = by == By::kCount ? own_count : own_weight;
    if (before <= target && target < before + own) {
        uint64_t c = count, w = weight;
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i) {
            const uint32_t n = threadIdx.x * kEach + i;
            const uint32_t place = Backwards ? Places - 1 - n : n;
            const uint64_t next_c = c + counts[place], next_w = w + weights[place].value();
            if (target < (by == By::kCount ? next_c : next_w)) {
                s.place = place;
                s.before_count = c, s.before_weight = w;
                break;
            }
            c = next_c, w = next_w;
        }
    }
    __syncthreads();
}

// Buckets of a row in device memory, where the thread blocks that share it add theirs.
struct Buckets {
    uint32_t count[kBuckets];
    Sum weight[kBuckets];
};

// Adds the candidates of a range of ids to the row's buckets.
__device__ __forceinline__ void fill_buckets(Shared& s, const View& view, uint32_t begin, uint32_t end, Buckets& row) {
    s.powers.fill();
    for (uint32_t i = threadIdx.x; i < kBuckets; i += kThreads) s.count[i] = 0, s.weight[i] = {0, 0};
    __syncthreads();
    uint32_t last = 0;
    view.each(begin, end, [&](uint32_t, float logit) {
        bool valid = logit > -INFINITY;
        uint32_t bucket = kBuckets - 1;
        uint64_t weight = 0;
        if (valid) {
            bucket = view.bucket(logit);
            if (bucket == kBuckets - 1) {
                // Far from the largest: no weight. Most of a vocabulary may lie here.
                last += view.least <= 0.0;
                valid = false;
            } else {
                const double w = view.weight(logit, bucket, s.powers);
                valid = w >= view.least;
                weight = fixed(w);
            }
        }
        tally(s.count, s.weight, valid, bucket, weight);
    });
    last = __reduce_add_sync(~0u, last);
    if (threadIdx.x % 32 == 0 && last != 0) atomicAdd(s.count + kBuckets - 1, last);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kBuckets; i += kThreads) {
        if (s.count[i] == 0) continue;
        atomicAdd(&row.count[i], s.count[i]);
        row.weight[i].add(s.weight[i].value());
    }
}

// What all buckets of a row hold.
struct Totals {
    uint64_t count, weight;
};

// Takes the row's buckets, complete now, for the searches.
__device__ __forceinline__ Totals load_buckets(Shared& s, const Buckets& row) {
    s.powers.fill();
    uint64_t count = 0, weight = 0;
    for (uint32_t i = threadIdx.x; i < kBuckets; i += kThreads) {
        // Past the first-level cache, which does not see what other thread blocks added.
        s.count[i] = __ldcg(&row.count[i]);
        s.weight[i] = {__ldcg(&row.weight[i].low), __ldcg(&row.weight[i].high)};
        count += s.count[i], weight += s.weight[i].value();
    }
    const uint64_t counts = scan(s, count), weights = scan(s, weight);
    if (threadIdx.x == kThreads - 1) s.before_count = counts, s.before_weight = weights;
    __syncthreads();
    const Totals totals{s.before_count, s.before_weight};
    __syncthreads();
    return totals;
}

// An element of the order, and the weight up to and including it.
struct Place {
    uint64_t key, weight;
};

// Buckets whose candidates s.list holds: first .. end; none at the beginning.
struct Listed {
    uint32_t first, end;
};

// The first element at which the running count or weight exceeds `target`, after `load_buckets`.
__device__ __forceinline__ Place find(Shared& s, const View& view, By by, uint64_t target, Listed& listed) {
    find_place<kBuckets, false>(s, s.count, s.weight, by, target);
    const uint32_t bucket = s.place;
    const uint64_t before = s.before_count, outside = s.before_weight;
    target -= by == By::kCount ? before : outside;
    const auto weight_of = [&](float logit) {
        return bucket == kBuckets - 1 ? 0 : fixed(view.weight(logit, bucket, s.powers));
    };
    const auto candidate = [&](float logit, uint32_t of) {
        return of == kBuckets - 1 ? view.least <= 0.0 : view.least <= 0.0 || view.weight(logit, of, s.powers) >= view.least;
    };
    if (bucket < listed.first || bucket >= listed.end) {
        // Everything up to this bucket where it fits: later searches look there.
        listed = {before + s.count[bucket] <= kListed ? 0 : bucket, bucket + 1};
        __syncthreads();
        if (threadIdx.x == 0) s.listed = 0;
        __syncthreads();
        view.each(0, view.size, [&](uint32_t id, float logit) {
            if (!(logit > -INFINITY)) return;
            const uint32_t of = view.bucket(logit);
            if (of < listed.first || of >= listed.end || !candidate(logit, of)) return;
            const uint32_t at = atomicAdd(&s.listed, 1);
            if (at < kListed) s.list[at] = key_of(logit, id);
        });
        __syncthreads();
    }
    const uint32_t count = s.listed;

    uint64_t prefix = 0, inside = 0, last_weight = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) s.digit_count[threadIdx.x] = 0, s.digit_weight[threadIdx.x] = {0, 0};
        __syncthreads();
        const auto add = [&](uint64_t key, bool valid, float logit) {
            valid = valid && (shift == 56 || key >> (shift + 8) == prefix);
            tally(s.digit_count, s.digit_weight, valid, key >> shift & 255, valid ? weight_of(logit) : 0);
        };
        if (count <= kListed) {
            for (uint32_t base = 0; base < count; base += kThreads) {
                const uint32_t i = base + threadIdx.x;
                const uint64_t key = i < count ? s.list[i] : 0;
                const float logit = unordered(static_cast<uint32_t>(key >> 32));
                add(key, i < count && view.bucket(logit) == bucket, logit);
            }
        } else {
            view.each(0, view.size, [&](uint32_t id, float logit) {
                const bool valid = logit > -INFINITY && view.bucket(logit) == bucket && candidate(logit, bucket);
                add(key_of(logit, id), valid, logit);
            });
        }
        __syncthreads();
        find_place<256, true>(s, s.digit_count, s.digit_weight, by, target);
        prefix = prefix << 8 | s.place;
        target -= by == By::kCount ? s.before_count : s.before_weight;
        inside += s.before_weight;
        last_weight = s.digit_weight[s.place].value();
        __syncthreads();
    }
    return {prefix, outside + inside + last_weight};
}

}  // namespace vt
