//! Unigram (`tokenizer.ggml.model` = t5).

use serde_json::json;

use super::json::{Model, Parts, sequence};
use super::vocabulary::{SCORES, Vocabulary, array, tokenizer_error};
use crate::gguf::error::GgufError;
use crate::gguf::keys::Keys;

const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";

/// Normalizer, pre-tokenizer, model and decoder of a unigram vocabulary.
pub(super) fn parts<'v>(
    keys: &Keys<'_, '_>,
    vocabulary: &'v Vocabulary<'_>,
    prefix: bool,
    one_space: bool,
) -> Result<Parts<'v>, GgufError> {
    if vocabulary.scores.is_empty() {
        return Err(tokenizer_error(keys, SCORES, "missing".into(), "the scores of a unigram vocabulary"));
    }
    let mut normalizers = Vec::new();
    if let Some(map) = array(keys, CHARSMAP)? {
        normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": base64(map.raw())}));
    }
    if one_space {
        normalizers.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}));
    }
    let scheme = if prefix { "always" } else { "never" };
    let metaspace = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true});
    Ok(Parts {
        normalizer: sequence("normalizers", normalizers),
        pre_tokenizer: metaspace.clone(),
        decoder: metaspace,
        model: Model::Unigram {
            unk_id: vocabulary.id("unknown").or(Some(2)).filter(|id| (*id as usize) < vocabulary.tokens.len()),
            vocab: vocabulary.tokens.iter().map(|t| &**t).zip(vocabulary.scores.iter().copied()).collect(),
            byte_fallback: false,
        },
    })
}

/// Base64 with padding (RFC 4648).
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().enumerate().fold(0u32, |w, (i, b)| w | u32::from(*b) << (16 - 8 * i));
        for i in 0..4 {
            out.push(if i <= chunk.len() { char::from(DIGITS[(word >> (18 - 6 * i)) as usize & 63]) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_the_rfc() {
        for (text, want) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(text.as_bytes()), want);
        }
    }
}
