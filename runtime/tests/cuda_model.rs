//! The forward pass on CUDA against the CPU's, over every bundle in the folder that `VT_TEST_BUNDLES` names, on a device
//! (`VT_TEST_CUDA=1`).
//!
//! The CPU computes with f32 activations, CUDA with bf16 ones where they enter a product, so that logits differ by the
//! rounding of some 2^-9 at each. Where the two largest logits are further apart than that changes, both choose the same.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use vt_bundle::Bundle;
use vt_bundle::mmap::ContiguousMap;
use vt_kernels::Activations;
use vt_kernels::cuda::kv_cache::CudaKvType;
use vt_kernels::kv_cache::KvType;
use vt_run::engine::SamplingParams;
use vt_run::engine::model::{BLOCK_LEN, LogitChange, LogitsBuffer, LogitsWanted, Model, RowChoice, SequenceStep};
use vt_run::engine::sampling::{Sampler, SamplingScratch, logprobs_of};
use vt_run::load::upload::UploadOptions;
use vt_run::load::{CpuDevice, CudaAccelerator, CudaArena, LoadedBundle, Uploading, Verify};
use vt_run::model::{CpuModel, CpuModelOptions, CudaModel, CudaModelOptions, ModelConfig, StepLimits};

/// Largest difference of a logit from the CPU's, as a share of the largest logit of the model's answers.
const LOGIT_SHARE: f32 = 0.03;
/// Largest KL divergence at a position, in nats.
const KL_LIMIT: f64 = 0.01;
/// Mean KL divergence with keys and values in FP8, which keeps three bits of their mantissa.
const KL_LIMIT_FP8: f64 = 0.05;
/// Share of positions that may differ by more in a mixture of experts: where two experts are almost equally likely, rounding
/// chooses between them.
const ROUTED_SHARE: f64 = 0.1;
/// Sequences of the largest batch.
const SEQUENCES: usize = 32;
/// Tokens of the prompt that is followed, and of what is generated after it.
const PROMPT: usize = 37;
const GENERATED: usize = 24;
/// Blocks of the cache for each sequence.
const BLOCKS: usize = (PROMPT + GENERATED).div_ceil(BLOCK_LEN) + 1;

fn bundles() -> Vec<PathBuf> {
    if std::env::var_os("VT_TEST_CUDA").is_none_or(|v| v != "1") {
        eprintln!("SKIPPED: VT_TEST_CUDA=1 runs this on a device");
        return Vec::new();
    }
    let folder = std::env::var_os("VT_TEST_BUNDLES").expect("VT_TEST_BUNDLES names a folder of bundles");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries.filter(|path| path.join("manifest.json").is_file()).collect();
    found.sort();
    assert!(!found.is_empty(), "VT_TEST_BUNDLES has no bundles");
    found
}

fn config(bundle: &Bundle) -> ModelConfig {
    ModelConfig::from_manifest(&bundle.manifest().model).unwrap()
}

fn cpu(path: &Path) -> CpuModel<ContiguousMap> {
    let bundle = Bundle::open(path).unwrap();
    let config = config(&bundle);
    let loaded = LoadedBundle::load(bundle, &CpuDevice::new(2), Verify::Host, &|_| ()).unwrap();
    let options = CpuModelOptions {
        threads: 4,
        activations: Activations::F32,
        deterministic: false,
        kv_type: KvType::F32,
        kv_blocks: BLOCKS,
        context_length: BLOCKS * BLOCK_LEN,
        max_batch_tokens: PROMPT + GENERATED,
        max_batch_sequences: 1,
    };
    CpuModel::new(loaded, config, &options).unwrap()
}

fn cuda(path: &Path, kv_type: CudaKvType, deterministic: bool, graphs: bool) -> CudaModel {
    let bundle = Bundle::open(path).unwrap();
    let config = config(&bundle);
    let uploading = Uploading { accelerator: CudaAccelerator::new(0).unwrap(), options: UploadOptions::default() };
    let loaded: LoadedBundle<CudaArena> = LoadedBundle::load(bundle, &uploading, Verify::Device, &|_| ()).unwrap();
    let limits = StepLimits { tokens: 600, sequences: SEQUENCES, context: BLOCKS * BLOCK_LEN };
    let options = CudaModelOptions { kv_type, kv_blocks: SEQUENCES * BLOCKS, limits, deterministic, graphs };
    CudaModel::new(loaded, config, &options).unwrap()
}

