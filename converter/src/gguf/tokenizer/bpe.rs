//! Byte-level BPE (`tokenizer.ggml.model` = gpt2).

use std::collections::HashSet;

use serde_json::{Value as Json, json};

use super::json::{Model, Parts, ids_by_text, sequence, split};
use super::pre::PreTokenizer;
use super::vocabulary::{MERGES, Vocabulary, array, tokenizer_error};
use crate::gguf::error::{GgufError, printable};
use crate::gguf::keys::Keys;

/// Model, pre-tokenizer and decoder of a byte-level BPE vocabulary.
pub(super) fn parts<'v>(
    keys: &Keys<'_, 'v>,
    vocabulary: &'v Vocabulary<'_>,
    pre: &PreTokenizer,
) -> Result<Parts<'v>, GgufError> {
    let mut cuts: Vec<Json> = pre.splits.iter().map(|regex| split(regex, "Isolated")).collect();
    cuts.push(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}));
    if let Some(missing) = missing_bytes(vocabulary) {
        // A byte without a token yields none, and nothing merges across it.
        cuts.push(split(&missing, "Removed"));
    }
    Ok(Parts {
        normalizer: Json::Null,
        pre_tokenizer: sequence("pretokenizers", cuts),
        decoder: json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        model: Model::Bpe {
            dropout: (),
            unk_token: None,
            continuing_subword_prefix: (),
            end_of_word_suffix: (),
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: pre.whole_words,
            vocab: ids_by_text(vocabulary),
            merges: merges(keys, vocabulary)?,
        },
    })
}

/// The merges as pairs, in order of rank; of a pair that comes twice the first counts, as in llama.cpp.
fn merges<'v>(keys: &Keys<'_, 'v>, vocabulary: &'v Vocabulary<'_>) -> Result<Vec<(&'v str, &'v str)>, GgufError> {
    let problem = |found: String, expected: &str| tokenizer_error(keys, MERGES, found, expected);
    let array = array(keys, MERGES)?.ok_or_else(|| problem("missing".into(), "the merges of a BPE vocabulary"))?;
    let strings = array
        .strings()
        .ok_or_else(|| problem(format!("an array of {}", array.element().name()), "an array of strings"))?;
    let tokens: HashSet<&str> = vocabulary.tokens.iter().map(|t| &**t).collect();
    let mut merges = Vec::with_capacity(array.len());
    let mut seen = HashSet::with_capacity(array.len());
    let mut joined = String::new();
    for (rank, raw) in strings.enumerate() {
        let wrong = |why: &str| {
            problem(format!("merge {rank} (\"{}\") {why}", printable(raw)), "two tokens with a space between")
        };
        let text = std::str::from_utf8(raw).map_err(|_| wrong("is not UTF-8"))?;
        // The space is looked for from the second byte on: the first part may be a space in old files.
        let place = text.bytes().skip(1).position(|b| b == b' ').map(|p| p + 1).ok_or_else(|| wrong("has no space"))?;
        let (left, right) = (&text[..place], &text[place + 1..]);
        joined.clear();
        joined.push_str(left);
        joined.push_str(right);
        if !tokens.contains(left) || !tokens.contains(right) || !tokens.contains(joined.as_str()) {
            return Err(wrong("does not join two tokens to a third"));
        }
        if seen.insert((left, right)) {
            merges.push((left, right));
        }
    }
    Ok(merges)
}

/// A regular expression of the characters that stand for bytes without a token of their own; `None` if every byte has one.
fn missing_bytes(vocabulary: &Vocabulary<'_>) -> Option<String> {
    let tokens: HashSet<&str> = vocabulary.tokens.iter().map(|t| &**t).collect();
    let mut class = String::from("[");
    let mut any = false;
    for byte in 0..=255 {
        let c = byte_char(byte);
        if !tokens.contains(c.encode_utf8(&mut [0; 4])) {
            any = true;
            class.push('\\');
            class.push_str(&format!("x{{{:x}}}", u32::from(c)));
        }
    }
    class.push(']');
    any.then_some(class)
}

/// The character that stands for a byte in a byte-level vocabulary: itself where it is visible Latin-1, otherwise the next free
/// one from U+0100 on.
fn byte_char(byte: u8) -> char {
    let visible = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if visible(byte) {
        return char::from(byte);
    }
    let earlier = (0..byte).filter(|b| !visible(*b)).count() as u32;
    char::from_u32(0x100 + earlier).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_as_characters() {
        assert_eq!(byte_char(b' '), '\u{120}');
        assert_eq!(byte_char(b'\n'), '\u{10a}');
        assert_eq!(byte_char(b'A'), 'A');
        assert_eq!(byte_char(0xad), '\u{143}');
        let all: HashSet<char> = (0..=255).map(byte_char).collect();
        assert_eq!(all.len(), 256);
    }
}
