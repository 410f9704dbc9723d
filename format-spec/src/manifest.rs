//! The manifest: what a bundle holds, where, and how it decodes.
//!
//! `manifest.json` is the root of a bundle. Its bytes are canonical (RFC 8785), and their BLAKE3 is the bundle id. A
//! reader refuses other bytes for the same content, versions that it does not know and layouts that it does not know.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::row_order::RowOrder;

/// Value of [`Manifest::format`].
pub const FORMAT: &str = "vt-bundle";
/// Version of the structure that this crate writes, and the only one that it reads.
pub const FORMAT_VERSION: u32 = 1;

/// File names inside a bundle.
pub mod file_name {
    /// The manifest.
    pub const MANIFEST: &str = "manifest.json";
    /// The bundle id: 64 hexadecimal digits and a newline.
    pub const ID: &str = "bundle.id";
}

/// Root of a bundle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always [`FORMAT`].
    pub format: String,
    /// Always [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Architecture and configuration.
    pub model: Model,
    /// What is quantised, and how, for people and for planners.
    pub quantization: Quantization,
    /// The checkpoint that the bundle was made from.
    pub source: Source,
    /// The device image: uploaded as it is.
    pub image: Image,
    /// Tensors outside the text model: never uploaded.
    #[serde(skip_serializing_if = "Image::is_empty", default)]
    pub cold: Image,
    /// Every tensor, by name.
    pub tensors: Vec<Tensor>,
    /// Scales of a quantised KV cache.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub kv_cache: Option<KvCache>,
    /// Files beside the weights: tokenizer, chat template, leaf hashes, restore recipe.
    pub assets: Vec<Asset>,
}

/// Architecture and configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// `model_type` of the configuration (`llama`, `qwen3_moe`).
    pub architecture: String,
    /// The configuration in Hugging Face form; rebuilt from the metadata for a GGUF source.
    pub config: serde_json::Value,
    /// Conventions in which stored values differ from the Hugging Face checkpoint (`norm-stores-1-plus-w`), by name.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub conventions: Vec<String>,
}

/// Summary of the quantisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Quantization {
    /// One entry per `decode` name, in order of the name.
    pub decodes: Vec<DecodeSummary>,
    /// Algorithm that the source names (`NVFP4`, `MIXED_PRECISION`), if it names one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub declared: Option<String>,
}

/// How much of the model has one encoding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DecodeSummary {
    /// The `decode` name.
    pub decode: String,
    /// Tensors.
    pub tensors: u64,
    /// Logical elements.
    pub elements: u64,
    /// Bytes of their planes.
    pub bytes: u64,
}

/// Provenance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// `safetensors` or `gguf`.
    pub kind: String,
    /// Every file that `restore` rebuilds.
    pub files: Vec<SourceFile>,
}

/// One file of the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceFile {
    /// Relative name, `/` separated.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3 of the contents, hexadecimal.
    pub blake3: String,
}

/// A run of segment files that form one address space.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Bytes of all segments.
    pub size: u64,
    /// Segments in order; all but the last have exactly [`crate::hash::SEGMENT_BYTES`].
    pub segments: Vec<Segment>,
}

impl Image {
    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }
}

/// One segment file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// File name relative to the bundle.
    pub file: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3 of the file, hexadecimal: what `b3sum` prints.
    pub blake3: String,
}

/// A file beside the weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Asset {
    /// What it is for.
    pub role: AssetRole,
    /// File name relative to the bundle.
    pub file: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3 of the file, hexadecimal.
    pub blake3: String,
}

/// What an asset is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AssetRole {
    /// `tokenizer.json` in the form of the Hugging Face `tokenizers` library.
    Tokenizer,
    /// `tokenizer_config.json`.
    TokenizerConfig,
    /// Jinja chat template.
    ChatTemplate,
    /// `generation_config.json`.
    GenerationConfig,
    /// Chaining values of the leaves of every segment, 32 bytes each: image, then cold.
    Leaves,
    /// How to rebuild the source files: zstd-compressed JSON.
    RestoreRecipe,
    /// The bytes that the recipe cannot take from the planes: zstd-compressed.
    RestoreData,
    /// BLAKE3 of every expert record, 32 bytes each, in the order of the tensors' `record_hashes`.
    ExpertHashes,
    /// Anything else that came with the checkpoint.
    Other,
}

/// Which address space a tensor lies in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Placement {
    /// The device image.
    #[default]
    Image,
    /// The cold segments.
    Cold,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Name in Hugging Face terms; a fused projection has the fused name (`...self_attn.qkv_proj.weight`).
    pub name: String,
    /// Address space of the planes.
    pub placement: Placement,
    /// Logical shape of one expert or of the whole: `[N, K]` for matrices.
    pub shape: Vec<u64>,
    /// Order of the stored bytes.
    pub layout: Layout,
    /// Formula and order of operations, versioned; see [`crate::encoding::EncodingSpec::decode`], or the element type
    /// of a row-major tensor (`plain.bf16@1`).
    pub decode: String,
    /// Whether the scales are the source's own bits (`exact`); this writer knows nothing else.
    pub scales: ScaleExactness,
    /// Planes; offsets are from the start of the address space, for expert 0 where there are experts.
    pub planes: Vec<Plane>,
    /// The source tensors in it, in order of their rows.
    pub parts: Vec<Part>,
    /// Stacked experts.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub experts: Option<Experts>,
    /// Oldest CUDA compute capability, major * 10 + minor, with a kernel for the layout.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub min_compute_capability: Option<u32>,
}

