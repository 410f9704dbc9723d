//! How a product with few rows is cut up: a tile, or a slice of one along K, for each multiprocessor. Pure functions of sizes.

use super::super::input::HalfNorms;
use super::encodings::Encoding;

/// Columns of K that steps are counted in.
const HALF: u32 = 64;
/// Shared memory that a block may have.
const SHARED_BYTES: u32 = 232_448;
/// Steps in flight, at most.
const MAX_STAGES: u32 = 12;
/// Slices of a tile and pieces of a column, at most; `kMaxSlices` in `few.cuh`.
const MAX_SLICES: u32 = 8;
/// Columns of K of a slice, at least: the adding up of slices takes as long as some.
const MIN_SLICE: u32 = 512;
/// Tile columns of the shapes whose blocks do pieces of columns that are left over; `kPieces` in `few.cuh`.
const PIECES_COLUMNS: u32 = 4;

/// Tile of a kernel; the numbers are template arguments of `FewShape` in `few.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Part of the kernel's name.
    pub name: &'static str,
    /// Rows of activations of a tile, the most that a product may have.
    pub tokens: u32,
    /// Tile columns of a tile, of 64 rows of N, and warps that share one.
    columns: u32,
    shares: u32,
    /// Times 64 columns of a step along K.
    pub halves: u32,
}

/// The shapes, as instantiated in `few.cu`. Where several come out equally even, the first is the fastest.
#[rustfmt::skip]
pub(super) const SHAPES: &[Shape] = &[
    Shape { name: "n2_t8", tokens: 8, columns: 2, shares: 4, halves: 2 },
    Shape { name: "n2_t16", tokens: 16, columns: 2, shares: 4, halves: 2 },
    Shape { name: "n3_t8", tokens: 8, columns: 3, shares: 4, halves: 2 },
    Shape { name: "n3_t16", tokens: 16, columns: 3, shares: 4, halves: 2 },
    Shape { name: "n4_t8", tokens: 8, columns: 4, shares: 2, halves: 2 },
    Shape { name: "n4_t16", tokens: 16, columns: 4, shares: 2, halves: 2 },
];

/// Which block computes what; a mirror of `FewCut` in `kernel.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cut {
    /// Steps of K.
    pub steps: u32,
    /// Tiles along N.
    pub tiles: u32,
    /// Slices of a tile along K, and steps of one.
    pub slices: u32,
    pub slice_steps: u32,
    /// Tile columns behind the tiles, pieces of one along K, and steps of a piece.
    pub left: u32,
    pub pieces: u32,
    pub piece_steps: u32,
}

impl Cut {
    /// Blocks of a launch.
    pub(super) const fn blocks(&self) -> u32 {
        self.tiles * self.slices
    }
}

impl Shape {
    /// Rows of N of a tile.
    pub(super) const fn rows(&self) -> u32 {
        64 * self.columns
    }

    /// Threads of a block: its consumers and two producers.
    pub(super) const fn threads(&self) -> u32 {
        32 * self.columns * self.shares + 64
    }

    /// Bytes of shared memory, as `kSharedBytes`: as many steps as there is room for, with two barriers each, at the end the
    /// warps' sums in their place; what rows and tokens are multiplied by and what is added; what alignment to 1024 may take.
    pub(super) fn shared_bytes(&self, encoding: &Encoding) -> u32 {
        let scales = encoding.scale_rows * encoding.scale_bytes * self.rows();
        let stage = self.halves * (self.tokens * HALF * 2 + self.rows() * HALF * encoding.bits / 8 + scales);
        let factors = 8 * self.rows() + 4 * self.tokens;
        let stages = ((SHARED_BYTES - 1024 - factors) / (stage + 16)).min(MAX_STAGES);
        let sums = self.shares * self.tokens * (self.rows() + 4) * 4;
        1024 + (stages * stage).max(sums) + factors + 16 * stages
    }

    /// Bytes of sums that a block gives to others, at most: of a tile, or of each warp of a column.
    const fn given_bytes(&self) -> u32 {
        let (tile, column) = (self.tokens * self.rows() * 4, self.shares * self.tokens * 64 * 4);
        if tile > column { tile } else { column }
    }

    /// The cut of a product `[n, k]` for `sms` multiprocessors.
    fn cut(&self, n: u32, k: u32, sms: u32) -> Option<Cut> {
        let (columns, steps) = (n.div_ceil(64), k.div_ceil(HALF * self.halves));
        let tiles = columns.div_ceil(self.columns);
        let whole = Cut { steps, tiles, slices: 1, slice_steps: steps, ..Cut::default() };
        if tiles <= sms {
            let slice_steps = steps.div_ceil((sms / tiles).min(MAX_SLICES));
            let slices = steps.div_ceil(slice_steps);
            return (slices == 1 || slice_steps * self.halves * HALF >= MIN_SLICE).then_some(Cut {
                slices,
                slice_steps,
                ..whole
            });
        }
        // A tile for every multiprocessor, and pieces of what is left. Their steps are whole.
        let left = columns - sms * self.columns;
        if self.columns != PIECES_COLUMNS || left > sms || !k.is_multiple_of(HALF * self.halves) {
            return None;
        }
        let piece_steps = steps.div_ceil((sms / left).min(MAX_SLICES));
        Some(Cut { tiles: sms, left, pieces: steps.div_ceil(piece_steps), piece_steps, ..whole })
    }

