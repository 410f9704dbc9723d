//! A sequence's events as text: whole characters, nothing of a stop string, everything accounted for.

use super::detokenizer::Detokenizer;
use super::stop::StopMatcher;
use super::tokenizer::Tokenizer;
use crate::engine::{Event, EventStream, FinishReason, Timings, TokenLogprobs};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

/// How tokens become text.
#[derive(Debug, Clone, Default)]
pub struct OutputOptions {
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Whether a stop string that was found is part of the text.
    pub include_stop: bool,
    /// Whether special tokens are part of the text.
    pub keep_special_tokens: bool,
}

/// A token of the text.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputToken {
    /// Its id.
    pub id: u32,
    /// Characters of the text before it.
    pub offset_chars: usize,
    /// Its log-probability, where asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// What ended a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopCause {
    /// A stop string.
    Text(String),
    /// A stop token.
    Token(u32),
}

/// The end of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputEnd {
    /// Why it ended.
    pub reason: FinishReason,
    /// What ended it, where the reason is a stop.
    pub cause: Option<StopCause>,
    /// Tokens generated, those of a stop string and the stop token included.
    pub generated_tokens: usize,
    /// Where the time went.
    pub timings: Timings,
}

/// What happens to a text, in this order: one `Started`, any number of `Delta`, one `Finished`; `Failed`
/// may come at any point and is the last.
#[derive(Debug, Clone, PartialEq)]
pub enum OutputEvent {
    /// The prompt has been computed.
    Started {
        /// Prompt tokens that were in the prefix cache.
        cached_tokens: usize,
        /// Log-probabilities of the prompt from its second token on, where asked for.
        prompt_logprobs: Vec<TokenLogprobs>,
    },
    /// More text.
    Delta {
        /// Whole characters; empty only where tokens without text are reported.
        text: String,
        /// The tokens that this text completes.
        tokens: Vec<OutputToken>,
    },
    /// The end.
    Finished(OutputEnd),
    /// The engine could not go on.
    Failed(String),
}

