//! One forward pass as launches in a stream. Nothing here allocates or waits, and every number that differs from replay to
//! replay is read from the device's memory, so that a pass can be recorded.
//!
//! Axes: T tokens, K in-features, N out-features, D elements of a head.

use super::constants::Constant;
use super::network::{DeviceFeedForward, DeviceLayer, DeviceMlp, DeviceProduct, DeviceProjection, Network};
use super::step::{StepLayout, StepShape};
use super::workspace::WorkspaceLayout;
use crate::model::config::{Activation, LayerConfig, ModelConfig};
use std::sync::Arc;
use vt_kernels::activation::Gate;
use vt_kernels::attention::AttentionShape;
use vt_kernels::cuda::attention::{Attention, AttentionBatch, DecodeWorkspace, ProjectedHeads};
use vt_kernels::cuda::elementwise::{Columns, ElementwiseKernels, Placing};
use vt_kernels::cuda::gemm::{DeviceMatrix, EmbeddingKernels, Gemm, GemmInput, GemmRequest, NormAhead, OutType};
use vt_kernels::cuda::kv_cache::{CudaKvCache, KvScales};
use vt_kernels::cuda::moe::MoeKernels;
use vt_kernels::cuda::moe_rows::ExpertRowKernels;
use vt_kernels::cuda::norm::{HeadRows, NormKernels};
use vt_kernels::cuda::sampling::{Sampling, SamplingRequest};
use vt_kernels::cuda::{CudaContext, CudaError, CudaStream};

/// The kernels of a forward pass.
#[derive(Debug)]
pub(super) struct Kernels {
    pub embedding: EmbeddingKernels,
    pub norm: NormKernels,
    pub elementwise: ElementwiseKernels,
    pub gemm: Gemm,
    pub attention: Attention,
    pub sampling: Sampling,
    /// Where the model has experts.
    pub moe: Option<(MoeKernels, ExpertRowKernels)>,
}

impl Kernels {
    pub(super) fn new(
        context: &Arc<CudaContext>,
        config: &ModelConfig,
        cache: &CudaKvCache,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            embedding: EmbeddingKernels::new(context)?,
            norm: NormKernels::new(context)?,
            elementwise: ElementwiseKernels::new(context)?,
            gemm: Gemm::new(context)?,
            attention: Attention::new(context, config.num_heads, cache)?,
            sampling: Sampling::new(context)?,
            moe: match config.moe {
                Some(_) => Some((MoeKernels::new(context)?, ExpertRowKernels::new(context)?)),
                None => None,
            },
        })
    }
}

/// Where a projection's columns go.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// bf16 rows.
    Bf16(u64),
    /// f32 rows.
    F32(u64),
    /// Added to f32 rows.
    AddF32(u64),
}

impl Target {
    pub(super) fn address(self) -> u64 {
        match self {
            Target::Bf16(address) | Target::F32(address) | Target::AddF32(address) => address,
        }
    }

    pub(super) fn element(self) -> u64 {
        if matches!(self, Target::Bf16(_)) { 2 } else { 4 }
    }

    fn out_type(self) -> OutType {
        if matches!(self, Target::Bf16(_)) { OutType::Bf16 } else { OutType::F32 }
    }

    fn placing(self) -> Placing {
        match self {
            Target::Bf16(_) => Placing::Bf16,
            Target::F32(_) => Placing::F32,
            Target::AddF32(_) => Placing::AddF32,
        }
    }
}

/// What there is of the norm of the residual stream that a block begins with.
#[derive(Clone, Copy, Debug)]
enum NormState {
    /// Nothing yet; its weights.
    Missing(Constant),
    /// The half that [`NormAhead`] describes.
    Left,
    /// `normed` holds it.
    Done,
}

impl NormState {
    /// The weights of a norm of which there is nothing yet.
    fn missing(self) -> Option<Constant> {
        match self {
            Self::Missing(weights) => Some(weights),
            Self::Left | Self::Done => None,
        }
    }
}

/// Everything that launches of one step name.
pub(super) struct Pass<'a> {
    pub config: &'a ModelConfig,
    pub network: &'a Network,
    pub kernels: &'a Kernels,
    pub cache: &'a CudaKvCache,
    pub kv_scales: &'a [KvScales],
    pub decode: &'a DecodeWorkspace,
    pub stream: &'a CudaStream,
    /// Address of the workspace.
    pub workspace: u64,
    pub layout: &'a WorkspaceLayout,
    pub shape: StepShape,
    pub step: StepLayout,
    /// Results do not depend on the batch, bit for bit.
    pub deterministic: bool,
}

