//! Small bundles of random bytes.

use std::os::unix::fs::FileExt;
use std::path::Path;
use tempfile::TempDir;
use vt_bundle::hash::{Digest, LEAF_BYTES, leaf_digest};
use vt_bundle::layout::{PLANE_ALIGN, TiledMatrix};
use vt_bundle::manifest::{
    AssetRole, Experts, FORMAT, FORMAT_VERSION, Image, Layout, Manifest, Model, Part, Placement, Plane, Quantization,
    ScaleExactness, Source, Tensor,
};
use vt_bundle::row_order::RowOrder;
use vt_bundle::writer::{SegmentWriter, write_asset, write_manifest};
use vt_bundle::{Geometry, encoding};

/// Records of experts start at multiples of this.
const RECORD_ALIGN: u64 = 4096;

/// A bundle whose image is row-major byte tensors `t0`, `t1`, ... of half a leaf each.
#[derive(Clone, Copy, Debug)]
pub struct Synthetic {
    bytes: u64,
    seed: u64,
}

impl Synthetic {
    /// An image of that many bytes, a multiple of 256.
    pub fn new(bytes: u64) -> Self {
        Self { bytes, seed: 0 }
    }

    /// Other bytes.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Writes it into a temporary folder.
    ///
    /// # Panics
    /// If that fails.
    pub fn write(self) -> TempDir {
        let tensors = (0..self.bytes.div_ceil(LEAF_BYTES / 2)).map(|i| self.tensor(i)).collect();
        self.write_tensors(tensors, serde_json::json!({}))
    }

    /// Writes a layer in the layouts that tensor parallelism cuts: tiled NVFP4 and row-major bf16, 8 query and 4 key heads.
    ///
    /// # Panics
    /// If that fails.
    pub fn write_layer(self) -> TempDir {
        let mut at = 0;
        let mut tensors = vec![plain(&mut at, "model.embed_tokens.weight", &[1000, 512])];
        let layer = "model.layers.0";
        tensors.push(tiled(&mut at, &format!("{layer}.mlp.down_proj"), 1024, &[("down_proj", 512)]));
        tensors.push(tiled(
            &mut at,
            &format!("{layer}.mlp.gate_up_proj"),
            512,
            &[("gate_proj", 1024), ("up_proj", 1024)],
        ));
        tensors.push(tiled(&mut at, &format!("{layer}.self_attn.o_proj"), 512, &[("o_proj", 512)]));
        let qkv = [("q_proj", 512), ("k_proj", 256), ("v_proj", 256)];
        tensors.push(tiled(&mut at, &format!("{layer}.self_attn.qkv_proj"), 512, &qkv));
        tensors.push(plain(&mut at, "model.layers.1.mlp.down_proj.weight", &[512, 1024]));
        tensors.push(plain(&mut at, "model.layers.1.mlp.up_proj.weight", &[1024, 512]));
        tensors.push(plain(&mut at, "model.norm.weight", &[512]));
        let config = serde_json::json!({ "num_attention_heads": 8, "num_key_value_heads": 4 });
        Self { bytes: at.next_multiple_of(PLANE_ALIGN), ..self }.write_tensors(tensors, config)
    }

    /// Writes two tensors of `experts` experts, whose records have `record` bytes each, a multiple of 512, and a gap between.
    ///
    /// # Panics
    /// If that fails.
    pub fn write_experts(self, experts: u64, record: u64) -> TempDir {
        let (start, stride) = (RECORD_ALIGN, record.next_multiple_of(RECORD_ALIGN) + RECORD_ALIGN);
        let both = ["down_proj", "gate_up_proj"].into_iter().enumerate().map(|(i, module)| {
            let name = format!("model.layers.0.mlp.experts.{module}.weight");
            let mut tensor = tensor(&name, &[record / 2], Layout::RowMajor { dtype: "u8".to_owned() }, "plain.u8@1");
            let offset = start + i as u64 * (record / 2);
            tensor.planes.push(Plane { name: "data".to_owned(), dtype: "u8".to_owned(), offset, size: record / 2 });
            tensor.parts.push(part(format!("model.layers.0.mlp.experts.{{expert}}.{module}.weight"), 0, record / 2));
            tensor.experts = Some(Experts {
                count: experts,
                record_offset: start,
                record_size: record,
                stride: Some(stride),
                offsets: None,
                record_hashes: 0,
            });
            tensor
        });
        let (tensors, config) = (both.collect(), serde_json::json!({}));
        Self { bytes: start + experts * stride, ..self }.write_tensors(tensors, config)
    }

