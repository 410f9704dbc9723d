//! Element-wise operators: gated activations, residual sums.

use crate::context::Context;
use crate::simd;

/// Elements that one thread handles at least; less is not worth a fork.
const ELEMENTS_PER_FORK: usize = 1 << 13;

/// The function of a gated linear unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x / (1 + e^-x)`.
    Silu,
    /// GELU in its tanh form, `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    GeluTanh,
}

/// `out [M, width] = gate(g) * u`, where row `m` of `x` `[M, stride]` holds `g` at `gate_at` and `u` at `up_at`.
///
/// # Panics
/// Where the two do not fit in a row or `out` has another number of rows.
#[allow(clippy::too_many_arguments)]
pub fn gated(
    cx: &Context,
    gate: Gate,
    x: &[f32],
    stride: usize,
    gate_at: usize,
    up_at: usize,
    width: usize,
    out: &mut [f32],
) {
    assert!(gate_at.max(up_at) + width <= stride, "{width} at {gate_at} and {up_at} in rows of {stride}");
    assert_eq!(x.len() / stride, out.len() / width, "rows of input and output");
    let rows = |first: usize, out: &mut [f32]| {
        for (x, out) in x[first * stride..].chunks_exact(stride).zip(out.chunks_exact_mut(width)) {
            let (g, u) = (&x[gate_at..gate_at + width], &x[up_at..up_at + width]);
            match gate {
                Gate::Silu => simd::silu_mul(cx.isa(), g, u, out),
                Gate::GeluTanh => simd::gelu_mul(cx.isa(), g, u, out),
            }
        }
    };
    if out.len() < 2 * ELEMENTS_PER_FORK { rows(0, out) } else { cx.pool().rows(out, width, rows) }
}

/// `x += y`.
///
/// # Panics
/// Where the lengths differ.
pub fn add(cx: &Context, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "lengths of a sum");
    if x.len() < 4 * ELEMENTS_PER_FORK {
        return simd::add(cx.isa(), x, y);
    }
    cx.pool().rows(x, 1, |first, x| simd::add(cx.isa(), x, &y[first..first + x.len()]));
}

/// Adds `bias` `[width]` to every row of `x` `[M, stride]` from `offset` on.
///
/// # Panics
/// Where the bias does not fit in a row.
pub fn add_bias(cx: &Context, x: &mut [f32], stride: usize, offset: usize, bias: &[f32]) {
    assert!(offset + bias.len() <= stride, "{} at {offset} in rows of {stride}", bias.len());
    for row in x.chunks_exact_mut(stride) {
        simd::add(cx.isa(), &mut row[offset..offset + bias.len()], bias);
    }
}

/// `x *= factor` (Gemma scales its embeddings).
pub fn scale(cx: &Context, x: &mut [f32], factor: f32) {
    simd::scale(cx.isa(), x, factor);
}

/// `x = cap * tanh(x / cap)`, Gemma's bound on logits.
pub fn soft_cap(cx: &Context, x: &mut [f32], cap: f32) {
    if x.len() < 2 * ELEMENTS_PER_FORK {
        return simd::soft_cap(cx.isa(), x, cap);
    }
    cx.pool().rows(x, 1, |_, x| simd::soft_cap(cx.isa(), x, cap));
}
