//! The seam between the scheduler and whatever computes logits.
//!
//! Axis letters: `T` tokens of one step over all its sequences, `V` rows of the language-model head,
//! `R` rows of logits asked for in one step.
//!
//! The key/value cache is paged. The model owns the storage, [`KvGeometry::num_blocks`] blocks of
//! [`KvGeometry::block_len`] positions each; the engine owns the accounting, and says with every
//! sequence which blocks are its own. Position `p` of a sequence lives in block
//! `block_table[p / block_len]`, slot `p % block_len`.

use super::sampling::SamplingParams;
use std::time::Duration;
use thiserror::Error;

/// Positions in one block of the key/value cache.
///
/// 16 is what vLLM uses by default: small enough that the unused tail of a sequence wastes at most 15
/// positions, large enough that a prefix is hashed in few pieces.
pub const BLOCK_LEN: usize = 16;

/// Shape of the paged key/value cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGeometry {
    /// Blocks that the model has allocated.
    pub num_blocks: usize,
    /// Positions per block; [`BLOCK_LEN`] everywhere today.
    pub block_len: usize,
}

impl KvGeometry {
    /// Positions that the whole cache holds.
    pub fn capacity_tokens(&self) -> usize {
        self.num_blocks.saturating_mul(self.block_len)
    }

    /// Blocks that `tokens` positions occupy.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_len.max(1))
    }
}

/// What the engine needs to know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// `V`, rows of the head. May exceed the tokenizer's vocabulary where a checkpoint pads it.
    pub vocab_size: usize,
    /// Longest sequence (prompt and output together), in tokens.
    pub context_length: usize,
    /// The paged cache.
    pub kv: KvGeometry,
    /// Most tokens (`T`) that one [`Model::forward`] takes; the scheduler cuts prompts to it.
    pub max_batch_tokens: usize,
    /// Most sequences that one [`Model::forward`] takes.
    pub max_batch_sequences: usize,
}

/// Which positions of a step need logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsWanted {
    /// None: a chunk in the middle of a prompt.
    None,
    /// The last token only: what sampling needs.
    Last,
    /// Every token: log-probabilities of a prompt.
    All,
}

/// The part of one sequence that a step computes.
#[derive(Debug, Clone, Copy)]
pub struct SequenceStep<'a> {
    /// Token ids to compute, at positions `start_pos .. start_pos + tokens.len()`; never empty.
    pub tokens: &'a [u32],
    /// Position of `tokens[0]`. Keys and values of all earlier positions are in the cache already.
    pub start_pos: usize,
    /// Blocks of the sequence, in order of position. Covers at least `start_pos + tokens.len()`
    /// positions. Blocks before `start_pos / block_len` may be shared with other sequences and must
    /// not be written.
    pub block_table: &'a [u32],
    /// Rows of logits to write.
    pub logits: LogitsWanted,
}

impl SequenceStep<'_> {
    /// Rows of logits that this step writes.
    pub fn logits_rows(&self) -> usize {
        match self.logits {
            LogitsWanted::None => 0,
            LogitsWanted::Last => 1,
            LogitsWanted::All => self.tokens.len(),
        }
    }
}

/// Logits of one step, `[R, V]` row-major f32, reused from step to step.
///
/// Rows follow the order of the batch: first those of sequence 0, then those of sequence 1.
#[derive(Debug)]
pub struct LogitsBuffer {
    values: Vec<f32>,
    vocab_size: usize,
    rows: usize,
}

impl LogitsBuffer {
    /// An empty buffer for a head of `vocab_size` rows.
    pub fn new(vocab_size: usize) -> Self {
        Self { values: Vec::new(), vocab_size, rows: 0 }
    }

    /// Makes room for `rows` rows. Storage only ever grows, so that a warmed-up server does not
    /// allocate here; what earlier steps left in the rows is unspecified.
    pub fn reset(&mut self, rows: usize) {
        let needed = rows.saturating_mul(self.vocab_size);
        if self.values.len() < needed {
            self.values.resize(needed, 0.0);
        }
        self.rows = rows;
    }

