//! The architectures: their names elsewhere, and their tensors' names.

use super::names::{Architecture, RopeRows};

type Stems = &'static [(&'static str, &'static str)];

/// Stems that stand outside the blocks.
pub(super) const GLOBAL_STEMS: &[&str] = &[
    "token_embd",
    "output_norm",
    "output",
    "rope_freqs",
    "rope_factors_long",
    "rope_factors_short",
    "token_embd_norm",
];

const OUTSIDE: Stems = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    // Tables computed from the configuration; Hugging Face stores no such tensor, so they keep their names.
    ("rope_freqs", "rope_freqs"),
    ("rope_factors_long", "rope_factors_long"),
    ("rope_factors_short", "rope_factors_short"),
];

const ATTENTION: Stems = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_sinks", "self_attn.sinks"),
];

const MLP: Stems = &[
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

const EXPERTS: Stems = &[
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
    ("ffn_up_exps", "mlp.experts.{}.up_proj"),
    ("ffn_down_exps", "mlp.experts.{}.down_proj"),
    ("ffn_gate_up_exps", "mlp.experts.{}.gate_up_proj"),
];

/// One shared expert beside the routed ones, with a gate of its own (Qwen).
const SHARED_EXPERT: Stems = &[
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
];

/// Shared experts fused into one MLP, and a bias that only chooses experts (DeepSeek, GLM).
const SHARED_EXPERTS: Stems = &[
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ("exp_probs_b", "mlp.gate.e_score_correction_bias"),
];

/// Multi-token prediction blocks.
const NEXTN: Stems = &[
    ("nextn.eh_proj", "eh_proj"),
    ("nextn.embed_tokens", "embed_tokens"),
    ("nextn.enorm", "enorm"),
    ("nextn.hnorm", "hnorm"),
    ("nextn.shared_head_head", "shared_head.head"),
    ("nextn.shared_head_norm", "shared_head.norm"),
];

const MIXTRAL_EXPERTS: Stems = &[
    ("ffn_gate_inp", "block_sparse_moe.gate"),
    ("ffn_gate_exps", "block_sparse_moe.experts.{}.w1"),
    ("ffn_down_exps", "block_sparse_moe.experts.{}.w2"),
    ("ffn_up_exps", "block_sparse_moe.experts.{}.w3"),
];

/// Norms on both sides of attention and MLP (Gemma 2 and 3).
const SANDWICH: Stems = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// Norms after attention and MLP only (OLMo 2).
const POST_NORM: Stems =
    &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];

/// The norm before the MLP has the name of its place (gpt-oss, GLM-4 MoE, Qwen 3.5).
const POST_ATTENTION: Stems = &[("post_attention_norm", "post_attention_layernorm")];

const GLM4: Stems = &[
    ("post_attention_norm", "post_self_attn_layernorm"),
    ("post_ffw_norm", "post_mlp_layernorm"),
    ("ffn_up", "mlp.gate_up_proj"),
];

const PHI3: Stems = &[("ffn_up", "mlp.gate_up_proj")];

const GPT_OSS: Stems = &[("ffn_gate_inp", "mlp.router"), ("attn_sinks.weight", "self_attn.sinks")];

/// Low-rank attention (DeepSeek 2 and 3). The halves of `kv_b` that newer files hold apart have no Hugging Face name.
const MLA: Stems = &[
    ("attn_q_a", "self_attn.q_a_proj"),
    ("attn_q_a_norm", "self_attn.q_a_layernorm"),
    ("attn_q_b", "self_attn.q_b_proj"),
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attn_kv_b", "self_attn.kv_b_proj"),
    ("attn_k_b", "self_attn.k_b_proj"),
    ("attn_v_b", "self_attn.v_b_proj"),
];

/// Gated delta-net layers (Qwen3-Next, Qwen 3.5).
const DELTA_NET: Stems = &[
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_in", "linear_attn.in_proj_qkvz"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_beta_alpha", "linear_attn.in_proj_ba"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];

const DENSE: &[Stems] = &[OUTSIDE, ATTENTION, MLP];
const QWEN_MOE: &[Stems] = &[SHARED_EXPERT, EXPERTS, OUTSIDE, ATTENTION, MLP];
const DEEPSEEK: &[Stems] = &[MLA, SHARED_EXPERTS, EXPERTS, NEXTN, OUTSIDE, ATTENTION, MLP];
const DELTA: &[Stems] = &[DELTA_NET, POST_ATTENTION, SHARED_EXPERT, EXPERTS, NEXTN, OUTSIDE, ATTENTION, MLP];

const fn arch(
    name: &'static str,
    model_type: &'static str,
    class: &'static str,
    rope: RopeRows,
    stems: &'static [Stems],
) -> Architecture {
    Architecture { name, model_type, class, rope, stems, norm_plus_one: false }
}

const fn plus_one(architecture: Architecture) -> Architecture {
    Architecture { norm_plus_one: true, ..architecture }
}

