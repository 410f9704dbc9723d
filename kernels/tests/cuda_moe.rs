//! Routing of experts on the device against the CPU (`VT_TEST_CUDA=1`).

#![allow(clippy::unwrap_used)]

mod common;

use common::Random;
use common::device::{Device, POISON, rounded, small};
use half::bf16;
use vt_kernels::cuda::DeviceMemory;
use vt_kernels::cuda::elementwise::Columns;
use vt_kernels::cuda::gemm::DeviceMatrix;
use vt_kernels::cuda::moe::{ExpertRows, MoeKernels, RouterRows, Routing, RoutingTables};
use vt_kernels::cuda::moe_rows::{ExpertRowKernels, ExpertVector, RoutedRows};
use vt_kernels::softmax::softmax;
use vt_kernels::{Context, FloatType, RowsWeight, Weight};

/// The `top_k` most likely experts in order of their indices, the first of equals first.
fn choose(scores: &[f32], routing: &Routing) -> Vec<(u32, f32)> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let mut chosen: Vec<(u32, f32)> = order[..routing.top_k].iter().map(|e| (*e as u32, scores[*e])).collect();
    if routing.normalise {
        let sum: f32 = chosen.iter().map(|c| c.1).sum();
        chosen.iter_mut().for_each(|c| c.1 /= sum);
    }
    chosen.sort_unstable_by_key(|c| c.0);
    chosen
}

fn routings() -> Vec<Routing> {
    let all = [
        (1, 8, 2, true),
        (5, 4, 4, false),
        (9, 1, 1, true),
        (77, 128, 8, true),
        (300, 512, 10, false),
        (2000, 60, 4, true),
    ];
    all[..if small() { 4 } else { all.len() }]
        .iter()
        .map(|&(tokens, experts, top_k, normalise)| Routing { tokens, experts, top_k, normalise })
        .collect()
}

/// Routes on the device; gives the tables as words.
fn route(device: &Device, kernels: &MoeKernels, routing: &Routing, logits: &[f32], stride: usize, at: usize) -> Tables {
    let Routing { tokens, experts, top_k, .. } = *routing;
    let memory = device.poisoned(RoutingTables::bytes(tokens, experts, top_k).unwrap() as usize);
    let places = RoutingTables::at(memory.address(), tokens, experts, top_k).unwrap();
    let logits = device.floats(logits);
    kernels.route(&device.stream, routing, logits.address(), stride, at, &places).unwrap();
    read_tables(device, memory, places, routing)
}

/// The tables as words; nothing is written beside them.
fn read_tables(device: &Device, memory: DeviceMemory, places: RoutingTables, routing: &Routing) -> Tables {
    let Routing { tokens, experts, top_k, .. } = *routing;
    let words = device.read_words(&memory);
    let table = |address: u64, len: usize| {
        let first = ((address - memory.address()) / 4) as usize;
        let end = (first + len).next_multiple_of(64);
        assert!(words[first + len..end].iter().all(|w| w.to_le_bytes() == [POISON; 4]), "behind a table");
        words[first..first + len].to_vec()
    };
    let pairs = tokens * top_k;
    Tables {
        experts: table(places.experts, pairs),
        weights: table(places.weights, pairs).into_iter().map(f32::from_bits).collect(),
        offsets: table(places.offsets, experts + 1),
        pairs: table(places.pairs, pairs),
        rows: table(places.rows, pairs),
        places,
        _memory: memory,
    }
}

struct Tables {
    experts: Vec<u32>,
    weights: Vec<f32>,
    offsets: Vec<u32>,
    pairs: Vec<u32>,
    rows: Vec<u32>,
    places: RoutingTables,
    _memory: DeviceMemory,
}

