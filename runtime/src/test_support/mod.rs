//! Small stand-ins for a bundle, for tests and for `examples/fake_server.rs`.
//!
//! Built only for tests and under the feature `test-support`; no part of the `vt-run` binary.

pub mod fake_model;
pub mod tokenizer;

pub use fake_model::{FakeModel, Script};
pub use tokenizer::{byte_tokenizer, fake_text};
