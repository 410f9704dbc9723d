//! The paged cache and attention on the device against the CPU's (`VT_TEST_CUDA=1`).
//!
//! Attention on the device rounds weights and results to bf16, each by 2^-8 at most; scores and sums are f32. Its error is
//! therefore measured in units of the sum of weight times |value|, which a second run of the CPU with the values' magnitudes
//! gives, and may be 2^-7 of it, and a hundredth of that for what f32 sums and the approximate exponential lose.

#![allow(clippy::unwrap_used)]

mod common;

use common::Random;
use common::device::{Device, POISON, rounded, small};
use half::bf16;
use vt_kernels::Context;
use vt_kernels::attention::{AttentionShape, attention};
use vt_kernels::cuda::attention::{Attention, AttentionBatch, DecodeWorkspace, ProjectedHeads};
use vt_kernels::cuda::kv_cache::{CudaKvCache, CudaKvType, KvRows, KvScales, KvWriter, NO_SLOT};
use vt_kernels::cuda::norm::{HeadRows, NormKernels};
use vt_kernels::cuda::{CudaGraph, DeviceMemory};
use vt_kernels::kv_cache::{BLOCK_LEN, KvCache, KvShape, KvType, SequenceSlots};

const TOLERANCE: f32 = 1.01 / 128.0;

/// A model's attention and the sequences of a step: positions in the cache, and how many of them are of this step.
#[derive(Clone, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    dtype: CudaKvType,
    window: Option<usize>,
    soft_cap: Option<f32>,
    sequences: Vec<(usize, usize)>,
}

impl Case {
    fn shape(&self) -> AttentionShape {
        let scale = 1.3 / (self.dim as f32).sqrt();
        AttentionShape { heads: self.heads, scale, window: self.window, soft_cap: self.soft_cap }
    }

    fn tokens(&self) -> usize {
        self.sequences.iter().map(|s| s.1).sum()
    }
}

