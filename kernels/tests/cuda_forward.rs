//! The kernels between the products of a layer against the operators of the CPU, on a device (`VT_TEST_CUDA=1`).

#![allow(clippy::unwrap_used)]

mod common;

use common::device::{Device, rounded, small};
use common::{Random, encodings};
use half::{bf16, f16};
use vt_bundle::codec::ggml::raw;
use vt_kernels::activation::{self, Gate};
use vt_kernels::cuda::elementwise::{Columns, ElementwiseKernels, Placing};
use vt_kernels::cuda::gemm::{DeviceMatrix, EmbeddingKernels, Gemm, GemmInput, GemmRequest, NormAhead, OutType};
use vt_kernels::cuda::kv_cache::{CudaKvCache, CudaKvType, KvRows, KvScales, KvWriter, NO_SLOT};
use vt_kernels::cuda::norm::{HeadRows, NormKernels};
use vt_kernels::cuda::{CudaGraph, DeviceMemory, Inbox, Outbox};
use vt_kernels::kv_cache::KvShape;
use vt_kernels::norm::{rms_norm, rms_norm_heads};
use vt_kernels::rope::{RopeScaling, Rotation, inverse_frequencies};
use vt_kernels::{Context, FloatType, RawWeight, RowsWeight, Weight};

/// What no kernel may leave in a result, and what columns beside a result keep.
const POISON: f32 = -7777.0;
/// Half a unit in the last place of bf16, and what the order of f32 sums changes.
const BF16: f32 = 1.0 / 256.0;

/// Every element within `tolerance` of its own magnitude, or of `floor`.
fn assert_near(what: &str, got: &[f32], expected: &[f32], tolerance: f32, floor: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let limit = tolerance * e.abs().max(floor);
        assert!((g - e).abs() <= limit, "{what}: element {i} is {g}, expected {e}");
    }
}

#[test]
fn norms_of_rows() {
    let Some(device) = Device::open() else { return };
    let kernels = NormKernels::new(&device.context).unwrap();
    let (cx, mut random) = (Context::new(2).unwrap(), Random(11));
    for (tokens, width) in [(1, 4096), (3, 37), (65, 576), (7, 1152), (2, 8192), (5, 64), (1, 4)] {
        if small() && tokens > 7 {
            continue;
        }
        let (x, weight) = (random.activations(tokens * width), random.activations(width));
        let mut expected = vec![0.0; x.len()];
        rms_norm(&cx, &x, &weight, 1e-5, &mut expected);
        let (input, weights) = (device.floats(&x), device.floats(&weight));
        let out = device.halves(&vec![POISON; x.len()]);
        let run = |rows: Option<u64>, count, out: &DeviceMemory| {
            kernels
                .rms_norm(&device.stream, input.address(), rows, count, width, weights.address(), 1e-5, out.address())
                .unwrap();
        };
        run(None, tokens, &out);
        assert_near("all rows", &device.read_halves(&out), &expected, BF16, 1e-3);

        let order: Vec<u32> = (0..tokens as u32).rev().step_by(2).collect();
        let (rows, out) = (device.words(&order), device.halves(&vec![POISON; order.len() * width]));
        run(Some(rows.address()), order.len(), &out);
        let chosen: Vec<f32> =
            order.iter().flat_map(|&row| &expected[row as usize * width..][..width]).copied().collect();
        assert_near("chosen rows", &device.read_halves(&out), &chosen, BF16, 1e-3);
    }
}

#[test]
fn norms_that_end_a_block() {
    let Some(device) = Device::open() else { return };
    let kernels = NormKernels::new(&device.context).unwrap();
    let (cx, mut random) = (Context::new(2).unwrap(), Random(12));
    for (tokens, width) in [(1, 640), (9, 37), (33, 1152)] {
        let [block, stream] = [0, 1].map(|_| random.activations(tokens * width));
        let [post, next] = [0, 1].map(|_| random.activations(width));
        let mut expected = vec![0.0; block.len()];
        rms_norm(&cx, &block, &post, 1e-6, &mut expected);
        activation::add(&cx, &mut expected, &stream);
        let mut normed = vec![0.0; block.len()];
        rms_norm(&cx, &expected, &next, 1e-6, &mut normed);
        let [block, post, next] = [&block, &post, &next].map(|v| device.floats(v));
        for with_next in [true, false] {
            let (residual, out) = (device.floats(&stream), device.halves(&vec![POISON; normed.len()]));
            let then = with_next.then(|| (next.address(), out.address()));
            kernels
                .post_norm_add(
                    &device.stream,
                    block.address(),
                    post.address(),
                    residual.address(),
                    then,
                    tokens,
                    width,
                    1e-6,
                )
                .unwrap();
            assert_near("residual", &device.read_floats(&residual), &expected, 1e-5, 1e-2);
            let poison = vec![bf16::from_f32(POISON).to_f32(); normed.len()];
            let expected = if with_next { &normed } else { &poison };
            assert_near("next norm", &device.read_halves(&out), expected, BF16, 1e-2);
        }
    }
}

