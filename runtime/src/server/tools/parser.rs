//! Finding calls in a text that arrives in pieces.

use super::dialect::{CLOSE, Dialect, OPEN};
use crate::server::envelope::unique_id;
use serde_json::Value;

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text for the user.
    Text(String),
    /// What the model thought before; see [`crate::server::reasoning`].
    Thought(String),
    /// A call.
    Call {
        /// Position among the calls of the answer.
        index: usize,
        /// Id by which its result will be named.
        id: String,
        /// Name of the function.
        name: String,
        /// Arguments as JSON.
        arguments: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far.
    Start,
    /// Within text.
    Text,
    /// Within what should be a call.
    Call,
}

/// Splits a text into text and calls. What looks like a call and is not one is text.
#[derive(Debug, Clone)]
pub struct ToolParser {
    dialect: Dialect,
    names: Vec<String>,
    parallel: bool,
    state: State,
    buffer: String,
    /// White space before the tag that was opened last: no answer before a call, part of it before text.
    gap: String,
    calls: usize,
}

impl ToolParser {
    /// A parser for calls of the functions `names`. Without `parallel` only the first call counts.
    pub fn new(dialect: Dialect, names: Vec<String>, parallel: bool) -> Self {
        Self { dialect, names, parallel, state: State::Start, buffer: String::new(), gap: String::new(), calls: 0 }
    }

    /// Calls found so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Adds a piece of text.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        self.buffer.push_str(piece);
        let mut parts = Vec::new();
        match self.dialect {
            Dialect::Hermes => while self.step_hermes(&mut parts) {},
            Dialect::Llama3 => self.step_llama3(&mut parts),
        }
        parts
    }

    /// Ends the text.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.buffer);
        match (self.dialect, self.state) {
            // A model that stops within the closing tag has still made its call.
            (Dialect::Hermes, State::Call) => {
                let body = rest.trim_end_matches(|c| CLOSE.contains(c) && c != '}');
                if !self.take_call(body, &mut parts) && !self.take_call(&rest, &mut parts) {
                    self.take_text(format!("{}{OPEN}{rest}", self.gap), &mut parts);
                }
            }
            (Dialect::Llama3, State::Call) => {
                if !self.take_calls(&rest, &mut parts) {
                    self.take_text(rest, &mut parts);
                }
            }
            // White space around calls is no answer.
            _ if rest.trim().is_empty() && self.calls > 0 => {}
            _ => self.take_text(rest, &mut parts),
        }
        parts
    }

    /// Looks for the next tag; true where there may be another.
    fn step_hermes(&mut self, parts: &mut Vec<Part>) -> bool {
        if self.state == State::Call {
            let Some(end) = self.buffer.find(CLOSE) else {
                return false;
            };
            let rest = self.buffer.split_off(end + CLOSE.len());
            let call = std::mem::replace(&mut self.buffer, rest);
            if !self.take_call(&call[..end], parts) {
                self.take_text(format!("{}{OPEN}{call}", self.gap), parts);
            }
            self.state = State::Text;
            return true;
        }
        if let Some(start) = self.buffer.find(OPEN) {
            let rest = self.buffer.split_off(start + OPEN.len());
            let mut before = std::mem::replace(&mut self.buffer, rest);
            before.truncate(start);
            self.gap = before.split_off(before.trim_end().len());
            self.take_text(before, parts);
            self.state = State::Call;
            return true;
        }
        // White space may turn out to stand before a call, and the end may be the beginning of a tag.
        let shown = self.buffer.trim_end_matches(char::is_whitespace).len();
        let shown = self.buffer[..shown].len() - partial_tag(&self.buffer[..shown]);
        let shown = self.buffer[..shown].trim_end_matches(char::is_whitespace).len();
        if shown > 0 {
            let rest = self.buffer.split_off(shown);
            let text = std::mem::replace(&mut self.buffer, rest);
            self.take_text(text, parts);
            self.state = State::Text;
        }
        false
    }

    /// A call is the whole answer or no part of it, and begins with a brace.
    fn step_llama3(&mut self, parts: &mut Vec<Part>) {
        if self.state == State::Start {
            let begun = self.buffer.trim_start();
            if begun.is_empty() || ("<|python_tag|>".starts_with(begun)) {
                return;
            }
            let is_call = begun.starts_with('{') || begun.starts_with("<|python_tag|>");
            self.state = if is_call { State::Call } else { State::Text };
        }
        if self.state == State::Text && !self.buffer.is_empty() {
            let text = std::mem::take(&mut self.buffer);
            self.take_text(text, parts);
        }
    }

    fn take_text(&mut self, text: String, parts: &mut Vec<Part>) {
        if !text.is_empty() {
            parts.push(Part::Text(text));
        }
    }

    /// Takes one call; false where the text is none.
    fn take_call(&mut self, text: &str, parts: &mut Vec<Part>) -> bool {
        let Ok(call) = serde_json::from_str::<Value>(text.trim()) else {
            return false;
        };
        self.take_json(&call, parts)
    }

    /// Takes calls that follow each other, with semicolons or nothing between them.
    fn take_calls(&mut self, text: &str, parts: &mut Vec<Part>) -> bool {
        let mut rest = text.trim().trim_start_matches("<|python_tag|>");
        let mut calls = Vec::new();
        loop {
            rest = rest.trim_start_matches(|c: char| c == ';' || c.is_whitespace());
            if rest.is_empty() {
                break;
            }
            let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            match stream.next() {
                Some(Ok(call)) if self.is_known(&call) => calls.push(call),
                _ => return false,
            }
            rest = &rest[stream.byte_offset()..];
        }
        calls.iter().all(|call| self.take_json(call, parts)) && !calls.is_empty()
    }

    /// An answer in JSON is not a call unless it names a function.
    fn is_known(&self, call: &Value) -> bool {
        let name = call["name"].as_str();
        name.is_some_and(|name| self.names.iter().any(|known| known == name))
    }

    fn take_json(&mut self, call: &Value, parts: &mut Vec<Part>) -> bool {
        let Some(name) = call["name"].as_str() else {
            return false;
        };
        let field = self.dialect.arguments_field();
        // Models mix the two names up.
        let arguments = call.get(field).or_else(|| call.get("arguments")).or_else(|| call.get("parameters"));
        let arguments = match arguments {
            None | Some(Value::Null) => "{}".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(object @ Value::Object(_)) => object.to_string(),
            Some(_) => return false,
        };
        if self.parallel || self.calls == 0 {
            let (id, name) = (unique_id("call"), name.to_owned());
            parts.push(Part::Call { index: self.calls, id, name, arguments });
            self.calls += 1;
        }
        true
    }
}

