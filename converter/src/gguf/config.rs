//! The configuration in the form of a Hugging Face `config.json`, from the metadata and the names of the tensors.

use serde_json::{Map, Value as Json, json};

use super::error::GgufError;
use super::keys::{Keys, ModelFacts};
use super::names::{Architecture, RopeRows};
use super::value::Value;

/// What the configuration needs to know of the tensors, taken over all parts.
pub(crate) struct TensorFacts {
    /// Rows of the token embedding, 0 without one.
    pub(crate) vocab_rows: u64,
    /// There is an `output.weight`.
    pub(crate) has_output: bool,
    /// There are biases on q and on the output of attention.
    pub(crate) attention_bias: bool,
    /// There are biases in the MLP.
    pub(crate) mlp_bias: bool,
    /// There is a bias that only chooses experts.
    pub(crate) has_expert_bias: bool,
    /// Values of the rotary factor tensors, by name.
    pub(crate) rope_factors: Vec<(String, Vec<f32>)>,
}

/// Builds it.
///
/// # Errors
/// A key that is missing or cannot be.
pub(crate) fn build(
    keys: &Keys<'_, '_>,
    architecture: &Architecture,
    facts: &ModelFacts,
    tensors: &TensorFacts,
) -> Result<Json, GgufError> {
    let mut config = Map::new();
    let model_type = match architecture.model_type {
        "" => keys.arch,
        // DeepSeek 3 says `deepseek2`: sigmoid gating is what tells them apart.
        "deepseek_v2" if keys.size("expert_gating_func")? == Some(2) => "deepseek_v3",
        known => known,
    };
    let class = match (architecture.class, model_type) {
        (_, "deepseek_v3") => "DeepseekV3ForCausalLM",
        (class, _) => class,
    };
    if !class.is_empty() {
        config.insert("architectures".into(), json!([class]));
    }
    config.insert("model_type".into(), json!(model_type));
    config.insert("hidden_size".into(), json!(facts.hidden));
    let layers = facts.blocks - facts.nextn;
    config.insert("num_hidden_layers".into(), json!(layers));
    if facts.nextn > 0 {
        config.insert("num_nextn_predict_layers".into(), json!(facts.nextn));
    }
    // Zero heads: a layer without attention (a linear layer, or one that was pruned).
    config.insert("num_attention_heads".into(), one_or_all(&facts.heads));
    config.insert("num_key_value_heads".into(), one_or_all(&facts.kv_heads));
    config.insert("head_dim".into(), json!(facts.head_dim));
    if facts.value_dim != facts.head_dim {
        config.insert("v_head_dim".into(), json!(facts.value_dim));
    }
    if let Some(sizes) = keys.per_layer("feed_forward_length", facts.blocks)? {
        config.insert("intermediate_size".into(), one_or_all(&sizes));
    }
    let act = if keys.arch.starts_with("gemma") { "gelu_pytorch_tanh" } else { "silu" };
    config.insert("hidden_act".into(), json!(act));
    match keys.float("attention.layer_norm_rms_epsilon")? {
        Some(eps) => config.insert("rms_norm_eps".into(), short(eps)),
        None => match keys.float("attention.layer_norm_epsilon")? {
            Some(eps) => config.insert("layer_norm_eps".into(), short(eps)),
            None => None,
        },
    };
    let vocab = keys.size("vocab_size")?.filter(|v| *v > 0).unwrap_or(tensors.vocab_rows);
    config.insert("vocab_size".into(), json!(if tensors.vocab_rows > 0 { tensors.vocab_rows } else { vocab }));
    if let Some(context) = keys.size("context_length")? {
        config.insert("max_position_embeddings".into(), json!(context));
    }
    config.insert("tie_word_embeddings".into(), json!(!tensors.has_output));
    config.insert("attention_bias".into(), json!(tensors.attention_bias));
    if tensors.mlp_bias {
        config.insert("mlp_bias".into(), json!(true));
    }
    tokens(keys, &mut config)?;
    rope(keys, architecture, facts, tensors, &mut config)?;
    windows(keys, facts, layers, &mut config)?;
    scales(keys, facts, &mut config)?;
    experts(keys, architecture, facts, tensors, &mut config)?;
    low_rank(keys, facts, &mut config)?;
    delta_net(keys, facts, layers, &mut config)?;
    Ok(Json::Object(config))
}