impl Tables {
    /// The order of rows is the stable order of pairs by expert.
    fn check_order(&self, experts: usize) {
        let mut order: Vec<u32> = (0..self.experts.len() as u32).collect();
        order.sort_by_key(|pair| self.experts[*pair as usize]);
        assert_eq!(self.pairs, order);
        for (row, pair) in order.iter().enumerate() {
            assert_eq!(self.rows[*pair as usize], row as u32);
        }
        for e in 0..=experts {
            let lower = self.experts.iter().filter(|expert| (**expert as usize) < e).count();
            assert_eq!(self.offsets[e], lower as u32, "offset {e}");
        }
    }
}

#[test]
fn routing_rows_and_sums_are_the_cpu_s() {
    let Some(device) = Device::open() else { return };
    let (mut random, cx) = (Random(21), Context::new(2).unwrap());
    let kernels = MoeKernels::new(&device.context).unwrap();
    for routing in routings() {
        let Routing { tokens, experts, top_k, .. } = routing;
        let (at, stride) = (3, experts + 9);
        let mut logits: Vec<f32> = random.activations(tokens * stride).iter().map(|v| v * 4.0).collect();
        // Equals in the first row.
        logits[at..at + experts].fill(0.5);
        let tables = route(&device, &kernels, &routing, &logits, stride, at);
        for (t, row) in logits.chunks_exact(stride).enumerate() {
            let mut scores = row[at..at + experts].to_vec();
            softmax(&cx, &mut scores);
            for (j, (expert, weight)) in choose(&scores, &routing).into_iter().enumerate() {
                assert_eq!(tables.experts[t * top_k + j], expert, "{routing:?}, token {t}, choice {j}");
                let got = tables.weights[t * top_k + j];
                assert!((got - weight).abs() <= 4e-6 * weight, "{routing:?}, token {t}: {got} for {weight}");
            }
        }
        tables.check_order(experts);

        let width = 8 * (1 + random.below(200));
        let x = rounded(random.activations(tokens * (width + 8)));
        let (memory, gathered) = (device.halves(&x), device.poisoned(tokens * top_k * (width + 16) * 2));
        let rows = |address, dtype, stride| ExpertRows { address, dtype, stride };
        let from = rows(memory.address(), FloatType::Bf16, width + 8);
        let to = rows(gathered.address(), FloatType::Bf16, width + 16);
        kernels.gather(&device.stream, &routing, from, width, &tables.places, to).unwrap();
        for (row, bytes) in device.read(&gathered).chunks_exact((width + 16) * 2).enumerate() {
            let token = tables.pairs[row] as usize / top_k;
            for (i, pair) in bytes[..width * 2].as_chunks::<2>().0.iter().enumerate() {
                assert_eq!(bf16::from_le_bytes(*pair).to_f32(), x[token * (width + 8) + i]);
            }
            assert!(bytes[width * 2..].iter().all(|b| *b == POISON));
        }

        let y = rounded(random.activations(tokens * top_k * (width + 8)));
        let start = random.activations(tokens * (width + 8));
        for (dtype, y_memory) in [(FloatType::F32, device.floats(&y)), (FloatType::Bf16, device.halves(&y))] {
            for accumulate in [false, true] {
                let out = device.floats(&start);
                let from = rows(y_memory.address(), dtype, width + 8);
                let to = rows(out.address(), FloatType::F32, width + 8);
                kernels.combine(&device.stream, &routing, from, width, &tables.places, to, accumulate).unwrap();
                for (at, got) in device.read_floats(&out).into_iter().enumerate() {
                    let (t, i) = (at / (width + 8), at % (width + 8));
                    if i >= width {
                        assert_eq!(got, start[at], "beside row {t}");
                        continue;
                    }
                    let terms = (0..top_k).map(|j| {
                        let pair = t * top_k + j;
                        let v = y[tables.rows[pair] as usize * (width + 8) + i];
                        f64::from(tables.weights[pair]) * f64::from(v)
                    });
                    let old = if accumulate { f64::from(start[at]) } else { 0.0 };
                    let (sum, size) = terms.fold((old, old.abs()), |(s, a), v| (s + v, a + v.abs()));
                    assert!((f64::from(got) - sum).abs() <= 1e-6 * size + 1e-30, "row {t}, {i}: {got} for {sum}");
                }
            }
        }
    }
}