    /// Rows of the present step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `V`.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// One row, `[V]`.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.vocab_size..(row + 1) * self.vocab_size]
    }

    /// One row, `[V]`, to be written or to be changed in place by sampling.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.vocab_size..(row + 1) * self.vocab_size]
    }

    /// All rows of the step at once, `[R, V]`, for a head that writes them in one GEMM.
    pub fn rows_mut(&mut self) -> &mut [f32] {
        &mut self.values[..self.rows * self.vocab_size]
    }
}

/// How the token after a sequence is chosen, for models that choose where the logits are.
#[derive(Debug, Clone, Copy)]
pub struct RowChoice<'a> {
    /// Temperature, filters, penalties, log-probabilities.
    pub params: &'a SamplingParams,
    /// Start of the sequence's random numbers.
    pub seed: u64,
    /// Tokens of the output so far.
    pub position: u64,
    /// Tokens whose logits a bias or a penalty changes, each once.
    pub changes: &'a [LogitChange],
    /// Bit `i` of word `i / 32` allows token `i`; all are allowed where there is none.
    pub mask: Option<&'a [u32]>,
}

/// A token whose logit differs from the model's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitChange {
    /// The token.
    pub token: u32,
    /// Added to its logit.
    pub bias: f32,
    /// How often it is in the output.
    pub output_count: u32,
    /// Whether it is in the prompt, where the repetition penalty asks for that.
    pub in_prompt: bool,
}

/// What was chosen for a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// The token; `None` where the logits have no meaning or exclude everything.
    pub token: Option<u32>,
    /// Where log-probabilities were asked for: the token's and the most likely alternatives, from the raw logits.
    pub logprobs: Option<(f32, Vec<(u32, f32)>)>,
}

/// Why a step could not be computed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The batch breaks the contract of [`SequenceStep`]; a defect of the caller.
    #[error("sequence {index} of the batch: {reason}")]
    InvalidStep {
        /// Index in the batch.
        index: usize,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// The device failed. No later step can be expected to work.
    #[error("device failure in {operation}: {reason}; restart the server")]
    Device {
        /// What was being done.
        operation: &'static str,
        /// What the driver said.
        reason: String,
    },
    /// Logits that are not finite, which would make every choice of a token arbitrary.
    #[error("sequence {index} of the batch: logits are not finite")]
    NotFinite {
        /// Index in the batch.
        index: usize,
    },
}

impl ModelError {
    /// Whether the model is of no further use. The engine then fails every request and stops.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Device { .. })
    }
}

/// A causal language model over a paged key/value cache.
pub trait Model: Send {
    /// Sizes and limits; constant over the model's life.
    fn info(&self) -> &ModelInfo;