use RopeRows::{Halves, Interleaved, Permuted};

/// Mixtral, which says `llama`.
pub(super) static MIXTRAL: Architecture =
    arch("llama", "mixtral", "MixtralForCausalLM", Permuted, &[MIXTRAL_EXPERTS, OUTSIDE, ATTENTION, MLP]);

/// Anything without a table: the common names, rows as they are.
pub(super) static UNKNOWN: Architecture = arch("", "", "", Halves, &[SHARED_EXPERT, EXPERTS, OUTSIDE, ATTENTION, MLP]);

/// All known architectures.
pub(super) static ARCHITECTURES: &[Architecture] = &[
    arch("llama", "llama", "LlamaForCausalLM", Permuted, DENSE),
    arch("llama4", "llama4_text", "Llama4ForCausalLM", Interleaved, QWEN_MOE),
    arch("mistral3", "ministral3", "Ministral3ForCausalLM", Permuted, DENSE),
    arch("deci", "nemotron-nas", "DeciLMForCausalLM", Permuted, DENSE),
    arch("baichuan", "baichuan", "BaichuanForCausalLM", Permuted, DENSE),
    arch("internlm2", "internlm2", "InternLM2ForCausalLM", Permuted, DENSE),
    arch("minicpm", "minicpm", "MiniCPMForCausalLM", Permuted, DENSE),
    arch("xverse", "xverse", "XverseForCausalLM", Permuted, DENSE),
    arch("olmo", "olmo", "OlmoForCausalLM", Permuted, DENSE),
    arch("granite", "granite", "GraniteForCausalLM", Permuted, DENSE),
    arch("smollm3", "smollm3", "SmolLM3ForCausalLM", Permuted, DENSE),
    arch("arcee", "arcee", "ArceeForCausalLM", Permuted, DENSE),
    arch("llada", "llada", "LLaDAModelLM", Permuted, DENSE),
    arch("nanbeige", "nanbeige", "NanbeigeForCausalLM", Permuted, DENSE),
    arch("deepseek", "deepseek", "DeepseekForCausalLM", Permuted, DEEPSEEK),
    arch("bailingmoe", "bailing_moe", "BailingMoeForCausalLM", Permuted, DEEPSEEK),
    arch("qwen2", "qwen2", "Qwen2ForCausalLM", Halves, DENSE),
    arch("qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM", Halves, QWEN_MOE),
    arch("qwen3", "qwen3", "Qwen3ForCausalLM", Halves, DENSE),
    arch("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", Halves, QWEN_MOE),
    plus_one(arch("qwen3next", "qwen3_next", "Qwen3NextForCausalLM", Halves, DELTA)),
    plus_one(arch("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", Halves, DELTA)),
    plus_one(arch("qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", Halves, DELTA)),
    plus_one(arch("gemma", "gemma", "GemmaForCausalLM", Halves, DENSE)),
    plus_one(arch("gemma2", "gemma2", "Gemma2ForCausalLM", Halves, &[SANDWICH, OUTSIDE, ATTENTION, MLP])),
    plus_one(arch("gemma3", "gemma3_text", "Gemma3ForCausalLM", Halves, &[SANDWICH, OUTSIDE, ATTENTION, MLP])),
    arch("phi3", "phi3", "Phi3ForCausalLM", Halves, &[PHI3, OUTSIDE, ATTENTION, MLP]),
    arch(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        Halves,
        &[GPT_OSS, POST_ATTENTION, EXPERTS, OUTSIDE, ATTENTION, MLP],
    ),
    arch("deepseek2", "deepseek_v2", "DeepseekV2ForCausalLM", Interleaved, DEEPSEEK),
    arch("glm4", "glm4", "Glm4ForCausalLM", Interleaved, &[GLM4, OUTSIDE, ATTENTION, MLP]),
    arch(
        "glm4moe",
        "glm4_moe",
        "Glm4MoeForCausalLM",
        Halves,
        &[POST_ATTENTION, SHARED_EXPERTS, EXPERTS, NEXTN, OUTSIDE, ATTENTION, MLP],
    ),
    arch("olmo2", "olmo2", "Olmo2ForCausalLM", Halves, &[POST_NORM, OUTSIDE, ATTENTION, MLP]),
    arch("olmoe", "olmoe", "OlmoeForCausalLM", Halves, QWEN_MOE),
    arch("exaone4", "exaone4", "Exaone4ForCausalLM", Halves, &[POST_NORM, OUTSIDE, ATTENTION, MLP]),
    arch("stablelm", "stablelm", "StableLmForCausalLM", Halves, DENSE),
    arch("command-r", "cohere", "CohereForCausalLM", Interleaved, DENSE),
    arch("cohere2", "cohere2", "Cohere2ForCausalLM", Interleaved, DENSE),
    arch("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", Interleaved, DENSE),
];
