//! Softmax and its relatives over one row of logits.

use crate::context::Context;
use crate::simd;

/// `x = e^(x - max) / sum`. A row of nothing but minus infinity stays what it is; so does an empty one.
pub fn softmax(cx: &Context, x: &mut [f32]) {
    let max = simd::max(cx.isa(), x);
    if max == f32::NEG_INFINITY {
        return;
    }
    let sum = simd::exp_and_sum(cx.isa(), x, max);
    simd::scale(cx.isa(), x, 1.0 / sum);
}

/// The log of the sum of `e^x`, in f64: `x - log_sum_exp(x)` are the log-probabilities.
pub fn log_sum_exp(x: &[f32]) -> f64 {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    let sum: f64 = x.iter().map(|&v| (f64::from(v) - f64::from(max)).exp()).sum();
    f64::from(max) + sum.ln()
}

/// `x = x - log_sum_exp(x)`.
pub fn log_softmax(x: &mut [f32]) {
    let log_sum = log_sum_exp(x);
    for v in x {
        *v = (f64::from(*v) - log_sum) as f32;
    }
}

/// Index of the largest value, the first of equals; `None` where there is none that is not NaN.
pub fn argmax(x: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (i, &v) in x.iter().enumerate() {
        if best.is_none_or(|(_, b)| v > b) && !v.is_nan() {
            best = Some((i, v));
        }
    }
    best.map(|(i, _)| i)
}