/// Exactness of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleExactness {
    /// Stored in the source's encoding, bit for bit.
    Exact,
}

/// Order of the stored bytes, named and versioned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "id", deny_unknown_fields)]
pub enum Layout {
    /// Rows one after the other, elements in order, no padding. One plane, `data`.
    #[serde(rename = "row-major@1")]
    RowMajor {
        /// Element type in safetensors spelling, lower case (`bf16`).
        dtype: String,
    },
    /// ggml blocks as in the file, rows one after the other. One plane, `blocks`.
    #[serde(rename = "ggml-raw@1")]
    GgmlRaw {
        /// ggml's name of the type, lower case (`iq2_xs`).
        ggml_type: String,
        /// Bytes of one row.
        row_bytes: u64,
    },
    /// Tiles of 16 (K) x 64 (N) in Marlin order; see [`crate::tile`].
    #[serde(rename = "marlin-16x64@1")]
    Marlin {
        /// What the codes and scales are (`e2m1`).
        encoding: String,
        /// Codes per scale along K.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        group_size: Option<u64>,
        /// Rows and columns per block scale.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        block: Option<[u64; 2]>,
        /// N and K with each part padded to the tile.
        padded_shape: [u64; 2],
    },
}

/// One plane of a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plane {
    /// Name within the layout (`q4`, `scales`, `global`, `data`).
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// First byte in the address space, a multiple of 256.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// One source tensor within a tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Its own name in Hugging Face terms (`...self_attn.q_proj.weight`).
    pub name: String,
    /// Its name in the source file (`blk.0.attn_q.weight`).
    pub source: String,
    /// First row in the padded N axis.
    pub row_start: u64,
    /// Rows.
    pub rows: u64,
    /// How its rows relate to the source's.
    #[serde(skip_serializing_if = "is_same_order", default)]
    pub row_order: RowOrder,
    /// Its per-tensor scale, for people: the bits that count are in the scale plane.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scale: Option<f32>,
    /// Static activation scale that the source carries.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub input_scale: Option<f32>,
    /// Name of the tensor `[K]` that multiplies the part's input (AWQ smoothing), if there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pre_quant_scale: Option<String>,
    /// Names of the low-rank branch tensors: `y += up (down (x * pre_quant_scale))`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub low_rank: Option<LowRank>,
}

/// A low-rank branch beside a quantised matrix (SVDQuant).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LowRank {
    /// Tensor `[rank, K]`.
    pub down: String,
    /// Tensor `[N, rank]`.
    pub up: String,
}

fn is_same_order(order: &RowOrder) -> bool {
    *order == RowOrder::Same
}

/// Experts: one record per expert holds all planes of all its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Number of experts.
    pub count: u64,
    /// First byte of expert 0's record, a multiple of 4096.
    pub record_offset: u64,
    /// Bytes of a record without the padding to the stride.
    pub record_size: u64,
    /// Distance between records where all have the same planes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stride: Option<u64>,
    /// Record offsets where they do not; then `planes` are relative to the record of the first expert listed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub offsets: Option<Vec<u64>>,
    /// Index of expert 0's hash in the expert-hashes asset, in records.
    pub record_hashes: u64,
}

impl Experts {
    /// First byte of one expert's record.
    ///
    /// # Panics
    /// Where there is no such expert.
    pub fn record_start(&self, expert: u64) -> u64 {
        match &self.offsets {
            Some(offsets) => offsets[expert as usize],
            None => self.record_offset + expert * self.stride.unwrap_or(0),
        }
    }
}

/// Scales of a quantised KV cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KvCache {
    /// Encoding that the source declares (`fp8`, `nvfp4`).
    pub dtype: String,
    /// One entry per layer with scales.
    pub layers: Vec<KvScales>,
}

/// KV-cache scales of one layer: stored value * scale = value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KvScales {
    /// Layer index.
    pub layer: u64,
    /// Scale of the keys.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub k_scale: Option<f32>,
    /// Scale of the values.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub v_scale: Option<f32>,
}

impl Manifest {
    /// The canonical bytes (RFC 8785).
    ///
    /// # Errors
    /// If a number in the model configuration is not finite.
    pub fn canonical_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json_canonicalizer::to_vec(self)
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// The first asset of that role.
    pub fn asset(&self, role: AssetRole) -> Option<&Asset> {
        self.assets.iter().find(|a| a.role == role)
    }

    /// The JSON schema of the manifest, pretty-printed.
    pub fn schema() -> String {
        let mut text = serde_json::to_string_pretty(&schemars::schema_for!(Manifest)).unwrap_or_default();
        text.push('\n');
        text
    }
}

impl Tensor {
    /// The plane of that name.
    pub fn plane(&self, name: &str) -> Option<&Plane> {
        self.planes.iter().find(|p| p.name == name)
    }

    /// Logical elements of one expert or of the whole; `None` on overflow.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |product, &axis| product.checked_mul(axis))
    }
}
