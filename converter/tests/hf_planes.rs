//! Every storage format of safetensors checkpoints: planes decode to the values of the source's own formula, bit for bit,
//! and join to the bytes of the source. Checkpoints are written to disk and go the whole way: open, resolve, catalog, pack.

use std::fs;

use proptest::prelude::*;
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_bundle::pack::{PartFormat, PartSource, pack_tiled};
use vt_bundle::unpack::TiledView;
use vt_convert::catalog::{Catalog, Entry, SourceDecoder, Storage};
use vt_convert::safetensors::{HfDecoder, ResolveOptions, catalog, open, resolve};
use vt_convert::source::{Checkpoint, PlainDtype as D};

/// Deterministic bytes.
struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 56) as u8
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.byte()).collect()
    }

    /// E4M3 codes that are numbers, or scales: numbers that are not negative.
    fn e4m3(&mut self, len: u64, scale: bool) -> Vec<u8> {
        let one = |b: u8| if b & 0x7F == 0x7F { 0x38 } else { b };
        (0..len).map(|_| one(self.byte()) & if scale { 0x7F } else { 0xFF }).collect()
    }

    /// Positive finite floats of ordinary size.
    fn floats(&mut self, dtype: D, len: u64) -> Vec<u8> {
        let mut out = Vec::new();
        for _ in 0..len {
            let (high, low) = (self.byte(), self.byte());
            match dtype {
                D::F32 => out.extend([low, high, low ^ high, 0x3C | (high & 3)]),
                D::Bf16 => out.extend([low, 0x3C | (high & 3)]),
                _ => out.extend([low, 0x1C | (high & 7)]),
            }
        }
        out
    }
}

#[derive(Default)]
struct Tensors(Vec<(String, D, Vec<u64>, Vec<u8>)>);

impl Tensors {
    fn add(&mut self, name: &str, dtype: D, shape: &[u64], data: Vec<u8>) {
        assert_eq!(data.len() as u64, shape.iter().product::<u64>() * dtype.size(), "{name}");
        self.0.push((name.into(), dtype, shape.into(), data));
    }

    fn open(&self, quantization: serde_json::Value) -> (tempfile::TempDir, Checkpoint) {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in &self.0 {
            let begin = data.len();
            data.extend_from_slice(bytes);
            let info = serde_json::json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert(name.clone(), info);
        }
        let header = serde_json::to_vec(&header).expect("a header");
        let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        fs::write(dir.path().join("model.safetensors"), file).expect("written");
        let config = serde_json::json!({"model_type": "llama", "quantization_config": quantization});
        fs::write(dir.path().join("config.json"), config.to_string()).expect("written");
        let checkpoint = open(dir.path()).expect("a checkpoint");
        (dir, checkpoint)
    }
}

/// Storage formats, with N and K in units that suit each.
const FORMATS: [&str; 22] = [
    "nvfp4",
    "nvfp4-g32",
    "nvfp4-ct",
    "nvfp4-stacked",
    "mxfp4",
    "mxfp4-blocks",
    "mxfp8",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block",
    "fp8-e8m0",
    "fp8-stacked",
    "int4-modelopt",
    "int8",
    "int8-groups",
    "int8-zeros",
    "int8-tensor",
    "packed",
    "packed-zeros",
    "gptq",
    "gptq-v2",
    "awq",
];

