//! The forward pass on a CUDA device.
//!
//! - `constants`: vectors as f32; `network`, `experts`: the graph with addresses instead of names;
//! - `step`, `choose`: what a step sends; `workspace`: where every buffer lies;
//! - `forward`, `routed`: the launches of a pass; `routing`: which experts it took.
//!
//! Weights stay where the load has put them: matrices are addresses in the arena. Everything else is three allocations, made
//! before the first step: cache, workspace, and page-locked memory for what goes to the device and comes back. Activations
//! are bf16 where they enter a product, the residual stream, sums and logits are f32.
//!
//! Steps in which every sequence generates one token are recorded as CUDA graphs, by the number of sequences rounded up,
//! when such a number comes for the first time, and replayed from then on.

mod choose;
mod constants;
mod experts;
mod forward;
mod network;
mod routed;
mod routing;
mod step;
mod workspace;

pub use workspace::StepLimits;

use super::config::ModelConfig;
use super::graph::Graph;
use crate::engine::model::{
    BLOCK_LEN, Chosen, KvGeometry, LogitsBuffer, Model, ModelError, ModelInfo, RowChoice, SequenceStep, check_batch,
};
use crate::load::{CudaArena, LoadError, LoadedBundle};
use forward::{Kernels, Pass};
use network::{Builder, Network};
use std::collections::BTreeMap;
use std::time::Duration;
use step::{StepLayout, StepShape};
use vt_bundle::Bundle;
use vt_kernels::cuda::attention::{DecodeWorkspace, check_heads};
use vt_kernels::cuda::kv_cache::{CudaKvCache, CudaKvType, KvScales};
use vt_kernels::cuda::sampling::SamplingResult;
use vt_kernels::cuda::{CudaError, CudaGraph, CudaStream, DeviceMemory, Inbox, Outbox, Stopwatch};
use vt_kernels::kv_cache::KvShape;
use workspace::{WorkspaceLayout, step_bytes};

/// Room for partial sums of products, as far as a plan made without a device can say.
const GEMM_BYTES: u64 = 128 << 20;
/// Bytes of logits that are copied to the host at once; the next piece arrives while one is read.
const LOGITS_PIECE: usize = 8 << 20;

/// Sizes and modes of a [`CudaModel`].
#[derive(Clone, Copy, Debug)]
pub struct CudaModelOptions {
    /// Stored type of keys and values.
    pub kv_type: CudaKvType,
    /// Blocks of the key/value cache.
    pub kv_blocks: usize,
    /// The largest step, and the longest sequence.
    pub limits: StepLimits,
    /// A sequence's logits are the same bits whatever is computed beside it.
    pub deterministic: bool,
    /// Steps of generation are recorded and replayed.
    pub graphs: bool,
    /// Each layer's routing is kept until the next step, for [`CudaModel::routing`].
    pub keep_routing: bool,
}

/// Bytes of the workspace of a model, before there is a device: exact but for the room of products, for which it has a bound.
/// `None` on overflow.
///
/// # Errors
/// [`LoadError`] where the bundle does not hold what its architecture needs, or has no kernels.
pub fn cuda_workspace_bytes(
    config: &ModelConfig,
    bundle: &Bundle,
    limits: &StepLimits,
) -> Result<Option<u64>, LoadError> {
    check_heads(config.num_heads, config.num_kv_heads, config.head_dim).map_err(|error| {
        let reason = format!("{}: {error}; use --device cpu", bundle.dir().display());
        LoadError::Device { device: "cuda".to_owned(), reason }
    })?;
    let graph = Graph::resolve(config, bundle)?;
    let (_, constants) = Builder::new(config, bundle, 0).build(&graph, None)?;
    Ok(WorkspaceLayout::new(config, &graph, limits, constants.bytes(), GEMM_BYTES, false).map(|layout| layout.bytes))
}

/// A model that computes on a CUDA device, straight from the image of a loaded bundle.
///
/// It owns everything that it uses: weights, cache, workspace, kernels. Two of them share nothing.
pub struct CudaModel {
    /// First, so that it is dropped first: graphs name everything else.
    graphs: BTreeMap<(usize, Option<usize>), CudaGraph>,
    outbox: Outbox,
    inboxes: [Inbox; 2],
    stopwatch: Stopwatch,
    /// What the device spent on the last step.
    busy: Option<Duration>,
    kernels: Kernels,
    cache: CudaKvCache,
    workspace: DeviceMemory,
    layout: WorkspaceLayout,
    network: Network,
    kv_scales: Vec<KvScales>,
    decode: DecodeWorkspace,
    stream: CudaStream,
    config: ModelConfig,
    options: CudaModelOptions,
    info: ModelInfo,
    loaded: LoadedBundle<CudaArena>,
}

