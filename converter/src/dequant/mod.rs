//! Source decoders: what a tensor of a checkpoint is, by its own format's formula.

pub mod ggml;
pub mod hf;
