//! Rebuilding tokenizers: what the files hold, and what is refused.

mod raw_gguf;

use raw_gguf::Keys;
use serde_json::{Value, json};
use vt_convert::gguf::open;
use vt_convert::source::Checkpoint;

/// Metadata of a model of one layer, without a tokenizer.
fn model() -> Keys {
    Keys::default()
        .str("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.embedding_length", 8)
        .u32("llama.attention.head_count", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
}

/// The 256 characters of a byte-level vocabulary, in the order of the bytes.
fn byte_tokens() -> Vec<String> {
    let visible = |b: u32| (0x21..0x7f).contains(&b) || (0xa1..0xad).contains(&b) || (0xae..0x100).contains(&b);
    let mut next = 0x100;
    (0..256)
        .map(|b| {
            let code = if visible(b) { b } else { next };
            next += u32::from(!visible(b));
            char::from_u32(code).expect("below the surrogates").to_string()
        })
        .collect()
}

fn gpt2() -> Keys {
    let mut tokens = byte_tokens();
    tokens.extend(["he", "ll", "hell", "<|endoftext|>", "<|im_end|>", "<tool>"].map(String::from));
    let mut kinds = vec![1; tokens.len()];
    kinds[259] = 3;
    kinds[261] = 4;
    model()
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "gpt-2")
        .strs("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &kinds)
        .strs("tokenizer.ggml.merges", &["h e", "l l", "he ll", "h e"])
        .u32("tokenizer.ggml.bos_token_id", 259)
        .u32("tokenizer.ggml.eos_token_id", 259)
}

fn sentencepiece() -> Keys {
    let tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "\u{2581}", "a", "b", "ab", "\u{2581}a", "\u{2581}ab"];
    model()
        .str("tokenizer.ggml.model", "llama")
        .strs("tokenizer.ggml.tokens", &tokens)
        .f32s("tokenizer.ggml.scores", &[0.0, 0.0, 0.0, 0.0, -9.0, -8.0, -7.0, -3.0, -2.0, -1.0])
        .i32s("tokenizer.ggml.token_type", &[2, 3, 3, 6, 1, 1, 1, 1, 1, 1])
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .u32("tokenizer.ggml.unknown_token_id", 0)
}

/// Opens the model that has these keys and an embedding of `rows` rows.
fn with_rows(keys: &Keys, rows: u64) -> Result<Checkpoint, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, keys.file(&[("token_embd.weight", &[8, rows])])).expect("written");
    open(&path).map(|(checkpoint, _)| checkpoint).map_err(|e| e.to_string())
}

fn opened(keys: &Keys) -> Checkpoint {
    with_rows(keys, 512).unwrap_or_else(|e| panic!("{e}"))
}

fn asset(checkpoint: &Checkpoint, name: &str) -> Value {
    let (_, bytes) = checkpoint.assets.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}"));
    serde_json::from_slice(bytes).expect("JSON")
}

#[test]
fn byte_level_bpe() {
    let checkpoint = opened(&gpt2());
    let tokenizer = asset(&checkpoint, "tokenizer.json");
    assert_eq!(tokenizer["model"]["type"], "BPE");
    // The merge that comes twice counts once.
    assert_eq!(tokenizer["model"]["merges"], json!([["h", "e"], ["l", "l"], ["he", "ll"]]));
    assert_eq!(tokenizer["model"]["vocab"]["hell"], 258);
    let added: Vec<_> =
        tokenizer["added_tokens"].as_array().expect("a list").iter().map(|t| (&t["id"], &t["special"])).collect();
    // A token whose text is known to end a turn is special, whatever its kind says.
    assert_eq!(added, [(&json!(259), &json!(true)), (&json!(260), &json!(true)), (&json!(261), &json!(false))]);
    assert_eq!(tokenizer["post_processor"], Value::Null);
    assert_eq!(asset(&checkpoint, "generation_config.json")["eos_token_id"], json!([259, 260]));
    assert_eq!(asset(&checkpoint, "tokenizer_config.json")["eos_token"], "<|endoftext|>");
}

