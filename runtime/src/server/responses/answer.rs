//! Answers of the responses protocol.

use crate::engine::FinishReason;
use crate::server::chat::{ChatEvent, Splitter};
use crate::server::choices::{ChoiceSet, Usage};
use crate::server::envelope::{unique_id, unix_seconds};
use crate::server::error::ApiError;
use crate::server::sse::{Piece, PieceWriter};
use crate::server::tools::Part;
use crate::text::OutputEvent;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;

/// Fields of the request that the answer repeats, with what stands for their absence.
fn repeated(request: &Map<String, Value>) -> Map<String, Value> {
    let defaults = [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("temperature", json!(1.0)),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_p", json!(1.0)),
        ("user", Value::Null),
    ];
    let value_of = |name: &str| request.get(name).filter(|value| !value.is_null()).cloned();
    defaults.into_iter().map(|(name, default)| (name.to_owned(), value_of(name).unwrap_or(default))).collect()
}

/// The making of an answer.
pub struct ResponseAnswer {
    id: String,
    created: u64,
    model: String,
    repeated: Map<String, Value>,
    usage: Usage,
    /// Items that are complete.
    output: Vec<Value>,
    end: Option<FinishReason>,
}

impl ResponseAnswer {
    /// The answer of `model` to a request of `prompt_tokens`.
    pub fn new(model: String, request: &Map<String, Value>, prompt_tokens: usize) -> Self {
        Self {
            id: unique_id("resp"),
            created: unix_seconds(),
            model,
            repeated: repeated(request),
            usage: Usage { prompt_tokens, ..Usage::default() },
            output: Vec::new(),
            end: None,
        }
    }

    fn status(&self) -> &'static str {
        match self.end {
            None => "in_progress",
            Some(FinishReason::Stop) => "completed",
            Some(FinishReason::Length | FinishReason::Abort) => "incomplete",
        }
    }

    fn to_json(&self) -> Value {
        let incomplete = match self.end {
            Some(FinishReason::Length) => json!({"reason": "max_output_tokens"}),
            Some(FinishReason::Abort) => json!({"reason": "server_shutdown"}),
            _ => Value::Null,
        };
        let usage = self.end.map(|_| {
            json!({
                "input_tokens": self.usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.usage.cached_tokens},
                "output_tokens": self.usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
            })
        });
        let mut value = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status(),
            "error": null,
            "incomplete_details": incomplete,
            "model": self.model,
            "output": self.output,
            "previous_response_id": null,
            "reasoning": {"effort": null, "summary": null},
            "store": false,
            "truncation": "disabled",
            "usage": usage,
        });
        if let Some(fields) = value.as_object_mut() {
            fields.extend(self.repeated.clone());
        }
        value
    }

    /// The whole answer at once.
    ///
    /// # Errors
    /// 500 where the engine could not go on.
    pub async fn collect(self, mut choices: ChoiceSet, splitter: Splitter) -> Result<Value, ApiError> {
        let mut writer = ResponseWriter::new(self, splitter);
        // The pieces of a stream and the whole are made by the same code; the pieces are not needed here.
        let mut pieces = VecDeque::new();
        while let Some((choice, event)) = choices.next().await {
            if let OutputEvent::Failed(reason) = event {
                return Err(ApiError::internal(reason));
            }
            writer.write(choice, event, &mut pieces);
            pieces.clear();
        }
        Ok(writer.answer.to_json())
    }
}

/// A message, or the thoughts before it, being written.
struct OpenMessage {
    id: String,
    text: String,
}

