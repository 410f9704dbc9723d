//! Products with row-major matrices of floats.

use crate::context::Context;
use crate::simd;
use crate::weight::RowsWeight;

/// Out-features per unit of work: their outputs fill a cache line.
const UNIT_N: usize = 16;
/// Rows of activations per unit of work.
const BLOCK_M: usize = 64;

pub(super) fn matmul(cx: &Context, weight: &RowsWeight<'_>, x: &[f32], out: &mut [f32]) {
    cx.pool().blocks(out, weight.n, BLOCK_M, UNIT_N, |_, block| {
        let (rows, columns) = (block.rows(), block.columns());
        for n in columns.clone().step_by(simd::ROWS_N) {
            let columns = n..(n + simd::ROWS_N).min(columns.end);
            for m in rows.clone().step_by(simd::ROWS_M) {
                let rows = m..(m + simd::ROWS_M).min(rows.end);
                let dots = simd::dot_rows(cx.isa(), weight, columns.clone(), x, rows.clone());
                for (row, dots) in rows.zip(dots) {
                    block.row(row, columns.clone()).copy_from_slice(&dots[..columns.len()]);
                }
            }
        }
    });
}