#[test]
fn heads_are_normed_and_rotated() {
    let Some(device) = Device::open() else { return };
    let kernels = NormKernels::new(&device.context).unwrap();
    let (cx, mut random) = (Context::new(2).unwrap(), Random(13));
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: 4096.0,
        attention_factor: None,
        truncate: true,
    };
    for (queries, keys, dim, rotary, scaling, normed) in [
        (8, 2, 128, 128, RopeScaling::None, true),
        (3, 3, 64, 64, RopeScaling::Linear { factor: 2.0 }, false),
        (4, 1, 256, 256, yarn, true),
        (2, 1, 80, 20, RopeScaling::None, true),
        (2, 1, 24, 6, RopeScaling::None, false),
    ] {
        let (tokens, gap) = (11, 8);
        let (q_at, k_at) = (gap, 2 * gap + queries * dim);
        let v_at = k_at + keys * dim + gap;
        let stride = v_at + keys * dim + gap;
        let x = rounded(random.activations(tokens * stride));
        let [q_norm, k_norm] = [0, 1].map(|_| random.activations(dim));
        let positions: Vec<u32> = (0..tokens as u32).map(|t| t * t * 997).collect();
        let (inv_freq, factor) = inverse_frequencies(10_000.0, rotary, &scaling);

        let mut expected = x.clone();
        if normed {
            rms_norm_heads(&cx, &mut expected, stride, q_at, queries, &q_norm, 1e-6);
            rms_norm_heads(&cx, &mut expected, stride, k_at, keys, &k_norm, 1e-6);
        }
        let mut rotation = Rotation::default();
        rotation.load(&inv_freq, factor, positions.iter().map(|&p| p as usize));
        rotation.apply(&cx, &mut expected, stride, q_at, queries, dim);
        rotation.apply(&cx, &mut expected, stride, k_at, keys, dim);

        let half = rotary / 2;
        let (at, frequencies) = (device.words(&positions), device.floats(&inv_freq));
        let angles = device.floats(&vec![POISON; tokens * half * 2]);
        kernels
            .rotations(&device.stream, at.address(), frequencies.address(), factor, half, tokens, angles.address())
            .unwrap();
        let (q_weight, k_weight) = (device.floats(&q_norm), device.floats(&k_norm));
        let arguments = HeadRows {
            x: 0,
            stride,
            queries: (q_at, queries),
            keys_at: k_at,
            values_at: v_at,
            norms: normed.then(|| (q_weight.address(), k_weight.address())),
            eps: 1e-6,
            angles: angles.address(),
            half,
            slots: 0,
        };
        let slots: Vec<u32> = (0..tokens as u32).map(|t| if t == 4 { NO_SLOT } else { (t * 7 + 3) % 64 }).collect();
        let places = device.words(&slots);
        let arguments = HeadRows { slots: places.address(), ..arguments };
        let shape = KvShape { layers: 2, kv_heads: keys, head_dim: dim, blocks: 4 };
        for dtype in [CudaKvType::Bf16, CudaKvType::E4m3] {
            let scales = KvScales { key: 0.5, value: 2.0 };
            let caches = [(); 2].map(|()| CudaKvCache::new(&device.context, shape, dtype).unwrap());
            for cache in &caches {
                cache.memory().write(0, &vec![0x55; cache.memory().len() as usize]).unwrap();
            }
            let [fused, apart] = &caches;
            let given = device.halves(&x);
            let arguments = HeadRows { x: given.address(), ..arguments };
            kernels.heads_to_cache(&device.stream, &arguments, fused, 1, scales, tokens).unwrap();
            // A rotated element is a difference of two, so that its error is of their magnitude.
            let found = device.read_halves(&given);
            for (row, (found, expected)) in found.chunks(stride).zip(expected.chunks(stride)).enumerate() {
                let queries = q_at..q_at + queries * dim;
                assert_near("queries", &found[queries.clone()], &expected[queries.clone()], BF16, 0.5);
                let others = |i: &usize| !queries.contains(i);
                assert!((0..stride).filter(others).all(|i| found[i] == x[row * stride + i]), "only queries change");
            }
            // Keys as the CPU rotates them, values as they are, through the kernel that only stores. Keys differ by less than
            // a step of the stored type, which is what is compared.
            let stored = device.halves(&expected);
            let rows =
                KvRows { x: stored.address(), stride, keys_at: k_at, values_at: v_at, tokens, slots: places.address() };
            KvWriter::new(&device.context).unwrap().write(&device.stream, apart, 1, scales, &rows).unwrap();
            device.stream.synchronize().unwrap();
            let read = |cache: &CudaKvCache| {
                let mut bytes = vec![0; cache.memory().len() as usize];
                cache.memory().read(0, &mut bytes).unwrap();
                bytes
            };
            let (found, expected) = (read(fused), read(apart));
            let layer = found.len() / 2;
            assert!(found[..layer].iter().all(|b| *b == 0x55), "the other layer is left alone");
            let values = |bytes: &[u8]| -> Vec<f32> {
                match dtype {
                    CudaKvType::Bf16 => {
                        bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
                    }
                    CudaKvType::E4m3 => bytes.iter().map(|b| e4m3(*b)).collect(),
                }
            };
            let step = if dtype == CudaKvType::Bf16 { 2.0 * BF16 } else { 1.0 / 8.0 };
            assert_near("cache", &values(&found[layer..]), &values(&expected[layer..]), step, 0.5);
            let narrow = HeadRows { stride: stride - 2 * gap, ..arguments };
            assert!(kernels.heads_to_cache(&device.stream, &narrow, fused, 1, scales, 1).is_err());
        }
    }
}