/// One E4M3 code's value; infinite ones do not exist, two codes are NaN.
fn e4m3(code: u8) -> f32 {
    let (sign, exponent, mantissa) = (code >> 7, i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * (2.0f32).powi(-9),
        _ => (1.0 + mantissa / 8.0) * (2.0f32).powi(exponent - 7),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// A cache on the device and the same on the CPU, filled with the sequences of a case in blocks of no order.
struct Caches {
    device: CudaKvCache,
    cpu: KvCache,
    /// The CPU's with the values' magnitudes.
    magnitudes: KvCache,
    tables: Vec<Vec<u32>>,
    scales: KvScales,
}

const LAYER: usize = 1;

fn fill(device: &Device, case: &Case, random: &mut Random) -> Caches {
    let Case { kv_heads, dim, dtype, .. } = *case;
    let width = kv_heads * dim;
    let needed: Vec<usize> = case.sequences.iter().map(|s| s.0.div_ceil(BLOCK_LEN)).collect();
    let blocks = needed.iter().sum::<usize>() + 3;
    let mut free: Vec<u32> = (0..blocks as u32).collect();
    let mut take = |random: &mut Random| free.swap_remove(random.below(free.len()));
    let tables: Vec<Vec<u32>> = needed.iter().map(|n| (0..*n).map(|_| take(random)).collect()).collect();
    let shape = KvShape { layers: 3, kv_heads, head_dim: dim, blocks };
    let scales = match dtype {
        CudaKvType::Bf16 => KvScales::default(),
        CudaKvType::E4m3 => KvScales { key: 0.037, value: 0.3 },
    };

    let lengths: Vec<usize> = case.sequences.iter().map(|s| s.0).collect();
    let rows: usize = lengths.iter().sum();
    // Columns beside keys and values, which must not be read.
    let (keys_at, values_at) = (8, 24 + width);
    let stride = values_at + width + 16;
    let x = rounded(random.activations(rows * stride));
    let slots: Vec<u32> = lengths
        .iter()
        .zip(&tables)
        .flat_map(|(n, table)| (0..*n).map(|p| table[p / BLOCK_LEN] * BLOCK_LEN as u32 + (p % BLOCK_LEN) as u32))
        .collect();

    let cache = CudaKvCache::new(&device.context, shape, dtype).unwrap();
    cache.memory().write(0, &vec![POISON; cache.memory().len() as usize]).unwrap();
    let writer = KvWriter::new(&device.context).unwrap();
    let (memory, mut with_gap) = (device.halves(&x), slots.clone());
    // A row that is no token: the cache stays as it is. The second launch writes it.
    with_gap[rows / 2] = NO_SLOT;
    let (first, second) = (device.words(&with_gap), device.words(&slots[rows / 2..=rows / 2]));
    let step = |from: usize, tokens, slots: u64| KvRows {
        x: memory.address() + (from * stride * 2) as u64,
        stride,
        keys_at,
        values_at,
        tokens,
        slots,
    };
    writer.write(&device.stream, &cache, LAYER, scales, &step(0, rows, first.address())).unwrap();
    let before = device.read(cache.memory());
    writer.write(&device.stream, &cache, LAYER, scales, &step(rows / 2, 1, second.address())).unwrap();
    let stored = device.read(cache.memory());

    // Every byte of the cache: what was written, and nothing else.
    let size = dtype.bytes() as usize;
    let decode = |bytes: &[u8], at: usize| match dtype {
        CudaKvType::Bf16 => bf16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32(),
        CudaKvType::E4m3 => e4m3(bytes[at]),
    };
    let mut written = vec![false; stored.len() / size];
    let mut exact = vec![0.0; x.len()];
    for (row, slot) in slots.iter().enumerate() {
        for (part, (at, scale)) in [(keys_at, scales.key), (values_at, scales.value)].into_iter().enumerate() {
            for i in 0..width {
                let (block, place) = (*slot as usize / BLOCK_LEN, *slot as usize % BLOCK_LEN);
                let head = ((LAYER * blocks + block) * 2 + part) * kv_heads + i / dim;
                let element = (head * BLOCK_LEN + place) * dim + i % dim;
                let (got, wanted) = (decode(&stored, element), x[row * stride + at + i]);
                match dtype {
                    CudaKvType::Bf16 => assert_eq!(got, wanted, "row {row}, element {i}"),
                    CudaKvType::E4m3 => {
                        let (code, wanted) = (stored[element], (wanted / scale).clamp(-448.0, 448.0));
                        // The neighbours in the order of magnitudes are no nearer; beyond the last code is NaN.
                        assert!((got - wanted).abs() <= 448.0, "row {row}, element {i}: {wanted} became {got}");
                        for other in [code.wrapping_add(1), code.wrapping_sub(1), code ^ 0x80].map(e4m3) {
                            let nearer = (other - wanted).abs() < (got - wanted).abs();
                            assert!(!nearer, "row {row}, element {i}: {wanted} became {got}, not {other}");
                        }
                    }
                }
                assert_eq!(row == rows / 2, decode(&before, element).is_nan(), "row {row} after the first write");
                written[element] = true;
                exact[row * stride + at + i] = got * scale;
            }
        }
    }
    let untouched = written.iter().zip(stored.chunks(size)).filter(|(written, _)| !**written);
    assert!(untouched.clone().count() > 0);
    untouched.for_each(|(_, bytes)| assert!(bytes.iter().all(|b| *b == POISON)));

    let cx = Context::new(2).unwrap();
    let steps: Vec<SequenceSlots<'_>> =
        lengths.iter().zip(&tables).map(|(n, t)| SequenceSlots { start_pos: 0, tokens: *n, block_table: t }).collect();
    let new = |exact: &[f32]| {
        let mut cpu = KvCache::new(shape, KvType::F32).unwrap();
        cpu.write(&cx, LAYER, &steps, exact, stride, keys_at, values_at);
        cpu
    };
    let cpu = new(&exact);
    for row in exact.chunks_exact_mut(stride) {
        row[values_at..values_at + width].iter_mut().for_each(|v| *v = v.abs());
    }
    Caches { device: cache, cpu, magnitudes: new(&exact), tables, scales }
}

/// Queries in rows of the device, with columns beside them.
struct Queries {
    x: Vec<f32>,
    stride: usize,
    at: usize,
    memory: DeviceMemory,
}

impl Queries {
    fn new(device: &Device, case: &Case, random: &mut Random) -> Self {
        let (at, stride) = (16, 16 + case.heads * case.dim + 8);
        let x = rounded(random.activations(case.tokens() * stride));
        let memory = device.halves(&x);
        Self { x, stride, at, memory }
    }
}

/// The CPU's result and the magnitude of each element, `[T, H * D]`.
fn expected(case: &Case, caches: &Caches, queries: &Queries) -> (Vec<f32>, Vec<f32>) {
    let cx = Context::new(2).unwrap();
    let steps: Vec<SequenceSlots<'_>> = case
        .sequences
        .iter()
        .zip(&caches.tables)
        .map(|((length, tokens), t)| SequenceSlots { start_pos: length - tokens, tokens: *tokens, block_table: t })
        .collect();
    let run = |cache| {
        let mut out = vec![f32::NAN; case.tokens() * case.heads * case.dim];
        attention(&cx, &case.shape(), cache, LAYER, &steps, &queries.x, queries.stride, queries.at, &mut out);
        out
    };
    (run(&caches.cpu), run(&caches.magnitudes))
}

/// Runs a launch over the sequences of `range` and gives the rows of `out` as bits, `[T, out_stride]`.
struct Launch<'a> {
    device: &'a Device,
    case: &'a Case,
    caches: &'a Caches,
    queries: &'a Queries,
}

const BESIDE: usize = 8;

impl Launch<'_> {
    fn out(&self) -> DeviceMemory {
        self.device.poisoned(self.case.tokens() * self.out_stride() * 2)
    }

    fn out_stride(&self) -> usize {
        self.case.heads * self.case.dim + BESIDE
    }

    fn batch(&self, arrays: &Arrays, out: &DeviceMemory) -> AttentionBatch {
        AttentionBatch {
            x: self.queries.memory.address(),
            stride: self.queries.stride,
            queries_at: self.queries.at,
            out: out.address(),
            out_stride: self.out_stride(),
            sequences: arrays.sequences,
            starts: arrays.starts.address(),
            lengths: arrays.lengths.address(),
            block_tables: arrays.tables.address(),
            table_stride: arrays.stride,
        }
    }

    /// `steps`: of each sequence of the launch, its index, its first row, its length.
    fn arrays(&self, steps: &[(usize, u32, u32)]) -> Arrays {
        let stride = self.caches.tables.iter().map(Vec::len).max().unwrap() + 1;
        let mut tables = vec![u32::MAX; steps.len() * stride];
        for (row, step) in tables.chunks_exact_mut(stride).zip(steps) {
            let table = &self.caches.tables[step.0];
            row[..table.len()].copy_from_slice(table);
        }
        Arrays {
            sequences: steps.len(),
            starts: self.device.words(&steps.iter().map(|s| s.1).collect::<Vec<_>>()),
            lengths: self.device.words(&steps.iter().map(|s| s.2).collect::<Vec<_>>()),
            tables: self.device.words(&tables),
            stride,
        }
    }

    /// Compares every element, and what lies beside the rows.
    fn check(&self, out: &DeviceMemory, (wanted, magnitude): &(Vec<f32>, Vec<f32>)) {
        let bytes = self.device.read(out);
        let width = self.case.heads * self.case.dim;
        for (t, row) in bytes.chunks_exact(self.out_stride() * 2).enumerate() {
            let (row, beside) = row.split_at(width * 2);
            assert!(beside.iter().all(|b| *b == POISON), "beside row {t}");
            for (i, pair) in row.as_chunks::<2>().0.iter().enumerate() {
                let (got, at) = (bf16::from_le_bytes(*pair).to_f32(), t * width + i);
                let (error, bound) = ((got - wanted[at]).abs(), TOLERANCE * magnitude[at]);
                assert!(error <= bound, "row {t}, element {i}: {got} for {}; {error} > {bound}", wanted[at]);
            }
        }
    }
}

