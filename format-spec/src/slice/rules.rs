//! Which tensors are cut, along which axis, and in which units.

use serde::Serialize;
use serde_json::Value;

use crate::geometry::Geometry;
use crate::manifest::{Part, Tensor};
use crate::tile::TILE_N;

/// Axis along which a tensor is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// Not at all: every rank has all of it.
    Replicated,
    /// Along N.
    Rows,
    /// Along K.
    Columns,
}

/// A run of rows (or, cut along K, of columns) of one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Section {
    /// Index of the part.
    pub part: usize,
    /// First row within the part, or first column.
    pub start: u64,
    /// Rows or columns.
    pub len: u64,
}

/// Attention heads of a model, as far as its configuration tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub query: Option<u64>,
    /// Key and value heads.
    pub key_value: Option<u64>,
}

impl Heads {
    /// The heads of a configuration in Hugging Face form.
    pub fn of(config: &Value) -> Self {
        let text = config.get("text_config").unwrap_or(config);
        let number = |key: &str| text.get(key).and_then(Value::as_u64).filter(|&n| n > 0);
        let query = number("num_attention_heads");
        Self { query, key_value: number("num_key_value_heads").or(query) }
    }
}

/// A degree that a bundle does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SliceError {
    /// Degree 0.
    #[error("a tensor-parallel degree of 0 has no ranks")]
    Degree,
    /// Heads are not whole.
    #[error("tensor {tensor}: {heads} {kind} heads cannot be divided over {degree} ranks")]
    Heads {
        /// The tensor.
        tensor: String,
        /// What kind of heads.
        kind: &'static str,
        /// How many there are.
        heads: u64,
        /// The degree asked for.
        degree: u64,
    },
    /// An axis is not a whole number of units per rank.
    #[error(
        "tensor {tensor}: {extent} {axis} over {degree} ranks are {} each, which is not whole {unit}s of {unit_size}",
        share(*extent, *degree)
    )]
    Axis {
        /// The tensor.
        tensor: String,
        /// `rows` or `columns`.
        axis: &'static str,
        /// Extent of the part along the axis.
        extent: u64,
        /// The degree asked for.
        degree: u64,
        /// What has to stay whole.
        unit: &'static str,
        /// Its size along the axis.
        unit_size: u64,
    },
}

/// An extent per rank, to two places where it is not whole.
fn share(extent: u64, degree: u64) -> String {
    if extent.is_multiple_of(degree) {
        (extent / degree).to_string()
    } else {
        format!("{:.2}", extent as f64 / degree as f64)
    }
}

/// Modules whose outputs are divided, by the last component of their path.
const COLUMN_PARALLEL: &[&str] = &[
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "w1",
    "w3",
    "q_b_proj",
    "kv_b_proj",
];
/// Modules that read a divided input.
const ROW_PARALLEL: &[&str] = &["o_proj", "down_proj", "w2"];
/// Modules divided by the vocabulary, where it can be.
const VOCABULARY: &[&str] = &["embed_tokens", "lm_head"];

/// `a.b.q_proj.weight` as (`q_proj`, `weight`); what follows the module's name is its parameter.
fn module(name: &str) -> Option<(&str, &str)> {
    let known = |c: &str| [COLUMN_PARALLEL, ROW_PARALLEL, VOCABULARY].iter().any(|list| list.contains(&c));
    let mut at = 0;
    let mut found = None;
    for component in name.split('.') {
        let end = at + component.len();
        if known(component) {
            found = Some((component, name.get(end + 1..).unwrap_or("")));
        }
        at = end + 1;
    }
    found
}

/// How a tensor is cut.
pub(super) fn split(tensor: &Tensor, geometry: &Geometry, degree: u64) -> Split {
    let name = tensor.parts.first().map_or(tensor.name.as_str(), |p| p.name.as_str());
    if name.ends_with("self_attn.sinks") {
        return Split::Rows;
    }
    let Some((module, parameter)) = module(name) else { return Split::Replicated };
    // A low-rank branch: `down` reads the input, `up` gives the output.
    let (reads_input, gives_output) = (parameter.ends_with("lora_a"), parameter.ends_with("lora_b"));
    if VOCABULARY.contains(&module) {
        let unit = if matches!(geometry, Geometry::Tiled(_)) { TILE_N as u64 } else { 1 };
        let whole =
            tensor.parts.iter().all(|p| p.rows.is_multiple_of(degree) && (p.rows / degree).is_multiple_of(unit));
        return if whole { Split::Rows } else { Split::Replicated };
    }
    let one_axis = tensor.shape.len() < 2;
    if COLUMN_PARALLEL.contains(&module) {
        return if reads_input || parameter == "pre_quant_scale" { Split::Replicated } else { Split::Rows };
    }
    match parameter {
        // The bias is added once, after the sum over ranks.
        "bias" => Split::Replicated,
        // `[K]`: its only axis is the divided one.
        "pre_quant_scale" if one_axis => Split::Rows,
        _ if gives_output || one_axis => Split::Replicated,
        _ => Split::Columns,
    }
}

