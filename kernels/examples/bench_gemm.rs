//! Times products with quantised matrices on device 0, each with its error against f64 sums.
//!
//! `cargo run --release -p vt-kernels --example bench_gemm [FORMATS] [SHAPES] [ROWS]`
//!
//! Lists are separated by commas: formats by part of their name (`nvfp4,fp8`), shapes as KxN (`4096x24576`), rows as numbers.
//! A time is that of one launch in a replayed graph of many, over copies of the matrix that do not fit the L2 together; the
//! median of five replays. The share is that of the speed of a plain read of the same bytes, timed the same way. The error is that of 512 columns of 4 rows, as root of the mean square over that of the result.

#[path = "../tests/common/random.rs"]
mod random;

use random::Random;
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;
use vt_bundle::encoding::{self, ScaleType};
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_kernels::cuda::gemm::{DeviceMatrix, DevicePlane, Gemm, GemmRequest, OutType};
use vt_kernels::cuda::measure::PlainRead;
use vt_kernels::cuda::{CudaContext, CudaError, CudaGraph, CudaStream, DeviceMemory};
use vt_kernels::{TiledWeight, Weight, reference};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const FORMATS: [(&str, u64); 4] =
    [("nvfp4.modelopt@1", 16), ("fp8.channel.f32@1", 0), ("int4.symmetric.bf16@1", 32), ("int8.symmetric.bf16@1", 32)];
const SHAPES: &str = "4096x24576,12288x4096,4096x4096,5120x34816";
const ROWS: &str = "1,16,64,128,512,2048,8192";
/// Copies of a matrix take as many bytes, several times the L2, and are not more than the next.
const COPIES_BYTES: u64 = 400 << 20;
const MAX_COPIES: u64 = 16;

/// Random codes, and scales as checkpoints have them.
fn plane(matrix: &TiledMatrix, kind: PlaneKind, random: &mut Random) -> Vec<u8> {
    let len = matrix.plane_bytes(kind) as usize;
    let mut out = Vec::with_capacity(len + 8);
    let dtype = match kind {
        PlaneKind::Code(_) => None,
        PlaneKind::Scale(i) => Some(matrix.spec.scales[i].dtype),
    };
    while out.len() < len {
        match dtype {
            None => out.extend(random.next().to_le_bytes()),
            Some(ScaleType::E4M3) => out.extend(random.next().to_le_bytes().map(|b| 0x20 + b % 0x58)),
            Some(ScaleType::Bf16) => out.extend(half::bf16::from_f32(0.02 + 0.01 * random.unit()).to_le_bytes()),
            Some(_) => out.extend((0.002 + 0.001 * random.unit()).to_le_bytes()),
        }
    }
    out.truncate(len);
    if dtype.is_none() && matrix.spec.encoding.contains("e4m3") {
        out.iter_mut().filter(|b| **b & 0x7F == 0x7F).for_each(|b| *b ^= 0x10);
    }
    out
}

struct Bench {
    context: Arc<CudaContext>,
    stream: CudaStream,
    gemm: Gemm,
    read: PlainRead,
}

impl Bench {
    fn memory(&self, bytes: u64) -> Outcome<DeviceMemory> {
        Ok(DeviceMemory::new(&self.context, bytes, "bench")?)
    }

    /// Seconds of one of `count` recorded launches.
    fn time(&self, count: usize, launch: impl FnMut(usize) -> Result<(), CudaError>) -> Outcome<f64> {
        let graph = CudaGraph::record(&self.stream, || (0..count).try_for_each(launch))?;
        let mut times = Vec::new();
        for _ in 0..6 {
            let start = Instant::now();
            graph.replay(&self.stream)?;
            self.stream.synchronize()?;
            times.push(start.elapsed().as_secs_f64() / count as f64);
        }
        times.remove(0);
        times.sort_by(f64::total_cmp);
        Ok(times[2])
    }

