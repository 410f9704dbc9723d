//! The forward pass on the CPU.
//!
//! Axes: T tokens of a step over all its sequences, H heads, D elements of a head, V rows of the head.

use super::config::{LayerConfig, ModelConfig};
use super::experts::{MlpBuffers, MlpInput};
use super::graph::{Attention, FeedForward, Graph, VectorRef};
use super::project::{Compute, FineRows};
use super::rounding::Rounding;
use super::routing::{LayerRouting, RoutingTap, StepRouting};
use super::workspace::{HEAD_ROWS, Workspace};
use crate::engine::model::{
    BLOCK_LEN, KvGeometry, LogitsBuffer, LogitsWanted, Model, ModelError, ModelInfo, SequenceStep, check_batch,
};
use crate::load::{HostArena, LoadError, LoadedBundle};
use vt_kernels::activation::{add, scale, soft_cap};
use vt_kernels::attention::{AttentionShape, attention};
use vt_kernels::kv_cache::{KvCache, KvShape, KvType, SequenceSlots};
use vt_kernels::norm::{rms_norm, rms_norm_heads};
use vt_kernels::rope::{RopeScaling, inverse_frequencies};
use vt_kernels::{Activations, Context, Pool};

/// Sizes and modes of a [`CpuModel`].
#[derive(Clone, Copy, Debug)]
pub struct CpuModelOptions {
    /// Compute threads, the caller included.
    pub threads: usize,
    /// How products treat activations.
    pub activations: Activations,
    /// Whether every row is computed alike, so that keys and values are the same bit for bit whether they come from a
    /// prompt, from an answer, or from the cache. Else rows of a prompt that need no logits take 8-bit activations as
    /// they are, which is quicker.
    pub deterministic: bool,
    /// Stored type of keys and values.
    pub kv_type: KvType,
    /// Blocks of the key/value cache.
    pub kv_blocks: usize,
    /// Longest sequence, in tokens.
    pub context_length: usize,
    /// Most tokens of one step.
    pub max_batch_tokens: usize,
    /// Most sequences of one step.
    pub max_batch_sequences: usize,
    /// Rounds activations further than f32 does; `None` except for measuring.
    pub rounding: Option<Rounding>,
}

/// A model that computes on the host, straight from the image of a loaded bundle.
///
/// It owns everything that it uses: weights, cache, workspace, threads. Two of them share nothing.
pub struct CpuModel<A> {
    loaded: LoadedBundle<A>,
    config: ModelConfig,
    graph: Graph,
    frequencies: Vec<(Vec<f32>, f32)>,
    cx: Context,
    activations: Activations,
    deterministic: bool,
    rounding: Option<Rounding>,
    cache: KvCache,
    workspace: Workspace,
    info: ModelInfo,
}

impl<A> std::fmt::Debug for CpuModel<A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuModel").field("bundle", &self.loaded.id()).field("info", &self.info).finish_non_exhaustive()
    }
}

impl<A: HostArena> CpuModel<A> {
    /// Resolves the graph and allocates cache and workspace; later steps allocate nothing that grows.
    ///
    /// # Errors
    /// [`LoadError::Graph`] where the bundle lacks something; [`LoadError::System`] where threads cannot be started;
    /// [`LoadError::DoesNotFit`] where the cache's size overflows.
    pub fn new(loaded: LoadedBundle<A>, config: ModelConfig, options: &CpuModelOptions) -> Result<Self, LoadError> {
        let graph = Graph::resolve(&config, loaded.bundle())?;
        let frequencies = frequencies(&config, &graph, &loaded);
        let cx =
            Context::new(options.threads).map_err(|source| LoadError::System { what: "compute threads", source })?;
        let shape = KvShape {
            layers: config.layers.len(),
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            blocks: options.kv_blocks,
        };
        let cache = KvCache::new(shape, options.kv_type).ok_or_else(|| LoadError::DoesNotFit {
            needed: u64::MAX,
            available: 0,
            advice: format!("the size of a key/value cache of {} blocks overflows", options.kv_blocks),
        })?;
        let cache = cache.with_scales(super::kv_scales(loaded.manifest(), config.layers.len()));
        let workspace = Workspace::new(&config, &graph, options.max_batch_tokens);
        let info = ModelInfo {
            vocab_size: config.vocab_size,
            context_length: options.context_length,
            kv: KvGeometry { num_blocks: options.kv_blocks, block_len: BLOCK_LEN },
            max_batch_tokens: options.max_batch_tokens,
            max_batch_sequences: options.max_batch_sequences,
        };
        let CpuModelOptions { activations, deterministic, rounding, .. } = *options;
        Ok(Self {
            loaded,
            config,
            graph,
            frequencies,
            cx,
            activations,
            deterministic,
            rounding,
            cache,
            workspace,
            info,
        })
    }

