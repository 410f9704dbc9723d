//! What a model thinks before it answers, told from the answer: text between `<think>` and `</think>` at its beginning, as
//! Qwen3, DeepSeek R1 and their relatives write it.

/// Opens the thoughts; some templates end the prompt with it.
pub const OPEN: &str = "<think>";
/// Closes them.
const CLOSE: &str = "</think>";

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// Not for the user.
    Thought(String),
    /// For the user.
    Text(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far, which thoughts may follow.
    Start,
    /// Nothing but white space so far within thoughts.
    ThoughtsBegin,
    /// Within thoughts.
    Thoughts,
    /// Nothing but white space so far after them.
    TextBegins,
    /// Within the answer.
    Text,
}

/// Splits a text that arrives in pieces. White space around the thoughts belongs to neither part.
#[derive(Debug, Clone)]
pub struct ReasoningParser {
    state: State,
    buffer: String,
}

impl ReasoningParser {
    /// A parser for an answer; `inside` where the prompt has opened the thoughts already.
    pub fn new(inside: bool) -> Self {
        Self { state: if inside { State::ThoughtsBegin } else { State::Start }, buffer: String::new() }
    }

    /// Whether a chat template is that of a model that thinks.
    pub fn suits(template: &str) -> bool {
        template.contains(OPEN) || template.contains(CLOSE)
    }

    /// Adds a piece of text.
    pub fn push(&mut self, piece: &str) -> Vec<Said> {
        self.buffer.push_str(piece);
        let mut said = Vec::new();
        while self.step(&mut said) {}
        said
    }

    /// Ends the text.
    pub fn finish(&mut self) -> Vec<Said> {
        let rest = std::mem::take(&mut self.buffer);
        match self.state {
            _ if rest.is_empty() => Vec::new(),
            State::Start | State::Text => vec![Said::Text(rest)],
            State::TextBegins => Vec::new(),
            State::ThoughtsBegin | State::Thoughts => {
                let thought = rest.trim_end().to_owned();
                if thought.is_empty() { Vec::new() } else { vec![Said::Thought(thought)] }
            }
        }
    }

    /// Says what can be said of the buffer; true where the state has changed and there may be more.
    fn step(&mut self, said: &mut Vec<Said>) -> bool {
        match self.state {
            State::Start => {
                let begun = self.buffer.trim_start();
                if let Some(rest) = begun.strip_prefix(OPEN) {
                    (self.buffer, self.state) = (rest.to_owned(), State::ThoughtsBegin);
                    return true;
                }
                // Includes the empty text.
                if OPEN.starts_with(begun) {
                    return false;
                }
                self.state = State::Text;
                true
            }
            State::ThoughtsBegin | State::TextBegins => {
                let begun = self.buffer.trim_start().to_owned();
                self.buffer = begun;
                if self.buffer.is_empty() {
                    return false;
                }
                self.state = if self.state == State::TextBegins { State::Text } else { State::Thoughts };
                true
            }
            State::Thoughts => {
                let end = self.buffer.find(CLOSE);
                // Without an end, what may be the beginning of one is kept back, and the white space before it.
                let open = end.unwrap_or_else(|| self.buffer.len() - partial_end(&self.buffer));
                let shown = self.buffer[..open].trim_end().len();
                if shown > 0 {
                    said.push(Said::Thought(self.buffer[..shown].to_owned()));
                }
                self.buffer.drain(..end.map_or(shown, |end| end + CLOSE.len()));
                if end.is_some() {
                    self.state = State::TextBegins;
                }
                end.is_some()
            }
            State::Text => {
                if !self.buffer.is_empty() {
                    said.push(Said::Text(std::mem::take(&mut self.buffer)));
                }
                false
            }
        }
    }
}

/// Bytes at the end of `text` that may be the beginning of the closing tag.
fn partial_end(text: &str) -> usize {
    (1..CLOSE.len()).rev().find(|&len| text.ends_with(&CLOSE[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thoughts and text of an answer cut into pieces of `size` characters.
    fn split(answer: &str, inside: bool, size: usize) -> (String, String) {
        let mut parser = ReasoningParser::new(inside);
        let characters: Vec<char> = answer.chars().collect();
        let pieces = characters.chunks(size).map(|piece| piece.iter().collect::<String>());
        let mut said: Vec<Said> = pieces.flat_map(|piece| parser.push(&piece)).collect();
        said.extend(parser.finish());
        let (mut thought, mut text) = (String::new(), String::new());
        for part in said {
            match part {
                Said::Thought(more) => {
                    assert!(text.is_empty(), "thoughts come first");
                    thought.push_str(&more);
                }
                Said::Text(more) => text.push_str(&more),
            }
        }
        (thought, text)
    }

    #[test]
    fn pieces_do_not_matter() {
        let cases = [
            ("<think>\nhm </thin\n\nk\n</think>\n\nSo: 5 </think>\n", false, "hm </thin\n\nk", "So: 5 </think>\n"),
            ("hm\n</think>\nSo", true, "hm", "So"),
            ("\n<think>\n\n</think>\n\nSo", false, "", "So"),
            ("just text <think>", false, "", "just text <think>"),
            ("<thin", false, "", "<thin"),
            ("<think>never ends </th", false, "never ends </th", ""),
            (" leading", false, "", " leading"),
            ("\u{4f60}\u{597d}</think>\u{1f600}", true, "\u{4f60}\u{597d}", "\u{1f600}"),
            ("", true, "", ""),
        ];
        for (answer, inside, thought, text) in cases {
            for size in [1, 2, 5, 100] {
                let found = split(answer, inside, size);
                assert_eq!((found.0.as_str(), found.1.as_str()), (thought, text), "{answer:?} in pieces of {size}");
            }
        }
    }

    #[test]
    fn templates_tell() {
        assert!(ReasoningParser::suits("... content.split('</think>')[-1] ..."));
        assert!(!ReasoningParser::suits("{{ message['content'] }}"));
    }
}
