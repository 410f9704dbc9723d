//! The runtime: loads a bundle, runs its model, serves it.

pub mod engine;
