//! Planes decode to the values of the blocks, bit for bit, and join to the bytes of the blocks.

use proptest::prelude::*;
use vt_bundle::codec::{Codec, MatrixShape, ggml};
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_bundle::pack::{PartFormat, PartSource, pack_tiled};
use vt_bundle::row_order::RowOrder;
use vt_bundle::unpack::TiledView;
use vt_convert::dequant::ggml::{check_blocks, dequantize};
use vt_convert::gguf::types::{GgmlType, TYPES, TypeClass};

/// Types that a bundle tiles.
fn tiled_types() -> Vec<&'static GgmlType> {
    TYPES.iter().filter(|t| ggml::tiled(t.id).is_some()).collect()
}

#[test]
fn every_block_type_is_tiled_or_raw_with_the_sizes_of_the_table() {
    for kind in TYPES.iter().filter(|t| t.class == TypeClass::Block) {
        let (weights, bytes) = match (ggml::tiled(kind.id), ggml::raw::by_id(kind.id)) {
            (Some(f), None) => (f.weights, f.bytes),
            (None, Some(f)) => (f.weights, f.bytes),
            _ => panic!("{}: not in exactly one table", kind.name),
        };
        assert_eq!((weights, bytes), (kind.block_weights as usize, kind.block_bytes as usize), "{}", kind.name);
    }
}

/// Random blocks without scales that are refused.
fn random_blocks(kind: &GgmlType, seed: u64, count: usize) -> Vec<u8> {
    let size = kind.block_bytes as usize;
    let mut state = seed;
    let mut bytes = Vec::with_capacity(count * size);
    while bytes.len() < count * size {
        let block: Vec<u8> = (0..size)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        if check_blocks(kind.id, &block).is_ok() {
            bytes.extend(block);
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn planes_decode_and_join(
        kind in prop::sample::select(tiled_types()),
        heads in 1usize..5,
        blocks in 1usize..4,
        permuted: bool,
        seed: u64,
    ) {
        let codec = ggml::tiled(kind.id).expect("tiled");
        let (n, k) = (heads * 18, blocks * codec.weights);
        let data = random_blocks(kind, seed, n * blocks);
        let row_order = if permuted { RowOrder::RopeInterleaved { head_dim: 18 } } else { RowOrder::Same };
        let shape = MatrixShape { n, k, group_size: codec.group_size, block: [0, 0] };
        prop_assert_eq!(codec.input_bytes(&shape, 0), Some(data.len() as u64));

        let matrix = TiledMatrix::new(codec.spec(), k as u64, &[n as u64], codec.group_size as u64, [0, 0]).expect("a layout");
        let format = PartFormat { codec, shape, row_order };
        let parts = [PartSource { format, inputs: vec![&data], all_zero: false }];
        let planes: Vec<(PlaneKind, Vec<u8>)> = matrix
            .planes()
            .map(|plane| {
                let mut bytes = vec![0xAA; matrix.plane_bytes(plane) as usize];
                pack_tiled(&matrix, &parts, plane, 0, &mut bytes);
                (plane, bytes)
            })
            .collect();
        let view = TiledView::new(&matrix, |plane| &planes.iter().find(|(p, _)| *p == plane).expect("packed").1).expect("sizes");
        prop_assert!(view.padding_is_zero());

        let mut want = vec![0f32; n * k];
        dequantize(kind.id, &data, &mut want).expect("whole blocks");
        let mut got = vec![0f32; n * k];
        view.decode_rows(0, 0..n, &mut got);
        for (row, values) in got.chunks_exact(k).enumerate() {
            let from = row_order.source_row(row) * k;
            for (column, (g, w)) in values.iter().zip(&want[from..from + k]).enumerate() {
                prop_assert_eq!(g.to_bits(), w.to_bits(), "{} row {} column {}: {} {}", kind.name, row, column, g, w);
            }
        }

        let mut back = vec![0u8; data.len()];
        view.join(0, &format, 0, 0..n, &mut back);
        prop_assert_eq!(back, data);
    }
}