/// Token ids that a vocabulary surely has, different for every `seed`.
fn ids(seed: usize, len: usize, vocabulary: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i * 31 + i * 17 + seed * 101 + 5) % vocabulary) as u32).collect()
}

/// Sequences and their blocks, which are spread over the cache.
struct Sequences {
    ids: Vec<Vec<u32>>,
    blocks: Vec<Vec<u32>>,
    logits: LogitsBuffer,
}

impl Sequences {
    fn new(ids: Vec<Vec<u32>>, places: usize, vocabulary: usize) -> Self {
        let blocks = (0..ids.len()).map(|s| (0..BLOCKS).map(|b| (b * places + s) as u32).collect()).collect();
        Self { ids, blocks, logits: LogitsBuffer::new(vocabulary) }
    }

    /// One step over the tokens `start .. start + count` of each sequence named; rows of logits of the first one.
    fn step(&mut self, model: &mut dyn Model, parts: &[(usize, usize, usize)], all: bool) -> Vec<Vec<f32>> {
        let wanted = if all { LogitsWanted::All } else { LogitsWanted::Last };
        let batch: Vec<SequenceStep<'_>> = parts
            .iter()
            .map(|&(s, start_pos, count)| SequenceStep {
                tokens: &self.ids[s][start_pos..start_pos + count],
                start_pos,
                block_table: &self.blocks[s],
                logits: wanted,
            })
            .collect();
        self.logits.reset(batch.iter().map(SequenceStep::logits_rows).sum());
        model.forward(&batch, &mut self.logits).unwrap();
        let own = batch[0].logits_rows();
        (0..own).map(|row| self.logits.row(row).to_vec()).collect()
    }
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&v| f64::from(v - max).exp()).sum();
    row.iter().map(|&v| f64::from(v - max) - sum.ln()).collect()
}

fn kl(expected: &[f32], found: &[f32]) -> f64 {
    let (p, q) = (log_softmax(expected), log_softmax(found));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

fn largest(rows: &[Vec<f32>]) -> f32 {
    rows.iter().flatten().fold(0.0, |max, v| max.max(v.abs()))
}

fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().flatten().zip(b.iter().flatten()).fold(0.0, |max, (a, b)| max.max((a - b).abs()))
}

/// The most likely token, and by how much.
fn choice(row: &[f32]) -> (u32, f32) {
    let mut order: Vec<(usize, f32)> = row.iter().copied().enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    (order[0].0 as u32, order[0].1 - order[1].1)
}

/// Logits of the CPU for a prompt and what it generates greedily after it.
fn reference(path: &Path) -> (Vec<u32>, Vec<Vec<f32>>) {
    let mut model = cpu(path);
    let vocabulary = model.info().vocab_size;
    let mut sequences = Sequences::new(vec![ids(0, PROMPT, vocabulary)], 1, vocabulary);
    let mut rows = sequences.step(&mut model, &[(0, 0, PROMPT)], true);
    for position in PROMPT..PROMPT + GENERATED {
        let (token, _) = choice(&rows[position - 1]);
        sequences.ids[0].push(token);
        rows.extend(sequences.step(&mut model, &[(0, position, 1)], true));
    }
    (sequences.ids.remove(0), rows)
}

/// Every position of `text` on CUDA, the prompt in pieces of the given lengths and the rest token by token.
fn follow(model: &mut CudaModel, text: &[u32], pieces: &[usize]) -> Vec<Vec<f32>> {
    let vocabulary = model.info().vocab_size;
    let mut sequences = Sequences::new(vec![text.to_vec()], SEQUENCES, vocabulary);
    let (mut rows, mut start) = (Vec::new(), 0);
    for &count in pieces {
        rows.extend(sequences.step(model, &[(0, start, count)], true));
        start += count;
    }
    for position in start..text.len() {
        rows.extend(sequences.step(model, &[(0, position, 1)], true));
    }
    rows
}

/// The same among 31 others of other lengths, whose prompts are computed in the same steps.
fn follow_among_others(model: &mut CudaModel, text: &[u32]) -> Vec<Vec<f32>> {
    let vocabulary = model.info().vocab_size;
    let mut all = vec![text.to_vec()];
    all.extend((1..SEQUENCES).map(|s| ids(s, text.len(), vocabulary)));
    let mut sequences = Sequences::new(all, SEQUENCES, vocabulary);
    let first: Vec<_> = (0..SEQUENCES).map(|s| (s, 0, if s == 0 { PROMPT } else { 1 + s % 17 })).collect();
    let mut rows = sequences.step(model, &first, true);
    for i in 0..text.len() - PROMPT {
        let step: Vec<_> = first.iter().map(|&(s, _, count)| (s, count + i, 1)).collect();
        rows.extend(sequences.step(model, &step, true));
    }
    rows
}

