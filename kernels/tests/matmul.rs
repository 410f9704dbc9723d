//! Products against f64 sums over weights that the encoding's own formula decoded.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, RandomMatrix, assert_close, contexts, encodings};
use vt_bundle::codec::ggml::raw;
use vt_bundle::encoding;
use vt_bundle::layout::TiledMatrix;
use vt_kernels::{
    ACTIVATION_BLOCK, Activations, Context, FloatType, MatmulScratch, RawWeight, RowsWeight, TiledWeight, Weight,
    WeightError, matmul, reference,
};

/// Compares one product in both modes on every instruction set.
fn check(
    what: &str,
    weight: &Weight<'_>,
    logical: &[std::ops::Range<usize>],
    m: usize,
    integer: bool,
    random: &mut Random,
) {
    let (k, stride) = (weight.k(), weight.out_stride());
    let x = random.activations(m * k);
    let decoded = reference::decode(weight);
    for mode in [Activations::F32, Activations::Int8] {
        // With quantised activations the reference sees what they became, so that only roundings of sums differ.
        let seen =
            if mode == Activations::Int8 && integer { reference::quantise(&x, k, ACTIVATION_BLOCK) } else { x.clone() };
        let expected = reference::matmul(&seen, &decoded, k);
        let absolute = |v: &[f32]| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
        let magnitude = reference::matmul(&absolute(&seen), &absolute(&decoded), k);
        for cx in contexts() {
            let mut out = vec![f32::NAN; m * stride];
            matmul(&cx, weight, &x, mode, &mut MatmulScratch::default(), &mut out);
            let what = format!("{what}, M {m}, K {k}, N {stride}, {mode:?}, {:?}", cx.isa());
            for row in 0..m {
                for part in logical {
                    let at = row * stride + part.start..row * stride + part.end;
                    let (out, expected, magnitude) = (&out[at.clone()], &expected[at.clone()], &magnitude[at]);
                    // Sums of K f32 terms, some with offsets that cancel.
                    assert_close(&format!("{what}, row {row}, part {part:?}"), out, expected, magnitude, 3e-6);
                }
            }
            assert!(out.iter().all(|v| !v.is_nan()), "{what}: an element was not written");
        }
    }
}

#[test]
fn every_encoding_with_one_row() {
    let mut random = Random(1);
    for case in encodings() {
        let unit = case.k_unit();
        for k in [unit, 3 * unit, 5 * unit, 37 * unit.min(16)] {
            let k = k.next_multiple_of(unit);
            // More tile columns than are walked together, and fewer.
            for (parts, logical) in [(&[100, 64, 7][..], vec![0..100, 128..192, 192..199]), (&[1500], one(1500))] {
                let matrix = case.matrix(k, parts, &mut random);
                check(case.spec.decode, &matrix.weight(), &logical, 1, case.is_integer(k), &mut random);
            }
        }
    }
}

#[test]
fn every_encoding_with_many_rows() {
    let mut random = Random(2);
    for case in encodings() {
        let unit = case.k_unit();
        for m in [2, 3, 4, 5, 7, 8, 9, 13, 70] {
            let k = unit * (1 + random.below(if unit > 100 { 2 } else { 200 / unit }));
            let n = 1 + random.below(90);
            let matrix = case.matrix(k, &[n as u64], &mut random);
            check(case.spec.decode, &matrix.weight(), &one(n), m, case.is_integer(k), &mut random);
        }
    }
}

fn one(n: usize) -> Vec<std::ops::Range<usize>> {
    std::iter::once(0..n).collect()
}

#[test]
fn rows_of_floats() {
    let mut random = Random(3);
    for dtype in [FloatType::F32, FloatType::F16, FloatType::Bf16] {
        for (n, k, m) in [(1, 1, 1), (3, 17, 2), (37, 100, 5), (64, 576, 1), (19, 31, 70), (130, 48, 9)] {
            let mut data = Vec::new();
            for _ in 0..n * k {
                let v = random.unit();
                match dtype {
                    FloatType::F32 => data.extend(v.to_le_bytes()),
                    FloatType::F16 => data.extend(half::f16::from_f32(v).to_le_bytes()),
                    FloatType::Bf16 => data.extend(half::bf16::from_f32(v).to_le_bytes()),
                }
            }
            let weight = Weight::Rows(RowsWeight::new(dtype, n, k, &data).unwrap());
            check(&format!("{dtype:?}"), &weight, &one(n), m, false, &mut random);
        }
    }
}