    /// Which halves of norms products so cut can do. Columns that are left over are stored by warps that do not know the tokens'
    /// factors; a sum of squares is of four quads of rows, which must end up in one slice.
    pub(super) const fn half_norms(&self, cut: &Cut) -> HalfNorms {
        let takes = cut.left == 0;
        HalfNorms { takes, leaves: takes && (self.rows() / 4).is_multiple_of(4 * cut.slices) }
    }

    /// Tile columns times 64 columns of K that the block with the most work has.
    const fn most_work(&self, cut: &Cut) -> u32 {
        (cut.slice_steps * self.columns + cut.piece_steps) * self.halves
    }
}

/// Bytes of a workspace for each multiprocessor.
pub(super) fn given_bytes() -> u32 {
    SHAPES.iter().map(Shape::given_bytes).max().unwrap_or(0)
}

/// The shape and the cut of a product `[n, k]` with `m` rows of activations, where it has few rows and the work comes out nearly
/// even on `sms` multiprocessors. Kernels that divide it otherwise read other matrices faster.
pub(super) fn plan(n: u32, k: u32, m: u32, sms: u32) -> Option<(usize, Cut)> {
    let tokens = SHAPES.iter().map(|shape| shape.tokens).filter(|tokens| *tokens >= m).min()?;
    let shapes = SHAPES.iter().enumerate().filter(|(_, shape)| shape.tokens == tokens);
    let cuts = shapes.filter_map(|(index, shape)| Some((index, shape.cut(n, k, sms)?)));
    let (index, cut) = cuts.min_by_key(|(index, cut)| SHAPES[*index].most_work(cut))?;
    let all = u64::from(n.div_ceil(64)) * u64::from(k.div_ceil(HALF));
    let even = all * 10 >= u64::from(SHAPES[index].most_work(&cut)) * u64::from(sms) * 9;
    even.then_some((index, cut))
}

#[cfg(test)]
mod tests {
    use super::super::encodings::ENCODINGS;
    use super::*;

    const SMS: u32 = 132;

    #[test]
    fn shared_memory_suffices() {
        for shape in SHAPES {
            for encoding in ENCODINGS {
                let bytes = shape.shared_bytes(encoding);
                assert!(bytes <= SHARED_BYTES && bytes > 90_000, "{shape:?} {encoding:?} {bytes}");
            }
        }
    }

    #[test]
    fn every_step_has_one_block() {
        for n in (64..40_000).step_by(448) {
            for k in [64, 128, 576, 2048, 4096, 4160, 12_288] {
                for shape in SHAPES {
                    let Some(cut) = shape.cut(n, k, SMS) else { continue };
                    assert!(cut.blocks() <= SMS && cut.slices <= MAX_SLICES && cut.pieces <= MAX_SLICES, "{cut:?}");
                    assert!(cut.slices * cut.slice_steps >= cut.steps, "{cut:?}");
                    assert!((cut.slices - 1) * cut.slice_steps < cut.steps, "{cut:?}");
                    assert!(cut.left * cut.pieces <= cut.tiles, "{cut:?}");
                    if cut.left > 0 {
                        assert!(cut.slices == 1 && cut.pieces * cut.piece_steps >= cut.steps, "{cut:?}");
                        assert!((cut.pieces - 1) * cut.piece_steps < cut.steps, "{cut:?}");
                    }
                    assert!((cut.tiles * shape.columns + cut.left) * 64 >= n, "{cut:?}");
                }
            }
        }
    }

    #[test]
    fn work_is_even_or_other_kernels_do_it() {
        let named =
            |n, k, m| plan(n, k, m, SMS).map(|(shape, cut)| (SHAPES[shape].name, cut.tiles, cut.slices, cut.pieces));
        assert_eq!(named(24_576, 4096, 9), Some(("n3_t16", 128, 1, 0)));
        assert_eq!(named(23_000, 4096, 1), Some(("n3_t8", 120, 1, 0)));
        assert_eq!(named(4096, 12_288, 8), Some(("n2_t8", 32, 4, 0)));
        assert_eq!(named(4096, 4096, 16), Some(("n2_t16", 32, 4, 0)));
        assert_eq!(named(6144, 4096, 16), Some(("n3_t16", 32, 4, 0)));
        assert_eq!(named(34_816, 5120, 16), Some(("n4_t16", 132, 1, 8)));
        for (n, k, m) in [(24_576, 4096, 17), (4096, 512, 8), (2048, 1024, 8), (25_408, 4096, 8)] {
            assert_eq!(named(n, k, m), None, "{n} {k} {m}");
        }
    }
}
