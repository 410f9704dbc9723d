//! The pieces of a streamed completion.

use serde_json::Value;

/// Longest line that is kept; a server that sends more is not one.
const MAX_LINE: usize = 16 << 20;

/// What a line of a stream means.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Piece {
    /// More text.
    Text,
    /// Tokens of the prompt and of the answer.
    Usage(u64, u64),
    /// An error, by its code or type.
    Error(String),
    /// The end.
    Done,
}

/// Cuts bytes into lines, and lines into pieces.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    line: Vec<u8>,
}

impl Pieces {
    /// Takes in bytes as they come, and appends the pieces that are complete.
    pub(super) fn push(&mut self, mut bytes: &[u8], out: &mut Vec<Piece>) {
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
            self.line.extend_from_slice(&bytes[..end]);
            bytes = &bytes[end + 1..];
            read(&self.line, out);
            self.line.clear();
        }
        self.line.extend_from_slice(bytes);
        if self.line.len() > MAX_LINE {
            self.line.clear();
            out.push(Piece::Error("endless line".to_owned()));
        }
    }
}

fn read(line: &[u8], out: &mut Vec<Piece>) {
    let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return };
    if data == b"[DONE]" {
        out.push(Piece::Done);
        return;
    }
    let Ok(value) = serde_json::from_slice::<Value>(data) else {
        out.push(Piece::Error("no JSON".to_owned()));
        return;
    };
    if let Some(error) = value.get("error") {
        let name = error["code"].as_str().or(error["type"].as_str()).unwrap_or("error");
        out.push(Piece::Error(name.to_owned()));
        return;
    }
    if value["choices"].as_array().is_some_and(|choices| choices.iter().any(|c| c["text"].as_str() != Some(""))) {
        out.push(Piece::Text);
    }
    if let (Some(input), Some(output)) =
        (value["usage"]["prompt_tokens"].as_u64(), value["usage"]["completion_tokens"].as_u64())
    {
        out.push(Piece::Usage(input, output));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_may_be_cut_anywhere() {
        let stream = "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":null}\n\n: keep-alive\n\n\
                      data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}\r\n\
                      data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":5}}\n\
                      data: {\"error\":{\"type\":\"server_error\",\"code\":null}}\ndata: {\ndata: [DONE]\n\n";
        let expected = [
            Piece::Text,
            Piece::Usage(3, 5),
            Piece::Error("server_error".to_owned()),
            Piece::Error("no JSON".to_owned()),
            Piece::Done,
        ];
        for size in [1, 3, 1000] {
            let (mut pieces, mut found) = (Pieces::default(), Vec::new());
            stream.as_bytes().chunks(size).for_each(|bytes| pieces.push(bytes, &mut found));
            assert_eq!(found, expected);
        }
    }
}