/// A list whose entries are all the same as that entry.
fn one_or_all(values: &[u64]) -> Json {
    match values {
        [first, rest @ ..] if rest.iter().all(|v| v == first) => json!(first),
        _ => json!(values),
    }
}

/// A float that came from an f32, with the digits that the f32 needs: 1e-5 and not 9.999999747378752e-6.
pub(super) fn short(value: f64) -> Json {
    let narrow = value as f32;
    if f64::from(narrow) == value {
        // The shortest decimal that gives the f32 back, read as f64.
        if let Ok(decimal) = narrow.to_string().parse::<f64>() {
            return json!(decimal);
        }
    }
    json!(value)
}

fn tokens(keys: &Keys<'_, '_>, config: &mut Map<String, Json>) -> Result<(), GgufError> {
    for (key, name) in [
        ("tokenizer.ggml.bos_token_id", "bos_token_id"),
        ("tokenizer.ggml.eos_token_id", "eos_token_id"),
        ("tokenizer.ggml.padding_token_id", "pad_token_id"),
    ] {
        if let Some(id) = keys.any(key, "a token id", Value::as_u64)? {
            config.insert(name.into(), json!(id));
        }
    }
    Ok(())
}

fn rope(
    keys: &Keys<'_, '_>,
    architecture: &Architecture,
    facts: &ModelFacts,
    tensors: &TensorFacts,
    config: &mut Map<String, Json>,
) -> Result<(), GgufError> {
    let theta = short(keys.float("rope.freq_base")?.unwrap_or(10000.0));
    config.insert("rope_theta".into(), theta.clone());
    if architecture.rope == RopeRows::Interleaved {
        config.insert("rope_interleave".into(), json!(true));
    }
    // Layers with a sliding window may have a base of their own; Gemma 3's is not in its files.
    let local = match keys.float("rope.freq_base_swa")? {
        None if keys.arch == "gemma3" => Some(10000.0),
        other => other,
    };
    let rotated = keys.size("rope.dimension_count")?;
    if let Some(rotated) = rotated.filter(|r| *r > 0 && *r < facts.head_dim && keys.arch != "deepseek2") {
        config.insert("partial_rotary_factor".into(), json!(rotated as f64 / facts.head_dim as f64));
    }
    let mut parameters = Map::new();
    parameters.insert("rope_theta".into(), theta);
    let factor = match keys.float("rope.scaling.factor")? {
        None => keys.float("rope.scale_linear")?,
        some => some,
    };
    let factor = factor.filter(|f| *f > 0.0 && *f != 1.0);
    // Without a type a factor means linear scaling.
    let kind = match (keys.text("rope.scaling.type")?, factor) {
        (Some(kind @ ("yarn" | "longrope")), _) => kind,
        (Some("linear") | None, Some(_)) => "linear",
        (Some("none" | "linear") | None, _) => "default",
        (Some(other), _) => {
            return Err(GgufError::KeyValue {
                file: keys.file.into(),
                key: keys.full("rope.scaling.type"),
                found: format!("\"{}\"", super::error::printable(other.as_bytes())),
                expected: "none, linear, yarn or longrope".into(),
            });
        }
    };
    parameters.insert("rope_type".into(), json!(kind));
    if let Some(factor) = factor.filter(|_| kind != "default") {
        parameters.insert("factor".into(), short(factor));
    }
    for (key, name) in [
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
        ("rope.scaling.yarn_ext_factor", "extrapolation_factor"),
    ] {
        if let Some(value) = keys.float(key)? {
            parameters.insert(name.into(), short(value));
        }
    }
    let attention = match keys.float("rope.scaling.attn_factor")? {
        None => keys.float("rope.scaling.yarn_attn_factor")?,
        some => some,
    };
    match (kind, attention.filter(|a| *a != 1.0), factor) {
        // llama.cpp multiplies YaRN's own factor, Hugging Face replaces it.
        ("yarn", Some(attention), Some(factor)) => {
            parameters.insert("attention_factor".into(), json!(attention * (1.0 + 0.1 * factor.ln())));
        }
        ("longrope", Some(attention), _) => {
            parameters.insert("attention_factor".into(), short(attention));
        }
        _ => {}
    }
    if let Some(multiplier) = keys.float("rope.scaling.yarn_log_multiplier")?.filter(|m| *m != 0.0) {
        // A tenth of DeepSeek's mscale, which scales the logits as well.
        let mscale = short(f64::from((multiplier * 10.0) as f32));
        parameters.insert("mscale".into(), mscale.clone());
        parameters.insert("mscale_all_dim".into(), mscale);
    }
    if let Some(original) = keys.size("rope.scaling.original_context_length")?.filter(|v| *v > 0) {
        parameters.insert("original_max_position_embeddings".into(), json!(original));
        config.insert("original_max_position_embeddings".into(), json!(original));
    }
    for (tensor, values) in &tensors.rope_factors {
        let list = || Json::Array(values.iter().map(|v| short(f64::from(*v))).collect());
        match tensor.as_str() {
            "rope_factors_long.weight" => {
                parameters.insert("rope_type".into(), json!("longrope"));
                parameters.insert("long_factor".into(), list());
            }
            "rope_factors_short.weight" => {
                parameters.insert("short_factor".into(), list());
            }
            // Divisors of the frequencies, which llama.cpp computes from the scaling of Llama 3 and keeps instead of it.
            _ => match llama3_factor(values, keys.float("rope.freq_base")?.unwrap_or(10000.0)) {
                Some(factor) => {
                    parameters.insert("rope_type".into(), json!("llama3"));
                    parameters.insert("factor".into(), short(factor));
                    parameters.insert("low_freq_factor".into(), json!(LLAMA3_LOW));
                    parameters.insert("high_freq_factor".into(), json!(LLAMA3_HIGH));
                    parameters.insert("original_max_position_embeddings".into(), json!(LLAMA3_CONTEXT));
                }
                // A name that no reader takes for something else.
                None => {
                    parameters.insert("rope_type".into(), json!("frequency-factors"));
                    parameters.insert("frequency_factors".into(), list());
                }
            },
        }
    }
    if let Some(sections) = keys.integers(&keys.full("rope.dimension_sections"))? {
        let sections: Vec<i64> = sections.iter().filter_map(|v| i64::try_from(*v).ok()).collect();
        parameters.insert("mrope_section".into(), json!(sections));
        parameters.insert("mrope_interleaved".into(), json!(true));
    }
    if parameters.get("rope_type") != Some(&json!("default")) {
        config.insert("rope_scaling".into(), Json::Object(parameters.clone()));
    }
    let parameters = Json::Object(parameters);
    let parameters = match local {
        Some(local) => {
            config.insert("rope_local_base_freq".into(), short(local));
            let sliding = json!({"rope_theta": short(local), "rope_type": "default"});
            json!({"full_attention": parameters, "sliding_attention": sliding})
        }
        None => parameters,
    };
    config.insert("rope_parameters".into(), parameters);
    Ok(())
}

