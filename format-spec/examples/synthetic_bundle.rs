//! Writes a valid bundle of random weights, to measure loading with: a dense Llama, NVFP4 matrices, bf16 embedding.
//!
//!     synthetic_bundle DIR [LAYERS [HIDDEN [INNER [VOCABULARY]]]]
//!
//! The defaults give 20.3 GB. Hashes and the id are right, so that everything but the values is as in a real bundle: codes and
//! scales are random bytes, so that it cannot be asked anything. HIDDEN is a multiple of 512 and INNER of 64.

use rayon::prelude::*;
use std::error::Error;
use std::path::{Path, PathBuf};
use vt_bundle::hash::{Digest, LEAF_BYTES, SEGMENT_BYTES, leaf_count, leaf_digest};
use vt_bundle::layout::{PLANE_ALIGN, TiledMatrix};
use vt_bundle::manifest::{
    AssetRole, DecodeSummary, FORMAT, FORMAT_VERSION, Image, Layout, Manifest, Model, Part, Placement, Plane,
    Quantization, ScaleExactness, Source, Tensor,
};
use vt_bundle::row_order::RowOrder;
use vt_bundle::writer::{SegmentWriter, write_asset, write_manifest};
use vt_bundle::{Geometry, encoding};

const HEAD_DIM: u64 = 128;
const GROUP: u64 = 16;
const DECODE: &str = "nvfp4.modelopt@1";

/// Places tensors one after the other.
#[derive(Default)]
struct Builder {
    tensors: Vec<Tensor>,
    end: u64,
}

impl Builder {
    fn push(&mut self, mut tensor: Tensor, geometry: &Geometry) {
        for (name, dtype, size) in geometry.planes(&tensor.layout) {
            let offset = self.end.next_multiple_of(PLANE_ALIGN);
            tensor.planes.push(Plane { name, dtype, offset, size });
            self.end = offset + size;
        }
        self.tensors.push(tensor);
    }

    fn plain(&mut self, name: &str, shape: &[u64]) {
        let tensor = tensor(
            name,
            shape,
            Layout::RowMajor { dtype: "bf16".into() },
            "plain.bf16@1",
            vec![part(name.to_owned(), 0, shape[0])],
        );
        let row_bytes = 2 * shape[1..].iter().product::<u64>();
        self.push(tensor, &Geometry::Rows { rows: shape[0], row_bytes });
    }

    fn matrix(&mut self, module: &str, k: u64, parts: &[(&str, u64)]) -> Result<(), Box<dyn Error>> {
        let spec = encoding::find(DECODE).ok_or("the encoding is known")?;
        let rows: Vec<u64> = parts.iter().map(|(_, rows)| *rows).collect();
        let matrix = TiledMatrix::new(spec, k, &rows, GROUP, [0, 0])?;
        let (path, _) = module.rsplit_once('.').ok_or("a module lies in a layer")?;
        let listed = parts
            .iter()
            .zip(&matrix.parts)
            .map(|((name, rows), at)| part(format!("{path}.{name}.weight"), at.start, *rows));
        let layout = Layout::Marlin {
            encoding: spec.encoding.to_owned(),
            group_size: Some(GROUP),
            block: None,
            padded_shape: [matrix.padded_n(), matrix.padded_k()],
        };
        let mut tensor = tensor(&format!("{module}.weight"), &[matrix.n(), k], layout, DECODE, listed.collect());
        tensor.min_compute_capability = Some(spec.min_compute_capability);
        self.push(tensor, &Geometry::Tiled(matrix));
        Ok(())
    }
}

fn tensor(name: &str, shape: &[u64], layout: Layout, decode: &str, parts: Vec<Part>) -> Tensor {
    Tensor {
        name: name.to_owned(),
        placement: Placement::Image,
        shape: shape.to_vec(),
        layout,
        decode: decode.to_owned(),
        scales: ScaleExactness::Exact,
        planes: Vec::new(),
        parts,
        experts: None,
        min_compute_capability: None,
    }
}

