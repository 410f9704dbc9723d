//! What each tensor of a checkpoint is: which scales belong to which weight, in which encoding.
//!
//! Stored types and shapes decide. The configuration is a cross-check: where it says something else, one warning names
//! both. Nothing here reads weight data, except the one scalar per tensor that must be positive, and the codes of a
//! tensor whose scale is zero.
//!
//! Axes: N out-features, K in-features, E experts, G groups along K.

mod detect;
mod error;
mod integer;
mod kv;

use std::collections::{BTreeMap, HashMap};

use serde_json::Value;

use super::quant_config::{Claim, QuantConfig, Scheme};
use crate::source::{Checkpoint, PlainDtype, SourceDtype, SourceTensor};
pub use error::ResolveError;
pub use kv::KvScale;

/// How a source weight is stored, and so by which formula it decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceEncoding {
    /// U8 `[N, K/2]` E2M1 codes (low nibble first), E4M3 scales `[N, K/group]`, one f32 for the tensor.
    Nvfp4 {
        /// Codes per scale: 16, or 32 in W4A8 exports.
        group: u64,
        /// The f32 divides (compressed-tensors) rather than multiplies (ModelOpt).
        divides: bool,
    },
    /// E4M3 `[N, K]` with float or E8M0 scales that multiply.
    Fp8 {
        /// How far one scale reaches.
        scales: Fp8Scales,
    },
    /// U8 E2M1 codes with an E8M0 scale per 32 along K.
    Mxfp4 {
        /// `[N, K/32, 16]` blocks (gpt-oss) rather than `[N, K/2]`; the bytes are in the same order.
        blocks: bool,
    },
    /// E4M3 `[N, K]` with an E8M0 scale per 32 along K.
    Mxfp8,
    /// U8 `[N/2, K]`: row 2i in the low nibbles of byte row i, row 2i+1 in the high ones, two's complement.
    Int4ModelOpt {
        /// Codes per scale.
        group: u64,
    },
    /// I8 `[N, K]`.
    Int8 {
        /// How far one scale reaches.
        scales: IntScales,
        /// An I8 zero point per scale.
        zero_points: bool,
    },
    /// compressed-tensors `pack-quantized`: I32 words `[N, K * bits / 32]`, lowest bits first, offset by half the range.
    Packed {
        /// Bits per code, 4 or 8.
        bits: u32,
        /// Codes per scale; K for one scale per channel.
        group: u64,
        /// Zero points packed along N, with the same offset.
        zero_points: bool,
    },
    /// GPTQ: I32 words `[K * bits / 32, N]`, scales `[G, N]`, zero points packed along N.
    Gptq {
        /// Bits per code, 4 or 8.
        bits: u32,
        /// Codes per scale.
        group: u64,
        /// The stored zero points are one less than those of the formula.
        zero_minus_one: bool,
    },
    /// AWQ: I32 words `[K, N * bits / 32]` in its interleaved order, scales `[G, N]`, zero points as the weights.
    Awq {
        /// Bits per code, 4 or 8.
        bits: u32,
        /// Codes per scale.
        group: u64,
    },
}

/// How far a scale of FP8 weights reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Scales {
    /// The tensor.
    Tensor,
    /// One output channel (row).
    Channel,
    /// A block of so many rows and columns, the last of each axis cut short.
    Block([u64; 2]),
}

/// How far a scale of 8-bit integer weights reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntScales {
    /// The tensor.
    Tensor,
    /// So many codes along K of one row; K for a whole row.
    Group(u64),
}

/// Experts stored as one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    /// E, the slowest axis of every tensor of the weight.
    pub experts: u64,
    /// Codes and scales are stored with N fastest: `[E, K/2, N]` and `[E, K/group, N]` for NVFP4, `[E, K, N]` for FP8.
    pub transposed: bool,
    /// The unquantised tensor of that name is `[E, K, N]`.
    pub transposed_name: bool,
}

/// Low-rank branch of SVDQuant: `y = W (x * p) + B (A (x * p))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SvdBranch {
    /// A, `[rank, K]`.
    pub a: usize,
    /// B, `[N, rank]`.
    pub b: usize,
}

