//! Products with raw ggml blocks: one row of weights at a time is decoded, and meets all rows of activations.

use crate::context::Context;
use crate::simd;
use crate::weight::RawWeight;

/// Out-features per unit of work: their outputs fill a cache line.
const UNIT_N: usize = 16;

pub(super) fn matmul(cx: &Context, weight: &RawWeight<'_>, x: &[f32], out: &mut [f32]) {
    let k = weight.k;
    cx.pool().columns(out, weight.n, UNIT_N, |block| {
        let mut decoded = vec![0.0f32; k];
        for n in block.columns() {
            weight.format.decode(weight.row(n), &mut decoded);
            for (row, x) in block.rows().zip(x.chunks_exact(k)) {
                block.row(row, n..n + 1)[0] = simd::dot(cx.isa(), &decoded, x);
            }
        }
    });
}
