//! Times products at SmolLM2's shapes: GB/s for one row of activations, GFLOP/s for many, beside a plain read.
//!
//! ```text
//! cargo run --release -p vt-kernels --example bench_cpu -- [THREADS] [DECODE-NAME ...]
//! ```

use std::hint::black_box;
use std::time::{Duration, Instant};

use vt_bundle::encoding::{self, ScaleType};
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_kernels::activation::{Gate, gated};
use vt_kernels::attention::{AttentionShape, attention};
use vt_kernels::kv_cache::{KvCache, KvShape, KvType, SequenceSlots};
use vt_kernels::norm::rms_norm;
use vt_kernels::{Activations, Context, MatmulScratch, TiledWeight, Weight, matmul};

/// (N, K) of the head and of one layer's projections.
const SHAPES: [(u64, u64); 5] = [(49152, 576), (960, 576), (576, 576), (3072, 576), (576, 1536)];
/// Bytes of copies that a loop cycles through, beyond what caches hold.
const WORKING_SET: usize = 160 << 20;

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|a| a.parse().ok()).unwrap_or(2);
    let mut names: Vec<String> = args.collect();
    if names.is_empty() {
        names = ["q4_1.ggml@1", "q8_0.ggml@1", "q4_0.ggml@1", "nvfp4.modelopt@1"].map(String::from).to_vec();
    }
    let cx = Context::new(threads).expect("threads start");
    println!("{threads} threads, {:?}; plain read {:.1} GB/s", cx.isa(), read_rate(&cx));
    fork_join(&cx);
    attend(&cx);
    for name in &names {
        let Some(spec) = encoding::find(name) else {
            println!("{name}: unknown");
            continue;
        };
        for (n, k) in SHAPES {
            let group = if name.starts_with("nvfp4") || name.starts_with("q6_k") { 16 } else { 32 };
            let Ok(matrix) = TiledMatrix::new(spec, k, &[n], group, [0, 0]) else {
                println!("{name} {n} x {k}: impossible");
                continue;
            };
            shape(&cx, name, &matrix);
        }
    }
}

fn shape(cx: &Context, name: &str, matrix: &TiledMatrix) {
    let one: usize = matrix.bytes() as usize;
    let copies: Vec<Vec<Vec<u8>>> = (0..WORKING_SET.div_ceil(one)).map(|seed| planes(matrix, seed)).collect();
    let weights: Vec<Weight<'_>> = copies
        .iter()
        .map(|planes| {
            let planes: Vec<&[u8]> = planes.iter().map(Vec::as_slice).collect();
            Weight::Tiled(TiledWeight::new(matrix, &planes).expect("planes fit the geometry"))
        })
        .collect();
    let (k, n) = (matrix.k as usize, matrix.padded_n() as usize);
    let mut scratch = MatmulScratch::default();
    print!("{name:24} {n:6} x {k:5}:");
    for m in [1, 4, 16, 64, 512] {
        if m == 512 && n > 10_000 {
            continue;
        }
        let x: Vec<f32> = (0..m * k).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
        let mut out = vec![0.0; m * n];
        let each = time(&weights, |weight| {
            matmul(cx, weight, &x, Activations::Int8, &mut scratch, &mut out);
            black_box(&out);
        });
        if m == 1 {
            print!(" {:6.1} GB/s ({:6.1} us)", weights[0].bytes() as f64 / each / 1e9, each * 1e6);
        }
        if m > 1 {
            print!("  M {m}: {:6.0} GFLOP/s", 2.0 * (m * n * k) as f64 / each / 1e9);
        }
    }
    println!();
}

/// Mean seconds per call over at least a quarter of a second, cycling through the weights.
fn time(weights: &[Weight<'_>], mut call: impl FnMut(&Weight<'_>)) -> f64 {
    weights.iter().take(2).for_each(&mut call);
    let (start, mut calls) = (Instant::now(), 0usize);
    while start.elapsed() < Duration::from_millis(250) {
        for weight in weights.iter().take(64) {
            call(weight);
        }
        calls += weights.len().min(64);
    }
    start.elapsed().as_secs_f64() / calls as f64
}