    /// The weights.
    pub fn loaded(&self) -> &LoadedBundle<A> {
        &self.loaded
    }

    /// The compute threads.
    pub fn pool(&self) -> &Pool {
        self.cx.pool()
    }
}

/// Radians per position and amplitude of every rotary embedding.
fn frequencies<A: HostArena>(config: &ModelConfig, graph: &Graph, loaded: &LoadedBundle<A>) -> Vec<(Vec<f32>, f32)> {
    let mut frequencies: Vec<_> = config.ropes.iter().map(|rope| rope.frequencies()).collect();
    if let (Some(vector), Some(first), Some(rope)) =
        (&graph.rope_divisors, frequencies.first_mut(), config.ropes.first())
    {
        let mut divisors = vec![0.0; vector.len()];
        vector.widen(loaded, &mut divisors);
        let scaling = RopeScaling::Divisors { divisors, attention_factor: f64::from(first.1) };
        *first = inverse_frequencies(rope.theta, rope.rotary_dim, &scaling);
    }
    frequencies
}

impl<A: HostArena> Model for CpuModel<A> {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &[SequenceStep<'_>], logits: &mut LogitsBuffer) -> Result<(), ModelError> {
        self.step(batch, logits, None)
    }
}

/// The routing that a step is given, and what it tells of its own.
struct Routed<'a> {
    given: Option<&'a StepRouting>,
    own: StepRouting,
}