struct Arrays {
    sequences: usize,
    starts: DeviceMemory,
    lengths: DeviceMemory,
    tables: DeviceMemory,
    stride: usize,
}

/// Head counts, head sizes, windows and caps of real and of small models.
fn models() -> Vec<Case> {
    let model = |heads, kv_heads, dim, dtype, window, soft_cap| Case {
        heads,
        kv_heads,
        dim,
        dtype,
        window,
        soft_cap,
        sequences: Vec::new(),
    };
    use CudaKvType::{Bf16, E4m3};
    let mut models = vec![
        model(8, 2, 128, Bf16, None, None),
        model(8, 2, 128, E4m3, None, None),
        model(9, 3, 64, Bf16, None, None),
        model(4, 1, 256, Bf16, Some(512), None),
        model(4, 1, 256, E4m3, Some(100), Some(30.0)),
        model(2, 2, 16, Bf16, None, Some(50.0)),
        model(3, 1, 24, E4m3, None, None),
        model(4, 2, 32, Bf16, Some(1), None),
        model(7, 1, 80, Bf16, Some(17), None),
        model(10, 2, 96, E4m3, None, None),
        model(16, 1, 128, Bf16, None, None),
        model(24, 2, 256, E4m3, None, None),
        model(22, 2, 64, Bf16, Some(300), Some(20.0)),
        model(13, 1, 8, E4m3, None, None),
        model(32, 1, 128, Bf16, None, None),
        model(34, 2, 64, Bf16, Some(200), Some(30.0)),
        model(64, 1, 256, E4m3, None, None),
    ];
    if small() {
        // Those with kernels of their own on some device, and one with everything.
        models.truncate(5);
    }
    models
}

