// Choosing tokens from rows of logits, with the semantics of the host's sampler (runtime/src/engine/sampling.rs): raw
// log-probabilities first, then the grammar's mask, the bias and the penalties, then temperature, min-p, top-k, top-p and the
// draw. Logits are f32 [R, V]; the few that bias and penalties change are put back afterwards.

#include "common/order.cuh"
#include "sampling/select.cuh"

namespace {

using vt::By;
using vt::kThreads;
using vt::Shared;
using vt::View;

constexpr uint32_t kTop = 20;
constexpr uint32_t kNone = 0xFFFFFFFFu;
constexpr uint32_t kPrompt = 0x80000000u;

// A token that bias or penalties change.
struct Entry {
    uint32_t token;
    float bias;
    // How often it is in the output; the highest bit: it is in the prompt.
    uint32_t count;
    // The logit as it was, while it is changed.
    float raw;
};

struct Row {
    uint64_t seed, position;
    const uint32_t* mask;
    Entry* entries;
    float temperature, top_p, min_p;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint32_t top_k, entry_count;
    // Alternatives wanted with log-probabilities; kNone: no log-probabilities.
    uint32_t logprobs;
    uint32_t unused;
};

struct Result {
    // The logarithm of the sum of exponentials of the raw logits.
    double normaliser;
    uint32_t token;
    // Bit 0: nothing can be chosen; bit 1: the raw logits have no softmax.
    uint32_t status;
    float logprob;
    uint32_t top_count;
    uint32_t top_tokens[kTop];
    float top_logprobs[kTop];
};

struct Sample {
    float* logits;
    const Row* rows;
    Result* results;
    // The same results once more where not null: memory of the host.
    Result* host_results;
    uint32_t* tokens;
    // [R, slices].
    uint64_t* best;
    // [R].
    vt::Buckets* buckets;
    uint32_t stride, size, slices;
};

// Ids of a slice; slices begin at whole words of the mask.
__device__ __forceinline__ uint2 slice_of(const Sample& p, uint32_t slice) {
    const uint32_t each = ((p.size + p.slices - 1) / p.slices + 31) / 32 * 32;
    const uint32_t begin = min(slice * each, p.size);
    return make_uint2(begin, min(begin + each, p.size));
}

constexpr uint64_t kNotANumber = ~0ull;

// The best key of a range of a row, or kNotANumber; 0 where every token is excluded. Only in thread 0. Zeros of both signs
// are equal here, as they are to `>`.
__device__ uint64_t best_of(Shared& s, const View& view, uint32_t begin, uint32_t end) {
    uint64_t best = 0;
    view.each(begin, end, [&](uint32_t id, float logit) {
        if (isnan(logit)) best = kNotANumber;
        else if (logit > -INFINITY) best = max(best, vt::key_of(logit + 0.0f, id));
    });
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(~0u, best, step));
    if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x < 32) {
        best = s.warps[threadIdx.x];
#pragma unroll
        for (uint32_t step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(~0u, best, step));
    }
    return best;
}

__device__ __forceinline__ bool has_choice(uint64_t best) {
    return best != 0 && best != kNotANumber && isfinite(vt::unordered(static_cast<uint32_t>(best >> 32)));
}

