//! Times attention, cache, routing and sampling on device 0 and prints each as a share of its limit.
//!
//! `cargo run --release -p vt-kernels --example bench_ops [FILTER]`
//!
//! A line is a captured graph of many launches, replayed; the best of five. Decode goes from layer to layer of a cache of
//! several times the L2, so that keys and values come from memory; its limit is the bytes of keys and values over the device
//! memory's rate, that of prefill the multiplications under the causal mask over the tensor cores' rate. Both rates are
//! measured ones of an H200 (copy, and cuBLAS bf16).

#[path = "../tests/common/random.rs"]
mod random;

use random::Random;
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;
use vt_kernels::FloatType;
use vt_kernels::attention::AttentionShape;
use vt_kernels::cuda::attention::{Attention, AttentionBatch, DecodeWorkspace};
use vt_kernels::cuda::kv_cache::{CudaKvCache, CudaKvType, KvRows, KvScales, KvWriter};
use vt_kernels::cuda::moe::{ExpertRows, MoeKernels, Routing, RoutingTables};
use vt_kernels::cuda::sampling::{Sampling, SamplingRequest, SamplingResult, SamplingRow};
use vt_kernels::cuda::{CudaContext, CudaError, CudaGraph, CudaStream, DeviceMemory};
use vt_kernels::kv_cache::{BLOCK_LEN, KvShape};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Bytes a second of device memory, and operations a second of tensor cores.
const MEMORY: f64 = 4.38e12;
const TENSOR: f64 = 790e12;

struct Bench {
    context: Arc<CudaContext>,
    stream: CudaStream,
    filter: String,
}

impl Bench {
    fn memory(&self, bytes: &[u8]) -> Outcome<DeviceMemory> {
        let memory = self.room(bytes.len() as u64)?;
        memory.write(0, bytes)?;
        Ok(memory)
    }

    fn room(&self, bytes: u64) -> Outcome<DeviceMemory> {
        Ok(DeviceMemory::new(&self.context, bytes, "bench")?)
    }

    fn words(&self, values: impl IntoIterator<Item = u32>) -> Outcome<DeviceMemory> {
        self.memory(&values.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>())
    }

    fn halves(&self, len: usize) -> Outcome<DeviceMemory> {
        let mut random = Random(len as u64);
        let bytes = (0..len).flat_map(|_| half::bf16::from_f32(random.unit()).to_le_bytes());
        self.memory(&bytes.collect::<Vec<_>>())
    }

    fn floats(&self, len: usize, scale: f32) -> Outcome<DeviceMemory> {
        let mut random = Random(len as u64);
        // A sum of four uniform numbers: tails, as logits have them.
        let value = |random: &mut Random| (0..4).map(|_| random.unit()).sum::<f32>() * scale;
        self.memory(&(0..len).flat_map(|_| value(&mut random).to_le_bytes()).collect::<Vec<_>>())
    }

    fn wanted(&self, name: &str) -> bool {
        name.contains(&self.filter)
    }

    /// Seconds of one of `count` launches of a graph.
    fn time(&self, count: usize, mut launch: impl FnMut(usize) -> Result<(), CudaError>) -> Outcome<f64> {
        let graph = CudaGraph::record(&self.stream, || (0..count).try_for_each(&mut launch))?;
        graph.replay(&self.stream)?;
        self.stream.synchronize()?;
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let start = Instant::now();
            graph.replay(&self.stream)?;
            self.stream.synchronize()?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best / count as f64)
    }
}

fn report(name: &str, seconds: f64, limit: Option<f64>) {
    let share = limit.map_or_else(String::new, |limit| format!("  {:5.2} of the limit", limit / seconds));
    println!("{name:<44} {:9.2} us{share}", seconds * 1e6);
}

/// Query heads, key/value heads and their size in Qwen3-8B.
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

/// A cache whose every layer is filled, and the block tables of `batch` sequences in no order.
struct Filled {
    cache: CudaKvCache,
    tables: DeviceMemory,
    table_stride: usize,
    layers: usize,
}

impl Filled {
    fn new(bench: &Bench, batch: usize, context: usize, dtype: CudaKvType) -> Outcome<Self> {
        let blocks = batch * context.div_ceil(BLOCK_LEN);
        let layer_bytes = blocks as u64 * (BLOCK_LEN * 2 * KV_HEADS * DIM) as u64 * dtype.bytes();
        // Many times the L2, but not the whole device.
        let layers = (512u64 << 20).div_ceil(layer_bytes).clamp(1, 64) as usize;
        let shape = KvShape { layers, kv_heads: KV_HEADS, head_dim: DIM, blocks };
        let cache = CudaKvCache::new(&bench.context, shape, dtype)?;
        let (rows, stride) = (4096, 2 * KV_HEADS * DIM);
        let x = bench.halves(rows * stride)?;
        let slots = bench.words(0..(blocks * BLOCK_LEN) as u32)?;
        let writer = KvWriter::new(&bench.context)?;
        for layer in 0..layers {
            for first in (0..blocks * BLOCK_LEN).step_by(rows) {
                let rows = KvRows {
                    x: x.address(),
                    stride,
                    keys_at: 0,
                    values_at: stride / 2,
                    tokens: rows.min(blocks * BLOCK_LEN - first),
                    slots: slots.address() + 4 * first as u64,
                };
                writer.write(&bench.stream, &cache, layer, KvScales::default(), &rows)?;
            }
        }
        bench.stream.synchronize()?;
        let mut order: Vec<u32> = (0..blocks as u32).collect();
        let mut random = Random(1);
        for i in (1..order.len()).rev() {
            order.swap(i, (random.next() % (i as u64 + 1)) as usize);
        }
        Ok(Self { cache, tables: bench.words(order)?, table_stride: blocks / batch, layers })
    }
}

