//! Checkpoint conversion: sources, plan, pack.
#![forbid(unsafe_code)]

pub mod source;