/// OCP E4M3 without its NaN.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// A product that makes its activations, against the kernels for that and the product of what they left.
#[test]
fn products_make_activations() {
    let Some(device) = Device::open() else { return };
    let (norm, elementwise) =
        (NormKernels::new(&device.context).unwrap(), ElementwiseKernels::new(&device.context).unwrap());
    let (gemm, mut random) = (Gemm::new(&device.context).unwrap(), Random(21));
    let cases = encodings();
    let named = |decode: &str| cases.iter().find(|case| case.spec.decode == decode).unwrap();
    let all = [
        ("q4_1.ggml@1", 576, vec![3072], 3),
        ("fp8.channel.bf16@1", 64, vec![128], 1),
        ("nvfp4.modelopt@1", 4096, vec![1024, 512], 1),
        ("nvfp4.modelopt@1", 4096, vec![640, 640], 2),
        ("nvfp4.modelopt@1", 12288, vec![1024], 4),
        ("int4.symmetric.f16@1", 24576, vec![512], 4),
    ];
    let some = [("q4_1.ggml@1", 576, vec![192], 3), ("nvfp4.modelopt@1", 512, vec![128, 64], 1)];
    for (decode, k, parts, rows) in if small() { some.to_vec() } else { all.to_vec() } {
        let matrix = named(decode).matrix(k, &parts, &mut random);
        let matrix = DeviceMatrix::upload(&device.context, &matrix.weight()).unwrap();
        let n = matrix.padded_n() as usize;
        let workspace = device.bytes(&vec![0; gemm.workspace_bytes(&matrix, rows as u32) as usize]);
        assert!(gemm.makes_inputs(&matrix, rows as u32) && !gemm.makes_inputs(&matrix, 9));
        let request = |x: u64, x_stride: usize, out: &DeviceMemory| GemmRequest {
            x,
            x_stride: x_stride as u32,
            m: rows as u32,
            out: out.address(),
            out_type: OutType::F32,
            out_stride: n as u32,
            bias: None,
            accumulate: false,
            deterministic: false,
        };
        let (stream, scratch) = (&device.stream, workspace.address());
        let result = || device.floats(&vec![POISON; rows * n]);
        let made = device.halves(&vec![POISON; rows * k]);

        let (x, weight) = (random.activations(rows * (k + 4)), random.activations(k));
        let strided = device.floats(&x);
        let dense: Vec<f32> = x.chunks(k + 4).flat_map(|row| &row[..k]).copied().collect();
        let (dense, weights) = (device.floats(&dense), device.floats(&weight));
        norm.rms_norm(stream, dense.address(), None, rows, k, weights.address(), 1e-5, made.address()).unwrap();
        let (apart, itself) = (result(), result());
        gemm.launch(stream, &matrix, &request(made.address(), k, &apart), scratch).unwrap();
        let input = GemmInput::Normed { weight: weights.address(), eps: 1e-5 };
        gemm.launch_made(stream, &matrix, &request(strided.address(), k + 4, &itself), input, None, scratch).unwrap();
        let (apart, itself) = (device.read_floats(&apart), device.read_floats(&itself));
        // Squares are added in another order, so that an activation is a step of bf16 away now and then.
        let most = apart.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        for (i, (a, b)) in apart.iter().zip(&itself).enumerate() {
            assert!((a - b).abs() <= 0.005 * most, "{decode}, K {k}, {rows} rows: element {i} is {b}, expected {a}");
        }

        let (stride, up_at) = (2 * k + 24, k + 8);
        let x = device.halves(&random.activations(rows * stride));
        for gate in [Gate::Silu, Gate::GeluTanh] {
            let (apart, itself) = (result(), result());
            elementwise.gated(stream, gate, x.address(), rows, stride, 0, up_at, k, made.address()).unwrap();
            gemm.launch(stream, &matrix, &request(made.address(), k, &apart), scratch).unwrap();
            let input = GemmInput::Gated { gate, up_at: up_at as u32 };
            gemm.launch_made(stream, &matrix, &request(x.address(), stride, &itself), input, None, scratch).unwrap();
            // The activations are the same bits; the kernel may be another one, which adds in another order.
            let (apart, itself) = (device.read_floats(&apart), device.read_floats(&itself));
            let most = apart.iter().fold(0.0f32, |most, v| most.max(v.abs()));
            for (i, (a, b)) in apart.iter().zip(&itself).enumerate() {
                assert!((a - b).abs() <= 1e-5 * most, "{decode}, K {k}, {gate:?}: element {i} is {b}, expected {a}");
            }
            let beyond = GemmInput::Gated { gate, up_at: (k + 32) as u32 };
            let refused = request(x.address(), stride, &made);
            assert!(gemm.launch_made(stream, &matrix, &refused, beyond, None, scratch).is_err());
        }
    }
}

