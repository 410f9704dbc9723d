//! Packing against its inverse and against a direct reading of the source, over random shapes, fusions and windows.

use proptest::prelude::*;
use vt_bundle::codec::hf::nvfp4;
use vt_bundle::codec::{Codec, MatrixShape};
use vt_bundle::float8::{E2M1, E4M3};
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_bundle::pack::{PartFormat, PartSource, pack_tiled};
use vt_bundle::row_order::RowOrder;
use vt_bundle::unpack::TiledView;

struct Part {
    shape: MatrixShape,
    weight: Vec<u8>,
    scales: Vec<u8>,
    global: [u8; 4],
    row_order: RowOrder,
}

fn part(rows: usize, k: usize, seed: u64, row_order: RowOrder) -> Part {
    let mut state = seed | 1;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    Part {
        shape: MatrixShape { n: rows, k, group_size: 16, block: [0, 0] },
        weight: (0..rows * k / 2).map(|_| next()).collect(),
        scales: (0..rows * k / 16).map(|_| next() % 0x7F).collect(),
        global: (f32::from(next()) / 1024.0 + 0.001).to_le_bytes(),
        row_order,
    }
}

impl Part {
    fn source(&self) -> PartSource<'_> {
        let format = PartFormat { codec: &nvfp4::MODELOPT, shape: self.shape, row_order: self.row_order };
        PartSource { format, inputs: vec![&self.weight, &self.scales, &self.global], all_zero: false }
    }

    /// The value of a source row and column by the source's own formula.
    fn value(&self, row: usize, k: usize) -> f32 {
        let byte = self.weight[row * self.shape.k / 2 + k / 2];
        let code = if k.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
        let scale = E4M3[self.scales[row * self.shape.k / 16 + k / 16] as usize] * f32::from_le_bytes(self.global);
        E2M1[code as usize] * scale
    }
}

fn pack_all(matrix: &TiledMatrix, sources: &[PartSource<'_>], window: usize) -> Vec<(PlaneKind, Vec<u8>)> {
    matrix
        .planes()
        .map(|plane| {
            let mut bytes = vec![0xA5; matrix.plane_bytes(plane) as usize];
            for (i, out) in bytes.chunks_mut(window).enumerate() {
                pack_tiled(matrix, sources, plane, (i * window) as u64, out);
            }
            (plane, bytes)
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn fused_nvfp4_round_trips(
        rows in prop::collection::vec(1usize..10, 1..4),
        groups in 1usize..7,
        window in 1usize..40,
        seed in any::<u64>(),
        permute in any::<bool>(),
    ) {
        let k = groups * 16;
        let order = if permute { RowOrder::RopeInterleaved { head_dim: 12 } } else { RowOrder::Same };
        let parts: Vec<Part> =
            rows.iter().enumerate().map(|(i, r)| part(r * 12, k, seed ^ i as u64, order)).collect();
        let lens: Vec<u64> = parts.iter().map(|p| p.shape.n as u64).collect();
        let matrix = TiledMatrix::new(&nvfp4::MODELOPT_SPEC, k as u64, &lens, 16, [0, 0]).expect("valid geometry");
        let sources: Vec<_> = parts.iter().map(Part::source).collect();

        let planes = pack_all(&matrix, &sources, window * 64);
        prop_assert_eq!(&planes, &pack_all(&matrix, &sources, usize::MAX >> 1));
        let view = TiledView::new(&matrix, |plane| {
            &planes.iter().find(|(p, _)| *p == plane).expect("every plane was packed").1
        }).expect("sizes agree");
        prop_assert!(view.padding_is_zero());

        for (i, p) in parts.iter().enumerate() {
            let mut values = vec![f32::NAN; p.shape.n * k];
            view.decode_rows(i, 0..p.shape.n, &mut values);
            for (at, v) in values.iter().enumerate() {
                let (row, column) = (at / k, at % k);
                prop_assert_eq!(v.to_bits(), p.value(p.row_order.source_row(row), column).to_bits());
            }
            let format = p.source().format;
            for (input, bytes) in p.source().inputs.iter().enumerate() {
                let units = format.codec.unit_rows(&p.shape, input).map_or(1, |u| p.shape.n / u);
                let mut back = vec![0x5A; bytes.len()];
                view.join(i, &format, input, 0..units, &mut back);
                prop_assert_eq!(&back[..], *bytes);
                prop_assert_eq!(Some(bytes.len() as u64), nvfp4::MODELOPT.input_bytes(&p.shape, input));
            }
        }
    }
}

#[test]
fn a_set_bit_in_the_padding_is_found() {
    let p = part(24, 32, 5, RowOrder::Same);
    let matrix = TiledMatrix::new(&nvfp4::MODELOPT_SPEC, 32, &[24], 16, [0, 0]).expect("valid geometry");
    let sources = [p.source()];
    let planes = pack_all(&matrix, &sources, usize::MAX >> 1);
    for (plane, bytes) in &planes[..2] {
        let clean: usize = (0..bytes.len())
            .filter(|&at| {
                let mut broken = bytes.clone();
                broken[at] ^= 0x11;
                let view = TiledView::new(&matrix, |q| {
                    if q == *plane { &broken } else { &planes.iter().find(|(p, _)| *p == q).expect("packed").1 }
                });
                view.expect("sizes agree").padding_is_zero()
            })
            .count();
        // 24 of 64 columns are live: a flip elsewhere must be noticed.
        assert_eq!(clean, bytes.len() * 24 / 64, "{plane:?}");
    }
}