/// Llama 3's scaling as all its models have it.
const LLAMA3_LOW: f64 = 1.0;
const LLAMA3_HIGH: f64 = 4.0;
const LLAMA3_CONTEXT: u64 = 8192;

/// The factor of Llama 3's scaling that gives these divisors, if one does, to the precision of f32.
fn llama3_factor(divisors: &[f32], theta: f64) -> Option<f64> {
    let factor = f64::from(divisors.iter().copied().reduce(f32::max)?);
    let context = LLAMA3_CONTEXT as f64;
    let same = divisors.iter().enumerate().all(|(i, found)| {
        let wavelength = std::f64::consts::TAU * theta.powf(i as f64 / divisors.len() as f64);
        let expected = if wavelength < context / LLAMA3_HIGH {
            1.0
        } else if wavelength > context / LLAMA3_LOW {
            factor
        } else {
            let smooth = (context / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW);
            1.0 / ((1.0 - smooth) / factor + smooth)
        };
        (f64::from(*found) - expected).abs() <= 1e-5 * expected
    });
    (same && factor > 1.0).then_some(factor)
}

/// Sliding windows: which layers see all of the past.
fn windows(
    keys: &Keys<'_, '_>,
    facts: &ModelFacts,
    layers: u64,
    config: &mut Map<String, Json>,
) -> Result<(), GgufError> {
    let Some(window) = keys.size("attention.sliding_window")?.filter(|w| *w > 0) else { return Ok(()) };
    config.insert("sliding_window".into(), json!(window));
    let key = keys.full("attention.sliding_window_pattern");
    let pattern = match keys.metadata.get(&key) {
        Some(Value::Array(array)) => {
            let flags: Vec<bool> = array.integers().into_iter().flatten().map(|v| v != 0).collect();
            if flags.len() as u64 != facts.blocks {
                return Err(keys.wrong(&key, &Value::Array(*array), &format!("{} booleans", facts.blocks)));
            }
            flags.into_iter().take(layers as usize).collect()
        }
        Some(value) => {
            let every =
                value.as_u64().filter(|n| *n > 0).ok_or_else(|| keys.wrong(&key, value, "a positive integer"))?;
            (0..layers).map(|i| (i + 1) % every != 0).collect()
        }
        None => match keys.arch {
            "gemma2" | "gpt-oss" => (0..layers).map(|i| i % 2 == 0).collect(),
            "gemma3" => (0..layers).map(|i| (i + 1) % 6 != 0).collect(),
            "cohere2" | "exaone4" => (0..layers).map(|i| (i + 1) % 4 != 0).collect(),
            // All layers alike: the window alone says it.
            _ => Vec::new(),
        },
    };
    if !pattern.is_empty() {
        let types: Vec<&str> =
            pattern.iter().map(|local| if *local { "sliding_attention" } else { "full_attention" }).collect();
        config.insert("layer_types".into(), json!(types));
    }
    Ok(())
}

