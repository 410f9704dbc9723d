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
mod rounding;
mod routing;
mod workspace;

pub use config::{ConfigError, ModelConfig};
pub use cpu::{CpuModel, CpuModelOptions};
pub use cuda::{CudaModel, CudaModelOptions, StepLimits, cuda_workspace_bytes};
pub use graph::{Graph, GraphError};
pub use rounding::Rounding;
pub use routing::{LayerRouting, StepRouting};
pub use workspace::workspace_bytes;

use vt_bundle::manifest::Manifest;
use vt_kernels::kv_cache::KvScales;

/// Per layer, the scales of keys and values that the checkpoint came with, else ones.
fn kv_scales(manifest: &Manifest, layers: usize) -> Vec<KvScales> {
    let mut scales = vec![KvScales::default(); layers];
    for entry in manifest.kv_cache.iter().flat_map(|cache| &cache.layers) {
        if let Some(scale) = usize::try_from(entry.layer).ok().and_then(|layer| scales.get_mut(layer)) {
            // A scale that is no number to divide by says nothing.
            let usable = |scale: Option<f32>| scale.filter(|s| s.is_normal() && *s > 0.0).unwrap_or(1.0);
            *scale = KvScales { key: usable(entry.k_scale), value: usable(entry.v_scale) };
        }
    }
    scales
}

#[cfg(test)]
mod tests;
