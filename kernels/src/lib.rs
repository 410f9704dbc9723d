//! The compute of vt: operators that read bundle planes directly.
//!
//! - [`context`], [`pool`]: threads and instruction set of one engine, passed by reference; there is no static state;
//! - [`weight`], [`mod@matmul`]: matrices as a bundle stores them, and products with them;
//! - [`norm`], [`rope`], [`attention`], [`kv_cache`], [`activation`], [`softmax`]: the rest of a decoder layer;
//! - [`cuda`]: the driver, device memory and kernels that the build embedded;
//! - [`mod@reference`]: every operator again, readable and slow, as the tests' measure.
//!
//! Axis letters: M (or T) tokens, N out-features, K in-features, H heads, D elements of a head.

pub mod activation;
pub mod attention;
pub mod context;
pub mod cuda;
mod fragment;
pub mod kv_cache;
pub mod matmul;
pub mod norm;
pub mod pool;
mod quantise;
mod recipe;
pub mod reference;
pub mod rope;
mod simd;
pub mod softmax;
pub mod weight;

pub use context::{Context, Isa};
pub use matmul::{ACTIVATION_BLOCK, Activations, MatmulScratch, matmul};
pub use pool::Pool;
pub use weight::{FloatType, RawWeight, RowsWeight, TiledWeight, Weight, WeightError};
