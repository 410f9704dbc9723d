//! How a product is cut up: the shape of tiles, and who computes which. Pure functions of sizes.

use super::encodings::Encoding;

/// Tile of a kernel; the numbers are template arguments of `Shape` in `kernel.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Part of the kernel's name.
    pub name: &'static str,
    /// Blocks of 16 rows of N of a warp.
    pub blocks: u32,
    /// Tokens of a tile.
    pub tokens: u32,
    /// Consumer warpgroups of a block; one more, the producer, makes its threads.
    pub groups: u32,
    /// Blocks of a cluster, neighbours along N that share the copying of tokens.
    pub cluster: u32,
    /// Stages of the ring, for codes of 4 and of 8 bits.
    pub stages: [u32; 2],
    /// Cycles of a step of 64 columns, fitted to measurements; for codes of 4 and of 8 bits.
    pub step_cycles: [u32; 2],
}

/// The shapes, as instantiated in `entries.cuh`.
#[rustfmt::skip]
pub(super) const SHAPES: &[Shape] = &[
    Shape { name: "b1_t16", blocks: 1, tokens: 16, groups: 2, cluster: 1, stages: [24, 16], step_cycles: [600, 650] },
    Shape { name: "b2_t16", blocks: 2, tokens: 16, groups: 2, cluster: 1, stages: [16, 9], step_cycles: [856, 1000] },
    Shape { name: "b2_t16_g3", blocks: 2, tokens: 16, groups: 3, cluster: 1, stages: [10, 6], step_cycles: [1150, 1450] },
    Shape { name: "b1_t32", blocks: 1, tokens: 32, groups: 2, cluster: 1, stages: [16, 12], step_cycles: [620, 660] },
    Shape { name: "b2_t32", blocks: 2, tokens: 32, groups: 2, cluster: 1, stages: [12, 8], step_cycles: [912, 1070] },
    Shape { name: "b1_t64", blocks: 1, tokens: 64, groups: 2, cluster: 1, stages: [10, 8], step_cycles: [680, 780] },
    Shape { name: "b2_t64", blocks: 2, tokens: 64, groups: 2, cluster: 1, stages: [8, 6], step_cycles: [1036, 1100] },
    Shape { name: "b1_t128", blocks: 1, tokens: 128, groups: 2, cluster: 1, stages: [8, 6], step_cycles: [900, 950] },
    Shape { name: "b2_t128", blocks: 2, tokens: 128, groups: 2, cluster: 1, stages: [6, 5], step_cycles: [1383, 1420] },
    Shape { name: "b1_t256", blocks: 1, tokens: 256, groups: 2, cluster: 1, stages: [5, 4], step_cycles: [1170, 1220] },
    Shape { name: "b1_t256_c2", blocks: 1, tokens: 256, groups: 2, cluster: 2, stages: [5, 4], step_cycles: [1190, 1240] },
];

/// Cycles that taking in another block's sums adds, per float of a thread.
const COLLECT_FLOAT_CYCLES: u32 = 56;
/// Cycles of a tile's way out, per float of a thread.
const STORE_FLOAT_CYCLES: u32 = 24;
/// A launch that is longer runs into the power limit: then pairs of blocks that copy the tokens once for both are faster,
/// though they wait for each other.
const LONG_CYCLES: u64 = 700_000;

impl Shape {
    /// Rows of N of a tile.
    pub(super) const fn rows(&self) -> u32 {
        64 * self.blocks * self.groups
    }

    /// Threads of a block.
    pub(super) const fn threads(&self) -> u32 {
        128 * (self.groups + 1)
    }

    /// Sums of a tile.
    pub(super) const fn floats(&self) -> u32 {
        self.rows() * self.tokens
    }

    /// Sums of a thread.
    const fn thread_floats(&self) -> u32 {
        self.floats() / (128 * self.groups)
    }

    /// Bytes of shared memory, as `kSharedBytes`: the ring, each warp's way out, barriers, and what alignment to 1024 may take.
    pub(super) const fn shared_bytes(&self, encoding: &Encoding) -> u32 {
        let stages = self.stages[(encoding.bits == 8) as usize];
        let scales = encoding.scale_rows * encoding.scale_bytes * self.rows();
        let stage = self.tokens * 128 + self.rows() * 64 * encoding.bits / 8 + scales;
        let out = 4 * self.groups * 16 * (16 * self.blocks + 4) * 4;
        1024 + stages * stage + out + 16 * stages
    }
}

