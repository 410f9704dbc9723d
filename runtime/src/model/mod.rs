//! Decoder models: configuration, graph, forward pass.
//!
//! - [`config`]: the architecture as data;
//! - [`graph`]: every place in the network, as references into a bundle;
//! - [`cpu`], [`cuda`]: the forward pass over a ragged batch and a paged cache, behind [`crate::engine::model::Model`].

pub mod config;
pub mod cpu;
pub mod cuda;
pub mod graph;

mod experts;
mod pair;
mod project;
mod workspace;

pub use config::{ConfigError, ModelConfig};
pub use cpu::{CpuModel, CpuModelOptions};
pub use cuda::{CudaModel, CudaModelOptions, StepLimits, cuda_workspace_bytes};
pub use graph::{Graph, GraphError};
pub use workspace::workspace_bytes;

#[cfg(test)]
mod tests;
