// Which blocks compute which part of the product.
//
// The output is cut into tiles, a tile's K axis into steps of 64. The first `split_tiles` tiles form one line of steps that is divided
// evenly over the workers (a worker is a cluster of blocks), whatever tile borders lie within; the tiles after them go whole to
// the workers in turn. The worker with a tile's first step owns it: it adds what the others, in their order, have left in the
// workspace. Everyone does the divided part first, and its share of a tile that somebody else owns before its own, so that
// nobody waits for a worker that waits.
//
// With experts, the tokens of expert e are rows offsets[e] to offsets[e + 1] and have tiles of their own; nothing is divided.
#pragma once
#include <cstdint>

namespace hopper {

// Mirrored by `Schedule` in src/cuda/gemm/hopper/schedule.rs.
struct Schedule {
    uint32_t tiles_n;      // tiles along N
    uint32_t tiles_m;      // tiles along the tokens (without experts)
    uint32_t group_m;      // tiles along the tokens that are walked through together, so that both operands stay in L2
    uint32_t steps;        // steps of a tile
    uint32_t split_tiles;  // tiles that are divided over the workers
};

// A run of steps of one tile.
struct Segment {
    uint32_t tile_n;
    uint32_t expert;
    uint32_t token, token_end;  // first token, and the end of those that belong to it (dense: of all)
    uint32_t begin, end;
};

template <int Tokens>
class Walk {
public:
    __device__ __forceinline__ Walk(const Schedule& schedule, uint32_t m, const uint32_t* offsets, uint32_t experts, uint32_t worker,
                                    uint32_t workers)
        : schedule_(schedule), offsets_(offsets), m_(m), experts_(experts), workers_(workers),
          position_(start(schedule, worker, workers)), stop_(start(schedule, worker + 1, workers)),
          tile_(schedule.split_tiles + worker) {}

    // First step of a worker on the line of divided tiles.
    __device__ __forceinline__ static uint64_t start(const Schedule& schedule, uint32_t worker, uint32_t workers) {
        return uint64_t{schedule.split_tiles} * schedule.steps * worker / workers;
    }

    __device__ __forceinline__ bool next(Segment& segment) {
        uint32_t tile = tile_;
        segment.begin = 0;
        segment.end = schedule_.steps;
        if (position_ < stop_) {
            tile = static_cast<uint32_t>(position_ / schedule_.steps);
            segment.begin = static_cast<uint32_t>(position_ - uint64_t{tile} * schedule_.steps);
            const uint64_t left = stop_ - position_;
            if (segment.begin + left < schedule_.steps) segment.end = segment.begin + static_cast<uint32_t>(left);
            position_ += segment.end - segment.begin;
        } else {
            tile_ += workers_;
        }
        return offsets_ == nullptr ? dense(tile, segment) : grouped(tile, segment);
    }

private:
    __device__ __forceinline__ bool dense(uint32_t tile, Segment& segment) {
        if (tile >= schedule_.tiles_n * schedule_.tiles_m) return false;
        const uint32_t band = schedule_.group_m * schedule_.tiles_n;
        const uint32_t first = tile / band * schedule_.group_m;
        const uint32_t high = min(schedule_.group_m, schedule_.tiles_m - first);
        const uint32_t within = tile % band;
        segment.tile_n = within / high;
        segment.expert = 0;
        segment.token = (first + within % high) * Tokens;
        segment.token_end = m_;
        return true;
    }

    __device__ __forceinline__ bool grouped(uint32_t tile, Segment& segment) {
        for (; expert_ < experts_; ++expert_) {
            const uint32_t from = offsets_[expert_], to = offsets_[expert_ + 1];
            const uint32_t high = (to - from + Tokens - 1) / Tokens;
            const uint32_t within = tile - before_;
            if (within < high * schedule_.tiles_n) {
                segment.tile_n = within / high;
                segment.expert = expert_;
                segment.token = from + within % high * Tokens;
                segment.token_end = to;
                return true;
            }
            before_ += high * schedule_.tiles_n;
        }
        return false;
    }

    const Schedule& schedule_;
    const uint32_t* offsets_;
    uint32_t m_, experts_, workers_;
    uint64_t position_, stop_;
    uint32_t tile_;
    // Experts passed by, and their tiles.
    uint32_t expert_ = 0, before_ = 0;
};

}  // namespace hopper