/// Bytes at the end of `text` that may be the beginning of a tag.
fn partial_tag(text: &str) -> usize {
    (1..OPEN.len()).rev().find(|&length| text.ends_with(&OPEN[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer's text and calls, the same for every way of cutting it into pieces.
    fn parse(dialect: Dialect, text: &str) -> (String, Vec<(String, String)>) {
        let run = |size: usize| {
            let characters: Vec<char> = text.chars().collect();
            let mut parser = ToolParser::new(dialect, vec!["f".to_owned(), "g".to_owned()], true);
            let mut parts = Vec::new();
            for piece in characters.chunks(size) {
                parts.extend(parser.push(&piece.iter().collect::<String>()));
            }
            parts.extend(parser.finish());
            let (mut shown, mut calls) = (String::new(), Vec::new());
            for part in parts {
                match part {
                    Part::Text(text) => shown.push_str(&text),
                    Part::Thought(thought) => panic!("{thought}"),
                    Part::Call { index, id, name, arguments } => {
                        assert!(index == calls.len() && id.starts_with("call-"));
                        calls.push((name, arguments));
                    }
                }
            }
            (shown, calls)
        };
        let whole = run(usize::MAX);
        for size in [1, 2, 3, 7] {
            assert_eq!(run(size), whole);
        }
        whole
    }

    fn call(name: &str, arguments: &str) -> (String, String) {
        (name.to_owned(), arguments.to_owned())
    }

    #[test]
    fn hermes_calls_stand_between_text() {
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
        assert_eq!(parse(Dialect::Hermes, one), (String::new(), vec![call("f", "{\"x\":1}")]));
        let mixed = format!("Let me see.\n{one}\n{}\n", one.replace("\"f\"", "\"g\""));
        let expected = vec![call("f", "{\"x\":1}"), call("g", "{\"x\":1}")];
        assert_eq!(parse(Dialect::Hermes, &mixed), ("Let me see.".to_owned(), expected));
        // Stopped within the closing tag, or before it.
        for end in ["\n</tool_c", "\n", ""] {
            let cut = format!("<tool_call>{{\"name\": \"f\"}}{end}");
            assert_eq!(parse(Dialect::Hermes, &cut), (String::new(), vec![call("f", "{}")]));
        }
    }

    #[test]
    fn what_only_looks_like_a_call_is_text() {
        for text in [
            "a < b and <tool_ca",
            "<tool_call>nonsense</tool_call>",
            "text \n<tool_call>nonsense</tool_call>\n more",
            "<tool_call>{\"name\": 5}</tool_call> rest",
            "<tool_call>{\"name\": \"f\", \"argu",
            "plain  text \n",
            "",
        ] {
            assert_eq!(parse(Dialect::Hermes, text), (text.to_owned(), vec![]));
        }
    }

    #[test]
    fn llama_calls_are_the_whole_answer() {
        let one = "{\"name\": \"f\", \"parameters\": {\"x\": \"a\"}}";
        assert_eq!(parse(Dialect::Llama3, one), (String::new(), vec![call("f", "{\"x\":\"a\"}")]));
        let two = format!("<|python_tag|>{one}; {}", one.replace("\"f\"", "\"g\""));
        assert_eq!(parse(Dialect::Llama3, &two).1.len(), 2);
        for text in ["Hello {\"name\": \"f\"}", "{\"answer\": 1}", "{\"name\": \"h\"}", "{\"name\": \"f\""] {
            assert_eq!(parse(Dialect::Llama3, text), (text.to_owned(), vec![]));
        }
    }

    #[test]
    fn without_parallel_calls_the_first_counts() {
        let one = "<tool_call>{\"name\": \"f\"}</tool_call>";
        let mut parser = ToolParser::new(Dialect::Hermes, vec![], false);
        assert_eq!(parser.push(&format!("{one}{one}")).len(), 1);
        assert_eq!(parser.calls(), 1);
    }
}
