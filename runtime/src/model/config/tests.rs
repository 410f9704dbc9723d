use super::*;
use serde_json::json;

fn model(architecture: &str, config: Value) -> Model {
    Model { architecture: architecture.to_owned(), config, conventions: Vec::new() }
}

fn llama() -> Value {
    json!({
        "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 512, "vocab_size": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "head_dim": 64
    })
}

fn with(mut config: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn read(architecture: &str, config: Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_manifest(&model(architecture, config))
}

#[test]
fn llama_in_numbers() {
    let config = read("llama", llama()).unwrap();
    assert_eq!((config.query_rows(), config.kv_rows()), (256, 128));
    assert_eq!(config.attention_scale, 0.125);
    assert_eq!(config.layers, [LayerConfig { window: None, rope: 0, moe: false }; 2]);
    assert!(!config.qkv_bias && !config.qk_norm && !config.tie_word_embeddings && config.norm_offset == 0.0);
    // Older configurations keep theta outside and have no head_dim.
    let mut old = with(llama(), json!({"rope_theta": 5e5, "head_dim": null}));
    old.as_object_mut().unwrap().remove("rope_parameters");
    let config = read("llama", old).unwrap();
    assert_eq!((config.head_dim, config.ropes[0].theta), (64, 5e5));
}

#[test]
fn families_differ_by_their_row_of_the_table() {
    assert!(read("qwen2", llama()).unwrap().qkv_bias);
    assert!(read("qwen3", llama()).unwrap().qk_norm);
    let mistral = read("mistral", with(llama(), json!({"sliding_window": 100}))).unwrap();
    assert!(mistral.layers.iter().all(|l| l.window == Some(100)));
    let off = read("qwen2", with(llama(), json!({"sliding_window": 100, "use_sliding_window": false}))).unwrap();
    assert!(off.layers.iter().all(|l| l.window.is_none()));

    let moe = with(llama(), json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}));
    let qwen = read("qwen3_moe", with(moe.clone(), json!({"mlp_only_layers": [0]}))).unwrap();
    assert_eq!(qwen.layers.iter().map(|l| l.moe).collect::<Vec<_>>(), [false, true]);
    assert_eq!(qwen.moe.unwrap().intermediate_size, 128);

    let parameters = json!({
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}
    });
    let config = json!({
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "query_pre_attn_scalar": 16,
        "rope_parameters": parameters
    });
    let mut gemma = model("gemma3_text", with(llama(), config));
    let read_gemma = ModelConfig::from_manifest(&gemma).unwrap();
    assert_eq!(read_gemma.layers[0], LayerConfig { window: Some(64), rope: 1, moe: false });
    assert_eq!(read_gemma.layers[1], LayerConfig { window: None, rope: 0, moe: false });
    assert_eq!((read_gemma.norm_offset, read_gemma.embedding_scale), (1.0, 16.0));
    assert_eq!((read_gemma.attention_scale, read_gemma.activation), (0.25, Activation::GeluTanh));
    assert!(read_gemma.tie_word_embeddings && read_gemma.post_norms);
    gemma.conventions.push(NORM_STORES_ONE_PLUS_W.to_owned());
    assert_eq!(ModelConfig::from_manifest(&gemma).unwrap().norm_offset, 0.0);
}

#[test]
fn faults_name_the_key_or_the_architecture() {
    let message =
        |architecture: &str, changes: Value| read(architecture, with(llama(), changes)).unwrap_err().to_string();
    assert!(message("mamba2", json!({})).contains("\"mamba2\""));
    for (changes, expected) in [
        (json!({"hidden_size": null}), "\"hidden_size\" is missing"),
        (json!({"hidden_size": 0}), "\"hidden_size\" is 0"),
        (json!({"vocab_size": -4}), "\"vocab_size\" is -4"),
        (json!({"vocab_size": 1u64 << 40}), "\"vocab_size\""),
        (json!({"num_key_value_heads": 3}), "divisor of the 4 heads"),
        (json!({"head_dim": 63}), "even"),
        (json!({"head_dim": null, "num_attention_heads": 5, "num_key_value_heads": 1}), "\"head_dim\""),
        (json!({"rms_norm_eps": "x"}), "\"rms_norm_eps\""),
        (json!({"hidden_act": "relu2"}), "\"hidden_act\" is \"relu2\""),
        (json!({"tie_word_embeddings": 1}), "true or false"),
        (json!({"rope_parameters": {"rope_type": "longrope"}}), "\"rope_type\" is \"longrope\""),
        (json!({"rope_parameters": {"rope_type": "linear"}}), "\"factor\" is missing"),
        (
            json!({"rope_parameters": {"rope_type": "frequency-factors", "frequency_factors": [1.0]}}),
            "frequency_factors",
        ),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor"),
        (json!({"layer_types": ["linear_attention", "full_attention"]}), "layer_types"),
        (json!({"layer_types": ["sliding_attention", "full_attention"]}), "sliding_window"),
    ] {
        let text = message("llama", changes);
        assert!(text.contains(expected), "{text} lacks {expected}");
    }
    let moe = json!({"num_experts": 4, "num_experts_per_tok": 5});
    assert!(message("qwen3_moe", moe).contains("at most the 4 experts"));
}

/// Worked by hand from the formulas, head width 8, theta 10000.
#[test]
fn scaled_frequencies() {
    let close = |parameters: Value, expected: [f64; 4]| {
        let config = read("llama", with(llama(), json!({"head_dim": 8, "rope_parameters": parameters}))).unwrap();
        let (frequencies, factor) = config.ropes[0].frequencies();
        for (found, expected) in frequencies.iter().zip(expected) {
            assert!((f64::from(*found) - expected).abs() <= 1e-6 * expected, "{found} is not {expected}");
        }
        factor
    };
    close(json!({"rope_type": "default"}), [1.0, 0.1, 0.01, 0.001]);
    close(json!({"rope_type": "linear", "factor": 4.0}), [0.25, 0.025, 0.0025, 0.00025]);
    let divisors = json!({"rope_type": "frequency-factors", "frequency_factors": [1.0, 2.0, 4.0, 8.0]});
    close(divisors, [1.0, 0.05, 0.0025, 0.000125]);
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128
    });
    // Wavelengths are 6.28, 62.8, 628 and 6283. The second one lies between 128 / 4 and 128 / 1: smooth = (128 / 62.83 - 1) / 3.
    let smooth = (128.0 * 0.1 / (2.0 * std::f64::consts::PI) - 1.0) / 3.0;
    close(llama3, [1.0, 0.0125 * (1.0 - smooth) + 0.1 * smooth, 0.00125, 0.000125]);
    // beta 32 and 1 with 32 positions: the ramp runs from dimension 0 to 1, so only the first is kept.
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    let factor = close(yarn, [1.0, 0.025, 0.0025, 0.00025]);
    assert!((factor - (0.1 * 4f32.ln() + 1.0)).abs() < 1e-6);
}