    /// Times one format and shape for every number of rows.
    fn run(&self, decode: &str, group: u64, k: usize, n: usize, rows: &[usize]) -> Outcome {
        let spec = encoding::find(decode).ok_or("no such format")?;
        let random = &mut Random((k * n) as u64);
        let matrix = Arc::new(TiledMatrix::new(spec, k as u64, &[n as u64], group, [0, 0])?);
        let planes: Vec<Vec<u8>> = matrix.planes().map(|kind| plane(&matrix, kind, random)).collect();
        let bytes: u64 = planes.iter().map(|plane| (plane.len() as u64).next_multiple_of(256)).sum();
        let copies = (COPIES_BYTES / bytes).clamp(2, MAX_COPIES);
        let memory = self.memory(copies * bytes)?;
        let mut matrices = Vec::new();
        for copy in 0..copies {
            let mut at = copy * bytes;
            let mut addresses = Vec::new();
            for plane in &planes {
                memory.write(at, plane)?;
                addresses.push(DevicePlane { address: memory.address() + at, bytes: plane.len() as u64 });
                at += (plane.len() as u64).next_multiple_of(256);
            }
            matrices.push(DeviceMatrix::tiled(&matrix, &addresses)?);
        }
        let slices: Vec<&[u8]> = planes.iter().map(Vec::as_slice).collect();
        let decoded = reference::decode(&Weight::Tiled(TiledWeight::new(&matrix, &slices)?));

        let read = self.time(48, |i| self.read.launch(&self.stream, &memory, i as u64 % copies * bytes, bytes))?;
        println!("{decode:<24} {k:>5}x{n:<5} a plain read of {:.1} MB: {:.2} us", bytes as f64 * 1e-6, read * 1e6);

        let most = rows.iter().copied().max().unwrap_or(1);
        let x: Vec<f32> = (0..most * k).map(|_| half::bf16::from_f32(random.unit()).to_f32()).collect();
        let (x_memory, out) = (self.memory((2 * most * k) as u64)?, self.memory((2 * most * n) as u64)?);
        x_memory.write(0, &x.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect::<Vec<_>>())?;
        for &m in rows {
            let workspace_bytes = self.gemm.workspace_bytes(&matrices[0], m as u32);
            let workspace = self.memory(workspace_bytes)?;
            workspace.write(0, &vec![0; workspace_bytes as usize])?;
            let request = GemmRequest {
                x: x_memory.address(),
                x_stride: k as u32,
                m: m as u32,
                out: out.address(),
                out_type: OutType::Bf16,
                out_stride: n as u32,
                bias: None,
                accumulate: false,
                deterministic: false,
            };
            let launch = |i: usize| {
                let matrix = &matrices[i % matrices.len()];
                self.gemm.launch(&self.stream, matrix, &request, workspace.address())
            };
            let seconds = self.time(if m >= 2048 { 12 } else { 48 }, launch)?;
            let flops = 2.0 * (m * k) as f64 * n as f64;
            println!(
                "{decode:<24} {k:>5}x{n:<5} M {m:<5} {:9.2} us, {:.3} of a read, {:7.1} TFLOP/s {:5.2} TB/s of weights, error {:.2e}",
                seconds * 1e6,
                read / seconds,
                flops / seconds * 1e-12,
                bytes as f64 / seconds * 1e-12,
                error(&out, &x, &decoded, m, k, n)?,
            );
        }
        Ok(())
    }
}

/// Relative error of some rows and columns.
fn error(out: &DeviceMemory, x: &[f32], decoded: &[f32], m: usize, k: usize, n: usize) -> Outcome<f64> {
    let (mut squares, mut errors) = (0.0, 0.0);
    for row in [0, m / 3, m / 2, m - 1] {
        let mut bytes = vec![0; 2 * n];
        out.read((2 * row * n) as u64, &mut bytes)?;
        for column in (0..n).step_by((n / 512).max(1)) {
            let products = x[row * k..][..k].iter().zip(&decoded[column * k..][..k]);
            let expected: f64 = products.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            let got = half::bf16::from_le_bytes([bytes[2 * column], bytes[2 * column + 1]]);
            squares += expected * expected;
            errors += (f64::from(got.to_f32()) - expected).powi(2);
        }
    }
    Ok((errors / squares).sqrt())
}

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let list = |i: usize, default: &str| -> Vec<String> {
        arguments.get(i).map_or(default, String::as_str).split(',').map(str::to_owned).collect()
    };
    let rows = list(2, ROWS).iter().map(|v| v.parse()).collect::<Result<Vec<usize>, _>>()?;
    let context = CudaContext::new(0)?;
    let stream = CudaStream::new(&context)?;
    let gemm = Gemm::new(&context)?;
    let read = PlainRead::new(&context)?;
    let bench = Bench { context, stream, gemm, read };
    let wanted = list(0, "");
    for shape in list(1, SHAPES) {
        let (k, n) = shape.split_once('x').ok_or("shapes are KxN")?;
        let (k, n) = (k.parse()?, n.parse()?);
        for (decode, group) in FORMATS {
            if wanted.iter().any(|part| decode.contains(part.as_str())) {
                bench.run(decode, group, k, n, &rows)?;
            }
        }
    }
    Ok(())
}
