//! Products with matrices in device memory: `out [M, N'] (+)= x [M, K] * W [N', K]^T (+ bias [N'])`.
//!
//! - `params`: what kernels are given, and the sizes of it;
//! - [`DeviceMatrix`]: a matrix as a bundle stores it, checked against its geometry once;
//! - `checks`: what a launch may ask for;
//! - [`GemmInput`]: activations that a product makes itself; [`NormAhead`]: half a norm, for the next;
//! - `hopper`: products on Hopper with many rows, and with few where those kernels read faster;
//! - `experts`: products of few rows with each of several matrices;
//! - `small`: products with few rows, limited by the reading of the weights;
//! - `table`: the kernels that a fatbin lists;
//! - [`Gemm`]: the kernels of a device, and the choice among them.
//!
//! Activations are bf16, sums f32. N' is the padded N of a tiled matrix. Launches neither allocate nor wait, and may be
//! recorded in a CUDA graph.

mod checks;
mod embed;
mod experts;
mod hopper;
mod input;
mod launch;
mod matrix;
mod params;
mod small;
mod table;

pub use embed::EmbeddingKernels;
pub use input::{GemmInput, NormAhead};
pub use launch::Gemm;
pub use matrix::{DeviceMatrix, DevicePlane};

use crate::activation::Gate;

/// Element type of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutType {
    /// As summed.
    F32,
    /// Rounded to nearest even.
    Bf16,
}

/// One product. Addresses lie in memory that the caller keeps allocated until the stream has passed the launch.
#[derive(Clone, Copy, Debug)]
pub struct GemmRequest {
    /// Activations, bf16 `[m, x_stride]`.
    pub x: u64,
    /// Elements from a row of activations to the next, at least K.
    pub x_stride: u32,
    /// Rows.
    pub m: u32,
    /// Result, `[m, out_stride]` of `out_type`.
    pub out: u64,
    /// Type of the result.
    pub out_type: OutType,
    /// Elements from a row of the result to the next, at least the padded N.
    pub out_stride: u32,
    /// f32 `[N']`, added to every row.
    pub bias: Option<u64>,
    /// Adds to what the result holds (f32 only), for a residual.
    pub accumulate: bool,
    /// One order of summation per matrix, whatever M: a row's result does not depend on the other rows.
    pub deterministic: bool,
}

/// Experts of a grouped product: the rows of `x` and `out` are sorted by expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGroups {
    /// Experts.
    pub count: u32,
    /// Bytes from the planes of an expert to those of the next, a multiple of 16; the matrix is expert 0.
    pub stride: u64,
    /// u32 `[count + 1]` on the device: rows of expert `e` are `offsets[e] .. offsets[e + 1]`.
    pub offsets: u64,
    /// Rows of one expert, at most.
    pub most: u32,
    /// `offsets` was written before the launch that precedes this one in the stream, and that one lets others start no
    /// sooner than that was done.
    pub settled: bool,
}

/// What a product of experts does on its way.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertFusion {
    /// u32 `[m]` on the device, and a divisor: row `r` reads row `pairs[r] / top_k` of x, instead of row `r`.
    pub pairs: Option<(u64, u32)>,
    /// The first half of the columns are gates of the second half: `act(gate) * up` is stored, of N' / 2 columns.
    pub gate: Option<Gate>,
}
