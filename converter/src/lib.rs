//! Checkpoint conversion: sources, plan, pack.
#![forbid(unsafe_code)]

pub mod catalog;
pub mod compare;
pub mod convert;
pub mod dequant;
pub mod export;
pub mod gguf;
pub mod open;
pub mod plan;
pub mod safetensors;
pub mod source;