struct Compared {
    text: Vec<u32>,
    expected: Vec<Vec<f32>>,
    /// The model has experts.
    routed: bool,
}

impl Compared {
    fn check(&self, what: &str, found: &[Vec<f32>]) {
        let largest = largest(&self.expected);
        let (mut beyond, mut worst, mut worst_kl) = (0, 0.0f32, 0.0f64);
        let mut turned = Vec::new();
        for (position, (expected, found)) in self.expected.iter().zip(found).enumerate() {
            let pair = |row: &[f32]| vec![row.to_vec()];
            let (difference, divergence) = (difference(&pair(expected), &pair(found)), kl(expected, found));
            (worst, worst_kl) = (worst.max(difference), worst_kl.max(divergence));
            beyond += usize::from(difference > LOGIT_SHARE * largest || divergence > KL_LIMIT);
            let (token, margin) = choice(expected);
            if choice(found).0 != token {
                turned.push((position, margin, difference));
            }
        }
        eprintln!(
            "{what}: largest difference {worst:.4} of logits up to {largest:.2}, KL up to {worst_kl:.6}, \
             {beyond} positions beyond, {} other choices",
            turned.len()
        );
        let allowed = if self.routed { (ROUTED_SHARE * found.len() as f64) as usize } else { 0 };
        assert!(beyond <= allowed, "{what}: {beyond} positions differ by more than rounding");
        for (position, margin, difference) in turned {
            assert!(margin <= 2.0 * difference, "{what}: position {position} chooses another token than by {margin}");
        }
    }

    /// With keys and values in FP8.
    fn check_narrow(&self, what: &str, found: &[Vec<f32>]) {
        let sum: f64 = self.expected.iter().zip(found).map(|(e, f)| kl(e, f)).sum();
        let mean = sum / found.len() as f64;
        eprintln!("{what}: mean KL {mean:.6}");
        assert!(mean <= KL_LIMIT_FP8, "{what}: mean KL {mean}");
    }
}

/// Tokens that the device chooses are those that the host chooses from the same logits, of a recorded step and of one that is
/// not.
fn check_choices(name: &str, model: &mut CudaModel) {
    let vocabulary = model.info().vocab_size;
    let limit = vocabulary - 3;
    let all: Vec<Vec<u32>> = (0..9).map(|s| ids(s, 20, vocabulary)).collect();
    let sequences = Sequences::new(all, SEQUENCES, vocabulary);
    let params = |s: usize| SamplingParams {
        temperature: [0.0, 0.7, 1.3][s % 3],
        top_k: [0, 40, 0][s / 3],
        top_p: [1.0, 0.9, 1.0][s / 3],
        min_p: [0.0, 0.0, 0.05][s / 3],
        repetition_penalty: if s.is_multiple_of(2) { 1.0 } else { 1.2 },
        presence_penalty: if s == 4 { 0.5 } else { 0.0 },
        frequency_penalty: if s == 5 { 0.3 } else { 0.0 },
        logit_bias: if s == 7 { vec![(5, 3.0), (6, -2.0)] } else { Vec::new() },
        seed: Some(s as u64),
        logprobs: (s == 8).then_some(4),
    };
    let mut samplers: Vec<Sampler> =
        (0..9).map(|s| Sampler::new(params(s), s as u64 * 7919, &sequences.ids[s])).collect();
    for (position, count) in [(0, 5), (5, 1), (6, 1), (7, 1), (8, 9)] {
        let batch: Vec<SequenceStep<'_>> = (0..9)
            .map(|s| SequenceStep {
                tokens: &sequences.ids[s][position..position + count],
                start_pos: position,
                block_table: &sequences.blocks[s],
                logits: LogitsWanted::Last,
            })
            .collect();
        let mut logits = LogitsBuffer::new(vocabulary);
        logits.reset(9);
        model.forward(&batch, &mut logits).unwrap();
        let changes: Vec<Vec<LogitChange>> = samplers
            .iter()
            .map(|sampler| {
                let mut changes = Vec::new();
                sampler.changes(&[], &mut changes);
                changes
            })
            .collect();
        // Sequence 3 may only say even tokens.
        let mask = vec![0x5555_5555u32; limit.div_ceil(32)];
        let choices: Vec<RowChoice<'_>> = (0..9)
            .map(|s| {
                let (params, seed) = samplers[s].params();
                let mask = (s == 3).then_some(mask.as_slice());
                RowChoice { params, seed, position: position as u64, changes: &changes[s], mask }
            })
            .collect();
        assert!(model.can_choose(&choices));
        let mut chosen = Vec::new();
        model.forward_and_choose(&batch, &choices, limit, &mut chosen, &mut || ()).unwrap();
        let mut scratch = SamplingScratch::default();
        let mut tokens = Vec::new();
        for (s, found) in chosen.iter().enumerate() {
            let row = &mut logits.row_mut(s)[..limit];
            let raw = row.to_vec();
            samplers[s].adjust(row);
            if s == 3 {
                row.iter_mut().skip(1).step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY);
            }
            let token = samplers[s].choose(row, position as u64, &mut scratch).unwrap();
            assert_eq!(found.token, Some(token), "{name}: sequence {s} at {position}");
            if s == 8 {
                let expected = logprobs_of(&raw, token, 4, &mut scratch).unwrap();
                let (logprob, top) = found.logprobs.clone().unwrap();
                assert!((logprob - expected.logprob).abs() < 1e-4, "{name}: {logprob}, {expected:?}");
                assert!(top.iter().map(|t| t.0).eq(expected.top.iter().map(|t| t.0)), "{name}: {top:?}, {expected:?}");
            }
            tokens.push(token);
        }
        tokens.into_iter().zip(&mut samplers).for_each(|(token, sampler)| sampler.accept(token));
    }
}