impl std::fmt::Debug for CudaModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaModel").field("bundle", &self.loaded.id()).field("info", &self.info).finish_non_exhaustive()
    }
}

impl Drop for CudaModel {
    fn drop(&mut self) {
        // What runs still uses what is dropped next.
        let _ = self.stream.synchronize();
    }
}

fn failed(error: &CudaError) -> LoadError {
    LoadError::Device { device: "cuda".to_owned(), reason: error.to_string() }
}

impl CudaModel {
    /// Resolves the graph, allocates cache and workspace, and fills in the vectors; later steps allocate nothing.
    ///
    /// # Errors
    /// [`LoadError::Graph`] where the bundle lacks something; [`LoadError::Device`] where the device fails or there are no
    /// kernels for something in the model; [`LoadError::DoesNotFit`].
    pub fn new(
        loaded: LoadedBundle<CudaArena>,
        config: ModelConfig,
        options: &CudaModelOptions,
    ) -> Result<Self, LoadError> {
        let graph = Graph::resolve(&config, loaded.bundle())?;
        let memory = loaded.arena().memory();
        let (context, image) = (memory.context(), memory.address());
        let divisors = match &graph.rope_divisors {
            None => None,
            Some(vector) => {
                let mut bytes = vec![0; vector.len() * vector.dtype().bytes()];
                memory.read(vector.offset(loaded.bundle()), &mut bytes).map_err(|e| failed(&e))?;
                let mut values = vec![0.0; vector.len()];
                vector.dtype().widen(&bytes, &mut values);
                Some(values)
            }
        };
        let (network, constants) = Builder::new(&config, loaded.bundle(), image).build(&graph, divisors)?;
        let made = (|| {
            let limits = options.limits;
            let shape = KvShape {
                layers: config.layers.len(),
                kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
                blocks: options.kv_blocks,
            };
            let stream = CudaStream::new(context)?;
            let cache = CudaKvCache::new(context, shape, options.kv_type)?;
            let kernels = Kernels::new(context, &config, &cache)?;
            // A token has a row for each of its experts.
            let rows = limits.tokens * config.moe.as_ref().map_or(1, |moe| moe.top_k);
            let gemm = network.matrices().map(|matrix| kernels.gemm.workspace_bytes(matrix, rows as u32)).max();
            let overflow = CudaError::OutOfMemory { what: "workspace", bytes: u64::MAX };
            let decode = DecodeWorkspace::new(limits.sequences, limits.context, config.num_heads, &shape);
            let layout = WorkspaceLayout::new(
                &config,
                &graph,
                &limits,
                constants.bytes(),
                gemm.unwrap_or(0),
                options.keep_routing,
            );
            let (Some(decode), Some(layout)) = (decode, layout) else { return Err(overflow) };
            let workspace = DeviceMemory::new(context, layout.bytes, "workspace")?;
            // Zero is what kernels want of their counters, and a number for the rows that fill up a recorded batch.
            workspace.clear(&stream)?;
            stream.synchronize()?;
            let bundle = (loaded.bundle(), image);
            constants.fill(&kernels.elementwise, &stream, bundle, &workspace, layout.constants)?;
            stream.synchronize()?;
            let outbox = Outbox::new(context, usize::try_from(step_bytes(&limits)).unwrap_or(usize::MAX))?;
            let piece = LOGITS_PIECE.max(4 * network.head.stride).max(limits.sequences * SamplingResult::BYTES);
            let inboxes = [Inbox::new(context, piece)?, Inbox::new(context, piece)?];
            let stopwatch = Stopwatch::new(context)?;
            Ok((stream, cache, kernels, decode, layout, workspace, outbox, inboxes, stopwatch))
        })();
        let (stream, cache, kernels, decode, layout, workspace, outbox, inboxes, stopwatch) =
            made.map_err(|e| failed(&e))?;
        let info = ModelInfo {
            vocab_size: config.vocab_size,
            context_length: options.limits.context,
            kv: KvGeometry { num_blocks: options.kv_blocks, block_len: BLOCK_LEN },
            max_batch_tokens: options.limits.tokens,
            max_batch_sequences: options.limits.sequences,
        };
        let kv_scales = super::kv_scales(loaded.manifest(), config.layers.len());
        let (graphs, options) = (BTreeMap::new(), *options);
        Ok(Self {
            graphs,
            outbox,
            inboxes,
            stopwatch,
            busy: None,
            kernels,
            cache,
            workspace,
            layout,
            network,
            kv_scales,
            decode,
            stream,
            config,
            options,
            info,
            loaded,
        })
    }

