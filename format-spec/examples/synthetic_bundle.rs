//! Writes a valid bundle of random weights, to measure loading and computing with: NVFP4 matrices, bf16 embedding, norms, router
//! and head.
//!
//!     synthetic_bundle DIR [LAYERS [HIDDEN [INNER [VOCABULARY]]]]
//!     synthetic_bundle DIR qwen3-8b | qwen3-30b-a3b [LAYERS]
//!
//! The first form is a dense Llama with a tied head; the defaults give 20.3 GB. HIDDEN is a multiple of 512 and INNER of 64. The
//! second has the dimensions of that model. Hashes and the id are right, so that everything but the values is as in a real
//! bundle. Codes are random; scales have the size that keeps activations near 1, so that it computes, and answers nonsense: its
//! tokenizer has a token for every byte.

use rayon::prelude::*;
use std::error::Error;
use std::path::{Path, PathBuf};
use vt_bundle::hash::{Digest, LEAF_BYTES, SEGMENT_BYTES, leaf_count, leaf_digest};
use vt_bundle::layout::{PLANE_ALIGN, RECORD_ALIGN, TiledMatrix};
use vt_bundle::manifest::{
    AssetRole, DecodeSummary, Experts, FORMAT, FORMAT_VERSION, Image, Layout, Manifest, Model, Part, Placement, Plane,
    Quantization, ScaleExactness, Source, Tensor,
};
use vt_bundle::row_order::RowOrder;
use vt_bundle::writer::{SegmentWriter, write_asset, write_manifest};
use vt_bundle::{Geometry, encoding};

const HEAD_DIM: u64 = 128;
const GROUP: u64 = 16;
const DECODE: &str = "nvfp4.modelopt@1";

/// Dimensions of a model.
struct Shape {
    architecture: &'static str,
    layers: u64,
    hidden: u64,
    /// Width of the feed-forward network, or of an expert.
    inner: u64,
    vocabulary: u64,
    heads: u64,
    kv_heads: u64,
    /// Queries and keys have norms.
    head_norms: bool,
    /// The head is the embedding.
    tied: bool,
    /// Experts, and experts of a token.
    experts: Option<(u64, u64)>,
    positions: u64,
}

impl Shape {
    fn llama(layers: u64, hidden: u64, inner: u64, vocabulary: u64) -> Self {
        let heads = hidden / HEAD_DIM;
        Self {
            architecture: "llama",
            layers,
            hidden,
            inner,
            vocabulary,
            heads,
            kv_heads: (heads / 8).max(1),
            head_norms: false,
            tied: true,
            experts: None,
            positions: 8192,
        }
    }

    /// A published model by name.
    fn named(name: &str, layers: Option<u64>) -> Option<Self> {
        let qwen3 = Self { head_norms: true, tied: false, positions: 40_960, ..Self::llama(36, 4096, 12_288, 151_936) };
        let mut shape = match name {
            "qwen3-8b" => Self { architecture: "qwen3", kv_heads: 8, ..qwen3 },
            "qwen3-30b-a3b" => Self {
                architecture: "qwen3_moe",
                layers: 48,
                hidden: 2048,
                inner: 768,
                heads: 32,
                kv_heads: 4,
                experts: Some((128, 8)),
                ..qwen3
            },
            _ => return None,
        };
        shape.layers = layers.unwrap_or(shape.layers);
        Some(shape)
    }

    fn config(&self) -> serde_json::Value {
        let mut config = serde_json::json!({
            "model_type": self.architecture, "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM, "vocab_size": self.vocabulary, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
            "max_position_embeddings": self.positions, "tie_word_embeddings": self.tied, "hidden_act": "silu"
        });
        if let Some((experts, top_k)) = self.experts {
            config["num_experts"] = experts.into();
            config["num_experts_per_tok"] = top_k.into();
            config["moe_intermediate_size"] = self.inner.into();
            config["norm_topk_prob"] = true.into();
        }
        config
    }