    /// Computes one step: writes keys and values of all tokens of `batch` into the cache, then the
    /// logits asked for, into the rows that the engine has made ready with [`LogitsBuffer::reset`].
    ///
    /// Sequences of a batch are distinct; their order carries no meaning beyond the order of the rows.
    /// Does not allocate once it has seen the largest batch.
    ///
    /// # Errors
    /// [`ModelError::InvalidStep`] where the batch breaks the contract, before anything is written;
    /// [`ModelError::Device`] where the device failed.
    fn forward(&mut self, batch: &[SequenceStep<'_>], logits: &mut LogitsBuffer) -> Result<(), ModelError>;

    /// How long the device worked on the last step, where it measures that itself; where it does not, a step's time is that of
    /// the call.
    fn device_time(&self) -> Option<Duration> {
        None
    }

    /// Whether [`Model::forward_and_choose`] takes these choices. A model on the host never does: its logits are where
    /// they are sampled.
    fn can_choose(&self, _choices: &[RowChoice<'_>]) -> bool {
        false
    }

    /// As [`Model::forward`], but the logits stay where they are, and only what was chosen from them comes back: one entry of
    /// `chosen` for each of the `choices`, which are those of the sequences that want their last logits, in order. Tokens
    /// from `token_limit` on are never chosen. A row without meaning is an entry without a token. `meanwhile` is called once,
    /// where nothing fails before: when the device has its work and the host would wait.
    ///
    /// # Errors
    /// As [`Model::forward`]; [`ModelError::Device`] where the model cannot choose.
    fn forward_and_choose(
        &mut self,
        _batch: &[SequenceStep<'_>],
        _choices: &[RowChoice<'_>],
        _token_limit: usize,
        _chosen: &mut Vec<Chosen>,
        _meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ModelError> {
        Err(ModelError::Device { operation: "sampling", reason: "this model does not choose tokens".to_owned() })
    }
}

/// Checks a batch against the contract of [`SequenceStep`], for implementations of [`Model`].
///
/// # Errors
/// [`ModelError::InvalidStep`] naming the first offending sequence.
pub fn check_batch(info: &ModelInfo, batch: &[SequenceStep<'_>]) -> Result<(), ModelError> {
    let invalid = |index: usize, reason: String| Err(ModelError::InvalidStep { index, reason });
    if batch.len() > info.max_batch_sequences {
        let limit = info.max_batch_sequences;
        return invalid(limit, format!("batch holds at most {limit} sequences"));
    }
    let mut total = 0usize;
    for (index, step) in batch.iter().enumerate() {
        let Some(end) = step.start_pos.checked_add(step.tokens.len()) else {
            return invalid(index, "positions overflow".to_owned());
        };
        if step.tokens.is_empty() {
            return invalid(index, "no tokens".to_owned());
        }
        if end > info.context_length {
            let limit = info.context_length;
            return invalid(index, format!("ends at position {end}, context is {limit}"));
        }
        if step.block_table.len() < info.kv.blocks_for(end) {
            let (have, need) = (step.block_table.len(), info.kv.blocks_for(end));
            return invalid(index, format!("{have} blocks given, {need} needed"));
        }
        if let Some(block) = step.block_table.iter().find(|&&block| block as usize >= info.kv.num_blocks) {
            let limit = info.kv.num_blocks;
            return invalid(index, format!("block {block} of a cache of {limit}"));
        }
        if let Some(token) = step.tokens.iter().find(|&&token| token as usize >= info.vocab_size) {
            let limit = info.vocab_size;
            return invalid(index, format!("token {token} of a vocabulary of {limit}"));
        }
        total = total.saturating_add(step.tokens.len());
        if total > info.max_batch_tokens {
            let limit = info.max_batch_tokens;
            return invalid(index, format!("batch exceeds {limit} tokens"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> ModelInfo {
        ModelInfo {
            vocab_size: 8,
            context_length: 40,
            kv: KvGeometry { num_blocks: 4, block_len: BLOCK_LEN },
            max_batch_tokens: 32,
            max_batch_sequences: 2,
        }
    }

    fn step<'a>(tokens: &'a [u32], start_pos: usize, block_table: &'a [u32]) -> SequenceStep<'a> {
        SequenceStep { tokens, start_pos, block_table, logits: LogitsWanted::Last }
    }

    #[test]
    fn batches_that_break_the_contract_are_named() {
        let long = [0u32; 33];
        let cases: &[(&[SequenceStep<'_>], &str)] = &[
            (&[step(&[], 0, &[0])], "no tokens"),
            (&[step(&[1], 40, &[0, 1, 2])], "context is 40"),
            (&[step(&[1], usize::MAX, &[0])], "overflow"),
            (&[step(&[1], 16, &[0])], "1 blocks given, 2 needed"),
            (&[step(&[1], 0, &[4])], "block 4"),
            (&[step(&[8], 0, &[0])], "token 8"),
            (&[step(&long, 0, &[0, 1, 2])], "exceeds 32"),
            (&[step(&[1], 0, &[0]), step(&[1], 0, &[1]), step(&[1], 0, &[2])], "at most 2"),
        ];
        for (batch, expected) in cases {
            let message = check_batch(&info(), batch).unwrap_err().to_string();
            assert!(message.contains(expected), "{message} lacks {expected}");
        }
        assert!(check_batch(&info(), &[step(&[1, 2], 15, &[0, 3])]).is_ok());
    }

    #[test]
    fn logits_rows_keep_their_place() {
        let mut logits = LogitsBuffer::new(3);
        logits.reset(2);
        logits.row_mut(1)[2] = 5.0;
        assert_eq!(logits.rows_mut()[5], 5.0);
        assert_eq!(logits.row(1), [0.0, 0.0, 5.0]);
        logits.reset(1);
        assert_eq!(logits.rows_mut().len(), 3);
    }
}
