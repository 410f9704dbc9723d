//! Sampling on the device against the engine's sampler (`VT_TEST_CUDA=1`): the same logits, the same parameters, the same
//! token. Draws that fall within 1e-9 of the border between two tokens would be an exception; with the seeds below none does.

#![allow(clippy::unwrap_used)]

use vt_kernels::cuda::sampling::{Sampling, SamplingEntry, SamplingRequest, SamplingResult, SamplingRow};
use vt_kernels::cuda::{CudaContext, CudaStream, DeviceMemory};
use vt_run::engine::random::uniform;
use vt_run::engine::sampling::{Sampler, SamplingParams, SamplingScratch, logprobs_of};

/// Uniform numbers, one after the other.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 += 1;
        uniform(99, self.0)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// A sum of uniform numbers: roughly normal, deviation 1.
    fn normal(&mut self) -> f32 {
        ((0..12).map(|_| self.unit()).sum::<f64>() - 6.0) as f32
    }
}

/// What a row of logits looks like.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// As models give them.
    Spread,
    /// One token far ahead.
    Peaked,
    Equal,
    /// Few values, so that equals are common.
    Steps,
    /// Almost all excluded.
    Sparse,
    /// Both zeros only.
    Zeros,
    NotANumber,
    Infinite,
    Excluded,
}

const KINDS: [Kind; 9] = [
    Kind::Spread,
    Kind::Peaked,
    Kind::Equal,
    Kind::Steps,
    Kind::Sparse,
    Kind::Zeros,
    Kind::NotANumber,
    Kind::Infinite,
    Kind::Excluded,
];

fn logits(kind: Kind, vocabulary: usize, random: &mut Random) -> Vec<f32> {
    let mut row: Vec<f32> = (0..vocabulary)
        .map(|_| match kind {
            Kind::Spread | Kind::Peaked | Kind::NotANumber | Kind::Infinite => random.normal() * 3.0 - 2.0,
            Kind::Equal => 1.25,
            Kind::Steps => random.below(7) as f32 * 0.5,
            Kind::Sparse if random.below(50) == 0 => random.normal(),
            Kind::Sparse | Kind::Excluded => f32::NEG_INFINITY,
            Kind::Zeros => random.pick(&[0.0, -0.0]),
        })
        .collect();
    let somewhere = random.below(vocabulary);
    match kind {
        Kind::Peaked => row[somewhere] = 40.0,
        Kind::Sparse => row[somewhere] = 0.5,
        Kind::NotANumber => row[somewhere] = f32::NAN,
        Kind::Infinite => row[somewhere] = f32::INFINITY,
        _ => {}
    }
    row
}

/// A row under test: its parameters for the host, and what the device needs beside them.
struct Row {
    params: SamplingParams,
    seed: u64,
    position: u64,
    prompt: Vec<u32>,
    output: Vec<u32>,
    mask: Option<Vec<u32>>,
}

impl Row {
    fn new(vocabulary: usize, random: &mut Random) -> Self {
        let adjusted = random.below(2) == 0;
        let mut few = |most: usize| -> Vec<u32> {
            (0..random.below(most + 1)).map(|_| random.below(vocabulary.min(50)) as u32).collect()
        };
        let (prompt, output, biased) = (few(40), few(60), few(5));
        let mut biased: Vec<(u32, f32)> = biased.into_iter().map(|t| (t, 4.0 * random.normal())).collect();
        biased.sort_unstable_by_key(|b| b.0);
        biased.dedup_by_key(|b| b.0);
        biased.push((vocabulary as u32 + 7, 1.0));
        let params = SamplingParams {
            temperature: random.pick(&[0.0, 0.0, 0.1, 0.7, 1.0, 1.0, 2.5, 1e-6]),
            top_k: random.pick(&[0, 0, 1, 2, 20, 50, 1000, 100_000]),
            top_p: random.pick(&[1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.95, 0.9999]),
            min_p: random.pick(&[0.0, 0.0, 0.0, 0.05, 0.5, 1.0, 1e-20]),
            presence_penalty: if adjusted { random.pick(&[0.0, 0.4]) } else { 0.0 },
            frequency_penalty: if adjusted { random.pick(&[0.0, 0.3]) } else { 0.0 },
            repetition_penalty: if adjusted { random.pick(&[1.0, 1.3]) } else { 1.0 },
            logit_bias: if adjusted { biased } else { Vec::new() },
            seed: None,
            logprobs: random.pick(&[None, None, Some(0), Some(1), Some(5), Some(20)]),
        };
        let mask = (random.below(4) == 0).then(|| {
            let share = random.pick(&[2, 30]);
            (0..vocabulary.div_ceil(32))
                .map(|_| (0..32).map(|bit| u32::from(random.below(share) == 0) << bit).sum())
                .collect()
        });
        let seed = random.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { params, seed, position: random.below(5000) as u64, prompt, output, mask }
    }

