//! What a step sends to the device: tokens, positions, places in the cache, the sequences with their blocks, and how their next
//! tokens are chosen, in one copy.
//!
//! Axes: T rows (tokens) of a step, B sequences.
//!
//! Rows are ordered for attention: first the sequences with one token, which decode together, then the runs of the others.
//! Rows beyond a step's own fill up a recorded batch: they are stored nowhere and nobody asks for their logits.

use crate::engine::model::{BLOCK_LEN, LogitsWanted, SequenceStep};
use vt_kernels::cuda::kv_cache::NO_SLOT;
use vt_kernels::cuda::sampling::SamplingRow;

/// The extent of a step, as launches are given it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepShape {
    /// T.
    pub tokens: usize,
    /// Sequences whose one token is attended by the decode kernel; their rows are the first ones.
    pub decode: usize,
    /// Sequences that are attended as runs of tokens.
    pub runs: usize,
    /// Rows whose logits are wanted.
    pub wanted: usize,
}

impl StepShape {
    /// The shape of a batch. With `runs_only`, single tokens are runs too.
    pub(super) fn of(batch: &[SequenceStep<'_>], runs_only: bool) -> Self {
        let decode = batch.iter().filter(|s| is_decode(s, runs_only)).count();
        Self {
            tokens: batch.iter().map(|s| s.tokens.len()).sum(),
            decode,
            runs: batch.len() - decode,
            wanted: batch.iter().map(SequenceStep::logits_rows).sum(),
        }
    }

    /// Whether every sequence has one token, whose logits are wanted: what is recorded and replayed.
    pub(super) fn is_generation(&self, sequences: usize) -> bool {
        self.tokens == sequences && self.wanted == sequences
    }

    /// A batch of `sequences` generating sequences, of the same kind as this one.
    pub(super) fn padded(&self, sequences: usize) -> Self {
        let (decode, runs) = if self.runs == 0 { (sequences, 0) } else { (0, sequences) };
        Self { tokens: sequences, decode, runs, wanted: sequences }
    }
}

fn is_decode(step: &SequenceStep<'_>, runs_only: bool) -> bool {
    !runs_only && step.tokens.len() == 1
}

/// Offsets in bytes of the arrays of a step, of u32 where nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepLayout {
    /// `[T]`.
    pub tokens: u64,
    /// `[T]`.
    pub positions: u64,
    /// `[T]`: block * 16 + place.
    pub slots: u64,
    /// Rows of wanted logits, in the order of the batch.
    pub wanted: u64,
    /// Row of each decoding sequence.
    pub decode_rows: u64,
    /// Positions of each decoding sequence, this step's included.
    pub decode_lengths: u64,
    /// First row of each run, and the end of the last.
    pub run_starts: u64,
    /// Positions of each run's sequence, this step's included.
    pub run_lengths: u64,
    /// How the token after each wanted row is chosen.
    pub choices: u64,
    /// `[B, table_stride]`, decoding sequences first.
    pub tables: u64,
    /// Entries of a sequence's table.
    pub table_stride: usize,
    /// All.
    pub bytes: u64,
}

impl StepLayout {
    pub(super) fn new(shape: &StepShape, table_stride: usize) -> Self {
        let mut end = 0u64;
        let mut place = |entries: usize| {
            let at = end;
            end = (at + 4 * entries as u64).next_multiple_of(16);
            at
        };
        Self {
            tokens: place(shape.tokens),
            positions: place(shape.tokens),
            slots: place(shape.tokens),
            wanted: place(shape.wanted),
            decode_rows: place(shape.decode),
            decode_lengths: place(shape.decode),
            run_starts: place(shape.runs + 1),
            run_lengths: place(shape.runs),
            choices: place(shape.wanted.min(shape.decode + shape.runs) * SamplingRow::BYTES / 4),
            tables: place((shape.decode + shape.runs) * table_stride),
            table_stride,
            bytes: end,
        }
    }

    /// The most bytes that a step within the limits takes.
    pub(super) fn largest(tokens: usize, sequences: usize, table_stride: usize) -> u64 {
        let shape = StepShape { tokens, decode: sequences, runs: sequences, wanted: tokens };
        // Sequences are of one kind or of the other; their tables are counted once.
        let tables = 4 * (sequences * table_stride) as u64;
        Self::new(&shape, table_stride).bytes - tables
    }
}

/// One array of u32 within the bytes of a step.
struct Words<'a>(&'a mut [[u8; 4]]);

impl Words<'_> {
    fn set(&mut self, index: usize, value: usize) {
        // Positions, rows and slots are below 2^32: the limits of the model and of its cache say so.
        self.0[index] = (value as u32).to_le_bytes();
    }
}

