//! Answers to chats in OpenAI's shape, whole and in pieces.

use super::chat::{ChatEvent, ChatRequest, RunningChat, Splitter};
use super::choices::{ChoiceSet, Usage, timings_json};
use super::envelope::Envelope;
use super::error::ApiError;
use super::logprobs::chat_content;
use super::sse::{Piece, PieceWriter};
use super::tools::Part;
use crate::text::output::{OutputEnd, StopCause};
use crate::text::{OutputEvent, Tokenizer};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::Arc;

/// The making of an answer.
pub struct ChatAnswer {
    envelope: Envelope,
    tokenizer: Arc<Tokenizer>,
    logprobs: bool,
    include_usage: bool,
    timings: bool,
    usage: Usage,
}

/// What one choice has said so far.
#[derive(Default)]
struct Said {
    text: String,
    thought: String,
    calls: Vec<Value>,
    logprobs: Vec<Value>,
    end: Option<(&'static str, OutputEnd)>,
}

impl ChatAnswer {
    /// The answer to `request`.
    pub fn new(envelope: Envelope, request: &ChatRequest, running: &RunningChat) -> Self {
        Self {
            envelope,
            tokenizer: Arc::clone(running.served.text.tokenizer()),
            logprobs: request.params.wants_logprobs(),
            include_usage: request.params.include_usage,
            timings: request.params.timings,
            usage: Usage { prompt_tokens: running.prompt_tokens, ..Usage::default() },
        }
    }

    /// The whole answer at once.
    ///
    /// # Errors
    /// 500 where the engine could not go on.
    pub async fn collect(
        mut self,
        mut choices: ChoiceSet,
        mut splitter: Splitter,
    ) -> Result<axum::Json<Value>, ApiError> {
        let mut said: Vec<Said> = Vec::new();
        said.resize_with(choices.len(), Said::default);
        while let Some((index, event)) = choices.next().await {
            for event in splitter.split(index, event) {
                self.take(&mut said[index], event)?;
            }
        }
        let mut ends = said.iter().filter_map(|said| said.end.as_ref());
        let timings = ends.next_back().map(|(_, end)| self.timings_of(end));
        let choices = said.into_iter().enumerate().map(|(index, said)| self.choice(index, said)).collect();
        let mut object = self.envelope.object("chat.completion");
        object.insert("choices".to_owned(), Value::Array(choices));
        object.insert("usage".to_owned(), self.usage.to_json());
        if let (true, Some(timings)) = (self.timings, timings) {
            object.insert("timings".to_owned(), timings);
        }
        Ok(axum::Json(Value::Object(object)))
    }

    fn take(&mut self, said: &mut Said, event: ChatEvent) -> Result<(), ApiError> {
        match event {
            ChatEvent::Started { cached_tokens } => self.count_cached(cached_tokens),
            ChatEvent::Parts { parts, tokens } => {
                said.logprobs.extend(chat_content(&self.tokenizer, &tokens));
                for part in parts {
                    match part {
                        Part::Text(text) => said.text.push_str(&text),
                        Part::Thought(text) => said.thought.push_str(&text),
                        Part::Call { .. } => said.calls.push(call_json(&part)),
                    }
                }
            }
            ChatEvent::Finished { reason, end } => {
                self.usage.completion_tokens += end.generated_tokens;
                said.end = Some((reason, end));
            }
            ChatEvent::Failed(reason) => return Err(ApiError::internal(reason)),
        }
        Ok(())
    }

    fn choice(&self, index: usize, said: Said) -> Value {
        let mut message = json!({"role": "assistant", "content": said.text, "refusal": null});
        if !said.thought.is_empty() {
            message["reasoning_content"] = Value::String(said.thought);
        }
        if !said.calls.is_empty() {
            if said.text.trim().is_empty() {
                message["content"] = Value::Null;
            }
            message["tool_calls"] = Value::Array(said.calls);
        }
        json!({
            "index": index,
            "message": message,
            "logprobs": self.logprobs_json(said.logprobs),
            "finish_reason": said.end.as_ref().map(|(reason, _)| reason),
            "stop_reason": said.end.as_ref().map_or(Value::Null, |(_, end)| stop_reason(end)),
        })
    }

    fn count_cached(&mut self, cached_tokens: usize) {
        self.usage.cached_tokens = self.usage.cached_tokens.max(cached_tokens);
    }

