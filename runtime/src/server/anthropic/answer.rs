//! Answers in Anthropic's shape.

use super::error_body;
use crate::engine::FinishReason;
use crate::server::chat::{ChatEvent, Splitter};
use crate::server::choices::ChoiceSet;
use crate::server::envelope::unique_id;
use crate::server::error::ApiError;
use crate::server::sse::{Piece, PieceWriter};
use crate::server::tools::Part;
use crate::text::OutputEvent;
use crate::text::output::{OutputEnd, StopCause};
use serde_json::{Value, json};
use std::collections::VecDeque;

/// The making of an answer.
pub struct MessageAnswer {
    id: String,
    model: String,
    prompt_tokens: usize,
    cached_tokens: usize,
}

impl MessageAnswer {
    /// The answer of `model` to a prompt.
    pub fn new(model: String, prompt_tokens: usize) -> Self {
        Self { id: unique_id("msg"), model, prompt_tokens, cached_tokens: 0 }
    }

    fn usage(&self, output_tokens: usize) -> Value {
        json!({
            // Anthropic counts cached tokens apart.
            "input_tokens": self.prompt_tokens.saturating_sub(self.cached_tokens),
            "cache_read_input_tokens": self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": output_tokens,
        })
    }

    fn message(&self, content: Vec<Value>, stop: (Value, Value), output_tokens: usize) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop.0,
            "stop_sequence": stop.1,
            "usage": self.usage(output_tokens),
        })
    }

    /// The whole answer at once.
    ///
    /// # Errors
    /// 500 where the engine could not go on.
    pub async fn collect(mut self, mut choices: ChoiceSet, mut splitter: Splitter) -> Result<Value, ApiError> {
        let (mut text, mut thought) = (String::new(), String::new());
        let mut calls = Vec::new();
        let mut stop = (Value::Null, Value::Null);
        let mut output_tokens = 0;
        while let Some((index, event)) = choices.next().await {
            for event in splitter.split(index, event) {
                match event {
                    ChatEvent::Started { cached_tokens } => self.cached_tokens = cached_tokens,
                    ChatEvent::Parts { parts, .. } => {
                        for part in parts {
                            match part {
                                Part::Text(more) => text.push_str(&more),
                                Part::Thought(more) => thought.push_str(&more),
                                Part::Call { id, name, arguments, .. } => {
                                    let input = serde_json::from_str(&arguments).unwrap_or_else(|_| json!({}));
                                    calls.push(json!({"type": "tool_use", "id": id, "name": name, "input": input}));
                                }
                            }
                        }
                    }
                    ChatEvent::Finished { reason, end } => {
                        output_tokens = end.generated_tokens;
                        stop = stop_reason(reason, &end);
                    }
                    ChatEvent::Failed(reason) => return Err(ApiError::internal(reason)),
                }
            }
        }
        let mut content = Vec::new();
        if !thought.is_empty() {
            content.push(json!({"type": "thinking", "thinking": thought, "signature": ""}));
        }
        if !text.is_empty() || calls.is_empty() {
            content.push(json!({"type": "text", "text": text}));
        }
        content.append(&mut calls);
        Ok(self.message(content, stop, output_tokens))
    }
}

/// Anthropic's `stop_reason` and `stop_sequence`.
fn stop_reason(reason: &str, end: &OutputEnd) -> (Value, Value) {
    if let (FinishReason::Stop, Some(StopCause::Text(text))) = (end.reason, &end.cause) {
        return (json!("stop_sequence"), json!(text));
    }
    let name = match reason {
        "tool_calls" => "tool_use",
        "length" => "max_tokens",
        // Broken off by a shutdown; the turn can be gone on with.
        "abort" => "pause_turn",
        _ => "end_turn",
    };
    (json!(name), Value::Null)
}

/// The answer in pieces.
pub struct MessageWriter {
    answer: MessageAnswer,
    splitter: Splitter,
    /// Index of the block that is open, or of the next.
    blocks: usize,
    /// The kind of block that is open and that more pieces may go to.
    open: Option<Kind>,
}

/// Blocks that come in pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
}

impl MessageWriter {
    /// Writes `answer`.
    pub fn new(answer: MessageAnswer, splitter: Splitter) -> Self {
        Self { answer, splitter, blocks: 0, open: None }
    }

    fn begin(&mut self, block: &Value, out: &mut VecDeque<Piece>) {
        let value = json!({"type": "content_block_start", "index": self.blocks, "content_block": block});
        out.push_back(Piece::named("content_block_start", &value));
    }

    fn delta(&self, delta: &Value, out: &mut VecDeque<Piece>) {
        let value = json!({"type": "content_block_delta", "index": self.blocks, "delta": delta});
        out.push_back(Piece::named("content_block_delta", &value));
    }

    fn close(&mut self, out: &mut VecDeque<Piece>) {
        let value = json!({"type": "content_block_stop", "index": self.blocks});
        out.push_back(Piece::named("content_block_stop", &value));
        self.blocks += 1;
    }

    fn close_open(&mut self, out: &mut VecDeque<Piece>) {
        if self.open.take().is_some() {
            self.close(out);
        }
    }

    /// Makes sure that a block of that kind is open.
    fn continue_with(&mut self, kind: Kind, block: &Value, out: &mut VecDeque<Piece>) {
        if self.open != Some(kind) {
            self.close_open(out);
            self.begin(block, out);
            self.open = Some(kind);
        }
    }

    fn write_part(&mut self, part: Part, out: &mut VecDeque<Piece>) {
        match part {
            Part::Text(text) => {
                self.continue_with(Kind::Text, &json!({"type": "text", "text": ""}), out);
                self.delta(&json!({"type": "text_delta", "text": text}), out);
            }
            Part::Thought(text) => {
                let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                self.continue_with(Kind::Thinking, &block, out);
                self.delta(&json!({"type": "thinking_delta", "thinking": text}), out);
            }
            Part::Call { id, name, arguments, .. } => {
                self.close_open(out);
                self.begin(&json!({"type": "tool_use", "id": id, "name": name, "input": {}}), out);
                self.delta(&json!({"type": "input_json_delta", "partial_json": arguments}), out);
                self.close(out);
            }
        }
    }

    fn write_event(&mut self, event: ChatEvent, out: &mut VecDeque<Piece>) {
        match event {
            ChatEvent::Started { cached_tokens } => {
                self.answer.cached_tokens = cached_tokens;
                let message = self.answer.message(Vec::new(), (Value::Null, Value::Null), 0);
                let value = json!({"type": "message_start", "message": message});
                out.push_back(Piece::named("message_start", &value));
            }
            ChatEvent::Parts { parts, .. } => {
                for part in parts {
                    self.write_part(part, out);
                }
            }
            ChatEvent::Finished { reason, end } => {
                self.close_open(out);
                let (reason, sequence) = stop_reason(reason, &end);
                let value = json!({
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": self.answer.usage(end.generated_tokens),
                });
                out.push_back(Piece::named("message_delta", &value));
                out.push_back(Piece::named("message_stop", &json!({"type": "message_stop"})));
            }
            ChatEvent::Failed(reason) => {
                out.push_back(Piece::named("error", &error_body(&ApiError::internal(reason))));
            }
        }
    }
}

impl PieceWriter for MessageWriter {
    fn write(&mut self, choice: usize, event: OutputEvent, out: &mut VecDeque<Piece>) {
        for event in self.splitter.split(choice, event) {
            self.write_event(event, out);
        }
    }

    fn finish(&mut self, _: &mut VecDeque<Piece>) {}
}
