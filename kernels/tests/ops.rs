//! Every operator but products against its reference, on every instruction set.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, assert_close, contexts};
use vt_bundle::float8::E4M3;
use vt_kernels::activation::{self, Gate};
use vt_kernels::attention::{AttentionShape, attention};
use vt_kernels::kv_cache::{BLOCK_LEN, KvCache, KvScales, KvShape, KvType, SequenceSlots};
use vt_kernels::norm::{rms_norm, rms_norm_heads};
use vt_kernels::rope::{RopeScaling, Rotation, inverse_frequencies};
use vt_kernels::softmax::{argmax, log_softmax, softmax};
use vt_kernels::{Context, reference};

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// Compares values each to its own magnitude, with `floor` for those near zero.
fn assert_relative(what: &str, got: &[f32], expected: &[f64], tolerance: f64, floor: f64) {
    let magnitude: Vec<f64> = expected.iter().map(|e| e.abs().max(floor)).collect();
    assert_close(what, got, expected, &magnitude, tolerance);
}

#[test]
fn rms_norm_of_rows_and_heads() {
    let mut random = Random(1);
    for cx in contexts() {
        for (rows, width) in [(1, 1), (1, 576), (3, 64), (70, 576), (5, 37)] {
            let (x, weight) = (random.activations(rows * width), random.activations(width));
            let expected: Vec<f64> =
                x.chunks_exact(width).flat_map(|row| reference::rms_norm(row, &weight, 1e-5)).collect();
            let mut out = vec![f32::NAN; x.len()];
            rms_norm(&cx, &x, &weight, 1e-5, &mut out);
            assert_relative("rows", &out, &expected, 1e-5, 1e-3);

            // The same as heads between other columns, which stay as they are.
            let stride = 2 * width + 5;
            let mut wider: Vec<f32> = (0..rows).flat_map(|_| vec![7.0; stride]).collect();
            for (row, x) in wider.chunks_exact_mut(stride).zip(x.chunks_exact(width)) {
                row[3..3 + width].copy_from_slice(x);
                row[3 + width..3 + 2 * width].copy_from_slice(x);
            }
            rms_norm_heads(&cx, &mut wider, stride, 3, 2, &weight, 1e-5);
            for (row, expected) in wider.chunks_exact(stride).zip(expected.chunks_exact(width)) {
                assert_relative("head 0", &row[3..3 + width], expected, 1e-5, 1e-3);
                assert_relative("head 1", &row[3 + width..3 + 2 * width], expected, 1e-5, 1e-3);
                assert!(row[..3].iter().chain(&row[3 + 2 * width..]).all(|v| *v == 7.0));
            }
        }
    }
}

#[test]
fn gates_over_their_whole_range() {
    for cx in contexts() {
        for gate in [Gate::Silu, Gate::GeluTanh] {
            // From where the result vanishes to where it is the identity, and the ends of f32's exponent.
            let g: Vec<f32> = (-4000..4000).map(|i| i as f32 * 0.03).chain([-1e30, 1e30, 0.0, -0.0]).collect();
            let width = g.len();
            let (stride, up_at) = (2 * width + 9, width + 4);
            let mut x = vec![f32::NAN; stride * 3];
            for row in x.chunks_exact_mut(stride) {
                row[..width].copy_from_slice(&g);
                row[up_at..up_at + width].fill(1.25);
            }
            let mut out = vec![f32::NAN; 3 * width];
            activation::gated(&cx, gate, &x, stride, 0, up_at, width, &mut out);
            let expected: Vec<f64> = (0..3).flat_map(|_| g.iter().map(|g| reference::gated(gate, *g, 1.25))).collect();
            assert_relative(&format!("{gate:?}, {:?}", cx.isa()), &out, &expected, 2e-6, 1e-6);
        }
    }
}