    fn timings_of(&self, end: &OutputEnd) -> Value {
        timings_json(&end.timings, self.usage.prompt_tokens, end.generated_tokens)
    }

    fn logprobs_json(&self, content: Vec<Value>) -> Value {
        if self.logprobs { json!({"content": content, "refusal": null}) } else { Value::Null }
    }
}

/// A call as OpenAI writes it; null for what is none.
fn call_json(part: &Part) -> Value {
    match part {
        Part::Call { id, name, arguments, .. } => json!({
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }),
        Part::Text(_) | Part::Thought(_) => Value::Null,
    }
}

/// What ended a choice, vLLM's `stop_reason`: the stop string, the id of a stop token, or null.
pub fn stop_reason(end: &OutputEnd) -> Value {
    match &end.cause {
        Some(StopCause::Text(text)) => json!(text),
        Some(StopCause::Token(id)) => json!(id),
        None => Value::Null,
    }
}

/// The answer in pieces.
pub struct ChatWriter {
    answer: ChatAnswer,
    splitter: Splitter,
}

impl ChatWriter {
    /// Writes `answer`.
    pub fn new(answer: ChatAnswer, splitter: Splitter) -> Self {
        Self { answer, splitter }
    }

    fn chunk(&self, choices: Value) -> Map<String, Value> {
        let mut object = self.answer.envelope.object("chat.completion.chunk");
        object.insert("choices".to_owned(), choices);
        // OpenAI: null in every piece but the last, and only where usage was asked for.
        if self.answer.include_usage {
            object.insert("usage".to_owned(), Value::Null);
        }
        object
    }

    fn delta(&self, index: usize, delta: &Value, logprobs: &Value) -> Piece {
        Piece::json(&Value::Object(self.chunk(json!([{
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": null,
        }]))))
    }

    fn write_event(&mut self, choice: usize, event: ChatEvent, out: &mut VecDeque<Piece>) {
        match event {
            ChatEvent::Started { cached_tokens } => {
                self.answer.count_cached(cached_tokens);
                out.push_back(self.delta(choice, &json!({"role": "assistant", "content": ""}), &Value::Null));
            }
            ChatEvent::Parts { parts, tokens } => {
                let content = chat_content(&self.answer.tokenizer, &tokens);
                let mut logprobs = self.answer.logprobs_json(content);
                for part in &parts {
                    let delta = match part {
                        Part::Text(text) => json!({"content": text}),
                        Part::Thought(text) => json!({"reasoning_content": text}),
                        Part::Call { index, .. } => {
                            let mut call = call_json(part);
                            call["index"] = json!(index);
                            json!({"tool_calls": [call]})
                        }
                    };
                    out.push_back(self.delta(choice, &delta, &logprobs));
                    logprobs = Value::Null;
                }
                // Tokens without text of their own matter to those only who want their probabilities.
                if parts.is_empty() && !logprobs.is_null() && !tokens.is_empty() {
                    out.push_back(self.delta(choice, &json!({"content": ""}), &logprobs));
                }
            }
            ChatEvent::Finished { reason, end } => {
                self.answer.usage.completion_tokens += end.generated_tokens;
                let mut chunk = self.chunk(json!([{
                    "index": choice,
                    "delta": {},
                    "logprobs": null,
                    "finish_reason": reason,
                    "stop_reason": stop_reason(&end),
                }]));
                if self.answer.timings {
                    chunk.insert("timings".to_owned(), self.answer.timings_of(&end));
                }
                out.push_back(Piece::json(&Value::Object(chunk)));
            }
            ChatEvent::Failed(reason) => out.push_back(Piece::json(&ApiError::internal(reason).body())),
        }
    }
}

impl PieceWriter for ChatWriter {
    fn write(&mut self, choice: usize, event: OutputEvent, out: &mut VecDeque<Piece>) {
        for event in self.splitter.split(choice, event) {
            self.write_event(choice, event, out);
        }
    }

    fn finish(&mut self, out: &mut VecDeque<Piece>) {
        if self.answer.include_usage {
            let mut chunk = self.chunk(json!([]));
            chunk.insert("usage".to_owned(), self.answer.usage.to_json());
            out.push_back(Piece::json(&Value::Object(chunk)));
        }
        out.push_back(Piece::done());
    }
}
