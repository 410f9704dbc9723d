//! Times the feed-forward block of a mixture of experts on device 0, launch by launch and as a whole, for several numbers of
//! tokens: the shapes of Qwen3-30B-A3B unless others are given.
//!
//! `cargo run --release -p vt-kernels --example bench_experts [DECODE [EXPERTS TOP_K HIDDEN WIDTH]]`
//!
//! A figure is that of one launch of a captured graph over several layers, replayed; the best of five. Weights are random
//! bits; layers are different memory and more than the L2 holds. Limits are the weights of the experts that the tokens chose
//! over the measured rate of an H200's device memory.

#[path = "../tests/common/random.rs"]
mod random;

use random::Random;
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;
use vt_bundle::encoding::ScaleType;
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_kernels::activation::Gate;
use vt_kernels::cuda::gemm::{DeviceMatrix, DevicePlane, ExpertFusion, ExpertGroups, Gemm, GemmRequest, OutType};
use vt_kernels::cuda::moe::{ExpertRows, MoeKernels, RouterRows, Routing, RoutingTables};
use vt_kernels::cuda::{CudaContext, CudaError, CudaGraph, CudaStream, DeviceMemory};
use vt_kernels::{FloatType, RowsWeight, Weight};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Bytes a second of device memory.
const MEMORY: f64 = 4.38e12;
/// Layers that follow each other.
const LAYERS: usize = 6;

/// Random bytes of a plane: scales that are numbers.
fn plane(matrix: &TiledMatrix, kind: PlaneKind, random: &mut Random) -> Vec<u8> {
    let len = matrix.plane_bytes(kind) as usize;
    let dtype = match kind {
        PlaneKind::Code(_) => None,
        PlaneKind::Scale(i) => Some(matrix.spec.scales[i].dtype),
    };
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        match dtype {
            None | Some(ScaleType::U8 | ScaleType::I8) => out.extend(random.next().to_le_bytes()),
            Some(ScaleType::E4M3) => out.extend(random.next().to_le_bytes().map(|b| 0x20 + b % 0x18)),
            Some(ScaleType::E8M0) => out.extend(random.next().to_le_bytes().map(|b| 0x70 + b % 8)),
            Some(ScaleType::F16) => out.extend(half::f16::from_f32(0.02 + 0.01 * random.unit()).to_le_bytes()),
            Some(ScaleType::Bf16) => out.extend(half::bf16::from_f32(0.02 + 0.01 * random.unit()).to_le_bytes()),
            Some(ScaleType::F32) => out.extend((0.02 + 0.01 * random.unit()).to_le_bytes()),
        }
    }
    out.truncate(len);
    out
}

/// Experts of one kind in all layers: each layer's first matrix, the bytes of one expert, and the memory of all.
struct Stack {
    layers: Vec<DeviceMatrix>,
    stride: u64,
    _memory: DeviceMemory,
}

struct Bench {
    context: Arc<CudaContext>,
    stream: CudaStream,
}

impl Bench {
    fn memory(&self, bytes: &[u8]) -> Outcome<DeviceMemory> {
        let memory = DeviceMemory::new(&self.context, bytes.len() as u64, "bench")?;
        memory.write(0, bytes)?;
        Ok(memory)
    }

    fn zeros(&self, bytes: u64) -> Outcome<DeviceMemory> {
        self.memory(&vec![0; bytes as usize])
    }

    fn floats(&self, len: usize, seed: u64) -> Outcome<DeviceMemory> {
        let mut random = Random(seed);
        self.memory(&(0..len).flat_map(|_| random.unit().to_le_bytes()).collect::<Vec<_>>())
    }