fn check(path: &Path) {
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    let (text, expected) = reference(path);
    let routed = config(&Bundle::open(path).unwrap()).moe.is_some();
    let compared = Compared { text, expected, routed };
    let text = compared.text.clone();

    let mut model = cuda(path, CudaKvType::Bf16, false, true);
    let whole = follow(&mut model, &text, &[PROMPT]);
    compared.check(&format!("{name} whole prompt, recorded generation"), &whole);
    let again = follow(&mut model, &text, &[PROMPT]);
    assert_eq!(difference(&whole, &again), 0.0, "{name}: a replay gives the same bits");
    let pieces = follow(&mut model, &text, &[1, 16, 3, PROMPT - 20]);
    compared.check(&format!("{name} prompt in pieces"), &pieces);
    let among = follow_among_others(&mut model, &text);
    compared.check(&format!("{name} among others"), &among);
    check_choices(&name, &mut model);
    let free = |model: &CudaModel| model.loaded().arena().memory().context().memory().unwrap().free;
    let before = free(&model);
    let replayed = follow_among_others(&mut model, &text);
    assert_eq!(difference(&among, &replayed), 0.0, "{name}: the same batch gives the same bits");
    assert_eq!(free(&model), before, "{name}: steps that have been seen allocate nothing on the device");
    drop(model);

    let mut eager = cuda(path, CudaKvType::Bf16, false, false);
    let found = follow(&mut eager, &text, &[PROMPT]);
    assert_eq!(difference(&whole, &found), 0.0, "{name}: what is recorded is what is submitted");
    drop(eager);

    let mut deterministic = cuda(path, CudaKvType::Bf16, true, true);
    let alone = follow(&mut deterministic, &text, &[PROMPT]);
    compared.check(&format!("{name} deterministic"), &alone);
    let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|v| v.to_bits()).collect::<Vec<_>>();
    for (what, rows) in [
        ("among 31 others", follow_among_others(&mut deterministic, &text)),
        ("prompt in pieces", follow(&mut deterministic, &text, &[1, 16, 3, PROMPT - 20])),
        ("all of it as a prompt", follow(&mut deterministic, &text, &[text.len()])),
    ] {
        assert!(bits(&alone) == bits(&rows), "{name} deterministic, {what}: differs by {}", difference(&alone, &rows));
    }
    drop(deterministic);

    let mut narrow = cuda(path, CudaKvType::E4m3, false, true);
    let found = follow(&mut narrow, &text, &[PROMPT]);
    compared.check_narrow(&format!("{name} FP8 keys and values"), &found);
}

#[test]
fn logits_are_the_cpus() {
    let mut failed = Vec::new();
    for path in bundles() {
        let path_name = path.display().to_string();
        if std::panic::catch_unwind(|| check(&path)).is_err() {
            failed.push(path_name);
        }
    }
    assert!(failed.is_empty(), "{} bundles: {failed:#?}", failed.len());
}