// Log-probabilities of the most likely tokens of the raw row.
__device__ void log_probabilities(Shared& s, const Row& row, const float* logits, uint32_t size, vt::Buckets& buckets,
                                  Result& result) {
    View view{logits, nullptr, size, 0.0f, 1.0, vt::kBucketsPerE, 0.0};
    for (uint32_t i = threadIdx.x; i < vt::kBuckets; i += kThreads) buckets.count[i] = 0, buckets.weight[i] = {0, 0};
    const uint64_t own = best_of(s, view, 0, size);
    if (threadIdx.x == 0) s.found = own;
    __syncthreads();
    const uint64_t best = s.found;
    if (!has_choice(best)) {
        if (threadIdx.x == 0) result.normaliser = nan(""), result.status = 2, result.top_count = 0;
        return;
    }
    view.largest = vt::unordered(static_cast<uint32_t>(best >> 32));
    vt::fill_buckets(s, view, 0, size, buckets);
    __syncthreads();
    const vt::Totals totals = vt::load_buckets(s, buckets);
    const double normaliser = static_cast<double>(view.largest) + log(static_cast<double>(totals.weight) * (1.0 / vt::kOne));
    const uint32_t top = static_cast<uint32_t>(min(static_cast<uint64_t>(min(row.logprobs, kTop)), totals.count));
    if (threadIdx.x == 0) result.normaliser = normaliser, result.status = 0, result.top_count = top;
    if (top == 0) return;
    vt::Listed listed{0, 0};
    const uint64_t least = vt::find(s, view, By::kCount, top - 1, listed).key;
    __syncthreads();
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    view.each(0, size, [&](uint32_t id, float logit) {
        const uint64_t key = vt::key_of(logit, id);
        if (key >= least) s.list[atomicAdd(&s.listed, 1)] = key;
    });
    __syncthreads();
    if (threadIdx.x < top) {
        const uint64_t key = s.list[threadIdx.x];
        uint32_t place = 0;
        for (uint32_t i = 0; i < top; ++i) place += s.list[i] > key;
        result.top_tokens[place] = vt::id_of(key);
        result.top_logprobs[place] =
            static_cast<float>(static_cast<double>(vt::unordered(static_cast<uint32_t>(key >> 32))) - normaliser);
    }
}

__device__ __forceinline__ uint64_t mix(uint64_t v) {
    v ^= v >> 30;
    v *= 0xbf58476d1ce4e5b9ull;
    v ^= v >> 27;
    v *= 0x94d049bb133111ebull;
    return v ^ (v >> 31);
}

// As runtime/src/engine/random.rs.
__device__ __forceinline__ double uniform(uint64_t seed, uint64_t counter) {
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
    const uint64_t bits = mix(mix(seed + kGolden) + (counter + 1) * kGolden);
    return static_cast<double>(bits >> 11) * (1.0 / 9007199254740992.0);
}

// A share of a sum, below the sum.
__device__ __forceinline__ uint64_t share(double part, uint64_t sum) {
    return min(static_cast<uint64_t>(part * static_cast<double>(sum)), sum - 1);
}

// Weight of a token when all may be drawn.
__device__ __forceinline__ uint64_t weight_of(const Shared& s, const View& view, float logit) {
    const uint32_t bucket = logit > -INFINITY ? view.bucket(logit) : vt::kBuckets - 1;
    return bucket < vt::kBuckets - 1 ? vt::fixed(view.weight(logit, bucket, s.powers)) : 0;
}

// Adds the weights of a range of ids to the sums of runs of kThreads ids, which are in the places of the buckets.
__device__ void fill_runs(Shared& s, const View& view, uint32_t begin, uint32_t end, vt::Buckets& row) {
    s.powers.fill();
    s.weight[threadIdx.x] = {0, 0};
    __syncthreads();
    // Slices begin at multiples of 32 ids, so that a warp's ids lie in one run.
    view.each(begin, end, [&](uint32_t id, float logit) {
        const uint64_t sum = vt::warp_sum(weight_of(s, view, logit));
        if (threadIdx.x % 32 == 0 && sum != 0) s.weight[id / kThreads].add(sum);
    });
    __syncthreads();
    const uint64_t sum = s.weight[threadIdx.x].value();
    if (sum != 0) row.weight[threadIdx.x].add(sum);
}

// The token at which the running weight in order of ids exceeds its share `draw` of all, after `fill_runs`.
__device__ uint32_t draw_from_all(Shared& s, const View& view, const vt::Buckets& runs, double draw) {
    const vt::Totals totals = vt::load_buckets(s, runs);
    uint64_t target = share(draw, totals.weight);
    vt::find_place<vt::kBuckets, false>(s, s.count, s.weight, By::kWeight, target);
    target -= s.before_weight;
    const uint32_t id = s.place * kThreads + threadIdx.x;
    const bool allowed = id < view.size && (view.mask == nullptr || (view.mask[id / 32] >> (id % 32) & 1));
    const uint64_t own = weight_of(s, view, allowed ? view.logits[id] : -INFINITY);
    const uint64_t sum = vt::scan(s, own);
    if (sum - own <= target && target < sum) s.place = id;
    __syncthreads();
    return s.place;
}

