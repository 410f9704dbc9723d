//! The tokenizer of a bundle: `tokenizer.json`, read by the `tokenizers` crate, with a table of what
//! every token stands for.

use super::TextError;
use super::token_bytes::{DecoderSteps, TokenBytes};
use serde::Deserialize;
use std::collections::HashMap;

/// Encodes text, and knows the bytes of every token.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bytes: TokenBytes,
    /// One flag per id: a control token that is not text.
    special: Vec<bool>,
    strips_leading_space: bool,
    /// Tokens that a text may have, where there is a limit.
    most: usize,
}

/// Tokens that are always counted to the end: a megabyte of text takes a second at most.
const LEAST_LIMIT: usize = 1 << 16;
/// Bytes of a token, at most, in texts that are not looked at before they are taken as a whole: four times what prose has.
const BYTES_PER_TOKEN: usize = 16;
/// Bytes of the pieces in which longer texts are looked at.
const PIECE: usize = 1 << 16;

/// The one part of `tokenizer.json` that the `tokenizers` crate does not show.
#[derive(Deserialize)]
struct DecoderOnly {
    #[serde(default)]
    decoder: serde_json::Value,
}

/// The tables are too long to print.
impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Truncation and padding that it asks for are switched off: a server
    /// that cuts a prompt silently answers another question.
    ///
    /// # Errors
    /// [`TextError::Asset`] where the file is not a tokenizer, or its decoder is not known.
    pub fn from_json(json: &[u8]) -> Result<Self, TextError> {
        let asset = |reason: String| TextError::Asset { asset: "tokenizer.json", reason };
        let decoder: DecoderOnly = serde_json::from_slice(json).map_err(|error| asset(error.to_string()))?;
        let steps = DecoderSteps::from_json(&decoder.decoder).map_err(asset)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|error| asset(error.to_string()))?;
        inner.with_truncation(None).map_err(|error| asset(error.to_string()))?;
        inner.with_padding(None);
        cache_no_words(&mut inner);

        let added = inner.get_added_tokens_decoder();
        let mut vocabulary: Vec<(u32, String, bool)> =
            inner.get_vocab(true).into_iter().map(|(text, id)| (id, text, added.contains_key(&id))).collect();
        /// Ids beyond this are a damaged file, not a vocabulary: the largest published has 262,208.
        const MAX_ID: u32 = 1 << 22;
        if let Some((id, text, _)) = vocabulary.iter().find(|entry| entry.0 > MAX_ID) {
            return Err(asset(format!("token {text:?} has the id {id}, above {MAX_ID}")));
        }
        let bytes = TokenBytes::build(&steps, &mut vocabulary);
        let mut special = vec![false; bytes.len()];
        for (id, token) in &added {
            if let Some(flag) = special.get_mut(*id as usize) {
                *flag = token.special;
            }
        }
        let strips_leading_space = steps.strips_leading_space();
        Ok(Self { inner, bytes, special, strips_leading_space, most: usize::MAX })
    }

    /// Refuses texts that have far more than `tokens` tokens without taking them as a whole: of text, tokenising takes a
    /// second a megabyte and a hundred times its memory.
    pub fn limit(&mut self, tokens: usize) {
        self.most = tokens.max(LEAST_LIMIT);
    }

    /// Counts the tokens of a long text piece by piece, until they are too many. Cutting a text changes the tokens around the
    /// cut only, so that with twice as many in its pieces there are too many in the whole.
    fn refuse_long(&self, text: &str) -> Result<(), TextError> {
        if text.len() / BYTES_PER_TOKEN <= self.most {
            return Ok(());
        }
        let (mut rest, mut count) = (text, 0usize);
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE));
            count += self.encode_whole(piece, false)?.len();
            if count / 2 > self.most {
                return Err(TextError::TooLong { most: self.most });
            }
            rest = after;
        }
        Ok(())
    }

    /// Token ids of `text`. Markers of special tokens in the text become those tokens; with
    /// `add_special_tokens` the tokenizer also adds what its post-processor says, such as a BOS.
    ///
    /// # Errors
    /// [`TextError::Encode`] where the tokenizer cannot represent the text; [`TextError::TooLong`] where it is far beyond the
    /// [limit](Self::limit).
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        self.refuse_long(text)?;
        self.encode_whole(text, add_special_tokens)
    }

    fn encode_whole(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        self.inner
            .encode_fast(text, add_special_tokens)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| TextError::Encode(error.to_string()))
    }

    /// Text of a whole sequence. Bytes that are not UTF-8 become U+FFFD; ids without a token nothing.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if !(skip_special_tokens && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id));
            }
        }
        if self.strips_leading_space && bytes.first() == Some(&b' ') {
            bytes.remove(0);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Bytes that `id` adds to a text; empty where there is no such token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id)
    }

    /// Whether `id` is a control token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// One more than the largest id. A model's head may have more rows; those have no token.
    pub fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    /// Id of a token by its text in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Text of a token in the vocabulary, in the tokenizer's own spelling.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Ids of all control tokens, with their text.
    pub fn special_tokens(&self) -> HashMap<u32, String> {
        (0..self.special.len() as u32)
            .filter(|&id| self.is_special(id))
            .filter_map(|id| self.id_to_token(id).map(|text| (id, text)))
            .collect()
    }
}

