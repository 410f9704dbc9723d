//! Activations as the sum of two 8-bit numbers, for the rows that need it.
//!
//! `x = q(x) + r`, with `q` the quantisation that [`vt_kernels::matmul`] applies (blocks of [`vt_kernels::ACTIVATION_BLOCK`], scale
//! `absmax / 127`).
//! The rest `r` is at most half a step of `q`, and is quantised in its turn with a scale of its own, so that what is lost
//! is some 250 times smaller. A product is linear, so the product of the rest is added to that of the row.
//!
//! Axes: T tokens, F of them fine, K in-features.

use vt_kernels::{Activations, Context, MatmulScratch, Weight, matmul};

/// Fine rows that are multiplied at once; for up to as many tokens, rows and rests are one product, which unpacks the
/// codes once.
pub(super) const PAIR_ROWS: usize = 64;
/// Activations per scale, as in the kernels.
const BLOCK: usize = vt_kernels::ACTIVATION_BLOCK;

/// `[2 * PAIR_ROWS, K]` and `[2 * PAIR_ROWS, stride]`, reused from product to product.
#[derive(Debug)]
pub(super) struct PairBuffers {
    input: Vec<f32>,
    output: Vec<f32>,
}

impl PairBuffers {
    /// Buffers of the given numbers of elements.
    pub(super) fn new(input: usize, output: usize) -> Self {
        Self { input: vec![0.0; input], output: vec![0.0; output] }
    }

    /// `out [T, stride] = x [T, K] * W^T` with 8-bit activations, and both parts of them in the rows `fine`, in order.
    pub(super) fn matmul(
        &mut self,
        cx: &Context,
        weight: &Weight<'_>,
        x: &[f32],
        fine: &[u32],
        scratch: &mut MatmulScratch,
        out: &mut [f32],
    ) {
        let (k, stride) = (weight.k(), weight.out_stride());
        let tokens = x.len() / k;
        let together = !fine.is_empty() && tokens <= PAIR_ROWS;
        if !together {
            matmul(cx, weight, x, Activations::Int8, scratch, out);
        }
        for fine in fine.chunks(PAIR_ROWS) {
            let before = if together { tokens } else { 0 };
            let input = &mut self.input[..(before + fine.len()) * k];
            let (rows, rests) = input.split_at_mut(before * k);
            rows.copy_from_slice(&x[..before * k]);
            let source = |row: u32| &x[row as usize * k..][..k];
            if fine.len() < PAIR_ROWS / 4 {
                fine.iter().zip(rests.chunks_exact_mut(k)).for_each(|(&row, rest)| rest_of(source(row), rest));
            } else {
                cx.pool().rows(rests, k, |first, rests| {
                    let own = &fine[first..];
                    own.iter().zip(rests.chunks_exact_mut(k)).for_each(|(&row, rest)| rest_of(source(row), rest));
                });
            }
            let product = &mut self.output[..(before + fine.len()) * stride];
            matmul(cx, weight, input, Activations::Int8, scratch, product);
            let (rows, rests) = product.split_at(before * stride);
            out[..rows.len()].copy_from_slice(rows);
            for (&row, rest) in fine.iter().zip(rests.chunks_exact(stride)) {
                out[row as usize * stride..][..stride].iter_mut().zip(rest).for_each(|(o, r)| *o += r);
            }
        }
    }
}

/// What 8 bits leave of a row.
fn rest_of(x: &[f32], rest: &mut [f32]) {
    for (x, rest) in x.chunks(BLOCK).zip(rest.chunks_mut(BLOCK)) {
        let absmax = x.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        // The kernels take such a block as zero, and a block that is not finite as it is.
        if absmax < 1e-35 || !absmax.is_finite() {
            rest.fill(0.0);
            continue;
        }
        let (scale, inverse) = (absmax / 127.0, 127.0 / absmax);
        for (rest, v) in rest.iter_mut().zip(x) {
            *rest = v - (v * inverse).round_ties_even() * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_half_a_step_at_most() {
        let x: Vec<f32> = (0..70).map(|i| ((i * 37 % 100) as f32 - 50.0) * 0.01).collect();
        let mut rest = vec![9.0; 70];
        rest_of(&x, &mut rest);
        for (x, rest) in x.chunks(BLOCK).zip(rest.chunks(BLOCK)) {
            let step = x.iter().fold(0.0f32, |max, v| max.max(v.abs())) / 127.0;
            assert!(rest.iter().all(|r| r.abs() <= step * 0.501));
            assert!(rest.iter().any(|r| *r != 0.0));
        }
        for odd in [0.0, f32::NAN, f32::INFINITY] {
            rest_of(&[odd; 3], &mut rest[..3]);
            assert_eq!(rest[..3], [0.0; 3]);
        }
    }
}