impl OpenMessage {
    fn part(&self) -> Value {
        json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []})
    }

    fn thoughts(&self, status: &str, content: Vec<Value>) -> Value {
        json!({"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": content})
    }

    fn item(&self, status: &str, content: Vec<Value>) -> Value {
        json!({"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content})
    }
}

/// The answer in pieces.
pub struct ResponseWriter {
    answer: ResponseAnswer,
    splitter: Splitter,
    open: Option<OpenMessage>,
    thoughts: Option<OpenMessage>,
    sequence: u64,
}

impl ResponseWriter {
    /// Writes `answer`.
    pub fn new(answer: ResponseAnswer, splitter: Splitter) -> Self {
        Self { answer, splitter, open: None, thoughts: None, sequence: 0 }
    }

    fn send(&mut self, kind: &'static str, mut value: Value, out: &mut VecDeque<Piece>) {
        value["type"] = json!(kind);
        value["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        out.push_back(Piece::named(kind, &value));
    }

    fn send_response(&mut self, kind: &'static str, out: &mut VecDeque<Piece>) {
        let response = self.answer.to_json();
        self.send(kind, json!({"response": response}), out);
    }

    fn write_thought(&mut self, text: &str, out: &mut VecDeque<Piece>) {
        let index = self.answer.output.len();
        if self.thoughts.is_none() {
            let thoughts = OpenMessage { id: unique_id("rs"), text: String::new() };
            let item = thoughts.thoughts("in_progress", Vec::new());
            self.thoughts = Some(thoughts);
            self.send("response.output_item.added", json!({"output_index": index, "item": item}), out);
        }
        if let Some(thoughts) = &mut self.thoughts {
            thoughts.text.push_str(text);
            let delta = json!({"item_id": thoughts.id, "output_index": index, "content_index": 0, "delta": text});
            self.send("response.reasoning_text.delta", delta, out);
        }
    }

    fn close_thoughts(&mut self, status: &str, out: &mut VecDeque<Piece>) {
        let Some(thoughts) = self.thoughts.take() else {
            return;
        };
        let index = self.answer.output.len();
        let done = json!({"item_id": thoughts.id, "output_index": index, "content_index": 0, "text": thoughts.text});
        self.send("response.reasoning_text.done", done, out);
        let item = thoughts.thoughts(status, vec![json!({"type": "reasoning_text", "text": thoughts.text})]);
        self.send("response.output_item.done", json!({"output_index": index, "item": item}), out);
        self.answer.output.push(item);
    }

    fn write_text(&mut self, text: &str, out: &mut VecDeque<Piece>) {
        self.close_thoughts("completed", out);
        let index = self.answer.output.len();
        if self.open.is_none() {
            let message = OpenMessage { id: unique_id("msg"), text: String::new() };
            let (id, item, part) = (message.id.clone(), message.item("in_progress", Vec::new()), message.part());
            self.open = Some(message);
            self.send("response.output_item.added", json!({"output_index": index, "item": item}), out);
            let added = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            self.send("response.content_part.added", added, out);
        }
        if let Some(message) = &mut self.open {
            message.text.push_str(text);
            let delta = json!({"item_id": message.id, "output_index": index, "content_index": 0,
                "delta": text, "logprobs": []});
            self.send("response.output_text.delta", delta, out);
        }
    }

    fn close_text(&mut self, status: &str, out: &mut VecDeque<Piece>) {
        self.close_thoughts(status, out);
        let Some(message) = self.open.take() else {
            return;
        };
        let index = self.answer.output.len();
        let at = json!({"item_id": message.id, "output_index": index, "content_index": 0});
        let mut done = at.clone();
        done["text"] = json!(message.text);
        done["logprobs"] = json!([]);
        self.send("response.output_text.done", done, out);
        let mut part = at;
        part["part"] = message.part();
        self.send("response.content_part.done", part, out);
        let item = message.item(status, vec![message.part()]);
        self.send("response.output_item.done", json!({"output_index": index, "item": item}), out);
        self.answer.output.push(item);
    }

    fn write_call(&mut self, call_id: &str, name: &str, arguments: &str, out: &mut VecDeque<Piece>) {
        self.close_text("completed", out);
        let (index, id) = (self.answer.output.len(), unique_id("fc"));
        let item = |status: &str, arguments: &str| {
            json!({"type": "function_call", "id": id, "call_id": call_id, "name": name,
                "arguments": arguments, "status": status})
        };
        let added = json!({"output_index": index, "item": item("in_progress", "")});
        self.send("response.output_item.added", added, out);
        let delta = json!({"item_id": id, "output_index": index, "delta": arguments});
        self.send("response.function_call_arguments.delta", delta, out);
        let done = json!({"item_id": id, "output_index": index, "name": name, "arguments": arguments});
        self.send("response.function_call_arguments.done", done, out);
        let complete = item("completed", arguments);
        self.send("response.output_item.done", json!({"output_index": index, "item": complete}), out);
        self.answer.output.push(complete);
    }

    fn write_event(&mut self, event: ChatEvent, out: &mut VecDeque<Piece>) {
        match event {
            ChatEvent::Started { cached_tokens } => {
                self.answer.usage.cached_tokens = cached_tokens;
                self.send_response("response.created", out);
                self.send_response("response.in_progress", out);
            }
            ChatEvent::Parts { parts, .. } => {
                for part in parts {
                    match part {
                        Part::Text(text) => self.write_text(&text, out),
                        Part::Thought(text) => self.write_thought(&text, out),
                        Part::Call { id, name, arguments, .. } => self.write_call(&id, &name, &arguments, out),
                    }
                }
            }
            ChatEvent::Finished { end, .. } => {
                self.answer.usage.completion_tokens = end.generated_tokens;
                self.answer.end = Some(end.reason);
                let status = self.answer.status();
                self.close_text(status, out);
                let kind = if status == "completed" { "response.completed" } else { "response.incomplete" };
                self.send_response(kind, out);
            }
            ChatEvent::Failed(reason) => {
                let error = json!({"code": "server_error", "message": reason, "param": null});
                self.send("error", error, out);
            }
        }
    }
}

impl PieceWriter for ResponseWriter {
    fn write(&mut self, choice: usize, event: OutputEvent, out: &mut VecDeque<Piece>) {
        for event in self.splitter.split(choice, event) {
            self.write_event(event, out);
        }
    }

    fn finish(&mut self, _: &mut VecDeque<Piece>) {}
}
