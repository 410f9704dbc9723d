//! Continuous batching: which tokens of which sequences the next step computes.
//!
//! Every step takes one token of each sequence that is generating, then fills the budget of the step with
//! parts of prompts. The oldest prompt gets at least half of what is left, so that it always advances;
//! the others share the rest, the one with the least to do first, so that a short prompt does not wait
//! for a long one. New sequences are admitted in order of arrival, as long as their whole prompt fits the
//! cache. When the cache runs out, the youngest sequence gives its blocks back and starts over later: its
//! tokens are kept and computed again, and its random numbers depend on positions only, so that nothing
//! is lost or said twice.

use super::blocks::BlockPool;
use super::constraint::ConstraintError;
use super::model::{
    BLOCK_LEN, Chosen, LogitChange, LogitsBuffer, LogitsWanted, Model, ModelError, RowChoice, SequenceStep,
};
use super::request::{Event, FinishReason};
use super::sampling::{SamplingScratch, TokenLogprobs, logprobs_of};
use super::sequence::{Outgoing, Sequence};
use crate::metrics::Metrics;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Positions whose logits are computed at once for log-probabilities of a prompt: at a vocabulary of
/// 256 Ki this is 32 MiB of logits.
const PROMPT_LOGPROBS_CHUNK: usize = 32;

/// Limits of the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Sequences in one step.
    pub sequences: usize,
    /// Tokens in one step.
    pub batch_tokens: usize,
    /// Token ids below this may be chosen: the tokenizer's size, where the head has more rows.
    pub token_limit: usize,
    /// Whether blocks are kept for later sequences with the same beginning.
    pub prefix_cache: bool,
}

/// Part of a step.
#[derive(Debug, Clone, Copy)]
struct Planned {
    /// Index in `running`.
    index: usize,
    /// Tokens to compute.
    count: usize,
}

/// Sequences, cache blocks and the model that computes them.
pub(super) struct Scheduler {
    model: Box<dyn Model>,
    limits: SchedulerLimits,
    pool: BlockPool,
    /// In order of arrival.
    waiting: VecDeque<Sequence>,
    /// In order of arrival.
    running: Vec<Sequence>,
    next_order: u64,
    /// What the last step brought, until the device has the next one.
    outgoing: Outgoing,
    logits: LogitsBuffer,
    /// What the model chose in the present step.
    chosen: Vec<Chosen>,
    /// One row of logits before bias and penalties.
    raw: Vec<f32>,
    scratch: SamplingScratch,
    metrics: Arc<Metrics>,
}

impl Scheduler {
    pub fn new(model: Box<dyn Model>, limits: SchedulerLimits, metrics: Arc<Metrics>) -> Self {
        let info = model.info();
        let batch_tokens = limits.batch_tokens.min(info.max_batch_tokens).max(1);
        let limits = SchedulerLimits {
            batch_tokens,
            // Every generating sequence has a token in every step.
            sequences: limits.sequences.min(info.max_batch_sequences).min(batch_tokens).max(1),
            token_limit: limits.token_limit.min(info.vocab_size),
            prefix_cache: limits.prefix_cache,
        };
        Self {
            pool: BlockPool::new(info.kv.num_blocks),
            logits: LogitsBuffer::new(info.vocab_size),
            chosen: Vec::new(),
            model,
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            next_order: 0,
            outgoing: Outgoing::default(),
            raw: Vec::new(),
            scratch: SamplingScratch::default(),
            metrics,
        }
    }

