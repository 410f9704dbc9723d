//! The architecture of a model as data: what its configuration says, in the terms that a forward pass needs.
//!
//! A family (`family.rs`) is a row of a table, not a type: Llama, Mistral, Qwen and Gemma differ in which norms there are,
//! which projections have biases, how the embedding is scaled and how layers alternate. Everything that a configuration
//! can get wrong is found here, before a byte of the weights is touched.

mod family;
mod reader;
mod rope;

pub use family::{Activation, MoeNames};
pub use rope::Rope;

use family::Family;
use reader::ConfigReader;
use serde_json::Value;
use vt_bundle::manifest::Model;

/// Convention of a manifest by which stored norm weights already are `1 + w`.
pub const NORM_STORES_ONE_PLUS_W: &str = "norm-stores-1-plus-w";

/// Why a configuration cannot be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The architecture is not one of the table.
    #[error(
        "architecture {found:?} cannot be run by this version, which runs {}; `vt-bundle export` and `restore` still work on it",
        known.join(", ")
    )]
    Architecture {
        /// `model_type` of the configuration.
        found: String,
        /// What can be run.
        known: Vec<&'static str>,
    },
    /// A key has a value that this version has no code for.
    #[error("{architecture}: configuration key {key:?} is {found}, this version runs {expected}")]
    Unsupported {
        /// `model_type`.
        architecture: String,
        /// Key of the configuration.
        key: String,
        /// Its value.
        found: String,
        /// What can be run.
        expected: String,
    },
    /// A key is missing, or not what it has to be.
    #[error("{architecture}: configuration key {key:?} is {found}, expected {expected}")]
    Key {
        /// `model_type`.
        architecture: String,
        /// Key of the configuration.
        key: String,
        /// Its value, or `missing`.
        found: String,
        /// What it has to be.
        expected: String,
    },
}

/// A transformer decoder, in numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `model_type`.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Width of a dense layer's feed-forward network.
    pub intermediate_size: usize,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f32,
    /// Added to every stored norm weight: 1 where the family multiplies by `1 + w` and the bundle stores `w`.
    pub norm_offset: f32,
    /// Longest sequence that the configuration speaks of.
    pub max_positions: usize,
    /// The head is the embedding.
    pub tie_word_embeddings: bool,
    /// Queries and keys are normalised per head before they are rotated.
    pub qk_norm: bool,
    /// The outputs of attention and feed-forward are normalised before they are added to the residual stream.
    pub post_norms: bool,
    /// `q_proj`, `k_proj` and `v_proj` have biases.
    pub qkv_bias: bool,
    /// `o_proj` has a bias.
    pub output_bias: bool,
    /// The feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Gate activation.
    pub activation: Activation,
    /// Multiplies embedding rows.
    pub embedding_scale: f32,
    /// Multiplies query-key products.
    pub attention_scale: f32,
    /// `cap * tanh(score / cap)` on query-key products.
    pub attention_softcap: Option<f32>,
    /// `cap * tanh(logit / cap)` on the logits.
    pub final_logit_softcap: Option<f32>,
    /// Layers, in order.
    pub layers: Vec<LayerConfig>,
    /// Rotary embeddings that the layers refer to.
    pub ropes: Vec<Rope>,
    /// Routed experts, if any layer has them.
    pub moe: Option<MoeConfig>,
}

/// What can differ from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Positions that attention sees, the present one included; all where `None`.
    pub window: Option<usize>,
    /// Index into [`ModelConfig::ropes`].
    pub rope: usize,
    /// The feed-forward network is a mixture of experts.
    pub moe: bool,
}

/// Routed experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Width of an expert.
    pub intermediate_size: usize,
    /// The weights of the chosen experts are divided by their sum.
    pub normalize_weights: bool,
    /// Names of the tensors.
    pub names: MoeNames,
}

impl ModelConfig {
    /// Reads the configuration of a manifest.
    ///
    /// # Errors
    /// [`ConfigError`] naming the architecture, the key, what was found and what can be run.
    pub fn from_manifest(model: &Model) -> Result<Self, ConfigError> {
        let Some(family) = Family::find(&model.architecture) else {
            return Err(ConfigError::Architecture { found: model.architecture.clone(), known: Family::known() });
        };
        // Multimodal configurations keep the language model's own under `text_config`.
        let config = match model.config.get("text_config") {
            Some(text @ Value::Object(_)) => text,
            _ => &model.config,
        };
        let stores_one_plus_w = model.conventions.iter().any(|c| c == NORM_STORES_ONE_PLUS_W);
        Self::build(family, ConfigReader::new(&model.architecture, config), stores_one_plus_w)
    }

