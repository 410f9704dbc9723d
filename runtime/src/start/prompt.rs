//! One prompt, answered on standard output.

use super::load::Ready;
use super::{Failure, print, to_json};
use crate::cli::{Cli, PromptArgs};
use crate::engine::{Event, Finish, GenerationRequest, SamplingParams};
use crate::metrics::Metrics;
use crate::text::chat_template::ChatInput;
use crate::text::{BundleText, Detokenizer, StopMatcher};
use anyhow::anyhow;
use serde::Serialize;
use serde_json::json;
use std::sync::Arc;

/// What the user gave.
pub(super) enum Input<'a> {
    Text(&'a str),
    Chat(&'a str),
    Ids(&'a [u32]),
}

impl<'a> Input<'a> {
    pub(super) fn of(args: &'a PromptArgs) -> Option<Self> {
        let text = args.prompt.as_deref().map(Input::Text);
        text.or(args.chat.as_deref().map(Input::Chat)).or(args.prompt_ids.as_deref().map(Input::Ids))
    }

    /// Whether a tokenizer is needed to read it.
    pub(super) fn needs_text(&self) -> bool {
        !matches!(self, Input::Ids(_))
    }

    pub(super) fn encode(&self, text: Option<&BundleText>) -> Result<Vec<u32>, Failure> {
        let ids = match (self, text) {
            (Input::Ids(ids), _) => Ok(ids.to_vec()),
            (Input::Text(prompt), Some(text)) => text.encode_prompt(prompt),
            (Input::Chat(message), Some(text)) => text.encode_chat(&ChatInput {
                messages: json!([{"role": "user", "content": message}]),
                tools: serde_json::Value::Null,
                add_generation_prompt: true,
                extra: serde_json::Map::new(),
            }),
            (_, None) => return Err(Failure::new(3, anyhow!("the bundle has no tokenizer"))),
        };
        ids.map_err(|e| Failure::new(3, e))
    }
}

/// The answer in full, for `--json`.
#[derive(Serialize)]
struct Answer {
    prompt_token_ids: Vec<u32>,
    token_ids: Vec<u32>,
    text: String,
    finish_reason: String,
    prefill_seconds: f64,
    decode_seconds: f64,
}

/// Generates, and prints the text as it comes, or all of it with its token ids as JSON.
pub(super) fn answer(cli: &Cli, ready: Ready, text: Option<BundleText>, ids: Vec<u32>) -> Result<(), Failure> {
    let args = &cli.prompt;
    check(args)?;
    let limit = ready.model.info().context_length;
    if ids.len() >= limit {
        let error = anyhow!("the prompt has {} tokens, the limit is {limit}; raise --max-model-len", ids.len());
        return Err(Failure::new(2, error));
    }
    let engine = ready.into_engine(cli, text.as_ref(), Arc::new(Metrics::new(&cli.server.metrics_prefix)))?;
    let mut request = GenerationRequest::greedy(ids.clone(), args.max_tokens.min(limit - ids.len()));
    request.sampling = SamplingParams {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
        ..SamplingParams::default()
    };
    if let Some(text) = text.as_ref().filter(|_| !args.ignore_eos) {
        request.stop_token_ids = text.stop_token_ids().iter().copied().collect();
    }
    let mut events = engine.submit(request).map_err(|e| Failure::new(2, e))?;

    let mut writer = Writer::new(text.as_ref(), args, !cli.json);
    let mut finish = None;
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Started { .. } => {}
            Event::Token { id, .. } => {
                if writer.push(id)? {
                    events.stop();
                    break;
                }
            }
            Event::Finished(end) => finish = Some(end),
            Event::Failed(reason) => return Err(Failure::new(5, anyhow!(reason))),
        }
    }
    writer.finish(&finish, ids)
}

fn check(args: &PromptArgs) -> Result<(), Failure> {
    let ranges = [
        ("--temperature", args.temperature, 0.0, f32::MAX),
        ("--top-p", args.top_p, f32::MIN_POSITIVE, 1.0),
        ("--min-p", args.min_p, 0.0, 1.0),
    ];
    for (flag, value, least, most) in ranges {
        if !(least..=most).contains(&value) {
            return Err(Failure::new(2, anyhow!("{flag} {value} is out of range")));
        }
    }
    if args.max_tokens == 0 {
        return Err(Failure::new(2, anyhow!("--max-tokens must be at least 1")));
    }
    Ok(())
}

/// Turns tokens into text, and prints it unless it is wanted at the end.
struct Writer {
    detokenizer: Option<Detokenizer>,
    stop: StopMatcher,
    stream: bool,
    text: String,
    ids: Vec<u32>,
    stopped: bool,
}

impl Writer {
    fn new(text: Option<&BundleText>, args: &PromptArgs, stream: bool) -> Self {
        Self {
            detokenizer: text.map(|text| Detokenizer::new(Arc::clone(text.tokenizer()), true)),
            stop: StopMatcher::new(args.stop.clone(), false),
            stream,
            text: String::new(),
            ids: Vec::new(),
            stopped: false,
        }
    }

    /// Adds a token; `true` where a stop string has ended the text.
    fn push(&mut self, id: u32) -> Result<bool, Failure> {
        self.ids.push(id);
        match &mut self.detokenizer {
            // Without a tokenizer the ids are the text.
            None => {
                let separator = if self.ids.len() > 1 { "," } else { "" };
                self.emit(&format!("{separator}{id}"))?;
            }
            Some(detokenizer) => {
                let piece = detokenizer.push(id);
                let outcome = self.stop.push(&piece.text);
                self.stopped = outcome.matched.is_some();
                self.emit(&outcome.text)?;
            }
        }
        Ok(self.stopped)
    }

    fn emit(&mut self, piece: &str) -> Result<(), Failure> {
        if self.stream {
            return print(piece);
        }
        self.text.push_str(piece);
        Ok(())
    }

    fn finish(mut self, finish: &Option<Finish>, prompt: Vec<u32>) -> Result<(), Failure> {
        if let Some(detokenizer) = self.detokenizer.as_mut().filter(|_| !self.stopped) {
            let piece = detokenizer.finish();
            let outcome = self.stop.push(&piece.text);
            let rest = outcome.text + &self.stop.finish();
            self.emit(&rest)?;
        }
        if self.stream {
            return print("\n");
        }
        let timings = finish.as_ref().map(|f| f.timings).unwrap_or_default();
        print(&to_json(&Answer {
            prompt_token_ids: prompt,
            token_ids: self.ids,
            text: self.text,
            finish_reason: finish.as_ref().map_or("stop", |f| f.reason.as_str()).to_owned(),
            prefill_seconds: timings.prefill.as_secs_f64(),
            decode_seconds: timings.decode.as_secs_f64(),
        })?)
    }
}
