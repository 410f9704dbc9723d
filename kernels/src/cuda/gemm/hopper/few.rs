//! How a product with few rows is cut up: a tile for each multiprocessor. Pure functions of sizes.

use super::encodings::Encoding;
use super::schedule::Schedule;

/// Columns of a step along K.
const STEP: u32 = 128;
/// Bytes of shared memory of a block, at most.
const SHARED_BYTES: u32 = 232_448;
/// Steps in flight, at most.
const MAX_STAGES: u32 = 12;
/// Tile columns of a tile, of 64 rows of N, and warps that share one.
const COLUMNS: u32 = 3;
const SHARES: u32 = 4;

/// Tile of a kernel; the numbers are template arguments of `FewShape` in `few.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Part of the kernel's name.
    pub name: &'static str,
    /// Rows of activations of a tile, the most that a product may have.
    pub tokens: u32,
}

/// The shapes, as instantiated in `few.cu`.
pub(super) const SHAPES: &[Shape] = &[Shape { name: "t8", tokens: 8 }, Shape { name: "t16", tokens: 16 }];

/// Rows of N of a tile.
pub(super) const ROWS: u32 = 64 * COLUMNS;
/// Threads of a block: its consumers and two producers.
pub(super) const THREADS: u32 = 32 * COLUMNS * SHARES + 64;

impl Shape {
    /// Bytes of a step in the ring.
    const fn stage_bytes(&self, encoding: &Encoding) -> u32 {
        let scales = 2 * encoding.scale_rows * encoding.scale_bytes * ROWS;
        self.tokens * STEP * 2 + ROWS * STEP * encoding.bits / 8 + scales
    }

    /// Bytes besides the ring: what alignment to 1024 may take, and the warps' sums.
    const fn other_bytes(&self) -> u32 {
        1024 + SHARES * self.tokens * (ROWS + 4) * 4
    }

    /// Bytes of shared memory, as `kSharedBytes`: as many steps as there is room for, with two barriers each.
    pub(super) fn shared_bytes(&self, encoding: &Encoding) -> u32 {
        let stage = self.stage_bytes(encoding) + 16;
        let stages = ((SHARED_BYTES - self.other_bytes()) / stage).min(MAX_STAGES);
        self.other_bytes() + stages * stage
    }
}

/// The shape and the tiles of a product `[n, k]` with `m` rows of activations, where it has few rows and nearly as many tiles
/// as there are multiprocessors (`sms`). Kernels that divide tiles read other matrices faster.
pub(super) fn plan(n: u32, k: u32, m: u32, sms: u32) -> Option<(usize, Schedule)> {
    let shape = SHAPES.iter().position(|shape| m <= shape.tokens)?;
    let tiles = n.div_ceil(ROWS);
    let fills = tiles <= sms && u64::from(tiles) * 10 >= u64::from(sms) * 9;
    let schedule = Schedule { tiles_n: tiles, tiles_m: 1, group_m: 1, steps: k.div_ceil(STEP), split_tiles: 0 };
    fills.then_some((shape, schedule))
}

#[cfg(test)]
mod tests {
    use super::super::encodings::ENCODINGS;
    use super::*;

    #[test]
    fn shared_memory_suffices() {
        for shape in SHAPES {
            for encoding in ENCODINGS {
                let bytes = shape.shared_bytes(encoding);
                assert!(bytes <= SHARED_BYTES && bytes > 150_000, "{shape:?} {encoding:?}");
            }
        }
    }

    #[test]
    fn a_tile_for_each_multiprocessor_or_other_kernels() {
        let (shape, schedule) = plan(24_576, 4096, 9, 132).unwrap();
        assert_eq!((SHAPES[shape].name, schedule.tiles_n, schedule.steps), ("t16", 128, 32));
        assert_eq!(plan(23_000, 4100, 1, 132).map(|(shape, s)| (shape, s.tiles_n, s.steps)), Some((0, 120, 33)));
        for (n, m) in [(24_576, 17), (4096, 8), (34_816, 8), (25_408, 8)] {
            assert!(plan(n, 4096, m, 132).is_none(), "{n} {m}");
        }
    }
}
