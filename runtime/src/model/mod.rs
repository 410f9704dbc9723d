//! Decoder models on the CPU: configuration, graph, forward pass.
//!
//! - [`config`]: the architecture as data;
//! - [`graph`]: every place in the network, as references into a bundle;
//! - [`cpu`]: the forward pass over a ragged batch and a paged cache, behind [`crate::engine::model::Model`].

pub mod config;
pub mod cpu;
pub mod graph;

mod experts;
mod pair;
mod project;
mod workspace;

pub use config::{ConfigError, ModelConfig};
pub use cpu::{CpuModel, CpuModelOptions};
pub use graph::{Graph, GraphError};
pub use workspace::workspace_bytes;

#[cfg(test)]
mod tests;
