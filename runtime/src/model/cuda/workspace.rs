//! The one allocation that a forward pass works in, besides weights and cache: where each buffer lies, from sizes alone.
//!
//! Axes: T tokens of a step, B sequences, K in-features, R rows of logits.

use super::choose::EXTRA_BYTES;
use super::experts::ExpertColumns;
use super::network::is_direct;
use super::step::StepLayout;
use crate::engine::model::BLOCK_LEN;
use crate::model::config::ModelConfig;
use crate::model::graph::{Experts, FeedForward, Graph, Projection};
use vt_kernels::cuda::attention::DecodeWorkspace;
use vt_kernels::cuda::gemm::NormAhead;
use vt_kernels::cuda::moe::RoutingTables;
use vt_kernels::cuda::sampling::{Sampling, SamplingResult};
use vt_kernels::kv_cache::KvShape;

/// Every buffer starts at a multiple of this many bytes.
const ALIGN: u64 = 256;
/// Rows of logits at once, at least: prompts whose every position is asked for take them in pieces.
const LOGIT_ROWS: usize = 64;

/// The largest step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// T.
    pub tokens: usize,
    /// B.
    pub sequences: usize,
    /// Positions of a sequence.
    pub context: usize,
}

impl StepLimits {
    /// Entries of a sequence's block table.
    pub(super) fn table_stride(&self) -> usize {
        self.context.div_ceil(BLOCK_LEN)
    }
}

/// Elements per token that the buffers of a network need, and which of them it needs at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Widths {
    projected: usize,
    inner: usize,
    scaled: usize,
    product: usize,
    placed: usize,
    rank: usize,
    scores: usize,
    outputs: usize,
}

impl Widths {
    fn of(graph: &Graph, top_k: usize) -> Self {
        let mut widths = Self::default();
        for layer in &graph.layers {
            widths.add(&layer.attention.qkv);
            widths.add(&layer.attention.output);
            widths.projected = widths.projected.max(layer.attention.qkv.stride);
            widths.inner = widths.inner.max(layer.attention.output.k);
            match &layer.feed_forward {
                FeedForward::Dense(mlp) => {
                    widths.add(&mlp.gate_up);
                    widths.add(&mlp.down);
                    widths.projected = widths.projected.max(mlp.gate_up.stride);
                    widths.inner = widths.inner.max(mlp.down.k);
                }
                FeedForward::Experts(Experts { router, experts }) => {
                    widths.add(router);
                    widths.scores = widths.scores.max(router.stride);
                    for mlp in experts {
                        let [projected, outputs] = [&mlp.gate_up, &mlp.down].map(|p| widths.add_expert(p, top_k));
                        widths.projected = widths.projected.max(projected * top_k);
                        widths.outputs = widths.outputs.max(outputs);
                        widths.inner = widths.inner.max(mlp.down.k * top_k);
                    }
                }
            }
        }
        widths.add(&graph.head);
        widths
    }

    /// Of a projection of an expert, which has a row for each of a token's `top_k` experts; gives the columns of its output.
    fn add_expert(&mut self, projection: &Projection, top_k: usize) -> usize {
        let columns = ExpertColumns::of(projection);
        for (index, product) in projection.products.iter().enumerate() {
            if columns.direct(projection, index).is_none() {
                self.product = self.product.max(product.stride * top_k);
            }
        }
        for branch in projection.outputs.iter().filter_map(|o| o.low_rank.as_ref()) {
            self.rank = self.rank.max(rank_stride(branch.down_stride) * top_k);
        }
        columns.stride
    }

    fn add(&mut self, projection: &Projection) {
        if projection.products.iter().any(|p| p.input_scale.is_some()) {
            self.scaled = self.scaled.max(projection.k);
        }
        if is_direct(projection) {
            return;
        }
        let product = projection.products.iter().map(|p| p.stride).max().unwrap_or(0);
        self.product = self.product.max(product);
        for (output, branch) in projection.outputs.iter().filter_map(|o| Some((o, o.low_rank.as_ref()?))) {
            self.placed = self.placed.max(output.rows);
            self.rank = self.rank.max(rank_stride(branch.down_stride));
        }
    }
}

/// Elements from row to row of what lies between the matrices of a low-rank branch.
pub(super) fn rank_stride(rank: usize) -> usize {
    rank.next_multiple_of(8)
}

/// The most bytes that a step sends.
pub(super) fn step_bytes(limits: &StepLimits) -> u64 {
    StepLayout::largest(limits.tokens, limits.sequences, limits.table_stride()) + EXTRA_BYTES
}