/// A checkpoint with one weight in that format; N and K come from the units.
fn tensors(format: &str, units_n: u64, units_k: u64, floats: D, bits: u64, r: &mut Random) -> Tensors {
    let mut t = Tensors::default();
    let per_word = 32 / bits;
    let (n, k, group) = (units_n * 8, units_k * 32, 32);
    let groups = k / group;
    let global = |r: &mut Random| r.floats(D::F32, 1);
    match format {
        "nvfp4" | "nvfp4-g32" | "nvfp4-ct" => {
            let group = if format == "nvfp4-g32" { 32 } else { 16 };
            let (weight, scale_2) = if format == "nvfp4-ct" {
                ("weight_packed", "weight_global_scale")
            } else {
                ("weight", "weight_scale_2")
            };
            t.add(&format!("m.{weight}"), D::U8, &[n, k / 2], r.bytes(n * k / 2));
            t.add("m.weight_scale", D::F8E4M3, &[n, k / group], r.e4m3(n * k / group, true));
            t.add(&format!("m.{scale_2}"), D::F32, &[1], global(r));
        }
        "nvfp4-stacked" => {
            t.add("experts.up", D::U8, &[3, k / 2, n], r.bytes(3 * n * k / 2));
            t.add("experts.up_weight_scale", D::F8E4M3, &[3, k / 16, n], r.e4m3(3 * n * k / 16, true));
            t.add("experts.up_weight_scale_2", D::F32, &[], global(r));
        }
        "mxfp4" | "mxfp4-blocks" => {
            let scales = r.bytes(2 * n * groups).into_iter().map(|b| b.min(254)).collect::<Vec<_>>();
            if format == "mxfp4" {
                t.add("m.weight", D::U8, &[n, k / 2], r.bytes(n * k / 2));
                t.add("m.weight_scale", D::U8, &[n, groups], scales[..(n * groups) as usize].into());
            } else {
                t.add("experts.up_blocks", D::U8, &[2, n, groups, 16], r.bytes(n * k));
                t.add("experts.up_scales", D::U8, &[2, n, groups], scales);
            }
        }
        "mxfp8" => {
            t.add("m.weight", D::F8E4M3, &[n, k], r.e4m3(n * k, false));
            t.add("m.weight_scale", D::U8, &[n, groups], r.bytes(n * groups).into_iter().map(|b| b.min(254)).collect());
        }
        "fp8-stacked" => {
            t.add("experts.up", D::F8E4M3, &[2, k, n], r.e4m3(2 * n * k, false));
            t.add("experts.up_weight_scale", floats, &[2], r.floats(floats, 2));
        }
        _ if format.starts_with("fp8") => {
            // Odd sizes: FP8 has no groups along K.
            let (n, k) = (n + units_k, k + units_n);
            t.add("m.weight", D::F8E4M3, &[n, k], r.e4m3(n * k, false));
            let grid = [n.div_ceil(24), k.div_ceil(40)];
            match format {
                "fp8-tensor" => t.add("m.weight_scale", floats, &[], r.floats(floats, 1)),
                "fp8-channel" => t.add("m.weight_scale", floats, &[n, 1], r.floats(floats, n)),
                "fp8-block" => t.add("m.weight_scale_inv", floats, &grid, r.floats(floats, grid[0] * grid[1])),
                _ => t.add("m.weight_scale_inv", D::F8E8M0, &grid, vec![120; (grid[0] * grid[1]) as usize]),
            }
        }
        "int4-modelopt" => {
            t.add("m.weight", D::U8, &[n / 2, k], r.bytes(n * k / 2));
            t.add("m.weight_scale", floats, &[n, groups], r.floats(floats, n * groups));
        }
        _ if format.starts_with("int8") => {
            t.add("m.weight", D::I8, &[n, k], r.bytes(n * k));
            let shape: &[u64] = match format {
                "int8" => &[n],
                "int8-tensor" => &[1],
                _ => &[n, groups],
            };
            let len = shape.iter().product();
            t.add("m.weight_scale", floats, shape, r.floats(floats, len));
            if format == "int8-zeros" {
                t.add("m.weight_zero_point", D::I8, shape, r.bytes(len));
            }
        }
        "packed" | "packed-zeros" => {
            t.add("m.weight_packed", D::I32, &[n, k / per_word], r.bytes(n * k * bits / 8));
            t.add("m.weight_shape", D::I64, &[2], [n, k].iter().flat_map(|v| v.to_le_bytes()).collect());
            t.add("m.weight_scale", floats, &[n, groups], r.floats(floats, n * groups));
            if format == "packed-zeros" {
                t.add("m.weight_zero_point", D::I32, &[n / per_word, groups], r.bytes(n * groups * bits / 8));
            }
        }
        _ => {
            let shape = if format == "awq" { [k, n / per_word] } else { [k / per_word, n] };
            t.add("m.qweight", D::I32, &shape, r.bytes(n * k * bits / 8));
            t.add("m.qzeros", D::I32, &[groups, n / per_word], r.bytes(n * groups * bits / 8));
            t.add("m.scales", floats, &[groups, n], r.floats(floats, n * groups));
        }
    }
    t
}

