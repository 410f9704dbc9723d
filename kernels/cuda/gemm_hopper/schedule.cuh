// Which blocks compute which part of the product.
//
// The output is cut into tiles, a tile's K axis into steps of 64. The first `split_tiles` tiles form one line of steps that is divided
// evenly over the workers (a worker is a cluster of blocks), whatever tile borders lie within; the tiles after them go whole to
// the workers in turn. The worker with a tile's first step owns it: it adds what the others, in their order, have left in the
// workspace. Everyone does the divided part first, and its share of a tile that somebody else owns before its own, so that
// nobody waits for a worker that waits.
#pragma once
#include <cstdint>

namespace hopper {

struct Schedule {
    uint32_t tiles_n;      // tiles along N
    uint32_t tiles_m;      // tiles along the tokens
    uint32_t group_m;      // tiles along the tokens that are walked through together, so that both operands stay in L2
    uint32_t steps;        // steps of a tile
    uint32_t split_tiles;  // tiles that are divided over the workers
};

// A run of steps of one tile.
struct Segment {
    uint32_t tile_n, tile_m;
    uint32_t begin, end;
};

class Walk {
public:
    __device__ __forceinline__ Walk(const Schedule& schedule, uint32_t worker, uint32_t workers)
        : schedule_(schedule), workers_(workers), position_(start(schedule, worker, workers)),
          stop_(start(schedule, worker + 1, workers)), tile_(schedule.split_tiles + worker) {}

    // First step of a worker on the line of divided tiles.
    __device__ __forceinline__ static uint64_t start(const Schedule& schedule, uint32_t worker, uint32_t workers) {
        return uint64_t{schedule.split_tiles} * schedule.steps * worker / workers;
    }

    __device__ __forceinline__ bool next(Segment& segment) {
        uint32_t tile;
        if (position_ < stop_) {
            tile = static_cast<uint32_t>(position_ / schedule_.steps);
            segment.begin = static_cast<uint32_t>(position_ - uint64_t{tile} * schedule_.steps);
            const uint64_t left = stop_ - position_;
            segment.end = segment.begin + left < schedule_.steps ? segment.begin + static_cast<uint32_t>(left) : schedule_.steps;
            position_ += segment.end - segment.begin;
        } else {
            if (tile_ >= schedule_.tiles_n * schedule_.tiles_m) return false;
            tile = tile_;
            tile_ += workers_;
            segment.begin = 0;
            segment.end = schedule_.steps;
        }
        const uint32_t band = schedule_.group_m * schedule_.tiles_n;
        const uint32_t first = tile / band * schedule_.group_m;
        const uint32_t high = min(schedule_.group_m, schedule_.tiles_m - first);
        const uint32_t within = tile % band;
        segment.tile_m = first + within % high;
        segment.tile_n = within / high;
        return true;
    }

private:
    const Schedule& schedule_;
    uint32_t workers_;
    uint64_t position_, stop_;
    uint32_t tile_;
};

}  // namespace hopper
