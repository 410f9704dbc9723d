//! Which projections are stored as one matrix.

use super::{row_bytes, same_codec};
use crate::catalog::{Entry, Storage};

/// Sibling modules that read the same input and are stored as one matrix, in this order of rows.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fusion {
    /// Last component of each part's module path.
    pub parts: &'static [&'static str],
    /// Last component of the fused module path.
    pub fused: &'static str,
}

const ATTENTION: Fusion = Fusion { parts: &["q_proj", "k_proj", "v_proj"], fused: "qkv_proj" };
const GATED_MLP: Fusion = Fusion { parts: &["gate_proj", "up_proj"], fused: "gate_up_proj" };
/// Mixtral's names: `w1` is the gate, `w3` the up projection.
const MIXTRAL_MLP: Fusion = Fusion { parts: &["w1", "w3"], fused: "gate_up_proj" };

const USUAL: &[Fusion] = &[ATTENTION, GATED_MLP];

/// Architectures with a description, by `model_type`, and what is fused in them.
const ARCHITECTURES: &[(&[&str], &[Fusion])] = &[
    (
        &[
            "llama",
            "mistral",
            "mistral3",
            "ministral",
            "ministral3",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_5",
            "qwen3_5_text",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "gemma3",
            "gemma3_text",
            "gpt_oss",
            "deepseek_v2",
            "deepseek_v3",
            "glm4",
            "glm4_moe",
        ],
        USUAL,
    ),
    (&["mixtral"], &[ATTENTION, MIXTRAL_MLP]),
    // Fused in the checkpoint already, or without gated projections.
    (&["phi3", "nemotron_h"], &[ATTENTION]),
];

/// The fusions of an architecture; empty if it has no description.
pub(super) fn fusions(architecture: &str) -> &'static [Fusion] {
    ARCHITECTURES.iter().find(|(names, _)| names.contains(&architecture)).map_or(&[], |(_, fusions)| fusions)
}

/// `a.b.c.weight` as (`a.b`, `c`), for names of weights.
pub(super) fn split_module(name: &str) -> Option<(&str, &str)> {
    name.strip_suffix(".weight")?.rsplit_once('.')
}

/// Whether entries can be one matrix without touching a stored bit: same storage, same K, same groups, same input.
pub(super) fn compatible(parts: &[&Entry]) -> bool {
    let Some((first, rest)) = parts.split_first() else { return false };
    // Smoothing and low-rank branches belong to one part's input; fused parts share theirs.
    let alone = |e: &Entry| e.pre_quant_scale.is_none() && e.low_rank.is_none();
    alone(first) && rest.iter().all(|e| alone(e) && e.cold == first.cold && same_storage(&first.storage, &e.storage))
}

pub(super) fn same_storage(a: &Storage, b: &Storage) -> bool {
    match (a, b) {
        (Storage::Rows { dtype: d, shape: s, .. }, Storage::Rows { dtype: e, shape: t, .. }) => {
            d == e && s.len() == 2 && t.len() == 2 && s[1] == t[1] && s[0] > 0 && t[0] > 0
        }
        (Storage::Raw { id, shape: s, .. }, Storage::Raw { id: other, shape: t, .. }) => {
            id == other && s.len() == 2 && t.len() == 2 && row_bytes(a) == row_bytes(b)
        }
        (Storage::Tiled { codec: c, shape: s, .. }, Storage::Tiled { codec: d, shape: t, .. }) => {
            same_codec(*c, *d) && (s.k, s.group_size, s.block) == (t.k, t.group_size, t.block)
        }
        _ => false,
    }
}