/// Flags of the workspace: one a block and warpgroup, of up to three, for more multiprocessors than any device has.
pub(super) const fn flag_words() -> u64 {
    256 * 3
}

/// Who computes what; a mirror of `Schedule` in `schedule.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Schedule {
    pub tiles_n: u32,
    pub tiles_m: u32,
    pub group_m: u32,
    pub steps: u32,
    pub split_tiles: u32,
}

/// A cut and its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Index among [`SHAPES`].
    pub shape: usize,
    /// Clusters.
    pub workers: u32,
    pub schedule: Schedule,
}

/// How tiles are given to workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Every tile has one worker.
    Whole,
    /// What would fill the device only in part is one line of steps, divided evenly whatever tile borders lie within.
    Line,
    /// Few tiles are divided over the same number of workers each.
    Even,
}

/// Tiles along the tokens that are walked through together: their activations stay in L2 while all of N passes.
const GROUP_M: u32 = 8;

impl Plan {
    /// The cheapest cut by the measured costs, for `sms` multiprocessors.
    pub(super) fn cheapest(n: u32, k: u32, m: u32, bits: u32, sms: u32) -> Self {
        let best = |cluster: u32| {
            let shapes = (0..SHAPES.len()).filter(move |shape| SHAPES[*shape].cluster == cluster);
            let cuts = [Cut::Whole, Cut::Line, Cut::Even];
            let plans = shapes.flat_map(|shape| cuts.map(|cut| Self::new(shape, cut, n, k, m, sms)));
            plans.min_by_key(|plan| plan.cycles(bits))
        };
        match (best(1), best(2)) {
            (Some(single), Some(paired)) if single.cycles(bits) > LONG_CYCLES => paired,
            (Some(single), _) => single,
            _ => Self::new(0, Cut::Whole, n, k, m, sms),
        }
    }

    /// One cut.
    pub(super) fn new(shape: usize, cut: Cut, n: u32, k: u32, m: u32, sms: u32) -> Self {
        let Shape { tokens, cluster, .. } = SHAPES[shape];
        let (steps, sms) = (k / 64, sms / cluster);
        let (tiles_n, tiles_m) = (n.div_ceil(SHAPES[shape].rows() * cluster), m.div_ceil(tokens));
        let tiles = tiles_n * tiles_m;
        let rest = tiles % sms;
        let (workers, split_tiles) = match cut {
            Cut::Even if tiles <= sms / 2 => (tiles * (sms / tiles).min(steps), tiles),
            // No more workers than steps: every one has something to do.
            Cut::Line if tiles < sms => ((u64::from(tiles) * u64::from(steps)).min(u64::from(sms)) as u32, tiles),
            Cut::Line if rest != 0 => (sms, rest + sms),
            _ => (tiles.min(sms), 0),
        };
        Self { shape, workers, schedule: Schedule { tiles_n, tiles_m, group_m: GROUP_M, steps, split_tiles } }
    }

    /// The cut of products of `experts` matrices with `m` rows together; who has how many is known on the device only. Nothing
    /// is split: there are many tiles.
    pub(super) fn of_experts(n: u32, k: u32, m: u32, experts: u32, sms: u32) -> Self {
        // Tiles somewhat larger than what an expert has on average.
        let name = match m / experts.max(1) {
            0..8 => "b2_t16",
            8..24 => "b2_t32",
            24..80 => "b2_t64",
            80..192 => "b2_t128",
            _ => "b1_t256",
        };
        let shape = SHAPES.iter().position(|shape| shape.name == name).unwrap_or(0);
        let Shape { tokens, cluster, .. } = SHAPES[shape];
        let tiles_n = n.div_ceil(SHAPES[shape].rows() * cluster);
        // Every expert may have a tile that is not full.
        let tiles = u64::from(tiles_n) * (u64::from(m / tokens) + u64::from(experts));
        let workers = tiles.min(u64::from(sms / cluster)) as u32;
        Self { shape, workers, schedule: Schedule { tiles_n, tiles_m: 0, group_m: 1, steps: k / 64, split_tiles: 0 } }
    }

