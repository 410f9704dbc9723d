//! Causal attention over the paged cache, prompts and single tokens alike.
//!
//! Scores of up to 256 keys at a time, with the running maximum and sum of Milakov and Gimelshein's online softmax
//! (arXiv 1805.02867), so that memory does not grow with the context. Everything is f32.

use crate::context::{Context, Isa};
use crate::kv_cache::{BLOCK_LEN, Block, KvCache, SequenceSlots};
use crate::pool::ColumnBlock;
use crate::simd;

/// Blocks of keys whose scores are held at once.
const CHUNK_BLOCKS: usize = 16;
/// Positions in a chunk.
const CHUNK_LEN: usize = CHUNK_BLOCKS * BLOCK_LEN;
/// Rows (tokens times heads) that one unit of work aims at: they share each load of a key.
const ROWS: usize = 16;

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
    let threads = cx.pool().threads();
    // Heads of one group read the same keys; they are kept together unless that leaves threads without work.
    let together = if tokens * kv_heads >= 4 * threads { group } else { 1 };
    let row_unit = (ROWS / together).max(1);
    let call = Call { isa: cx.isa(), shape, cache, layer, sequences, x, stride, queries_at, group };
    cx.pool().blocks_dealt(out, width, row_unit, together * dim, |_, block| call.block(block));
}

struct Call<'a> {
    isa: Isa,
    shape: &'a AttentionShape,
    cache: &'a KvCache,
    layer: usize,
    sequences: &'a [SequenceSlots<'a>],
    x: &'a [f32],
    stride: usize,
    queries_at: usize,
    group: usize,
}

/// Consecutive tokens of one sequence, by row of the step and by position.
struct Run<'a> {
    row: usize,
    position: usize,
    tokens: usize,
    block_table: &'a [u32],
}

impl Call<'_> {
    /// The rows of a block may belong to several sequences; each run of one sequence is computed by itself.
    fn block(&self, block: &mut ColumnBlock<'_>) {
        let wanted = block.rows();
        let mut first = 0;
        for sequence in self.sequences {
            let (start, end) = (first.max(wanted.start), (first + sequence.tokens).min(wanted.end));
            if start < end {
                let run = Run {
                    row: start,
                    position: sequence.start_pos + start - first,
                    tokens: end - start,
                    block_table: sequence.block_table,
                };
                self.run(&run, block);
            }
            first += sequence.tokens;
        }
    }

    fn run(&self, run: &Run<'_>, block: &mut ColumnBlock<'_>) {
        let dim = self.cache.shape().head_dim;
        let columns = block.columns();
        let (first_head, heads) = (columns.start / dim, columns.len() / dim);
        let kv_head = first_head / self.group;
        let rows = run.tokens * heads;
        let mut buffers = vec![0.0f32; rows * (2 * dim + CHUNK_LEN) + BLOCK_LEN * dim];
        let (q, rest) = buffers.split_at_mut(rows * dim);
        let (sums, rest) = rest.split_at_mut(rows * dim);
        let (scores, widened) = rest.split_at_mut(rows * CHUNK_LEN);
        for (t, q) in q.chunks_exact_mut(heads * dim).enumerate() {
            let at = (run.row + t) * self.stride + self.queries_at + first_head * dim;
            q.copy_from_slice(&self.x[at..at + heads * dim]);
        }
        simd::scale(self.isa, q, self.shape.scale);

        // Per row: the largest score so far and the sum of the weights relative to it.
        let mut state = vec![(f32::NEG_INFINITY, 0.0f32); rows];
        let end = run.position + run.tokens;
        let start = self.first_visible(run.position) / BLOCK_LEN;
        for chunk in (start..end.div_ceil(BLOCK_LEN)).step_by(CHUNK_BLOCKS) {
            let blocks = chunk..(chunk + CHUNK_BLOCKS).min(end.div_ceil(BLOCK_LEN));
            for (i, b) in blocks.clone().enumerate() {
                let keys = self.cache.key_block(self.layer, kv_head, run.block_table[b] as usize);
                let keys = widen(self.isa, keys, widened);
                simd::scores(self.isa, q, keys, dim, &mut scores[i * BLOCK_LEN..], CHUNK_LEN);
            }
            for r in 0..rows {
                let position = run.position + r / heads;
                let row = &mut scores[r * CHUNK_LEN..r * CHUNK_LEN + blocks.len() * BLOCK_LEN];
                let sums = &mut sums[r * dim..(r + 1) * dim];
                self.weights(row, chunk * BLOCK_LEN, position, &mut state[r], sums);
            }
            for (i, b) in blocks.enumerate() {
                let values = self.cache.value_block(self.layer, kv_head, run.block_table[b] as usize);
                // Slots beyond the sequence hold what an earlier owner left, which may be NaN: a weight of 0 is not enough.
                let slots = (end - b * BLOCK_LEN).min(BLOCK_LEN);
                let values = &widen(self.isa, values, widened)[..slots * dim];
                simd::weighted_values(self.isa, &scores[i * BLOCK_LEN..], CHUNK_LEN, values, dim, sums);
            }
        }
        for (t, sums) in sums.chunks_exact_mut(heads * dim).enumerate() {
            let out = block.row(run.row + t, columns.clone());
            for (h, (out, sums)) in out.chunks_exact_mut(dim).zip(sums.chunks_exact_mut(dim)).enumerate() {
                simd::scale(self.isa, sums, 1.0 / state[t * heads + h].1);
                out.copy_from_slice(sums);
            }
        }
    }

    /// First position that a token sees.
    fn first_visible(&self, position: usize) -> usize {
        self.shape.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Turns the scores of positions from `first` on into weights relative to the running maximum, and rescales what has
    /// been summed up where the maximum grew.
    fn weights(&self, scores: &mut [f32], first: usize, position: usize, state: &mut (f32, f32), sums: &mut [f32]) {
        let visible = self.first_visible(position).saturating_sub(first).min(scores.len())
            ..(position + 1).saturating_sub(first).min(scores.len());
        if let Some(cap) = self.shape.soft_cap {
            simd::soft_cap(self.isa, &mut scores[visible.start..visible.end.max(visible.start)], cap);
        }
        // Positions that are not visible may hold anything, a NaN of an earlier owner of the block included.
        scores[..visible.start].fill(f32::NEG_INFINITY);
        scores[visible.end.max(visible.start)..].fill(f32::NEG_INFINITY);
        if visible.is_empty() {
            scores.fill(0.0);
            return;
        }
        let max = simd::max(self.isa, scores).max(state.0);
        if max > state.0 {
            let factor = (state.0 - max).exp();
            simd::scale(self.isa, sums, factor);
            *state = (max, state.1 * factor);
        }
        state.1 += simd::exp_and_sum(self.isa, scores, max);
    }
}

/// The block as f32: itself, or widened into `buffer`.
fn widen<'a>(isa: Isa, block: Block<'a>, buffer: &'a mut [f32]) -> &'a [f32] {
    match block {
        Block::F32(values) => values,
        Block::F16(bits) => {
            simd::widen_f16(isa, bits, &mut buffer[..bits.len()]);
            buffer
        }
    }
}