#[test]
fn half_a_norm_is_left_for_the_next_product() {
    let Some(device) = Device::open() else { return };
    let (norm, gemm) = (NormKernels::new(&device.context).unwrap(), Gemm::new(&device.context).unwrap());
    let (cases, mut random) = (encodings(), Random(22));
    let named = |decode: &str| cases.iter().find(|case| case.spec.decode == decode).unwrap();
    let eps = 1e-5;
    let all = [
        ("nvfp4.modelopt@1", 4096, 4096, "nvfp4.modelopt@1", vec![4096, 1024, 1024], 1),
        ("nvfp4.modelopt@1", 12288, 4096, "nvfp4.modelopt@1", vec![12288, 12288], 2),
        ("fp8.channel.bf16@1", 4096, 4096, "int4.symmetric.f16@1", vec![4096, 1024, 1024], 13),
        ("int4.symmetric.f16@1", 512, 8192, "q4_1.ggml@1", vec![320], 3),
    ];
    let some = [("nvfp4.modelopt@1", 96, 192, "fp8.channel.bf16@1", vec![64, 64], 4)];
    let cases_of = if small() { &some[..] } else { &[&all[..], &some].concat() };
    for (first, k, hidden, second, parts, rows) in cases_of.iter().cloned() {
        let mut matrix = |decode: &str, k: usize, parts: &[u64]| {
            let matrix = named(decode).matrix(k, parts, &mut random);
            DeviceMatrix::upload(&device.context, &matrix.weight()).unwrap()
        };
        let (from, to) = (matrix(first, k, &[hidden as u64]), matrix(second, hidden, &parts));
        if rows > 4 && !gemm.leaves_half_norm(&from, rows as u32) {
            // Only kernels for Hopper do it for more than four.
            assert!(device.context.attributes().capability != 90);
            continue;
        }
        assert!(gemm.leaves_half_norm(&from, rows as u32) && gemm.takes_half_norm(&to, rows as u32));
        let bytes = [&from, &to].map(|matrix| gemm.workspace_bytes(matrix, rows as u32)).into_iter().max().unwrap();
        let workspace = device.bytes(&vec![0; bytes as usize]);
        let (stream, scratch, n) = (&device.stream, workspace.address(), to.padded_n() as usize);
        let (weight, x) = (device.floats(&random.activations(hidden)), device.halves(&random.activations(rows * k)));
        let (before, normed) = (random.activations(rows * hidden), device.halves(&vec![POISON; rows * hidden]));
        let squares = device.floats(&vec![POISON; NormAhead::squares_bytes(hidden) as usize / 4]);
        let request = |x: u64, x_stride: usize, out: &DeviceMemory, out_stride: usize, accumulate: bool| GemmRequest {
            x,
            x_stride: x_stride as u32,
            m: rows as u32,
            out: out.address(),
            out_type: OutType::F32,
            out_stride: out_stride as u32,
            bias: None,
            accumulate,
            deterministic: false,
        };
        let result = || (device.floats(&before), device.floats(&vec![POISON; rows * n]));
        let read = |(sum, out): (DeviceMemory, DeviceMemory)| (device.read_floats(&sum), device.read_floats(&out));

        let apart = result();
        let adding = |sum: &DeviceMemory| request(x.address(), k, sum, hidden, true);
        gemm.launch(stream, &from, &adding(&apart.0), scratch).unwrap();
        let (weights, to_norm) = (weight.address(), apart.0.address());
        norm.rms_norm(stream, to_norm, None, rows, hidden, weights, eps, normed.address()).unwrap();
        gemm.launch(stream, &to, &request(normed.address(), hidden, &apart.1, n, false), scratch).unwrap();
        let expected = read(apart);

        let normed = device.halves(&vec![POISON; rows * hidden]);
        let ahead = NormAhead { weight: weights, out: normed.address(), squares: squares.address() };
        let input = GemmInput::Weighted { squares: squares.address(), eps };
        let mut seen = Vec::new();
        for _ in 0..2 {
            let left = result();
            gemm.launch_made(stream, &from, &adding(&left.0), GemmInput::Rows, Some(&ahead), scratch).unwrap();
            let taking = request(normed.address(), hidden, &left.1, n, false);
            gemm.launch_made(stream, &to, &taking, input, None, scratch).unwrap();
            seen.push(read(left));
        }
        assert_eq!(seen[0], seen[1], "{first}, {second}: another order of adding");
        // Activations are rounded before they are divided instead of after.
        for (what, a, b, bound) in [("sum", &expected.0, &seen[0].0, 1e-5), ("product", &expected.1, &seen[0].1, 0.01)]
        {
            let most = a.iter().fold(0.0f32, |most, v| most.max(v.abs()));
            for (i, (a, b)) in a.iter().zip(b).enumerate() {
                assert!(
                    (a - b).abs() <= bound * most,
                    "{first}, {second}, {rows} rows: {what} {i} is {b}, expected {a}"
                );
            }
        }
        let bf16 = GemmRequest { out_type: OutType::Bf16, accumulate: false, ..adding(&workspace) };
        assert!(gemm.launch_made(stream, &from, &bf16, GemmInput::Rows, Some(&ahead), scratch).is_err());
        let both = GemmInput::Weighted { squares: squares.address(), eps };
        assert!(gemm.launch_made(stream, &from, &adding(&workspace), both, Some(&ahead), scratch).is_err());
    }
}

