//! What each token contributes to the text, in bytes.
//!
//! A tokenizer's decoder is written for whole sequences. A server needs the bytes of one token: to
//! stream without splitting characters, to report log-probabilities, to constrain output. The table is
//! read off the `decoder` of `tokenizer.json` once, by applying its steps to each token alone; the
//! steps that need a neighbour (stripping the very first space) are kept as a flag.
//!
//! Formulas: `ByteLevel` is GPT-2's reversible map between bytes and printable characters
//! (`encoder.py`, `bytes_to_unicode`); `ByteFallback` is SentencePiece's `<0xNN>`.

use serde_json::Value;
use std::collections::HashMap;

/// One decoder step, applied to one token.
#[derive(Debug, Clone, PartialEq)]
enum Step {
    /// Replace a literal string.
    Replace { pattern: String, content: String },
    /// `<0xNN>` is the byte NN.
    ByteFallback,
    /// Characters stand for bytes as in GPT-2.
    ByteLevel,
    /// A suffix that marks the end of a word becomes a space.
    WordSuffix { suffix: String },
    /// A prefix that marks the middle of a word disappears; other tokens start with a space.
    WordPrefix { prefix: String },
}

/// The steps of a decoder, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DecoderSteps {
    steps: Vec<Step>,
    /// Whether a whole text loses one leading space.
    strip_leading_space: bool,
}

impl DecoderSteps {
    /// Reads the `decoder` object of a `tokenizer.json`; `Value::Null` is the decoder that joins tokens
    /// as they are.
    ///
    /// # Errors
    /// The name of a decoder or of one of its parts that is not known.
    pub fn from_json(decoder: &Value) -> Result<Self, String> {
        let mut result = Self::default();
        result.add(decoder, 0)?;
        Ok(result)
    }

    /// Whether decoding a whole text removes one space at its start.
    pub fn strips_leading_space(&self) -> bool {
        self.strip_leading_space
    }

    fn add(&mut self, decoder: &Value, depth: usize) -> Result<(), String> {
        /// Nesting that no real tokenizer has.
        const MAX_DEPTH: usize = 8;
        if decoder.is_null() {
            return Ok(());
        }
        if depth > MAX_DEPTH {
            return Err("decoder is nested too deeply".to_owned());
        }
        let text = |key: &str| decoder.get(key).and_then(Value::as_str);
        match text("type").ok_or("decoder without a type")? {
            "Sequence" => {
                let parts = decoder.get("decoders").and_then(Value::as_array);
                for part in parts.ok_or("Sequence decoder without decoders")? {
                    self.add(part, depth + 1)?;
                }
            }
            "ByteLevel" => self.steps.push(Step::ByteLevel),
            "ByteFallback" => self.steps.push(Step::ByteFallback),
            "Fuse" => {}
            "Replace" => {
                let pattern = decoder
                    .pointer("/pattern/String")
                    .and_then(Value::as_str)
                    .ok_or("Replace decoder whose pattern is not a plain string")?;
                self.steps.push(Step::Replace {
                    pattern: pattern.to_owned(),
                    content: text("content").unwrap_or_default().to_owned(),
                });
            }
            "Strip" => {
                let start = decoder.get("start").and_then(Value::as_u64).unwrap_or(0);
                let stop = decoder.get("stop").and_then(Value::as_u64).unwrap_or(0);
                match (text("content"), start, stop) {
                    (_, 0, 0) => {}
                    (Some(" "), 1, 0) => self.strip_leading_space = true,
                    other => return Err(format!("Strip decoder with {other:?}")),
                }
            }
            "Metaspace" => {
                self.steps.push(Step::Replace {
                    pattern: text("replacement").unwrap_or("\u{2581}").to_owned(),
                    content: " ".to_owned(),
                });
                self.strip_leading_space = text("prepend_scheme") != Some("never");
            }
            "BPEDecoder" => self.steps.push(Step::WordSuffix { suffix: text("suffix").unwrap_or("</w>").to_owned() }),
            "WordPiece" => {
                self.steps.push(Step::WordPrefix { prefix: text("prefix").unwrap_or("##").to_owned() });
                self.strip_leading_space = true;
            }
            other => return Err(format!("unknown decoder {other}")),
        }
        Ok(())
    }

    /// The bytes of one token of the vocabulary.
    fn apply(&self, token: &str, byte_of: &HashMap<char, u8>) -> Vec<u8> {
        let mut text = token.to_owned();
        for step in &self.steps {
            match step {
                Step::Replace { pattern, content } if !pattern.is_empty() => {
                    text = text.replace(pattern, content);
                }
                Step::Replace { .. } => {}
                Step::ByteFallback => {
                    if let Some(byte) = fallback_byte(&text) {
                        return vec![byte];
                    }
                }
                Step::ByteLevel => {
                    let bytes: Option<Vec<u8>> = text.chars().map(|c| byte_of.get(&c).copied()).collect();
                    return bytes.unwrap_or_else(|| text.into_bytes());
                }
                Step::WordSuffix { suffix } => {
                    if let Some(word) = text.strip_suffix(suffix.as_str()) {
                        text = format!("{word} ");
                    }
                }
                Step::WordPrefix { prefix } => {
                    text = match text.strip_prefix(prefix.as_str()) {
                        Some(rest) => rest.to_owned(),
                        None => format!(" {text}"),
                    };
                }
            }
        }
        text.into_bytes()
    }
}

