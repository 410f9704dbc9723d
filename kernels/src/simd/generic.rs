//! Bodies that the compiler vectorises well: written once, compiled for each instruction set by the files beside.
//!
//! Loops over rows are indexed, so that small arrays stay in registers.
//!
//! `FMA` says whether the target has fused multiply-add; without it `mul_add` would be a call.

#![allow(clippy::needless_range_loop)]

use crate::kv_cache::BLOCK_LEN;
use crate::simd::{Acc, FloatPanel, SCORE_CHAINS};
use crate::{fragment::FRAGMENT_ROW, recipe::STRIP_K};
use vt_bundle::tile::{TILE_K, TILE_N};

#[inline(always)]
fn madd<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `e^x` within 2 ulp for `x` in -87 to 88; below that 0 to f32's smallest normal, above it infinity; NaN stays NaN.
///
/// Cody and Waite's reduction `x = n ln 2 + r`, Taylor's polynomial of degree 7 on `|r| <= ln 2 / 2`.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    /// Adding and subtracting it rounds to an integer: 1.5 * 2^23.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts; products of the first with small integers are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x < -87.3 { -87.3 } else { x };
    let clamped = if clamped > 89.0 { 89.0 } else { clamped };
    let n = madd::<FMA>(clamped, std::f32::consts::LOG2_E, ROUND) - ROUND;
    let r = madd::<FMA>(n, -LN2_HIGH, clamped);
    let r = madd::<FMA>(n, -LN2_LOW, r);
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = madd::<FMA>(p, r, c);
    }
    // n is -126 to 128, so that two factors of 2^(n/2) are normal and 128 gives infinity where it should.
    let half = (n * 0.5 + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let n = (n + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let power = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    let value = p * power(half) * power(n.wrapping_sub(half));
    if x.is_nan() { x } else { value }
}

#[inline(always)]
pub(crate) fn silu_mul<const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *out = g / (1.0 + exp::<FMA>(-g)) * u;
    }
}

#[inline(always)]
pub(crate) fn gelu_mul<const FMA: bool>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    /// sqrt(2 / pi)
    const C: f32 = 0.797_884_6;
    for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        // 0.5 (1 + tanh(y)) = 1 / (1 + e^(-2y)).
        let y = C * madd::<FMA>(0.044_715 * g * g, g, g);
        *out = g / (1.0 + exp::<FMA>(-2.0 * y)) * u;
    }
}

#[inline(always)]
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Sixteen partial sums over `values`, added up.
#[inline(always)]
fn sum_of<const FMA: bool>(values: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    let mut sums = [0.0f32; 32];
    let (chunks, rest) = values.as_chunks::<32>();
    for chunk in chunks {
        for (sum, v) in sums.iter_mut().zip(chunk) {
            *sum = term(*v, *sum);
        }
    }
    for (sum, v) in sums.iter_mut().zip(rest) {
        *sum = term(*v, *sum);
    }
    sums.iter().sum()
}

#[inline(always)]
pub(crate) fn dot<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    let mut sums = [0.0f32; 64];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<64>(), y.as_chunks::<64>());
    for (x, y) in x.iter().zip(y) {
        for i in 0..64 {
            sums[i] = madd::<FMA>(x[i], y[i], sums[i]);
        }
    }
    for (i, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        sums[i] = madd::<FMA>(*x, *y, sums[i]);
    }
    sums.iter().sum()
}

#[inline(always)]
pub(crate) fn rms_norm<const FMA: bool>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let squares = sum_of::<FMA>(x, |v, sum| madd::<FMA>(v, v, sum));
    let factor = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    for ((out, v), w) in out.iter_mut().zip(x).zip(weight) {
        *out = v * factor * w;
    }
}

#[inline(always)]
pub(crate) fn rms_norm_in_place<const FMA: bool>(x: &mut [f32], weight: &[f32], eps: f32) {
    let squares = sum_of::<FMA>(x, |v, sum| madd::<FMA>(v, v, sum));
    let factor = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    for (v, w) in x.iter_mut().zip(weight) {
        *v = *v * factor * w;
    }
}

