//! Buffers of a forward pass, allocated once for the largest step.
//!
//! Axes: T tokens of a step, K in-features.

use super::config::ModelConfig;
use super::graph::{FeedForward, GatedMlp, Graph, Projection};
use super::pair::{PAIR_ROWS, PairBuffers};
use super::project::ProjectionScratch;
use vt_kernels::rope::Rotation;

/// Rows of logits that are computed at once where the head pads its columns.
pub(super) const HEAD_ROWS: usize = 16;

/// Buffers that layers use one after the other.
#[derive(Debug)]
pub(super) struct Workspace {
    /// Residual stream, `[T, hidden]`.
    pub residual: Vec<f32>,
    /// Normalised input of a projection, `[T, hidden]`.
    pub normed: Vec<f32>,
    /// Result of the input projections of a block, `[T, stride]`.
    pub projected: Vec<f32>,
    /// Input of the output projection of a block, `[T, K]`.
    pub inner: Vec<f32>,
    /// Result of a block, `[T, hidden]`.
    pub block: Vec<f32>,
    /// `0..T`.
    pub all_rows: Vec<u32>,
    /// Rows of tokens whose logits are wanted.
    pub wanted_rows: Vec<u32>,
    /// Rows whose activations are pairs in every projection; see [`super::pair`].
    pub fine_rows: Vec<u32>,
    /// A vector of the bundle as f32.
    pub vector: Vec<f32>,
    /// Sines and cosines of the step, one per rotary embedding.
    pub rotations: Vec<Rotation>,
    /// Buffers of projections.
    pub scratch: ProjectionScratch,
    /// Router scores and gathered tokens.
    pub experts: ExpertBuffers,
    /// `[HEAD_ROWS, stride]` of a head whose columns are padded.
    pub head: Vec<f32>,
}

/// Buffers of mixtures of experts; empty without them.
#[derive(Debug, Default)]
pub(super) struct ExpertBuffers {
    /// `[T, experts]`.
    pub scores: Vec<f32>,
    /// Per token, its experts and their weights, `[T, top_k]`.
    pub choices: Vec<(u32, f32)>,
    /// Tokens of one expert.
    pub tokens: Vec<(u32, f32)>,
    /// Rows of `tokens` whose logits are wanted.
    pub wanted: Vec<u32>,
    /// Their inputs, `[tokens, hidden]`.
    pub input: Vec<f32>,
    /// Their outputs, `[tokens, hidden]`.
    pub output: Vec<f32>,
}

/// Elements of every buffer for steps of `tokens` tokens.
struct Sizes {
    projected: usize,
    inner: usize,
    vector: usize,
    scaled: usize,
    product: usize,
    low_rank: usize,
    head: usize,
    pair_input: usize,
    pair_output: usize,
    scores: usize,
    choices: usize,
}

impl Sizes {
    fn new(config: &ModelConfig, graph: &Graph, tokens: usize) -> Self {
        let mut sizes = Self {
            projected: 0,
            inner: 0,
            vector: config.hidden_size.max(config.head_dim),
            scaled: 0,
            product: 0,
            low_rank: 0,
            head: 0,
            pair_input: 0,
            pair_output: 0,
            scores: 0,
            choices: 0,
        };
        for layer in &graph.layers {
            sizes.add_paired(&layer.attention.qkv, tokens);
            sizes.add_paired(&layer.attention.output, tokens);
            sizes.projected = sizes.projected.max(layer.attention.qkv.stride * tokens);
            sizes.inner = sizes.inner.max(layer.attention.output.k * tokens);
            match &layer.feed_forward {
                FeedForward::Dense(mlp) => sizes.add_mlp(mlp, tokens),
                FeedForward::Experts(experts) => {
                    sizes.add_paired(&experts.router, tokens);
                    sizes.scores = sizes.scores.max(experts.router.stride * tokens);
                    sizes.choices = config.moe.as_ref().map_or(0, |m| m.top_k) * tokens;
                    experts.experts.iter().for_each(|mlp| sizes.add_mlp(mlp, tokens));
                }
            }
        }
        sizes.add_projection(&graph.head, HEAD_ROWS.min(tokens));
        if graph.head.stride != config.vocab_size {
            sizes.head = graph.head.stride * HEAD_ROWS.min(tokens);
        }
        sizes
    }

    fn add_mlp(&mut self, mlp: &GatedMlp, tokens: usize) {
        self.add_paired(&mlp.gate_up, tokens);
        self.add_paired(&mlp.down, tokens);
        self.projected = self.projected.max(mlp.gate_up.stride * tokens);
        self.inner = self.inner.max(mlp.down.k * tokens);
    }