/// Caps and multipliers.
fn scales(keys: &Keys<'_, '_>, facts: &ModelFacts, config: &mut Map<String, Json>) -> Result<(), GgufError> {
    for (key, name) in [
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("attention.scale", "attention_multiplier"),
        ("attention.clamp_kqv", "clip_qkv"),
    ] {
        if let Some(value) = keys.float(key)?.filter(|v| *v != 0.0) {
            config.insert(name.into(), short(value));
        }
    }
    if let Some(value) = keys.float("logit_scale")?.filter(|v| *v != 0.0) {
        let name = if keys.arch.starts_with("granite") { "logits_scaling" } else { "logit_scale" };
        config.insert(name.into(), short(value));
    }
    if matches!(keys.arch, "gemma2" | "gemma3") {
        // The 27B models scale by the width of a head as if heads shared the residual stream.
        let large = (keys.arch == "gemma3" && facts.blocks == 62) || (keys.arch == "gemma2" && facts.blocks == 46);
        let heads = facts.heads.first().copied().unwrap_or(0);
        let scalar = if large && heads > 0 { facts.hidden / heads } else { facts.head_dim };
        config.insert("query_pre_attn_scalar".into(), json!(scalar));
    }
    if keys.arch == "gpt-oss" {
        config.insert("swiglu_limit".into(), json!(7.0));
    }
    Ok(())
}

fn experts(
    keys: &Keys<'_, '_>,
    architecture: &Architecture,
    facts: &ModelFacts,
    tensors: &TensorFacts,
    config: &mut Map<String, Json>,
) -> Result<(), GgufError> {
    if facts.experts == 0 {
        return Ok(());
    }
    let used = keys.required_size(
        "expert_used_count",
        facts.experts,
        "a mixture of experts needs the number of experts per token",
    )?;
    let routed = matches!(keys.arch, "deepseek" | "deepseek2" | "glm4moe" | "bailingmoe");
    let name = match architecture.model_type {
        "mixtral" | "gpt_oss" | "llama4_text" => "num_local_experts",
        _ if routed => "n_routed_experts",
        _ => "num_experts",
    };
    config.insert(name.into(), json!(facts.experts));
    config.insert("num_experts_per_tok".into(), json!(used));
    for (key, name) in [
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ("expert_shared_count", "n_shared_experts"),
        ("leading_dense_block_count", "first_k_dense_replace"),
        ("expert_group_count", "n_group"),
        ("expert_group_used_count", "topk_group"),
    ] {
        if let Some(value) = keys.size(key)? {
            config.insert(name.into(), json!(value));
        }
    }
    if let Some(scale) = keys.float("expert_weights_scale")?.filter(|s| *s != 0.0) {
        config.insert("routed_scaling_factor".into(), short(scale));
    }
    let gating = keys.size("expert_gating_func")?;
    if routed {
        let sigmoid = gating == Some(2) || (gating.is_none() && tensors.has_expert_bias);
        config.insert("scoring_func".into(), json!(if sigmoid { "sigmoid" } else { "softmax" }));
    }
    // What llama.cpp does where the key is absent: Qwen3 and Mixtral renormalise the chosen experts' weights.
    let renormalised = matches!(architecture.model_type, "qwen3_moe" | "mixtral" | "qwen3_next" | "qwen3_5_moe_text");
    let norm = keys.flag("expert_weights_norm")?.unwrap_or(renormalised);
    config.insert("norm_topk_prob".into(), json!(norm));
    if architecture.model_type.starts_with("qwen") {
        config.insert("decoder_sparse_step".into(), json!(1));
        config.insert("mlp_only_layers".into(), json!([]));
    }
    Ok(())
}

