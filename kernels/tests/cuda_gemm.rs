//! Products on the device against f64 sums over weights that the encoding's own formula decoded. Run with `VT_TEST_CUDA=1`
//! on a machine with a GPU; without it nothing is tested.

#![allow(clippy::unwrap_used)]

mod common;

use common::device::{POISON, Products, small};
use common::{Random, RandomMatrix, encodings};
use half::bf16;
use std::ops::Range;
use vt_bundle::codec::ggml::raw;
use vt_kernels::activation::Gate;
use vt_kernels::cuda::gemm::{DeviceMatrix, ExpertFusion, ExpertGroups, GemmRequest, OutType};
use vt_kernels::cuda::{CudaError, DeviceMemory};
use vt_kernels::{FloatType, RawWeight, RowsWeight, Weight, reference};

/// Elements beyond each row and rows beyond the last that no kernel may touch.
const MARGIN: usize = 3;

fn workspace(device: &Products, matrix: &DeviceMatrix, m: usize) -> DeviceMemory {
    device.bytes(&vec![0; device.gemm.workspace_bytes(matrix, m as u32) as usize])
}

/// How a product is asked for.
#[derive(Clone, Copy, Debug)]
struct Form {
    out_type: OutType,
    bias: bool,
    accumulate: bool,
    deterministic: bool,
}

const PLAIN: Form = Form { out_type: OutType::F32, bias: false, accumulate: false, deterministic: false };
const FORMS: [Form; 4] = [
    PLAIN,
    Form { bias: true, deterministic: true, ..PLAIN },
    Form { bias: true, accumulate: true, ..PLAIN },
    Form { out_type: OutType::Bf16, ..PLAIN },
];

/// Activations as the device sees them, `[m, k]`, and the bytes of `[m, stride]` with a poisoned margin.
fn activations(random: &mut Random, m: usize, k: usize, stride: usize) -> (Vec<f32>, Vec<u8>) {
    let x: Vec<f32> = random.activations(m * k).into_iter().map(|v| bf16::from_f32(v).to_f32()).collect();
    let mut bytes = vec![POISON; (m * stride * 2).max(2)];
    for (row, values) in x.chunks(k).enumerate() {
        for (i, value) in values.iter().enumerate() {
            let at = 2 * (row * stride + i);
            bytes[at..at + 2].copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
        }
    }
    (x, bytes)
}