__device__ uint32_t draw_from_likely(Shared& s, const View& view, const Row& row, const vt::Buckets& buckets, double draw) {
    const vt::Totals totals = vt::load_buckets(s, buckets);
    uint64_t kept = totals.weight;
    vt::Listed listed{0, 0};
    if (row.top_k > 0 && row.top_k < totals.count) kept = vt::find(s, view, By::kCount, row.top_k - 1, listed).weight;
    if (row.top_p < 1.0f) {
        // The first sum that reaches the share: the first above the integer below it.
        const double reach = ceil(static_cast<double>(row.top_p) * static_cast<double>(kept));
        const uint64_t target = reach < 1.0 ? 0 : min(static_cast<uint64_t>(reach), kept) - 1;
        kept = vt::find(s, view, By::kWeight, target, listed).weight;
    }
    return vt::id_of(vt::find(s, view, By::kWeight, share(draw, kept), listed).key);
}

// How a row is sampled once its best token is known.
__device__ __forceinline__ View view_of(const Sample& p, const Row& row, const float* logits, uint64_t best) {
    View view{logits, row.mask, p.size, vt::unordered(static_cast<uint32_t>(best >> 32)), 0.0, 0.0f, 0.0};
    view.scale = 1.0 / static_cast<double>(row.temperature);
    view.bucket_scale = vt::kBucketsPerE / row.temperature;
    view.least = max(static_cast<double>(row.min_p), 0.0);
    return view;
}

// Whether every token may be drawn, in order of ids; otherwise the likely ones are, in order of likelihood.
__device__ __forceinline__ bool draws_from_all(const Sample& p, const Row& row) {
    return (row.top_k == 0 || row.top_k >= p.size) && row.top_p >= 1.0f && row.min_p <= 0.0f;
}

__device__ __forceinline__ uint64_t best_of_slices(const Sample& p, uint32_t row) {
    uint64_t best = 0;
    for (uint32_t i = 0; i < p.slices; ++i) best = max(best, p.best[static_cast<uint64_t>(row) * p.slices + i]);
    return best;
}

}  // namespace

// Log-probabilities of the rows that want them, then bias and penalties in place: one thread block a row.
extern "C" __global__ void __launch_bounds__(kThreads) vt_sample_prepare(const __grid_constant__ Sample p) {
    __shared__ Shared s;
    // The next kernel does not start early: its blocks would share multiprocessors with rows that take long.
    wait_for_previous();
    const Row& row = p.rows[blockIdx.x];
    float* logits = p.logits + static_cast<uint64_t>(blockIdx.x) * p.stride;
    Result& result = p.results[blockIdx.x];
    if (row.logprobs != kNone) {
        log_probabilities(s, row, logits, p.size, p.buckets[blockIdx.x], result);
        __syncthreads();
    } else if (threadIdx.x == 0) {
        result.normaliser = 0.0, result.status = 0, result.top_count = 0;
    }
    vt::Buckets& buckets = p.buckets[blockIdx.x];
    for (uint32_t i = threadIdx.x; i < vt::kBuckets; i += kThreads) buckets.count[i] = 0, buckets.weight[i] = {0, 0};
    for (uint32_t i = threadIdx.x; i < row.entry_count; i += kThreads) {
        Entry& entry = row.entries[i];
        if (entry.token >= p.size) continue;
        float logit = logits[entry.token];
        entry.raw = logit;
        // Nothing is added where there is no bias: it would change the sign of a zero.
        if (entry.bias != 0.0f) logit = __fadd_rn(logit, entry.bias);
        const uint32_t count = entry.count & ~kPrompt;
        if (row.repetition_penalty != 1.0f && entry.count != 0) {
            logit = logit > 0.0f ? __fdiv_rn(logit, row.repetition_penalty) : __fmul_rn(logit, row.repetition_penalty);
        }
        if (count != 0) {
            const float often = __fmul_rn(row.frequency_penalty, static_cast<float>(count));
            logit = __fsub_rn(logit, __fadd_rn(often, row.presence_penalty));
        }
        logits[entry.token] = logit;
    }
}

