//! Checkpoint conversion: sources, plan, pack.
#![forbid(unsafe_code)]

pub mod catalog;
pub mod dequant;
pub mod gguf;
pub mod safetensors;
pub mod source;
