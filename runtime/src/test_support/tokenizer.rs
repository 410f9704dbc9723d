//! A tokenizer whose tokens are single bytes: id = byte, then a few special tokens.

use crate::text::{BundleText, TextAssets, Tokenizer};
use serde_json::json;

/// Beginning of a text.
pub const BOS: u32 = 256;
/// End of a text, the tokenizer's own.
pub const EOS: u32 = 257;
/// End of a turn, named by the generation config only.
pub const END: u32 = 258;
/// Start of a turn.
pub const START: u32 = 259;
/// Ids in all.
pub const VOCABULARY: usize = 260;

/// The template of the stand-in: a turn is `<|start|>ROLE\nCONTENT<|end|>`.
pub const CHAT_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}";

/// The `tokenizer.json` of the stand-in.
pub fn byte_tokenizer_json() -> String {
    let mut vocabulary = serde_json::Map::new();
    let mut next = 0x100u32;
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let character = if printable {
            char::from(byte)
        } else {
            next += 1;
            char::from_u32(next - 1).unwrap_or('?')
        };
        vocabulary.insert(character.to_string(), json!(byte));
    }
    let added: Vec<_> = [(BOS, "<|bos|>"), (EOS, "<|eos|>"), (END, "<|end|>"), (START, "<|start|>")]
        .into_iter()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocabulary, "merges": []},
    })
    .to_string()
}

/// The stand-in tokenizer.
///
/// # Panics
/// Never: its JSON is fixed.
pub fn byte_tokenizer() -> Tokenizer {
    Tokenizer::from_json(byte_tokenizer_json().as_bytes()).expect("the JSON above is a tokenizer")
}

/// All text assets of the stand-in, as a bundle would hold them.
///
/// # Panics
/// Never: its assets are fixed.
pub fn fake_text() -> BundleText {
    BundleText::from_assets(&TextAssets {
        tokenizer: byte_tokenizer_json().as_bytes(),
        tokenizer_config: Some(
            br#"{"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "add_bos_token": true}"#,
        ),
        chat_template: Some(CHAT_TEMPLATE.as_bytes()),
        generation_config: Some(br#"{"eos_token_id": [257, 258]}"#),
        config: Some(br#"{"eos_token_id": 257, "bos_token_id": 256}"#),
    })
    .expect("the assets above are valid")
}
