//! Tiles and scales taken straight from rows of the file are the same bytes as those packed code by code.

use proptest::prelude::*;
use vt_bundle::codec::{self, Band, Codec, MatrixShape};
use vt_bundle::encoding::EncodingSpec;
use vt_bundle::layout::TiledMatrix;
use vt_bundle::pack::{PartFormat, PartSource, pack_tiled};
use vt_bundle::row_order::RowOrder;

/// A codec without its short cuts.
struct Plain(&'static dyn Codec);

impl Codec for Plain {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn spec(&self) -> &'static EncodingSpec {
        self.0.spec()
    }

    fn inputs(&self) -> usize {
        self.0.inputs()
    }

    fn input_bytes(&self, shape: &MatrixShape, input: usize) -> Option<u64> {
        self.0.input_bytes(shape, input)
    }

    fn codes16(&self, shape: &MatrixShape, inputs: &[&[u8]], row: usize, k0: usize, out: &mut [u8; 16]) {
        self.0.codes16(shape, inputs, row, k0, out);
    }

    fn scale(&self, shape: &MatrixShape, inputs: &[&[u8]], plane: usize, row: usize, column: usize, out: &mut [u8]) {
        self.0.scale(shape, inputs, plane, row, column, out);
    }

    fn unit_rows(&self, shape: &MatrixShape, input: usize) -> Option<usize> {
        self.0.unit_rows(shape, input)
    }

    fn join(&self, shape: &MatrixShape, input: usize, band: &Band, out: &mut [u8]) {
        self.0.join(shape, input, band, out);
    }
}

/// Shape and inputs of a part.
type Part = (MatrixShape, Vec<Vec<u8>>);

fn sources<'a>(parts: &'a [Part], codec: &'a dyn Codec, row_order: RowOrder) -> Vec<PartSource<'a>> {
    let source = |(shape, inputs): &'a Part| PartSource {
        format: PartFormat { codec, shape: *shape, row_order },
        inputs: inputs.iter().map(Vec::as_slice).collect(),
        all_zero: false,
    };
    parts.iter().map(source).collect()
}

const CODECS: [&str; 6] =
    ["nvfp4.modelopt@1", "nvfp4.compressed-tensors@1", "mxfp4@1", "mxfp8@1", "fp8.tensor.f32@1", "fp8.block.f32@1"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn short_cuts_change_no_byte(
        name in prop::sample::select(&CODECS[..]),
        rows in prop::collection::vec(1usize..30, 1..4),
        groups in 1usize..14,
        window in 1usize..90,
        seed in any::<u64>(),
        permute in any::<bool>(),
    ) {
        let codec = codec::find(name).expect("a codec");
        let plain = Plain(codec);
        let group_size = if name.starts_with("mx") { 32 } else { 16 };
        let k = groups * group_size;
        let row_order = if permute { RowOrder::RopeInterleaved { head_dim: 8 } } else { RowOrder::Same };
        let mut state = seed | 1;
        let mut next = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u8
        };
        let parts: Vec<Part> = rows
            .iter()
            .map(|r| {
                let shape = MatrixShape { n: r * 8, k, group_size, block: [24, 40] };
                let bytes = |i| codec.input_bytes(&shape, i).expect("small");
                (shape, (0..codec.inputs()).map(|i| (0..bytes(i)).map(|_| next()).collect()).collect())
            })
            .collect();
        let lens: Vec<u64> = parts.iter().map(|(shape, _)| shape.n as u64).collect();
        let matrix = TiledMatrix::new(codec.spec(), k as u64, &lens, group_size as u64, [24, 40]).expect("geometry");
        for plane in matrix.planes() {
            let len = matrix.plane_bytes(plane) as usize;
            let mut expected = vec![0xA5; len];
            pack_tiled(&matrix, &sources(&parts, &plain, row_order), plane, 0, &mut expected);
            let mut whole = vec![0x5A; len];
            pack_tiled(&matrix, &sources(&parts, codec, row_order), plane, 0, &mut whole);
            prop_assert!(whole == expected, "{name} {plane:?}");
            let mut pieces = vec![0x5A; len];
            for (i, out) in pieces.chunks_mut(window * 64).enumerate() {
                pack_tiled(&matrix, &sources(&parts, codec, row_order), plane, (i * window * 64) as u64, out);
            }
            prop_assert!(pieces == expected, "{name} {plane:?} in windows of {}", window * 64);
        }
    }
}
