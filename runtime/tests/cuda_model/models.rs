//! A bundle as a model on the CPU and on the device, and sequences for both.

use crate::{GENERATED, PROMPT, SEQUENCES};
use std::path::Path;
use vt_bundle::Bundle;
use vt_bundle::mmap::ContiguousMap;
use vt_kernels::Activations;
use vt_kernels::cuda::kv_cache::CudaKvType;
use vt_kernels::kv_cache::KvType;
use vt_run::engine::model::{BLOCK_LEN, LogitsBuffer, LogitsWanted, Model, SequenceStep};
use vt_run::load::upload::UploadOptions;
use vt_run::load::{CpuDevice, CudaAccelerator, CudaArena, LoadedBundle, Uploading, Verify};
use vt_run::model::{
    ConfigError, CpuModel, CpuModelOptions, CudaModel, CudaModelOptions, ModelConfig, Rounding, StepLimits, StepRouting,
};

/// Blocks of the cache for each sequence.
const BLOCKS: usize = (PROMPT + GENERATED).div_ceil(BLOCK_LEN) + 1;
/// Positions that a sequence has room for.
pub const ROOM: usize = BLOCKS * BLOCK_LEN;
/// Blocks and positions of a long sequence.
const LONG_BLOCKS: usize = 48;
pub const LONG_ROOM: usize = LONG_BLOCKS * BLOCK_LEN;
/// Tokens of the largest step.
const STEP: usize = 600;

pub fn config(bundle: &Bundle) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_manifest(&bundle.manifest().model)
}

pub fn cpu(path: &Path) -> CpuModel<ContiguousMap> {
    changed_cpu(path, None, &|_| ())
}

/// With activations rounded, and with what `change` makes of the configuration.
pub fn changed_cpu(
    path: &Path,
    rounding: Option<Rounding>,
    change: &dyn Fn(&mut ModelConfig),
) -> CpuModel<ContiguousMap> {
    let bundle = Bundle::open(path).unwrap();
    let mut config = config(&bundle).unwrap();
    change(&mut config);
    let loaded = LoadedBundle::load(bundle, &CpuDevice::new(2), Verify::Host, &|_| ()).unwrap();
    let options = CpuModelOptions {
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        activations: Activations::F32,
        deterministic: false,
        kv_type: KvType::F32,
        kv_blocks: LONG_BLOCKS,
        context_length: LONG_ROOM,
        max_batch_tokens: STEP,
        max_batch_sequences: 1,
        rounding,
    };
    CpuModel::new(loaded, config, &options).unwrap()
}

pub fn cuda(path: &Path, kv_type: CudaKvType, deterministic: bool, graphs: bool) -> CudaModel {
    let limits = StepLimits { tokens: STEP, sequences: SEQUENCES, context: ROOM };
    let kv_blocks = SEQUENCES * BLOCKS;
    let options = CudaModelOptions { kv_type, kv_blocks, limits, deterministic, graphs, keep_routing: true };
    cuda_with(path, &options)
}

/// For one long sequence.
pub fn long_cuda(path: &Path, deterministic: bool) -> CudaModel {
    let limits = StepLimits { tokens: STEP, sequences: 1, context: LONG_ROOM };
    let (kv_type, kv_blocks) = (CudaKvType::Bf16, LONG_BLOCKS);
    let options = CudaModelOptions { kv_type, kv_blocks, limits, deterministic, graphs: true, keep_routing: false };
    cuda_with(path, &options)
}

fn cuda_with(path: &Path, options: &CudaModelOptions) -> CudaModel {
    let bundle = Bundle::open(path).unwrap();
    let config = config(&bundle).unwrap();
    let uploading = Uploading { accelerator: CudaAccelerator::new(0).unwrap(), options: UploadOptions::default() };
    let loaded: LoadedBundle<CudaArena> = LoadedBundle::load(bundle, &uploading, Verify::Device, &|_| ()).unwrap();
    CudaModel::new(loaded, config, options).unwrap()
}

/// Token ids that a vocabulary surely has, different for every `seed`.
pub fn ids(seed: usize, len: usize, vocabulary: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i * 31 + i * 17 + seed * 101 + 5) % vocabulary) as u32).collect()
}

fn batch<'a>(
    ids: &'a [Vec<u32>],
    blocks: &'a [Vec<u32>],
    parts: &[(usize, usize, usize)],
    all: bool,
) -> Vec<SequenceStep<'a>> {
    let step = |&(s, start_pos, count): &(usize, usize, usize)| SequenceStep {
        tokens: &ids[s][start_pos..start_pos + count],
        start_pos,
        block_table: &blocks[s],
        logits: if all { LogitsWanted::All } else { LogitsWanted::Last },
    };
    parts.iter().map(step).collect()
}