    /// Cycles of the worker with the most work.
    fn cycles(&self, bits: u32) -> u64 {
        let shape = &SHAPES[self.shape];
        let s = &self.schedule;
        let (workers, floats) = (u64::from(self.workers), u64::from(shape.thread_floats()));
        let whole = u64::from(s.tiles_n * s.tiles_m - s.split_tiles).div_ceil(workers);
        let line = u64::from(s.split_tiles) * u64::from(s.steps);
        let mut cycles = (whole * u64::from(s.steps) + line.div_ceil(workers))
            * u64::from(shape.step_cycles[usize::from(bits == 8)]);
        cycles += (whole + line.div_ceil(workers * u64::from(s.steps))) * floats * u64::from(STORE_FLOAT_CYCLES);
        if line > 0 {
            // Workers that a tile is divided over, besides its owner; where ranges and tiles do not line up, there are more.
            let tiles = u64::from(s.split_tiles);
            let others = if workers.is_multiple_of(tiles) { workers / tiles - 1 } else { workers.div_ceil(tiles) + 1 };
            cycles += others * floats * u64::from(COLLECT_FLOAT_CYCLES);
        }
        cycles
    }
}

#[cfg(test)]
mod tests {
    use super::super::encodings::ENCODINGS;
    use super::*;

    const SMS: u32 = 132;

    #[test]
    fn every_step_has_a_block() {
        for n in [64, 320, 4096, 24576] {
            for k in [64, 512, 4096] {
                for m in [1, 64, 130, 512, 8192] {
                    for (shape, tile) in SHAPES.iter().enumerate() {
                        for cut in [Cut::Whole, Cut::Line, Cut::Even] {
                            let plan = Plan::new(shape, cut, n, k, m, SMS);
                            let s = plan.schedule;
                            assert!(plan.workers > 0 && plan.workers * tile.cluster <= SMS, "{plan:?}");
                            assert!(s.split_tiles <= s.tiles_n * s.tiles_m, "{plan:?}");
                            // A block without a step would be waited for in vain.
                            assert!(s.split_tiles == 0 || s.split_tiles * s.steps >= plan.workers, "{plan:?}");
                            assert!(s.tiles_n * tile.rows() * tile.cluster >= n && s.tiles_m * tile.tokens >= m);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn shared_memory_suffices() {
        for shape in SHAPES {
            for encoding in ENCODINGS {
                assert!(shape.shared_bytes(encoding) <= 232_448, "{shape:?} {encoding:?}");
            }
        }
    }

    #[test]
    fn choices_are_those_that_measured_best() {
        let chosen = |n, k, m| {
            let plan = Plan::cheapest(n, k, m, 4, SMS);
            (SHAPES[plan.shape].name, plan.workers * SHAPES[plan.shape].cluster, plan.schedule.split_tiles)
        };
        // Few rows.
        assert_eq!(chosen(24576, 4096, 16), ("b2_t16_g3", 128, 64));
        assert_eq!(chosen(4096, 12288, 16), ("b2_t16", 128, 16));
        assert_eq!(chosen(4096, 4096, 16), ("b1_t16", 128, 32));
        assert_eq!(chosen(24576, 4096, 32), ("b2_t32", 132, 96));
        // Few tiles: four blocks each.
        assert_eq!(chosen(4096, 4096, 64), ("b1_t64", 128, 32));
        assert_eq!(chosen(4096, 12288, 128), ("b1_t128", 128, 32));
        // Tiles for three quarters of the device.
        assert_eq!(chosen(24576, 4096, 64), ("b2_t64", 132, 96));
        assert_eq!(chosen(24576, 4096, 128), ("b2_t128", 132, 96));
        assert_eq!(chosen(24576, 4096, 512).0, "b1_t256");
        assert_eq!(chosen(4096, 12288, 512).0, "b1_t256");
        assert_eq!(chosen(24576, 4096, 8192).0, "b1_t256_c2");
    }
}
