//! The vocabulary as the metadata hold it, checked: tokens, scores, kinds, special ids.

use std::collections::HashMap;

use crate::gguf::error::{GgufError, printable};
use crate::gguf::keys::Keys;
use crate::gguf::value::{Array, Value};

pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(super) const SCORES: &str = "tokenizer.ggml.scores";
pub(super) const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
pub(super) const MERGES: &str = "tokenizer.ggml.merges";
pub(super) const PRE: &str = "tokenizer.ggml.pre";
pub(super) const MODEL: &str = "tokenizer.ggml.model";

/// What a token is (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// Tokens with what is known of each.
pub(super) struct Vocabulary<'a> {
    /// Text of each token, by id; empty tokens get a name of their own.
    pub(super) tokens: Vec<std::borrow::Cow<'a, str>>,
    /// Kind of each token.
    pub(super) kinds: Vec<Kind>,
    /// Score of each token, empty where the file has none.
    pub(super) scores: Vec<f64>,
    /// Ids by name of the key without its ends: `bos`, `eos`, `unknown`, ...
    ids: HashMap<&'static str, u32>,
}

/// Special ids: the short name and the key.
const SPECIAL_IDS: &[(&str, &str)] = &[
    ("bos", "tokenizer.ggml.bos_token_id"),
    ("eos", "tokenizer.ggml.eos_token_id"),
    ("eot", "tokenizer.ggml.eot_token_id"),
    ("eom", "tokenizer.ggml.eom_token_id"),
    ("unknown", "tokenizer.ggml.unknown_token_id"),
    // The misspelling is the format's.
    ("sep", "tokenizer.ggml.seperator_token_id"),
    ("pad", "tokenizer.ggml.padding_token_id"),
    ("cls", "tokenizer.ggml.cls_token_id"),
    ("mask", "tokenizer.ggml.mask_token_id"),
    ("fim_pre", "tokenizer.ggml.fim_pre_token_id"),
    ("fim_suf", "tokenizer.ggml.fim_suf_token_id"),
    ("fim_mid", "tokenizer.ggml.fim_mid_token_id"),
    ("fim_pad", "tokenizer.ggml.fim_pad_token_id"),
    ("fim_rep", "tokenizer.ggml.fim_rep_token_id"),
    ("fim_sep", "tokenizer.ggml.fim_sep_token_id"),
];

/// Texts that llama.cpp takes for control tokens whatever their kind says: ends of a turn or of a text, and places to fill in.
const CONTROL_TEXTS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "[e~[",
];

/// Channel markers that are rendered in the output (gpt-oss).
const VISIBLE_TEXTS: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

impl<'a> Vocabulary<'a> {
    /// Reads and checks it. `rows` is the number of rows of the token embedding, 0 where it is not known.
    pub(super) fn read(keys: &Keys<'_, 'a>, rows: u64) -> Result<Self, GgufError> {
        let problem = |found: String, expected: &str| tokenizer_error(keys, TOKENS, found, expected);
        let array =
            array(keys, TOKENS)?.ok_or_else(|| problem("missing".into(), "the tokens, as an array of strings"))?;
        let strings = array.strings().ok_or_else(|| {
            problem(format!("an array of {}", array.element().name()), "the tokens, as an array of strings")
        })?;
        let mut tokens = Vec::with_capacity(array.len());
        let mut seen = HashMap::with_capacity(array.len());
        for (id, raw) in strings.enumerate() {
            let text = std::str::from_utf8(raw)
                .map_err(|_| problem(format!("token {id} is not UTF-8 (\"{}\")", printable(raw)), "tokens in UTF-8"))?;
            // llama.cpp's name for a token without text.
            let text = if text.is_empty() { format!("[EMPTY_{id}]").into() } else { std::borrow::Cow::Borrowed(text) };
            if let Some(first) = seen.insert(text.clone(), id) {
                let name = printable(raw);
                return Err(problem(format!("tokens {first} and {id} are both \"{name}\""), "every token once"));
            }
            tokens.push(text);
        }
        if rows > 0 && tokens.len() as u64 > rows {
            let found = format!("{} tokens for an embedding of {rows} rows", tokens.len());
            return Err(problem(found, "at most one token per row"));
        }
        let mut kinds = kinds(keys, tokens.len())?;
        for (kind, text) in kinds.iter_mut().zip(&tokens) {
            if VISIBLE_TEXTS.contains(&&**text) {
                *kind = Kind::UserDefined;
            } else if CONTROL_TEXTS.contains(&&**text) {
                *kind = Kind::Control;
            }
        }
        let scores = scores(keys, tokens.len())?;
        let mut ids = HashMap::new();
        for (name, key) in SPECIAL_IDS {
            let Some(value) = keys.metadata.get(key) else { continue };
            let id = value.as_u64().filter(|id| *id < tokens.len() as u64).ok_or_else(|| {
                let expected = format!("the id of one of the {} tokens", tokens.len());
                tokenizer_error(keys, key, value.describe(), &expected)
            })?;
            ids.insert(*name, id as u32);
        }
        Ok(Self { tokens, kinds, scores, ids })
    }