    /// The weights.
    pub fn loaded(&self) -> &LoadedBundle<CudaArena> {
        &self.loaded
    }

    fn table_stride(&self) -> usize {
        self.options.limits.table_stride()
    }

    /// The launches of a step of that shape.
    fn pass(&self, shape: StepShape) -> Pass<'_> {
        Pass {
            config: &self.config,
            network: &self.network,
            kernels: &self.kernels,
            cache: &self.cache,
            kv_scales: &self.kv_scales,
            decode: &self.decode,
            stream: &self.stream,
            workspace: self.workspace.address(),
            layout: &self.layout,
            shape,
            step: StepLayout::new(&shape, self.table_stride()),
            deterministic: self.options.deterministic,
        }
    }

    /// Writes the batch, and how its tokens are chosen, into the page-locked memory and starts its copy.
    fn send(
        &mut self,
        batch: &[SequenceStep<'_>],
        choices: &[RowChoice<'_>],
        shape: &StepShape,
    ) -> Result<(), CudaError> {
        let layout = StepLayout::new(shape, self.table_stride());
        let to = self.workspace.address() + self.layout.step;
        let bytes = self.outbox.bytes()?;
        step::fill(batch, self.options.deterministic, shape, &layout, bytes);
        let len = match choices {
            [] => layout.bytes as usize,
            choices => choose::fill(choices, shape.wanted, &layout, to, bytes),
        };
        self.stopwatch.begin(&self.stream)?;
        self.outbox.send(&self.stream, len, to)
    }

    /// Replays a generation of that shape, with the choice among tokens below `token_limit` where there is one; records it
    /// where there is none to replay.
    fn generate(&mut self, shape: StepShape, token_limit: Option<usize>) -> Result<(), CudaError> {
        let key = (shape.wanted, token_limit);
        if let Some(graph) = self.graphs.get(&key) {
            return graph.replay(&self.stream);
        }
        let pass = self.pass(shape);
        let submit = || -> Result<(), CudaError> {
            pass.layers()?;
            pass.logits(0, shape.wanted)?;
            token_limit.map_or(Ok(()), |limit| pass.choose(limit))
        };
        // The first time is submitted as it is, which also loads what kernels load when they first run.
        submit()?;
        let graph = CudaGraph::record(&self.stream, submit)?;
        self.graphs.insert(key, graph);
        Ok(())
    }

    /// The recorded shape that a batch is padded to, if it is one of generation.
    fn recorded(&self, shape: &StepShape, sequences: usize) -> Option<StepShape> {
        let recorded = self.options.graphs && shape.is_generation(sequences);
        recorded.then(|| shape.padded(padded_sequences(sequences, self.options.limits.sequences)))
    }

    /// A step whose tokens are chosen on the device.
    fn choose(
        &mut self,
        batch: &[SequenceStep<'_>],
        choices: &[RowChoice<'_>],
        token_limit: usize,
        chosen: &mut Vec<Chosen>,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), CudaError> {
        let shape = StepShape::of(batch, self.options.deterministic);
        match self.recorded(&shape, batch.len()) {
            Some(padded) => {
                self.send(batch, choices, &padded)?;
                self.generate(padded, Some(token_limit))?;
            }
            None => {
                self.send(batch, choices, &shape)?;
                let pass = self.pass(shape);
                pass.layers()?;
                if shape.wanted > 0 {
                    pass.logits(0, shape.wanted)?;
                    pass.choose(token_limit)?;
                }
            }
        }
        let (from, bytes) = (self.workspace.address() + self.layout.chosen, shape.wanted * SamplingResult::BYTES);
        self.inboxes[0].receive(&self.stream, from, bytes)?;
        self.stopwatch.end(&self.stream)?;
        meanwhile();
        choose::read(self.inboxes[0].wait()?, shape.wanted, chosen);
        self.busy = Some(self.stopwatch.elapsed()?);
        Ok(())
    }

    /// Copies `rows` rows of logits to `out`, `[rows, V]`.
    fn read_logits(&mut self, rows: usize, out: &mut [f32]) -> Result<(), CudaError> {
        let (stride, vocabulary) = (self.network.head.stride, self.config.vocab_size);
        let logits = self.workspace.address() + self.layout.logits;
        let at_once = (self.inboxes[0].capacity() / 4 / stride).max(1);
        let piece = |index: usize| {
            let first = index * at_once;
            (first, at_once.min(rows - first))
        };
        let pieces = rows.div_ceil(at_once);
        let mut outs = out.chunks_mut(at_once * vocabulary);
        for index in 0..=pieces {
            if index < pieces {
                let (first, count) = piece(index);
                let from = logits + (first * stride * 4) as u64;
                self.inboxes[index % 2].receive(&self.stream, from, count * stride * 4)?;
            }
            if let Some(out) = index.checked_sub(1).and_then(|_| outs.next()) {
                let bytes = self.inboxes[(index - 1) % 2].wait()?;
                for (row, out) in bytes.chunks_exact(4 * stride).zip(out.chunks_exact_mut(vocabulary)) {
                    for (value, out) in row.as_chunks::<4>().0.iter().zip(out) {
                        *out = f32::from_le_bytes(*value);
                    }
                }
            }
        }
        Ok(())
    }

    fn compute(&mut self, batch: &[SequenceStep<'_>], logits: &mut LogitsBuffer) -> Result<(), CudaError> {
        let shape = StepShape::of(batch, self.options.deterministic);
        let vocabulary = self.config.vocab_size;
        if let Some(padded) = self.recorded(&shape, batch.len()) {
            self.send(batch, &[], &padded)?;
            self.generate(padded, None)?;
            self.read_logits(shape.wanted, &mut logits.rows_mut()[..shape.wanted * vocabulary])?;
            return self.note_time();
        }
        self.send(batch, &[], &shape)?;
        self.pass(shape).layers()?;
        for first in (0..shape.wanted).step_by(self.layout.logit_rows) {
            let rows = self.layout.logit_rows.min(shape.wanted - first);
            self.pass(shape).logits(first, rows)?;
            self.read_logits(rows, &mut logits.rows_mut()[first * vocabulary..(first + rows) * vocabulary])?;
        }
        self.note_time()
    }

    /// Waits for the step, so that an error of the device belongs to it and not to the next, and notes what it took there.
    fn note_time(&mut self) -> Result<(), CudaError> {
        self.stopwatch.end(&self.stream)?;
        self.busy = Some(self.stopwatch.elapsed()?);
        Ok(())
    }
}

/// Sequences of the recorded batch for `sequences` of them: 1, 2, 4, then multiples of 8, at most `limit`.
fn padded_sequences(sequences: usize, limit: usize) -> usize {
    let rounded = if sequences <= 4 { sequences.next_power_of_two() } else { sequences.next_multiple_of(8) };
    rounded.min(limit)
}

impl Model for CudaModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &[SequenceStep<'_>], logits: &mut LogitsBuffer) -> Result<(), ModelError> {
        check_batch(&self.info, batch)?;
        if batch.is_empty() {
            return Ok(());
        }
        let computed = self.compute(batch, logits);
        computed.map_err(|e| ModelError::Device { operation: "a step", reason: e.to_string() })?;
        let vocabulary = self.config.vocab_size;
        let mut rows = logits.rows_mut().chunks_exact(vocabulary);
        for (index, step) in batch.iter().enumerate() {
            let own = rows.by_ref().take(step.logits_rows());
            if own.flatten().any(|v| !v.is_finite()) {
                return Err(ModelError::NotFinite { index });
            }
        }
        Ok(())
    }

    fn device_time(&self) -> Option<Duration> {
        self.busy
    }

    fn can_choose(&self, choices: &[RowChoice<'_>]) -> bool {
        choose::can_choose(choices, self.config.vocab_size)
    }

    fn forward_and_choose(
        &mut self,
        batch: &[SequenceStep<'_>],
        choices: &[RowChoice<'_>],
        token_limit: usize,
        chosen: &mut Vec<Chosen>,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), ModelError> {
        check_batch(&self.info, batch)?;
        chosen.clear();
        if batch.is_empty() {
            return Ok(());
        }
        let computed = self.choose(batch, choices, token_limit, chosen, meanwhile);
        computed.map_err(|e| ModelError::Device { operation: "a step", reason: e.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_batches_are_few_and_hold_what_they_are_for() {
        let sizes: Vec<usize> = (1..=33).map(|n| padded_sequences(n, 256)).collect();
        assert_eq!(sizes[..9], [1, 2, 4, 4, 8, 8, 8, 8, 16]);
        assert!(sizes.iter().enumerate().all(|(i, &size)| size > i));
        assert_eq!(padded_sequences(9, 10), 10);
    }
}
