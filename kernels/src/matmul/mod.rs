//! Matrix products `x [M, K] * W [N, K]^T`, straight from the planes of a bundle.
//!
//! Work is divided into blocks of rows by tile columns. For each, strips of 32 along K are unpacked into a panel of a few
//! KiB, multiplied with all rows of the block, and forgotten; no decoded matrix ever exists. Every element of the output
//! is the sum of the same terms in the same order whatever the number of threads.

use crate::context::Context;
pub use crate::quantise::ACTIVATION_BLOCK;
use crate::quantise::Quantised;
use crate::weight::Weight;

mod raw;
mod rows;
mod tiled;

/// How products treat activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Activations {
    /// As they are: weights are decoded to f32 in registers.
    F32,
    /// Quantised to 8 bits in blocks of [`ACTIVATION_BLOCK`] along K where the weights have integer codes; else as they
    /// are.
    #[default]
    Int8,
}

/// Buffers of [`matmul`], reused from call to call.
#[derive(Debug, Default)]
pub struct MatmulScratch {
    quantised: Quantised,
}

/// `out [M, out_stride] = x [M, K] * W^T`, with M the number of rows of `x` and `out_stride` as
/// [`Weight::out_stride`] says. Every element is written; columns that are padding hold unspecified values.
///
/// # Panics
/// Where the lengths of `x` and `out` do not belong to one M.
pub fn matmul(
    cx: &Context,
    weight: &Weight<'_>,
    x: &[f32],
    activations: Activations,
    scratch: &mut MatmulScratch,
    out: &mut [f32],
) {
    let (k, stride) = (weight.k(), weight.out_stride());
    let m = x.len() / k;
    assert!(
        x.len() == m * k && out.len() == m * stride,
        "{} inputs, {} outputs of {k} -> {stride}",
        x.len(),
        out.len()
    );
    if m == 0 {
        return;
    }
    match weight {
        Weight::Rows(w) => rows::matmul(cx, w, x, out),
        Weight::Raw(w) => raw::matmul(cx, w, x, out),
        Weight::Tiled(w) => tiled::matmul(cx, w, x, m, activations, &mut scratch.quantised, out),
    }
}