/// Packs one entry and takes it apart again.
fn check_entry(checkpoint: &Checkpoint, entry: &Entry, decoder: &HfDecoder) {
    let Storage::Tiled { codec, shape, inputs, all_zero } = &entry.storage else { panic!("{} is plain", entry.name) };
    let inputs: Vec<&[u8]> = inputs
        .iter()
        .map(|s| &checkpoint.data(&checkpoint.tensors[s.tensor])[s.offset as usize..(s.offset + s.len) as usize])
        .collect();
    assert_eq!(inputs.len(), codec.inputs());
    for (i, bytes) in inputs.iter().enumerate() {
        assert_eq!(codec.input_bytes(shape, i), Some(bytes.len() as u64), "{} input {i}", codec.name());
    }
    let (n, k) = (shape.n, shape.k);
    let block = shape.block.map(|b| b as u64);
    let matrix =
        TiledMatrix::new(codec.spec(), k as u64, &[n as u64], shape.group_size as u64, block).expect("a layout");
    let format = PartFormat { codec: *codec, shape: *shape, row_order: entry.row_order };
    let parts = [PartSource { format, inputs: inputs.clone(), all_zero: *all_zero }];
    let planes: Vec<(PlaneKind, Vec<u8>)> = matrix
        .planes()
        .map(|plane| {
            let mut bytes = vec![0xAA; matrix.plane_bytes(plane) as usize];
            pack_tiled(&matrix, &parts, plane, 0, &mut bytes);
            (plane, bytes)
        })
        .collect();
    let view =
        TiledView::new(&matrix, |plane| &planes.iter().find(|(p, _)| *p == plane).expect("packed").1).expect("sizes");
    assert!(view.padding_is_zero(), "{}", codec.name());

    let (mut want, mut got) = (vec![0f32; n * k], vec![0f32; n * k]);
    decoder.decode_rows(checkpoint, entry, 0..n as u64, &mut want);
    view.decode_rows(0, 0..n, &mut got);
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        assert_eq!(g.to_bits(), w.to_bits(), "{} row {} column {}: {g} {w}", codec.name(), i / k, i % k);
    }

    for (input, source) in inputs.iter().enumerate() {
        let units = codec.unit_rows(shape, input).map_or(1, |rows| n.div_ceil(rows));
        let unit_bytes = source.len() / units;
        assert_eq!(unit_bytes * units, source.len(), "{} input {input}: equal units", codec.name());
        // In two bands, and a cut in the middle.
        let mut back = vec![0x55u8; source.len()];
        let cut = units / 2;
        for range in [0..cut, cut..units].into_iter().filter(|r| !r.is_empty()) {
            let bytes = range.start * unit_bytes..range.end * unit_bytes;
            view.join(0, &format, input, range, &mut back[bytes]);
        }
        assert_eq!(back, *source, "{} input {input}", codec.name());
    }
}

fn catalog_of(checkpoint: &Checkpoint) -> (Catalog, HfDecoder) {
    let mut warnings = Vec::new();
    let resolution = resolve(checkpoint, ResolveOptions::default(), &mut warnings).expect("resolved");
    (catalog(checkpoint, &resolution), HfDecoder::new(resolution))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn planes_decode_and_join(
        format in prop::sample::select(&FORMATS[..]),
        units_n in 1u64..12,
        units_k in 1u64..6,
        floats in prop::sample::select(&[D::F32, D::Bf16, D::F16][..]),
        wide: bool,
        seed: u64,
    ) {
        let t = tensors(format, units_n, units_k, floats, if wide { 8 } else { 4 }, &mut Random(seed));
        let quantization = match format {
            "gptq-v2" => serde_json::json!({"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
            "fp8-block" | "fp8-e8m0" => serde_json::json!({"quant_method": "fp8", "weight_block_size": [24, 40]}),
            _ => serde_json::Value::Null,
        };
        let (_dir, checkpoint) = t.open(quantization);
        let (catalog, decoder) = catalog_of(&checkpoint);
        prop_assert!(!catalog.entries.is_empty());
        for entry in &catalog.entries {
            check_entry(&checkpoint, entry, &decoder);
        }
    }
}

/// Every export at hand: tiled entries decode and join, and every byte of weights is in an entry or known not to be.
#[test]
fn real_exports() {
    let exports = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/checkpoints/modelopt");
    let mut seen = 0;
    for model in fs::read_dir(exports).into_iter().flatten().flatten() {
        for export in fs::read_dir(model.path()).into_iter().flatten().flatten() {
            if !export.path().join("config.json").exists() || model.file_name() == "smollm2" {
                continue;
            }
            let checkpoint = open(&export.path()).expect("a checkpoint");
            let (catalog, decoder) = catalog_of(&checkpoint);
            for entry in catalog.entries.iter().filter(|e| matches!(e.storage, Storage::Tiled { all_zero: false, .. }))
            {
                check_entry(&checkpoint, entry, &decoder);
            }
            seen += 1;
        }
    }
    if seen == 0 {
        eprintln!("skipped: {exports} is not there");
    }
}