/// Rotates the pairs `(i, i + half)` of one head.
#[inline(always)]
pub(crate) fn rotate_half<const FMA: bool>(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, rest) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in low.iter_mut().zip(rest).zip(cos).zip(sin) {
        (*a, *b) = (madd::<FMA>(*a, *c, -(*b * s)), madd::<FMA>(*b, *c, *a * s));
    }
}

/// The largest value; NaN is ignored.
#[inline(always)]
pub(crate) fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 32];
    let (chunks, rest) = values.as_chunks::<32>();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = if *v > *lane { *v } else { *lane };
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane = if *v > *lane { *v } else { *lane };
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// `values = e^(values - shift)`; the sum of the results.
#[inline(always)]
pub(crate) fn exp_and_sum<const FMA: bool>(values: &mut [f32], shift: f32) -> f32 {
    for v in values.iter_mut() {
        *v = if *v == f32::NEG_INFINITY { 0.0 } else { exp::<FMA>(*v - shift) };
    }
    sum_of::<FMA>(values, |v, sum| v + sum)
}

/// `values = cap * tanh(values / cap)`.
#[inline(always)]
pub(crate) fn soft_cap<const FMA: bool>(values: &mut [f32], cap: f32) {
    for v in values {
        // tanh(y) = 1 - 2 / (e^(2y) + 1).
        *v = cap * (1.0 - 2.0 / (exp::<FMA>(*v / cap * 2.0) + 1.0));
    }
}

/// Scores of one block of keys `[D][16]` for rows of queries `[R][D]`: `scores[r * stride + slot]`.
#[inline(always)]
pub(crate) fn scores<const FMA: bool>(q: &[f32], keys: &[f32], head_dim: usize, scores: &mut [f32], stride: usize) {
    let keys = keys.as_chunks::<BLOCK_LEN>().0;
    let mut rows = q.chunks_exact(head_dim);
    let mut at = 0;
    loop {
        // Rows times chains of sums: enough to hide the latency of an addition.
        let left = rows.len();
        let done = match left {
            4.. => scores_of::<FMA, 4>(&mut rows, keys, &mut scores[at * stride..], stride),
            3 => scores_of::<FMA, 3>(&mut rows, keys, &mut scores[at * stride..], stride),
            2 => scores_of::<FMA, 2>(&mut rows, keys, &mut scores[at * stride..], stride),
            1 => scores_of::<FMA, 1>(&mut rows, keys, &mut scores[at * stride..], stride),
            _ => return,
        };
        at += done;
    }
}

#[inline(always)]
fn scores_of<'q, const FMA: bool, const R: usize>(
    rows: &mut impl Iterator<Item = &'q [f32]>,
    keys: &[[f32; BLOCK_LEN]],
    scores: &mut [f32],
    stride: usize,
) -> usize {
    const C: usize = SCORE_CHAINS;
    let mut q = [[].as_slice(); R];
    for q in &mut q {
        *q = rows.next().unwrap_or(&[]);
    }
    let mut sums = [[[0.0f32; BLOCK_LEN]; C]; R];
    let (chunks, rest) = keys.as_chunks::<C>();
    for (i, keys) in chunks.iter().enumerate() {
        for r in 0..R {
            let q = &q[r][C * i..C * i + C];
            for c in 0..C {
                for (sum, key) in sums[r][c].iter_mut().zip(&keys[c]) {
                    *sum = madd::<FMA>(q[c], *key, *sum);
                }
            }
        }
    }
    for (i, keys) in rest.iter().enumerate() {
        for r in 0..R {
            let q = q[r][C * chunks.len() + i];
            for (sum, key) in sums[r][0].iter_mut().zip(keys) {
                *sum = madd::<FMA>(q, *key, *sum);
            }
        }
    }
    for r in 0..R {
        let mut total = sums[r][0];
        for c in 1..C {
            for (total, sum) in total.iter_mut().zip(&sums[r][c]) {
                *total += sum;
            }
        }
        scores[r * stride..r * stride + BLOCK_LEN].copy_from_slice(&total);
    }
    R
}