fn planes(matrix: &TiledMatrix, seed: usize) -> Vec<Vec<u8>> {
    let plane = |plane| {
        let len = matrix.plane_bytes(plane) as usize;
        match plane {
            PlaneKind::Code(_) => (0..len).map(|i| (i * 131 + seed * 7) as u8).collect::<Vec<u8>>(),
            PlaneKind::Scale(i) => match matrix.spec.scales[i].dtype {
                ScaleType::F16 => half::f16::from_f32(0.01).to_le_bytes().repeat(len / 2),
                ScaleType::F32 => 0.01f32.to_le_bytes().repeat(len / 4),
                _ => vec![0x30; len],
            },
        }
    };
    matrix.planes().map(plane).collect()
}

/// GB/s of all threads summing up a buffer.
fn read_rate(cx: &Context) -> f64 {
    let mut data = vec![1u64; WORKING_SET / 8];
    let mut best = 0.0f64;
    for _ in 0..8 {
        let start = Instant::now();
        cx.pool().rows(&mut data, 8, |_, part| {
            let mut sums = [0u64; 32];
            for chunk in part.as_chunks::<32>().0 {
                sums.iter_mut().zip(chunk).for_each(|(sum, v)| *sum = sum.wrapping_add(*v));
            }
            black_box(sums);
        });
        best = best.max(WORKING_SET as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}

/// Attention and the gate at SmolLM2's shape: a prompt of 512 tokens, and one token after 512.
fn attend(cx: &Context) {
    const HEADS: usize = 9;
    const STRIDE: usize = 960;
    let shape = KvShape { layers: 1, kv_heads: 3, head_dim: 64, blocks: 40 };
    let spec = AttentionShape { heads: HEADS, scale: 0.125, window: None, soft_cap: None };
    let table: Vec<u32> = (0..40).collect();
    for dtype in [KvType::F32, KvType::F16] {
        let mut cache = KvCache::new(shape, dtype).expect("the cache fits");
        let x: Vec<f32> = (0..512 * STRIDE).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        let prompt = [SequenceSlots { start_pos: 0, tokens: 512, block_table: &table }];
        let token = [SequenceSlots { start_pos: 512, tokens: 1, block_table: &table }];
        let mut out = vec![0.0; 512 * HEADS * 64];
        let write = mean(|| cache.write(cx, 0, &prompt, &x, STRIDE, 576, 768));
        let many = mean(|| attention(cx, &spec, &cache, 0, &prompt, &x, STRIDE, 0, &mut out));
        let one = mean(|| attention(cx, &spec, &cache, 0, &token, &x[..STRIDE], STRIDE, 0, &mut out[..HEADS * 64]));
        println!("{dtype:?} cache: write 512 {:.0} us, attend 512 {:.0} us, attend 1 {:.1} us", write, many, one);
    }
    let x: Vec<f32> = (0..512 * 3072).map(|i| (i * 37 % 101) as f32 / 10.0 - 5.0).collect();
    let mut out = vec![0.0; 512 * 1536];
    let gate = mean(|| gated(cx, Gate::Silu, &x, 3072, 0, 1536, 1536, &mut out));
    let weight = vec![1.0; 576];
    let norm = mean(|| rms_norm(cx, &x[..512 * 576], &weight, 1e-5, &mut out[..512 * 576]));
    println!("512 rows: gate of 1536 {gate:.0} us, norm of 576 {norm:.0} us");
}

/// Mean microseconds over 50 ms.
fn mean(mut call: impl FnMut()) -> f64 {
    call();
    let (start, mut calls) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_millis(50) {
        call();
        calls += 1;
    }
    start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
}

fn fork_join(cx: &Context) {
    let start = Instant::now();
    for _ in 0..10_000 {
        cx.pool().run(|worker| {
            black_box(worker);
        });
    }
    println!("fork and join: {:.2} us", start.elapsed().as_secs_f64() * 1e2);
}
