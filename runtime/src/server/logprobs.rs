//! Log-probabilities in the two shapes that OpenAI gives them.

use crate::engine::TokenLogprobs;
use crate::text::Tokenizer;
use crate::text::output::OutputToken;
use serde_json::{Map, Value, json};

/// A log-probability that JSON can hold: it has no infinity.
fn finite(logprob: f32) -> f32 {
    /// What vLLM puts in place of negative infinity.
    const LEAST: f32 = -9999.0;
    logprob.max(LEAST)
}

/// A token as text; bytes that are not a whole character on their own are shown as U+FFFD, and are exact
/// in `bytes`.
fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned()
}

/// The entries of a chat's `logprobs.content`.
pub fn chat_content(tokenizer: &Tokenizer, tokens: &[OutputToken]) -> Vec<Value> {
    let entry = |id: u32, logprob: f32| {
        json!({
            "token": token_text(tokenizer, id),
            "logprob": finite(logprob),
            "bytes": tokenizer.token_bytes(id),
        })
    };
    tokens
        .iter()
        .filter_map(|token| token.logprobs.as_ref())
        .map(|logprobs| {
            let mut value = entry(logprobs.id, logprobs.logprob);
            value["top_logprobs"] = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
            value
        })
        .collect()
}

/// A completion's `logprobs`: four parallel arrays.
#[derive(Debug, Default)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// Adds the first token of an echoed prompt, of which no probability is known.
    pub fn push_first(&mut self, tokenizer: &Tokenizer, id: u32) {
        self.tokens.push(token_text(tokenizer, id));
        self.token_logprobs.push(Value::Null);
        self.top_logprobs.push(Value::Null);
        self.text_offset.push(0);
    }

    /// Adds a token that begins `offset_chars` into the text.
    pub fn push(&mut self, tokenizer: &Tokenizer, logprobs: &TokenLogprobs, offset_chars: usize) {
        let mut top = Map::new();
        // The chosen token is always listed, as in vLLM; of tokens that look alike the likelier stays.
        for &(id, logprob) in logprobs.top.iter().chain(&[(logprobs.id, logprobs.logprob)]) {
            top.entry(token_text(tokenizer, id)).or_insert_with(|| json!(finite(logprob)));
        }
        self.tokens.push(token_text(tokenizer, logprobs.id));
        self.token_logprobs.push(json!(finite(logprobs.logprob)));
        self.top_logprobs.push(Value::Object(top));
        self.text_offset.push(offset_chars);
    }

    /// Adds the tokens of a delta; `base_chars` of text came before the output.
    pub fn extend(&mut self, tokenizer: &Tokenizer, tokens: &[OutputToken], base_chars: usize) {
        for token in tokens {
            if let Some(logprobs) = &token.logprobs {
                self.push(tokenizer, logprobs, base_chars + token.offset_chars);
            }
        }
    }

    /// OpenAI's object.
    pub fn into_json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}