// The best token of each slice of each row: grid (slices, rows).
extern "C" __global__ void __launch_bounds__(kThreads) vt_sample_best(const __grid_constant__ Sample p) {
    __shared__ Shared s;
    let_next_start();
    wait_for_previous();
    const float* logits = p.logits + static_cast<uint64_t>(blockIdx.y) * p.stride;
    const View view{logits, p.rows[blockIdx.y].mask, p.size, 0.0f, 1.0, 1.0f, 0.0};
    const uint2 slice = slice_of(p, blockIdx.x);
    const uint64_t best = best_of(s, view, slice.x, slice.y);
    if (threadIdx.x == 0) p.best[static_cast<uint64_t>(blockIdx.y) * p.slices + blockIdx.x] = best;
}

// The buckets of the rows that draw from the likely tokens, the runs of those that draw from all: grid (slices, rows).
extern "C" __global__ void __launch_bounds__(kThreads) vt_sample_buckets(const __grid_constant__ Sample p) {
    __shared__ Shared s;
    let_next_start();
    wait_for_previous();
    const Row& row = p.rows[blockIdx.y];
    if (!(row.temperature > 0.0f)) return;
    const uint64_t best = best_of_slices(p, blockIdx.y);
    if (!has_choice(best)) return;
    const View view = view_of(p, row, p.logits + static_cast<uint64_t>(blockIdx.y) * p.stride, best);
    const uint2 slice = slice_of(p, blockIdx.x);
    if (draws_from_all(p, row)) fill_runs(s, view, slice.x, slice.y, p.buckets[blockIdx.y]);
    else vt::fill_buckets(s, view, slice.x, slice.y, p.buckets[blockIdx.y]);
}

// Chooses, and puts back the logits that bias and penalties changed: one thread block a row.
extern "C" __global__ void __launch_bounds__(kThreads) vt_sample_choose(const __grid_constant__ Sample p) {
    __shared__ Shared s;
    let_next_start();
    wait_for_previous();
    const Row& row = p.rows[blockIdx.x];
    float* logits = p.logits + static_cast<uint64_t>(blockIdx.x) * p.stride;
    Result& result = p.results[blockIdx.x];
    const uint64_t best = best_of_slices(p, blockIdx.x);
    uint32_t token = 0;
    const bool choice = has_choice(best);
    if (choice) {
        token = vt::id_of(best);
        if (row.temperature > 0.0f) {
            const View view = view_of(p, row, logits, best);
            const double draw = uniform(row.seed, row.position);
            if (draws_from_all(p, row)) token = draw_from_all(s, view, p.buckets[blockIdx.x], draw);
            else token = draw_from_likely(s, view, row, p.buckets[blockIdx.x], draw);
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < row.entry_count; i += kThreads) {
        const Entry& entry = row.entries[i];
        if (entry.token < p.size) logits[entry.token] = entry.raw;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        result.token = token;
        result.status = (result.status & 2) | (choice ? 0 : 1);
        result.logprob = 0.0f;
        if (row.logprobs != kNone) {
            result.logprob = static_cast<float>(static_cast<double>(logits[token]) - result.normaliser);
        }
        if (p.tokens != nullptr) p.tokens[blockIdx.x] = token;
    }
    __syncthreads();
    if (p.host_results != nullptr && threadIdx.x < sizeof(Result) / 8) {
        reinterpret_cast<uint64_t*>(p.host_results + blockIdx.x)[threadIdx.x] =
            reinterpret_cast<const uint64_t*>(&result)[threadIdx.x];
    }
}