#[test]
fn sums_scales_and_caps() {
    let mut random = Random(3);
    for cx in contexts() {
        for len in [1, 100, 100_003] {
            let (x, y) = (random.activations(len), random.activations(len));
            let mut sum = x.clone();
            activation::add(&cx, &mut sum, &y);
            assert!(sum.iter().zip(x.iter().zip(&y)).all(|(s, (x, y))| *s == x + y));
            activation::scale(&cx, &mut sum, 0.5);
            assert!(sum.iter().zip(x.iter().zip(&y)).all(|(s, (x, y))| *s == (x + y) * 0.5));
            let mut capped: Vec<f32> = x.iter().map(|v| v * 30.0).collect();
            let expected: Vec<f64> = capped.iter().map(|v| 30.0 * (f64::from(*v) / 30.0).tanh()).collect();
            activation::soft_cap(&cx, &mut capped, 30.0);
            assert_relative("cap", &capped, &expected, 1e-5, 1.0);
        }
        let mut x = vec![1.0; 12];
        activation::add_bias(&cx, &mut x, 4, 1, &[2.0, 3.0]);
        assert_eq!(x, [1.0, 3.0, 4.0, 1.0].repeat(3));
    }
}

#[test]
fn softmax_and_relatives() {
    let mut random = Random(4);
    for cx in contexts() {
        for len in [1, 15, 49_152] {
            let x: Vec<f32> = random.activations(len).iter().map(|v| v * 5.0).collect();
            let expected = reference::softmax(&wide(&x));
            let mut probabilities = x.clone();
            softmax(&cx, &mut probabilities);
            assert_relative("softmax", &probabilities, &expected, 1e-5, 1e-20);
            let mut logs = x.clone();
            log_softmax(&mut logs);
            let expected: Vec<f64> = expected.iter().map(|p| p.ln()).collect();
            assert_relative("log softmax", &logs, &expected, 1e-6, 1.0);
            let best = argmax(&x).unwrap();
            assert!(x.iter().enumerate().all(|(i, v)| *v < x[best] || i >= best && *v <= x[best]));
        }
        let mut masked = [f32::NEG_INFINITY; 5];
        softmax(&cx, &mut masked);
        assert_eq!(masked, [f32::NEG_INFINITY; 5]);
    }
    assert_eq!(argmax(&[f32::NAN, 1.0, 3.0, 3.0]), Some(2));
    assert_eq!(argmax(&[f32::NAN]), None);
}

#[test]
fn rotation_by_position() {
    let mut random = Random(5);
    let (inv_freq, factor) = inverse_frequencies(10_000.0, 16, &RopeScaling::None);
    assert_eq!((inv_freq.len(), inv_freq[0], factor), (8, 1.0, 1.0));
    for cx in contexts() {
        let positions = [0, 1, 77, 2047, 100_000];
        let (heads, dim, stride, offset) = (3, 20, 70, 4);
        let x = random.activations(positions.len() * stride);
        let mut rotation = Rotation::default();
        rotation.load(&inv_freq, 1.5, positions);
        let mut out = x.clone();
        rotation.apply(&cx, &mut out, stride, offset, heads, dim);
        for (t, position) in positions.into_iter().enumerate() {
            let mut expected = wide(&x[t * stride..(t + 1) * stride]);
            for h in 0..heads {
                let at = offset + h * dim;
                let head = &x[t * stride + at..t * stride + at + dim];
                expected[at..at + dim].copy_from_slice(&reference::rotate(head, position, &inv_freq, 1.5));
            }
            assert_relative("rotation", &out[t * stride..(t + 1) * stride], &expected, 1e-6, 20.0);
        }
    }
}