    /// One a token that anything changes.
    fn entries(&self) -> Vec<SamplingEntry> {
        let bias = |token: u32| self.params.logit_bias.iter().find(|b| b.0 == token).map_or(0.0, |b| b.1);
        let mut tokens: Vec<u32> = self.prompt.iter().chain(&self.output).copied().collect();
        tokens.extend(self.params.logit_bias.iter().map(|b| b.0));
        tokens.sort_unstable();
        tokens.dedup();
        let entry = |token: u32| SamplingEntry {
            token,
            bias: bias(token),
            output_count: self.output.iter().filter(|t| **t == token).count() as u32,
            in_prompt: self.prompt.contains(&token),
        };
        tokens.into_iter().map(entry).collect()
    }

    /// What the engine's sampler says.
    fn expected(&self, logits: &[f32], scratch: &mut SamplingScratch) -> SamplingResult {
        let mut sampler = Sampler::new(self.params.clone(), self.seed, &self.prompt);
        self.output.iter().for_each(|t| sampler.accept(*t));
        let mut adjusted = logits.to_vec();
        if let Some(mask) = &self.mask {
            for (token, logit) in adjusted.iter_mut().enumerate() {
                if mask[token / 32] >> (token % 32) & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        sampler.adjust(&mut adjusted);
        let token = sampler.choose(&adjusted, self.position, scratch).ok();
        let logprobs = self.params.logprobs.and_then(|top| {
            let found = logprobs_of(logits, token.unwrap_or(0), top, scratch).ok()?;
            Some((found.logprob, found.top))
        });
        SamplingResult { token, logprobs }
    }
}

fn words(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

struct Device {
    stream: CudaStream,
    sampling: Sampling,
}

impl Device {
    fn memory(&self, bytes: &[u8]) -> DeviceMemory {
        let memory = DeviceMemory::new(self.stream.context(), bytes.len() as u64, "test").unwrap();
        memory.write(0, bytes).unwrap();
        memory
    }

    fn read(&self, memory: &DeviceMemory) -> Vec<u8> {
        self.stream.synchronize().unwrap();
        let mut bytes = vec![0; memory.len() as usize];
        memory.read(0, &mut bytes).unwrap();
        bytes
    }

    /// Samples rows of `[R, stride]` logits, and checks that the launch leaves them as they were.
    fn sample(&self, rows: &[Row], vocabulary: usize, stride: usize, logits: &[f32]) -> Vec<SamplingResult> {
        let before = words(logits.iter().map(|v| v.to_bits()));
        let memory = self.memory(&before);
        let mut kept = Vec::new();
        let mut parameters = Vec::new();
        for row in rows {
            let (entries, p) = (row.entries(), &row.params);
            let bytes: Vec<u8> = entries.iter().flat_map(SamplingEntry::to_bytes).collect();
            let entry_memory = self.memory(&bytes);
            let mask = row.mask.as_ref().map(|mask| self.memory(&words(mask.iter().copied())));
            let row = SamplingRow {
                seed: row.seed,
                position: row.position,
                mask: mask.as_ref().map_or(0, DeviceMemory::address),
                entries: entry_memory.address(),
                entry_count: entries.len() as u32,
                temperature: p.temperature,
                top_k: p.top_k as u32,
                top_p: p.top_p,
                min_p: p.min_p,
                repetition_penalty: p.repetition_penalty,
                presence_penalty: p.presence_penalty,
                frequency_penalty: p.frequency_penalty,
                logprobs: p.logprobs.map(|n| n as u32),
            };
            parameters.extend(row.to_bytes());
            kept.push((entry_memory, mask));
        }
        let parameters = self.memory(&parameters);
        let poison = vec![0xFF; rows.len() * SamplingResult::BYTES];
        let (results, copies) = (self.memory(&poison), self.memory(&poison));
        let tokens = self.memory(&vec![0xFF; rows.len() * 4]);
        let workspace = self.memory(&vec![0xFF; Sampling::workspace_bytes(rows.len()) as usize]);
        let request = SamplingRequest {
            logits: memory.address(),
            stride,
            vocabulary,
            rows: rows.len(),
            parameters: parameters.address(),
            results: results.address(),
            host_results: Some(copies.address()),
            tokens: tokens.address(),
            workspace: workspace.address(),
        };
        self.sampling.sample(&self.stream, &request).unwrap();
        let results = self.read(&results);
        assert_eq!(self.read(&copies), results);
        assert_eq!(self.read(&memory), before, "the logits changed");
        let tokens = self.read(&tokens);
        let parse = |bytes: &[u8]| SamplingResult::from_bytes(bytes).unwrap();
        let parsed: Vec<SamplingResult> = results.chunks_exact(SamplingResult::BYTES).map(parse).collect();
        for (result, token) in parsed.iter().zip(tokens.as_chunks::<4>().0) {
            assert!(result.token.is_none_or(|t| t == u32::from_le_bytes(*token)));
        }
        parsed
    }
}

/// Compares a row's result with the engine's; says whether a token was drawn at random.
fn check(what: &str, row: &Row, got: &SamplingResult, wanted: &SamplingResult) -> bool {
    assert_eq!(got.token, wanted.token, "{what}");
    if let (Some(top), Some(_)) = (row.params.logprobs, wanted.token) {
        match (&got.logprobs, &wanted.logprobs) {
            (Some((logprob, alternatives)), Some((wanted, wanted_alternatives))) => {
                let near = |a: f32, b: f32| a == b || (a - b).abs() <= 2e-6 * (1.0 + b.abs());
                assert!(near(*logprob, *wanted), "{what}: {logprob} for {wanted}");
                assert!(alternatives.len() <= top, "{what}");
                assert_eq!(alternatives.len(), wanted_alternatives.len(), "{what}");
                for (a, b) in alternatives.iter().zip(wanted_alternatives) {
                    assert!(a.0 == b.0 && near(a.1, b.1), "{what}: {a:?} for {b:?}");
                }
            }
            (got, wanted) => assert_eq!(got, wanted, "{what}"),
        }
    }
    row.params.temperature > 0.0 && got.token.is_some()
}

#[test]
fn tokens_and_log_probabilities_are_those_of_the_engine() {
    if std::env::var_os("VT_TEST_CUDA").is_none_or(|v| v != "1") {
        eprintln!("SKIPPED: VT_TEST_CUDA=1 runs this on a device");
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let device = Device { stream: CudaStream::new(&context).unwrap(), sampling: Sampling::new(&context).unwrap() };
    let (mut random, mut scratch) = (Random(0), SamplingScratch::default());
    let mut drawn = 0;
    // Under a checker that makes each case a thousand times slower.
    let small = std::env::var_os("VT_TEST_SMALL").is_some_and(|v| v == "1");
    let all = [(1, 9), (5, 90), (1000, 120), (32_000, 60), (151_936, 45), (262_144, 18)];
    let few = [(1, 3), (5, 18), (1000, 36), (5003, 18)];
    for &(vocabulary, count) in if small { &few[..] } else { &all[..] } {
        let stride = vocabulary + random.below(9);
        let rows: Vec<Row> = (0..count).map(|_| Row::new(vocabulary, &mut random)).collect();
        let mut all = Vec::with_capacity(count * stride);
        for i in 0..count {
            all.extend(logits(KINDS[i % KINDS.len()], vocabulary, &mut random));
            // Beside the row: it must not be read.
            all.resize((i + 1) * stride, f32::NAN);
        }
        let got = device.sample(&rows, vocabulary, stride, &all);
        for (i, (row, got)) in rows.iter().zip(&got).enumerate() {
            let wanted = row.expected(&all[i * stride..i * stride + vocabulary], &mut scratch);
            let what = format!("V = {vocabulary}, row {i}, {:?}, {:?}", KINDS[i % KINDS.len()], row.params);
            drawn += usize::from(check(&what, row, got, &wanted));
        }
        // Alone, a row gives what it gives among the others.
        for i in (0..count).step_by(7) {
            let alone = device.sample(&rows[i..=i], vocabulary, stride, &all[i * stride..(i + 1) * stride]);
            assert_eq!(format!("{:?}", alone[0]), format!("{:?}", got[i]), "V = {vocabulary}, row {i}");
        }
    }
    assert!(drawn > if small { 20 } else { 100 }, "{drawn} draws");
}
