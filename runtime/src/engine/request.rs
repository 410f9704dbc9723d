//! What the engine is asked, and what it answers.

use super::constraint::Constraint;
use super::sampling::{SamplingParams, TokenLogprobs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use thiserror::Error;
use tokio::sync::mpsc::UnboundedReceiver;

/// Separates the prefix caches of users who must not learn of each other's prompts: the time to the
/// first token tells whether a prefix was cached. Requests share cached blocks only under equal salts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheSalt([u8; 32]);

impl CacheSalt {
    /// The salt of a secret, such as an API key; different secrets give different salts.
    pub fn from_secret(secret: &[u8]) -> Self {
        Self(blake3::derive_key("vt-run prefix cache salt v1", secret))
    }

    /// Bytes that start a chain of block hashes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// One sequence to generate.
#[derive(Debug)]
pub struct GenerationRequest {
    /// Token ids of the prompt; not empty, all below the engine's token limit.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; prompt and output together must fit the engine's longest sequence.
    pub max_tokens: usize,
    /// Tokens before which no stop token is chosen.
    pub min_tokens: usize,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Whether log-probabilities of the prompt are wanted, with that many alternatives at each position.
    pub prompt_logprobs: Option<usize>,
    /// Which prefix cache to use.
    pub cache_salt: CacheSalt,
    /// A grammar that the output must follow.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl GenerationRequest {
    /// A greedy request without further wishes.
    pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            sampling: SamplingParams::default(),
            prompt_logprobs: None,
            cache_salt: CacheSalt::default(),
            constraint: None,
        }
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token, or the end of a grammar.
    Stop,
    /// `max_tokens` or the context is used up.
    Length,
    /// The server is shutting down and the time to drain is over.
    Abort,
}

impl FinishReason {
    /// The name in responses and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// Where a request's time went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timings {
    /// Waiting before the first step.
    pub queue: Duration,
    /// From the first step to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// The end of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Finish {
    /// Why it ended.
    pub reason: FinishReason,
    /// Tokens generated, a stop token included.
    pub generated_tokens: usize,
    /// The stop token that ended it; it is not sent as a token.
    pub stop_token: Option<u32>,
    /// Where the time went.
    pub timings: Timings,
}

/// What a sequence reports, in this order: one `Started`, any number of `Token`, one `Finished`; `Failed`
/// may come at any point and is the last.
#[derive(Debug)]
pub enum Event {
    /// The prompt has been computed.
    Started {
        /// Prompt tokens whose keys and values came from the prefix cache.
        cached_tokens: usize,
        /// Log-probabilities of the prompt from its second token on, where they were asked for.
        prompt_logprobs: Vec<TokenLogprobs>,
    },
    /// A token.
    Token {
        /// Its id.
        id: u32,
        /// Its log-probability and its alternatives, where they were asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The end.
    Finished(Finish),
    /// The engine could not go on with this sequence.
    Failed(String),
}

/// The events of one sequence. Dropping it cancels the sequence before the next step.
#[derive(Debug)]
pub struct EventStream {
    receiver: UnboundedReceiver<Event>,
    stopped: Arc<AtomicBool>,
}

impl EventStream {
    pub(super) fn new(receiver: UnboundedReceiver<Event>, stopped: Arc<AtomicBool>) -> Self {
        Self { receiver, stopped }
    }

    /// The next event; none after the last, or when the engine is gone.
    pub async fn recv(&mut self) -> Option<Event> {
        self.receiver.recv().await
    }

    /// Like [`Self::recv`], for use in a poll function.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.receiver.poll_recv(context)
    }

    /// Like [`Self::recv`], for use outside of asynchronous code.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        self.receiver.blocking_recv()
    }

    /// Ends the sequence because its text is complete, as a stop string makes it: it is counted as
    /// finished, not as cancelled. Events that are under way are lost.
    pub fn stop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        self.receiver.close();
    }
}

/// Why a request was not accepted.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubmitError {
    /// The queue is full.
    #[error("the queue is full ({waiting} requests waiting); try again in {retry_after_seconds} s")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// An estimate of when there is room.
        retry_after_seconds: u64,
    },
    /// The server is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The engine has stopped after a failure of the device.
    #[error("the engine has stopped after a failure; see the server's log")]
    Stopped,
    /// Nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The sequence cannot fit.
    #[error("{prompt_tokens} prompt tokens and {max_tokens} to generate exceed the limit of {limit}")]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens asked for.
        max_tokens: usize,
        /// Longest sequence.
        limit: usize,
    },
    /// An id that the tokenizer does not have.
    #[error("token id {id} is outside the vocabulary of {limit}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        limit: usize,
    },
}
