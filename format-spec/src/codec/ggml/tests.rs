//! Splits invert, and planes decode like the blocks.

use proptest::prelude::*;

use super::*;
use crate::encoding::MatrixRow;

/// All tiled formats by name.
fn formats() -> impl Strategy<Value = &'static BlockFormat> {
    prop::sample::select(FORMATS.to_vec())
}

fn shape_of(format: &BlockFormat, n: usize, blocks: usize) -> MatrixShape {
    MatrixShape { n, k: blocks * format.weights, group_size: format.group_size, block: [0, 0] }
}

/// All rows of a matrix as a band.
fn split(format: &BlockFormat, shape: &MatrixShape, data: &[u8]) -> Band {
    let mut band = Band { first: 0, rows: shape.n, codes: vec![0xAA; shape.n * shape.k], ..Band::default() };
    for row in 0..shape.n {
        for (i, codes) in band.codes[row * shape.k..(row + 1) * shape.k].as_chunks_mut::<16>().0.iter_mut().enumerate()
        {
            format.codes16(shape, &[data], row, 16 * i, codes);
        }
        for (plane, spec) in format.spec.scales.iter().enumerate() {
            let columns = format.elements(plane) * (shape.k / format.weights);
            for column in 0..columns {
                let mut element = [0u8; 2];
                let element = &mut element[..spec.dtype.bytes()];
                format.scale(shape, &[data], plane, row, column, element);
                band.scales[plane].extend_from_slice(element);
            }
        }
    }
    band
}

proptest! {
    #[test]
    fn join_gives_every_bit_of_the_blocks_back(format in formats(), n in 1usize..4, blocks in 1usize..3, seed: u64) {
        let shape = shape_of(format, n, blocks);
        let len = format.input_bytes(&shape, 0).expect("small") as usize;
        let data = bytes(seed, len);
        let band = split(format, &shape, &data);
        let mut back = vec![0x55; len];
        format.join(&shape, 0, &band, &mut back);
        prop_assert_eq!(back, data);
    }

    #[test]
    fn codes_stay_within_their_planes(format in formats(), seed: u64) {
        let shape = shape_of(format, 1, 1);
        let band = split(format, &shape, &bytes(seed, format.bytes));
        let bits: u32 = format.spec.codes.iter().map(|p| p.bits).sum();
        prop_assert!(band.codes.iter().all(|&c| u32::from(c) < 1 << bits));
    }
}

/// Bytes from a 64-bit linear congruential generator (Knuth's constants): a long shrinkable vector would be slower.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

fn decode(format: &BlockFormat, data: &[u8]) -> Vec<f32> {
    let shape = shape_of(format, 1, data.len() / format.bytes);
    let band = split(format, &shape, data);
    let mut scales = [&[][..]; MAX_SCALE_PLANES];
    for (plane, s) in scales.iter_mut().enumerate() {
        *s = band.row_scales(plane, 0);
    }
    let row = MatrixRow { codes: &band.codes, scales, group_size: format.group_size, block: [0, 0] };
    let mut out = vec![f32::NAN; shape.k];
    (format.spec.decode_row)(&row, &mut out);
    out
}

#[test]
fn codes_are_in_the_order_of_k() {
    // Q4_0, d = 1: byte j is (15 - j, j), so that weights run 0 to 15, then 15 to 0.
    let mut block = vec![0x00, 0x3c];
    block.extend((0..16u8).map(|j| (15 - j) << 4 | j));
    let want: Vec<f32> = (0..16).chain((0..16).rev()).map(|q| q as f32 - 8.0).collect();
    assert_eq!(decode(&legacy::Q4_0, &block), want);
}

#[test]
fn scales_of_float_types_at_their_edges() {
    assert_eq!(fp4::half_e8m0(0), 2f32.powi(-128));
    assert_eq!(fp4::half_e8m0(1), 2f32.powi(-127));
    assert_eq!(fp4::half_e8m0(254), 2f32.powi(126));
    assert_eq!(fp4::half_ue4m3(0x7f), 0.0);
    assert_eq!(fp4::half_ue4m3(0xff), 240.0);
    assert_eq!(fp4::half_ue4m3(0x01), 2f32.powi(-10));
    assert_eq!(fp4::half_ue4m3(0x38), 0.5);
}

#[test]
fn every_encoding_is_found_by_name_and_fits_the_bits_of_its_source() {
    for format in FORMATS {
        assert!(crate::codec::find(format.name()).is_some(), "{}", format.name());
        assert!(crate::encoding::find(format.spec.decode).is_some(), "{}", format.spec.decode);
        let code_bits: usize = format.spec.codes.iter().map(|p| p.bits as usize).sum();
        let scale_bits: f64 = (0..format.spec.scales.len())
            .map(|p| (format.elements(p) * 8 * format.spec.scales[p].dtype.bytes()) as f64)
            .sum();
        let bits = code_bits as f64 + scale_bits / format.weights as f64;
        let source = (8 * format.bytes) as f64 / format.weights as f64;
        assert!(bits >= source && bits <= 1.04 * source, "{}: {bits} of {source}", format.name());
    }
}
