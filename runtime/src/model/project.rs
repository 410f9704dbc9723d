//! Projections: one or several products, input scales, biases and low-rank branches.
//!
//! Axes: T tokens, K in-features, N out-features.

use super::graph::{Projection, ProjectionOutput};
use super::pair::PairBuffers;
use super::rounding::Rounding;
use crate::load::{HostArena, LoadedBundle};
use vt_kernels::activation::add_bias;
use vt_kernels::{Activations, Context, MatmulScratch, matmul};

/// Buffers of projections, reused from one to the next.
#[derive(Debug)]
pub(super) struct ProjectionScratch {
    matmul: MatmulScratch,
    pair: PairBuffers,
    /// `[T, K]`: the input times an input scale.
    scaled: Vec<f32>,
    /// `[T, stride]` of a product that is one of several.
    product: Vec<f32>,
    /// `[T, rank]` and `[T, N]` of a low-rank branch.
    low_rank: Vec<f32>,
}

impl ProjectionScratch {
    /// Buffers of the given numbers of elements.
    pub(super) fn new(pair: PairBuffers, scaled: usize, product: usize, low_rank: usize) -> Self {
        Self {
            matmul: MatmulScratch::default(),
            pair,
            scaled: vec![0.0; scaled],
            product: vec![0.0; product],
            low_rank: vec![0.0; low_rank],
        }
    }
}

/// Rows of a projection's input whose 8-bit activations are pairs; see [`super::pair`].
#[derive(Clone, Copy, Debug)]
pub(super) struct FineRows<'a> {
    /// Every row.
    pub all: &'a [u32],
    /// The rows of tokens whose logits are wanted, or every row where results must not depend on the batch.
    pub wanted: &'a [u32],
}

impl<'a> FineRows<'a> {
    /// No row.
    pub(super) const NONE: FineRows<'static> = FineRows { all: &[], wanted: &[] };

    fn rows_of(&self, projection: &Projection) -> &'a [u32] {
        if projection.paired { self.all } else { self.wanted }
    }
}

/// What every projection of a model shares.
pub(super) struct Compute<'a, A> {
    pub cx: &'a Context,
    pub loaded: &'a LoadedBundle<A>,
    pub activations: Activations,
    pub rounding: Option<Rounding>,
}

impl<A: HostArena> Compute<'_, A> {
    /// Rounds activations where the model does.
    pub(super) fn round(&self, values: &mut [f32]) {
        if let Some(rounding) = self.rounding {
            rounding.apply(values);
        }
    }

    /// `out [T, stride]` of `x [T, K]`. Every logical column is written. `vector` is a buffer for scales and biases.
    pub(super) fn project(
        &self,
        projection: &Projection,
        x: &[f32],
        fine: FineRows<'_>,
        scratch: &mut ProjectionScratch,
        vector: &mut [f32],
        out: &mut [f32],
    ) {
        let tokens = x.len() / projection.k;
        for (index, product) in projection.products.iter().enumerate() {
            let weight = product.matrix.weight(self.loaded);
            let input = match &product.input_scale {
                None => x,
                Some(scale) => {
                    let scale_values = &mut vector[..projection.k];
                    scale.widen(self.loaded, scale_values);
                    let scaled = &mut scratch.scaled[..x.len()];
                    for (row, out) in x.chunks_exact(projection.k).zip(scaled.chunks_exact_mut(projection.k)) {
                        for ((o, v), s) in out.iter_mut().zip(row).zip(scale_values.iter()) {
                            *o = v * s;
                        }
                    }
                    self.round(scaled);
                    &scratch.scaled[..x.len()]
                }
            };
            let mut multiply = |out: &mut [f32]| match self.activations {
                Activations::Int8 if weight.takes_int8() => {
                    scratch.pair.matmul(self.cx, &weight, input, fine.rows_of(projection), &mut scratch.matmul, out);
                }
                activations => matmul(self.cx, &weight, input, activations, &mut scratch.matmul, out),
            };
            if projection.direct {
                multiply(out);
            } else {
                let result = &mut scratch.product[..tokens * product.stride];
                multiply(result);
                for output in projection.outputs.iter().filter(|o| o.product == index) {
                    let rows = result.chunks_exact(product.stride).zip(out.chunks_exact_mut(projection.stride));
                    for (from, to) in rows {
                        to[output.column..][..output.rows]
                            .copy_from_slice(&from[output.product_column..][..output.rows]);
                    }
                }
            }
            for output in projection.outputs.iter().filter(|o| o.product == index) {
                if let Some(scale) = &output.scale {
                    let mut factor = [0.0];
                    scale.widen(self.loaded, &mut factor);
                    for row in out.chunks_exact_mut(projection.stride) {
                        row[output.column..][..output.rows].iter_mut().for_each(|v| *v *= factor[0]);
                    }
                }
                self.low_rank(output, input, projection, &mut scratch.matmul, &mut scratch.low_rank, out);
            }
        }
        for output in &projection.outputs {
            if let Some(bias) = &output.bias {
                let values = &mut vector[..output.rows];
                bias.widen(self.loaded, values);
                add_bias(self.cx, out, projection.stride, output.column, values);
            }
        }
    }

    fn low_rank(
        &self,
        output: &ProjectionOutput,
        input: &[f32],
        projection: &Projection,
        scratch: &mut MatmulScratch,
        buffer: &mut [f32],
        out: &mut [f32],
    ) {
        let Some(branch) = &output.low_rank else { return };
        let tokens = input.len() / projection.k;
        let (down, rest) = buffer.split_at_mut(tokens * branch.down_stride);
        let up = &mut rest[..tokens * branch.up_stride];
        matmul(self.cx, &branch.down.weight(self.loaded), input, self.activations, scratch, down);
        self.round(down);
        matmul(self.cx, &branch.up.weight(self.loaded), down, self.activations, scratch, up);
        for (from, to) in up.chunks_exact(branch.up_stride).zip(out.chunks_exact_mut(projection.stride)) {
            for (o, v) in to[output.column..][..output.rows].iter_mut().zip(from) {
                *o += v;
            }
        }
    }
}
