//! Products with many rows on the device, in rows that are aligned as the engine's are, against f64 sums over weights that the
//! encoding's own formula decoded. Run with `VT_TEST_CUDA=1` on a machine with a GPU; without it nothing is tested.

#![allow(clippy::unwrap_used)]

mod common;

use common::device::{POISON, Products, small};
use common::{Random, RandomMatrix, encodings};
use half::bf16;
use vt_bundle::encoding;
use vt_kernels::cuda::gemm::{DeviceMatrix, GemmRequest, OutType};
use vt_kernels::{Weight, reference};

/// Columns beside each row of the result that no kernel may touch.
const MARGIN: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Form {
    out_type: OutType,
    bias: bool,
    accumulate: bool,
}

const FORMS: [Form; 3] = [
    Form { out_type: OutType::F32, bias: false, accumulate: false },
    Form { out_type: OutType::Bf16, bias: true, accumulate: false },
    Form { out_type: OutType::F32, bias: true, accumulate: true },
];

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Which columns of the result are rows of a part; the others are padding.
fn logical(matrix: &RandomMatrix) -> Vec<bool> {
    let mut logical = vec![false; matrix.matrix.padded_n() as usize];
    for part in &matrix.matrix.parts {
        logical[part.start as usize..(part.start + part.rows) as usize].fill(true);
    }
    logical
}

/// Checks every element of a product, twice, as the second launch finds the workspace as the first one left it.
fn check(
    device: &Products,
    what: &str,
    weight: &Weight<'_>,
    logical: &[bool],
    m: usize,
    form: Form,
    random: &mut Random,
) {
    let (k, n) = (weight.k(), weight.out_stride());
    let what = format!("{what}, M {m}, K {k}, N {n}, {form:?}");
    let x: Vec<f32> = random.activations(m * k).into_iter().map(|v| bf16::from_f32(v).to_f32()).collect();
    let x_stride = k + 8;
    let mut x_bytes = vec![POISON; m * x_stride * 2];
    for (to, row) in x_bytes.chunks_exact_mut(2 * x_stride).zip(x.chunks(k)) {
        let row = row.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes());
        to.iter_mut().zip(row).for_each(|(to, byte)| *to = byte);
    }
    let bias: Vec<f32> = (0..n).map(|_| random.unit()).collect();
    let before: Vec<f32> = (0..n).map(|_| random.unit()).collect();
    let size = if form.out_type == OutType::F32 { 4 } else { 2 };
    let out_stride = n + MARGIN;
    let mut start = vec![POISON; (m + 1) * out_stride * size];
    if form.accumulate {
        for row in start.chunks_exact_mut(out_stride * size).take(m) {
            row[..4 * n].copy_from_slice(&bytes(&before));
        }
    }
    let matrix = DeviceMatrix::upload(&device.context, weight).unwrap();
    let (x_memory, bias_memory, out_memory) =
        (device.bytes(&x_bytes), device.bytes(&bytes(&bias)), device.bytes(&start));
    let workspace = device.bytes(&vec![0; device.gemm.workspace_bytes(&matrix, m as u32) as usize]);
    let request = GemmRequest {
        x: x_memory.address(),
        x_stride: x_stride as u32,
        m: m as u32,
        out: out_memory.address(),
        out_type: form.out_type,
        out_stride: out_stride as u32,
        bias: form.bias.then(|| bias_memory.address()),
        accumulate: form.accumulate,
        deterministic: false,
    };
    let launch = || {
        let mut out = vec![0; start.len()];
        out_memory.write(0, &start).unwrap();
        device.gemm.launch(&device.stream, &matrix, &request, workspace.address()).unwrap();
        device.stream.synchronize().unwrap();
        out_memory.read(0, &mut out).unwrap();
        out
    };
    let out = launch();
    assert!(out == launch(), "{what}: another result the second time");

    let decoded = reference::decode(weight);
    let expected = reference::matmul(&x, &decoded, k);
    let absolute = |v: &[f32]| v.iter().map(|v| v.abs()).collect::<Vec<_>>();
    let magnitude = reference::matmul(&absolute(&x), &absolute(&decoded), k);
    // Codes times scales of 16 bits are rounded to bf16, and so may be the scales: half a unit in the last place each.
    let exact = ["nvfp4", "mxfp4", "mxfp8", "fp8"].iter().any(|family| what.starts_with(family));
    let of_weights = if exact { 3e-6 } else { 2f64.powi(-8) };
    let (mut squares, mut errors) = (0.0, 0.0);
    for row in 0..=m {
        for column in 0..out_stride {
            let at = size * (row * out_stride + column);
            let element = &out[at..at + size];
            if row == m || column >= n {
                assert!(element.iter().all(|b| *b == POISON), "{what}: written beside the result at {row}, {column}");
                continue;
            }
            let got = if size == 4 {
                f32::from_le_bytes(element.try_into().unwrap())
            } else {
                bf16::from_le_bytes(element.try_into().unwrap()).to_f32()
            };
            if !logical[column] {
                assert!(element.iter().any(|b| *b != POISON), "{what}: {row}, {column} was not written");
                continue;
            }
            let i = row * n + column;
            let added = f64::from(bias[column]) * f64::from(u8::from(form.bias))
                + f64::from(before[column]) * f64::from(u8::from(form.accumulate));
            let wanted = expected[i] + added;
            let rounding = if size == 2 { wanted.abs() / 256.0 } else { 0.0 };
            let error = (f64::from(got) - wanted).abs();
            let allowed = of_weights * magnitude[i] + rounding + 3e-6;
            assert!(error <= allowed, "{what}: {row}, {column} is {got}, expected {wanted} (allowed {allowed:e})");
            squares += wanted * wanted;
            errors += error * error;
        }
    }
    let relative = (errors / squares.max(1e-30)).sqrt();
    let most = if exact && size == 4 { 1e-5 } else { 5e-3 };
    assert!(relative <= most, "{what}: relative error {relative:e}");
}

