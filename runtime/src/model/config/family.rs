//! The table of architectures.

use super::reader::ConfigReader;
use super::{ConfigError, LayerConfig};

/// Activation of the gate in a gated feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

impl Activation {
    pub(super) fn find(name: &str) -> Option<Self> {
        match name {
            "silu" | "swish" => Some(Activation::Silu),
            "gelu_pytorch_tanh" | "gelu_tanh" => Some(Activation::GeluTanh),
            _ => None,
        }
    }
}

/// Names below `model.layers.N.` of a layer with routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoeNames {
    /// Path of the router, `[experts, hidden]`.
    pub router: &'static str,
    /// Prefix of the experts' projections.
    pub experts: &'static str,
    /// Gate, up and down projections of an expert.
    pub projections: [&'static str; 3],
    /// What `norm_topk_prob` is where the configuration does not say.
    pub(super) normalizes_by_default: bool,
}

/// How the layers of a family alternate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Windows {
    /// `sliding_window` holds for every layer.
    All,
    /// As `All`, but only where `use_sliding_window` is true and from layer `max_window_layers` on.
    Switched,
    /// Every `sliding_window_pattern`-th layer sees everything.
    Pattern,
    /// No windows.
    None,
}

/// One architecture.
#[derive(Debug)]
pub(super) struct Family {
    /// Values of `model_type`.
    names: &'static [&'static str],
    pub(super) qk_norm: bool,
    pub(super) post_norms: bool,
    /// The norm multiplies by `1 + w`.
    pub(super) norm_adds_one: bool,
    /// `q_proj`, `k_proj` and `v_proj` have biases whatever the configuration says.
    pub(super) qkv_bias: bool,
    pub(super) scales_embedding: bool,
    pub(super) tied_by_default: bool,
    pub(super) default_activation: Activation,
    /// Defaults of the family's configuration class in transformers 5.
    pub(super) default_positions: usize,
    pub(super) default_rope_theta: f64,
    /// Key of the number whose root divides query-key products; the width of a head where there is none.
    pub(super) query_scalar_key: Option<&'static str>,
    pub(super) moe: Option<MoeNames>,
    windows: Windows,
}

const LLAMA: Family = Family {
    names: &["llama"],
    qk_norm: false,
    post_norms: false,
    norm_adds_one: false,
    qkv_bias: false,
    scales_embedding: false,
    tied_by_default: false,
    default_activation: Activation::Silu,
    default_positions: 2048,
    default_rope_theta: 10_000.0,
    query_scalar_key: None,
    moe: None,
    windows: Windows::None,
};

const FAMILIES: &[Family] = &[
    LLAMA,
    Family { names: &["mistral"], default_positions: 131_072, windows: Windows::All, ..LLAMA },
    Family { names: &["qwen2"], qkv_bias: true, default_positions: 32_768, windows: Windows::Switched, ..LLAMA },
    Family { names: &["qwen3"], qk_norm: true, default_positions: 32_768, windows: Windows::Switched, ..LLAMA },
    Family {
        names: &["qwen3_moe"],
        qk_norm: true,
        default_positions: 32_768,
        windows: Windows::Switched,
        moe: Some(MoeNames {
            router: "mlp.gate",
            experts: "mlp.experts",
            projections: ["gate_proj", "up_proj", "down_proj"],
            normalizes_by_default: false,
        }),
        ..LLAMA
    },
    Family {
        names: &["mixtral"],
        default_positions: 131_072,
        default_rope_theta: 1_000_000.0,
        windows: Windows::All,
        moe: Some(MoeNames {
            router: "block_sparse_moe.gate",
            experts: "block_sparse_moe.experts",
            projections: ["w1", "w3", "w2"],
            normalizes_by_default: true,
        }),
        ..LLAMA
    },
    Family {
        names: &["gemma3_text", "gemma3"],
        qk_norm: true,
        post_norms: true,
        norm_adds_one: true,
        scales_embedding: true,
        tied_by_default: true,
        default_activation: Activation::GeluTanh,
        default_positions: 131_072,
        default_rope_theta: 1_000_000.0,
        query_scalar_key: Some("query_pre_attn_scalar"),
        windows: Windows::Pattern,
        ..LLAMA
    },
];

/// Rotary embedding of a layer, by its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RopeOfKind {
    /// Index for layers that see everything.
    pub(super) full: usize,
    /// Index for layers with a window.
    pub(super) sliding: usize,
}

impl Family {
    pub(super) fn find(model_type: &str) -> Option<&'static Family> {
        FAMILIES.iter().find(|f| f.names.contains(&model_type))
    }

    pub(super) fn known() -> Vec<&'static str> {
        FAMILIES.iter().flat_map(|f| f.names).copied().collect()
    }

    /// Describes the layers one by one.
    pub(super) fn layers(
        &self,
        read: &ConfigReader<'_>,
        count: usize,
        ropes: &RopeOfKind,
        has_experts: bool,
    ) -> Result<Vec<LayerConfig>, ConfigError> {
        let width = read.optional_size("sliding_window")?;
        let sliding = self.sliding_layers(read, count)?;
        if width.is_none() && sliding.contains(&true) {
            return Err(read.wrong("sliding_window", "a positive number, as some layers slide"));
        }
        let sparse_step = read.optional_size("decoder_sparse_step")?.unwrap_or(1);
        let dense_only = read.optional_list("mlp_only_layers")?.unwrap_or(&[]);
        Ok((0..count)
            .map(|i| LayerConfig {
                window: width.filter(|_| sliding[i]),
                rope: if sliding[i] { ropes.sliding } else { ropes.full },
                moe: has_experts
                    && (i + 1).is_multiple_of(sparse_step)
                    && !dense_only.iter().any(|l| l.as_u64() == Some(i as u64)),
            })
            .collect())
    }

    fn sliding_layers(&self, read: &ConfigReader<'_>, count: usize) -> Result<Vec<bool>, ConfigError> {
        if let Some(types) = read.optional_list("layer_types")? {
            if types.len() < count {
                return Err(read.wrong("layer_types", &format!("a list of {count}")));
            }
            return types[..count]
                .iter()
                .map(|kind| match kind.as_str() {
                    Some("full_attention") => Ok(false),
                    Some("sliding_attention") => Ok(true),
                    _ => Err(read.unsupported("layer_types", "full_attention and sliding_attention")),
                })
                .collect();
        }
        Ok(match self.windows {
            Windows::None => vec![false; count],
            Windows::All => vec![read.has("sliding_window"); count],
            Windows::Switched => {
                let on = read.flag("use_sliding_window", false)?;
                // Zero is a legal value here: every layer slides.
                let first = read.get("max_window_layers").and_then(|v| v.as_u64()).unwrap_or(u64::MAX);
                (0..count).map(|i| on && i as u64 >= first).collect()
            }
            Windows::Pattern => {
                let key = if read.has("sliding_window_pattern") {
                    "sliding_window_pattern"
                } else {
                    "_sliding_window_pattern"
                };
                let pattern = read.optional_size(key)?.unwrap_or(6);
                (0..count).map(|i| !(i + 1).is_multiple_of(pattern)).collect()
            }
        })
    }
}