/// Offsets in bytes of all buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkspaceLayout {
    /// What a step sends.
    pub step: u64,
    /// Vectors of the model.
    pub constants: u64,
    /// Pairs of f32 `[T, half]`, one array per rotary embedding.
    pub angles: Vec<u64>,
    /// f32 `[T, hidden]`.
    pub residual: u64,
    /// bf16 `[T, hidden]`.
    pub normed: u64,
    /// Sums of squares of the residual stream, of few rows.
    pub squares: u64,
    /// bf16 `[T, K]`: an input times its scale.
    pub scaled: u64,
    /// bf16 `[T, stride]` of the input projections.
    pub projected: u64,
    /// bf16 `[T, K]` of the output projections.
    pub inner: u64,
    /// f32 `[T, hidden]` of a block whose output has a norm of its own.
    pub block: u64,
    /// f32 `[T, stride]` of products whose columns are put into their place.
    pub product: u64,
    /// f32 `[T, rows]`: columns that a low-rank branch is added to.
    pub placed: u64,
    /// bf16 `[T, rank]`.
    pub low_rank: u64,
    /// f32 `[T, experts]` and the tables of the routing; see [`WorkspaceLayout::routing`].
    routing: u64,
    /// Bytes from a layer's to the next layer's: none where layers use the same memory.
    routing_distance: u64,
    /// Bytes of the scores.
    scores: u64,
    /// bf16 `[T * top_k, hidden]`.
    pub gathered: u64,
    /// f32 `[T * top_k, stride]`, stride that of the experts' down projections.
    pub expert_outputs: u64,
    /// f32 `[R, stride of the head]`.
    pub logits: u64,
    /// R.
    pub logit_rows: usize,
    /// What was chosen, `[B]`.
    pub chosen: u64,
    /// Partial results of sampling.
    pub sampling: u64,
    /// Partial results of attention.
    pub attention: u64,
    /// Of products.
    pub gemm: u64,
    /// All.
    pub bytes: u64,
}

fn aligned(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(ALIGN)
}

/// Places buffers one after the other.
struct Places(u64);

impl Places {
    /// `None` on overflow.
    fn bytes(&mut self, bytes: u64) -> Option<u64> {
        let at = self.0;
        self.0 = aligned(at.checked_add(bytes)?)?;
        Some(at)
    }

    fn rows(&mut self, rows: usize, columns: usize, size: u64) -> Option<u64> {
        self.bytes((rows as u64).checked_mul(columns as u64)?.checked_mul(size)?)
    }
}

impl WorkspaceLayout {
    /// Buffers for steps within `limits`, `constants` bytes of vectors and `gemm` bytes for products; `None` on overflow. With
    /// `keep_routing`, every layer has memory of its own for its routing.
    pub(super) fn new(
        config: &ModelConfig,
        graph: &Graph,
        limits: &StepLimits,
        constants: u64,
        gemm: u64,
        keep_routing: bool,
    ) -> Option<Self> {
        const F32: u64 = 4;
        const BF16: u64 = 2;
        let (tokens, hidden) = (limits.tokens, config.hidden_size);
        let (top_k, experts) = config.moe.as_ref().map_or((0, 0), |moe| (moe.top_k, moe.num_experts));
        let widths = Widths::of(graph, top_k);
        let logit_rows = limits.sequences.max(LOGIT_ROWS).min(tokens);
        let shape = KvShape {
            layers: 1,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            blocks: limits.table_stride(),
        };
        let attention = DecodeWorkspace::new(limits.sequences, limits.context, config.num_heads, &shape)?;
        let scores = aligned((tokens as u64).checked_mul(widths.scores as u64)?.checked_mul(F32)?)?;
        let tables = if top_k > 0 { RoutingTables::bytes(tokens, experts, top_k)? } else { 0 };
        let routing = aligned(scores.checked_add(tables)?)?;
        let routings = if keep_routing { graph.layers.len() as u64 } else { 1 };
        let mut places = Places(0);
        let p = &mut places;
        let mut layout = Self {
            step: p.bytes(step_bytes(limits))?,
            constants: p.bytes(constants)?,
            angles: Vec::new(),
            residual: p.rows(tokens, hidden, F32)?,
            normed: p.rows(tokens, hidden, BF16)?,
            squares: p.bytes(NormAhead::squares_bytes(hidden))?,
            scaled: p.rows(tokens, widths.scaled, BF16)?,
            projected: p.rows(tokens, widths.projected, BF16)?,
            inner: p.rows(tokens, widths.inner, BF16)?,
            block: p.rows(if config.post_norms { tokens } else { 0 }, hidden, F32)?,
            product: p.rows(tokens, widths.product, F32)?,
            placed: p.rows(tokens, widths.placed, F32)?,
            low_rank: p.rows(tokens, widths.rank, BF16)?,
            routing: p.bytes(routing.checked_mul(routings)?)?,
            routing_distance: if keep_routing { routing } else { 0 },
            scores,
            gathered: p.rows(tokens.checked_mul(top_k)?, hidden, BF16)?,
            expert_outputs: p.rows(tokens.checked_mul(top_k)?, widths.outputs, F32)?,
            logits: p.rows(logit_rows, graph.head.stride, F32)?,
            logit_rows,
            chosen: p.rows(limits.sequences, SamplingResult::BYTES, 1)?,
            sampling: p.bytes(Sampling::workspace_bytes(limits.sequences))?,
            attention: p.bytes(attention.bytes())?,
            gemm: p.bytes(gemm)?,
            bytes: 0,
        };
        for rope in &config.ropes {
            layout.angles.push(p.rows(tokens, rope.rotary_dim, F32)?);
        }
        layout.bytes = places.0;
        Some(layout)
    }

    /// Offsets of a layer's scores, f32 `[T, stride of the router]`, and of the tables of its routing.
    pub(super) fn routing(&self, layer: usize) -> (u64, u64) {
        let at = self.routing + self.routing_distance * layer as u64;
        (at, at + self.scores)
    }
}
