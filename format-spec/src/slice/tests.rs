//! A slice of a pack is the pack of a slice, and the ranks together are the whole.

use proptest::prelude::*;

use super::rules::{Section, Split};
use super::runs::{self, Run};
use crate::codec::hf::{fp8, nvfp4};
use crate::codec::{Codec, MatrixShape};
use crate::encoding::Span;
use crate::geometry::Geometry;
use crate::layout::TiledMatrix;
use crate::manifest::{Layout, Part, Placement, Plane, ScaleExactness, Tensor};
use crate::pack::{PartFormat, PartSource, pack_tiled};
use crate::row_order::RowOrder;

/// A matrix of one codec in the source, `[N, K]`.
struct Source {
    codec: &'static dyn Codec,
    shape: MatrixShape,
    inputs: Vec<Vec<u8>>,
}

impl Source {
    fn random(codec: &'static dyn Codec, n: usize, k: usize, group_size: usize, block: usize, seed: u64) -> Self {
        let shape = MatrixShape { n, k, group_size, block: [block, block] };
        let mut state = seed | 1;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u8
        };
        let inputs = (0..codec.inputs())
            .map(|i| (0..codec.input_bytes(&shape, i).expect("small")).map(|_| next()).collect())
            .collect();
        Self { codec, shape, inputs }
    }

    /// The rows and columns of a slice; every input is `[rows of blocks, bytes of a row]` or one scalar.
    fn cut(&self, rows: std::ops::Range<usize>, columns: std::ops::Range<usize>) -> Self {
        let MatrixShape { n, k, group_size, block } = self.shape;
        let shape = MatrixShape { n: rows.len(), k: columns.len(), group_size, block };
        let inputs = self
            .inputs
            .iter()
            .enumerate()
            .map(|(i, bytes)| {
                let Some(unit) = self.codec.unit_rows(&self.shape, i) else { return bytes.clone() };
                let height = n.div_ceil(unit);
                let width = bytes.len() / height;
                // Bytes of a row that belong to the columns; a scale per row belongs to all of them.
                let channel = i > 0 && self.codec.spec().scales[i - 1].span == Span::Channel;
                let (from, to) =
                    if channel { (0, width) } else { (columns.start * width / k, (columns.end * width).div_ceil(k)) };
                (rows.start / unit..rows.end.div_ceil(unit))
                    .flat_map(|r| bytes[r * width + from..r * width + to].to_vec())
                    .collect()
            })
            .collect();
        Self { codec: self.codec, shape, inputs }
    }

    fn part(&self) -> PartSource<'_> {
        let format = PartFormat { codec: self.codec, shape: self.shape, row_order: RowOrder::Same };
        PartSource { format, inputs: self.inputs.iter().map(Vec::as_slice).collect(), all_zero: false }
    }
}

/// The planes of parts, each packed as a whole.
fn pack(sources: &[&Source]) -> (TiledMatrix, Vec<Vec<u8>>) {
    let shape = sources[0].shape;
    let rows: Vec<u64> = sources.iter().map(|s| s.shape.n as u64).collect();
    let block = shape.block.map(|b| b as u64);
    let matrix = TiledMatrix::new(sources[0].codec.spec(), shape.k as u64, &rows, shape.group_size as u64, block);
    let matrix = matrix.expect("possible sizes");
    let parts: Vec<PartSource<'_>> = sources.iter().map(|s| s.part()).collect();
    let planes = matrix.planes().map(|plane| {
        let mut bytes = vec![0; matrix.plane_bytes(plane) as usize];
        pack_tiled(&matrix, &parts, plane, 0, &mut bytes);
        bytes
    });
    let planes = planes.collect();
    (matrix, planes)
}

fn tensor(matrix: &TiledMatrix) -> Tensor {
    let parts = matrix.parts.iter().map(|p| Part {
        name: "q_proj.weight".into(),
        source: "q_proj.weight".into(),
        row_start: p.start,
        rows: p.rows,
        row_order: RowOrder::Same,
        scale: None,
        input_scale: None,
        pre_quant_scale: None,
        low_rank: None,
    });
    Tensor {
        name: "t".into(),
        placement: Placement::Image,
        shape: vec![matrix.n(), matrix.k],
        layout: Layout::Marlin {
            encoding: matrix.spec.encoding.into(),
            group_size: None,
            block: None,
            padded_shape: [matrix.padded_n(), matrix.padded_k()],
        },
        decode: matrix.spec.decode.into(),
        scales: ScaleExactness::Exact,
        planes: matrix
            .planes()
            .map(|p| Plane {
                name: matrix.plane_name(p).into(),
                dtype: matrix.plane_dtype(p).into(),
                offset: 0,
                size: matrix.plane_bytes(p),
            })
            .collect(),
        parts: parts.collect(),
        experts: None,
        min_compute_capability: None,
    }
}