    fn image(&self) -> Result<Builder, Box<dyn Error>> {
        let (hidden, inner) = (self.hidden, self.inner);
        let mut image = Builder::default();
        image.plain("model.embed_tokens.weight", &[self.vocabulary, hidden]);
        for layer in 0..self.layers {
            let at = format!("model.layers.{layer}");
            image.plain(&format!("{at}.input_layernorm.weight"), &[hidden]);
            let gate_up = [("gate_proj", inner), ("up_proj", inner)];
            match self.experts {
                None => {
                    image.matrix(&format!("{at}.mlp.down_proj"), inner, &[("down_proj", hidden)])?;
                    image.matrix(&format!("{at}.mlp.gate_up_proj"), hidden, &gate_up)?;
                }
                Some((experts, _)) => {
                    image.plain(&format!("{at}.mlp.gate.weight"), &[experts, hidden]);
                    let down = [("down_proj", hidden)];
                    let (tail, path) = (["down_proj", "gate_up_proj"], format!("{at}.mlp.experts"));
                    image.experts(&path, experts, &[(tail[0], inner, &down), (tail[1], hidden, &gate_up)])?;
                }
            }
            image.plain(&format!("{at}.post_attention_layernorm.weight"), &[hidden]);
            let (q, kv) = (self.heads * HEAD_DIM, self.kv_heads * HEAD_DIM);
            image.matrix(&format!("{at}.self_attn.o_proj"), q, &[("o_proj", hidden)])?;
            let qkv = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
            image.matrix(&format!("{at}.self_attn.qkv_proj"), hidden, &qkv)?;
            if self.head_norms {
                image.plain(&format!("{at}.self_attn.q_norm.weight"), &[HEAD_DIM]);
                image.plain(&format!("{at}.self_attn.k_norm.weight"), &[HEAD_DIM]);
            }
        }
        image.plain("model.norm.weight", &[hidden]);
        if !self.tied {
            image.plain("lm_head.weight", &[self.vocabulary, hidden]);
        }
        Ok(image)
    }
}

/// What the bytes of a plane are.
#[derive(Clone, Copy)]
enum Fill {
    Random,
    /// E4M3 near 0.4.
    Scales,
    /// This f32.
    Constant(f32),
    /// bf16 of both signs, near 0.012.
    Weights,
    /// bf16 1.
    Ones,
}

/// A run of bytes of the image.
struct Run {
    start: u64,
    end: u64,
    fill: Fill,
}

/// Name, K, and the names and rows of the parts.
type Matrix<'a> = (&'a str, u64, &'a [(&'a str, u64)]);

/// Places tensors one after the other.
#[derive(Default)]
struct Builder {
    tensors: Vec<Tensor>,
    runs: Vec<Run>,
    end: u64,
}

impl Builder {
    fn push(&mut self, mut tensor: Tensor, geometry: &Geometry) {
        self.place(&mut tensor, geometry);
        for plane in &tensor.planes {
            self.runs.push(run(&tensor, plane, 0));
        }
        self.tensors.push(tensor);
    }

    /// Places of the planes, one after the other.
    fn place(&mut self, tensor: &mut Tensor, geometry: &Geometry) {
        for (name, dtype, size) in geometry.planes(&tensor.layout) {
            let offset = self.end.next_multiple_of(PLANE_ALIGN);
            tensor.planes.push(Plane { name, dtype, offset, size });
            self.end = offset + size;
        }
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
        let (path, _) = module.rsplit_once('.').ok_or("a module lies in a layer")?;
        let (tensor, geometry) = tiled(module, path, k, parts)?;
        self.push(tensor, &geometry);
        Ok(())
    }