#[test]
fn bytes_without_a_token_are_cut_out() {
    let mut tokens = byte_tokens();
    tokens.retain(|t| t != "\u{100}");
    let keys = gpt2()
        .strs("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &[1; 255])
        .strs("tokenizer.ggml.merges", &[""; 0])
        .u32("tokenizer.ggml.bos_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 0);
    let tokenizer = asset(&opened(&keys), "tokenizer.json");
    let last = tokenizer["pre_tokenizer"]["pretokenizers"].as_array().and_then(|p| p.last()).expect("a sequence");
    assert_eq!(
        *last,
        json!({"type": "Split", "pattern": {"Regex": "[\\x{100}]"}, "behavior": "Removed", "invert": false})
    );
}

#[test]
fn sentencepiece_merges_come_from_the_scores() {
    let checkpoint = opened(&sentencepiece());
    let tokenizer = asset(&checkpoint, "tokenizer.json");
    let s = "\u{2581}";
    assert_eq!(tokenizer["model"]["merges"], json!([[s, "ab"], [format!("{s}a"), "b"], [s, "a"], ["a", "b"]]));
    assert_eq!(tokenizer["model"]["byte_fallback"], true);
    assert_eq!(tokenizer["normalizer"]["normalizers"][0], json!({"type": "Prepend", "prepend": s}));
    // BOS is the default of this kind.
    assert_eq!(tokenizer["post_processor"]["single"][0]["SpecialToken"]["id"], "<s>");
    let without = opened(
        &sentencepiece().bool("tokenizer.ggml.add_bos_token", false).bool("tokenizer.ggml.add_space_prefix", false),
    );
    let tokenizer = asset(&without, "tokenizer.json");
    assert_eq!((&tokenizer["post_processor"], &tokenizer["normalizer"]["type"]), (&Value::Null, &json!("Replace")));
}

#[test]
fn models_without_a_tokenizer_open_with_a_warning() {
    for keys in [model(), model().str("tokenizer.ggml.model", "none")] {
        let checkpoint = opened(&keys);
        assert!(checkpoint.assets.is_empty());
        assert_eq!(checkpoint.warnings.len(), 1);
    }
}

#[test]
fn templates_keep_their_text_and_cannot_name_a_path() {
    let keys = gpt2()
        .str("tokenizer.chat_template", "{{ a }}")
        .str("tokenizer.chat_template.tool_use", "{{ b }}")
        .str("tokenizer.chat_template.../../x", "{{ c }}")
        .strs("tokenizer.chat_templates", &["tool_use"]);
    let names: Vec<_> = opened(&keys).assets.into_iter().filter(|(n, _)| n.ends_with(".jinja")).collect();
    let want = [("chat_template.jinja", "{{ a }}"), ("additional_chat_templates/tool_use.jinja", "{{ b }}")];
    assert_eq!(names, want.map(|(n, t)| (n.to_owned(), t.as_bytes().to_vec())));
}

#[test]
fn contradictions_are_refused_by_key() {
    let tokens = byte_tokens();
    let mut doubled = tokens.clone();
    doubled[7] = doubled[9].clone();
    let mut broken: Vec<Vec<u8>> = tokens.iter().map(|t| t.clone().into_bytes()).collect();
    broken[130] = vec![0xff, 0xfe];
    let cases: [(Keys, &[&str]); 14] = [
        (gpt2().without("tokenizer.ggml.pre"), &["tokenizer.ggml.pre", "missing"]),
        (gpt2().str("tokenizer.ggml.pre", "no-such"), &["tokenizer.ggml.pre", "no-such"]),
        (gpt2().without("tokenizer.ggml.model"), &["tokenizer.ggml.model"]),
        (gpt2().str("tokenizer.ggml.model", "rwkv"), &["tokenizer.ggml.model", "rwkv"]),
        (gpt2().without("tokenizer.ggml.tokens"), &["tokenizer.ggml.tokens"]),
        (gpt2().strs("tokenizer.ggml.tokens", &doubled), &["tokenizer.ggml.tokens", "7 and 9"]),
        (gpt2().strs("tokenizer.ggml.tokens", &broken), &["tokenizer.ggml.tokens", "130", "UTF-8"]),
        (gpt2().strs("tokenizer.ggml.merges", &["he"]), &["tokenizer.ggml.merges", "no space"]),
        (gpt2().strs("tokenizer.ggml.merges", &["x y"]), &["tokenizer.ggml.merges", "third"]),
        (gpt2().i32s("tokenizer.ggml.token_type", &[1; 10]), &["tokenizer.ggml.token_type", "10 elements"]),
        (gpt2().i32s("tokenizer.ggml.token_type", &[9; 262]), &["tokenizer.ggml.token_type", "kind 9"]),
        (gpt2().u32("tokenizer.ggml.bos_token_id", 262), &["tokenizer.ggml.bos_token_id", "262"]),
        (sentencepiece().without("tokenizer.ggml.scores"), &["tokenizer.ggml.scores", "missing"]),
        (sentencepiece().without("tokenizer.ggml.bos_token_id"), &["tokenizer.ggml.bos_token_id", "added"]),
    ];
    for (keys, words) in cases {
        let message = with_rows(&keys, 512).expect_err(words[0]);
        for word in words {
            assert!(message.contains(word), "{message:?} does not say {word:?}");
        }
    }
    let message = with_rows(&gpt2(), 100).expect_err("262 tokens");
    assert!(message.contains("262 tokens for an embedding of 100 rows"), "{message}");
}

#[test]
fn end_of_a_part_is_not_the_end_of_a_turn() {
    let mut tokens = byte_tokens();
    tokens.extend(["<|return|>", "<|call|>", "<|end|>", "</s>"].map(String::from));
    let mut kinds = [1; 260];
    kinds[256..259].fill(3);
    kinds[259] = 4;
    let keys = gpt2()
        .strs("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &kinds)
        .strs("tokenizer.ggml.merges", &[""; 0])
        .u32("tokenizer.ggml.bos_token_id", 256)
        .u32("tokenizer.ggml.eos_token_id", 256);
    assert_eq!(asset(&opened(&keys), "generation_config.json")["eos_token_id"], json!([256, 257]));
}