    /// A projection of a layer, whose fine rows are pairs.
    fn add_paired(&mut self, projection: &Projection, tokens: usize) {
        let rows = 2 * PAIR_ROWS.min(tokens);
        for product in &projection.products {
            self.pair_input = self.pair_input.max(projection.k * rows);
            self.pair_output = self.pair_output.max(product.stride * rows);
        }
        self.add_projection(projection, tokens);
    }

    fn add_projection(&mut self, projection: &Projection, tokens: usize) {
        for product in &projection.products {
            if product.input_scale.is_some() {
                self.scaled = self.scaled.max(projection.k * tokens);
                self.vector = self.vector.max(projection.k);
            }
            if !projection.direct {
                self.product = self.product.max(product.stride * tokens);
            }
        }
        for output in &projection.outputs {
            if output.bias.is_some() {
                self.vector = self.vector.max(output.rows);
            }
            if let Some(branch) = &output.low_rank {
                self.low_rank = self.low_rank.max((branch.down_stride + branch.up_stride) * tokens);
            }
        }
    }
}

impl Workspace {
    /// Buffers for steps of up to `tokens` tokens.
    pub(super) fn new(config: &ModelConfig, graph: &Graph, tokens: usize) -> Self {
        let sizes = Sizes::new(config, graph, tokens);
        let stream = config.hidden_size * tokens;
        let has_experts = sizes.choices > 0;
        Self {
            residual: vec![0.0; stream],
            normed: vec![0.0; stream],
            projected: vec![0.0; sizes.projected],
            inner: vec![0.0; sizes.inner],
            block: vec![0.0; stream],
            all_rows: (0..tokens as u32).collect(),
            wanted_rows: Vec::with_capacity(tokens),
            fine_rows: Vec::with_capacity(tokens),
            vector: vec![0.0; sizes.vector],
            rotations: vec![Rotation::default(); config.ropes.len()],
            scratch: ProjectionScratch::new(
                PairBuffers::new(sizes.pair_input, sizes.pair_output),
                sizes.scaled,
                sizes.product,
                sizes.low_rank,
            ),
            experts: ExpertBuffers {
                scores: vec![0.0; sizes.scores],
                choices: Vec::with_capacity(sizes.choices),
                tokens: Vec::with_capacity(if has_experts { tokens } else { 0 }),
                wanted: Vec::with_capacity(if has_experts { tokens } else { 0 }),
                input: vec![0.0; if has_experts { stream } else { 0 }],
                output: vec![0.0; if has_experts { stream } else { 0 }],
            },
            head: vec![0.0; sizes.head],
        }
    }
}

/// Bytes of the workspace for steps of `tokens` tokens with `logit_rows` rows of logits, from the configuration alone.
///
/// A bound for the plan: padding to the tile is counted for every part, quantised activations as one byte an element
/// with their scales.
pub fn workspace_bytes(config: &ModelConfig, tokens: usize, logit_rows: usize) -> u64 {
    let tile = |n: usize| n.next_multiple_of(vt_bundle::tile::TILE_N) as u64;
    let width = match &config.moe {
        Some(moe) if config.layers.iter().all(|l| l.moe) => moe.intermediate_size,
        Some(moe) => moe.intermediate_size.max(config.intermediate_size),
        None => config.intermediate_size,
    };
    let qkv = tile(config.query_rows()) + 2 * tile(config.kv_rows());
    let projected = qkv.max(2 * tile(width));
    let inner = (config.query_rows().max(width)) as u64;
    let hidden = config.hidden_size as u64;
    let experts = config.moe.as_ref().map_or(0, |m| 2 * hidden + tile(m.num_experts) + 4 * m.top_k as u64);
    let rotary: u64 = config.ropes.iter().map(|r| r.rotary_dim as u64).sum();
    let per_token = 3 * hidden + projected + inner + experts + rotary;
    // Quantised activations: a byte an element, and for every 32 of them a scale and two sums.
    let quantised = hidden.max(inner) * (32 + 4 + 8) / 32;
    let pairs = 2 * PAIR_ROWS.min(tokens) as u64 * (hidden.max(inner) + projected.max(hidden));
    let head = (logit_rows + HEAD_ROWS) as u64 * tile(config.vocab_size);
    tokens as u64 * (4 * per_token + quantised) + 4 * (pairs + head)
}
