//! One sequence on its way through the scheduler.

use super::blocks::{BlockHash, chain_hash};
use super::constraint::Constraint;
use super::model::BLOCK_LEN;
use super::queue::Tickets;
use super::random::fresh_seed;
use super::request::{CacheSalt, Event, Finish, FinishReason, GenerationRequest, Timings};
use super::sampling::{Sampler, TokenLogprobs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Events on their way to their receivers. Waking a receiver takes time that a device should not wait for, so that events are
/// collected and delivered when it has its next step.
#[derive(Debug, Default)]
pub(super) struct Outgoing(Vec<(UnboundedSender<Event>, Event)>);

impl Outgoing {
    /// Hands over everything, in order; a receiver that has gone is noticed by [`Sequence::is_cancelled`].
    pub fn deliver(&mut self) {
        for (to, event) in self.0.drain(..) {
            let _ = to.send(event);
        }
    }
}

/// Everything that the scheduler knows of a sequence. All of it but `blocks`, `computed` and `registered`
/// survives preemption.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Order of arrival.
    pub order: u64,
    /// Prompt, then output.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// Leading tokens whose keys and values are in the cache.
    pub computed: usize,
    pub blocks: Vec<u32>,
    /// Leading blocks that the pool knows by their hash.
    pub registered: usize,
    hashes: Vec<BlockHash>,
    salt: CacheSalt,
    pub max_tokens: usize,
    pub min_tokens: usize,
    /// Ascending.
    pub stop_token_ids: Vec<u32>,
    pub sampler: Sampler,
    pub constraint: Option<Box<dyn Constraint>>,
    pub prompt_logprobs_wanted: Option<usize>,
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Prompt tokens found in the prefix cache at the first start.
    pub cached_tokens: usize,
    pub started: bool,
    pub finished: bool,
    events: UnboundedSender<Event>,
    stopped: Arc<AtomicBool>,
    pub tickets: Tickets,
    pub arrival: Instant,
    pub first_step: Option<Instant>,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
}

impl Sequence {
    pub fn new(
        request: GenerationRequest,
        events: UnboundedSender<Event>,
        stopped: Arc<AtomicBool>,
        tickets: Tickets,
    ) -> Self {
        let mut stop_token_ids = request.stop_token_ids;
        stop_token_ids.sort_unstable();
        let seed = request.sampling.seed.unwrap_or_else(fresh_seed);
        Self {
            order: 0,
            prompt_len: request.prompt.len(),
            computed: 0,
            blocks: Vec::new(),
            registered: 0,
            hashes: Vec::new(),
            salt: request.cache_salt,
            max_tokens: request.max_tokens,
            min_tokens: request.min_tokens,
            stop_token_ids,
            sampler: Sampler::new(request.sampling, seed, &request.prompt),
            constraint: request.constraint,
            prompt_logprobs_wanted: request.prompt_logprobs,
            prompt_logprobs: Vec::new(),
            cached_tokens: 0,
            started: false,
            finished: false,
            tokens: request.prompt,
            events,
            stopped,
            tickets,
            arrival: Instant::now(),
            first_step: None,
            first_token: None,
            last_token: None,
        }
    }

    /// Tokens that may not come next: those that would end a text that is too short.
    pub fn excluded(&self) -> &[u32] {
        if self.generated() < self.min_tokens { &self.stop_token_ids } else { &[] }
    }

    /// Tokens of the output so far.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens that are known but not computed; 1 for a sequence that is generating.
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Hashes of all full blocks of the known tokens.
    pub fn block_hashes(&mut self) -> &[BlockHash] {
        let full = self.tokens.len() / BLOCK_LEN;
        while self.hashes.len() < full {
            let start = self.hashes.len() * BLOCK_LEN;
            let tokens = &self.tokens[start..start + BLOCK_LEN];
            let hash = chain_hash(self.hashes.last(), &self.salt, tokens);
            self.hashes.push(hash);
        }
        &self.hashes
    }

    /// Whether nobody waits for the answer any more.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Whether the receiver ended the sequence because its text is complete.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Reports an event.
    pub fn send(&self, event: Event, outgoing: &mut Outgoing) {
        outgoing.0.push((self.events.clone(), event));
    }

    /// Reports the end and marks the sequence for removal.
    pub fn finish(&mut self, reason: FinishReason, stop_token: Option<u32>, outgoing: &mut Outgoing) {
        self.finished = true;
        let generated_tokens = self.generated() + usize::from(stop_token.is_some());
        let finish = Finish { reason, generated_tokens, stop_token, timings: self.timings() };
        self.send(Event::Finished(finish), outgoing);
    }

    /// Reports a failure and marks the sequence for removal.
    pub fn fail(&mut self, reason: String, outgoing: &mut Outgoing) {
        self.finished = true;
        self.send(Event::Failed(reason), outgoing);
    }

    /// Where the time went so far.
    pub fn timings(&self) -> Timings {
        let between = |from: Option<Instant>, to: Option<Instant>| match (from, to) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        Timings {
            queue: between(Some(self.arrival), self.first_step),
            prefill: between(self.first_step, self.first_token),
            decode: between(self.first_token, self.last_token),
        }
    }
}