    fn build(family: &Family, read: ConfigReader<'_>, stores_one_plus_w: bool) -> Result<Self, ConfigError> {
        let hidden_size = read.size("hidden_size")?;
        let num_heads = read.size("num_attention_heads")?;
        let num_kv_heads = read.optional_size("num_key_value_heads")?.unwrap_or(num_heads);
        let head_dim = match read.optional_size("head_dim")? {
            Some(d) => d,
            None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            None => return Err(read.wrong("head_dim", "a number, as hidden_size is not a multiple of the heads")),
        };
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(read.wrong("num_key_value_heads", &format!("a divisor of the {num_heads} heads")));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(read.wrong("head_dim", "an even number, as halves of a head are rotated"));
        }
        let num_layers = read.size("num_hidden_layers")?;
        let max_positions = read.optional_size("max_position_embeddings")?.unwrap_or(family.default_positions);
        let moe = family.moe.map(|names| MoeConfig::read(&read, names)).transpose()?;
        let (ropes, kinds) = rope::read(&read, family, head_dim, max_positions)?;
        let layers = family.layers(&read, num_layers, &kinds, moe.is_some())?;
        let activation_key = if read.has("hidden_activation") { "hidden_activation" } else { "hidden_act" };
        let activation = match read.optional_text(activation_key)? {
            None => family.default_activation,
            Some(name) => Activation::find(name)
                .ok_or_else(|| read.unsupported(activation_key, "silu, swish, gelu_pytorch_tanh and gelu_tanh"))?,
        };
        if read.flag("use_bidirectional_attention", false)? {
            return Err(read.unsupported("use_bidirectional_attention", "models without it"));
        }
        let attention_scalar = match family.query_scalar_key {
            Some(key) => read.optional_positive(key)?.unwrap_or(head_dim as f64),
            None => head_dim as f64,
        };
        let attention_bias = read.flag("attention_bias", false)?;
        Ok(Self {
            architecture: read.architecture().to_owned(),
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            intermediate_size: match read.optional_size("intermediate_size")? {
                Some(size) => size,
                None if layers.iter().all(|l| l.moe) => 0,
                None => return Err(read.wrong("intermediate_size", "a positive number")),
            },
            vocab_size: read.size("vocab_size")?,
            rms_norm_eps: read.optional_positive("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            norm_offset: if family.norm_adds_one && !stores_one_plus_w { 1.0 } else { 0.0 },
            max_positions,
            tie_word_embeddings: read.flag("tie_word_embeddings", family.tied_by_default)?,
            qk_norm: family.qk_norm,
            post_norms: family.post_norms,
            qkv_bias: attention_bias || family.qkv_bias,
            output_bias: attention_bias,
            mlp_bias: read.flag("mlp_bias", false)?,
            activation,
            // Gemma rounds the scale to the type of the embedding; in f32 it is the plain root.
            embedding_scale: if family.scales_embedding { (hidden_size as f32).sqrt() } else { 1.0 },
            attention_scale: (1.0 / attention_scalar.sqrt()) as f32,
            attention_softcap: read.optional_positive("attn_logit_softcapping")?.map(|cap| cap as f32),
            final_logit_softcap: read.optional_positive("final_logit_softcapping")?.map(|cap| cap as f32),
            layers,
            ropes,
            moe,
        })
    }

    /// Rows of the query projection.
    pub fn query_rows(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Rows of the key projection, and of the value projection.
    pub fn kv_rows(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

impl MoeConfig {
    fn read(read: &ConfigReader<'_>, names: MoeNames) -> Result<Self, ConfigError> {
        let count_key = if read.has("num_experts") { "num_experts" } else { "num_local_experts" };
        let num_experts = read.size(count_key)?;
        let top_k = read.size("num_experts_per_tok")?;
        if top_k > num_experts {
            return Err(read.wrong("num_experts_per_tok", &format!("at most the {num_experts} experts")));
        }
        let width_key = if read.has("moe_intermediate_size") { "moe_intermediate_size" } else { "intermediate_size" };
        Ok(Self {
            num_experts,
            top_k,
            intermediate_size: read.size(width_key)?,
            normalize_weights: read.flag("norm_topk_prob", names.normalizes_by_default)?,
            names,
        })
    }
}

#[cfg(test)]
mod tests;