/// Those of this device, and those of every device.
fn kernels(device: &Device, case: &Case, caches: &Caches) -> [Attention; 2] {
    let make = [Attention::new, Attention::portable];
    make.map(|make| make(&device.context, case.heads, &caches.device).unwrap())
}

/// Memory as launches want it at first.
fn room_of(device: &Device, workspace: &DecodeWorkspace) -> DeviceMemory {
    device.bytes(&vec![0; workspace.bytes() as usize])
}

#[test]
fn decode_is_the_cpu_s_attention_whatever_the_batch() {
    let Some(device) = Device::open() else { return };
    let mut random = Random(11);
    for mut case in models() {
        let long = [1, 2, 15, 16, 17, 127, 128, 129, 1000, 4096, 4097, 5000];
        let (count, lengths) = if small() { (1, &long[2..8]) } else { (9, &long[..]) };
        case.sequences = (0..count).map(|_| (lengths[random.below(lengths.len())], 1)).collect();
        case.sequences.push((if small() { 300 } else { 4000 + random.below(5000) }, 1));
        let caches = fill(&device, &case, &mut random);
        let queries = Queries::new(&device, &case, &mut random);
        let launch = Launch { device: &device, case: &case, caches: &caches, queries: &queries };
        let workspace = DecodeWorkspace::new(64, 9000, case.heads, caches.device.shape()).unwrap();
        let room = room_of(&device, &workspace);
        let wanted = expected(&case, &caches, &queries);
        for attention in kernels(&device, &case, &caches) {
            let run = |steps: &[(usize, u32, u32)]| {
                let (out, arrays) = (launch.out(), launch.arrays(steps));
                let batch = launch.batch(&arrays, &out);
                let (shape, scales) = (case.shape(), caches.scales);
                attention
                    .decode(
                        &device.stream,
                        &shape,
                        &caches.device,
                        LAYER,
                        scales,
                        &batch,
                        None,
                        &workspace,
                        room.address(),
                    )
                    .unwrap();
                // The arrays are read until here.
                device.stream.synchronize().unwrap();
                out
            };
            let mut steps: Vec<(usize, u32, u32)> =
                case.sequences.iter().enumerate().map(|(i, s)| (i, i as u32, s.0 as u32)).collect();
            let together = run(&steps);
            launch.check(&together, &wanted);

            // Alone, and in another place of a batch with places that nobody takes: the same bits.
            let together = device.read(&together);
            let row_bytes = launch.out_stride() * 2;
            for step in &steps {
                let alone = device.read(&run(std::slice::from_ref(step)));
                let row = step.1 as usize * row_bytes..(step.1 as usize + 1) * row_bytes;
                assert_eq!(alone[row.clone()], together[row.clone()], "{case:?}, {step:?}");
                assert!(alone[..row.start].iter().chain(&alone[row.end..]).all(|b| *b == POISON));
            }
            steps.reverse();
            steps.insert(0, (0, 0, 0));
            steps.push((1, 1, 0));
            assert_eq!(device.read(&run(&steps)), together, "{case:?}");
        }
    }
}

