//! A model without weights, whose every logit depends on the whole context *as read from the cache*.
//!
//! The cache holds, for each position, a hash of the tokens up to it. A block that the engine hands to
//! the wrong sequence, shares wrongly or frees too early changes the hash and with it the text.

use crate::engine::model::{
    BLOCK_LEN, KvGeometry, LogitsBuffer, LogitsWanted, Model, ModelError, ModelInfo, SequenceStep, check_batch,
};
use crate::test_support::tokenizer::{EOS, START};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Rows of the head: more than the tokenizer has tokens, as in a padded checkpoint.
pub const HEAD_ROWS: usize = 320;

/// What the model says.
#[derive(Debug, Clone)]
pub enum Script {
    /// Pseudo-random letters, a function of the context; about one text in 64 letters wants to end.
    Letters,
    /// These tokens after the head of an assistant's turn (`<|start|>assistant\n`), then the end.
    Reply(Vec<u32>),
}

/// What the model was made to do, visible from outside its thread.
#[derive(Debug, Default)]
pub struct Counters {
    /// Calls of `forward`.
    pub steps: AtomicU64,
    /// Tokens computed.
    pub tokens: AtomicU64,
    /// Largest number of sequences in one step.
    pub widest: AtomicU64,
}

/// The stand-in model.
#[derive(Debug)]
pub struct FakeModel {
    info: ModelInfo,
    script: Script,
    step_delay: Duration,
    cache: Vec<Slot>,
    counters: Arc<Counters>,
    fail_at_step: Option<u64>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    context_hash: u64,
    /// Tokens since the last start of a turn.
    since_start: u32,
}

impl FakeModel {
    /// A model with a context of `context_length` and a cache of `num_blocks` blocks.
    pub fn new(script: Script, context_length: usize, num_blocks: usize) -> Self {
        Self {
            info: ModelInfo {
                vocab_size: HEAD_ROWS,
                context_length,
                kv: KvGeometry { num_blocks, block_len: BLOCK_LEN },
                max_batch_tokens: 64,
                max_batch_sequences: 8,
            },
            script,
            step_delay: Duration::ZERO,
            cache: vec![Slot::default(); num_blocks * BLOCK_LEN],
            counters: Arc::default(),
            fail_at_step: None,
        }
    }

    /// Makes every step take at least `delay`.
    #[must_use]
    pub fn with_step_delay(mut self, delay: Duration) -> Self {
        self.step_delay = delay;
        self
    }

    /// Changes the limits of a batch.
    #[must_use]
    pub fn with_batch(mut self, tokens: usize, sequences: usize) -> Self {
        self.info.max_batch_tokens = tokens;
        self.info.max_batch_sequences = sequences;
        self
    }

    /// Makes step `step` (from 1) and all later ones fail as a lost device does.
    #[must_use]
    pub fn failing_at(mut self, step: u64) -> Self {
        self.fail_at_step = Some(step);
        self
    }

    /// The counters, to be read while the model runs.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    fn write_logits(&self, slot: Slot, row: &mut [f32]) {
        // Rows without a token are the most likely ones: whoever does not mask them fails.
        row.fill(50.0);
        let known = EOS as usize + 3;
        row[..known].fill(-20.0);
        match &self.script {
            Script::Letters => {
                for letter in 0..26u64 {
                    let value = mix(slot.context_hash ^ (letter << 32)) >> 40;
                    row[b'a' as usize + letter as usize] = value as f32 * (8.0 / (1u64 << 24) as f32);
                }
                if mix(slot.context_hash).is_multiple_of(64) {
                    row[EOS as usize] = 12.0;
                }
            }
            Script::Reply(tokens) => {
                /// Tokens of `<|start|>assistant\n` after the first.
                const HEAD: u32 = 10;
                let next = slot
                    .since_start
                    .checked_sub(HEAD)
                    .and_then(|index| tokens.get(index as usize))
                    .copied()
                    .unwrap_or(EOS);
                row[next as usize] = 20.0;
                // A runner-up, so that sampling at a temperature has a choice to make.
                row[b'?' as usize] = row[b'?' as usize].max(17.0);
            }
        }
    }
}

fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ (value >> 33)
}

impl Model for FakeModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &[SequenceStep<'_>], logits: &mut LogitsBuffer) -> Result<(), ModelError> {
        check_batch(&self.info, batch)?;
        let step = self.counters.steps.fetch_add(1, Ordering::SeqCst) + 1;
        if self.fail_at_step.is_some_and(|limit| step >= limit) {
            return Err(ModelError::Device { operation: "fake step", reason: "lost".to_owned() });
        }
        let widest = batch.len() as u64;
        self.counters.widest.fetch_max(widest, Ordering::SeqCst);
        let slot_of = |step: &SequenceStep<'_>, position: usize| {
            step.block_table[position / BLOCK_LEN] as usize * BLOCK_LEN + position % BLOCK_LEN
        };
        let mut row = 0;
        for step in batch {
            let mut slot = match step.start_pos {
                0 => Slot::default(),
                start => self.cache[slot_of(step, start - 1)],
            };
            for (offset, &token) in step.tokens.iter().enumerate() {
                slot.context_hash = mix(slot.context_hash ^ (u64::from(token) + 1));
                slot.since_start = if token == START { 0 } else { slot.since_start + 1 };
                self.cache[slot_of(step, step.start_pos + offset)] = slot;
                let wanted = match step.logits {
                    LogitsWanted::None => false,
                    LogitsWanted::Last => offset + 1 == step.tokens.len(),
                    LogitsWanted::All => true,
                };
                if wanted {
                    self.write_logits(slot, logits.row_mut(row));
                    row += 1;
                }
            }
            self.counters.tokens.fetch_add(step.tokens.len() as u64, Ordering::SeqCst);
        }
        if !self.step_delay.is_zero() {
            std::thread::sleep(self.step_delay);
        }
        Ok(())
    }
}
