//! From GGUF's tensor names to Hugging Face's, per architecture, as tables.
//!
//! A name is `blk.<layer>.<stem>[.<suffix>]` or `<stem>[.<suffix>]`; the suffix (`weight`, `bias`, `scale`, `input_scale`) is kept.
//! Stems are looked up in the tables of the architecture, the most specific first. Source: `gguf-py` 0.19 `tensor_mapping.py` and
//! the converters of llama.cpp, read backwards.

use vt_bundle::row_order::RowOrder;

use super::architectures::{self, ARCHITECTURES};
use super::keys::ModelFacts;

/// How the rotary embedding pairs the rows of q and k in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeRows {
    /// As Hugging Face: row i with row i + d/2.
    Halves,
    /// llama.cpp's converter has moved row i + d/2 beside row i: undone here, on whole rows.
    Permuted,
    /// The model itself pairs neighbours: nothing to undo.
    Interleaved,
}

/// What a source architecture is called elsewhere, and how its tensors differ.
#[derive(Debug)]
pub struct Architecture {
    /// `general.architecture`.
    pub name: &'static str,
    /// `model_type` in a Hugging Face configuration.
    pub model_type: &'static str,
    /// Class in `architectures`.
    pub class: &'static str,
    /// Rows of q and k.
    pub rope: RopeRows,
    /// Tables of stems, the most specific first: (GGUF, Hugging Face). `{}` stands for the expert of a stacked tensor.
    pub stems: &'static [&'static [(&'static str, &'static str)]],
    /// Norm weights are stored as 1 + w.
    pub norm_plus_one: bool,
}

/// The architecture of that name; for an unknown one, a stand-in with the common names.
pub fn architecture(name: &str, experts: u64) -> &'static Architecture {
    // Mixtral files say `llama`.
    if name == "llama" && experts > 0 {
        return &architectures::MIXTRAL;
    }
    ARCHITECTURES.iter().find(|a| a.name == name).unwrap_or(&architectures::UNKNOWN)
}

/// Whether the architecture has a table of its own.
pub fn is_known(name: &str) -> bool {
    ARCHITECTURES.iter().any(|a| a.name == name)
}

/// A tensor's place in the Hugging Face model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedName {
    /// The name; for a stack of experts `{}` stands for the expert's number.
    pub name: String,
    /// The block, counted from 0, for a tensor of a block.
    pub layer: Option<u64>,
    /// How the rows of the bundle relate to those of the file.
    pub row_order: RowOrder,
    /// Holds one matrix (or bias) per expert, along the slowest axis.
    pub expert_stack: bool,
    /// Belongs to multi-token prediction, which the text model does not need.
    pub cold: bool,
    /// No table had it: the name is the file's.
    pub unknown: bool,
}

/// Suffixes that stay as they are. `scale` multiplies the output of the matrix product, `input_scale` is the activation scale.
const SUFFIXES: [&str; 4] = ["weight", "bias", "scale", "input_scale"];

/// The Hugging Face name of a GGUF tensor.
pub fn map_name(architecture: &Architecture, facts: &ModelFacts, name: &str) -> MappedName {
    let (layer, rest) = split_layer(name);
    let (stem, suffix) = match rest.rsplit_once('.') {
        Some((stem, suffix)) if SUFFIXES.contains(&suffix) => (stem, Some(suffix)),
        _ => (rest, None),
    };
    let layer = layer.filter(|l| *l < facts.blocks);
    let known = architecture.stems.iter().flat_map(|table| table.iter()).find(|(gguf, _)| {
        // Entries with a dot give the suffix as well, for names that do not keep it.
        *gguf == rest || *gguf == stem
    });
    let unknown = MappedName {
        name: name.into(),
        layer,
        row_order: RowOrder::Same,
        expert_stack: false,
        cold: false,
        unknown: true,
    };
    let Some((gguf, hf)) = known else { return unknown };
    let global = architectures::GLOBAL_STEMS.contains(gguf);
    if global != layer.is_none() {
        return unknown;
    }
    let mut full = match layer {
        Some(layer) => format!("model.layers.{layer}.{hf}"),
        None => (*hf).into(),
    };
    if let Some(suffix) = suffix
        && *gguf == stem
    {
        full.push('.');
        full.push_str(suffix);
    }
    let rotated = architecture.rope == RopeRows::Permuted && matches!(stem, "attn_q" | "attn_k");
    let head_dim = u32::try_from(facts.head_dim).unwrap_or(0);
    MappedName {
        name: full,
        layer,
        row_order: if rotated && matches!(suffix, Some("weight" | "bias")) {
            RowOrder::RopeInterleaved { head_dim }
        } else {
            RowOrder::Same
        },
        expert_stack: hf.contains("{}") && matches!(suffix, Some("weight" | "bias")),
        cold: layer.is_some_and(|l| l >= facts.blocks - facts.nextn),
        unknown: false,
    }
}

/// Cuts `blk.<layer>.` off the front.
fn split_layer(name: &str) -> (Option<u64>, &str) {
    let parts = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    match parts {
        // A number as a converter writes it: digits, no leading zero.
        Some((digits, rest))
            if digits.bytes().all(|b| b.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0')) =>
        {
            match digits.parse() {
                Ok(layer) => (Some(layer), rest),
                Err(_) => (None, name),
            }
        }
        _ => (None, name),
    }
}