/// Thread blocks that come from one chunk to the next, of all lengths, with copies far ahead.
#[test]
fn decode_of_many_chunks_is_the_cpu_s_attention_every_time() {
    let Some(device) = Device::open() else { return };
    let mut random = Random(23);
    for mut case in models().into_iter().take(3) {
        let (count, times) = if small() { (10, 2) } else { (300, 200) };
        case.sequences = (0..count).map(|_| (1 + random.below(400), 1)).collect();
        let caches = fill(&device, &case, &mut random);
        let queries = Queries::new(&device, &case, &mut random);
        let launch = Launch { device: &device, case: &case, caches: &caches, queries: &queries };
        let workspace = DecodeWorkspace::new(300, 400, case.heads, caches.device.shape()).unwrap();
        let room = room_of(&device, &workspace);
        let steps: Vec<(usize, u32, u32)> =
            case.sequences.iter().enumerate().map(|(i, s)| (i, i as u32, s.0 as u32)).collect();
        let arrays = launch.arrays(&steps);
        let [attention, _] = kernels(&device, &case, &caches);
        let run = || {
            let out = launch.out();
            let batch = launch.batch(&arrays, &out);
            let (shape, scales) = (case.shape(), caches.scales);
            attention
                .decode(&device.stream, &shape, &caches.device, LAYER, scales, &batch, None, &workspace, room.address())
                .unwrap();
            device.stream.synchronize().unwrap();
            out
        };
        let first = run();
        launch.check(&first, &expected(&case, &caches, &queries));
        let first = device.read(&first);
        for _ in 0..times {
            assert!(device.read(&run()) == first, "{case:?}");
        }
    }
}

#[test]
fn a_captured_decode_follows_the_lengths_in_memory() {
    let Some(device) = Device::open() else { return };
    let mut random = Random(12);
    let mut case = models().swap_remove(0);
    case.sequences = vec![(40, 1), (3000, 1), (700, 1)];
    let caches = fill(&device, &case, &mut random);
    let queries = Queries::new(&device, &case, &mut random);
    let attention = Attention::new(&device.context, case.heads, &caches.device).unwrap();
    let launch = Launch { device: &device, case: &case, caches: &caches, queries: &queries };
    let workspace = DecodeWorkspace::new(3, 4000, case.heads, caches.device.shape()).unwrap();
    let room = room_of(&device, &workspace);
    let (out, arrays) = (launch.out(), launch.arrays(&[(0, 0, 1), (1, 1, 1), (2, 2, 1)]));
    let batch = launch.batch(&arrays, &out);
    let shape = case.shape();
    let graph = CudaGraph::record(&device.stream, || {
        attention.decode(
            &device.stream,
            &shape,
            &caches.device,
            LAYER,
            caches.scales,
            &batch,
            None,
            &workspace,
            room.address(),
        )
    })
    .unwrap();
    for lengths in [[40u32, 3000, 700], [1, 17, 600], [33, 2999, 0]] {
        arrays.lengths.write(0, &lengths.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>()).unwrap();
        graph.replay(&device.stream).unwrap();
        device.stream.synchronize().unwrap();
        let mut now = case.clone();
        for (sequence, length) in now.sequences.iter_mut().zip(lengths) {
            sequence.0 = (length as usize).max(1);
        }
        let mut wanted = expected(&now, &caches, &queries);
        if lengths[2] == 0 {
            // Its row still holds the step before.
            now.sequences[2].0 = 600;
            wanted = expected(&now, &caches, &queries);
        }
        launch.check(&out, &wanted);
    }
}

