//! RMS normalisation.

use crate::context::Context;
use crate::simd;

/// Elements that one thread handles at least; less is not worth a fork.
const ELEMENTS_PER_FORK: usize = 1 << 14;

/// `out = x / sqrt(mean(x^2) + eps) * weight`, over rows of `weight.len()`.
///
/// Where a checkpoint stores `weight - 1` (Gemma's convention in Hugging Face files), the caller adds the one.
///
/// # Panics
/// Where `x` and `out` differ in length or are not a whole number of rows.
pub fn rms_norm(cx: &Context, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert!(x.len() == out.len() && x.len().is_multiple_of(width), "{} and {} in rows of {width}", x.len(), out.len());
    let rows = |first: usize, out: &mut [f32]| {
        for (x, out) in x[first * width..].chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            simd::rms_norm(cx.isa(), x, weight, eps, out);
        }
    };
    if x.len() < 2 * ELEMENTS_PER_FORK { rows(0, out) } else { cx.pool().rows(out, width, rows) }
}

/// [`rms_norm`] of every head of width `weight.len()` in place: the heads `heads` of each row of `x` `[M, stride]`,
/// starting at `offset`.
///
/// # Panics
/// Where the heads do not fit in a row or `x` is not a whole number of rows.
pub fn rms_norm_heads(
    cx: &Context,
    x: &mut [f32],
    stride: usize,
    offset: usize,
    heads: usize,
    weight: &[f32],
    eps: f32,
) {
    let width = weight.len();
    assert!(offset + heads * width <= stride, "{heads} heads of {width} at {offset} in rows of {stride}");
    let rows = |_: usize, rows: &mut [f32]| {
        for row in rows.chunks_exact_mut(stride) {
            for head in row[offset..offset + heads * width].chunks_exact_mut(width) {
                simd::rms_norm_in_place(cx.isa(), head, weight, eps);
            }
        }
    };
    if x.len() < 2 * ELEMENTS_PER_FORK { rows(0, x) } else { cx.pool().rows(x, stride, rows) }
}
