//! WordPiece (`tokenizer.ggml.model` = bert).

use serde_json::json;

use super::json::{IdsByText, Model, Parts};
use super::vocabulary::{Kind, MODEL, Vocabulary, tokenizer_error};
use crate::gguf::error::GgufError;
use crate::gguf::keys::Keys;
use crate::gguf::value::Value;

/// Normalizer, pre-tokenizer, model and decoder of a WordPiece vocabulary.
///
/// GGUF marks the start of a word (with U+2581), WordPiece marks its continuation (with `##`): the marks are exchanged.
pub(super) fn parts<'v>(keys: &Keys<'_, '_>, vocabulary: &'v Vocabulary<'_>) -> Result<Parts<'v>, GgufError> {
    let unknown = vocabulary.special_text("unknown").ok_or_else(|| {
        tokenizer_error(keys, MODEL, "bert without an unknown token".into(), "tokenizer.ggml.unknown_token_id")
    })?;
    let flag = |key| keys.any(key, "a boolean", Value::as_bool);
    let lowercase = flag("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(true);
    let accents = flag("tokenizer.ggml.normalizer.strip_accents")?.unwrap_or(lowercase);
    let texts =
        vocabulary.tokens.iter().zip(&vocabulary.kinds).map(|(text, kind)| match text.strip_prefix('\u{2581}') {
            Some(word) => word.into(),
            None if *kind == Kind::Normal => format!("##{text}").into(),
            None => (&**text).into(),
        });
    Ok(Parts {
        normalizer: json!({
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": accents, "lowercase": lowercase,
        }),
        pre_tokenizer: json!({"type": "BertPreTokenizer"}),
        decoder: json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        model: Model::WordPiece {
            unk_token: unknown,
            continuing_subword_prefix: "##",
            max_input_chars_per_word: 100,
            vocab: IdsByText(texts.collect()),
        },
    })
}