fn shape() -> AttentionShape {
    AttentionShape { heads: HEADS, scale: 1.0 / (DIM as f32).sqrt(), window: None, soft_cap: None }
}

fn decode(bench: &Bench, dtype: CudaKvType) -> Outcome {
    for context in [1024, 8192] {
        for batch in [1, 8, 32, 128] {
            let name = format!("decode {dtype:?}, batch {batch}, context {context}");
            if !bench.wanted(&name) {
                continue;
            }
            let filled = Filled::new(bench, batch, context, dtype)?;
            let attention = Attention::new(&bench.context, HEADS, &filled.cache)?;
            let workspace = DecodeWorkspace::new(batch, context, HEADS, filled.cache.shape())
                .ok_or("the workspace's size overflows")?;
            let room = bench.room(workspace.bytes())?;
            room.write(0, &vec![0; workspace.bytes() as usize])?;
            let x = bench.halves(batch * HEADS * DIM)?;
            let out = bench.room((batch * HEADS * DIM * 2) as u64)?;
            let (starts, lengths) = (bench.words(0..batch as u32)?, bench.words(vec![context as u32; batch])?);
            let sequences = AttentionBatch {
                x: x.address(),
                stride: HEADS * DIM,
                queries_at: 0,
                out: out.address(),
                out_stride: HEADS * DIM,
                sequences: batch,
                starts: starts.address(),
                lengths: lengths.address(),
                block_tables: filled.tables.address(),
                table_stride: filled.table_stride,
            };
            let seconds = bench.time(filled.layers.max(16), |i| {
                attention.decode(
                    &bench.stream,
                    &shape(),
                    &filled.cache,
                    i % filled.layers,
                    KvScales::default(),
                    &sequences,
                    None,
                    &workspace,
                    room.address(),
                )
            })?;
            let bytes = (batch * context * 2 * KV_HEADS * DIM) as f64 * dtype.bytes() as f64;
            report(&name, seconds, Some(bytes / MEMORY));
        }
    }
    Ok(())
}

fn prefill(bench: &Bench, dtype: CudaKvType) -> Outcome {
    for (tokens, context) in [(512, 512), (2048, 2048), (8192, 8192), (2048, 16384)] {
        let name = format!("prefill {dtype:?}, {tokens} tokens up to {context}");
        if !bench.wanted(&name) {
            continue;
        }
        let filled = Filled::new(bench, 1, context, dtype)?;
        let attention = Attention::new(&bench.context, HEADS, &filled.cache)?;
        let x = bench.halves(tokens * HEADS * DIM)?;
        let out = bench.room((tokens * HEADS * DIM * 2) as u64)?;
        let (starts, lengths) = (bench.words([0, tokens as u32])?, bench.words([context as u32])?);
        let batch = AttentionBatch {
            x: x.address(),
            stride: HEADS * DIM,
            queries_at: 0,
            out: out.address(),
            out_stride: HEADS * DIM,
            sequences: 1,
            starts: starts.address(),
            lengths: lengths.address(),
            block_tables: filled.tables.address(),
            table_stride: filled.table_stride,
        };
        let seconds = bench.time(8, |i| {
            let layer = i % filled.layers;
            attention.prefill(&bench.stream, &shape(), &filled.cache, layer, KvScales::default(), &batch, tokens)
        })?;
        let pairs = tokens as f64 * (context as f64 - (tokens as f64 - 1.0) / 2.0);
        report(&name, seconds, Some(4.0 * (HEADS * DIM) as f64 * pairs / TENSOR));
    }
    Ok(())
}

