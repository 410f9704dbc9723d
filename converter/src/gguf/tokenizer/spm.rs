//! SentencePiece BPE (`tokenizer.ggml.model` = llama): merges by score, bytes for what has no piece.

use std::collections::HashMap;

use serde_json::{Value as Json, json};

use super::json::{Model, Parts, ids_by_text, sequence};
use super::vocabulary::{Kind, SCORES, Vocabulary, tokenizer_error};
use crate::gguf::error::GgufError;
use crate::gguf::keys::Keys;

/// The character that stands for a space.
const SPACE: &str = "\u{2581}";

/// Normalizer, model and decoder of a SentencePiece vocabulary. `prefix`: a space is put before every run of text.
pub(super) fn parts<'v>(
    keys: &Keys<'_, '_>,
    vocabulary: &'v Vocabulary<'_>,
    prefix: bool,
) -> Result<Parts<'v>, GgufError> {
    if vocabulary.scores.is_empty() {
        return Err(tokenizer_error(keys, SCORES, "missing".into(), "the scores of a SentencePiece vocabulary"));
    }
    let mut normalizers = Vec::new();
    if prefix {
        normalizers.push(json!({"type": "Prepend", "prepend": SPACE}));
    }
    normalizers.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE}));
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let unknown = vocabulary
        .id("unknown")
        .or_else(|| vocabulary.kinds.iter().position(|k| *k == Kind::Unknown).map(|id| id as u32));
    Ok(Parts {
        normalizer: sequence("normalizers", normalizers),
        pre_tokenizer: Json::Null,
        decoder: sequence("decoders", decoders),
        model: Model::Bpe {
            dropout: (),
            unk_token: unknown.map(|id| &*vocabulary.tokens[id as usize]),
            continuing_subword_prefix: (),
            end_of_word_suffix: (),
            fuse_unk: true,
            byte_fallback: true,
            ignore_merges: false,
            vocab: ids_by_text(vocabulary),
            merges: merges(vocabulary),
        },
    })
}

/// Every way to join two pieces to a third, the best score first.
///
/// SentencePiece merges the pair whose result has the highest score. Pairs with the same result, and results with the same
/// score, come in the order of the ids of their parts: older pieces first.
fn merges<'v>(vocabulary: &'v Vocabulary<'_>) -> Vec<(&'v str, &'v str)> {
    let index: HashMap<&str, u32> = vocabulary.index();
    let mut found: Vec<(f64, u32, u32)> = Vec::new();
    for ((text, kind), score) in vocabulary.tokens.iter().zip(&vocabulary.kinds).zip(&vocabulary.scores) {
        // Control tokens and bytes are never made of pieces.
        if matches!(kind, Kind::Control | Kind::Unknown | Kind::Byte) {
            continue;
        }
        for (place, _) in text.char_indices().skip(1) {
            if let (Some(&left), Some(&right)) = (index.get(&text[..place]), index.get(&text[place..])) {
                found.push((*score, left, right));
            }
        }
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    found.into_iter().map(|(_, l, r)| (&*vocabulary.tokens[l as usize], &*vocabulary.tokens[r as usize])).collect()
}
