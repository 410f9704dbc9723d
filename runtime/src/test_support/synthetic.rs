//! Small bundles of random bytes.

use std::os::unix::fs::FileExt;
use std::path::Path;
use tempfile::TempDir;
use vt_bundle::hash::{Digest, LEAF_BYTES, leaf_digest};
use vt_bundle::manifest::{
    AssetRole, FORMAT, FORMAT_VERSION, Image, Layout, Manifest, Model, Part, Placement, Plane, Quantization,
    ScaleExactness, Source, Tensor,
};
use vt_bundle::row_order::RowOrder;
use vt_bundle::writer::{SegmentWriter, write_asset, write_manifest};

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
        let manifest = Manifest {
            format: FORMAT.to_owned(),
            format_version: FORMAT_VERSION,
            model: Model { architecture: "llama".to_owned(), config: serde_json::json!({}), conventions: Vec::new() },
            quantization: Quantization { decodes: Vec::new(), declared: None },
            source: Source { kind: "synthetic".to_owned(), files: Vec::new() },
            image: Image { size: self.bytes, segments },
            cold: Image::default(),
            tensors: (0..self.bytes.div_ceil(LEAF_BYTES / 2)).map(|i| self.tensor(i)).collect(),
            kv_cache: None,
            assets: vec![table.expect("the leaf table is written")],
        };
        write_manifest(dir.path(), &manifest).expect("the manifest is written");
        dir
    }

    fn tensor(&self, index: u64) -> Tensor {
        let name = format!("t{index}");
        let offset = index * (LEAF_BYTES / 2);
        let size = (LEAF_BYTES / 2).min(self.bytes - offset);
        Tensor {
            name: name.clone(),
            placement: Placement::Image,
            shape: vec![size],
            layout: Layout::RowMajor { dtype: "u8".to_owned() },
            decode: "plain.u8@1".to_owned(),
            scales: ScaleExactness::Exact,
            planes: vec![Plane { name: "data".to_owned(), dtype: "u8".to_owned(), offset, size }],
            parts: vec![Part {
                name: name.clone(),
                source: name,
                row_start: 0,
                rows: size,
                row_order: RowOrder::Same,
                scale: None,
                input_scale: None,
                pre_quant_scale: None,
                low_rank: None,
            }],
            experts: None,
            min_compute_capability: None,
        }
    }
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