fn cache_writes(bench: &Bench) -> Outcome {
    for (dtype, tokens) in
        [(CudaKvType::Bf16, 1usize), (CudaKvType::Bf16, 8192), (CudaKvType::E4m3, 1), (CudaKvType::E4m3, 8192)]
    {
        let name = format!("cache write {dtype:?}, {tokens} tokens");
        if !bench.wanted(&name) {
            continue;
        }
        let filled = Filled::new(bench, 1, tokens.next_multiple_of(BLOCK_LEN), dtype)?;
        let stride = (HEADS + 2 * KV_HEADS) * DIM;
        let (x, slots) = (bench.halves(tokens * stride)?, bench.words(0..tokens as u32)?);
        let writer = KvWriter::new(&bench.context)?;
        let rows = KvRows {
            x: x.address(),
            stride,
            keys_at: HEADS * DIM,
            values_at: (HEADS + KV_HEADS) * DIM,
            tokens,
            slots: slots.address(),
        };
        let seconds = bench
            .time(64, |i| writer.write(&bench.stream, &filled.cache, i % filled.layers, KvScales::default(), &rows))?;
        report(&name, seconds, None);
    }
    Ok(())
}

fn experts(bench: &Bench) -> Outcome {
    let kernels = MoeKernels::new(&bench.context)?;
    let (experts, top_k, width) = (128, 8, 2048);
    for tokens in [1, 128, 8192] {
        let routing = Routing { tokens, experts, top_k, normalise: true };
        let logits = bench.floats(tokens * experts, 1.0)?;
        let size = RoutingTables::bytes(tokens, experts, top_k).ok_or("the tables' size overflows")?;
        let room = bench.room(size)?;
        let tables = RoutingTables::at(room.address(), tokens, experts, top_k).ok_or("the tables' size overflows")?;
        let x = bench.halves(tokens * width)?;
        let rows = bench.room((tokens * top_k * width * 2) as u64)?;
        let out = bench.room((tokens * width * 4) as u64)?;
        let at = |memory: &DeviceMemory, dtype| ExpertRows { address: memory.address(), dtype, stride: width };
        let (x, rows, out) = (at(&x, FloatType::Bf16), at(&rows, FloatType::Bf16), at(&out, FloatType::F32));
        let route = || kernels.route(&bench.stream, &routing, logits.address(), experts, 0, &tables);
        route()?;
        let name = format!("experts, {tokens} tokens");
        if bench.wanted(&name) {
            report(&format!("{name}: route and sort"), bench.time(64, |_| route())?, None);
            let seconds = bench.time(64, |_| kernels.gather(&bench.stream, &routing, x, width, &tables, rows))?;
            report(&format!("{name}: gather"), seconds, None);
            let combine = |_| kernels.combine(&bench.stream, &routing, rows, width, &tables, out, true);
            report(&format!("{name}: sum"), bench.time(64, combine)?, None);
        }
    }
    Ok(())
}

fn sampling(bench: &Bench) -> Outcome {
    let vocabulary = 151_936;
    let sampling = Sampling::new(&bench.context)?;
    let greedy = SamplingRow::greedy();
    let warm = SamplingRow { temperature: 1.0, seed: 5, ..greedy };
    let kinds = [
        ("greedy", greedy),
        ("temperature", warm),
        ("top-k 50", SamplingRow { top_k: 50, ..warm }),
        ("top-p 0.9", SamplingRow { top_p: 0.9, ..warm }),
        ("top-k 50, top-p 0.9, min-p 0.01", SamplingRow { top_k: 50, top_p: 0.9, min_p: 0.01, ..warm }),
        ("greedy, 20 log-probabilities", SamplingRow { logprobs: Some(20), ..greedy }),
    ];
    for rows in [1, 32, 128] {
        let logits = bench.floats(rows * vocabulary, 4.0)?;
        let results = bench.room((rows * SamplingResult::BYTES) as u64)?;
        let tokens = bench.room((rows * 4) as u64)?;
        let workspace = bench.room(Sampling::workspace_bytes(rows))?;
        for (kind, row) in kinds {
            let name = format!("sample {rows} rows, {kind}");
            if !bench.wanted(&name) {
                continue;
            }
            let parameters: Vec<u8> =
                (0..rows).flat_map(|i| SamplingRow { position: i as u64, ..row }.to_bytes()).collect();
            let parameters = bench.memory(&parameters)?;
            let request = SamplingRequest {
                logits: logits.address(),
                stride: vocabulary,
                vocabulary,
                rows,
                parameters: parameters.address(),
                results: results.address(),
                host_results: None,
                tokens: tokens.address(),
                workspace: workspace.address(),
            };
            let seconds = bench.time(20, |_| sampling.sample(&bench.stream, &request))?;
            report(&name, seconds, Some((rows * vocabulary * 4) as f64 / MEMORY));
        }
    }
    Ok(())
}

fn main() -> Outcome {
    let context = CudaContext::new(0)?;
    let stream = CudaStream::new(&context)?;
    println!("{}", context.attributes().name);
    let bench = Bench { context, stream, filter: std::env::args().nth(1).unwrap_or_default() };
    for dtype in [CudaKvType::Bf16, CudaKvType::E4m3] {
        decode(&bench, dtype)?;
    }
    for dtype in [CudaKvType::Bf16, CudaKvType::E4m3] {
        prefill(&bench, dtype)?;
    }
    cache_writes(&bench)?;
    experts(&bench)?;
    sampling(&bench)
}
