//! The runtime: loads a bundle, runs its model, serves it.

pub mod engine;
pub mod metrics;
pub mod text;

#[cfg(any(test, feature = "test-support"))]
pub mod test_support;
