//! Tokens to text, one at a time, without ever splitting a character.

use super::tokenizer::Tokenizer;
use std::sync::Arc;

/// Text that one token completed, and how many of the text's bytes lie before it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextPiece {
    /// Whole characters; empty while the token's bytes are the beginning of one.
    pub text: String,
    /// Bytes of text that came before this piece.
    pub offset_bytes: usize,
}

/// Joins the bytes of tokens and lets out whole characters.
///
/// At most three bytes, the beginning of a character, are held back. Bytes that cannot become a
/// character are replaced by U+FFFD, one for each maximal ill-formed part, as
/// [`String::from_utf8_lossy`] does; the pieces joined equal the lossy decoding of all bytes at once.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special_tokens: bool,
    pending: Vec<u8>,
    emitted_bytes: usize,
}

impl Detokenizer {
    /// A detokeniser at the start of a text. With `skip_special_tokens`, tokens that the tokenizer marks
    /// as special contribute nothing.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, pending: Vec::with_capacity(16), emitted_bytes: 0 }
    }

    /// Adds a token; returns what it completed.
    pub fn push(&mut self, token: u32) -> TextPiece {
        if !(self.skip_special_tokens && self.tokenizer.is_special(token)) {
            self.pending.extend_from_slice(self.tokenizer.token_bytes(token));
        }
        let text = take_whole_characters(&mut self.pending);
        self.piece(text)
    }

    /// Ends the text: a character that was cut off becomes U+FFFD.
    pub fn finish(&mut self) -> TextPiece {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        self.piece(text)
    }

    fn piece(&mut self, text: String) -> TextPiece {
        let offset_bytes = self.emitted_bytes;
        self.emitted_bytes += text.len();
        TextPiece { text, offset_bytes }
    }
}

/// Moves everything but an incomplete last character out of `pending`.
fn take_whole_characters(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest = pending.as_slice();
    let kept = loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                break 0;
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                match error.error_len() {
                    Some(bad) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = &after[bad..];
                    }
                    None => break after.len(),
                }
            }
        }
    };
    pending.drain(..pending.len() - kept);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::byte_tokenizer;
    use proptest::prelude::*;

    fn stream(bytes: &[u8]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(Arc::new(byte_tokenizer()), true);
        let mut pieces: Vec<String> = bytes.iter().map(|&byte| detokenizer.push(u32::from(byte)).text).collect();
        pieces.push(detokenizer.finish().text);
        pieces
    }

    #[test]
    fn c72_an_emoji_of_single_bytes_comes_whole() {
        assert_eq!(stream("\u{1f600}!".as_bytes()), ["", "", "", "\u{1f600}", "!", ""]);
    }

    #[test]
    fn c72_a_cut_character_is_replaced_at_the_end_only() {
        assert_eq!(stream(&[b'a', 0xf0, 0x9f]), ["a", "", "", "\u{fffd}"]);
        assert_eq!(stream(&[0xf0, 0x9f, b'a']), ["", "", "\u{fffd}a", ""]);
    }

    #[test]
    fn c81_special_tokens_are_skipped_unless_asked_for() {
        let tokenizer = Arc::new(byte_tokenizer());
        let end = tokenizer.token_to_id("<|end|>").unwrap();
        for (skip, expected) in [(true, "ab"), (false, "a<|end|>b")] {
            let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), skip);
            let text: String =
                [u32::from(b'a'), end, u32::from(b'b')].into_iter().map(|id| detokenizer.push(id).text).collect();
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn c86_unknown_ids_are_empty() {
        let mut detokenizer = Detokenizer::new(Arc::new(byte_tokenizer()), true);
        assert_eq!(detokenizer.push(100_000).text, "");
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_lossy_whole(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(stream(&bytes).concat(), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn valid_text_survives(text in "\\PC{0,40}") {
            let pieces = stream(text.as_bytes());
            prop_assert_eq!(pieces.concat(), text);
        }
    }
}