impl<A: HostArena> CpuModel<A> {
    /// As [`Model::forward`], with the experts of `given` where that is not `None`: tokens in the order of the batch. Gives
    /// the model's own scores and choice for what it has computed so far.
    ///
    /// # Errors
    /// As for [`Model::forward`]; [`ModelError::InvalidStep`] where `given` is not for this step or names experts that are not
    /// there.
    pub fn forward_routed(
        &mut self,
        batch: &[SequenceStep<'_>],
        given: Option<&StepRouting>,
        logits: &mut LogitsBuffer,
    ) -> Result<StepRouting, ModelError> {
        if let (Some(given), Some(moe)) = (given, &self.config.moe) {
            let tokens: usize = batch.iter().map(|s| s.tokens.len()).sum();
            let fits = |(layer, config): (&LayerRouting, &LayerConfig)| {
                !config.moe
                    || (layer.top_k == moe.top_k
                        && layer.chosen.len() == tokens * moe.top_k
                        && layer.chosen.iter().all(|expert| (*expert as usize) < moe.num_experts))
            };
            if given.layers.len() != self.config.layers.len() || !given.layers.iter().zip(&self.config.layers).all(fits)
            {
                let reason = format!("a routing that is not one of {tokens} tokens with {} experts each", moe.top_k);
                return Err(ModelError::InvalidStep { index: 0, reason });
            }
        }
        let mut routed = Routed { given, own: StepRouting::default() };
        self.step(batch, logits, Some(&mut routed))?;
        Ok(routed.own)
    }

    fn step(
        &mut self,
        batch: &[SequenceStep<'_>],
        logits: &mut LogitsBuffer,
        mut routed: Option<&mut Routed<'_>>,
    ) -> Result<(), ModelError> {
        check_batch(&self.info, batch)?;
        let tokens: usize = batch.iter().map(|s| s.tokens.len()).sum();
        let slots: Vec<SequenceSlots<'_>> = batch
            .iter()
            .map(|s| SequenceSlots { start_pos: s.start_pos, tokens: s.tokens.len(), block_table: s.block_table })
            .collect();
        let hidden = self.config.hidden_size;
        self.embed(batch, tokens * hidden);
        let positions = || batch.iter().flat_map(|s| s.start_pos..s.start_pos + s.tokens.len());
        for (rotation, (inv_freq, factor)) in self.workspace.rotations.iter_mut().zip(&self.frequencies) {
            rotation.load(inv_freq, *factor, positions());
        }
        self.find_wanted_rows(batch);
        for layer in 0..self.graph.layers.len() {
            self.layer(layer, &slots, tokens, routed.as_deref_mut());
        }
        self.logits(batch, logits)
    }

    /// Writes the embedding of every token to the residual stream of `elements` elements.
    fn embed(&mut self, batch: &[SequenceStep<'_>], elements: usize) {
        let hidden = self.config.hidden_size;
        let weight = self.graph.embedding.weight(&self.loaded);
        let residual = &mut self.workspace.residual[..elements];
        let ids = batch.iter().flat_map(|s| s.tokens);
        // Decoding a row is gathering from many tiles; a prompt's rows are worth dividing among the threads.
        let mut rows: Vec<(u32, &mut [f32])> = ids.copied().zip(residual.chunks_exact_mut(hidden)).collect();
        if let [(id, row)] = rows.as_mut_slice() {
            weight.decode_row(*id as usize, row);
        } else {
            self.cx.pool().each(&mut rows, |_, (id, row)| weight.decode_row(*id as usize, row));
        }
        if self.config.embedding_scale != 1.0 {
            scale(&self.cx, residual, self.config.embedding_scale);
        }
    }

    /// Lists the rows of the step whose logits are wanted, in order, and those whose activations are pairs.
    fn find_wanted_rows(&mut self, batch: &[SequenceStep<'_>]) {
        let rows = &mut self.workspace.wanted_rows;
        rows.clear();
        let mut first = 0;
        for step in batch {
            let end = first + step.tokens.len() as u32;
            match step.logits {
                LogitsWanted::None => {}
                LogitsWanted::Last => rows.push(end - 1),
                LogitsWanted::All => rows.extend(first..end),
            }
            first = end;
        }
        let w = &mut self.workspace;
        w.fine_rows.clear();
        if self.deterministic {
            w.fine_rows.extend(0..first);
        } else {
            w.fine_rows.extend_from_slice(&w.wanted_rows);
        }
    }

    fn layer(&mut self, index: usize, slots: &[SequenceSlots<'_>], tokens: usize, routed: Option<&mut Routed<'_>>) {
        let mut tap = routed.as_ref().map(|routed| RoutingTap {
            given: routed.given.and_then(|given| given.layers.get(index)),
            own: LayerRouting::default(),
        });
        let (config, layer) = (&self.config, &self.graph.layers[index]);
        let stream = tokens * config.hidden_size;
        let compute =
            Compute { cx: &self.cx, loaded: &self.loaded, activations: self.activations, rounding: self.rounding };
        let w = &mut self.workspace;

        let norm = Norm { compute: &compute, config };
        norm.apply(&layer.input_norm, &w.residual[..stream], &mut w.vector, &mut w.normed[..stream]);
        compute.round(&mut w.normed[..stream]);
        let step = AttentionStep { compute: &compute, config, layer: &config.layers[index], index, slots, tokens };
        step.run(&layer.attention, w, &mut self.cache);
        if let Some(post) = &layer.post_attention_norm {
            norm.apply(post, &w.block[..stream], &mut w.vector, &mut w.normed[..stream]);
            add(&self.cx, &mut w.residual[..stream], &w.normed[..stream]);
        } else {
            add(&self.cx, &mut w.residual[..stream], &w.block[..stream]);
        }

        norm.apply(&layer.feed_forward_norm, &w.residual[..stream], &mut w.vector, &mut w.normed[..stream]);
        compute.round(&mut w.normed[..stream]);
        let fine = FineRows { all: &w.all_rows[..tokens], wanted: &w.fine_rows };
        let mut buffers = MlpBuffers {
            projected: &mut w.projected,
            inner: &mut w.inner,
            vector: &mut w.vector,
            scratch: &mut w.scratch,
        };
        let (input, out) = (MlpInput { x: &w.normed[..stream], fine }, &mut w.block[..stream]);
        match (&layer.feed_forward, &config.moe) {
            (FeedForward::Experts(experts), Some(moe)) => {
                let buffers = (&mut w.experts, &mut buffers);
                compute.experts(moe, experts, config.activation, input, buffers, tap.as_mut(), out);
            }
            (FeedForward::Dense(mlp), _) => compute.gated_mlp(mlp, config.activation, input, &mut buffers, out),
            (FeedForward::Experts(_), None) => unreachable!("experts are resolved from a configuration that has them"),
        }
        if let (Some(routed), Some(tap)) = (routed, tap) {
            routed.own.layers.push(tap.own);
        }
        if let Some(post) = &layer.post_feed_forward_norm {
            norm.apply(post, &w.block[..stream], &mut w.vector, &mut w.normed[..stream]);
            add(&self.cx, &mut w.residual[..stream], &w.normed[..stream]);
        } else {
            add(&self.cx, &mut w.residual[..stream], &w.block[..stream]);
        }
    }

    /// The last norm and the head, for the rows that the batch asks for.
    fn logits(&mut self, batch: &[SequenceStep<'_>], logits: &mut LogitsBuffer) -> Result<(), ModelError> {
        let config = &self.config;
        let hidden = config.hidden_size;
        let compute =
            Compute { cx: &self.cx, loaded: &self.loaded, activations: self.activations, rounding: self.rounding };
        let w = &mut self.workspace;
        // Rows asked for, in order, gathered to the front of `block`.
        let rows = w.wanted_rows.len();
        for (row, to) in w.wanted_rows.iter().zip(w.block.chunks_exact_mut(hidden)) {
            to.copy_from_slice(&w.residual[*row as usize * hidden..][..hidden]);
        }
        if rows == 0 {
            return Ok(());
        }
        let norm = Norm { compute: &compute, config };
        norm.apply(&self.graph.norm, &w.block[..rows * hidden], &mut w.vector, &mut w.normed[..rows * hidden]);
        compute.round(&mut w.normed[..rows * hidden]);
        let head = &self.graph.head;
        let out = &mut logits.rows_mut()[..rows * config.vocab_size];
        if head.stride == config.vocab_size {
            compute.project(head, &w.normed[..rows * hidden], FineRows::NONE, &mut w.scratch, &mut w.vector, out);
        } else {
            let inputs = w.normed[..rows * hidden].chunks(HEAD_ROWS * hidden);
            for (x, out) in inputs.zip(out.chunks_mut(HEAD_ROWS * config.vocab_size)) {
                let padded = &mut w.head[..x.len() / hidden * head.stride];
                compute.project(head, x, FineRows::NONE, &mut w.scratch, &mut w.vector, padded);
                let columns = padded.chunks_exact(head.stride).map(|row| &row[head.outputs[0].column..]);
                for (row, out) in columns.zip(out.chunks_exact_mut(config.vocab_size)) {
                    out.copy_from_slice(&row[..config.vocab_size]);
                }
            }
        }
        if let Some(cap) = config.final_logit_softcap {
            soft_cap(&self.cx, out, cap);
        }
        let mut rows = out.chunks_exact(config.vocab_size);
        for (index, step) in batch.iter().enumerate() {
            let own = rows.by_ref().take(step.logits_rows());
            if own.flatten().any(|v| !v.is_finite()) {
                return Err(ModelError::NotFinite { index });
            }
        }
        Ok(())
    }
}

/// Norms of the residual stream.
struct Norm<'a, A> {
    compute: &'a Compute<'a, A>,
    config: &'a ModelConfig,
}

impl<A: HostArena> Norm<'_, A> {
    /// `out = rms_norm(x) * (offset + weight)`.
    fn apply(&self, weight: &VectorRef, x: &[f32], vector: &mut [f32], out: &mut [f32]) {
        let weight = self.weight(weight, vector);
        rms_norm(self.compute.cx, x, weight, self.config.rms_norm_eps, out);
    }

    fn weight<'v>(&self, weight: &VectorRef, vector: &'v mut [f32]) -> &'v [f32] {
        let values = &mut vector[..weight.len()];
        weight.widen(self.compute.loaded, values);
        if self.config.norm_offset != 0.0 {
            values.iter_mut().for_each(|v| *v += self.config.norm_offset);
        }
        values
    }
}

/// Attention of one layer in one step.
struct AttentionStep<'a, A> {
    compute: &'a Compute<'a, A>,
    config: &'a ModelConfig,
    layer: &'a LayerConfig,
    index: usize,
    slots: &'a [SequenceSlots<'a>],
    tokens: usize,
}