/// A quantised weight with everything that belongs to it. Tensors are indices into [`Checkpoint::tensors`].
#[derive(Clone, Debug)]
pub struct ResolvedWeight {
    /// Name that the unquantised checkpoint would use (`model.layers.0.mlp.up_proj.weight`).
    pub name: String,
    /// Module path: the name without `.weight`.
    pub module: String,
    /// Encoding.
    pub encoding: SourceEncoding,
    /// N and K of the weight, or of one expert.
    pub shape: [u64; 2],
    /// Set where the tensors hold all experts of a layer.
    pub stack: Option<Stack>,
    /// Codes.
    pub weight: usize,
    /// Block, channel or tensor scales.
    pub scale: usize,
    /// The one f32 of NVFP4.
    pub global: Option<usize>,
    /// Zero points.
    pub zeros: Option<usize>,
    /// Group of every column (GPTQ); known to be the plain order.
    pub g_idx: Option<usize>,
    /// Factor of every input column, `[K]`: `y = W (x * p)`.
    pub pre_quant_scale: Option<usize>,
    /// Scale for quantising the activations, unused by weight-only kernels.
    pub input_scale: Option<usize>,
    /// Low-rank branch.
    pub svd: Option<SvdBranch>,
    /// Bias, a plain tensor.
    pub bias: Option<usize>,
    /// All values are zero, written as ModelOpt does: a global scale of 0 with NaN scales or codes.
    pub all_zero: bool,
}

impl ResolvedWeight {
    /// Experts in the tensors, 1 for an ordinary weight.
    pub fn experts(&self) -> u64 {
        self.stack.map_or(1, |s| s.experts)
    }

    /// The bytes of one of the weight's tensors that belong to an expert.
    pub fn expert_data<'a>(&self, checkpoint: &'a Checkpoint, tensor: usize, expert: u64) -> &'a [u8] {
        let tensor = &checkpoint.tensors[tensor];
        let data = checkpoint.data(tensor);
        // A tensor with one element per layer (a global scale) is shared by all of its experts.
        if self.stack.is_none() || tensor.shape.iter().product::<u64>() <= 1 {
            return data;
        }
        let len = data.len() / self.experts() as usize;
        &data[expert as usize * len..][..len]
    }
}

/// A tensor that the weights do not need: kept, so that the source can be restored, and named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Auxiliary {
    /// Index into [`Checkpoint::tensors`].
    pub tensor: usize,
    /// What it is.
    pub role: AuxiliaryRole,
}

/// Why a tensor is not needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuxiliaryRole {
    /// Scale for quantising activations.
    InputScale,
    /// The shape that packing hides (`weight_shape`).
    PackedShape,
    /// GPTQ's group of every column, in plain order.
    GroupIndex,
    /// A scale of FP8 attention other than the KV cache's (`q_scale`, `prob_output_scale`).
    AttentionScale,
    /// Offsets of an affine KV cache.
    KvOffset,
    /// State of the exporter's quantizers that leaked into the file.
    QuantizerState,
    /// A scale of a weight that is not quantised.
    Orphan,
}

/// Where the output projection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// A tensor of its own.
    Own,
    /// The embedding, shared.
    Tied,
    /// The architecture has none.
    None,
}

/// The role of every tensor. Each tensor of the checkpoint is in exactly one place.
#[derive(Debug)]
pub struct Resolution {
    /// Quantised weights in file order.
    pub weights: Vec<ResolvedWeight>,
    /// Tensors that stand for themselves, in file order: bf16, f16 and f32 weights, biases, norms, integers.
    pub plain: Vec<usize>,
    /// KV-cache scales.
    pub kv_scales: Vec<KvScale>,
    /// The rest.
    pub auxiliary: Vec<Auxiliary>,
    /// The output projection.
    pub head: Head,
    /// The algorithm that the configuration names, in its own words.
    pub declared: Option<String>,
    /// What the configuration says about the KV cache (`FP8`, `NVFP4`).
    pub kv_cache: Option<String>,
}

/// Choices of the user that bear on the roles of tensors.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResolveOptions {
    /// Take the embedding as the head where the configuration says they are not tied and the head is missing.
    pub tie_word_embeddings: bool,
}