#[test]
fn vectors_are_widened() {
    let Some(device) = Device::open() else { return };
    let kernels = ElementwiseKernels::new(&device.context).unwrap();
    let mut random = Random(14);
    for (dtype, width) in [(FloatType::F32, 576), (FloatType::F16, 37), (FloatType::Bf16, 4096)] {
        let bytes = stored(dtype, &random.activations(width));
        let (vector, out) = (device.bytes(&bytes), device.floats(&vec![POISON; width]));
        kernels.widen(&device.stream, vector.address(), dtype, 1.0, out.address(), width).unwrap();
        let expected: Vec<f32> = (0..width).map(|i| dtype.get(&bytes, i) + 1.0).collect();
        assert_eq!(device.read_floats(&out), expected);
    }
}

fn stored(dtype: FloatType, values: &[f32]) -> Vec<u8> {
    match dtype {
        FloatType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        FloatType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        FloatType::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
    }
}

/// Rows of a table are bit for bit what the CPU decodes, times the scale.
fn check_embedding(device: &Device, what: &str, weight: &Weight<'_>, rows: usize, scale: f32, random: &mut Random) {
    let (gemm, kernels) = (Gemm::new(&device.context).unwrap(), EmbeddingKernels::new(&device.context).unwrap());
    let matrix = DeviceMatrix::upload(&device.context, weight).unwrap();
    let ids: Vec<u32> = (0..23).map(|_| random.below(rows) as u32).collect();
    let mut expected = Vec::new();
    for &id in &ids {
        let mut row = vec![0.0; weight.k()];
        weight.decode_row(id as usize, &mut row);
        expected.extend(row.iter().map(|v| if scale == 1.0 { *v } else { v * scale }));
    }
    let (tokens, out) = (device.words(&ids), device.floats(&vec![POISON; expected.len()]));
    kernels.embed(&device.stream, &gemm, &matrix, tokens.address(), ids.len(), scale, out.address()).unwrap();
    for (i, (found, expected)) in device.read_floats(&out).iter().zip(&expected).enumerate() {
        assert_eq!(found.to_bits(), expected.to_bits(), "{what}: element {i} is {found}, expected {expected}");
    }
}