/// Turns the events of a sequence into text.
#[derive(Debug)]
pub struct OutputStream {
    events: EventStream,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    /// Tokens whose text is not out yet.
    pending: Vec<OutputToken>,
    /// Events that are ready.
    ready: VecDeque<OutputEvent>,
    /// Characters that the tokens so far stand for, and those of them that are out.
    decoded_chars: usize,
    shown_chars: usize,
    generated: usize,
    ended: bool,
    created: Instant,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl OutputStream {
    /// The text of a sequence that was just submitted.
    pub fn new(events: EventStream, tokenizer: Arc<Tokenizer>, options: OutputOptions) -> Self {
        Self {
            events,
            detokenizer: Detokenizer::new(tokenizer, !options.keep_special_tokens),
            matcher: StopMatcher::new(options.stop, options.include_stop),
            pending: Vec::new(),
            ready: VecDeque::new(),
            decoded_chars: 0,
            shown_chars: 0,
            generated: 0,
            ended: false,
            created: Instant::now(),
            first_token: None,
            last_token: None,
        }
    }

    /// The next event; none after the last.
    pub async fn next(&mut self) -> Option<OutputEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Like [`Self::next`], for use in a poll function.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<OutputEvent>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(event));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            match self.events.poll_recv(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(event) => self.take(event),
            }
        }
    }

    /// Like [`Self::next`], for use outside of asynchronous code.
    pub fn blocking_next(&mut self) -> Option<OutputEvent> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            let event = self.events.blocking_recv();
            self.take(event);
        }
    }

    fn take(&mut self, event: Option<Event>) {
        match event {
            Some(Event::Started { cached_tokens, prompt_logprobs }) => {
                self.ready.push_back(OutputEvent::Started { cached_tokens, prompt_logprobs })
            }
            Some(Event::Token { id, logprobs }) => self.take_token(id, logprobs),
            Some(Event::Finished(finish)) => {
                let piece = self.detokenizer.finish().text;
                if !self.show(&piece, true) {
                    self.end(OutputEnd {
                        reason: finish.reason,
                        cause: finish.stop_token.map(StopCause::Token),
                        generated_tokens: finish.generated_tokens,
                        timings: finish.timings,
                    });
                }
            }
            Some(Event::Failed(reason)) => self.fail(reason),
            None => self.fail("the engine has stopped; see the server's log".to_owned()),
        }
    }

    fn take_token(&mut self, id: u32, logprobs: Option<TokenLogprobs>) {
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.generated += 1;
        self.pending.push(OutputToken { id, offset_chars: self.decoded_chars, logprobs });
        let piece = self.detokenizer.push(id).text;
        self.show(&piece, false);
    }

    /// Lets out what may be shown after `piece`; at the end, everything. True where a stop string ended
    /// the text.
    fn show(&mut self, piece: &str, at_end: bool) -> bool {
        self.decoded_chars += piece.chars().count();
        let mut outcome = self.matcher.push(piece);
        if at_end && outcome.matched.is_none() {
            outcome.text.push_str(&self.matcher.finish());
        }
        self.shown_chars += outcome.text.chars().count();
        let stopped = outcome.matched.is_some();
        if stopped {
            let end = self.shown_chars;
            self.pending.retain(|token| token.offset_chars < end);
        }
        if !outcome.text.is_empty() || ((at_end || stopped) && !self.pending.is_empty()) {
            self.ready.push_back(OutputEvent::Delta { text: outcome.text, tokens: std::mem::take(&mut self.pending) });
        }
        if let Some(stop) = outcome.matched {
            self.events.stop();
            let timings = self.timings();
            self.end(OutputEnd {
                reason: FinishReason::Stop,
                cause: Some(StopCause::Text(stop)),
                generated_tokens: self.generated,
                timings,
            });
        }
        stopped
    }

    fn timings(&self) -> Timings {
        let first = self.first_token.unwrap_or(self.created);
        Timings {
            prefill: first.saturating_duration_since(self.created),
            decode: self.last_token.map_or_else(Default::default, |last| last.saturating_duration_since(first)),
            ..Timings::default()
        }
    }

    fn end(&mut self, end: OutputEnd) {
        self.ready.push_back(OutputEvent::Finished(end));
        self.ended = true;
    }

    fn fail(&mut self, reason: String) {
        self.ready.push_back(OutputEvent::Failed(reason));
        self.ended = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{EngineConfig, EngineHandle, GenerationRequest, SchedulerLimits};
    use crate::metrics::Metrics;
    use crate::test_support::tokenizer::{BOS, END, EOS, START, VOCABULARY};
    use crate::test_support::{FakeModel, Script, byte_tokenizer};

    /// The deltas and the end of a model's `reply`.
    async fn run(reply: &[u32], max_tokens: usize, options: OutputOptions) -> (Vec<String>, OutputEnd) {
        let model = FakeModel::new(Script::Reply(reply.to_vec()), 256, 32);
        let config = EngineConfig {
            limits: SchedulerLimits { sequences: 4, batch_tokens: 64, token_limit: VOCABULARY, prefix_cache: true },
            max_queue: 4,
            max_sequence_tokens: None,
        };
        let engine = EngineHandle::spawn(Box::new(model), config, Arc::new(Metrics::new("vt"))).unwrap();
        let mut prompt = vec![START];
        prompt.extend("assistant\n".bytes().map(u32::from));
        let mut request = GenerationRequest::greedy(prompt, max_tokens);
        request.stop_token_ids = vec![EOS, END];
        let events = engine.submit(request).unwrap();
        let mut stream = OutputStream::new(events, Arc::new(byte_tokenizer()), options);
        let mut deltas = Vec::new();
        let mut shown = 0;
        loop {
            match stream.next().await.unwrap() {
                OutputEvent::Started { .. } => {}
                OutputEvent::Delta { text, tokens: completed } => {
                    shown += text.chars().count();
                    assert!(completed.iter().all(|token| token.offset_chars <= shown));
                    deltas.push(text);
                }
                OutputEvent::Finished(end) => {
                    assert!(stream.next().await.is_none());
                    return (deltas, end);
                }
                OutputEvent::Failed(reason) => panic!("{reason}"),
            }
        }
    }

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[tokio::test]
    async fn c72_characters_come_whole() {
        let (deltas, end) = run(&bytes("a\u{1f600}b"), 50, OutputOptions::default()).await;
        assert_eq!(deltas, ["a", "\u{1f600}", "b"]);
        assert_eq!(end.cause, Some(StopCause::Token(EOS)));
        assert_eq!(end.generated_tokens, 7);
        let (deltas, end) = run(&bytes("a\u{1f600}b"), 3, OutputOptions::default()).await;
        assert_eq!(deltas, ["a", "\u{fffd}"]);
        assert_eq!(end.reason, FinishReason::Length);
    }

    #[tokio::test]
    async fn c73_stop_strings_end_the_text() {
        let options = OutputOptions { stop: vec!["own fox".to_owned()], ..OutputOptions::default() };
        let (deltas, end) = run(&bytes("brown fox jumps"), 50, options.clone()).await;
        assert_eq!(deltas.concat(), "br");
        assert_eq!(end.reason, FinishReason::Stop);
        assert_eq!(end.cause, Some(StopCause::Text("own fox".to_owned())));
        assert_eq!(end.generated_tokens, 9);
        // The text ends in what might have become a stop string.
        let (deltas, end) = run(&bytes("brown fox"), 8, options).await;
        assert_eq!(deltas.concat(), "brown fo");
        assert_eq!(end.reason, FinishReason::Length);
    }

    #[tokio::test]
    async fn c81_the_end_marker_is_not_in_the_text() {
        let reply = [u32::from(b'x'), BOS, u32::from(b'y'), END, u32::from(b'z')];
        let (deltas, end) = run(&reply, 50, OutputOptions::default()).await;
        assert_eq!(deltas.concat(), "xy");
        assert_eq!(end.cause, Some(StopCause::Token(END)));
        let kept = OutputOptions { keep_special_tokens: true, ..OutputOptions::default() };
        assert_eq!(run(&reply, 50, kept).await.0.concat(), "x<|bos|>y");
    }
}
