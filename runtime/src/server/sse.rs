//! Answers that come in pieces: server-sent events.

use super::choices::ChoiceSet;
use crate::text::OutputEvent;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

/// One server-sent event.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// Name of the event, where the protocol has names.
    pub event: Option<&'static str>,
    /// The data: JSON on one line, or OpenAI's `[DONE]`.
    pub data: String,
}

impl Piece {
    /// An event without a name.
    pub fn json(value: &Value) -> Self {
        Self { event: None, data: value.to_string() }
    }

    /// An event with a name.
    pub fn named(event: &'static str, value: &Value) -> Self {
        Self { event: Some(event), data: value.to_string() }
    }

    /// The end of OpenAI's streams.
    pub fn done() -> Self {
        Self { event: None, data: "[DONE]".to_owned() }
    }

    fn into_event(self) -> Event {
        let event = match self.event {
            Some(name) => Event::default().event(name),
            None => Event::default(),
        };
        event.data(self.data)
    }
}

/// A protocol's way to say what happens to the choices of a request.
pub trait PieceWriter: Send + 'static {
    /// Says what happened to a choice.
    fn write(&mut self, choice: usize, event: OutputEvent, out: &mut VecDeque<Piece>);
    /// Says that all choices have ended.
    fn finish(&mut self, out: &mut VecDeque<Piece>);
}

struct Streaming<W> {
    choices: ChoiceSet,
    writer: W,
    ready: VecDeque<Piece>,
    finished: bool,
}

/// Streams `choices` as `writer` puts them. A comment is sent whenever nothing else was for `keep_alive`,
/// so that proxies do not close the connection while a prompt is computed. When the client goes away the
/// stream is dropped, and with it the sequences.
pub fn respond<W: PieceWriter>(choices: ChoiceSet, writer: W, keep_alive: Duration) -> Response {
    let streaming = Streaming { choices, writer, ready: VecDeque::new(), finished: false };
    let events = stream::unfold(streaming, |mut streaming| async move {
        loop {
            if let Some(piece) = streaming.ready.pop_front() {
                return Some((Ok::<_, Infallible>(piece.into_event()), streaming));
            }
            if streaming.finished {
                return None;
            }
            match streaming.choices.next().await {
                Some((choice, event)) => {
                    streaming.writer.write(choice, event, &mut streaming.ready);
                }
                None => {
                    streaming.finished = true;
                    streaming.writer.finish(&mut streaming.ready);
                }
            }
        }
    });
    let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(keep_alive)).into_response();
    let headers = response.headers_mut();
    // nginx buffers whole responses otherwise.
    headers.insert("x-accel-buffering", axum::http::HeaderValue::from_static("no"));
    response
}