    /// All experts hold the same bits, in memory of their own.
    fn stack(&self, decode: &str, k: usize, parts: &[u64], experts: usize) -> Outcome<Stack> {
        let spec = vt_bundle::encoding::find(decode).ok_or("no encoding of that name")?;
        let group =
            [16, 32, 128].into_iter().find_map(|group| TiledMatrix::new(spec, k as u64, parts, group, [0, 0]).ok());
        let matrix = Arc::new(group.ok_or("no geometry")?);
        let mut random = Random(k as u64);
        let planes: Vec<Vec<u8>> = matrix.planes().map(|kind| plane(&matrix, kind, &mut random)).collect();
        let mut record = Vec::new();
        let mut offsets = Vec::new();
        for plane in &planes {
            offsets.push((record.len() as u64, plane.len() as u64));
            record.extend_from_slice(plane);
            record.resize(record.len().next_multiple_of(256), 0);
        }
        let stride = record.len() as u64;
        let layer = record.repeat(experts);
        let memory = DeviceMemory::new(&self.context, layer.len() as u64 * LAYERS as u64, "experts")?;
        let mut layers = Vec::new();
        for index in 0..LAYERS as u64 {
            let base = index * layer.len() as u64;
            memory.write(base, &layer)?;
            let planes =
                offsets.iter().map(|(at, bytes)| DevicePlane { address: memory.address() + base + at, bytes: *bytes });
            layers.push(DeviceMatrix::tiled(&matrix, &planes.collect::<Vec<_>>())?);
        }
        Ok(Stack { layers, stride, _memory: memory })
    }