impl<A: HostArena> AttentionStep<'_, A> {
    /// From `normed` to `block`.
    fn run(&self, attention_graph: &Attention, w: &mut Workspace, cache: &mut KvCache) {
        let (cx, config) = (self.compute.cx, self.config);
        let qkv = &attention_graph.qkv;
        let (stride, dim) = (qkv.stride, config.head_dim);
        let [q_at, k_at, v_at] = [0, 1, 2].map(|i| qkv.outputs[i].column);
        let fine = FineRows { all: &w.all_rows[..self.tokens], wanted: &w.fine_rows };
        let x = &w.normed[..self.tokens * config.hidden_size];
        let rows = &mut w.projected[..self.tokens * stride];
        self.compute.project(qkv, x, fine, &mut w.scratch, &mut w.vector, rows);
        self.compute.round(rows);

        let heads =
            [(q_at, config.num_heads, &attention_graph.q_norm), (k_at, config.num_kv_heads, &attention_graph.k_norm)];
        for (at, count, norm) in heads {
            if let Some(norm) = norm {
                let norm_of = Norm { compute: self.compute, config };
                let weight = norm_of.weight(norm, &mut w.vector);
                rms_norm_heads(cx, rows, stride, at, count, weight, config.rms_norm_eps);
            }
            w.rotations[self.layer.rope].apply(cx, rows, stride, at, count, dim);
        }
        self.compute.round(rows);
        cache.write(cx, self.index, self.slots, rows, stride, k_at, v_at);
        let shape = AttentionShape {
            heads: config.num_heads,
            scale: config.attention_scale,
            window: self.layer.window,
            soft_cap: config.attention_softcap,
        };
        let inner = &mut w.inner[..self.tokens * config.query_rows()];
        attention(cx, &shape, cache, self.index, self.slots, rows, stride, q_at, inner);
        self.compute.round(inner);
        let out = &mut w.block[..self.tokens * config.hidden_size];
        self.compute.project(&attention_graph.output, inner, fine, &mut w.scratch, &mut w.vector, out);
    }
}