#[test]
fn embeddings_of_every_storage() {
    let Some(device) = Device::open() else { return };
    let mut random = Random(18);
    for (dtype, width, scale) in [
        (FloatType::F32, 576, 1.0),
        (FloatType::F16, 37, 6.0),
        (FloatType::Bf16, 4096, 1.0),
        (FloatType::Bf16, 640, 25.3),
    ] {
        let data = stored(dtype, &random.activations(40 * width));
        let weight = Weight::Rows(RowsWeight::new(dtype, 40, width, &data).unwrap());
        check_embedding(&device, "floats", &weight, 40, scale, &mut random);
    }
    for case in encodings().into_iter().take(if small() { 6 } else { usize::MAX }) {
        let matrix = case.matrix(768, &[100], &mut random);
        check_embedding(&device, case.spec.decode, &matrix.weight(), 100, 1.0, &mut random);
    }
    for format in raw::FORMATS {
        // Any bytes are codes; scales stay finite where no exponent is all ones.
        let bytes = 512 / format.weights * format.bytes * 40;
        let data: Vec<u8> = (0..bytes).map(|_| random.next() as u8 & 0xBB).collect();
        let weight = Weight::Raw(RawWeight::new(format, 40, 512, &data).unwrap());
        check_embedding(&device, format.decode_name, &weight, 40, 3.0, &mut random);
    }
}

#[test]
fn gates_and_input_scales() {
    let Some(device) = Device::open() else { return };
    let kernels = ElementwiseKernels::new(&device.context).unwrap();
    let (cx, mut random) = (Context::new(2).unwrap(), Random(15));
    for (rows, width, gap) in [(5, 37, 3), (3, 2056, 8), (1, 12288, 0), (130, 768, 64)] {
        if small() && rows * width > 10_000 {
            continue;
        }
        for gate in [Gate::Silu, Gate::GeluTanh] {
            let (gate_at, up_at) = (gap, 2 * gap + width);
            let stride = up_at + width + gap;
            let x = rounded(random.activations(rows * stride));
            let mut expected = vec![0.0; rows * width];
            activation::gated(&cx, gate, &x, stride, gate_at, up_at, width, &mut expected);
            let (input, out) = (device.halves(&x), device.halves(&vec![POISON; expected.len()]));
            kernels
                .gated(&device.stream, gate, input.address(), rows, stride, gate_at, up_at, width, out.address())
                .unwrap();
            assert_near("gate", &device.read_halves(&out), &expected, BF16, 1e-3);
        }
        let (x, scale) = (rounded(random.activations(rows * width)), random.activations(width));
        let expected: Vec<f32> = x.iter().enumerate().map(|(i, v)| v * scale[i % width]).collect();
        let (input, factors) = (device.halves(&x), device.floats(&scale));
        let out = device.halves(&vec![POISON; expected.len()]);
        kernels.scale_inputs(&device.stream, input.address(), factors.address(), rows, width, out.address()).unwrap();
        assert_near("input scale", &device.read_halves(&out), &expected, BF16, 1e-6);
    }
}