/// Compares every logical element of one product, and that nothing beside it was written.
#[allow(clippy::needless_range_loop)]
fn check(
    device: &Products,
    what: &str,
    weight: &Weight<'_>,
    logical: &[Range<usize>],
    m: usize,
    form: Form,
    seed: u64,
) {
    let random = &mut Random(seed);
    let (k, n) = (weight.k(), weight.out_stride());
    let what = format!("{what}, M {m}, K {k}, N {n}, {form:?}");
    let x_stride = k.next_multiple_of(8) + 8 * random.below(2);
    let (x, x_bytes) = activations(random, m, k, x_stride);
    let bias: Vec<f32> = (0..n).map(|_| random.unit()).collect();
    let before: Vec<f32> = (0..m * n).map(|_| random.unit()).collect();
    let out_stride = n + MARGIN;
    let size = if form.out_type == OutType::F32 { 4 } else { 2 };
    let mut out = vec![POISON; (m + 1) * out_stride * size];
    if form.accumulate {
        for (row, values) in before.chunks(n).enumerate() {
            for (i, value) in values.iter().enumerate() {
                let at = 4 * (row * out_stride + i);
                out[at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
        }
    }
    let matrix = DeviceMatrix::upload(&device.context, weight).unwrap();
    let (x_memory, out_memory) = (device.bytes(&x_bytes), device.bytes(&out));
    let bias_memory = device.bytes(&bias.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
    let workspace = workspace(device, &matrix, m);
    let request = GemmRequest {
        x: x_memory.address(),
        x_stride: x_stride as u32,
        m: m as u32,
        out: out_memory.address(),
        out_type: form.out_type,
        out_stride: out_stride as u32,
        bias: form.bias.then(|| bias_memory.address()),
        accumulate: form.accumulate,
        deterministic: form.deterministic,
    };
    device.gemm.launch(&device.stream, &matrix, &request, workspace.address()).unwrap();
    device.stream.synchronize().unwrap();
    out_memory.read(0, &mut out).unwrap();

    let decoded = reference::decode(weight);
    let expected = reference::matmul(&x, &decoded, k);
    let absolute = |v: &[f32]| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
    let magnitude = reference::matmul(&absolute(&x), &absolute(&decoded), k);
    for row in 0..=m {
        for column in 0..out_stride {
            let at = size * (row * out_stride + column);
            let bytes = &out[at..at + size];
            if row == m || column >= n {
                assert!(bytes.iter().all(|b| *b == POISON), "{what}: written beside the result at {row}, {column}");
                continue;
            }
            let got = if size == 4 {
                f32::from_le_bytes(bytes.try_into().unwrap())
            } else {
                bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32()
            };
            if !logical.iter().any(|part| part.contains(&column)) {
                assert!(bytes.iter().any(|b| *b != POISON), "{what}: {row}, {column} was not written");
                continue;
            }
            let i = row * n + column;
            let mut terms = (expected[i], magnitude[i]);
            for (used, value) in [(form.bias, bias[column]), (form.accumulate, before[i])] {
                if used {
                    terms = (terms.0 + f64::from(value), terms.1 + f64::from(value.abs()));
                }
            }
            // Sums of K f32 terms; and half a unit in the last place of bf16.
            let rounding = if size == 2 { terms.0.abs() / 256.0 } else { 0.0 };
            let error = (f64::from(got) - terms.0).abs();
            let allowed = 3e-6 * terms.1.max(1e-30) + rounding;
            assert!(error <= allowed, "{what}: {row}, {column} is {got}, expected {} (allowed {allowed:e})", terms.0);
        }
    }
}

fn whole(n: usize) -> Vec<Range<usize>> {
    std::iter::once(0..n).collect()
}

#[test]
fn every_encoding() {
    let Some(device) = Products::open() else { return };
    let random = &mut Random(11);
    for case in encodings() {
        let unit = case.k_unit();
        let rows: &[usize] = if small() { &[1, 13] } else { &[1, 2, 8, 13, 16, 17, 40, 64, 70] };
        for (i, m) in rows.iter().copied().enumerate() {
            let k = (unit * (1 + random.below(if unit > 100 { 5 } else { 700 / unit }))).next_multiple_of(unit);
            let (parts, logical) = match i % 3 {
                0 => (vec![100, 64, 7], vec![0..100, 128..192, 192..199]),
                1 if small() => (vec![130], whole(130)),
                1 => (vec![1500], whole(1500)),
                _ => (vec![330, 513], vec![0..330, 384..897]),
            };
            let matrix = case.matrix(k, &parts, random);
            let what = format!("{} group {} block {:?}", case.spec.decode, case.group, case.block);
            check(&device, &what, &matrix.weight(), &logical, m, FORMS[i % FORMS.len()], random.next());
        }
    }
}

/// One row, as in a step of generation: matrices with few and with many columns, blocks that share columns and that do not.
#[test]
fn one_row_of_nvfp4() {
    let Some(device) = Products::open() else { return };
    let random = &mut Random(17);
    let cases = encodings();
    for case in cases.iter().filter(|case| case.spec.decode.starts_with("nvfp4.") && case.group == 16) {
        let shapes = [(32, 64), (96, 1500), (4096, 300), (12_288, 1000), (224, 20_500), (640, 24_576), (4096, 6144)];
        for (i, (k, n)) in shapes.into_iter().enumerate() {
            let matrix = case.matrix(k, &[n], random);
            let what = format!("{}, one row", case.spec.decode);
            check(&device, &what, &matrix.weight(), &whole(n as usize), 1, FORMS[i % FORMS.len()], random.next());
            check(&device, &what, &matrix.weight(), &whole(n as usize), 1, PLAIN, random.next());
        }
    }
}

#[test]
fn rows_of_floats() {
    let Some(device) = Products::open() else { return };
    let random = &mut Random(12);
    for dtype in [FloatType::F32, FloatType::F16, FloatType::Bf16] {
        let shapes = [
            (1, 1, 1),
            (3, 17, 2),
            (37, 100, 5),
            (64, 576, 1),
            (19, 31, 70),
            (130, 48, 9),
            (700, 1000, 16),
            (100, 2056, 70),
            // Enough columns for the kernels of Hopper.
            (17_001, 72, 1),
            (17_001, 72, 9),
            (16_900, 200, 50),
            (16_900, 200, 133),
            (16_950, 64, 20),
        ];
        for (i, (n, k, m)) in shapes.into_iter().enumerate() {
            let mut data = Vec::new();
            for _ in 0..n * k {
                let v = random.unit();
                match dtype {
                    FloatType::F32 => data.extend(v.to_le_bytes()),
                    FloatType::F16 => data.extend(half::f16::from_f32(v).to_le_bytes()),
                    FloatType::Bf16 => data.extend(bf16::from_f32(v).to_le_bytes()),
                }
            }
            let weight = Weight::Rows(RowsWeight::new(dtype, n, k, &data).unwrap());
            let form = FORMS[i % FORMS.len()];
            check(&device, &format!("{dtype:?}"), &weight, &whole(n), m, form, random.next());
        }
    }
}

#[test]
fn raw_blocks_of_every_type() {
    let Some(device) = Products::open() else { return };
    let random = &mut Random(13);
    for format in raw::FORMATS {
        for (i, (n, blocks, m)) in [(1, 1, 1), (37, 3, 1), (20, 2, 7), (70, 5, 34)].into_iter().enumerate() {
            let k = blocks * format.weights;
            let scale = half::f16::from_f32(0.02).to_le_bytes();
            // Random bits would give scales that are not finite: bytes below 64 are finite as halves of an f16.
            let mut data: Vec<u8> = (0..n * blocks * format.bytes).map(|_| random.below(0x40) as u8).collect();
            data.chunks_exact_mut(format.bytes).for_each(|block| block[..2].copy_from_slice(&scale));
            let weight = Weight::Raw(RawWeight::new(format, n, k, &data).unwrap());
            check(&device, format.name, &weight, &whole(n), m, FORMS[i], random.next());
        }
    }
}

#[test]
fn experts_see_their_own_rows() {
    let Some(device) = Products::open() else { return };
    let random = &mut Random(14);
    for (decode, group) in [("nvfp4.modelopt@1", 16), ("fp8.channel.bf16@1", 0), ("q4_k.ggml@1", 32)] {
        let spec = vt_bundle::encoding::find(decode).unwrap();
        let (k, parts) = (512, [96, 200]);
        let experts: Vec<RandomMatrix> =
            (0..5).map(|_| RandomMatrix::new(spec, k, &parts, group, [0, 0], random)).collect();
        let logical = [0..96, 128..328];
        // An expert without rows, one with more than a block of threads takes at once.
        let offsets = [0u32, 3, 3, 4, 74, 80];
        let m = 80;
        let weights: Vec<Weight<'_>> = experts.iter().map(RandomMatrix::weight).collect();
        let (record, stride) = DeviceMatrix::upload_experts(&device.context, &weights).unwrap();
        let (x, x_bytes) = activations(random, m, k, k);
        let n = record.padded_n() as usize;
        let (x_memory, out) = (device.bytes(&x_bytes), device.bytes(&vec![POISON; m * n * 4]));
        let offset_memory = device.bytes(&offsets.iter().flat_map(|o| o.to_le_bytes()).collect::<Vec<_>>());
        let workspace = workspace(&device, &record, m);
        let request = GemmRequest {
            x: x_memory.address(),
            x_stride: k as u32,
            m: m as u32,
            out: out.address(),
            out_type: OutType::F32,
            out_stride: n as u32,
            bias: None,
            accumulate: false,
            deterministic: false,
        };
        let offsets_at = offset_memory.address();
        let groups = ExpertGroups { count: 5, stride, offsets: offsets_at, most: 70, settled: true };
        device.gemm.launch_grouped(&device.stream, &record, &request, &groups, workspace.address()).unwrap();
        device.stream.synchronize().unwrap();
        let mut bytes = vec![0; m * n * 4];
        out.read(0, &mut bytes).unwrap();
        for (e, expert) in experts.iter().enumerate() {
            let decoded = reference::decode(&expert.weight());
            let rows = offsets[e] as usize..offsets[e + 1] as usize;
            let x = &x[rows.start * k..rows.end * k];
            let expected = reference::matmul(x, &decoded, k);
            let absolute = |v: &[f32]| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
            let magnitude = reference::matmul(&absolute(x), &absolute(&decoded), k);
            for (i, row) in rows.enumerate() {
                for column in logical.iter().cloned().flatten() {
                    let at = 4 * (row * n + column);
                    let got = f64::from(f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()));
                    let (expected, scale) = (expected[i * n + column], magnitude[i * n + column]);
                    assert!((got - expected).abs() <= 3e-6 * scale, "{decode}: {row}, {column}: {got}, not {expected}");
                }
            }
        }
    }
}

/// Tokens of each of `experts`, `top_k` experts a token, as routing sorts them: offsets, and the pair of each row.
fn routed(random: &mut Random, tokens: usize, experts: usize, top_k: usize) -> (Vec<u32>, Vec<u32>) {
    let mut rows = vec![Vec::new(); experts];
    for token in 0..tokens {
        let mut order: Vec<usize> = (0..experts).collect();
        for j in 0..top_k {
            order.swap(j, j + random.below(experts - j));
            rows[order[j]].push((token * top_k + j) as u32);
        }
    }
    let mut offsets = vec![0];
    offsets.extend(rows.iter().scan(0, |sum, of| {
        *sum += of.len() as u32;
        Some(*sum)
    }));
    (offsets, rows.concat())
}

#[test]
fn experts_find_their_tokens_and_gate_what_they_compute() {
    let Some(device) = Products::open() else { return };
    let random = &mut Random(15);
    let silu = |x: f64| x / (1.0 + (-x).exp());
    // Tokens, experts, experts of a token, K, and half of N: rows fewer and more than a tile has, parts of K and all of it.
    let sizes: [(usize, usize, usize, usize, usize); 5] =
        [(1, 40, 8, 2048, 192), (5, 9, 2, 96, 64), (40, 16, 4, 512, 128), (20, 3, 2, 1024, 64), (24, 20, 6, 6144, 64)];
    let decodes = [("nvfp4.modelopt@1", 16), ("fp8.channel.bf16@1", 0), ("q4_k.ggml@1", 32), ("q6_k.ggml@1", 16)];
    for (i, (tokens, count, top_k, k, half)) in sizes.into_iter().enumerate() {
        for (decode, group) in decodes.into_iter().filter(|(d, _)| k % 256 == 0 || !d.contains("_k.")) {
            let spec = vt_bundle::encoding::find(decode).unwrap();
            let experts: Vec<RandomMatrix> =
                (0..count).map(|_| RandomMatrix::new(spec, k, &[half as u64; 2], group, [0, 0], random)).collect();
            let weights: Vec<Weight<'_>> = experts.iter().map(RandomMatrix::weight).collect();
            let (record, stride) = DeviceMatrix::upload_experts(&device.context, &weights).unwrap();
            let (offsets, pairs) = routed(random, tokens, count, top_k);
            let (x, x_bytes) = activations(random, tokens, k, k);
            let m = tokens * top_k;
            let words = |words: &[u32]| device.bytes(&words.iter().flat_map(|o| o.to_le_bytes()).collect::<Vec<_>>());
            let (x_memory, offset_memory, pair_memory) = (device.bytes(&x_bytes), words(&offsets), words(&pairs));
            let workspace = workspace(&device, &record, m);
            let out_stride = half + 8;
            for (settled, deterministic) in [(true, false), (false, true)] {
                let out = device.bytes(&vec![POISON; (m + 1) * out_stride * 2]);
                let request = GemmRequest {
                    x: x_memory.address(),
                    x_stride: k as u32,
                    m: m as u32,
                    out: out.address(),
                    out_type: OutType::Bf16,
                    out_stride: out_stride as u32,
                    bias: None,
                    accumulate: false,
                    deterministic,
                };
                let (count, most) = (count as u32, tokens as u32);
                let groups = ExpertGroups { count, stride, offsets: offset_memory.address(), most, settled };
                let pairs_at = Some((pair_memory.address(), top_k as u32));
                let fusion = ExpertFusion { pairs: pairs_at, gate: Some(Gate::Silu) };
                // Again and again: a launch leaves the workspace as it found it.
                let launch = || {
                    let stream = &device.stream;
                    let launched =
                        device.gemm.launch_fused(stream, &record, &request, &groups, &fusion, workspace.address());
                    launched.unwrap()
                };
                if (0..3).filter(|_| launch()).count() == 0 {
                    // With more rows an expert Hopper has faster kernels, which do not gate.
                    let hopper = device.context.attributes().capability == 90;
                    assert!(hopper && !deterministic && m > 8 * experts.len(), "{decode}, sizes {i}");
                    continue;
                }
                device.stream.synchronize().unwrap();
                let mut bytes = vec![0; (m + 1) * out_stride * 2];
                out.read(0, &mut bytes).unwrap();
                for (e, expert) in experts.iter().enumerate() {
                    let rows = offsets[e] as usize..offsets[e + 1] as usize;
                    let own: Vec<f32> =
                        (rows.clone()).flat_map(|row| x[pairs[row] as usize / top_k * k..][..k].to_vec()).collect();
                    let decoded = reference::decode(&expert.weight());
                    let n = 2 * half;
                    let expected = reference::matmul(&own, &decoded, k);
                    let absolute = |v: &[f32]| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
                    let magnitude = reference::matmul(&absolute(&own), &absolute(&decoded), k);
                    for (j, row) in rows.enumerate() {
                        for column in 0..out_stride {
                            let at = 2 * (row * out_stride + column);
                            let raw = &bytes[at..at + 2];
                            if column >= half {
                                assert_eq!(raw, [POISON; 2], "{decode}, sizes {i}: beside row {row}");
                                continue;
                            }
                            let got = f64::from(bf16::from_le_bytes([raw[0], raw[1]]).to_f32());
                            let (g, u) = (expected[j * n + column], expected[j * n + half + column]);
                            let (dg, du) = (magnitude[j * n + column], magnitude[j * n + half + column]);
                            let exact = silu(g) * u;
                            let error = 4e-6 * (1.1 * dg * u.abs() + du * silu(g).abs()) + exact.abs() / 256.0 + 1e-30;
                            let place = format!("{decode}, sizes {i}, {settled}: {row}, {column}");
                            assert!((got - exact).abs() <= error, "{place}: {got}, not {exact}");
                        }
                    }
                }
                assert!(bytes[m * out_stride * 2..].iter().all(|b| *b == POISON), "behind the rows");
            }
        }
    }
}

#[test]
fn requests_that_do_not_fit_are_refused() {
    let Some(device) = Products::open() else { return };
    let data = [0u8; 4 * 32];
    let weight = Weight::Rows(RowsWeight::new(FloatType::F32, 2, 16, &data).unwrap());
    let matrix = DeviceMatrix::upload(&device.context, &weight).unwrap();
    let memory = device.bytes(&[0; 1024]);
    let fits = GemmRequest {
        x: memory.address(),
        x_stride: 16,
        m: 1,
        out: memory.address() + 512,
        out_type: OutType::F32,
        out_stride: 2,
        bias: None,
        accumulate: false,
        deterministic: false,
    };
    let launch = |request: GemmRequest| device.gemm.launch(&device.stream, &matrix, &request, 0);
    launch(fits).unwrap();
    for wrong in [
        GemmRequest { x_stride: 15, ..fits },
        GemmRequest { out_stride: 1, ..fits },
        GemmRequest { out_type: OutType::Bf16, accumulate: true, ..fits },
        GemmRequest { out: fits.out + 1, ..fits },
    ] {
        assert!(matches!(launch(wrong), Err(CudaError::Unsupported { .. })));
    }
}