/// Finds the role of every tensor.
///
/// # Errors
/// [`ResolveError`], naming the tensor, its file, what was found and what was expected.
pub fn resolve(
    checkpoint: &Checkpoint,
    options: ResolveOptions,
    warnings: &mut Vec<String>,
) -> Result<Resolution, ResolveError> {
    let config = QuantConfig::of(checkpoint, warnings)?;
    let mut table = Table::new(checkpoint);
    let mut weights = Vec::new();
    for tensor in 0..checkpoint.tensors.len() {
        if !table.used[tensor]
            && let Some(weight) = detect::quantised(&mut table, &config, tensor)?
        {
            weights.push(weight);
        }
    }
    refuse_twice(&table, &weights)?;
    compare(&config, &table, &weights, warnings);
    let kv_scales = kv::collect(&mut table, &config, warnings)?;
    let (plain, auxiliary) = leftovers(&table, warnings);
    let (declared, kv_cache) = (config.declared, config.kv_cache);
    let mut resolution = Resolution { weights, plain, kv_scales, auxiliary, head: Head::None, declared, kv_cache };
    resolution.head = head(checkpoint, &resolution, options, warnings)?;
    Ok(resolution)
}

/// The tensors by name, and which of them have found their place.
pub(crate) struct Table<'a> {
    pub checkpoint: &'a Checkpoint,
    by_name: HashMap<&'a str, usize>,
    used: Vec<bool>,
}

impl<'a> Table<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        let by_name = checkpoint.tensors.iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
        Table { checkpoint, by_name, used: vec![false; checkpoint.tensors.len()] }
    }

    /// The tensor of that name, not marked.
    fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The tensor of that name, marked as used.
    fn take(&mut self, name: &str) -> Option<usize> {
        let tensor = self.find(name)?;
        self.used[tensor] = true;
        Some(tensor)
    }

    fn tensor(&self, index: usize) -> &'a SourceTensor {
        &self.checkpoint.tensors[index]
    }

    fn dtype(&self, index: usize) -> PlainDtype {
        match self.tensor(index).dtype {
            SourceDtype::Plain(dtype) => dtype,
            // No safetensors file has ggml types; an unsigned byte is what their blocks are made of.
            SourceDtype::Ggml(_) => PlainDtype::U8,
        }
    }

    fn file(&self, index: usize) -> String {
        self.checkpoint.files[self.tensor(index).file].name.clone()
    }
}

/// Refuses weights that are in the file in two encodings, or quantised and plain.
fn refuse_twice(table: &Table<'_>, weights: &[ResolvedWeight]) -> Result<(), ResolveError> {
    let mut seen: HashMap<&str, usize> = HashMap::with_capacity(weights.len());
    for w in weights {
        let plain = table.find(&w.name).filter(|&i| !table.used[i]);
        if let Some(first) = seen.insert(&w.name, w.weight).or(plain) {
            return Err(ResolveError::Twice {
                weight: w.name.clone(),
                first: table.tensor(first).name.clone(),
                second: table.tensor(w.weight).name.clone(),
            });
        }
    }
    Ok(())
}

/// Says once per kind where configuration and tensors disagree.
fn compare(config: &QuantConfig, table: &Table<'_>, weights: &[ResolvedWeight], warnings: &mut Vec<String>) {
    // (claim, found) -> first module and how many.
    let mut kinds: BTreeMap<(String, String), (String, usize)> = BTreeMap::new();
    let mut note = |claimed: String, found: String, module: &str| {
        kinds.entry((claimed, found)).or_insert_with(|| (module.to_owned(), 0)).1 += 1;
    };
    for w in weights {
        let found = Scheme::of(&w.encoding);
        match config.claim(&w.module) {
            Claim::Unquantised => note("not quantised".into(), found.to_string(), &w.module),
            Claim::Listed(claimed) | Claim::Default(claimed) if !claimed.agrees(found) => {
                note(claimed.to_string(), found.to_string(), &w.module);
            }
            _ => {}
        }
    }
    for t in table.checkpoint.tensors.iter().filter(|t| t.shape.len() == 2) {
        // Only a layer named by its own path binds: a statement about the whole model leaves out norms, embeddings
        // and routers without saying so.
        if let Some(module) = t.name.strip_suffix(".weight")
            && let SourceDtype::Plain(dtype @ (PlainDtype::Bf16 | PlainDtype::F16 | PlainDtype::F32)) = t.dtype
            && let Claim::Listed(claimed) = config.claim(module)
        {
            note(claimed.to_string(), dtype.name().into(), module);
        }
    }
    for ((claimed, found), (module, count)) in kinds {
        let more = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
        warnings.push(format!(
            "{} says {claimed} for {module}{more}, but the file holds {found}; the file decides",
            config.file()
        ));
    }
}