#[test]
fn rows_that_are_not_numbers_stay_in_bounds() {
    let Some(device) = Device::open() else { return };
    let kernels = MoeKernels::new(&device.context).unwrap();
    let routing = Routing { tokens: 3, experts: 40, top_k: 6, normalise: true };
    let mut logits = vec![0.0; 120];
    logits[40..80].fill(f32::NAN);
    logits[90] = f32::NAN;
    let tables = route(&device, &kernels, &routing, &logits, 40, 0);
    for experts in tables.experts.chunks_exact(6) {
        assert!(experts.iter().all(|e| *e < 40) && experts.windows(2).all(|pair| pair[0] < pair[1]), "{experts:?}");
    }
    assert!(tables.weights[..6].iter().all(|w| (w - 1.0 / 6.0).abs() < 1e-6));
    assert!(tables.weights[6..].iter().all(|w| w.is_nan()));
    tables.check_order(40);
}

/// Element `i` of a matrix of `dtype`, as bytes and as it is read back.
fn stored(dtype: FloatType, value: f32) -> (Vec<u8>, f32) {
    match dtype {
        FloatType::F32 => (value.to_le_bytes().to_vec(), value),
        FloatType::F16 => (half::f16::from_f32(value).to_le_bytes().to_vec(), half::f16::from_f32(value).to_f32()),
        FloatType::Bf16 => (bf16::from_f32(value).to_le_bytes().to_vec(), bf16::from_f32(value).to_f32()),
    }
}

#[test]
fn a_router_norms_scores_and_chooses_in_one_go() {
    let Some(device) = Device::open() else { return };
    let (mut random, cx) = (Random(22), Context::new(2).unwrap());
    let kernels = MoeKernels::new(&device.context).unwrap();
    let eps = 1e-6f32;
    for (experts, top_k, width, dtype) in [
        (128, 8, 2048, FloatType::Bf16),
        (8, 2, 96, FloatType::F32),
        (60, 4, 1000, FloatType::F16),
        (512, 10, 512, FloatType::Bf16),
        (20, 3, 5120, FloatType::Bf16),
    ] {
        // Scores of some units, as routers give them: exponentials are as exact as their arguments are small.
        let scale = 0.3 / (width as f32).sqrt();
        let elements: Vec<(Vec<u8>, f32)> =
            random.activations(experts * width).into_iter().map(|v| stored(dtype, v * scale)).collect();
        let bytes: Vec<u8> = elements.iter().flat_map(|e| e.0.clone()).collect();
        let weight = Weight::Rows(RowsWeight::new(dtype, experts, width, &bytes).unwrap());
        let matrix = DeviceMatrix::upload(&device.context, &weight).unwrap();
        assert!(MoeKernels::routes(&matrix, width) && !MoeKernels::routes(&matrix, width + 8));
        let norm = random.activations(width);
        let most = 300;
        let x = random.activations(most * width);
        let (norm_memory, x_memory) = (device.floats(&norm), device.floats(&x));
        let (stride, mut alone) = (experts + 5, Vec::new());
        // More tokens after fewer and the reverse: counters are where they were, and are zero again.
        for tokens in [1, 8, 300, 64, 65, 5, 1] {
            let routing = Routing { tokens, experts, top_k, normalise: tokens % 2 == 1 };
            let memory = device.poisoned(RoutingTables::bytes(tokens, experts, top_k).unwrap() as usize);
            let places = RoutingTables::at(memory.address(), tokens, experts, top_k).unwrap();
            memory.write(places.done - memory.address(), &[0; 256]).unwrap();
            let (normed, scores) = (device.poisoned(tokens * width * 2), device.poisoned(tokens * stride * 4));
            let rows = RouterRows {
                x: x_memory.address(),
                norm: norm_memory.address(),
                eps,
                width,
                normed: normed.address(),
                scores: scores.address(),
                stride,
            };
            for _ in 0..3 {
                kernels.router(&device.stream, &routing, &matrix, &rows, &places).unwrap();
            }
            let what = format!("{experts} experts, width {width}, {dtype:?}, {tokens} tokens");
            let (scores, normed) = (device.read_floats(&scores), device.read_halves(&normed));
            let tables = read_tables(&device, memory, places, &routing);
            for t in 0..tokens {
                let row = &x[t * width..][..width];
                let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
                let factor = 1.0 / (mean + f64::from(eps)).sqrt();
                let exact: Vec<f64> =
                    row.iter().zip(&norm).map(|(v, n)| f64::from(*v) * factor * f64::from(*n)).collect();
                for (i, value) in exact.iter().enumerate() {
                    let got = f64::from(normed[t * width + i]);
                    assert!(
                        (got - value).abs() <= value.abs() / 250.0 + 1e-30,
                        "{what}: norm {t}, {i}: {got} for {value}"
                    );
                }
                for e in 0..experts {
                    let terms = || exact.iter().zip(&elements[e * width..][..width]).map(|(v, w)| v * f64::from(w.1));
                    let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                    let got = f64::from(scores[t * stride + e]);
                    assert!((got - sum).abs() <= 2e-5 * size + 1e-30, "{what}: score {t}, {e}: {got} for {sum}");
                }
                assert!(scores[t * stride + experts..][..5].iter().all(|v| v.is_nan()), "{what}: beside row {t}");
                let mut likely = scores[t * stride..][..experts].to_vec();
                softmax(&cx, &mut likely);
                for (j, (expert, weight)) in choose(&likely, &routing).into_iter().enumerate() {
                    assert_eq!(tables.experts[t * top_k + j], expert, "{what}, token {t}, choice {j}");
                    let got = tables.weights[t * top_k + j];
                    assert!((got - weight).abs() <= 4e-6 * weight, "{what}, token {t}: {got} for {weight}");
                }
            }
            tables.check_order(experts);
            let first = scores[..experts].iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            if alone.is_empty() {
                alone.clone_from(&first);
            }
            assert_eq!(alone, first, "{what}: the first token's scores, alone and in company");
        }
    }
}

