//! How a product with few rows is cut up: a tile for each multiprocessor. Pure functions of sizes.

use super::encodings::Encoding;
use super::schedule::Schedule;

/// Columns of a step along K.
const STEP: u32 = 128;
/// Bytes of shared memory of a block, at most.
const SHARED_BYTES: u32 = 232_448;
/// The same where tokens are made, besides the tokens: seven steps of NVFP4. As in `few.cu`.
const MADE_SHARED_BYTES: u32 = 122_880;
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
    /// The kernel norms the rows itself.
    pub made: bool,
}

/// The shapes, as instantiated in `few.cu`.
pub(super) const SHAPES: &[Shape] = &[
    Shape { name: "t8", tokens: 8, made: false },
    Shape { name: "t16", tokens: 16, made: false },
    Shape { name: "made", tokens: 4, made: true },
];

/// Rows of N of a tile.
pub(super) const ROWS: u32 = 64 * COLUMNS;
/// Threads of a block that compute.
const CONSUMERS: u32 = 32 * COLUMNS * SHARES;
/// Columns of the widest rows that are normed: four pieces of four columns a thread.
const MADE_COLUMNS: u32 = 16 * CONSUMERS;

/// Rows that are normed, and how; a mirror of `FewNorm` in `few.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    pub x: u64,
    pub weight: u64,
    pub stride: u32,
    pub width: u32,
    pub eps: f32,
}

impl Shape {
    /// Threads of a block: those that compute, and a producer of weights and one of rows that are not made, a warp each.
    pub(super) const fn threads(&self) -> u32 {
        CONSUMERS + if self.made { 32 } else { 64 }
    }

    /// Bytes of a step in the ring, with its two barriers.
    const fn stage_bytes(&self, encoding: &Encoding) -> u32 {
        let scales = 2 * encoding.scale_rows * encoding.scale_bytes * ROWS;
        let rows = if self.made { 0 } else { self.tokens * STEP * 2 };
        rows + ROWS * STEP * encoding.bits / 8 + scales + 16
    }

    /// Bytes besides the ring: what alignment to 1024 may take, the warps' sums, and those of squares.
    const fn other_bytes(&self) -> u32 {
        let squares = if self.made { self.tokens * CONSUMERS / 32 * 4 } else { 0 };
        1024 + SHARES * self.tokens * (ROWS + 4) * 4 + squares
    }

    /// Bytes of shared memory, as `kSharedBytes`: as many steps as there is room for; and `m` rows of `steps` steps, where they
    /// are made.
    pub(super) fn shared_bytes(&self, encoding: &Encoding, m: u32, steps: u32) -> u32 {
        let stage = self.stage_bytes(encoding);
        let room = if self.made { MADE_SHARED_BYTES } else { SHARED_BYTES };
        let stages = ((room - self.other_bytes()) / stage).min(MAX_STAGES);
        self.other_bytes() + stages * stage + if self.made { m * steps * STEP * 2 } else { 0 }
    }

    /// The most bytes of any product.
    pub(super) fn most_shared_bytes(&self, encoding: &Encoding) -> u32 {
        self.shared_bytes(encoding, self.tokens, MADE_COLUMNS / STEP)
    }
}

/// The shape of products `[n, k]` whose `m` rows are normed on the way, where [`plan`] has tiles for them.
pub(super) fn plan_made(n: u32, k: u32, m: u32, sms: u32) -> Option<(usize, Schedule)> {
    let shape = SHAPES.iter().position(|shape| shape.made && m <= shape.tokens)?;
    let (_, schedule) = plan(n, k, m, sms).filter(|_| k <= MADE_COLUMNS)?;
    Some((shape, schedule))
}

/// The shape and the tiles of a product `[n, k]` with `m` rows of activations, where it has few rows and nearly as many tiles
/// as there are multiprocessors (`sms`). Kernels that divide tiles read other matrices faster.
pub(super) fn plan(n: u32, k: u32, m: u32, sms: u32) -> Option<(usize, Schedule)> {
    let shape = SHAPES.iter().position(|shape| !shape.made && m <= shape.tokens)?;
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
                let bytes = shape.most_shared_bytes(encoding);
                assert!(bytes <= SHARED_BYTES && bytes > 100_000, "{shape:?} {encoding:?}");
                assert!(shape.shared_bytes(encoding, 1, 32) <= bytes);
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

    #[test]
    fn few_rows_of_few_columns_are_made() {
        let (shape, schedule) = plan_made(24_576, 4096, 4, 132).unwrap();
        assert_eq!((SHAPES[shape].name, schedule.tiles_n), ("made", 128));
        assert!(plan_made(24_576, 4096, 5, 132).is_none() && plan_made(24_576, 6208, 1, 132).is_none());
        assert_eq!(size_of::<Norm>(), 32);
    }
}