/// Adds the first slots of a block of values `[slots][D]`, weighted with `weights[r * stride + slot]`, to rows `out`
/// `[R][D]`.
#[inline(always)]
pub(crate) fn weighted_values<const FMA: bool>(
    weights: &[f32],
    stride: usize,
    values: &[f32],
    head_dim: usize,
    out: &mut [f32],
) {
    let (mut weights, mut out) = (weights, out);
    loop {
        let rows = match out.len() / head_dim {
            0 => return,
            rows => rows.min(4),
        };
        let (now, later) = std::mem::take(&mut out).split_at_mut(rows * head_dim);
        match rows {
            4 => values_of::<FMA, 4>(weights, stride, values, head_dim, now),
            3 => values_of::<FMA, 3>(weights, stride, values, head_dim, now),
            2 => values_of::<FMA, 2>(weights, stride, values, head_dim, now),
            _ => values_of::<FMA, 1>(weights, stride, values, head_dim, now),
        }
        out = later;
        weights = weights.get(rows * stride..).unwrap_or(&[]);
    }
}

#[inline(always)]
fn values_of<const FMA: bool, const R: usize>(
    weights: &[f32],
    stride: usize,
    values: &[f32],
    head_dim: usize,
    out: &mut [f32],
) {
    let mut at = 0;
    while at + 64 <= head_dim {
        columns_of::<FMA, R, 64>(weights, stride, values, head_dim, at, out);
        at += 64;
    }
    while at + 16 <= head_dim {
        columns_of::<FMA, R, 16>(weights, stride, values, head_dim, at, out);
        at += 16;
    }
    while at < head_dim {
        columns_of::<FMA, R, 1>(weights, stride, values, head_dim, at, out);
        at += 1;
    }
}

/// Columns `at .. at + W`.
#[inline(always)]
fn columns_of<const FMA: bool, const R: usize, const W: usize>(
    weights: &[f32],
    stride: usize,
    values: &[f32],
    head_dim: usize,
    at: usize,
    out: &mut [f32],
) {
    let mut sums = [[0.0f32; W]; R];
    for r in 0..R {
        sums[r].copy_from_slice(&out[r * head_dim + at..r * head_dim + at + W]);
    }
    for (slot, values) in values.chunks_exact(head_dim).enumerate() {
        let values = &values[at..at + W];
        for r in 0..R {
            let weight = weights[r * stride + slot];
            for (sum, v) in sums[r].iter_mut().zip(values) {
                *sum = madd::<FMA>(weight, *v, *sum);
            }
        }
    }
    for r in 0..R {
        out[r * head_dim + at..r * head_dim + at + W].copy_from_slice(&sums[r]);
    }
}

#[inline(always)]
pub(crate) fn scale(values: &mut [f32], factor: f32) {
    for v in values {
        *v *= factor;
    }
}

/// See [`super::dot_float`].
#[inline(always)]
pub(crate) fn dot_float<const FMA: bool>(panel: &FloatPanel, len: usize, x: &[f32], stride: usize, acc: &mut [Acc]) {
    if len < STRIP_K {
        for (row, acc) in acc.iter_mut().enumerate() {
            for (k, weights) in panel.0.iter().enumerate() {
                let at = k / TILE_K * TILE_K + FRAGMENT_ROW[k % TILE_K];
                if at < len {
                    add_row::<FMA>(x[row * stride + at], weights, &mut acc.0);
                }
            }
        }
        return;
    }
    for (row, acc) in acc.iter_mut().enumerate() {
        let x = &x[row * stride..row * stride + STRIP_K];
        let mut sums = acc.0;
        for (half, panel) in panel.0.as_chunks::<TILE_K>().0.iter().enumerate() {
            for (weights, at) in panel.iter().zip(FRAGMENT_ROW) {
                add_row::<FMA>(x[half * TILE_K + at], weights, &mut sums);
            }
        }
        acc.0 = sums;
    }
}

#[inline(always)]
fn add_row<const FMA: bool>(a: f32, weights: &[f32; TILE_N], sums: &mut [f32; TILE_N]) {
    for (sum, w) in sums.iter_mut().zip(weights) {
        *sum = madd::<FMA>(a, *w, *sum);
    }
}