#[test]
fn raw_blocks_of_every_type() {
    let mut random = Random(6);
    for format in raw::FORMATS {
        for (n, blocks, m) in [(1, 1, 1), (37, 3, 1), (20, 2, 7)] {
            let k = blocks * format.weights;
            let scale = half::f16::from_f32(0.02).to_le_bytes();
            // Random bits would give scales that are not finite: bytes below 64 are finite as halves of an f16.
            let mut data: Vec<u8> = (0..n * blocks * format.bytes).map(|_| random.below(0x40) as u8).collect();
            data.chunks_exact_mut(format.bytes).for_each(|block| block[..2].copy_from_slice(&scale));
            let weight = Weight::Raw(RawWeight::new(format, n, k, &data).unwrap());
            check(format.name, &weight, &one(n), m, false, &mut random);
        }
        assert!(RawWeight::new(format, 1, format.weights / 2, &[]).is_err());
        assert!(RawWeight::new(format, usize::MAX, format.weights, &[]).is_err());
    }
}

#[test]
fn planes_that_do_not_fit_are_refused() {
    let mut random = Random(7);
    let spec = encoding::find("q4_1.ggml@1").unwrap();
    let matrix = TiledMatrix::new(spec, 64, &[64], 32, [0, 0]).unwrap();
    let (codes, scales) = ([0u8; 2048], [0u8; 256]);
    assert!(TiledWeight::new(&matrix, &[&codes, &scales, &scales]).is_ok());
    let error = TiledWeight::new(&matrix, &[&codes, &scales]).unwrap_err();
    assert!(matches!(error, WeightError::Planes { found: 2, expected: 3, .. }), "{error}");
    let error = TiledWeight::new(&matrix, &[&codes[1..], &scales, &scales]).unwrap_err();
    assert!(matches!(error, WeightError::PlaneLength { plane: "q4", found: 2047, .. }), "{error}");
    let error = RowsWeight::new(FloatType::F32, 2, random.below(5) + 3, &[0; 16]).unwrap_err();
    assert!(matches!(error, WeightError::RowsLength { found: 16, .. }), "{error}");
    assert!(RowsWeight::new(FloatType::F32, usize::MAX, 2, &[]).is_err());
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let mut random = Random(4);
    let spec = encoding::find("q4_1.ggml@1").unwrap();
    let matrix = RandomMatrix::new(spec, 256, &[320], 32, [0, 0], &mut random);
    let weight = matrix.weight();
    for m in [1, 6, 130] {
        let x = random.activations(m * 256);
        let results = [1, 2, 3].map(|threads| {
            let cx = Context::new(threads).unwrap();
            let mut out = vec![f32::NAN; m * 320];
            matmul(&cx, &weight, &x, Activations::Int8, &mut MatmulScratch::default(), &mut out);
            out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        });
        assert!(results[0] == results[1] && results[0] == results[2], "M {m}");
    }
}

#[test]
fn values_that_are_not_finite_reach_the_product() {
    let mut random = Random(5);
    let spec = encoding::find("q8_0.ggml@1").unwrap();
    let matrix = RandomMatrix::new(spec, 64, &[64], 32, [0, 0], &mut random);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for mode in [Activations::F32, Activations::Int8] {
            for cx in contexts() {
                let mut x = random.activations(64);
                x[40] = bad;
                let mut out = vec![0.0; 64];
                matmul(&cx, &matrix.weight(), &x, mode, &mut MatmulScratch::default(), &mut out);
                assert!(out.iter().any(|v| !v.is_finite()), "{bad}, {mode:?}, {:?}", cx.isa());
            }
        }
    }
}