/// Heads given as they were projected, against the kernel that norms, rotates and stores them one launch before: the same but
/// for the order in which squares are added up, which is a step of bf16 now and then.
#[test]
fn decode_prepares_heads_itself() {
    let Some(device) = Device::open() else { return };
    let mut random = Random(15);
    let norm = NormKernels::new(&device.context).unwrap();
    let windowed = Case { dim: 64, window: Some(300), soft_cap: Some(20.0), ..models().swap_remove(0) };
    for (index, mut case) in models().into_iter().take(3).chain([windowed]).enumerate() {
        case.sequences = [1, 16, 17, 128, 129, 700, 4097, 33].map(|length| (length, 1)).to_vec();
        let caches = fill(&device, &case, &mut random);
        let before = device.read(caches.device.memory());
        let Case { heads, kv_heads, dim, dtype, .. } = case;
        let (rows, half, at) = (case.sequences.len(), dim / 2, 16);
        let (keys_at, values_at) = (at + heads * dim, at + (heads + kv_heads) * dim + 8);
        let stride = values_at + kv_heads * dim + 8;
        let x = rounded(random.activations(rows * stride));
        let weights = device.floats(&random.activations(2 * dim).iter().map(|w| 1.0 + w / 4.0).collect::<Vec<_>>());
        let angles: Vec<f32> = (0..rows * half).flat_map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
        let angles = device.floats(&angles);
        let norms = (index != 1).then(|| (weights.address(), weights.address() + 4 * dim as u64));
        let attention = Attention::new(&device.context, heads, &caches.device).unwrap();
        if !attention.takes_projected(&caches.device, half) {
            eprintln!("SKIPPED: no kernel of this device prepares heads of {dim} elements");
            continue;
        }
        assert!(!attention.takes_projected(&caches.device, half / 2));
        let steps: Vec<(usize, u32, u32)> =
            case.sequences.iter().enumerate().map(|(i, s)| (i, i as u32, s.0 as u32)).collect();
        let slots: Vec<u32> = case
            .sequences
            .iter()
            .zip(&caches.tables)
            .map(|(s, table)| table[(s.0 - 1) / BLOCK_LEN] * BLOCK_LEN as u32 + ((s.0 - 1) % BLOCK_LEN) as u32)
            .collect();
        let slots = device.words(&slots);
        let workspace = DecodeWorkspace::new(64, 9000, heads, caches.device.shape()).unwrap();
        let room = room_of(&device, &workspace);
        let queries = Queries { x: Vec::new(), stride, at, memory: device.poisoned(8) };
        let launch = Launch { device: &device, case: &case, caches: &caches, queries: &queries };

        // The cache as it was, rows as they were, and one launch or two over some of the sequences.
        let run = |steps: &[(usize, u32, u32)], itself: bool| {
            let memory = device.halves(&x);
            caches.device.memory().write(0, &before).unwrap();
            let (out, arrays) = (launch.out(), launch.arrays(steps));
            let batch = AttentionBatch { x: memory.address(), ..launch.batch(&arrays, &out) };
            let projected = ProjectedHeads { keys_at, values_at, norms, eps: 1e-5, angles: angles.address() };
            let given = HeadRows {
                x: memory.address(),
                stride,
                queries: (at, heads),
                keys_at,
                values_at,
                norms,
                eps: 1e-5,
                angles: angles.address(),
                half,
                slots: slots.address(),
            };
            if !itself {
                norm.heads_to_cache(&device.stream, &given, &caches.device, LAYER, caches.scales, rows).unwrap();
            }
            let (shape, scales) = (case.shape(), caches.scales);
            let projected = itself.then_some(&projected);
            let (stream, room) = (&device.stream, room.address());
            attention
                .decode(stream, &shape, &caches.device, LAYER, scales, &batch, projected, &workspace, room)
                .unwrap();
            device.stream.synchronize().unwrap();
            (device.read_halves(&out), device.read(caches.device.memory()))
        };
        let (wanted, wanted_cache) = run(&steps, false);
        let (found, cache) = run(&steps, true);
        let width = heads * dim;
        for (t, (found, wanted)) in
            found.chunks(launch.out_stride()).zip(wanted.chunks(launch.out_stride())).enumerate()
        {
            let most = wanted[..width].iter().fold(0.0f32, |most, v| most.max(v.abs()));
            for (i, (found, wanted)) in found[..width].iter().zip(&wanted[..width]).enumerate() {
                assert!((found - wanted).abs() <= 0.02 * most, "{case:?}, row {t}, element {i}: {found} for {wanted}");
            }
            assert!(found[width..].iter().all(|v| v.is_nan()), "beside row {t}");
        }
        // Codes of neighbouring values are neighbours, but for the two zeros.
        let code = |bytes: &[u8], i: usize| match dtype {
            CudaKvType::Bf16 => i32::from(i16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])),
            CudaKvType::E4m3 => i32::from(bytes[i] as i8),
        };
        let elements = cache.len() / dtype.bytes() as usize;
        let mut changed = 0;
        for i in 0..elements {
            let (found, wanted) = (code(&cache, i), code(&wanted_cache, i));
            assert!((found - wanted).abs() <= 1, "{case:?}, element {i} of the cache: {found:x} for {wanted:x}");
            changed += usize::from(found != code(&before, i));
        }
        assert!(changed > rows * kv_heads * dim, "keys and values of every row");
        // Alone: the same bits.
        for step in &steps {
            let (alone, _) = run(std::slice::from_ref(step), true);
            let row = step.1 as usize * launch.out_stride();
            let bits = |values: &[f32]| values[row..row + width].iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&alone), bits(&found), "{case:?}, {step:?}");
        }
    }
}

