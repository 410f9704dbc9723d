//! Bodies that the compiler vectorises well: written once, compiled for each instruction set by the files beside.
//!
//! `FMA` says whether the target has fused multiply-add; without it `mul_add` would be a call.

use crate::kv_cache::BLOCK_LEN;
use crate::simd::{Acc, FloatPanel};
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
        // -inf - -inf is NaN: rows that are masked out are not passed here.
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
    let rows = q.len() / head_dim;
    let mut r = 0;
    while r + 4 <= rows {
        let q: [&[f32]; 4] = std::array::from_fn(|i| &q[(r + i) * head_dim..(r + i + 1) * head_dim]);
        let mut sums = [[0.0f32; BLOCK_LEN]; 4];
        for (d, keys) in keys.iter().enumerate().take(head_dim) {
            for (sums, q) in sums.iter_mut().zip(q) {
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum = madd::<FMA>(q[d], *key, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            scores[(r + i) * stride..(r + i) * stride + BLOCK_LEN].copy_from_slice(sums);
        }
        r += 4;
    }
    for r in r..rows {
        let q = &q[r * head_dim..(r + 1) * head_dim];
        // Two chains, since a single row has no other work to hide the latency of its sums.
        let mut sums = [[0.0f32; BLOCK_LEN]; 4];
        for (q, keys) in q.chunks(4).zip(keys.chunks(4)) {
            for ((sums, q), keys) in sums.iter_mut().zip(q).zip(keys) {
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum = madd::<FMA>(*q, *key, *sum);
                }
            }
        }
        for (i, score) in scores[r * stride..r * stride + BLOCK_LEN].iter_mut().enumerate() {
            *score = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
        }
    }
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
    let slots = values.len() / head_dim;
    for (r, out) in out.chunks_exact_mut(head_dim).enumerate() {
        let weights = &weights[r * stride..r * stride + slots];
        let (chunks, rest) = out.as_chunks_mut::<64>();
        let wide = chunks.len() * 64;
        for (i, out) in chunks.iter_mut().enumerate() {
            let mut sums = *out;
            for (w, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
                for (sum, v) in sums.iter_mut().zip(&values[64 * i..64 * i + 64]) {
                    *sum = madd::<FMA>(*w, *v, *sum);
                }
            }
            *out = sums;
        }
        for (w, values) in weights.iter().zip(values.chunks_exact(head_dim)) {
            for (sum, v) in rest.iter_mut().zip(&values[wide..]) {
                *sum = madd::<FMA>(*w, *v, *sum);
            }
        }
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