/// Sorts what no weight has claimed.
fn leftovers(table: &Table<'_>, warnings: &mut Vec<String>) -> (Vec<usize>, Vec<Auxiliary>) {
    let (mut plain, mut auxiliary) = (Vec::new(), Vec::new());
    let mut orphans = Vec::new();
    for (tensor, t) in table.checkpoint.tensors.iter().enumerate() {
        if table.used[tensor] {
            continue;
        }
        let last = t.name.rsplit('.').next().unwrap_or_default();
        let role = match last {
            "input_scale" | "input_global_scale" | "input_scale_inv" | "activation_scale" | "input_zero_point" => {
                Some(AuxiliaryRole::InputScale)
            }
            "q_scale" | "prob_scale" | "prob_output_scale" | "attn_scale" => Some(AuxiliaryRole::AttentionScale),
            "k_bias" | "v_bias" => Some(AuxiliaryRole::KvOffset),
            "weight_scale"
            | "weight_scale_2"
            | "weight_scale_inv"
            | "weight_global_scale"
            | "weight_zero_point"
            | "pre_quant_scale"
            | "scale_weight"
            | "qzeros"
            | "g_idx"
            | "weight_g_idx"
            | "weight_shape" => {
                orphans.push(t.name.as_str());
                Some(AuxiliaryRole::Orphan)
            }
            _ if t.name.contains("_quantizer.") => Some(AuxiliaryRole::QuantizerState),
            _ if last.ends_with("_input_scale") => Some(AuxiliaryRole::InputScale),
            _ => None,
        };
        match role {
            Some(role) => auxiliary.push(Auxiliary { tensor, role }),
            None => plain.push(tensor),
        }
    }
    if let Some(first) = orphans.first() {
        warnings.push(format!(
            "scales that belong to no quantised weight: {} (the first is {first}); they are kept but not used",
            orphans.len()
        ));
    }
    (plain, auxiliary)
}

/// Model types whose configuration class ties the embeddings unless told otherwise.
const TIED_BY_DEFAULT: [&str; 9] =
    ["gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "cohere", "cohere2", "smollm3"];

/// Decides what the output projection is, and that its width is the model's.
fn head(
    checkpoint: &Checkpoint,
    resolution: &Resolution,
    options: ResolveOptions,
    warnings: &mut Vec<String>,
) -> Result<Head, ResolveError> {
    let config = &checkpoint.config;
    let field = |key: &str| match config.get(key) {
        None | Some(Value::Null) => config.get("text_config").and_then(|t| t.get(key)),
        value => value,
    };
    let is_head = |name: &str| name == "lm_head.weight" || name.ends_with(".lm_head.weight");
    let own =
        resolution.weights.iter().find(|w| is_head(&w.name)).map(|w| (w.name.as_str(), w.weight, w.shape)).or_else(
            || {
                let t = resolution.plain.iter().find(|&&i| is_head(&checkpoint.tensors[i].name))?;
                let tensor = &checkpoint.tensors[*t];
                let [n, k] = tensor.shape[..] else { return None };
                Some((tensor.name.as_str(), *t, [n, k]))
            },
        );
    let tied = field("tie_word_embeddings").and_then(Value::as_bool).unwrap_or_else(|| {
        let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default();
        TIED_BY_DEFAULT.contains(&model_type)
    });
    if let Some((name, tensor, shape)) = own {
        if let Some(hidden) = field("hidden_size").and_then(Value::as_u64)
            && hidden != shape[1]
        {
            return Err(ResolveError::HeadWidth {
                file: checkpoint.files[checkpoint.tensors[tensor].file].name.clone(),
                tensor: name.into(),
                found: shape[1],
                hidden_size: hidden,
            });
        }
        if tied {
            warnings.push(format!("tie_word_embeddings is true but {name} is in the file; the file decides"));
        }
        return Ok(Head::Own);
    }
    let generates = config
        .get("architectures")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .any(|a| a.as_str().is_some_and(|a| a.ends_with("ForCausalLM") || a.ends_with("ForConditionalGeneration")));
    if tied {
        return Ok(Head::Tied);
    }
    if options.tie_word_embeddings {
        warnings.push("lm_head.weight is missing and the embedding is used in its place, as asked for".into());
        return Ok(Head::Tied);
    }
    let is_embedding = |name: &str| name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight");
    let has_embedding = resolution.plain.iter().any(|&i| is_embedding(&checkpoint.tensors[i].name))
        || resolution.weights.iter().any(|w| is_embedding(&w.name));
    if generates && has_embedding {
        return Err(ResolveError::HeadMissing { stated: field("tie_word_embeddings").is_some() });
    }
    Ok(Head::None)
}

#[cfg(test)]
mod tests;