/// First row of each sequence of a batch.
pub(super) fn sequence_rows(batch: &[SequenceStep<'_>], runs_only: bool) -> Vec<usize> {
    let mut rows = vec![0; batch.len()];
    let mut row = 0;
    for decode in [true, false] {
        for (index, step) in batch.iter().enumerate().filter(|(_, s)| is_decode(s, runs_only) == decode) {
            rows[index] = row;
            row += step.tokens.len();
        }
    }
    rows
}

/// Writes a batch into `bytes`, laid out as `layout` for `shape`; rows of the shape beyond the batch are padding.
pub(super) fn fill(
    batch: &[SequenceStep<'_>],
    runs_only: bool,
    shape: &StepShape,
    layout: &StepLayout,
    bytes: &mut [u8],
) {
    let mut words = Words(bytes.as_chunks_mut::<4>().0);
    let at = |offset: u64, index: usize| (offset / 4) as usize + index;
    let sequence_rows = sequence_rows(batch, runs_only);
    let (mut row, mut decoding, mut runs) = (0, 0, 0);
    for decode in [true, false] {
        for step in batch.iter().filter(|s| is_decode(s, runs_only) == decode) {
            let end = step.start_pos + step.tokens.len();
            let table = if decode {
                words.set(at(layout.decode_rows, decoding), row);
                words.set(at(layout.decode_lengths, decoding), end);
                decoding += 1;
                decoding - 1
            } else {
                words.set(at(layout.run_starts, runs), row);
                words.set(at(layout.run_lengths, runs), end);
                runs += 1;
                shape.decode + runs - 1
            };
            let blocks = &step.block_table[..end.div_ceil(BLOCK_LEN)];
            for (i, &block) in blocks.iter().enumerate() {
                words.set(at(layout.tables, table * layout.table_stride + i), block as usize);
            }
            for (i, &token) in step.tokens.iter().enumerate() {
                let position = step.start_pos + i;
                let block = step.block_table[position / BLOCK_LEN] as usize;
                words.set(at(layout.tokens, row + i), token as usize);
                words.set(at(layout.positions, row + i), position);
                words.set(at(layout.slots, row + i), block * BLOCK_LEN + position % BLOCK_LEN);
            }
            row += step.tokens.len();
        }
    }
    for padding in row..shape.tokens {
        words.set(at(layout.tokens, padding), 0);
        words.set(at(layout.positions, padding), 0);
        words.set(at(layout.slots, padding), NO_SLOT as usize);
    }
    for padding in decoding..shape.decode {
        words.set(at(layout.decode_rows, padding), padding);
        words.set(at(layout.decode_lengths, padding), 0);
    }
    for padding in runs..shape.runs {
        words.set(at(layout.run_starts, padding), row);
        words.set(at(layout.run_lengths, padding), 0);
    }
    words.set(at(layout.run_starts, shape.runs), row);
    let mut wanted = 0;
    for (step, &first) in batch.iter().zip(&sequence_rows) {
        let rows = match step.logits {
            LogitsWanted::None => 0..0,
            LogitsWanted::Last => first + step.tokens.len() - 1..first + step.tokens.len(),
            LogitsWanted::All => first..first + step.tokens.len(),
        };
        for row in rows {
            words.set(at(layout.wanted, wanted), row);
            wanted += 1;
        }
    }
    for padding in wanted..shape.wanted {
        words.set(at(layout.wanted, padding), padding);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], offset: u64, count: usize) -> Vec<u32> {
        let words = &bytes.as_chunks::<4>().0[(offset / 4) as usize..];
        words[..count].iter().map(|w| u32::from_le_bytes(*w)).collect()
    }

    #[test]
    fn single_tokens_come_first_and_logits_keep_the_order_of_the_batch() {
        let prompt = [10, 11, 12];
        let step = |tokens, start_pos, block_table, logits| SequenceStep { tokens, start_pos, block_table, logits };
        let batch = [
            step(&prompt[..], 15, &[3, 7][..], LogitsWanted::All),
            step(&[20], 32, &[9, 8, 1], LogitsWanted::Last),
            step(&prompt[..2], 0, &[4], LogitsWanted::None),
        ];
        let shape = StepShape::of(&batch, false);
        assert_eq!(shape, StepShape { tokens: 6, decode: 1, runs: 2, wanted: 4 });
        let layout = StepLayout::new(&shape, 4);
        let mut bytes = vec![0xEE; layout.bytes as usize];
        fill(&batch, false, &shape, &layout, &mut bytes);
        assert_eq!(read(&bytes, layout.tokens, 6), [20, 10, 11, 12, 10, 11]);
        assert_eq!(read(&bytes, layout.positions, 6), [32, 15, 16, 17, 0, 1]);
        assert_eq!(read(&bytes, layout.slots, 6), [16, 63, 112, 113, 64, 65]);
        assert_eq!(read(&bytes, layout.wanted, 4), [1, 2, 3, 0]);
        assert_eq!(read(&bytes, layout.decode_rows, 1), [0]);
        assert_eq!(read(&bytes, layout.decode_lengths, 1), [33]);
        assert_eq!(read(&bytes, layout.run_starts, 3), [1, 4, 6]);
        assert_eq!(read(&bytes, layout.run_lengths, 2), [18, 2]);
        assert_eq!(read(&bytes, layout.tables, 3), [9, 8, 1]);
        assert_eq!(read(&bytes, layout.tables + 16, 2), [3, 7]);
        assert_eq!(read(&bytes, layout.tables + 32, 1), [4]);
        assert!(StepLayout::largest(6, 3, 4) >= layout.bytes);
    }

    #[test]
    fn padding_is_stored_nowhere() {
        let batch = [SequenceStep { tokens: &[5], start_pos: 2, block_table: &[6], logits: LogitsWanted::Last }];
        for runs_only in [false, true] {
            let own = StepShape::of(&batch, runs_only);
            assert!(own.is_generation(1));
            let shape = own.padded(4);
            let layout = StepLayout::new(&shape, 2);
            let mut bytes = vec![0xEE; layout.bytes as usize];
            fill(&batch, runs_only, &shape, &layout, &mut bytes);
            assert_eq!(read(&bytes, layout.slots, 4), [98, NO_SLOT, NO_SLOT, NO_SLOT]);
            assert_eq!(read(&bytes, layout.wanted, 4), [0, 1, 2, 3]);
            if runs_only {
                assert_eq!(read(&bytes, layout.run_starts, 5), [0, 1, 1, 1, 1]);
                assert_eq!(read(&bytes, layout.run_lengths, 4), [3, 0, 0, 0]);
            } else {
                assert_eq!(read(&bytes, layout.decode_rows, 4), [0, 1, 2, 3]);
                assert_eq!(read(&bytes, layout.decode_lengths, 4), [3, 0, 0, 0]);
            }
        }
    }
}
