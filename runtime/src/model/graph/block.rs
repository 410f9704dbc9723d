//! One layer of the network.

use super::GraphError;
use super::parts::{Projection, Resolver, Spacing};
use super::weights::VectorRef;
use crate::model::config::{LayerConfig, ModelConfig, MoeConfig};

/// A decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// Norm before attention, `[hidden]`.
    pub input_norm: VectorRef,
    /// Attention.
    pub attention: Attention,
    /// Norm of attention's output, `[hidden]`, where the family has one.
    pub post_attention_norm: Option<VectorRef>,
    /// Norm before the feed-forward network, `[hidden]`.
    pub feed_forward_norm: VectorRef,
    /// The feed-forward network.
    pub feed_forward: FeedForward,
    /// Norm of its output, `[hidden]`, where the family has one.
    pub post_feed_forward_norm: Option<VectorRef>,
}

/// Attention of one layer.
#[derive(Debug)]
pub struct Attention {
    /// Query, key, value.
    pub qkv: Projection,
    /// Norm of each query head, `[head_dim]`.
    pub q_norm: Option<VectorRef>,
    /// Norm of each key head, `[head_dim]`.
    pub k_norm: Option<VectorRef>,
    /// Output projection.
    pub output: Projection,
}

/// Feed-forward network of one layer.
#[derive(Debug)]
pub enum FeedForward {
    /// One network for all tokens.
    Dense(GatedMlp),
    /// Routed experts.
    Experts(Experts),
}

/// `down (act(gate x) * up x)`.
#[derive(Debug)]
pub struct GatedMlp {
    /// Gate and up.
    pub gate_up: Projection,
    /// Down.
    pub down: Projection,
}

/// A mixture of experts.
#[derive(Debug)]
pub struct Experts {
    /// Scores, `[experts, hidden]`.
    pub router: Projection,
    /// One network per expert.
    pub experts: Vec<GatedMlp>,
}

pub(super) fn layer(
    resolver: &mut Resolver<'_>,
    config: &ModelConfig,
    index: usize,
    layer: &LayerConfig,
) -> Result<Layer, GraphError> {
    let at = format!("model.layers.{index}");
    let hidden = config.hidden_size;
    let norm = |resolver: &mut Resolver<'_>, name: &str| resolver.vector(&format!("{at}.{name}.weight"), hidden);
    let input_norm = norm(resolver, "input_layernorm")?;
    let (q, kv) = (config.query_rows(), config.kv_rows());
    let modules = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)].map(|(m, n)| (format!("{at}.self_attn.{m}"), n));
    let mut qkv = resolver.projection(&modules, hidden, config.qkv_bias, Spacing::Padded)?;
    let output = (format!("{at}.self_attn.o_proj"), hidden);
    let output = resolver.projection(&[output], q, config.output_bias, Spacing::Dense)?;
    // Keys and values stay in the cache, where their errors reach every later token, and an error of a score moves weight
    // from one position to another. What errors of the other projections do to a token that is only context is small.
    qkv.paired = true;
    let head_norm = |resolver: &mut Resolver<'_>, name: &str| {
        let name = format!("{at}.self_attn.{name}.weight");
        config.qk_norm.then(|| resolver.vector(&name, config.head_dim)).transpose()
    };
    let attention =
        Attention { qkv, q_norm: head_norm(resolver, "q_norm")?, k_norm: head_norm(resolver, "k_norm")?, output };
    // Where attention's output has a norm of its own, `post_attention_layernorm` is that one.
    let (post_attention, before_mlp) = match config.post_norms {
        true => (Some("post_attention_layernorm"), "pre_feedforward_layernorm"),
        false => (None, "post_attention_layernorm"),
    };
    let post_attention_norm = post_attention.map(|name| norm(resolver, name)).transpose()?;
    let feed_forward_norm = norm(resolver, before_mlp)?;
    let post_mlp = config.post_norms.then_some("post_feedforward_layernorm");
    let post_feed_forward_norm = post_mlp.map(|name| norm(resolver, name)).transpose()?;
    let feed_forward = match config.moe.as_ref().filter(|_| layer.moe) {
        Some(moe) => FeedForward::Experts(experts(resolver, moe, &at, hidden)?),
        None => {
            let names = ["gate_proj", "up_proj", "down_proj"].map(|m| format!("{at}.mlp.{m}"));
            FeedForward::Dense(gated_mlp(resolver, names, hidden, config.intermediate_size, config.mlp_bias)?)
        }
    };
    Ok(Layer { input_norm, attention, post_attention_norm, feed_forward_norm, feed_forward, post_feed_forward_norm })
}

fn gated_mlp(
    resolver: &mut Resolver<'_>,
    [gate, up, down]: [String; 3],
    hidden: usize,
    width: usize,
    bias: bool,
) -> Result<GatedMlp, GraphError> {
    let gate_up = resolver.projection(&[(gate, width), (up, width)], hidden, bias, Spacing::Padded)?;
    let down = resolver.projection(&[(down, hidden)], width, bias, Spacing::Dense)?;
    Ok(GatedMlp { gate_up, down })
}

fn experts(resolver: &mut Resolver<'_>, moe: &MoeConfig, at: &str, hidden: usize) -> Result<Experts, GraphError> {
    let router = (format!("{at}.{}", moe.names.router), moe.num_experts);
    let router = resolver.projection(&[router], hidden, false, Spacing::Padded)?;
    let experts = (0..moe.num_experts).map(|e| {
        let names = moe.names.projections.map(|p| format!("{at}.{}.{e}.{p}", moe.names.experts));
        gated_mlp(resolver, names, hidden, moe.intermediate_size, false)
    });
    Ok(Experts { router, experts: experts.collect::<Result<_, _>>()? })
}