    /// A special id (`bos`, `eos`, ...).
    pub(super) fn id(&self, name: &str) -> Option<u32> {
        self.ids.get(name).copied()
    }

    /// The text of a special token.
    pub(super) fn special_text(&self, name: &str) -> Option<&str> {
        self.id(name).map(|id| &*self.tokens[id as usize])
    }

    /// Ids by text.
    pub(super) fn index(&self) -> HashMap<&str, u32> {
        self.tokens.iter().zip(0..).map(|(t, id)| (&**t, id)).collect()
    }

    /// Every token that ends a generation: the ids that the metadata name, and the texts that llama.cpp goes by.
    pub(super) fn end_ids(&self) -> Vec<u32> {
        let mut ends: Vec<u32> = ["eos", "eot", "eom"].into_iter().filter_map(|n| self.id(n)).collect();
        let index = self.index();
        ends.extend(CONTROL_TEXTS.iter().filter_map(|t| index.get(t).copied()));
        // In some vocabularies this is markup and not an end (Gemma's strike-through).
        ends.extend(index.get("</s>").copied().filter(|id| self.kinds[*id as usize] == Kind::Control));
        let has = |text: &str| index.get(text).is_some_and(|id| ends.contains(id));
        // Where a turn has several parts, the end of a part is not the end.
        let call = has("<|call|>") || has("<|calls|>");
        let drop_end = call && (has("<|return|>") || has("<|flush|>"));
        let drop_s = has("<|tool_response>");
        let dropped: Vec<u32> = [("<|end|>", drop_end), ("</s>", drop_s)]
            .into_iter()
            .filter(|(_, drop)| *drop)
            .filter_map(|(text, _)| index.get(text).copied())
            .filter(|id| Some(*id) != self.id("eos"))
            .collect();
        ends.retain(|id| !dropped.contains(id));
        // The declared end first, then by id.
        ends.sort_unstable_by_key(|id| (Some(*id) != self.id("eos"), *id));
        ends.dedup();
        ends
    }
}

/// An error of the tokenizer's metadata.
pub(super) fn tokenizer_error(keys: &Keys<'_, '_>, key: &'static str, found: String, expected: &str) -> GgufError {
    GgufError::Tokenizer { file: keys.file.into(), key, found, expected: expected.into() }
}

/// A key that must be an array where it is present.
pub(super) fn array<'a>(keys: &Keys<'_, 'a>, key: &'static str) -> Result<Option<Array<'a>>, GgufError> {
    match keys.metadata.get(key) {
        None => Ok(None),
        Some(Value::Array(array)) => Ok(Some(*array)),
        Some(other) => Err(tokenizer_error(keys, key, other.describe(), "an array")),
    }
}

fn enough(keys: &Keys<'_, '_>, key: &'static str, found: usize, tokens: usize) -> Result<(), GgufError> {
    if found < tokens {
        return Err(tokenizer_error(
            keys,
            key,
            format!("{found} elements"),
            &format!("one for each of {tokens} tokens"),
        ));
    }
    Ok(())
}

fn kinds(keys: &Keys<'_, '_>, tokens: usize) -> Result<Vec<Kind>, GgufError> {
    let Some(array) = array(keys, TOKEN_TYPE)? else { return Ok(vec![Kind::Normal; tokens]) };
    enough(keys, TOKEN_TYPE, array.len(), tokens)?;
    let integers = array.integers().ok_or_else(|| {
        tokenizer_error(keys, TOKEN_TYPE, format!("an array of {}", array.element().name()), "an array of integers")
    })?;
    let kind = |value| match value {
        1 => Ok(Kind::Normal),
        2 => Ok(Kind::Unknown),
        3 => Ok(Kind::Control),
        4 => Ok(Kind::UserDefined),
        // 0: undefined, which llama.cpp never matches either.
        0 | 5 => Ok(Kind::Unused),
        6 => Ok(Kind::Byte),
        other => Err(tokenizer_error(keys, TOKEN_TYPE, format!("the kind {other}"), "kinds from 0 to 6")),
    };
    integers.take(tokens).map(kind).collect()
}

fn scores(keys: &Keys<'_, '_>, tokens: usize) -> Result<Vec<f64>, GgufError> {
    let Some(array) = array(keys, SCORES)? else { return Ok(Vec::new()) };
    enough(keys, SCORES, array.len(), tokens)?;
    let mut scores = array.floats().ok_or_else(|| {
        tokenizer_error(keys, SCORES, format!("an array of {}", array.element().name()), "an array of numbers")
    })?;
    scores.truncate(tokens);
    if let Some(id) = scores.iter().position(|s| s.is_nan()) {
        return Err(tokenizer_error(keys, SCORES, format!("the score of token {id} is not a number"), "numbers"));
    }
    Ok(scores)
}