#[test]
fn scaled_frequencies_at_their_ends() {
    let (plain, _) = inverse_frequencies(500_000.0, 128, &RopeScaling::None);
    let llama3 =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
    let (scaled, factor) = inverse_frequencies(500_000.0, 128, &llama3);
    assert_eq!((scaled[0], factor), (plain[0], 1.0));
    assert_eq!(scaled[63], plain[63] / 8.0);
    assert!(scaled.iter().zip(&plain).all(|(s, p)| *s <= *p && *s >= p / 8.1));

    let yarn = RopeScaling::Yarn {
        factor: 32.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 4096.0,
        attention_factor: None,
        truncate: true,
    };
    let (scaled, factor) = inverse_frequencies(150_000.0, 64, &yarn);
    let (plain, _) = inverse_frequencies(150_000.0, 64, &RopeScaling::None);
    assert_eq!((scaled[0], scaled[31]), (plain[0], plain[31] / 32.0));
    assert!((factor - 1.346_573_6).abs() < 1e-6);

    let (linear, _) = inverse_frequencies(10_000.0, 8, &RopeScaling::Linear { factor: 4.0 });
    let divided = RopeScaling::Divisors { divisors: vec![4.0; 4], attention_factor: 1.0 };
    assert_eq!(linear, inverse_frequencies(10_000.0, 8, &divided).0);
}