/// Low-rank attention.
fn low_rank(keys: &Keys<'_, '_>, facts: &ModelFacts, config: &mut Map<String, Json>) -> Result<(), GgufError> {
    let Some(rank) = keys.size("attention.kv_lora_rank")?.filter(|r| *r > 0) else { return Ok(()) };
    config.insert("kv_lora_rank".into(), json!(rank));
    if let Some(rank) = keys.size("attention.q_lora_rank")?.filter(|r| *r > 0) {
        config.insert("q_lora_rank".into(), json!(rank));
    }
    // Newer files give the latent sizes as key_length and the real ones with a suffix.
    let key = keys.size("attention.key_length_mla")?.filter(|d| *d > 0).unwrap_or(facts.head_dim);
    let value = keys.size("attention.value_length_mla")?.filter(|d| *d > 0).unwrap_or(facts.value_dim);
    let rotated = keys.size("rope.dimension_count")?.unwrap_or(0).min(key);
    config.insert("qk_rope_head_dim".into(), json!(rotated));
    config.insert("qk_nope_head_dim".into(), json!(key - rotated));
    config.insert("head_dim".into(), json!(rotated));
    config.insert("v_head_dim".into(), json!(value));
    Ok(())
}

/// Gated delta-net layers.
fn delta_net(
    keys: &Keys<'_, '_>,
    facts: &ModelFacts,
    layers: u64,
    config: &mut Map<String, Json>,
) -> Result<(), GgufError> {
    if !matches!(keys.arch, "qwen3next" | "qwen35" | "qwen35moe") {
        return Ok(());
    }
    let interval = keys.size("full_attention_interval")?.filter(|n| *n > 0).unwrap_or(4);
    config.insert("full_attention_interval".into(), json!(interval));
    let recurrent = keys.per_layer("attention.recurrent_layers", facts.blocks)?;
    let types: Vec<&str> = (0..layers)
        .map(|i| match &recurrent {
            Some(flags) => flags[i as usize] != 0,
            None => (i + 1) % interval != 0,
        })
        .map(|linear| if linear { "linear_attention" } else { "full_attention" })
        .collect();
    config.insert("layer_types".into(), json!(types));
    let value_heads = keys.size("ssm.time_step_rank")?;
    for (value, name) in [
        (keys.size("ssm.conv_kernel")?, "linear_conv_kernel_dim"),
        (keys.size("ssm.state_size")?, "linear_key_head_dim"),
        (keys.size("ssm.group_count")?, "linear_num_key_heads"),
        (value_heads, "linear_num_value_heads"),
    ] {
        if let Some(value) = value {
            config.insert(name.into(), json!(value));
        }
    }
    if let (Some(inner), Some(heads)) = (keys.size("ssm.inner_size")?, value_heads.filter(|h| *h > 0)) {
        config.insert("linear_value_head_dim".into(), json!(inner / heads));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_of_llama3_are_recognised() {
        // 64 rotated pairs, theta 500000, factor 8, as llama.cpp's converter computes them in f32.
        let divisors: Vec<f32> = (0..64)
            .map(|i| {
                let wavelength = 2.0 * std::f32::consts::PI * 500_000f32.powf(i as f32 / 64.0);
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                match wavelength {
                    w if w < 2048.0 => 1.0,
                    w if w > 8192.0 => 8.0,
                    _ => 1.0 / ((1.0 - smooth) / 8.0 + smooth),
                }
            })
            .collect();
        assert_eq!(llama3_factor(&divisors, 500_000.0), Some(8.0));
        assert_eq!(llama3_factor(&divisors, 10_000.0), None);
        assert_eq!(llama3_factor(&[1.0, 2.0, 8.0], 10_000.0), None);
        assert_eq!(llama3_factor(&[1.0; 32], 10_000.0), None);
    }

    #[test]
    fn floats_keep_the_digits_of_their_f32() {
        assert_eq!(short(f64::from(1e-5f32)), json!(1e-5));
        assert_eq!(short(0.1), json!(0.1));
        assert_eq!(short(10000.0), json!(10000.0));
    }
}
