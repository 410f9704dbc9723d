//! Small stand-ins for a bundle, for tests and for `examples/fake_server.rs`.
//!
//! Built only for tests and under the feature `test-support`; no part of the `vt-run` binary.

pub mod fake_model;
#[cfg(test)]
pub mod synthetic;
pub mod tokenizer;

pub use fake_model::{FakeModel, Script};
pub use tokenizer::{byte_tokenizer, fake_text};

use crate::engine::model::Model;
use crate::engine::{EngineConfig, EngineHandle, SchedulerLimits};
use crate::metrics::Metrics;
use crate::server::{ModelCard, Served};
use std::io;
use std::sync::Arc;

/// The stand-in model behind an engine with room for `max_queue` waiting requests, as a loader would hand
/// it to the server.
///
/// # Errors
/// The operating system's, where it has no thread to give.
pub fn fake_served(model: FakeModel, max_queue: usize, metrics: Arc<Metrics>) -> io::Result<Served> {
    let info = model.info().clone();
    let config = EngineConfig {
        limits: SchedulerLimits {
            sequences: info.max_batch_sequences,
            batch_tokens: info.max_batch_tokens,
            token_limit: tokenizer::VOCABULARY,
            prefix_cache: true,
        },
        max_queue,
        max_sequence_tokens: None,
    };
    Ok(Served {
        engine: EngineHandle::spawn(Box::new(model), config, metrics)?,
        text: Arc::new(fake_text()),
        card: ModelCard {
            name: "fake".to_owned(),
            bundle_id: "fa4e".repeat(16),
            architecture: "FakeForCausalLM".to_owned(),
            layout: "none".to_owned(),
            format: "1".to_owned(),
        },
    })
}
