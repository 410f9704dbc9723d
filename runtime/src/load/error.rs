//! What can go wrong between a bundle's path and a model that runs.

use crate::model::{ConfigError, GraphError};
use vt_bundle::BundleError;
use vt_bundle::slice::SliceError;

/// Failure to load a bundle or to make a model of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The bundle is missing, invalid or corrupt.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The configuration cannot be run.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A tensor that the architecture needs is missing, or has another form.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The bundle lacks a file that a run needs.
    #[error("{bundle}: the bundle has no {what}; convert the checkpoint again, with that file beside it")]
    MissingAsset {
        /// Folder of the bundle.
        bundle: String,
        /// What is missing.
        what: &'static str,
    },
    /// The shapes do not allow the degree of tensor parallelism.
    #[error("{0}; use another --tp-size")]
    Slice(#[from] SliceError),
    /// The device that was asked for is not there, or failed.
    #[error("device {device}: {reason}")]
    Device {
        /// As given on the command line.
        device: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The operating system refused threads or memory.
    #[error("{what}: {source}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
    /// The model does not fit.
    #[error("{needed} bytes are needed and {available} are available: {advice}")]
    DoesNotFit {
        /// Bytes that the plan needs.
        needed: u64,
        /// Bytes that there are.
        available: u64,
        /// Which flag to change.
        advice: String,
    },
}

impl LoadError {
    /// The exit code of a program that ends with this error: 2 usage, 3 input invalid, 4 integrity failure, 5 device, 6 I/O.
    pub fn exit_code(&self) -> u8 {
        match self {
            LoadError::Bundle(error) => error.exit_code(),
            LoadError::Slice(_) => 2,
            LoadError::Config(_) | LoadError::Graph(_) | LoadError::MissingAsset { .. } => 3,
            LoadError::Device { .. } | LoadError::DoesNotFit { .. } => 5,
            LoadError::System { .. } => 6,
        }
    }
}
