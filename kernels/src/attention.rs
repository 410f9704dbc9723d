//! Causal attention over the paged cache, prompts and single tokens alike.
//!
//! Scores of up to 128 keys at a time, with the running maximum and sum of Milakov and Gimelshein's online softmax
//! (arXiv 1805.02867), so that memory does not grow with the context. Everything is f32.
//!
//! Prompts are divided by tokens and heads. Where every sequence has few tokens, its keys are divided too: one token of one
//! sequence still occupies all threads.
//!
//! A token's result does not depend on what else the step computes, bit for bit: chunks of keys begin at multiples of
//! their length, each is summed up by itself, and the sums are merged in order, whoever computed them.

use std::ops::Range;

use crate::context::{Context, Isa};
use crate::kv_cache::{BLOCK_LEN, Block, KvCache, SequenceSlots};
use crate::pool::ColumnBlock;
use crate::simd;

/// Blocks of keys whose scores are held at once.
const CHUNK_BLOCKS: usize = 8;
/// Positions in a chunk.
const CHUNK_LEN: usize = CHUNK_BLOCKS * BLOCK_LEN;
/// Rows (tokens times heads) that one unit of work aims at: they share each load of a key.
const ROWS: usize = 32;

/// Heads and scores of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads, a multiple of the cache's key/value heads.
    pub heads: usize,
    /// Factor of the scores, `1 / sqrt(D)` as a rule.
    pub scale: f32,
    /// A token sees itself and the `window - 1` positions before it; `None`: all before it.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
}

/// `out [T, heads * D]`: attention of the tokens of a step, in the order of `sequences`, over everything that the cache
/// holds of their sequences up to and including themselves. Row `t` of `x` `[T, stride]` holds the queries at `queries_at`.
///
/// # Panics
/// Where lengths disagree, or a block table does not cover its sequence.
#[allow(clippy::too_many_arguments)]
pub fn attention(
    cx: &Context,
    shape: &AttentionShape,
    cache: &KvCache,
    layer: usize,
    sequences: &[SequenceSlots<'_>],
    x: &[f32],
    stride: usize,
    queries_at: usize,
    out: &mut [f32],
) {
    let (kv_heads, dim) = (cache.shape().kv_heads, cache.shape().head_dim);
    let tokens: usize = sequences.iter().map(|s| s.tokens).sum();
    let width = shape.heads * dim;
    assert!(shape.heads.is_multiple_of(kv_heads), "{} heads over {kv_heads}", shape.heads);
    assert!(queries_at + width <= stride && x.len() >= tokens * stride, "{tokens} rows of {stride}");
    assert_eq!(out.len(), tokens * width, "outputs of {tokens} tokens");
    if tokens == 0 {
        return;
    }
    let group = shape.heads / kv_heads;
    let call = Call { isa: cx.isa(), shape, cache, layer, x, stride, queries_at, dim, group };
    if sequences.iter().all(|s| s.tokens * group <= ROWS) {
        call.by_keys(cx, sequences, out);
    } else {
        let row_unit = (ROWS / group).max(1);
        cx.pool().blocks_dealt(out, width, row_unit, group * dim, |_, block| call.by_tokens(sequences, block));
    }
}

struct Call<'a> {
    isa: Isa,
    shape: &'a AttentionShape,
    cache: &'a KvCache,
    layer: usize,
    x: &'a [f32],
    stride: usize,
    queries_at: usize,
    dim: usize,
    /// Query heads per key/value head.
    group: usize,
}

/// Consecutive tokens of one sequence, by row of the step and by position, and the heads of one group.
#[derive(Clone, Copy)]
struct Run<'a> {
    row: usize,
    position: usize,
    tokens: usize,
    block_table: &'a [u32],
    kv_head: usize,
}

/// Sums over some of the keys of a run: rows are tokens times heads of the group.
struct Partial<'a> {
    /// Per row, the largest score and the sum of the weights relative to it.
    state: &'a mut [[f32; 2]],
    /// Per row, the weighted sum of values `[D]`.
    sums: &'a mut [f32],
}

impl<'a> Partial<'a> {
    /// Floats of a partial of so many rows.
    fn len(rows: usize, dim: usize) -> usize {
        rows * (2 + dim)
    }

    /// Nothing summed up yet, in `floats` of [`Partial::len`].
    fn new(floats: &'a mut [f32], rows: usize) -> Self {
        let (state, sums) = floats.split_at_mut(2 * rows);
        let state = state.as_chunks_mut::<2>().0;
        state.fill([f32::NEG_INFINITY, 0.0]);
        sums.fill(0.0);
        Self { state, sums }
    }
}