fn gather(plane: &[u8], runs: &[Run]) -> Vec<u8> {
    let ranges = runs.iter().flat_map(|r| (0..r.count).map(move |i| (r.offset + i * r.stride, r.len)));
    ranges.flat_map(|(at, len)| plane[at as usize..(at + len) as usize].to_vec()).collect()
}

fn sources(kind: usize, rows: &[usize], k: usize, seed: u64) -> Vec<Source> {
    let made = |(i, &n): (usize, &usize)| match kind {
        0 => Source::random(&nvfp4::MODELOPT, n, k, 16, 0, seed + i as u64),
        // Block scales, then channel scales.
        1 => Source::random(&fp8::CODECS[6], n, k, 0, 64, seed + i as u64),
        _ => Source::random(&fp8::CODECS[3], n, k, 0, 0, seed + i as u64),
    };
    rows.iter().enumerate().map(made).collect()
}

proptest! {
    #[test]
    fn rows_of_each_part(
        kind in 0..3usize, tiles in prop::collection::vec(1..3usize, 1..4), degree in 1..4usize, seed: u64,
    ) {
        let rows: Vec<usize> = tiles.iter().map(|t| 64 * t * degree).collect();
        let sources = sources(kind, &rows, 128, seed);
        let (matrix, planes) = pack(&sources.iter().collect::<Vec<_>>());
        let tensor = tensor(&matrix);
        let geometry = Geometry::Tiled(matrix.clone());
        for rank in 0..degree {
            for (part, source) in sources.iter().enumerate() {
                let len = rows[part] / degree;
                let section = Section { part, start: (rank * len) as u64, len: len as u64 };
                let found = runs::planes(&tensor, &geometry, Split::Rows, &[section], degree as u64);
                let (_, expected) = pack(&[&source.cut(rank * len..(rank + 1) * len, 0..128)]);
                for ((plane, runs), expected) in planes.iter().zip(found.expect("allowed")).zip(expected) {
                    prop_assert_eq!(gather(plane, &runs.runs), expected);
                }
            }
        }
    }

    #[test]
    fn columns_of_all_parts(
        kind in 0..3usize, rows in prop::collection::vec(1..150usize, 1..3), degree in 1..4usize, seed: u64,
    ) {
        let k = 64 * degree;
        let sources = sources(kind, &rows, k, seed);
        let (matrix, planes) = pack(&sources.iter().collect::<Vec<_>>());
        let tensor = tensor(&matrix);
        let geometry = Geometry::Tiled(matrix.clone());
        for rank in 0..degree {
            let columns = rank * 64..(rank + 1) * 64;
            let section = |part| Section { part, start: columns.start as u64, len: 64 };
            let sections: Vec<_> = (0..rows.len()).map(section).collect();
            let found = runs::planes(&tensor, &geometry, Split::Columns, &sections, degree as u64);
            let cut: Vec<_> = sources.iter().zip(&rows).map(|(s, &n)| s.cut(0..n, columns.clone())).collect();
            let (_, expected) = pack(&cut.iter().collect::<Vec<_>>());
            for ((plane, runs), expected) in planes.iter().zip(found.expect("allowed")).zip(expected) {
                prop_assert_eq!(gather(plane, &runs.runs), expected);
            }
        }
    }
}

#[test]
fn cuts_through_tiles_groups_and_blocks_are_refused() {
    let refused = |kind: usize, rows: usize, k: usize, split: Split, len: u64| {
        let sources = sources(kind, &[rows], k, 1);
        let (matrix, _) = pack(&sources.iter().collect::<Vec<_>>());
        let section = Section { part: 0, start: 0, len };
        let found = runs::planes(&tensor(&matrix), &Geometry::Tiled(matrix), split, &[section], 2);
        found.expect_err("refused").to_string()
    };
    assert!(
        refused(0, 352, 64, Split::Rows, 176)
            .contains("352 rows over 2 ranks are 176 each, which is not whole tiles of 64")
    );
    assert!(refused(0, 64, 48, Split::Columns, 24).contains("tiles of 16"));
    assert!(refused(1, 64, 64, Split::Columns, 32).contains("blocks of 64"));
}
