//! GGUF checkpoints: the container, the names, the configuration and the tokenizer that its metadata describe.
//!
//! [`open`] produces the [`Checkpoint`] that the planner works on. The container is judged first (every part of a split
//! model), then the model. Facts about the format follow ggml 0.25.3 and gguf-py 0.19.

pub mod container;
mod error;
mod split;
pub mod types;
pub mod value;

pub use error::GgufError;