    /// Seconds of one of the launches of a graph.
    fn time(&self, mut launch: impl FnMut(usize) -> Result<(), CudaError>) -> Outcome<f64> {
        let count = 4 * LAYERS;
        (0..LAYERS).try_for_each(&mut launch)?;
        let graph = CudaGraph::record(&self.stream, || (0..count).try_for_each(|i| launch(i % LAYERS)))?;
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

fn main() -> Outcome {
    let mut arguments = std::env::args().skip(1);
    let decode = arguments.next().unwrap_or_else(|| "nvfp4.modelopt@1".to_owned());
    let numbers = arguments.map(|n| n.parse()).collect::<Result<Vec<usize>, _>>()?;
    let [experts, top_k, hidden, width] = numbers.try_into().unwrap_or([128, 8, 2048, 768]);
    let context = CudaContext::new(0)?;
    let bench = Bench { stream: CudaStream::new(&context)?, context };
    println!("{}, {decode}, {top_k} of {experts} experts, {hidden} x {width}", bench.context.attributes().name);
    let gate_up = bench.stack(&decode, hidden, &[width as u64; 2], experts)?;
    let down = bench.stack(&decode, width, &[hidden as u64], experts)?;
    let (gemm, moe) = (Gemm::new(&bench.context)?, MoeKernels::new(&bench.context)?);
    let mut random = Random(3);
    let router: Vec<u8> =
        (0..experts * hidden).flat_map(|_| half::bf16::from_f32(0.05 * random.unit()).to_le_bytes()).collect();
    let router = DeviceMatrix::upload(
        &bench.context,
        &Weight::Rows(RowsWeight::new(FloatType::Bf16, experts, hidden, &router)?),
    )?;
    println!("tokens  chosen |  router   gate-up  share     down  share      sum |      all  share");
    for tokens in [1, 2, 4, 8, 16, 32, 64, 128, 129, 160, 256, 512] {
        let routing = Routing { tokens, experts, top_k, normalise: true };
        let pairs = tokens * top_k;
        let table_memory = bench.zeros(RoutingTables::bytes(tokens, experts, top_k).ok_or("too large")?)?;
        let tables = RoutingTables::at(table_memory.address(), tokens, experts, top_k).ok_or("too large")?;
        let (x, norm) = (bench.floats(tokens * hidden, 1)?, bench.floats(hidden, 2)?);
        let room = |elements: usize, bytes: usize| bench.zeros((elements * bytes) as u64);
        let (normed, scores) = (room(tokens * hidden, 2)?, room(tokens * experts, 4)?);
        let (gathered, both) = (room(pairs * hidden, 2)?, room(pairs * width * 2, 2)?);
        let (inner, outputs) = (room(pairs * width, 2)?, room(pairs * hidden, 4)?);
        let workspace = [&gate_up, &down].map(|stack| gemm.workspace_bytes(&stack.layers[0], pairs as u32));
        let workspace = bench.zeros(workspace[0].max(workspace[1]))?;
        let rows = RouterRows {
            x: x.address(),
            norm: norm.address(),
            eps: 1e-6,
            width: hidden,
            normed: normed.address(),
            scores: scores.address(),
            stride: experts,
        };
        let request = |x: &DeviceMemory, k: usize, out: &DeviceMemory, out_type: OutType, stride: usize| GemmRequest {
            x: x.address(),
            x_stride: k as u32,
            m: pairs as u32,
            out: out.address(),
            out_type,
            out_stride: stride as u32,
            bias: None,
            accumulate: false,
            deterministic: false,
        };
        let groups = |stride, settled| ExpertGroups {
            count: experts as u32,
            stride,
            offsets: tables.offsets,
            most: tokens as u32,
            settled,
        };
        let fusion = ExpertFusion { pairs: Some((tables.pairs, top_k as u32)), gate: Some(Gate::Silu) };
        let stream = &bench.stream;
        let rows_of = |memory: &DeviceMemory, dtype, stride| ExpertRows { address: memory.address(), dtype, stride };
        let route = |_| moe.router(stream, &routing, &router, &rows, &tables);
        let first = |layer: usize| {
            let (matrix, groups) = (&gate_up.layers[layer], groups(gate_up.stride, false));
            let to = request(&normed, hidden, &inner, OutType::Bf16, width);
            if gemm.launch_fused(stream, matrix, &to, &groups, &fusion, workspace.address())? {
                return Ok(());
            }
            let (from, to) = (rows_of(&normed, FloatType::Bf16, hidden), rows_of(&gathered, FloatType::Bf16, hidden));
            moe.gather(stream, &routing, from, hidden, &tables, to)?;
            let to = request(&gathered, hidden, &both, OutType::Bf16, 2 * width);
            gemm.launch_grouped(stream, matrix, &to, &groups, workspace.address())
        };
        let second = |layer: usize| {
            let to = request(&inner, width, &outputs, OutType::F32, hidden);
            let groups = groups(down.stride, pairs <= 8 * experts);
            gemm.launch_grouped(stream, &down.layers[layer], &to, &groups, workspace.address())
        };
        // The sums go elsewhere: the residual stream, and with it what is chosen, stays as it is.
        let added = room(tokens * hidden, 4)?;
        let sum = |_| {
            let (from, to) = (rows_of(&outputs, FloatType::F32, hidden), rows_of(&added, FloatType::F32, hidden));
            moe.combine(stream, &routing, from, hidden, &tables, to, false)
        };
        route(0)?;
        stream.synchronize()?;
        let mut words = vec![0; 4 * (experts + 1)];
        table_memory.read(tables.offsets - table_memory.address(), &mut words)?;
        let offsets: Vec<u32> = words.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect();
        let chosen = offsets.windows(2).filter(|pair| pair[1] > pair[0]).count();
        let limit = |stack: &Stack| (chosen as u64 * stack.stride) as f64 / MEMORY;
        let times = [bench.time(route)?, bench.time(first)?, bench.time(second)?, bench.time(sum)?];
        let all = bench.time(|layer| {
            route(layer)?;
            first(layer)?;
            second(layer)?;
            sum(layer)
        })?;
        let limits = [limit(&gate_up), limit(&down)];
        let us = times.map(|t| t * 1e6);
        println!(
            "{tokens:6} {chosen:7} | {:7.2} {:9.2}  {:5.2} {:8.2}  {:5.2} {:8.2} | {:8.2}  {:5.2}",
            us[0],
            us[1],
            limits[0] / times[1],
            us[2],
            limits[1] / times[2],
            us[3],
            all * 1e6,
            (limits[0] + limits[1]) / all
        );
    }
    Ok(())
}
