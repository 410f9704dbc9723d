//! The sequences of one request, told apart by index.

use super::error::ApiError;
use super::state::Served;
use crate::engine::{GenerationRequest, Timings};
use crate::text::{OutputEvent, OutputOptions, OutputStream};
use serde_json::{Value, json};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

/// All choices of a request. Dropping it cancels those that are under way.
#[derive(Debug)]
pub struct ChoiceSet {
    streams: Vec<Option<OutputStream>>,
    /// The stream to look at first, so that none starves.
    turn: usize,
}

impl ChoiceSet {
    /// Submits all requests, or none.
    ///
    /// # Errors
    /// What the engine says to the first that it refuses; the others are cancelled.
    pub fn submit(
        served: &Served,
        requests: Vec<GenerationRequest>,
        options: &OutputOptions,
    ) -> Result<Self, ApiError> {
        let streams = requests
            .into_iter()
            .map(|request| {
                let events = served.engine.submit(request)?;
                let tokenizer = Arc::clone(served.text.tokenizer());
                Ok(Some(OutputStream::new(events, tokenizer, options.clone())))
            })
            .collect::<Result<_, ApiError>>()?;
        Ok(Self { streams, turn: 0 })
    }

    /// Choices in all.
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// The next event of any choice; none after the last.
    pub async fn next(&mut self) -> Option<(usize, OutputEvent)> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, OutputEvent)>> {
        let count = self.streams.len();
        let mut open = false;
        for step in 0..count {
            let index = (self.turn + step) % count;
            let Some(stream) = &mut self.streams[index] else {
                continue;
            };
            match stream.poll_next(context) {
                Poll::Pending => open = true,
                Poll::Ready(Some(event)) => {
                    self.turn = (index + 1) % count;
                    return Poll::Ready(Some((index, event)));
                }
                Poll::Ready(None) => self.streams[index] = None,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }
}

/// Tokens that a request took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Those of them that came from the prefix cache; of several choices of one prompt the most.
    pub cached_tokens: usize,
    /// Tokens generated.
    pub completion_tokens: usize,
}

impl Usage {
    /// OpenAI's `usage` object.
    pub fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }
}

/// The optional `timings` object, with llama.cpp's names.
pub fn timings_json(timings: &Timings, prompt_tokens: usize, generated_tokens: usize) -> Value {
    let (prefill, decode) = (timings.prefill.as_secs_f64(), timings.decode.as_secs_f64());
    let rate = |tokens: usize, seconds: f64| {
        if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
    };
    json!({
        "queue_ms": timings.queue.as_secs_f64() * 1e3,
        "prompt_n": prompt_tokens,
        "prompt_ms": prefill * 1e3,
        "prompt_per_second": rate(prompt_tokens, prefill),
        "predicted_n": generated_tokens,
        "predicted_ms": decode * 1e3,
        // The first token belongs to the prompt's time.
        "predicted_per_second": rate(generated_tokens.saturating_sub(1), decode),
    })
}