#[test]
fn columns_find_their_place() {
    let Some(device) = Device::open() else { return };
    let kernels = ElementwiseKernels::new(&device.context).unwrap();
    let mut random = Random(16);
    let (rows, width, from_stride, to_stride) = (7, 301, 320, 611);
    let x = random.activations(rows * from_stride);
    let bias = random.activations(width);
    let (input, biases, factor) = (device.floats(&x), device.floats(&bias), device.floats(&[0.25]));
    let from = Columns { address: input.address(), stride: from_stride, at: 5 };
    for placing in [Placing::F32, Placing::Bf16, Placing::AddF32] {
        for (scaled, biased) in [(false, false), (true, true)] {
            let before = vec![2.0; rows * to_stride];
            let mut expected = before.clone();
            for row in 0..rows {
                for i in 0..width {
                    let value = x[row * from_stride + 5 + i] * if scaled { 0.25 } else { 1.0 };
                    let value = value + if biased { bias[i] } else { 0.0 };
                    let place = &mut expected[row * to_stride + 300 + i];
                    *place = if placing == Placing::AddF32 { *place + value } else { value };
                }
            }
            let out = if placing == Placing::Bf16 { device.halves(&before) } else { device.floats(&before) };
            let to = Columns { address: out.address(), stride: to_stride, at: 300 };
            let (scale, bias) = (scaled.then(|| factor.address()), biased.then(|| biases.address()));
            kernels.place_columns(&device.stream, from, to, placing, rows, width, scale, bias).unwrap();
            match placing {
                Placing::Bf16 => assert_near("bf16", &device.read_halves(&out), &expected, BF16, 1e-3),
                _ => assert_near("f32", &device.read_floats(&out), &expected, 1e-6, 1.0),
            }
        }
    }
}

#[test]
fn logits_are_capped_in_place() {
    let Some(device) = Device::open() else { return };
    let kernels = ElementwiseKernels::new(&device.context).unwrap();
    let (cx, mut random) = (Context::new(2).unwrap(), Random(17));
    let (rows, width, stride) = (3, 1000, 1024);
    let x: Vec<f32> = random.activations(rows * stride).iter().map(|v| v * 40.0).collect();
    let mut expected = x.clone();
    for row in expected.chunks_exact_mut(stride) {
        activation::soft_cap(&cx, &mut row[..width], 30.0);
    }
    let memory = device.floats(&x);
    kernels.soft_cap(&device.stream, memory.address(), rows, stride, width, 30.0).unwrap();
    // The CPU's tanh has an absolute error, which counts for logits near zero.
    assert_near("soft cap", &device.read_floats(&memory), &expected, 1e-5, 1.0);
}

/// A recorded launch reads what memory holds when it is replayed, also what an outbox has just sent.
#[test]
fn graphs_replay_what_was_recorded() {
    let Some(device) = Device::open() else { return };
    let kernels = ElementwiseKernels::new(&device.context).unwrap();
    let (input, out) = (device.floats(&[1.0, 2.0, 3.0]), device.floats(&[POISON; 3]));
    let graph = CudaGraph::record(&device.stream, || {
        kernels.widen(&device.stream, input.address(), FloatType::F32, 0.5, out.address(), 3)
    });
    let graph = graph.unwrap();
    assert_eq!(graph.nodes(), 1);
    assert_eq!(device.read_floats(&out), [POISON; 3], "recording does not run");
    let (mut outbox, mut inbox) = (Outbox::new(&device.context, 12).unwrap(), Inbox::new(&device.context, 12).unwrap());
    for round in 0..3u8 {
        let values = [f32::from(round), 10.0, -1.0];
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        outbox.bytes().unwrap().copy_from_slice(&bytes);
        outbox.send(&device.stream, 12, input.address()).unwrap();
        graph.replay(&device.stream).unwrap();
        inbox.receive(&device.stream, out.address(), 12).unwrap();
        let found: Vec<f32> = inbox.wait().unwrap().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert_eq!(found, values.map(|v| v + 0.5));
    }
    // An error inside ends the recording, and the stream goes on.
    let failed: Result<CudaGraph, _> = CudaGraph::record(&device.stream, || device.stream.synchronize());
    assert!(failed.is_err());
    graph.replay(&device.stream).unwrap();
    device.stream.synchronize().unwrap();
}