/// Switches off the crate's cache of words. Each thread has one, fills it with the first words that it meets and never
/// forgets any, so that memory grows for as long as new words come, by megabytes in every thread; it saves a tenth to a
/// quarter of the time.
fn cache_no_words(tokenizer: &mut tokenizers::Tokenizer) {
    // The model cannot be changed in place; the copy lives for a moment.
    let mut model = tokenizer.get_model().clone();
    model.resize_cache(0);
    tokenizer.with_model(model);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::byte_tokenizer;
    use crate::test_support::tokenizer::byte_tokenizer_json;

    #[test]
    fn texts_survive_the_round_trip() {
        let tokenizer = byte_tokenizer();
        for text in ["", "plain", "\u{e9}\u{4e2d}\u{1f600}", " two  spaces\n"] {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(ids.len(), text.len());
            assert_eq!(tokenizer.decode(&ids, true), text);
        }
    }

    #[test]
    fn texts_far_beyond_the_limit_are_refused_and_others_counted() {
        let mut tokenizer = byte_tokenizer();
        let text = |bytes: usize| "\u{e9}".repeat(bytes / 2);
        let long = text(BYTES_PER_TOKEN * (LEAST_LIMIT + 1));
        assert_eq!(tokenizer.encode(&long, false).unwrap().len(), long.len());
        tokenizer.limit(7);
        assert!(matches!(tokenizer.encode(&long, false), Err(TextError::TooLong { most: LEAST_LIMIT })));
        // What is not very long is counted, so that its writer learns by how much it is too long.
        let shorter = text(BYTES_PER_TOKEN * LEAST_LIMIT);
        assert_eq!(tokenizer.encode(&shorter, false).unwrap().len(), shorter.len());
        // As is a long one that has few tokens after all.
        tokenizer.limit(long.len());
        assert_eq!(tokenizer.encode(&long, false).unwrap().len(), long.len());
    }

    #[test]
    fn specials_in_the_text_are_tokens() {
        let tokenizer = byte_tokenizer();
        let end = tokenizer.token_to_id("<|end|>").unwrap();
        assert_eq!(tokenizer.encode("a<|end|>", false).unwrap(), [97, end]);
        assert_eq!(tokenizer.decode(&[97, end], true), "a");
        assert_eq!(tokenizer.decode(&[97, end], false), "a<|end|>");
        assert_eq!(tokenizer.special_tokens()[&end], "<|end|>");
    }

    #[test]
    fn damaged_tokenizers_are_refused() {
        let good = byte_tokenizer_json();
        let cases = [
            ("{".to_owned(), "EOF"),
            ("{}".to_owned(), "tokenizer.json"),
            (good.replace("\"ByteLevel\"", "\"Nope\""), "Nope"),
            (good.replace("\"~\":126", "\"~\":4294967295"), "tokenizer.json"),
        ];
        for (json, expected) in cases {
            let message = Tokenizer::from_json(json.as_bytes()).unwrap_err().to_string();
            assert!(message.contains(expected), "{message} lacks {expected}");
        }
    }

    #[test]
    fn truncation_is_switched_off() {
        let json = byte_tokenizer_json().replace(
            "\"truncation\":null",
            r#""truncation":{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0}"#,
        );
        let tokenizer = Tokenizer::from_json(json.as_bytes()).unwrap();
        assert_eq!(tokenizer.encode("abcd", false).unwrap().len(), 4);
    }
}
