//! Names and configuration per architecture, from small files built here.

mod raw_gguf;

use raw_gguf::Keys;
use serde_json::{Value, json};
use vt_bundle::row_order::RowOrder;
use vt_convert::catalog::Storage;
use vt_convert::gguf::names::{architecture, map_name};
use vt_convert::gguf::{ModelFacts, catalog, open};
use vt_convert::source::Checkpoint;

fn facts(name: &str, experts: u64) -> ModelFacts {
    ModelFacts {
        architecture: name.into(),
        blocks: 3,
        nextn: 1,
        hidden: 64,
        heads: vec![4; 3],
        kv_heads: vec![2; 3],
        head_dim: 16,
        value_dim: 16,
        experts,
    }
}

fn name(arch: &str, experts: u64, gguf: &str) -> String {
    map_name(architecture(arch, experts), &facts(arch, experts), gguf).name
}

#[test]
fn names_of_each_family() {
    for (arch, experts, gguf, hf) in [
        ("llama", 0, "token_embd.weight", "model.embed_tokens.weight"),
        ("llama", 0, "output.weight", "lm_head.weight"),
        ("llama", 0, "blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("llama", 0, "blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("llama", 0, "blk.1.ffn_down.scale", "model.layers.1.mlp.down_proj.scale"),
        ("llama", 4, "blk.1.ffn_up_exps.weight", "model.layers.1.block_sparse_moe.experts.{}.w3.weight"),
        ("llama", 4, "blk.1.ffn_gate_inp.weight", "model.layers.1.block_sparse_moe.gate.weight"),
        ("qwen2", 0, "blk.1.attn_k.bias", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", 0, "blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
        ("qwen2moe", 4, "blk.0.ffn_gate_inp_shexp.weight", "model.layers.0.mlp.shared_expert_gate.weight"),
        ("qwen3moe", 4, "blk.0.ffn_down_exps.weight", "model.layers.0.mlp.experts.{}.down_proj.weight"),
        ("qwen35", 0, "blk.0.attn_qkv.weight", "model.layers.0.linear_attn.in_proj_qkv.weight"),
        ("qwen35", 0, "blk.0.ssm_a", "model.layers.0.linear_attn.A_log"),
        ("qwen35", 0, "blk.0.ssm_dt.bias", "model.layers.0.linear_attn.dt_bias"),
        ("qwen3next", 4, "blk.0.ssm_ba.weight", "model.layers.0.linear_attn.in_proj_ba.weight"),
        ("qwen3next", 4, "blk.0.post_attention_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("gemma3", 0, "blk.0.ffn_norm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("gemma3", 0, "blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
        ("phi3", 0, "blk.0.attn_qkv.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("phi3", 0, "blk.0.ffn_up.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("gpt-oss", 4, "blk.0.attn_sinks.weight", "model.layers.0.self_attn.sinks"),
        ("gpt-oss", 4, "blk.0.ffn_gate_inp.bias", "model.layers.0.mlp.router.bias"),
        ("gpt-oss", 4, "blk.0.ffn_gate_exps.bias", "model.layers.0.mlp.experts.{}.gate_proj.bias"),
        ("deepseek2", 4, "blk.0.attn_kv_a_mqa.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
        ("deepseek2", 4, "blk.0.ffn_gate_shexp.weight", "model.layers.0.mlp.shared_experts.gate_proj.weight"),
        ("glm4moe", 4, "blk.0.exp_probs_b.bias", "model.layers.0.mlp.gate.e_score_correction_bias"),
        ("glm4moe", 4, "blk.2.nextn.eh_proj.weight", "model.layers.2.eh_proj.weight"),
        // No table has these: they keep their names.
        ("llama", 0, "blk.0.something.weight", "blk.0.something.weight"),
        ("llama", 0, "blk.9.attn_q.weight", "blk.9.attn_q.weight"),
        ("llama", 0, "blk.00.attn_q.weight", "blk.00.attn_q.weight"),
        ("llama", 0, "attn_q.weight", "attn_q.weight"),
        ("llama", 0, "blk.0.output.weight", "blk.0.output.weight"),
    ] {
        assert_eq!(name(arch, experts, gguf), hf, "{arch} {gguf}");
    }
}

#[test]
fn only_permuted_architectures_have_their_rows_put_back() {
    let order = |arch: &str, gguf: &str| map_name(architecture(arch, 0), &facts(arch, 0), gguf).row_order;
    let undone = RowOrder::RopeInterleaved { head_dim: 16 };
    for arch in ["llama", "mistral3", "granite", "smollm3"] {
        for tensor in ["blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_q.bias", "blk.0.attn_k.bias"] {
            assert_eq!(order(arch, tensor), undone, "{arch} {tensor}");
        }
        for tensor in ["blk.0.attn_v.weight", "blk.0.attn_q.scale", "blk.0.attn_output.weight"] {
            assert_eq!(order(arch, tensor), RowOrder::Same, "{arch} {tensor}");
        }
    }
    for arch in ["qwen2", "qwen3", "gemma3", "phi3", "gpt-oss", "deepseek2", "glm4", "llama4"] {
        assert_eq!(order(arch, "blk.0.attn_q.weight"), RowOrder::Same, "{arch}");
    }
}

#[test]
fn prediction_blocks_are_cold() {
    let cold = |gguf: &str| map_name(architecture("glm4moe", 4), &facts("glm4moe", 4), gguf).cold;
    assert!(cold("blk.2.attn_q.weight") && !cold("blk.1.attn_q.weight") && !cold("output.weight"));
}

fn base(arch: &str) -> Keys {
    Keys::default()
        .str("general.architecture", arch)
        .u32(&format!("{arch}.block_count"), 2)
        .u32(&format!("{arch}.embedding_length"), 8)
        .u32(&format!("{arch}.attention.head_count"), 2)
        .u32(&format!("{arch}.attention.head_count_kv"), 1)
        .f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6)
}

fn write_and<T>(keys: &Keys, tensors: &[(&str, &[u64])], then: impl FnOnce(&std::path::Path) -> T) -> T {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, keys.file(tensors)).expect("written");
    then(&path)
}

fn opened(keys: &Keys, tensors: &[(&str, &[u64])]) -> Checkpoint {
    write_and(keys, tensors, |path| open(path).unwrap_or_else(|e| panic!("{e}")).0)
}

fn refusal(keys: &Keys, tensors: &[(&str, &[u64])]) -> String {
    write_and(keys, tensors, |path| match open(path) {
        Err(error) => error.to_string(),
        Ok((checkpoint, metadata)) => match catalog(&checkpoint, &metadata) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("accepted"),
        },
    })
}

const EMBEDDING: (&str, &[u64]) = ("token_embd.weight", &[8, 16]);

fn config(keys: &Keys) -> Value {
    opened(keys, &[EMBEDDING]).config
}

#[test]
fn configuration_of_special_keys() {
    let gemma =
        config(&base("gemma3").u32("gemma3.attention.key_length", 4).u32("gemma3.attention.sliding_window", 512));
    assert_eq!(gemma["model_type"], "gemma3_text");
    assert_eq!(gemma["layer_types"], json!(["sliding_attention", "sliding_attention"]));
    assert_eq!(gemma["rope_parameters"]["sliding_attention"]["rope_theta"], json!(10000.0));
    assert_eq!((&gemma["hidden_act"], &gemma["tie_word_embeddings"]), (&json!("gelu_pytorch_tanh"), &json!(true)));
    let yarn = config(
        &base("gpt-oss")
            .str("gpt-oss.rope.scaling.type", "yarn")
            .f32("gpt-oss.rope.scaling.factor", 32.0)
            .u32("gpt-oss.rope.scaling.original_context_length", 4096)
            .u32("gpt-oss.attention.sliding_window", 128),
    );
    assert_eq!(yarn["rope_scaling"]["rope_type"], "yarn");
    assert_eq!(yarn["rope_scaling"]["original_max_position_embeddings"], 4096);
    assert_eq!(yarn["layer_types"], json!(["sliding_attention", "full_attention"]));
    assert_eq!(yarn["rope_scaling"].get("attention_factor"), None);
    let linear = config(&base("llama").f32("llama.rope.scaling.factor", 4.0));
    assert_eq!(linear["rope_parameters"]["rope_type"], "linear");
    let moe = config(&base("qwen3moe").u32("qwen3moe.expert_count", 8).u32("qwen3moe.expert_used_count", 2));
    assert_eq!((&moe["num_experts"], &moe["norm_topk_prob"]), (&json!(8), &json!(true)));
    let deepseek = config(
        &base("deepseek2")
            .u32("deepseek2.expert_count", 8)
            .u32("deepseek2.expert_used_count", 2)
            .u32("deepseek2.expert_gating_func", 2)
            .u32("deepseek2.attention.kv_lora_rank", 4)
            .u32("deepseek2.attention.key_length", 6)
            .u32("deepseek2.attention.value_length", 4)
            .u32("deepseek2.rope.dimension_count", 2),
    );
    assert_eq!((&deepseek["model_type"], &deepseek["scoring_func"]), (&json!("deepseek_v3"), &json!("sigmoid")));
    assert_eq!((&deepseek["qk_nope_head_dim"], &deepseek["qk_rope_head_dim"]), (&json!(4), &json!(2)));
    // Per-layer sizes stay a list where they differ.
    let layers = config(&base("llama").i32s("llama.feed_forward_length", &[16, 32]));
    assert_eq!(layers["intermediate_size"], json!([16, 32]));
}

#[test]
fn metadata_that_contradict_the_tensors_are_refused() {
    let keys = base("llama");
    for (tensors, words) in [
        (&[EMBEDDING, ("blk.0.attn_q.weight", &[8, 6])][..], &["blk.0.attn_q.weight", "2 heads of 4 rows"][..]),
        (&[("token_embd.weight", &[9, 16])], &["token_embd.weight", "8 columns"]),
    ] {
        let message = refusal(&keys, tensors);
        assert!(words.iter().all(|w| message.contains(w)), "{message}");
    }
    for (keys, word) in [
        (base("llama").without("llama.block_count"), "llama.block_count"),
        (base("llama").u32("llama.block_count", 1 << 30), "4096"),
        (base("llama").str("llama.embedding_length", "8"), "llama.embedding_length"),
        (base("llama").str("llama.rope.scaling.type", "spiral"), "spiral"),
        (base("llama").u32("llama.expert_count", 4), "llama.expert_used_count"),
        (base("llama").str("general.type", "adapter"), "adapter"),
        (base("clip"), "projector"),
        (Keys::default().u32("llama.block_count", 1), "general.architecture"),
    ] {
        let message = refusal(&keys, &[EMBEDDING]);
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
    assert!(refusal(&keys, &[]).contains("no tensors"));
}

#[test]
fn an_architecture_without_a_table_opens_with_a_warning() {
    let checkpoint = opened(&base("novel"), &[EMBEDDING, ("blk.0.strange.weight", &[8])]);
    assert!(checkpoint.warnings.iter().any(|w| w.contains("novel")));
    assert!(checkpoint.warnings.iter().any(|w| w.contains("blk.0.strange.weight")));
    assert_eq!(checkpoint.config["model_type"], "novel");
}

#[test]
fn fused_experts_are_cut_into_gate_and_up() {
    let keys = base("qwen3moe").u32("qwen3moe.expert_count", 2).u32("qwen3moe.expert_used_count", 1);
    let stack: (&str, &[u64]) = ("blk.0.ffn_gate_up_exps.weight", &[8, 6, 2]);
    write_and(&keys, &[EMBEDDING, stack], |path| {
        let (checkpoint, metadata) = open(path).unwrap_or_else(|e| panic!("{e}"));
        let described = catalog(&checkpoint, &metadata).unwrap_or_else(|e| panic!("{e}"));
        let pieces: Vec<_> = described
            .entries
            .iter()
            .filter_map(|e| match &e.storage {
                Storage::Rows { shape, data, .. } if e.name.contains("experts") => {
                    Some((e.name.as_str(), shape.clone(), data.offset))
                }
                _ => None,
            })
            .collect();
        let piece = |expert: u64, name: &str, offset| {
            (format!("model.layers.0.mlp.experts.{expert}.{name}.weight"), vec![3, 8], offset)
        };
        let want =
            [piece(0, "gate_proj", 0), piece(0, "up_proj", 96), piece(1, "gate_proj", 192), piece(1, "up_proj", 288)];
        assert_eq!(pieces.len(), 4);
        for (got, want) in pieces.iter().zip(&want) {
            assert_eq!((got.0, &got.1, got.2), (want.0.as_str(), &want.1, want.2));
        }
    });
    assert!(
        refusal(&keys, &[EMBEDDING, ("blk.0.ffn_gate_up_exps.weight", &[8, 5, 2])]).contains("even number of rows")
    );
    assert!(refusal(&keys, &[EMBEDDING, ("blk.0.ffn_gate_up_exps.weight", &[8, 6, 3])]).contains("2 experts"));
}
