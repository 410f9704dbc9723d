//! Activations as the sum of two 8-bit numbers.
//!
//! `x = q(x) + r`, with `q` the quantisation that [`vt_kernels::matmul`] applies (blocks of 32, scale `absmax / 127`).
//! The rest `r` is at most half a step of `q`, and is quantised in its turn with a scale of its own, so that what is lost
//! is some 250 times smaller. Both are rows of one product: codes are unpacked once for the two.

use vt_kernels::{Activations, Context, MatmulScratch, Weight, matmul};

/// Tokens whose pairs are multiplied at once.
pub(super) const PAIR_ROWS: usize = 64;
/// Activations per scale, as in the kernels.
const BLOCK: usize = 32;

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

    /// `out [T, stride] = x [T, K] * W^T` with both parts of every activation.
    pub(super) fn matmul(
        &mut self,
        cx: &Context,
        weight: &Weight<'_>,
        x: &[f32],
        scratch: &mut MatmulScratch,
        out: &mut [f32],
    ) {
        let (k, stride) = (weight.k(), weight.out_stride());
        for (x, out) in x.chunks(PAIR_ROWS * k).zip(out.chunks_mut(PAIR_ROWS * stride)) {
            let (input, product) = (&mut self.input[..2 * x.len()], &mut self.output[..2 * out.len()]);
            let (first, rest) = input.split_at_mut(x.len());
            first.copy_from_slice(x);
            cx.pool().rows(rest, k, |row, rest| {
                for (x, rest) in x[row * k..].chunks_exact(k).zip(rest.chunks_exact_mut(k)) {
                    rest_of(x, rest);
                }
            });
            matmul(cx, weight, input, Activations::Int8, scratch, product);
            let (first, rest) = product.split_at(out.len());
            for ((out, a), b) in out.iter_mut().zip(first).zip(rest) {
                *out = a + b;
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