fn rows(logits: &LogitsBuffer, count: usize) -> Vec<Vec<f32>> {
    (0..count).map(|row| logits.row(row).to_vec()).collect()
}

/// Sequences and their blocks, which are spread over the cache.
pub struct Sequences {
    pub ids: Vec<Vec<u32>>,
    pub blocks: Vec<Vec<u32>>,
    logits: LogitsBuffer,
}

impl Sequences {
    pub fn new(ids: Vec<Vec<u32>>, places: usize, vocabulary: usize) -> Self {
        let blocks = (0..ids.len()).map(|s| (0..BLOCKS).map(|b| (b * places + s) as u32).collect()).collect();
        Self { ids, blocks, logits: LogitsBuffer::new(vocabulary) }
    }

    /// One sequence, which may be long, in blocks that lie backwards.
    pub fn long(ids: Vec<u32>, vocabulary: usize) -> Self {
        assert!(ids.len() <= LONG_ROOM, "{} tokens", ids.len());
        let blocks = (0..LONG_BLOCKS as u32).rev().collect();
        Self { ids: vec![ids], blocks: vec![blocks], logits: LogitsBuffer::new(vocabulary) }
    }

    /// One step over the tokens `start .. start + count` of each sequence named; rows of logits of the first one, of all
    /// positions or the last.
    pub fn step(&mut self, model: &mut dyn Model, parts: &[(usize, usize, usize)], all: bool) -> Vec<Vec<f32>> {
        let batch = batch(&self.ids, &self.blocks, parts, all);
        self.logits.reset(batch.iter().map(SequenceStep::logits_rows).sum());
        model.forward(&batch, &mut self.logits).unwrap();
        rows(&self.logits, batch[0].logits_rows())
    }

    /// The same with all positions of the first sequence, and the routing of its tokens, where there is one.
    pub fn step_routed(
        &mut self,
        model: &mut CudaModel,
        parts: &[(usize, usize, usize)],
        routing: &mut StepRouting,
    ) -> Vec<Vec<f32>> {
        let rows = self.step(model, parts, true);
        if let Some(of_step) = model.routing(&batch(&self.ids, &self.blocks, parts, true)).unwrap() {
            routing.extend(&of_step, parts[0].2);
        }
        rows
    }

    /// The first sequence from its start on the CPU, all of it in one step, with the experts that are given; its logits, and
    /// the CPU's own routing.
    pub fn step_given(
        &mut self,
        model: &mut CpuModel<ContiguousMap>,
        given: &StepRouting,
    ) -> (Vec<Vec<f32>>, StepRouting) {
        let count = self.ids[0].len();
        let batch = batch(&self.ids, &self.blocks, &[(0, 0, count)], true);
        self.logits.reset(count);
        let own = model.forward_routed(&batch, Some(given), &mut self.logits).unwrap();
        (rows(&self.logits, count), own)
    }

    /// Appends the routing of a sequence in the step that was computed last, over the tokens from `starts` on.
    pub fn append_routing(&self, model: &CudaModel, parts: &[(usize, usize)], s: usize, routing: &mut StepRouting) {
        let lengths = |&(s, start): &(usize, usize)| (s, start, self.ids[s].len() - start);
        let parts: Vec<_> = parts.iter().map(lengths).collect();
        let Some(mut of_step) = model.routing(&batch(&self.ids, &self.blocks, &parts, false)).unwrap() else { return };
        let before: usize = parts[..s].iter().map(|part| part.2).sum();
        for layer in &mut of_step.layers {
            layer.scores.drain(..before * layer.experts);
            layer.chosen.drain(..before * layer.top_k);
        }
        routing.extend(&of_step, parts[s].2);
    }

    /// One step over the tokens from `starts` on of the sequences named; the last row of each one's logits.
    pub fn step_each(&mut self, model: &mut dyn Model, parts: &[(usize, usize)]) -> Vec<Vec<f32>> {
        let batch: Vec<SequenceStep<'_>> = parts
            .iter()
            .map(|&(s, start_pos)| SequenceStep {
                tokens: &self.ids[s][start_pos..],
                start_pos,
                block_table: &self.blocks[s],
                logits: LogitsWanted::Last,
            })
            .collect();
        self.logits.reset(batch.len());
        model.forward(&batch, &mut self.logits).unwrap();
        (0..parts.len()).map(|row| self.logits.row(row).to_vec()).collect()
    }
}
