//! Activations as 8-bit integers: blocks along K, each with an f32 scale.
//!
//! `code = round_ties_even(x * (127 / absmax))`, `x ~ code * (absmax / 127)`. As llama.cpp's Q8 activations, but in shorter
//! blocks and with scales that stay f32. Codes are stored in fragment order (see [`crate::fragment`]), K padded with zeros.

use vt_bundle::tile::TILE_K;

use crate::context::Context;
use crate::recipe::STRIP_K;
use crate::simd::{self, ActivationRows};

/// Activations per scale: one tile along K.
///
/// Blocks of 32, as in llama.cpp, lose some two thirds more (SmolLM2 Q4_1: mean divergence 0.0065 against 0.0029).
pub const ACTIVATION_BLOCK: usize = TILE_K;

/// Rows that one thread quantises at least; below twice that the work is not worth a fork.
const ROWS_PER_FORK: usize = 4;

/// Scale of a block and its inverse, from the largest magnitude. A NaN or an infinity in the block makes the scale one,
/// and so reaches the product.
#[inline(always)]
pub(crate) fn scale_of(absmax: f32) -> (f32, f32) {
    // Below this the inverse would overflow; such a block is all zeros for any purpose.
    if absmax < 1e-35 { (0.0, 0.0) } else { (absmax / 127.0, 127.0 / absmax) }
}

/// Quantised activations `[M, K]`; the buffers are reused from call to call.
#[derive(Debug, Default, Clone)]
pub(crate) struct Quantised {
    codes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
    k: usize,
    rows: usize,
}

impl Quantised {
    /// Quantises `x` `[m, k]`.
    pub fn load(&mut self, cx: &Context, x: &[f32], m: usize, k: usize) {
        let isa = cx.isa();
        let padded = k.next_multiple_of(STRIP_K);
        (self.k, self.rows) = (padded, m);
        grow(&mut self.codes, m * padded);
        grow(&mut self.scales, m * padded / ACTIVATION_BLOCK);
        grow(&mut self.sums, m * padded / TILE_K);
        let codes = self.codes[..m * padded].chunks_exact_mut(padded);
        let scales = self.scales.chunks_exact_mut(padded / ACTIVATION_BLOCK);
        let sums = self.sums.chunks_exact_mut(padded / TILE_K);
        let rows = x.chunks_exact(k).zip(codes).zip(scales).zip(sums);
        if m < 2 * ROWS_PER_FORK {
            for (((x, codes), scales), sums) in rows {
                simd::quantise_row(isa, x, codes, scales, sums);
            }
        } else {
            let mut rows: Vec<_> = rows.collect();
            cx.pool().each(&mut rows, |_, (((x, codes), scales), sums)| {
                simd::quantise_row(isa, x, codes, scales, sums);
            });
        }
    }

    /// The rows, for inner loops.
    pub fn view(&self) -> ActivationRows<'_> {
        ActivationRows {
            codes: &self.codes[..self.rows * self.k],
            scales: &self.scales[..self.rows * self.k / ACTIVATION_BLOCK],
            sums: &self.sums[..self.rows * self.k / TILE_K],
            k: self.k,
        }
    }
}

fn grow<T: Default + Clone>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}