    /// Adds a sequence to the queue. Its prompt and output fit the cache: see
    /// [`super::EngineHandle::submit`].
    pub fn add(&mut self, mut sequence: Sequence) {
        sequence.order = self.next_order;
        self.next_order += 1;
        self.waiting.push_back(sequence);
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Ends all sequences with [`FinishReason::Abort`].
    pub fn abort_all(&mut self) {
        let reason = FinishReason::Abort;
        self.end_all(reason.as_str(), |sequence, outgoing| sequence.finish(reason, None, outgoing));
    }

    /// Ends all sequences with a failure.
    pub fn fail_all(&mut self, reason: &str) {
        self.end_all("error", |sequence, outgoing| sequence.fail(reason.to_owned(), outgoing));
    }

    /// Hands over what the last step brought, where no other step follows.
    pub fn deliver(&mut self) {
        self.outgoing.deliver();
    }

    fn end_all(&mut self, label: &'static str, mut end: impl FnMut(&mut Sequence, &mut Outgoing)) {
        for sequence in self.waiting.iter_mut().chain(&mut self.running) {
            end(sequence, &mut self.outgoing);
            self.metrics.count_finished(label);
        }
        self.deliver();
        self.remove_ended();
        self.update_gauges();
    }

    /// Computes one step.
    ///
    /// # Errors
    /// The model's error where it concerns the whole step. Where it names a sequence, that sequence is
    /// failed and the rest goes on with the next step.
    pub fn step(&mut self) -> Result<(), ModelError> {
        self.remove_ended();
        let plan = self.plan();
        if plan.is_empty() {
            // Nothing runs, so all blocks are free, and still the first in the queue does not fit: it was
            // let in by mistake, and would keep everyone behind it waiting for ever.
            if self.running.is_empty()
                && let Some(sequence) = self.waiting.front_mut()
            {
                sequence.fail("the sequence does not fit the key/value cache".to_owned(), &mut self.outgoing);
                self.remove_ended();
            }
            self.deliver();
            self.update_gauges();
            return Ok(());
        }
        let choices = self.prepare_choices(&plan);
        let batch: Vec<SequenceStep<'_>> = plan
            .iter()
            .map(|part| {
                let sequence = &self.running[part.index];
                let end = sequence.computed + part.count;
                SequenceStep {
                    tokens: &sequence.tokens[sequence.computed..end],
                    start_pos: sequence.computed,
                    block_table: &sequence.blocks,
                    logits: wanted(sequence, part.count),
                }
            })
            .collect();
        let begun = Instant::now();
        let outcome = match &choices {
            None => {
                self.outgoing.deliver();
                self.logits.reset(batch.iter().map(SequenceStep::logits_rows).sum());
                self.model.forward(&batch, &mut self.logits)
            }
            Some(prepared) => {
                let choices = prepared.rows(&self.running);
                let limit = self.limits.token_limit;
                let deliver = &mut || self.outgoing.deliver();
                self.model.forward_and_choose(&batch, &choices, limit, &mut self.chosen, deliver)
            }
        };
        drop(batch);
        match outcome {
            Ok(()) => {}
            Err(ModelError::NotFinite { index } | ModelError::InvalidStep { index, .. }) if index < plan.len() => {
                let reason = outcome.err().map_or_else(String::new, |error| error.to_string());
                tracing::error!(%reason, "a sequence failed");
                self.running[plan[index].index].fail(reason, &mut self.outgoing);
                self.remove_ended();
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        let busy = self.model.device_time().unwrap_or_else(|| begun.elapsed());
        self.metrics.device_busy.inc_by(busy.as_secs_f64());
        let tokens: usize = plan.iter().map(|part| part.count).sum();
        tracing::trace!(tokens, sequences = plan.len(), ?busy, call = ?begun.elapsed(), "a step");
        self.metrics.iteration_tokens.observe(tokens as f64);
        let now = Instant::now();
        let mut row = 0;
        for part in &plan {
            let rows = self.rows_of(*part);
            self.advance(*part, row, choices.is_some(), now);
            row += rows;
        }
        self.remove_ended();
        self.update_gauges();
        Ok(())
    }

    fn rows_of(&self, part: Planned) -> usize {
        match wanted(&self.running[part.index], part.count) {
            LogitsWanted::None => 0,
            LogitsWanted::Last => 1,
            LogitsWanted::All => part.count,
        }
    }

    /// Gives back what belongs to sequences that ended or that nobody waits for.
    fn remove_ended(&mut self) {
        let (pool, metrics) = (&mut self.pool, &self.metrics);
        let mut is_over = |sequence: &mut Sequence| {
            let cancelled = !sequence.finished && sequence.is_cancelled();
            if cancelled && sequence.is_stopped() {
                count_end(metrics, sequence, FinishReason::Stop, Instant::now());
            } else if cancelled {
                metrics.cancelled.inc();
            }
            if cancelled || sequence.finished {
                pool.release(&mut sequence.blocks);
            }
            cancelled || sequence.finished
        };
        self.running.retain_mut(|sequence| !is_over(sequence));
        self.waiting.retain_mut(|sequence| !is_over(sequence));
    }

    /// Chooses the tokens of the next step and makes sure that their blocks exist.
    fn plan(&mut self) -> Vec<Planned> {
        let mut plan: Vec<Planned> = Vec::with_capacity(self.limits.sequences);
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].pending() == 1 {
                if self.reserve(index, 1, &mut plan, &mut preempted) {
                    plan.push(Planned { index, count: 1 });
                } else {
                    break;
                }
            }
            index += 1;
        }
        if !preempted {
            self.admit();
        }
        self.plan_prompts(&mut plan);
        plan
    }

    /// Distributes what the generating sequences leave of the budget over the prompts.
    fn plan_prompts(&self, plan: &mut Vec<Planned>) {
        let mut budget = self.limits.batch_tokens.saturating_sub(plan.len());
        let is_planned = |index: usize| plan.iter().any(|part| part.index == index);
        let mut prompts: Vec<usize> = (0..self.running.len()).filter(|&index| !is_planned(index)).collect();
        let Some(&oldest) = prompts.first() else {
            return;
        };
        let most = |index: usize| {
            let sequence = &self.running[index];
            if sequence.prompt_logprobs_wanted.is_some() {
                sequence.pending().min(PROMPT_LOGPROBS_CHUNK)
            } else {
                sequence.pending()
            }
        };
        let reserved = most(oldest).min(budget.div_ceil(2));
        budget -= reserved;
        prompts.remove(0);
        prompts.sort_by_key(|&index| self.running[index].pending());
        for index in prompts {
            let count = most(index).min(budget);
            if count > 0 {
                plan.push(Planned { index, count });
                budget -= count;
            }
        }
        let count = most(oldest).min(reserved + budget);
        if count > 0 {
            plan.push(Planned { index: oldest, count });
        }
    }

    /// Makes room for `count` more tokens of a running sequence, taking blocks from younger sequences if
    /// it must. False where the sequence itself was the youngest.
    fn reserve(&mut self, index: usize, count: usize, plan: &mut Vec<Planned>, preempted: &mut bool) -> bool {
        loop {
            let sequence = &mut self.running[index];
            let needed = (sequence.computed + count).div_ceil(BLOCK_LEN);
            let missing = needed.saturating_sub(sequence.blocks.len());
            if self.pool.allocate(missing, &mut sequence.blocks) {
                return true;
            }
            *preempted = true;
            let youngest = self.running.len() - 1;
            plan.retain(|part| part.index != youngest);
            self.preempt_youngest();
            if youngest == index {
                return false;
            }
        }
    }

    fn preempt_youngest(&mut self) {
        let Some(mut sequence) = self.running.pop() else {
            return;
        };
        self.pool.release(&mut sequence.blocks);
        sequence.computed = 0;
        sequence.registered = 0;
        self.metrics.num_preemptions.inc();
        tracing::debug!(order = sequence.order, "preempted");
        // It arrived before everything that waits, or was itself first in the queue when it started.
        self.waiting.push_front(sequence);
    }

    /// Starts waiting sequences in order of arrival while there is room for their tokens.
    fn admit(&mut self) {
        while self.running.len() < self.limits.sequences {
            let Some(sequence) = self.waiting.front_mut() else {
                return;
            };
            let length = sequence.tokens.len();
            // The last token is always computed: its logits are needed.
            let reusable = if self.limits.prefix_cache && sequence.prompt_logprobs_wanted.is_none() {
                (length - 1) / BLOCK_LEN
            } else {
                0
            };
            let pool = &self.pool;
            let found: Vec<u32> =
                sequence.block_hashes()[..reusable].iter().map_while(|hash| pool.find(hash)).collect();
            let taken_from_free = found.iter().filter(|&&block| pool.is_free(block)).count();
            let missing = length.div_ceil(BLOCK_LEN) - found.len();
            // One block to grow into for each running sequence, or the newcomer would be the first to be
            // preempted. Alone, it may have everything.
            let spare = self.running.len();
            if self.pool.free() < taken_from_free + missing + spare {
                return;
            }
            let Some(mut sequence) = self.waiting.pop_front() else {
                return;
            };
            for &block in &found {
                self.pool.share(block);
            }
            sequence.blocks.extend(&found);
            let allocated = self.pool.allocate(missing, &mut sequence.blocks);
            debug_assert!(allocated, "free blocks were counted above");
            sequence.computed = found.len() * BLOCK_LEN;
            sequence.registered = found.len();
            if sequence.first_step.is_none() {
                sequence.first_step = Some(Instant::now());
                sequence.cached_tokens = sequence.computed;
                sequence.tickets.leave_waiting();
                let queued = sequence.timings().queue;
                self.metrics.request_queue_time.observe(queued.as_secs_f64());
                self.metrics.prompt_tokens.inc_by(sequence.prompt_len as u64);
                if self.limits.prefix_cache {
                    self.metrics.prefix_cache_queries.inc_by(length as u64);
                    self.metrics.prefix_cache_hits.inc_by(sequence.computed as u64);
                }
            }
            // Preempted sequences come back in order; everything that waits arrived later than what runs,
            // except when a preempted one overtakes, so the place is searched.
            let place = self.running.partition_point(|other| other.order < sequence.order);
            self.running.insert(place, sequence);
        }
    }

    /// Takes in the results of a part of the step, whose logits start at `row`, or whose choice is at `row`.
    fn advance(&mut self, part: Planned, row: usize, was_chosen: bool, now: Instant) {
        let rows = self.rows_of(part);
        let start = self.running[part.index].computed;
        if self.running[part.index].prompt_logprobs_wanted.is_some() {
            self.collect_prompt_logprobs(part, row, rows);
        }
        let sequence = &mut self.running[part.index];
        sequence.computed = start + part.count;
        if self.limits.prefix_cache {
            let full = sequence.computed / BLOCK_LEN;
            for block in sequence.registered..full {
                let hash = sequence.block_hashes()[block];
                self.pool.register(sequence.blocks[block], hash);
            }
            sequence.registered = full;
        }
        if sequence.pending() > 0 {
            return;
        }
        if !sequence.started {
            sequence.started = true;
            let prompt_logprobs = std::mem::take(&mut sequence.prompt_logprobs);
            let started = Event::Started { cached_tokens: sequence.cached_tokens, prompt_logprobs };
            sequence.send(started, &mut self.outgoing);
            if sequence.max_tokens == 0 {
                self.end(part.index, FinishReason::Length, None, now);
                return;
            }
        }
        if self.running[part.index].finished {
            return;
        }
        let choice = if was_chosen { self.take_chosen(row) } else { self.sample(part.index, row + rows - 1) };
        match choice {
            Ok((token, logprobs)) => self.accept(part.index, token, logprobs, now),
            Err(reason) => self.running[part.index].fail(reason, &mut self.outgoing),
        }
    }

    /// Log-probabilities of the prompt tokens that follow the computed positions.
    fn collect_prompt_logprobs(&mut self, part: Planned, row: usize, rows: usize) {
        let sequence = &mut self.running[part.index];
        let top = sequence.prompt_logprobs_wanted.unwrap_or(0);
        // Without all rows this is the single token of a decoding step.
        let start = sequence.computed + part.count - rows;
        for offset in 0..rows {
            let position = start + offset;
            let is_next = position == sequence.prompt_logprobs.len();
            if sequence.started || !is_next || position + 1 >= sequence.prompt_len {
                continue;
            }
            let logits = self.logits.row_mut(row + offset);
            exclude_from(logits, self.limits.token_limit);
            let next = sequence.tokens[position + 1];
            match logprobs_of(logits, next, top, &mut self.scratch) {
                Ok(logprobs) => sequence.prompt_logprobs.push(logprobs),
                Err(_) => sequence.fail(not_finite(), &mut self.outgoing),
            }
        }
    }

    /// What [`Model::forward_and_choose`] needs of the sequences of a step; `None` where the logits have to come here:
    /// the model does not choose, or a prompt's log-probabilities are wanted.
    fn prepare_choices(&mut self, plan: &[Planned]) -> Option<PreparedChoices> {
        // Asked with nothing first: what follows takes its time for grammars.
        if !self.model.can_choose(&[]) {
            return None;
        }
        let mut prepared = PreparedChoices::default();
        for part in plan {
            match wanted(&self.running[part.index], part.count) {
                LogitsWanted::None => {}
                LogitsWanted::All => return None,
                LogitsWanted::Last => {
                    let words = self.limits.token_limit.div_ceil(32);
                    prepared.add(part.index, &mut self.running[part.index], words, &mut self.raw).ok()?;
                }
            }
        }
        let can = self.model.can_choose(&prepared.rows(&self.running));
        can.then_some(prepared)
    }

    /// The choice at `row` of those that the model made.
    fn take_chosen(&mut self, row: usize) -> Result<(u32, Option<TokenLogprobs>), String> {
        let chosen = self.chosen.get_mut(row).ok_or_else(not_finite)?;
        let id = chosen.token.ok_or_else(not_finite)?;
        let logprobs = chosen.logprobs.take().map(|(logprob, top)| TokenLogprobs { id, logprob, top });
        Ok((id, logprobs))
    }

    /// Chooses the next token of a sequence from a row of logits.
    fn sample(&mut self, index: usize, row: usize) -> Result<(u32, Option<TokenLogprobs>), String> {
        let sequence = &mut self.running[index];
        let logits = self.logits.row_mut(row);
        exclude_from(logits, self.limits.token_limit);
        let logprobs = sequence.sampler.logprobs();
        if logprobs.is_some() {
            self.raw.clear();
            self.raw.extend_from_slice(logits);
        }
        sequence.sampler.adjust(logits);
        for &stop in sequence.excluded() {
            if let Some(logit) = logits.get_mut(stop as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        if let Some(constraint) = &mut sequence.constraint {
            constraint.mask(logits).map_err(|error| error.to_string())?;
        }
        let position = sequence.generated() as u64;
        let choice = sequence.sampler.choose(logits, position, &mut self.scratch);
        let token = choice.map_err(|_| not_finite())?;
        let logprobs = logprobs.map(|top| logprobs_of(&self.raw, token, top, &mut self.scratch));
        Ok((token, logprobs.transpose().map_err(|_| not_finite())?))
    }

    /// Takes in a token that was chosen.
    fn accept(&mut self, index: usize, token: u32, logprobs: Option<TokenLogprobs>, now: Instant) {
        self.record_token(index, now);
        let sequence = &mut self.running[index];
        if sequence.stop_token_ids.binary_search(&token).is_ok() {
            self.end(index, FinishReason::Stop, Some(token), now);
            return;
        }
        sequence.tokens.push(token);
        sequence.sampler.accept(token);
        sequence.send(Event::Token { id: token, logprobs }, &mut self.outgoing);
        if let Some(constraint) = &mut sequence.constraint {
            if let Err(error) = constraint.accept(token) {
                sequence.fail(error.to_string(), &mut self.outgoing);
                return;
            }
            if constraint.is_complete() {
                self.end(index, FinishReason::Stop, None, now);
                return;
            }
        }
        if self.running[index].generated() >= self.running[index].max_tokens {
            self.end(index, FinishReason::Length, None, now);
        }
    }

    fn record_token(&mut self, index: usize, now: Instant) {
        let sequence = &mut self.running[index];
        self.metrics.generation_tokens.inc();
        match sequence.last_token {
            None => {
                sequence.first_token = Some(now);
                let waited = now.saturating_duration_since(sequence.arrival);
                self.metrics.time_to_first_token.observe(waited.as_secs_f64());
                let prefill = sequence.timings().prefill;
                self.metrics.request_prefill_time.observe(prefill.as_secs_f64());
            }
            Some(last) => {
                let between = now.saturating_duration_since(last);
                self.metrics.inter_token_latency.observe(between.as_secs_f64());
            }
        }
        sequence.last_token = Some(now);
    }

    fn end(&mut self, index: usize, reason: FinishReason, stop_token: Option<u32>, now: Instant) {
        let sequence = &mut self.running[index];
        sequence.finish(reason, stop_token, &mut self.outgoing);
        count_end(&self.metrics, sequence, reason, now);
    }

    fn update_gauges(&self) {
        self.metrics.num_requests_running.set(self.running.len() as i64);
        self.metrics.num_requests_waiting.set(self.waiting.len() as i64);
        let used = self.pool.len() - self.pool.free();
        let share = used as f64 / self.pool.len().max(1) as f64;
        self.metrics.kv_cache_usage_perc.set(share);
    }
}

/// Choices of a step, before they are put together as the model takes them.
#[derive(Default)]
struct PreparedChoices {
    rows: Vec<PreparedRow>,
    changes: Vec<LogitChange>,
    masks: Vec<u32>,
}

struct PreparedRow {
    /// Index in `running`.
    sequence: usize,
    /// Into [`PreparedChoices::changes`].
    changes: std::ops::Range<usize>,
    /// Into [`PreparedChoices::masks`]; empty where everything is allowed.
    mask: std::ops::Range<usize>,
}

impl PreparedChoices {
    /// Adds a sequence at `index`, whose mask, where it has a grammar, has `words` words. `row` is room for a row of logits.
    fn add(
        &mut self,
        index: usize,
        sequence: &mut Sequence,
        words: usize,
        row: &mut Vec<f32>,
    ) -> Result<(), ConstraintError> {
        let first = self.changes.len();
        sequence.sampler.changes(sequence.excluded(), &mut self.changes);
        let first_word = self.masks.len();
        if let Some(constraint) = &mut sequence.constraint {
            self.masks.resize(first_word + words, u32::MAX);
            constraint.mask_bits(row, &mut self.masks[first_word..])?;
        }
        let (changes, mask) = (first..self.changes.len(), first_word..self.masks.len());
        self.rows.push(PreparedRow { sequence: index, changes, mask });
        Ok(())
    }

    /// The rows as the model takes them.
    fn rows<'a>(&'a self, running: &'a [Sequence]) -> Vec<RowChoice<'a>> {
        let choice = |row: &PreparedRow| {
            let sequence = &running[row.sequence];
            let (params, seed) = sequence.sampler.params();
            RowChoice {
                params,
                seed,
                position: sequence.generated() as u64,
                changes: &self.changes[row.changes.clone()],
                mask: Some(&self.masks[row.mask.clone()]).filter(|mask| !mask.is_empty()),
            }
        };
        self.rows.iter().map(choice).collect()
    }
}

/// Records a sequence that said all it had to say.
fn count_end(metrics: &Metrics, sequence: &Sequence, reason: FinishReason, now: Instant) {
    let whole = now.saturating_duration_since(sequence.arrival);
    sequence.tickets.queue().record_duration(whole);
    metrics.e2e_request_latency.observe(whole.as_secs_f64());
    let decode = sequence.timings().decode;
    metrics.request_decode_time.observe(decode.as_secs_f64());
    metrics.count_finished(reason.as_str());
}

fn not_finite() -> String {
    "the model's logits are not finite".to_owned()
}

/// Rows of the head without a token are never chosen.
fn exclude_from(logits: &mut [f32], token_limit: usize) {
    if let Some(beyond) = logits.get_mut(token_limit..) {
        beyond.fill(f32::NEG_INFINITY);
    }
}

/// Logits that a sequence needs from a step of `count` of its tokens.
fn wanted(sequence: &Sequence, count: usize) -> LogitsWanted {
    if sequence.prompt_logprobs_wanted.is_some() && !sequence.started {
        LogitsWanted::All
    } else if count == sequence.pending() {
        LogitsWanted::Last
    } else {
        LogitsWanted::None
    }
}