/// A cache in which sequences own scattered blocks, all other slots NaN, and what they hold in order.
struct Filled {
    cache: KvCache,
    tables: Vec<Vec<u32>>,
    /// Per sequence, `[positions, kv_heads * D]`.
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

const LAYER: usize = 1;

/// The value of E4M3 that is nearest; of two, the one with the even code.
fn nearest_e4m3(v: f32) -> f32 {
    let codes = (0..0x7F).map(|code| (code, E4M3[code]));
    let distance = |value: f32| (v.abs() - value).abs();
    let nearest = codes.min_by(|a, b| distance(a.1).total_cmp(&distance(b.1)).then((a.0 % 2).cmp(&(b.0 % 2))));
    nearest.unwrap().1.copysign(v)
}

fn filled(cx: &Context, shape: KvShape, dtype: KvType, lengths: &[usize], random: &mut Random) -> Filled {
    let width = shape.kv_heads * shape.head_dim;
    let scales = KvScales { key: 0.25, value: 0.5 };
    let mut cache = KvCache::new(shape, dtype).unwrap().with_scales(vec![scales; shape.layers]);
    // Everything is NaN first: what no sequence has written must not be read.
    let all: Vec<u32> = (0..shape.blocks as u32).collect();
    let poison = vec![f32::NAN; shape.blocks * BLOCK_LEN * 2 * width];
    let whole = [SequenceSlots { start_pos: 0, tokens: shape.blocks * BLOCK_LEN, block_table: &all }];
    cache.write(cx, LAYER, &whole, &poison, 2 * width, 0, width);
    let mut free: Vec<u32> = all.clone();
    for i in (1..free.len()).rev() {
        free.swap(i, random.below(i + 1));
    }
    let tables: Vec<Vec<u32>> =
        lengths.iter().map(|len| (0..len.div_ceil(BLOCK_LEN)).map(|_| free.pop().unwrap()).collect()).collect();
    let mut out = Filled { cache, tables, keys: Vec::new(), values: Vec::new() };
    for (table, &len) in out.tables.iter().zip(lengths) {
        let rows = random.activations(len * 2 * width);
        // In two pieces, the first ending within a block.
        let cut = len / 3;
        for (start, tokens) in [(0, cut), (cut, len - cut)] {
            let slots = [SequenceSlots { start_pos: start, tokens, block_table: table }];
            out.cache.write(cx, LAYER, &slots, &rows[start * 2 * width..], 2 * width, 0, width);
        }
        let round = |v: f32, scale: f32| match dtype {
            KvType::F32 => v,
            KvType::F16 => half::f16::from_f32(v).to_f32(),
            KvType::E4m3 => nearest_e4m3(v / scale) * scale,
        };
        let column = |at: usize, scale: f32| {
            let rows = rows.chunks_exact(2 * width);
            rows.flat_map(|r| r[at..at + width].iter().map(|v| round(*v, scale))).collect()
        };
        out.keys.push(column(0, scales.key));
        out.values.push(column(width, scales.value));
    }
    out
}

#[test]
fn attention_over_scattered_blocks() {
    let mut random = Random(6);
    let shapes = [
        // heads, kv_heads, D, window, soft cap
        (9, 3, 64, None, None),
        (4, 4, 16, Some(7), None),
        (8, 1, 80, None, Some(5.0)),
        (6, 2, 24, Some(300), Some(20.0)),
    ];
    for cx in contexts() {
        for (heads, kv_heads, dim, window, soft_cap) in shapes {
            for dtype in [KvType::F32, KvType::F16, KvType::E4m3] {
                let shape = KvShape { layers: 2, kv_heads, head_dim: dim, blocks: 64 };
                // Total length and tokens of this step: a prompt, single tokens, a chunk in the middle.
                let steps = [(33, 33), (1, 1), (17, 1), (340, 1), (290, 23)];
                let lengths = steps.map(|(len, _)| len);
                let filled = filled(&cx, shape, dtype, &lengths, &mut random);
                let spec = AttentionShape { heads, scale: 1.0 / (dim as f32).sqrt(), window, soft_cap };
                let sequences: Vec<_> = steps
                    .iter()
                    .zip(&filled.tables)
                    .map(|((len, tokens), block_table)| SequenceSlots {
                        start_pos: len - tokens,
                        tokens: *tokens,
                        block_table,
                    })
                    .collect();
                for chosen in [&sequences[..], &sequences[3..4]] {
                    let skipped = if chosen.len() == 1 { 3 } else { 0 };
                    let tokens: usize = chosen.iter().map(|s| s.tokens).sum();
                    let (stride, at, width) = (heads * dim + 11, 5, heads * dim);
                    let x = random.activations(tokens * stride);
                    let mut out = vec![f32::NAN; tokens * width];
                    attention(&cx, &spec, &filled.cache, LAYER, chosen, &x, stride, at, &mut out);
                    let mut row = 0;
                    for (s, sequence) in chosen.iter().enumerate() {
                        for t in 0..sequence.tokens {
                            for h in 0..heads {
                                let q = &x[row * stride + at + h * dim..row * stride + at + (h + 1) * dim];
                                let kv = h / (heads / kv_heads);
                                let head = |all: &[f32]| -> Vec<f32> {
                                    let rows = all.chunks_exact(kv_heads * dim);
                                    rows.flat_map(|r| r[kv * dim..(kv + 1) * dim].to_vec()).collect()
                                };
                                let (keys, values) =
                                    (head(&filled.keys[s + skipped]), head(&filled.values[s + skipped]));
                                let expected = reference::attention(&spec, q, &keys, &values, sequence.start_pos + t);
                                let got = &out[row * width + h * dim..row * width + (h + 1) * dim];
                                let what =
                                    format!("{heads}/{kv_heads} x {dim}, {dtype:?}, sequence {s}, token {t}, head {h}");
                                assert_relative(&what, got, &expected, 2e-5, 1.0);
                            }
                            row += 1;
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn copied_blocks_hold_the_same() {
    let cx = Context::new(2).unwrap();
    let shape = KvShape { layers: 2, kv_heads: 2, head_dim: 8, blocks: 4 };
    let mut cache = KvCache::new(shape, KvType::F16).unwrap();
    let rows = Random(7).activations(BLOCK_LEN * 32);
    let table = [2];
    let slots = [SequenceSlots { start_pos: 0, tokens: BLOCK_LEN, block_table: &table }];
    cache.write(&cx, LAYER, &slots, &rows, 32, 0, 16);
    cache.copy_block(2, 0);
    let spec = AttentionShape { heads: 2, scale: 0.3, window: None, soft_cap: None };
    let attend = |table: &[u32]| {
        let slots = [SequenceSlots { start_pos: BLOCK_LEN - 1, tokens: 1, block_table: table }];
        let mut out = vec![f32::NAN; 16];
        attention(&cx, &spec, &cache, LAYER, &slots, &rows, 32, 0, &mut out);
        out
    };
    assert_eq!(attend(&[2]), attend(&[0]));
}