/// Vectors `[len]` of experts in device memory, of all types and some missing: the table, and the values.
struct Vectors {
    table: DeviceMemory,
    values: Vec<Option<Vec<f32>>>,
    _memories: Vec<DeviceMemory>,
}

impl Vectors {
    fn new(device: &Device, random: &mut Random, experts: usize, len: usize) -> Self {
        let (mut words, mut values, mut memories) = (Vec::new(), Vec::new(), Vec::new());
        for expert in 0..experts {
            if expert % 5 == 3 {
                words.extend(ExpertVector::entry(None));
                values.push(None);
                continue;
            }
            let dtype = [FloatType::F32, FloatType::Bf16, FloatType::F16][expert % 3];
            let elements: Vec<(Vec<u8>, f32)> =
                random.activations(len).into_iter().map(|value| stored(dtype, value)).collect();
            let memory = device.bytes(&elements.iter().flat_map(|e| e.0.clone()).collect::<Vec<_>>());
            words.extend(ExpertVector::entry(Some(ExpertVector { address: memory.address(), dtype })));
            values.push(Some(elements.iter().map(|e| e.1).collect()));
            memories.push(memory);
        }
        Self { table: device.words(&words), values, _memories: memories }
    }

    fn of(&self, expert: usize, i: usize) -> Option<f32> {
        self.values[expert].as_ref().map(|values| values[i])
    }
}

