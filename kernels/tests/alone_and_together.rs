//! A row's result does not depend on the rows beside it, bit for bit: what a request says is the same in every batch.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, contexts, encodings};
use vt_kernels::attention::{AttentionShape, attention};
use vt_kernels::kv_cache::{BLOCK_LEN, KvCache, KvShape, KvType, SequenceSlots};
use vt_kernels::{Activations, Context, FloatType, MatmulScratch, RowsWeight, Weight, matmul};

fn product(cx: &Context, weight: &Weight<'_>, x: &[f32], mode: Activations) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() / weight.k() * weight.out_stride()];
    matmul(cx, weight, x, mode, &mut MatmulScratch::default(), &mut out);
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Compares a product of many rows with products of one to nine of them.
fn check(what: &str, weight: &Weight<'_>, random: &mut Random) {
    let (k, stride, m) = (weight.k(), weight.out_stride(), 70);
    let x = random.activations(m * k);
    for cx in contexts() {
        for mode in [Activations::Int8, Activations::F32] {
            let whole = product(&cx, weight, &x, mode);
            for count in [1, 2, 3, 4, 9] {
                let first = random.below(m - count);
                let some = product(&cx, weight, &x[first * k..(first + count) * k], mode);
                let expected = &whole[first * stride..(first + count) * stride];
                assert!(
                    bits(&some) == bits(expected),
                    "{what}, {mode:?}, {:?}: rows {first} to {} differ beside others",
                    cx.isa(),
                    first + count - 1
                );
            }
        }
    }
}

#[test]
fn products_in_every_encoding() {
    let mut random = Random(21);
    for case in encodings() {
        let unit = case.k_unit();
        for k in [3 * unit, 9 * unit.min(32)].map(|k| k.next_multiple_of(unit)) {
            let matrix = case.matrix(k, &[200, 64], &mut random);
            check(&format!("{}, K {k}", case.spec.decode), &matrix.weight(), &mut random);
        }
    }
}

#[test]
fn products_with_floats() {
    let mut random = Random(22);
    let (n, k) = (37, 100);
    let data: Vec<u8> = (0..n * k).flat_map(|_| half::bf16::from_f32(random.unit()).to_le_bytes()).collect();
    check("bf16", &Weight::Rows(RowsWeight::new(FloatType::Bf16, n, k, &data).unwrap()), &mut random);
}

/// Attention of a prompt computed at once, in pieces of any size, and beside other sequences.
#[test]
fn attention_in_pieces_and_beside_others() {
    let mut random = Random(23);
    for (heads, kv_heads, dim, window, soft_cap) in
        [(9, 3, 64, None, None), (4, 4, 40, Some(150), None), (8, 1, 80, Some(20), Some(5.0)), (32, 2, 17, None, None)]
    {
        for cx in contexts() {
            let dtype = match heads {
                9 => KvType::F16,
                8 => KvType::E4m3,
                _ => KvType::F32,
            };
            let shape = KvShape { layers: 1, kv_heads, head_dim: dim, blocks: 60 };
            let mut cache = KvCache::new(shape, dtype).unwrap();
            let spec = AttentionShape { heads, scale: 1.0 / (dim as f32).sqrt(), window, soft_cap };
            let (queries, keys) = (heads * dim, kv_heads * dim);
            let stride = queries + 2 * keys;
            let (length, other_length) = (400, 77);
            let tables: [Vec<u32>; 2] = [(0..25).map(|b| 2 * b).collect(), (0..5).map(|b| 2 * b + 1).collect()];
            let rows = random.activations(length * stride);
            let other_rows = random.activations(other_length * stride);
            for (table, rows) in tables.iter().zip([&rows, &other_rows]) {
                let slots = [SequenceSlots { start_pos: 0, tokens: rows.len() / stride, block_table: table }];
                cache.write(&cx, 0, &slots, rows, stride, queries, queries + keys);
            }
            let attend = |slots: &[SequenceSlots<'_>], x: &[f32]| {
                let mut out = vec![f32::NAN; x.len() / stride * queries];
                attention(&cx, &spec, &cache, 0, slots, x, stride, 0, &mut out);
                out
            };
            let slot = |start_pos, tokens, table: usize| SequenceSlots {
                start_pos,
                tokens,
                block_table: &tables[table][..(start_pos + tokens).div_ceil(BLOCK_LEN)],
            };
            let whole = attend(&[slot(0, length, 0)], &rows);
            let mut start = 0;
            while start < length {
                let tokens = [1, 1, 2, 3, 7, 30, 64][random.below(7)].min(length - start);
                let own = &rows[start * stride..(start + tokens) * stride];
                let expected = &whole[start * queries..(start + tokens) * queries];
                let what = format!("{heads}/{kv_heads} x {dim}, {:?}, {tokens} tokens at {start}", cx.isa());
                assert!(bits(&attend(&[slot(start, tokens, 0)], own)) == bits(expected), "{what}: alone");
                let before = 1 + random.below(other_length - 1);
                let x = [&other_rows[..before * stride], own].concat();
                let beside = attend(&[slot(0, before, 1), slot(start, tokens, 0)], &x);
                assert!(bits(&beside[before * queries..]) == bits(expected), "{what}: beside {before}");
                start += tokens;
            }
        }
    }
}
