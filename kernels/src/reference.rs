//! Every operator again, as it is written in papers: scalar, f64 sums, no blocks, no threads. Tests measure the fast
//! operators against these; nothing else calls them.

use crate::activation::Gate;
use crate::attention::AttentionShape;
use crate::weight::Weight;

/// `[M, N] = x [M, K] * w [N, K]^T`, summed in f64.
pub fn matmul(x: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for x in x.chunks_exact(k) {
        for w in w.chunks_exact(k) {
            out.push(x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum());
        }
    }
    out
}

/// All rows of a matrix `[out_stride, K]`, decoded by the encoding's own formula.
pub fn decode(weight: &Weight<'_>) -> Vec<f32> {
    let k = weight.k();
    let mut rows = vec![0.0; weight.out_stride() * k];
    for (n, row) in rows.chunks_exact_mut(k).enumerate() {
        weight.decode_row(n, row);
    }
    rows
}

/// What activations `[M, K]` become when they are quantised in blocks of `block` along K to 8 bits: `code * scale`, with
/// `scale = absmax / 127` and `code = round(x * (127 / absmax))`, ties to even, all in f32.
pub fn quantise(x: &[f32], k: usize, block: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(k) {
        for block in row.chunks(block) {
            let absmax = block.iter().fold(0.0f32, |max, v| max.max(v.abs()));
            let (scale, inverse) = if absmax > 0.0 { (absmax / 127.0, 127.0 / absmax) } else { (0.0, 0.0) };
            out.extend(block.iter().map(|v| (v * inverse).round_ties_even() * scale));
        }
    }
    out
}

/// `x / sqrt(mean(x^2) + eps) * weight` of one row.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(v, w)| f64::from(*v) * factor * f64::from(*w)).collect()
}

/// One head rotated for a position: pairs `(i, i + half)`, elements from `2 half` on unchanged.
pub fn rotate(head: &[f32], position: usize, inv_freq: &[f32], factor: f32) -> Vec<f64> {
    let half = inv_freq.len();
    let mut out: Vec<f64> = head.iter().map(|v| f64::from(*v)).collect();
    for (i, f) in inv_freq.iter().enumerate() {
        let (sin, cos) = f64::from(position as f32 * f).sin_cos();
        let (sin, cos) = (sin * f64::from(factor), cos * f64::from(factor));
        let (a, b) = (f64::from(head[i]), f64::from(head[i + half]));
        out[i] = a * cos - b * sin;
        out[i + half] = b * cos + a * sin;
    }
    out
}

/// `gate(g) * u`.
pub fn gated(gate: Gate, g: f32, u: f32) -> f64 {
    let g = f64::from(g);
    let activated = match gate {
        Gate::Silu => g / (1.0 + (-g).exp()),
        Gate::GeluTanh => {
            let c = (2.0 / std::f64::consts::PI).sqrt();
            0.5 * g * (1.0 + (c * (g + 0.044715 * g.powi(3))).tanh())
        }
    };
    activated * f64::from(u)
}

/// Attention of one head at `position`: `keys` and `values` are `[positions, D]` from position 0 on.
pub fn attention(shape: &AttentionShape, q: &[f32], keys: &[f32], values: &[f32], position: usize) -> Vec<f64> {
    let dim = q.len();
    let first = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let mut scores = Vec::new();
    for p in first..=position {
        let key = &keys[p * dim..(p + 1) * dim];
        let dot: f64 = q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let score = dot * f64::from(shape.scale);
        scores.push(shape.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()));
    }
    let weights = softmax(&scores);
    let mut out = vec![0.0; dim];
    for (p, weight) in (first..=position).zip(weights) {
        for (out, v) in out.iter_mut().zip(&values[p * dim..(p + 1) * dim]) {
            *out += weight * f64::from(*v);
        }
    }
    out
}

/// `e^(x - max) / sum`.
pub fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = x.iter().map(|v| (v - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}