impl Pass<'_> {
    pub(super) fn at(&self, offset: u64) -> u64 {
        self.workspace + offset
    }

    /// An array of the step.
    fn sent(&self, offset: u64) -> u64 {
        self.workspace + self.layout.step + offset
    }

    pub(super) fn constant(&self, constant: Constant) -> u64 {
        constant.address(self.workspace + self.layout.constants)
    }

    /// Everything up to the residual stream after the last layer.
    pub(super) fn layers(&self) -> Result<(), CudaError> {
        let (config, tokens) = (self.config, self.shape.tokens);
        self.kernels.embedding.embed(
            self.stream,
            &self.kernels.gemm,
            &self.network.embedding,
            self.sent(self.step.tokens),
            tokens,
            config.embedding_scale,
            self.at(self.layout.residual),
        )?;
        for (rope, &angles) in self.network.ropes.iter().zip(&self.layout.angles) {
            let (positions, frequencies) = (self.sent(self.step.positions), self.constant(rope.frequencies));
            let norm = &self.kernels.norm;
            norm.rotations(self.stream, positions, frequencies, rope.factor, rope.half, tokens, self.at(angles))?;
        }
        for (index, (layer, layer_config)) in self.network.layers.iter().zip(&config.layers).enumerate() {
            self.layer(index, layer, layer_config)?;
        }
        Ok(())
    }

    /// Logits of the wanted rows `first .. first + rows`, to the front of the buffer for logits.
    pub(super) fn logits(&self, first: usize, rows: usize) -> Result<(), CudaError> {
        let wanted = self.sent(self.step.wanted) + 4 * first as u64;
        self.norm(self.network.norm, Some(wanted), rows)?;
        let (head, logits) = (&self.network.head, self.at(self.layout.logits));
        self.project(head, self.at(self.layout.normed), rows, Target::F32(logits), head.stride)?;
        match self.config.final_logit_softcap {
            Some(cap) => self.kernels.elementwise.soft_cap(self.stream, logits, rows, head.stride, head.stride, cap),
            None => Ok(()),
        }
    }

    /// Chooses a token below `token_limit` from every row of logits.
    pub(super) fn choose(&self, token_limit: usize) -> Result<(), CudaError> {
        self.kernels.sampling.sample(
            self.stream,
            &SamplingRequest {
                logits: self.at(self.layout.logits),
                stride: self.network.head.stride,
                vocabulary: token_limit,
                rows: self.shape.wanted,
                parameters: self.sent(self.step.choices),
                results: self.at(self.layout.chosen),
                host_results: None,
                tokens: 0,
                workspace: self.at(self.layout.sampling),
            },
        )
    }

    /// Norms of the residual stream into `normed`.
    pub(super) fn norm(&self, weight: Constant, rows: Option<u64>, count: usize) -> Result<(), CudaError> {
        let (x, out) = (self.at(self.layout.residual), self.at(self.layout.normed));
        let (width, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        self.kernels.norm.rms_norm(self.stream, x, rows, count, width, self.constant(weight), eps, out)
    }

    fn layer(&self, index: usize, layer: &DeviceLayer, config: &LayerConfig) -> Result<(), CudaError> {
        self.attention(index, layer, config)?;
        let ahead = self.leaves_feed_forward_norm(layer).then(|| self.ahead(layer.feed_forward_norm));
        // With a norm of its own, a block's output is added together with the norm that follows.
        self.block(layer.post_attention_norm, Some(layer.feed_forward_norm), |target| {
            self.project_inner(&layer.output, ahead.as_ref(), target)
        })?;
        let norm = match (layer.post_attention_norm, ahead) {
            (Some(_), _) => NormState::Done,
            (None, Some(_)) => NormState::Left,
            (None, None) => NormState::Missing(layer.feed_forward_norm),
        };
        self.block(layer.post_feed_forward_norm, None, |target| match &layer.feed_forward {
            DeviceFeedForward::Dense(mlp) => {
                let next = self.network.layers.get(index + 1).filter(|_| self.leaves_next_norm(index));
                self.mlp(mlp, norm, next.map(|next| self.ahead(next.input_norm)).as_ref(), target)
            }
            DeviceFeedForward::Experts(experts) => self.experts(index, experts, norm.missing(), target),
        })
    }

    /// Adds what `compute` gives to the residual stream, through the norm `post` where there is one; `normed` then holds the
    /// norm `next` of the sum.
    fn block(
        &self,
        post: Option<Constant>,
        next: Option<Constant>,
        compute: impl FnOnce(Target) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let residual = self.at(self.layout.residual);
        let Some(post) = post else { return compute(Target::AddF32(residual)) };
        let block = self.at(self.layout.block);
        compute(Target::F32(block))?;
        let next = next.map(|next| (self.constant(next), self.at(self.layout.normed)));
        let (tokens, width, eps) = (self.shape.tokens, self.config.hidden_size, self.config.rms_norm_eps);
        let norm = &self.kernels.norm;
        norm.post_norm_add(self.stream, block, self.constant(post), residual, next, tokens, width, eps)
    }

    /// From the residual stream to `inner`.
    fn attention(&self, index: usize, layer: &DeviceLayer, config: &LayerConfig) -> Result<(), CudaError> {
        let (model, tokens) = (self.config, self.shape.tokens);
        let (projected_at, inner) = (self.at(self.layout.projected), self.at(self.layout.inner));
        let [q_at, k_at, v_at] = layer.heads_at;
        let stride = layer.qkv.stride;
        let left = index.checked_sub(1).is_some_and(|before| self.leaves_next_norm(before));
        let norm = if left { NormState::Left } else { NormState::Missing(layer.input_norm) };
        self.project_normed(norm, &layer.qkv, Target::Bf16(projected_at))?;
        let half = self.network.ropes[config.rope].half;
        let (decoding, angles) = (self.shape.decode, self.at(self.layout.angles[config.rope]));
        let norms = layer.head_norms.map(|(q, k)| (self.constant(q), self.constant(k)));
        let attention = &self.kernels.attention;
        let projected = ProjectedHeads { keys_at: k_at, values_at: v_at, norms, eps: model.rms_norm_eps, angles };
        let projected = (decoding > 0 && attention.takes_projected(self.cache, half)).then_some(&projected);
        // Rows that decode prepares itself come first.
        let prepared = if projected.is_some() { decoding } else { 0 };
        let rows = HeadRows {
            x: projected_at + (2 * prepared * stride) as u64,
            stride,
            queries: (q_at, model.num_heads),
            keys_at: k_at,
            values_at: v_at,
            norms,
            eps: model.rms_norm_eps,
            angles: angles + (8 * prepared * half) as u64,
            half,
            slots: self.sent(self.step.slots) + 4 * prepared as u64,
        };
        let scales = self.kv_scales[index];
        self.kernels.norm.heads_to_cache(self.stream, &rows, self.cache, index, scales, tokens - prepared)?;
        let shape = AttentionShape {
            heads: model.num_heads,
            scale: model.attention_scale,
            window: config.window,
            soft_cap: model.attention_softcap,
        };
        let table_stride = self.step.table_stride;
        let tables = self.sent(self.step.tables);
        let batch = AttentionBatch {
            x: projected_at,
            stride,
            queries_at: q_at,
            out: inner,
            out_stride: model.query_rows(),
            sequences: decoding,
            starts: self.sent(self.step.decode_rows),
            lengths: self.sent(self.step.decode_lengths),
            block_tables: tables,
            table_stride,
        };
        if decoding > 0 {
            let (cache, scratch) = (self.cache, self.at(self.layout.attention));
            attention.decode(self.stream, &shape, cache, index, scales, &batch, projected, self.decode, scratch)?;
        }
        if self.shape.runs > 0 {
            let batch = AttentionBatch {
                sequences: self.shape.runs,
                starts: self.sent(self.step.run_starts),
                lengths: self.sent(self.step.run_lengths),
                block_tables: tables + 4 * (decoding * table_stride) as u64,
                ..batch
            };
            attention.prefill(self.stream, &shape, self.cache, index, scales, &batch, tokens - decoding)?;
        }
        Ok(())
    }

    pub(super) fn gate(&self) -> Gate {
        match self.config.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
        }
    }

    /// `act(gate) * up` of `rows` rows of `projected`, where the two begin at those columns, to `width` columns of `inner`.
    pub(super) fn gated(
        &self,
        rows: usize,
        stride: usize,
        [gate_at, up_at]: [usize; 2],
        width: usize,
    ) -> Result<(), CudaError> {
        let (x, out) = (self.at(self.layout.projected), self.at(self.layout.inner));
        self.kernels.elementwise.gated(self.stream, self.gate(), x, rows, stride, gate_at, up_at, width, out)
    }

    /// `norm`: of the residual stream. Leaves half of a norm where `ahead` asks for it.
    fn mlp(
        &self,
        mlp: &DeviceMlp,
        norm: NormState,
        ahead: Option<&NormAhead>,
        target: Target,
    ) -> Result<(), CudaError> {
        let (tokens, hidden) = (self.shape.tokens, self.config.hidden_size);
        let (gate_up, projected) = (&mlp.gate_up, self.at(self.layout.projected));
        self.project_normed(norm, gate_up, Target::Bf16(projected))?;
        let [gate_at, up_at] = mlp.columns;
        let aligned = [gate_at, up_at, gate_up.stride].iter().all(|n| n.is_multiple_of(8));
        if aligned && up_at > gate_at && self.makes_inputs(&mlp.down) {
            let input = GemmInput::Gated { gate: self.gate(), up_at: (up_at - gate_at) as u32 };
            let x = (projected + 2 * gate_at as u64, gate_up.stride);
            return self.project_made(&mlp.down, x, input, ahead, target, hidden);
        }
        self.gated(tokens, gate_up.stride, mlp.columns, mlp.down.k)?;
        self.project_inner(&mlp.down, ahead, target)
    }

    /// A projection of `inner` onto the residual stream; leaves half of a norm where `ahead` asks for it.
    fn project_inner(
        &self,
        projection: &DeviceProjection,
        ahead: Option<&NormAhead>,
        target: Target,
    ) -> Result<(), CudaError> {
        let (inner, hidden) = (self.at(self.layout.inner), self.config.hidden_size);
        match ahead {
            Some(_) => self.project_made(projection, (inner, projection.k), GemmInput::Rows, ahead, target, hidden),
            None => self.project(projection, inner, self.shape.tokens, target, hidden),
        }
    }

    pub(super) fn request(&self, x: u64, k: usize, rows: usize, target: Target, out_stride: usize) -> GemmRequest {
        GemmRequest {
            x,
            x_stride: k as u32,
            m: rows as u32,
            out: target.address(),
            out_type: target.out_type(),
            out_stride: out_stride as u32,
            bias: None,
            accumulate: matches!(target, Target::AddF32(_)),
            deterministic: self.deterministic,
        }
    }

    fn multiply(&self, matrix: &DeviceMatrix, request: &GemmRequest) -> Result<(), CudaError> {
        self.kernels.gemm.launch(self.stream, matrix, request, self.at(self.layout.gemm))
    }

    /// A projection of the residual stream, normed.
    fn project_normed(&self, norm: NormState, projection: &DeviceProjection, target: Target) -> Result<(), CudaError> {
        let (tokens, stride, normed) = (self.shape.tokens, projection.stride, self.at(self.layout.normed));
        let (eps, hidden) = (self.config.rms_norm_eps, self.config.hidden_size);
        match norm {
            NormState::Left => {
                let input = GemmInput::Weighted { squares: self.at(self.layout.squares), eps };
                return self.project_made(projection, (normed, hidden), input, None, target, stride);
            }
            NormState::Missing(norm) if self.makes_inputs(projection) => {
                let input = GemmInput::Normed { weight: self.constant(norm), eps };
                let x = (self.at(self.layout.residual), hidden);
                return self.project_made(projection, x, input, None, target, stride);
            }
            NormState::Missing(norm) => self.norm(norm, None, tokens)?,
            NormState::Done => {}
        }
        self.project(projection, normed, tokens, target, stride)
    }

    /// Where a product that adds to the residual stream leaves half of the norm that follows.
    fn ahead(&self, norm: Constant) -> NormAhead {
        let (out, squares) = (self.at(self.layout.normed), self.at(self.layout.squares));
        NormAhead { weight: self.constant(norm), out, squares }
    }

    /// Whether a layer's attention leaves half of the norm before its feed-forward block.
    fn leaves_feed_forward_norm(&self, layer: &DeviceLayer) -> bool {
        match &layer.feed_forward {
            DeviceFeedForward::Dense(mlp) => {
                layer.post_attention_norm.is_none() && self.leaves_norm(&layer.output, &mlp.gate_up)
            }
            DeviceFeedForward::Experts(_) => false,
        }
    }

    /// Whether the layer of that index leaves half of the norm that the next one begins with.
    fn leaves_next_norm(&self, index: usize) -> bool {
        let layers = &self.network.layers;
        let (Some(layer), Some(next)) = (layers.get(index), layers.get(index + 1)) else { return false };
        match &layer.feed_forward {
            DeviceFeedForward::Dense(mlp) => {
                layer.post_feed_forward_norm.is_none() && self.leaves_norm(&mlp.down, &next.qkv)
            }
            DeviceFeedForward::Experts(_) => false,
        }
    }

    /// Whether `from`, which adds to the residual stream, is one product that can leave half of the norm that `to` begins with.
    fn leaves_norm(&self, from: &DeviceProjection, to: &DeviceProjection) -> bool {
        let hidden = self.config.hidden_size;
        let whole = matches!(&from.products[..], [product] if product.stride == hidden && product.column == 0);
        let (gemm, rows) = (&self.kernels.gemm, self.shape.tokens as u32);
        whole
            && self.plain(from, |matrix| gemm.leaves_half_norm(matrix, rows))
            && self.plain(to, |matrix| gemm.takes_half_norm(matrix, rows))
    }

    /// Whether products make their activations themselves, with as few tokens as there are.
    fn makes_inputs(&self, projection: &DeviceProjection) -> bool {
        self.plain(projection, |matrix| self.kernels.gemm.makes_inputs(matrix, self.shape.tokens as u32))
    }

    /// Whether products read their rows as they are and write to their places, and `able` holds for all of their matrices.
    fn plain(&self, projection: &DeviceProjection, able: impl Fn(&DeviceMatrix) -> bool) -> bool {
        let plain = |p: &DeviceProduct| p.input_scale.is_none() && able(&p.matrix);
        !self.deterministic && projection.placed.is_none() && projection.products.iter().all(plain)
    }

    /// A projection of what products make of rows at an address, so many elements apart.
    fn project_made(
        &self,
        projection: &DeviceProjection,
        (x, x_stride): (u64, usize),
        input: GemmInput,
        ahead: Option<&NormAhead>,
        target: Target,
        stride: usize,
    ) -> Result<(), CudaError> {
        for product in &projection.products {
            let mut request = self.request(x, x_stride, self.shape.tokens, target, stride);
            request.out += target.element() * product.column as u64;
            request.bias = product.bias.map(|bias| self.constant(bias));
            let scratch = self.at(self.layout.gemm);
            self.kernels.gemm.launch_made(self.stream, &product.matrix, &request, input, ahead, scratch)?;
        }
        Ok(())
    }

    /// A projection of `x` bf16 `[rows, K]` to rows of `target` that are `stride` elements apart.
    pub(super) fn project(
        &self,
        projection: &DeviceProjection,
        x: u64,
        rows: usize,
        target: Target,
        stride: usize,
    ) -> Result<(), CudaError> {
        let k = projection.k;
        for (index, product) in projection.products.iter().enumerate() {
            let input = match product.input_scale {
                None => x,
                Some(scale) => {
                    let scaled = self.at(self.layout.scaled);
                    let elementwise = &self.kernels.elementwise;
                    elementwise.scale_inputs(self.stream, x, self.constant(scale), rows, k, scaled)?;
                    scaled
                }
            };
            let Some(outputs) = &projection.placed else {
                let mut request = self.request(input, k, rows, target, stride);
                request.out += target.element() * product.column as u64;
                request.bias = product.bias.map(|bias| self.constant(bias));
                self.multiply(&product.matrix, &request)?;
                continue;
            };
            let result = self.at(self.layout.product);
            self.multiply(&product.matrix, &self.request(input, k, rows, Target::F32(result), product.stride))?;
            for output in outputs.iter().filter(|o| o.product == index) {
                let mut from = Columns { address: result, stride: product.stride, at: output.product_column };
                let to = Columns { address: target.address(), stride, at: output.column };
                let mut scale = output.scale.map(|scale| self.constant(scale));
                let bias = output.bias.map(|bias| self.constant(bias));
                let elementwise = &self.kernels.elementwise;
                if let Some(branch) = &output.low_rank {
                    let sum = Columns { address: self.at(self.layout.placed), stride: output.rows, at: 0 };
                    elementwise.place_columns(self.stream, from, sum, Placing::F32, rows, output.rows, scale, None)?;
                    let (narrow, rank_stride) = (self.at(self.layout.low_rank), branch.rank.next_multiple_of(8));
                    self.multiply(&branch.down, &self.request(input, k, rows, Target::Bf16(narrow), rank_stride))?;
                    let mut up = self.request(narrow, branch.rank, rows, Target::AddF32(sum.address), output.rows);
                    up.x_stride = rank_stride as u32;
                    self.multiply(&branch.up, &up)?;
                    (from, scale) = (sum, None);
                }
                elementwise.place_columns(self.stream, from, to, target.placing(), rows, output.rows, scale, bias)?;
            }
        }
        Ok(())
    }
}