#[test]
fn encodings_shapes_and_forms() {
    let Some(device) = Products::open() else { return };
    let random = &mut Random(31);
    let cases = [
        ("nvfp4.modelopt@1", 16),
        ("nvfp4.compressed-tensors@1", 16),
        ("mxfp4@1", 32),
        ("mxfp4.ggml@1", 32),
        ("fp8.tensor.f32@1", 0),
        ("fp8.channel.bf16@1", 0),
        ("fp8.channel.f16@1", 0),
        ("int4.symmetric.bf16@1", 32),
        ("int4.symmetric.f16@1", 128),
        ("int8.symmetric.bf16@1", 128),
        ("int8.symmetric.f16@1", 32),
        ("q4_0.ggml@1", 32),
        ("q8_0.ggml@1", 32),
    ];
    for (c, (decode, group)) in cases.into_iter().enumerate() {
        let spec = encoding::find(decode).unwrap();
        // Rows from fewer than the smallest tile of tokens has to several tiles; N from less than one tile of a block on.
        let rows: &[usize] = if small() { &[9, 33, 130] } else { &[9, 16, 17, 33, 64, 100, 200, 520] };
        for (i, m) in rows.iter().copied().enumerate() {
            let parts: &[u64] = match (c + i) % 3 {
                0 => &[100, 64, 7],
                1 if small() => &[150],
                1 => &[1500],
                _ => &[330, 513],
            };
            let k = [256, 640, 1024][if small() { 0 } else { (c + i) % 3 }];
            let matrix = RandomMatrix::new(spec, k, parts, group, [0, 0], random);
            check(&device, decode, &matrix.weight(), &logical(&matrix), m, FORMS[(c + i) % FORMS.len()], random);
        }
    }
}

/// Every encoding with rows as the engine lays them, whichever kernel takes it; of blocks of several sizes.
#[test]
fn encodings_that_other_kernels_take() {
    let Some(device) = Products::open() else { return };
    let random = &mut Random(32);
    for (c, case) in encodings().into_iter().enumerate() {
        let rows: &[usize] = if small() { &[17] } else { &[9, 16, 17, 33, 130] };
        for (i, m) in rows.iter().copied().enumerate() {
            let parts: &[u64] = if (c + i).is_multiple_of(2) { &[100, 64, 7] } else { &[330] };
            let k = [256usize, 512][(c + i) % 2].next_multiple_of(case.k_unit());
            let matrix = case.matrix(k, parts, random);
            let what = format!("{} group {} block {:?}", case.spec.decode, case.group, case.block);
            check(&device, &what, &matrix.weight(), &logical(&matrix), m, FORMS[(c + i) % FORMS.len()], random);
        }
    }
}

/// Matrices that come out even on the multiprocessors of an H200, which have kernels of their own: a tile each, a slice of one
/// along K, or a tile and a piece of a column that is left over.
fn few_rows_that_come_out_even(cases: &[(&str, usize)], seed: u64) {
    let Some(device) = Products::open() else { return };
    let random = &mut Random(seed);
    // K and parts: tiles of 192 rows, slices of tiles of 128 and of 192 whose last ends within a step, pieces of columns.
    let shapes: [(usize, &[u64]); 7] = [
        (960, &[24_576]),
        (4032, &[4000]),
        (512, &[34_700]),
        (3904, &[3000, 2988]),
        (256, &[11_500, 12_033]),
        (256, &[17_000, 17_792]),
        (1536, &[8192]),
    ];
    for (c, (decode, group)) in cases.iter().copied().enumerate() {
        let spec = encoding::find(decode).unwrap();
        for (i, ((k, parts), m)) in shapes.into_iter().zip([1, 16, 8, 9, 2, 13, 4]).enumerate() {
            if small() && k != 1536 && (k, parts.len()) != (256, 2) {
                continue;
            }
            let m = if (c + i) % 3 == 0 { 16 } else { m };
            let matrix = RandomMatrix::new(spec, k, parts, group, [0, 0], random);
            check(&device, decode, &matrix.weight(), &logical(&matrix), m, FORMS[(c + i) % FORMS.len()], random);
        }
    }
}

#[test]
fn few_rows_of_floats_that_come_out_even() {
    let cases = [("nvfp4.modelopt@1", 16), ("fp8.channel.f32@1", 0), ("mxfp4@1", 32), ("mxfp4.ggml@1", 32)];
    few_rows_that_come_out_even(&cases, 37);
}

#[test]
fn few_rows_of_integers_that_come_out_even() {
    let cases = [
        ("int4.symmetric.bf16@1", 32),
        ("int8.symmetric.bf16@1", 64),
        ("int4.symmetric.f16@1", 64),
        ("int8.symmetric.f16@1", 32),
    ];
    few_rows_that_come_out_even(&cases, 38);
}