#[test]
fn prefill_is_the_cpu_s_attention_wherever_prompts_are_cut() {
    let Some(device) = Device::open() else { return };
    let mut random = Random(13);
    for mut case in models() {
        case.sequences = if small() {
            vec![(1, 1), (70, 70), (200, 20)]
        } else {
            vec![(1, 1), (700, 700), (130, 1), (1500, 40), (64, 64), (333, 129), (65, 2)]
        };
        let caches = fill(&device, &case, &mut random);
        let queries = Queries::new(&device, &case, &mut random);
        let launch = Launch { device: &device, case: &case, caches: &caches, queries: &queries };
        let (shape, scales) = (case.shape(), caches.scales);
        // Rows of each sequence, and the end of the last one.
        let mut starts = vec![0u32];
        for sequence in &case.sequences {
            starts.push(starts[starts.len() - 1] + sequence.1 as u32);
        }
        let wanted = expected(&case, &caches, &queries);
        for attention in kernels(&device, &case, &caches) {
            let run = |out: &DeviceMemory, steps: &[(usize, u32, u32)], tokens: usize| {
                let arrays = launch.arrays(steps);
                // `starts` has one more entry: the end.
                let mut firsts: Vec<u32> = steps.iter().map(|s| s.1).collect();
                firsts.push(firsts[0] + tokens as u32);
                let arrays = Arrays { starts: device.words(&firsts), ..arrays };
                let batch = launch.batch(&arrays, out);
                attention.prefill(&device.stream, &shape, &caches.device, LAYER, scales, &batch, tokens).unwrap();
                device.stream.synchronize().unwrap();
            };
            let steps: Vec<(usize, u32, u32)> =
                case.sequences.iter().enumerate().map(|(i, s)| (i, starts[i], s.0 as u32)).collect();
            let together = launch.out();
            run(&together, &steps, case.tokens());
            launch.check(&together, &wanted);

            // Every sequence alone and cut into two or three: the same bits.
            let cut = launch.out();
            for (index, first, length) in steps {
                let tokens = case.sequences[index].1;
                let mut cuts = [0, random.below(tokens + 1), random.below(tokens + 1), tokens];
                cuts.sort_unstable();
                for pair in cuts.windows(2).filter(|pair| pair[0] < pair[1]) {
                    let end = length - (tokens - pair[1]) as u32;
                    run(&cut, &[(index, first + pair[0] as u32, end)], pair[1] - pair[0]);
                }
            }
            assert_eq!(device.read(&cut), device.read(&together), "{case:?}");
        }
    }
}

#[test]
fn blocks_are_copied_in_every_layer() {
    let Some(device) = Device::open() else { return };
    let mut random = Random(14);
    for dtype in [CudaKvType::Bf16, CudaKvType::E4m3] {
        let shape = KvShape { layers: 3, kv_heads: 3, head_dim: 72, blocks: 5 };
        let cache = CudaKvCache::new(&device.context, shape, dtype).unwrap();
        assert_eq!(Some(cache.memory().len()), CudaKvCache::bytes(&shape, dtype));
        let mut bytes: Vec<u8> = (0..cache.memory().len()).map(|_| random.next() as u8).collect();
        cache.memory().write(0, &bytes).unwrap();
        KvWriter::new(&device.context).unwrap().copy_block(&device.stream, &cache, 4, 1).unwrap();
        let (layer, block) = (bytes.len() / 3, bytes.len() / 15);
        for first in [0, layer, 2 * layer] {
            bytes.copy_within(first + 4 * block..first + 5 * block, first + block);
        }
        assert_eq!(device.read(cache.memory()), bytes);
    }
}