fn part(name: String, row_start: u64, rows: u64) -> Part {
    let source = name.clone();
    let (scale, input_scale, pre_quant_scale, low_rank) = (None, None, None, None);
    Part { name, source, row_start, rows, row_order: RowOrder::Same, scale, input_scale, pre_quant_scale, low_rank }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dir =
        PathBuf::from(arguments.next().ok_or("usage: synthetic_bundle DIR [LAYERS [HIDDEN [INNER [VOCABULARY]]]]")?);
    let mut number = |default: u64| arguments.next().map_or(Ok(default), |text| text.parse());
    let (layers, hidden, inner, vocabulary) = (number(41)?, number(8192)?, number(28672)?, number(32000)?);
    let heads = hidden / HEAD_DIM;
    let kv_heads = (heads / 8).max(1);
    let mut image = Builder::default();
    image.plain("model.embed_tokens.weight", &[vocabulary, hidden]);
    for layer in 0..layers {
        let at = format!("model.layers.{layer}");
        image.plain(&format!("{at}.input_layernorm.weight"), &[hidden]);
        image.matrix(&format!("{at}.mlp.down_proj"), inner, &[("down_proj", hidden)])?;
        image.matrix(&format!("{at}.mlp.gate_up_proj"), hidden, &[("gate_proj", inner), ("up_proj", inner)])?;
        image.plain(&format!("{at}.post_attention_layernorm.weight"), &[hidden]);
        image.matrix(&format!("{at}.self_attn.o_proj"), hidden, &[("o_proj", hidden)])?;
        let kv = kv_heads * HEAD_DIM;
        let qkv = [("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)];
        image.matrix(&format!("{at}.self_attn.qkv_proj"), hidden, &qkv)?;
    }
    image.plain("model.norm.weight", &[hidden]);
    let size = image.end.next_multiple_of(PLANE_ALIGN);
    let leaves = write_segments(&dir, &image.tensors, size)?;
    let segments = leaves.1;
    let table: Vec<u8> = leaves.0.concat();
    let assets = vec![write_asset(&dir, AssetRole::Leaves, "leaves.bin", &table)?];
    let decodes = [DECODE, "plain.bf16@1"].map(|decode| summary(&image.tensors, decode)).to_vec();
    let manifest = Manifest {
        format: FORMAT.to_owned(),
        format_version: FORMAT_VERSION,
        model: Model {
            architecture: "llama".to_owned(),
            config: serde_json::json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
                "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
                "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM, "vocab_size": vocabulary, "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": true,
                "hidden_act": "silu"
            }),
            conventions: Vec::new(),
        },
        quantization: Quantization { decodes, declared: Some("NVFP4".to_owned()) },
        source: Source { kind: "synthetic".to_owned(), files: Vec::new() },
        image: Image { size, segments },
        cold: Image::default(),
        tensors: image.tensors,
        kv_cache: None,
        assets,
    };
    let id = write_manifest(&dir, &manifest)?;
    println!("{}: {size} bytes, {} tensors, id {id}", dir.display(), manifest.tensors.len());
    Ok(())
}

fn summary(tensors: &[Tensor], decode: &str) -> DecodeSummary {
    let of = || tensors.iter().filter(|t| t.decode == decode);
    DecodeSummary {
        decode: decode.to_owned(),
        tensors: of().count() as u64,
        elements: of().filter_map(Tensor::elements).sum(),
        bytes: of().flat_map(|t| &t.planes).map(|p| p.size).sum(),
    }
}

/// Fills the planes with random bytes, and hashes, a leaf at a time on all processors.
fn write_segments(
    dir: &Path,
    tensors: &[Tensor],
    size: u64,
) -> Result<(Vec<Digest>, Vec<vt_bundle::manifest::Segment>), Box<dyn Error>> {
    let writer = SegmentWriter::create(dir, Placement::Image, size)?;
    let ends: Vec<(u64, u64)> = {
        let mut planes: Vec<_> =
            tensors.iter().flat_map(|t| &t.planes).map(|p| (p.offset, p.offset + p.size)).collect();
        planes.sort_unstable();
        planes
    };
    let leaves: Result<Vec<Digest>, vt_bundle::BundleError> = (0..leaf_count(size))
        .into_par_iter()
        .map_init(Vec::new, |buffer, leaf| {
            let start = leaf * LEAF_BYTES;
            let len = LEAF_BYTES.min(size - start);
            buffer.clear();
            let mut state = leaf.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
            while buffer.len() < len as usize {
                // xorshift64*: quick, and nothing compresses it.
                state ^= state >> 12;
                state ^= state << 25;
                state ^= state >> 27;
                buffer.extend_from_slice(&state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
            }
            buffer.truncate(len as usize);
            zero_gaps(&ends, start, buffer);
            writer.write_at(buffer, start)?;
            let segment_bytes = SEGMENT_BYTES.min(size - start / SEGMENT_BYTES * SEGMENT_BYTES);
            Ok(leaf_digest(buffer, start % SEGMENT_BYTES, segment_bytes))
        })
        .collect();
    let leaves = leaves?;
    let segments = writer.finish(&leaves)?;
    Ok((leaves, segments))
}

/// Zeroes what lies between planes: padding is zero.
fn zero_gaps(planes: &[(u64, u64)], start: u64, bytes: &mut [u8]) {
    let end = start + bytes.len() as u64;
    let mut at = start;
    for &(from, to) in &planes[planes.partition_point(|&(_, to)| to <= start)..] {
        let from = from.clamp(at, end);
        bytes[(at - start) as usize..(from - start) as usize].fill(0);
        at = to.clamp(from, end);
        if at == end {
            return;
        }
    }
    bytes[(at - start) as usize..].fill(0);
}