    fn write_tensors(self, tensors: Vec<Tensor>, config: serde_json::Value) -> TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut state = self.seed.wrapping_mul(2).wrapping_add(0x9E37_79B9_7F4A_7C15) | 1;
        let mut data = Vec::with_capacity(self.bytes as usize + 8);
        while data.len() < self.bytes as usize {
            // xorshift64.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            data.extend_from_slice(&state.to_le_bytes());
        }
        data.truncate(self.bytes as usize);
        let writer = SegmentWriter::create(dir.path(), Placement::Image, self.bytes).expect("segments are made");
        writer.write_at(&data, 0).expect("an image of less than a segment");
        let leaves: Vec<Digest> = data
            .chunks(LEAF_BYTES as usize)
            .enumerate()
            .map(|(i, leaf)| leaf_digest(leaf, i as u64 * LEAF_BYTES, self.bytes))
            .collect();
        let segments = writer.finish(&leaves).expect("segments are written");
        let table = write_asset(dir.path(), AssetRole::Leaves, "leaves.bin", &leaves.concat());
        let mut assets = vec![table.expect("the leaf table is written")];
        if let Some(experts) = tensors.iter().find_map(|t| t.experts.as_ref()) {
            let record = |expert| &data[experts.record_start(expert) as usize..][..experts.record_size as usize];
            let hashes: Vec<Digest> = (0..experts.count).map(|e| *blake3::hash(record(e)).as_bytes()).collect();
            let hashes = write_asset(dir.path(), AssetRole::ExpertHashes, "expert-hashes.bin", &hashes.concat());
            assets.push(hashes.expect("the hashes are written"));
        }
        let manifest = Manifest {
            format: FORMAT.to_owned(),
            format_version: FORMAT_VERSION,
            model: Model { architecture: "llama".to_owned(), config, conventions: Vec::new() },
            quantization: Quantization { decodes: Vec::new(), declared: None },
            source: Source { kind: "synthetic".to_owned(), files: Vec::new() },
            image: Image { size: self.bytes, segments },
            cold: Image::default(),
            tensors,
            kv_cache: None,
            assets,
        };
        write_manifest(dir.path(), &manifest).expect("the manifest is written");
        dir
    }

    fn tensor(&self, index: u64) -> Tensor {
        let name = format!("t{index}");
        let offset = index * (LEAF_BYTES / 2);
        let size = (LEAF_BYTES / 2).min(self.bytes - offset);
        let mut tensor = tensor(&name, &[size], Layout::RowMajor { dtype: "u8".to_owned() }, "plain.u8@1");
        tensor.planes.push(Plane { name: "data".to_owned(), dtype: "u8".to_owned(), offset, size });
        tensor.parts.push(part(name, 0, size));
        tensor
    }
}

fn tensor(name: &str, shape: &[u64], layout: Layout, decode: &str) -> Tensor {
    Tensor {
        name: name.to_owned(),
        placement: Placement::Image,
        shape: shape.to_vec(),
        layout,
        decode: decode.to_owned(),
        scales: ScaleExactness::Exact,
        planes: Vec::new(),
        parts: Vec::new(),
        experts: None,
        min_compute_capability: None,
    }
}

fn part(name: String, row_start: u64, rows: u64) -> Part {
    Part {
        source: name.clone(),
        name,
        row_start,
        rows,
        row_order: RowOrder::Same,
        scale: None,
        input_scale: None,
        pre_quant_scale: None,
        low_rank: None,
    }
}

fn placed(at: &mut u64, mut tensor: Tensor, geometry: &Geometry) -> Tensor {
    for (name, dtype, size) in geometry.planes(&tensor.layout) {
        let offset = at.next_multiple_of(PLANE_ALIGN);
        tensor.planes.push(Plane { name, dtype, offset, size });
        *at = offset + size;
    }
    tensor
}

fn plain(at: &mut u64, name: &str, shape: &[u64]) -> Tensor {
    let mut tensor = tensor(name, shape, Layout::RowMajor { dtype: "bf16".to_owned() }, "plain.bf16@1");
    tensor.parts.push(part(name.to_owned(), 0, shape[0]));
    let row_bytes = 2 * shape[1..].iter().product::<u64>();
    placed(at, tensor, &Geometry::Rows { rows: shape[0], row_bytes })
}

fn tiled(at: &mut u64, module: &str, k: u64, parts: &[(&str, u64)]) -> Tensor {
    let spec = encoding::find("nvfp4.modelopt@1").expect("an encoding of this version");
    let rows: Vec<u64> = parts.iter().map(|(_, rows)| *rows).collect();
    let matrix = TiledMatrix::new(spec, k, &rows, 16, [0, 0]).expect("possible sizes");
    let layout = Layout::Marlin {
        encoding: spec.encoding.to_owned(),
        group_size: Some(16),
        block: None,
        padded_shape: [matrix.padded_n(), matrix.padded_k()],
    };
    let mut tensor = tensor(&format!("{module}.weight"), &[matrix.n(), k], layout, spec.decode);
    let (path, _) = module.rsplit_once('.').expect("a module in a layer");
    for ((name, rows), place) in parts.iter().zip(&matrix.parts) {
        tensor.parts.push(part(format!("{path}.{name}.weight"), place.start, *rows));
    }
    placed(at, tensor, &Geometry::Tiled(matrix))
}

/// Flips one bit of a file.
///
/// # Panics
/// If that fails.
pub fn flip(path: &Path, at: u64, bit: u32) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("the file opens");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("the byte is there");
    file.write_all_at(&[byte[0] ^ 1 << bit], at).expect("the byte is written");
}