/// The byte of a SentencePiece fallback token, `<0x0A>`.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// GPT-2's map from printable characters back to bytes: bytes that are printable in Latin-1 stand for
/// themselves, the other 68 take the characters from U+0100 upwards in order.
fn byte_level_alphabet() -> HashMap<char, u8> {
    let mut alphabet = HashMap::with_capacity(256);
    let mut next = 0x100u32;
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let character = if printable {
            char::from(byte)
        } else {
            let mapped = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
            next += 1;
            mapped
        };
        alphabet.insert(character, byte);
    }
    alphabet
}

/// Bytes of every token, indexed by id; ids without a token have none.
#[derive(Debug, Clone, Default)]
pub struct TokenBytes {
    bytes: Vec<u8>,
    /// End of each token's bytes; the start is the end of the one before.
    ends: Vec<u32>,
}

impl TokenBytes {
    /// Builds the table from the vocabulary, `(id, text, is an added token)` in any order.
    ///
    /// Added tokens stand for their own content, whatever the decoder; a decoder such as `ByteLevel`
    /// leaves them unchanged as well, because their content is ASCII or not in its alphabet.
    pub fn build(steps: &DecoderSteps, vocabulary: &mut [(u32, String, bool)]) -> Self {
        let alphabet = byte_level_alphabet();
        vocabulary.sort_unstable_by_key(|entry| entry.0);
        let mut table = Self::default();
        for (id, text, added) in vocabulary.iter() {
            let end = table.bytes.len() as u32;
            if (*id as usize) < table.ends.len() {
                continue;
            }
            table.ends.resize(*id as usize, end);
            if *added {
                table.bytes.extend_from_slice(text.as_bytes());
            } else {
                table.bytes.extend(steps.apply(text, &alphabet));
            }
            table.ends.push(table.bytes.len() as u32);
        }
        table
    }

    /// One more than the largest id.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Bytes of `id`; empty where there is no such token.
    pub fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else {
            return &[];
        };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn table(decoder: Value, tokens: &[&str]) -> TokenBytes {
        let steps = DecoderSteps::from_json(&decoder).unwrap();
        let mut vocabulary: Vec<_> =
            tokens.iter().enumerate().map(|(id, text)| (id as u32, (*text).to_owned(), false)).collect();
        TokenBytes::build(&steps, &mut vocabulary)
    }

    #[test]
    fn byte_level_tokens_are_bytes() {
        let table = table(json!({"type": "ByteLevel"}), &["\u{120}the", "\u{10a}", "\u{f0}\u{141}", "a b"]);
        assert_eq!(table.get(0), b" the");
        assert_eq!(table.get(1), b"\n");
        assert_eq!(table.get(2), [0xf0, 0x9f]);
        assert_eq!(table.get(3), b"a b");
        assert_eq!(table.get(9), b"");
    }

    #[test]
    fn alphabet_covers_every_byte_once() {
        let alphabet = byte_level_alphabet();
        assert_eq!(alphabet.len(), 256);
        let mut bytes: Vec<u8> = alphabet.values().copied().collect();
        bytes.sort_unstable();
        assert!(bytes.iter().enumerate().all(|(i, &b)| i == b as usize));
    }

    #[test]
    fn sentencepiece_tokens_are_bytes() {
        let decoder = json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
        assert!(DecoderSteps::from_json(&decoder).unwrap().strips_leading_space());
        let table = table(decoder, &["\u{2581}the", "<0xF0>", "<0xZZ>", "<0x+1>"]);
        assert_eq!(table.get(0), b" the");
        assert_eq!(table.get(1), [0xf0]);
        assert_eq!(table.get(2), b"<0xZZ>");
        assert_eq!(table.get(3), b"<0x+1>");
    }

    #[test]
    fn word_decoders_put_spaces_back() {
        let suffix = table(json!({"type": "BPEDecoder", "suffix": "</w>"}), &["low</w>", "lo"]);
        assert_eq!(suffix.get(0), b"low ");
        assert_eq!(suffix.get(1), b"lo");
        let prefix = table(json!({"type": "WordPiece", "prefix": "##"}), &["low", "##er"]);
        assert_eq!(prefix.get(0), b" low");
        assert_eq!(prefix.get(1), b"er");
    }

    #[test]
    fn unknown_decoders_are_named() {
        for (decoder, expected) in [
            (json!({"type": "CTC"}), "CTC"),
            (json!({"pad": 1}), "without a type"),
            (json!({"type": "Sequence"}), "without decoders"),
            (json!({"type": "Replace", "pattern": {"Regex": "x"}}), "plain string"),
            (json!({"type": "Strip", "content": "x", "start": 2}), "Strip"),
        ] {
            let message = DecoderSteps::from_json(&decoder).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn holes_in_the_vocabulary_are_empty() {
        let mut vocabulary = vec![(3, "c".to_owned(), false), (1, "<x>".to_owned(), true)];
        let table = TokenBytes::build(&DecoderSteps::default(), &mut vocabulary);
        assert_eq!(table.len(), 4);
        let all: Vec<&[u8]> = (0..5).map(|id| table.get(id)).collect();
        assert_eq!(all, [&b""[..], b"<x>", b"", b"c", b""]);
    }
}