#[test]
fn inputs_and_results_of_experts_get_what_is_theirs() {
    let Some(device) = Device::open() else { return };
    let mut random = Random(23);
    let (kernels, rows) = (MoeKernels::new(&device.context).unwrap(), ExpertRowKernels::new(&device.context).unwrap());
    for routing in routings() {
        let Routing { tokens, experts, top_k, .. } = routing;
        let logits = random.activations(tokens * experts);
        let tables = route(&device, &kernels, &routing, &logits, experts, 0);
        let pairs = tokens * top_k;
        let width = 1 + random.below(700);
        let own = (experts / 3) as u32..(experts - experts / 4) as u32;
        let routed = RoutedRows { rows: pairs, tables: &tables.places, experts: own.clone() };
        let expert_of = |row: usize| tables.experts[tables.pairs[row] as usize] as usize;
        let vectors = Vectors::new(&device, &mut random, experts, width);
        let factors = Vectors::new(&device, &mut random, experts, 1);

        let x = rounded(random.activations(pairs * (width + 8)));
        for (top, table) in [(Some(top_k), true), (Some(top_k), false), (None, true)] {
            let what = format!("{routing:?}, width {width}, {top:?}, {table}");
            let (memory, out) = (device.halves(&x), device.poisoned(pairs * (width + 3) * 2));
            let [from, to] = [(&memory, width + 8), (&out, width + 3)].map(|(memory, stride)| Columns {
                address: memory.address(),
                stride,
                at: 0,
            });
            let table = table.then_some(vectors.table.address());
            rows.inputs(&device.stream, &routed, from, top, table, width, to).unwrap();
            for (row, found) in device.read_halves(&out).chunks_exact(width + 3).enumerate() {
                let expert = expert_of(row);
                if !own.contains(&(expert as u32)) {
                    assert!(found.iter().all(|v| v.is_nan()), "{what}: row {row} of expert {expert}");
                    continue;
                }
                let source = top.map_or(row, |top_k| tables.pairs[row] as usize / top_k);
                for (i, found) in found[..width].iter().enumerate() {
                    let by = table.and_then(|_| vectors.of(expert, i)).unwrap_or(1.0);
                    let expected = bf16::from_f32(x[source * (width + 8) + i] * by).to_f32();
                    assert_eq!(*found, expected, "{what}: row {row}, {i}");
                }
                assert!(found[width..].iter().all(|v| v.is_nan()), "{what}: beside row {row}");
            }
        }

        let y = random.activations(pairs * (width + 8));
        for (dtype, factored, biased) in
            [(FloatType::F32, true, true), (FloatType::Bf16, true, false), (FloatType::F32, false, true)]
        {
            let what = format!("{routing:?}, width {width}, {dtype:?}, {factored}, {biased}");
            let (memory, out) = (device.floats(&y), device.poisoned(pairs * (width + 3) * dtype.bytes()));
            let from = Columns { address: memory.address(), stride: width + 8, at: 2 };
            let to = Columns { address: out.address(), stride: width + 3, at: 1 };
            let factor = factored.then_some(factors.table.address());
            let bias = biased.then_some(vectors.table.address());
            rows.results(&device.stream, &routed, from, factor, bias, width, to, dtype).unwrap();
            let found = if dtype == FloatType::F32 { device.read_floats(&out) } else { device.read_halves(&out) };
            for (row, found) in found.chunks_exact(width + 3).enumerate() {
                let expert = expert_of(row);
                if !own.contains(&(expert as u32)) {
                    assert!(found.iter().all(|v| v.is_nan()), "{what}: row {row} of expert {expert}");
                    continue;
                }
                let by = factor.and_then(|_| factors.of(expert, 0)).unwrap_or(1.0);
                for i in 0..width {
                    let value = f64::from(y[row * (width + 8) + 2 + i]) * f64::from(by);
                    let add = bias.and_then(|_| vectors.of(expert, i)).map_or(0.0, f64::from);
                    let limit = (value.abs() + add.abs()) * if dtype == FloatType::F32 { 2e-7 } else { 4e-3 } + 1e-30;
                    let got = f64::from(found[1 + i]);
                    assert!((got - value - add).abs() <= limit, "{what}: row {row}, {i}: {got} for {}", value + add);
                }
                assert!(found[0].is_nan() && found[width + 1..].iter().all(|v| v.is_nan()), "{what}: beside row {row}");
            }
        }
    }
}
