//! Text of a stranger on a terminal: names in a file, in a store, in a server's answer.
//!
//! Control characters could move the cursor, colour what follows, or set a title, and marks of writing direction could
//! show one name as another. They are shown as `\u001b`, which is what JSON calls them, too.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

/// Whether a character does something to a terminal instead of being shown: controls (C0, DEL, C1), line and paragraph
/// separators, and marks of direction (Unicode Standard Annex 9, "Explicit Directional Formatting Characters").
fn acts(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{200e}' | '\u{200f}' | '\u{61c}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped(text: &str, keep: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(|letter| acts(letter) && !keep(letter)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if acts(letter) && !keep(letter) {
            // Writing to a string cannot fail.
            let _ = write!(out, "\\u{:04x}", u32::from(letter));
        } else {
            out.push(letter);
        }
    }
    Cow::Owned(out)
}

/// A text as one line for people.
pub fn line(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// A writer that escapes what passes, except ends of lines. It must be given whole characters, as `write!` does; what is no
/// UTF-8 passes as it is. Valid JSON stays valid and the same.
#[derive(Debug)]
pub struct Printable<W>(W);

impl<W: Write> Printable<W> {
    /// Writes to `inner`.
    pub fn new(inner: W) -> Self {
        Self(inner)
    }
}

impl<W: Write> Write for Printable<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.0.write_all(escaped(text, |letter| letter == '\n').as_bytes())?,
            Err(_) => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_a_terminal_is_shown() {
        assert_eq!(line("a\u{1b}]0;x\u{7}\n\u{9b}2J\u{202e}"), "a\\u001b]0;x\\u0007\\u000a\\u009b2J\\u202e");
        assert!(matches!(line("plain, \u{e4}\u{6f22}\u{1f600}"), Cow::Borrowed(_)));
    }

    #[test]
    fn json_stays_the_same() {
        let value = serde_json::json!({ "name": "a\u{1b}\u{9b}\u{7f}\u{202e}\n" });
        let mut out = Printable::new(Vec::new());
        writeln!(out, "{value:#}").unwrap();
        let text = String::from_utf8(out.0).unwrap();
        assert!(!text.trim_end().contains(['\u{1b}', '\u{9b}', '\u{7f}', '\u{202e}']), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