impl Call<'_> {
    /// The rows of a block may belong to several sequences; each run of one sequence is computed by itself.
    fn by_tokens(&self, sequences: &[SequenceSlots<'_>], block: &mut ColumnBlock<'_>) {
        let (wanted, columns) = (block.rows(), block.columns());
        let mut first = 0;
        for sequence in sequences {
            let (start, end) = (first.max(wanted.start), (first + sequence.tokens).min(wanted.end));
            if start < end {
                let run = Run {
                    row: start,
                    position: sequence.start_pos + start - first,
                    tokens: end - start,
                    block_table: sequence.block_table,
                    kv_head: columns.start / (self.group * self.dim),
                };
                let rows = run.tokens * self.group;
                let length = Partial::len(rows, self.dim);
                let mut floats = vec![0.0; 2 * length];
                let (merged, one) = floats.split_at_mut(length);
                let mut merged = Partial::new(merged, rows);
                let mut buffers = Vec::new();
                self.load_queries(&run, &mut buffers);
                for (number, chunk) in chunks(self.visible_blocks(&run)).enumerate() {
                    if number == 0 {
                        self.sum_chunk(&run, chunk, &mut buffers, &mut merged);
                    } else {
                        let mut partial = Partial::new(one, rows);
                        self.sum_chunk(&run, chunk, &mut buffers, &mut partial);
                        self.merge(&mut merged, &partial);
                    }
                }
                for t in 0..run.tokens {
                    self.finish(&mut merged, t, block.row(run.row + t, columns.clone()));
                }
            }
            first += sequence.tokens;
        }
    }

    /// Divides the work by sequence, group of heads and chunk of keys.
    fn by_keys(&self, cx: &Context, sequences: &[SequenceSlots<'_>], out: &mut [f32]) {
        let kv_heads = self.cache.shape().kv_heads;
        let mut pieces = Vec::new();
        let mut row = 0;
        for sequence in sequences {
            let SequenceSlots { start_pos: position, tokens, block_table } = *sequence;
            for kv_head in 0..kv_heads {
                let run = Run { row, position, tokens, block_table, kv_head };
                let blocks = self.visible_blocks(&run);
                pieces.extend(chunks(blocks).map(|chunk| (run, chunk)));
            }
            row += tokens;
        }
        let lengths = pieces.iter().map(|(run, _)| Partial::len(run.tokens * self.group, self.dim));
        let mut floats = vec![0.0; lengths.sum()];
        let mut left = floats.as_mut_slice();
        let mut units: Vec<_> = pieces
            .into_iter()
            .map(|(run, blocks)| {
                let rows = run.tokens * self.group;
                let (own, rest) = std::mem::take(&mut left).split_at_mut(Partial::len(rows, self.dim));
                left = rest;
                (run, blocks, Partial::new(own, rows))
            })
            .collect();
        cx.pool().rows(&mut units, 1, |_, share| {
            let mut buffers = Vec::new();
            for (run, chunk, partial) in share {
                self.load_queries(run, &mut buffers);
                self.sum_chunk(run, chunk.clone(), &mut buffers, partial);
            }
        });

        let width = self.shape.heads * self.dim;
        let mut units = units.into_iter().peekable();
        while let Some((run, _, mut merged)) = units.next() {
            while let Some((_, _, next)) =
                units.next_if(|(other, ..)| (other.row, other.kv_head) == (run.row, run.kv_head))
            {
                self.merge(&mut merged, &next);
            }
            for t in 0..run.tokens {
                let at = (run.row + t) * width + run.kv_head * self.group * self.dim;
                self.finish(&mut merged, t, &mut out[at..at + self.group * self.dim]);
            }
        }
    }

    /// First position that a token sees.
    fn first_visible(&self, position: usize) -> usize {
        self.shape.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Blocks that any token of the run sees.
    fn visible_blocks(&self, run: &Run<'_>) -> Range<usize> {
        self.first_visible(run.position) / BLOCK_LEN..(run.position + run.tokens).div_ceil(BLOCK_LEN)
    }

    /// Puts the scaled queries of a run at the beginning of `buffers`, and room for [`Self::sum_chunk`] behind them.
    fn load_queries(&self, run: &Run<'_>, buffers: &mut Vec<f32>) {
        let (dim, group) = (self.dim, self.group);
        let rows = run.tokens * group;
        buffers.resize(rows * (dim + CHUNK_LEN) + BLOCK_LEN * dim, 0.0);
        let q = &mut buffers[..rows * dim];
        for (t, q) in q.chunks_exact_mut(group * dim).enumerate() {
            let at = (run.row + t) * self.stride + self.queries_at + run.kv_head * group * dim;
            q.copy_from_slice(&self.x[at..at + group * dim]);
        }
        simd::scale(self.isa, q, self.shape.scale);
    }

    /// A run's attention to the blocks of one chunk, into an empty `partial`. `buffers` is as [`Self::load_queries`] left
    /// them.
    fn sum_chunk(&self, run: &Run<'_>, chunk: Range<usize>, buffers: &mut [f32], partial: &mut Partial<'_>) {
        let (dim, group) = (self.dim, self.group);
        let rows = run.tokens * group;
        let (q, rest) = buffers.split_at_mut(rows * dim);
        let (scores, rest) = rest.split_at_mut(rows * CHUNK_LEN);
        let widened = &mut rest[..BLOCK_LEN * dim];
        for (i, b) in chunk.clone().enumerate() {
            let keys = self.cache.key_block(self.layer, run.kv_head, run.block_table[b] as usize);
            let keys = widen(self.isa, keys, widened);
            simd::scores(self.isa, q, keys, dim, &mut scores[i * BLOCK_LEN..], CHUNK_LEN);
        }
        let first = chunk.start * BLOCK_LEN;
        for r in 0..rows {
            let row = &mut scores[r * CHUNK_LEN..r * CHUNK_LEN + chunk.len() * BLOCK_LEN];
            partial.state[r] = self.weights(row, first, run.position + r / group);
        }
        for (i, b) in chunk.enumerate() {
            let values = self.cache.value_block(self.layer, run.kv_head, run.block_table[b] as usize);
            // Slots beyond the sequence hold what an earlier owner left, which may be NaN: a weight of 0 is not enough.
            let slots = (run.position + run.tokens - b * BLOCK_LEN).min(BLOCK_LEN);
            let values = &widen(self.isa, values, widened)[..slots * dim];
            simd::weighted_values(self.isa, &scores[i * BLOCK_LEN..], CHUNK_LEN, values, dim, partial.sums);
        }
    }

    /// Turns the scores of positions from `first` on into weights relative to their maximum; returns it and their sum.
    fn weights(&self, scores: &mut [f32], first: usize, position: usize) -> [f32; 2] {
        let end = (position + 1).saturating_sub(first).min(scores.len());
        let start = self.first_visible(position).saturating_sub(first).min(end);
        // Positions that are not visible may hold anything, a NaN of an earlier owner of the block included.
        scores[..start].fill(0.0);
        scores[end..].fill(0.0);
        let scores = &mut scores[start..end];
        if scores.is_empty() {
            return [f32::NEG_INFINITY, 0.0];
        }
        if let Some(cap) = self.shape.soft_cap {
            simd::soft_cap(self.isa, scores, cap);
        }
        let max = simd::max(self.isa, scores);
        [max, simd::exp_and_sum(self.isa, scores, max)]
    }

    /// Adds the sums over later keys.
    fn merge(&self, into: &mut Partial<'_>, from: &Partial<'_>) {
        let rows = into.sums.chunks_exact_mut(self.dim).zip(from.sums.chunks_exact(self.dim));
        for (((sums, more), state), other) in rows.zip(into.state.iter_mut()).zip(from.state.iter()) {
            let max = state[0].max(other[0]);
            // Nothing was visible in either.
            if max == f32::NEG_INFINITY && !(state[1] + other[1]).is_nan() {
                continue;
            }
            let (own, others) = ((state[0] - max).exp(), (other[0] - max).exp());
            for (sum, v) in sums.iter_mut().zip(more) {
                *sum = *sum * own + v * others;
            }
            *state = [max, state[1] * own + other[1] * others];
        }
    }

    /// Writes token `t` of a run: the heads of its group.
    fn finish(&self, partial: &mut Partial<'_>, t: usize, out: &mut [f32]) {
        for (h, out) in out.chunks_exact_mut(self.dim).enumerate() {
            let row = t * self.group + h;
            let sums = &mut partial.sums[row * self.dim..(row + 1) * self.dim];
            simd::scale(self.isa, sums, 1.0 / partial.state[row][1]);
            out.copy_from_slice(sums);
        }
    }
}

/// Cuts blocks where their number is a multiple of [`CHUNK_BLOCKS`].
fn chunks(blocks: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let first = blocks.start / CHUNK_BLOCKS * CHUNK_BLOCKS;
    let starts = (first..blocks.end).step_by(CHUNK_BLOCKS);
    starts.map(move |start| start.max(blocks.start)..(start + CHUNK_BLOCKS).min(blocks.end))
}

/// The block as f32: itself, or widened into `buffer`.
fn widen<'a>(isa: Isa, block: Block<'a>, buffer: &'a mut [f32]) -> &'a [f32] {
    match block {
        Block::F32(values) => values,
        Block::F16(bits) => {
            simd::widen_f16(isa, bits, &mut buffer[..bits.len()]);
            buffer
        }
        Block::E4m3(codes, scale) => {
            simd::widen_e4m3(isa, codes, scale, &mut buffer[..codes.len()]);
            buffer
        }
    }
}