/// One rank's rows or columns of every part.
pub(super) fn sections(
    tensor: &Tensor,
    architecture: &str,
    split: Split,
    heads: &Heads,
    degree: u64,
    rank: u64,
) -> Result<Vec<Section>, SliceError> {
    let mut sections = Vec::new();
    for (index, part) in tensor.parts.iter().enumerate() {
        let extent = match split {
            Split::Columns => tensor.shape.iter().skip(1).product(),
            _ => part.rows,
        };
        if split == Split::Replicated {
            sections.push(Section { part: index, start: 0, len: extent });
            continue;
        }
        let mut start = 0;
        for (len, kind) in pieces(part, extent, architecture, heads) {
            let (first, taken) = divide(tensor, kind, heads, len, split, degree, rank)?;
            sections.push(Section { part: index, start: start + first, len: taken });
            start += len;
        }
    }
    Ok(sections)
}

/// What the rows of a piece are made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    QueryHeads,
    KeyValueHeads,
    Plain,
}

/// The runs of a part that are divided each for itself: one, unless the checkpoint has fused projections in one tensor.
fn pieces(part: &Part, extent: u64, architecture: &str, heads: &Heads) -> Vec<(u64, Kind)> {
    let attention = part.name.contains("attn");
    match module(&part.name).map(|(module, _)| module) {
        Some("qkv_proj") => {
            if let (Some(q), Some(kv)) = (heads.query, heads.key_value)
                && extent.is_multiple_of(q + 2 * kv)
            {
                let head = extent / (q + 2 * kv);
                return vec![
                    (q * head, Kind::QueryHeads),
                    (kv * head, Kind::KeyValueHeads),
                    (kv * head, Kind::KeyValueHeads),
                ];
            }
            vec![(extent, Kind::Plain)]
        }
        // gpt-oss interleaves gate and up, so that any run of rows holds pairs.
        Some("gate_up_proj") if architecture != "gpt_oss" && extent.is_multiple_of(2) => {
            vec![(extent / 2, Kind::Plain), (extent / 2, Kind::Plain)]
        }
        Some("k_proj" | "v_proj") if attention => vec![(extent, Kind::KeyValueHeads)],
        Some("q_proj" | "q_b_proj" | "kv_b_proj" | "o_proj") if attention => vec![(extent, Kind::QueryHeads)],
        _ if part.name.ends_with("self_attn.sinks") => vec![(extent, Kind::QueryHeads)],
        _ => vec![(extent, Kind::Plain)],
    }
}

/// First unit and length of one rank's share of a piece.
fn divide(
    tensor: &Tensor,
    kind: Kind,
    heads: &Heads,
    extent: u64,
    split: Split,
    degree: u64,
    rank: u64,
) -> Result<(u64, u64), SliceError> {
    let (count, name) = match kind {
        Kind::QueryHeads => (heads.query, "query"),
        Kind::KeyValueHeads => (heads.key_value, "key and value"),
        Kind::Plain => (None, ""),
    };
    if let Some(count) = count {
        let refuse = || SliceError::Heads { tensor: tensor.name.clone(), kind: name, heads: count, degree };
        if kind == Kind::KeyValueHeads && degree > count && degree.is_multiple_of(count) && extent.is_multiple_of(count)
        {
            // More ranks than heads: several ranks have the same one.
            let head = extent / count;
            return Ok((rank * count / degree * head, head));
        }
        if !count.is_multiple_of(degree) || !extent.is_multiple_of(count) {
            return Err(refuse());
        }
    }
    if !extent.is_multiple_of(degree) {
        return Err(SliceError::Axis {
            tensor: tensor.name.clone(),
            axis: if split == Split::Columns { "columns" } else { "rows" },
            extent,
            degree,
            unit: "element",
            unit_size: 1,
        });
    }
    Ok((rank * (extent / degree), extent / degree))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_found_in_names() {
        assert_eq!(module("model.layers.0.self_attn.q_proj.weight"), Some(("q_proj", "weight")));
        let lora = "m.mlp.down_proj.weight_quantizer._svdquant_lora_a";
        assert_eq!(module(lora), Some(("down_proj", "weight_quantizer._svdquant_lora_a")));
        assert_eq!(module("model.layers.0.mlp.gate.weight"), None);
        assert_eq!(module("model.layers.0.linear_attn.in_proj_qkvz.weight"), None);
    }

    #[test]
    fn heads_come_from_the_text_model() {
        let config = serde_json::json!({ "text_config": { "num_attention_heads": 8, "num_key_value_heads": 2 } });
        assert_eq!(Heads::of(&config), Heads { query: Some(8), key_value: Some(2) });
        assert_eq!(Heads::of(&serde_json::json!({})), Heads::default());
    }
}