    /// Records of `count` experts, each with the planes of all `matrices`: name, K and parts.
    fn experts(&mut self, path: &str, count: u64, matrices: &[Matrix<'_>]) -> Result<(), Box<dyn Error>> {
        let record_offset = self.end.next_multiple_of(RECORD_ALIGN);
        self.end = record_offset;
        let mut placed = Vec::new();
        for (name, k, parts) in matrices {
            let (mut tensor, geometry) = tiled(&format!("{path}.{name}"), &format!("{path}.{{expert}}"), *k, parts)?;
            self.place(&mut tensor, &geometry);
            placed.push(tensor);
        }
        let record_size = self.end - record_offset;
        let stride = record_size.next_multiple_of(RECORD_ALIGN);
        for mut tensor in placed {
            for (plane, expert) in tensor.planes.iter().flat_map(|plane| (0..count).map(move |e| (plane, e))) {
                self.runs.push(run(&tensor, plane, expert * stride));
            }
            let stride = Some(stride);
            tensor.experts =
                Some(Experts { count, record_offset, record_size, stride, offsets: None, record_hashes: 0 });
            self.tensors.push(tensor);
        }
        self.end = record_offset + (count - 1) * stride + record_size;
        Ok(())
    }
}

fn run(tensor: &Tensor, plane: &Plane, distance: u64) -> Run {
    let k = tensor.shape.last().copied().unwrap_or(1) as f32;
    let fill = match plane.dtype.as_str() {
        "e4m3" => Fill::Scales,
        // Codes have a root mean square of 2.9.
        "f32" => Fill::Constant(1.0 / (2.9 * 0.4 * k.sqrt())),
        "bf16" if tensor.shape.len() == 1 => Fill::Ones,
        "bf16" => Fill::Weights,
        _ => Fill::Random,
    };
    let start = plane.offset + distance;
    Run { start, end: start + plane.size, fill }
}

fn tiled(module: &str, path: &str, k: u64, parts: &[(&str, u64)]) -> Result<(Tensor, Geometry), Box<dyn Error>> {
    let spec = encoding::find(DECODE).ok_or("the encoding is known")?;
    let rows: Vec<u64> = parts.iter().map(|(_, rows)| *rows).collect();
    let matrix = TiledMatrix::new(spec, k, &rows, GROUP, [0, 0])?;
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
    Ok((tensor, Geometry::Tiled(matrix)))
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
    let usage =
        "usage: synthetic_bundle DIR [LAYERS [HIDDEN [INNER [VOCABULARY]]]] | DIR qwen3-8b|qwen3-30b-a3b [LAYERS]";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (dir, rest) = arguments.split_first().ok_or(usage)?;
    let number = |index: usize| rest.get(index).map(|text| text.parse::<u64>()).transpose();
    let named = rest.first().and_then(|name| Shape::named(name, number(1).ok()?));
    let shape = match named {
        Some(shape) => shape,
        None => Shape::llama(
            number(0)?.unwrap_or(41),
            number(1)?.unwrap_or(8192),
            number(2)?.unwrap_or(28_672),
            number(3)?.unwrap_or(32_000),
        ),
    };
    let (dir, mut image) = (PathBuf::from(dir), shape.image()?);
    image.runs.sort_unstable_by_key(|run| run.start);
    let size = image.end.next_multiple_of(PLANE_ALIGN);
    let (leaves, segments) = write_segments(&dir, &image.runs, size)?;
    let assets = vec![
        write_asset(&dir, AssetRole::Leaves, "leaves.bin", &leaves.concat())?,
        write_asset(&dir, AssetRole::Tokenizer, "tokenizer.json", byte_tokenizer().to_string().as_bytes())?,
    ];
    let decodes = [DECODE, "plain.bf16@1"].map(|decode| summary(&image.tensors, decode)).to_vec();
    let manifest = Manifest {
        format: FORMAT.to_owned(),
        format_version: FORMAT_VERSION,
        model: Model { architecture: shape.architecture.to_owned(), config: shape.config(), conventions: Vec::new() },
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

/// A tokenizer with a token for every byte, in the alphabet of byte-level BPE.
fn byte_tokenizer() -> serde_json::Value {
    let mut vocabulary = serde_json::Map::new();
    let mut stand_ins = (0x100u32..).filter_map(char::from_u32);
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let character = if printable { Some(char::from(byte)) } else { stand_ins.next() };
        vocabulary.insert(character.unwrap_or('?').to_string(), byte.into());
    }
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    });
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []
        }
    })
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

/// Fills the planes, and hashes, a leaf at a time on all processors.
fn write_segments(
    dir: &Path,
    runs: &[Run],
    size: u64,
) -> Result<(Vec<Digest>, Vec<vt_bundle::manifest::Segment>), Box<dyn Error>> {
    let writer = SegmentWriter::create(dir, Placement::Image, size)?;
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
            fill(runs, start, buffer);
            writer.write_at(buffer, start)?;
            let segment_bytes = SEGMENT_BYTES.min(size - start / SEGMENT_BYTES * SEGMENT_BYTES);
            Ok(leaf_digest(buffer, start % SEGMENT_BYTES, segment_bytes))
        })
        .collect();
    let leaves = leaves?;
    let segments = writer.finish(&leaves)?;
    Ok((leaves, segments))
}

/// Makes random bytes from `start` of the image on what the planes there hold, and zeroes what lies between planes: padding is
/// zero.
fn fill(runs: &[Run], start: u64, bytes: &mut [u8]) {
    let end = start + bytes.len() as u64;
    let mut at = start;
    for run in &runs[runs.partition_point(|run| run.end <= start)..] {
        let (from, to) = (run.start.clamp(at, end), run.end.clamp(at, end));
        bytes[(at - start) as usize..(from - start) as usize].fill(0);
        let first = from - run.start.min(from);
        for (byte, place) in bytes[(from - start) as usize..(to - start) as usize].iter_mut().zip(first..) {
            *byte = match run.fill {
                Fill::Random => *byte,
                // 0x28 to 0x2F: 0.25 to 0.47.
                Fill::Scales => 0x28 | (*byte & 7),
                Fill::Constant(value) => value.to_le_bytes()[(place % 4) as usize],
                // An exponent of 2^-7 or 2^-6.
                Fill::Weights => {
                    if place % 2 == 0 {
                        *byte
                    } else {
                        0x3C | (*byte & 0x80)
                    }
                }
                Fill::Ones => [0x80, 0x3F][(place % 2) as usize],
            };
        }
        at = to;
        if at == end {
            return;
        }
    }
    bytes[(at - start) as usize..].fill(0);
}
