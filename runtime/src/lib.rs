//! The runtime: loads a bundle, runs its model, serves it.

pub mod bench;
pub mod cli;
pub mod engine;
pub mod load;
pub mod metrics;
pub mod model;
pub mod server;
pub mod start;
pub mod stats;
pub mod text;

#[cfg(any(test, feature = "test-support"))]
pub mod test_support;
