//! `/v1/completions`: text that goes on from a prompt.

use super::asked::Asked;
use super::auth::Tenant;
use super::chat_answer::stop_reason;
use super::choices::{ChoiceSet, Usage, timings_json};
use super::envelope::Envelope;
use super::error::ApiError;
use super::fields::{Fields, token_id};
use super::logprobs::CompletionLogprobs;
use super::params::{GenerationParams, MAX_CHOICES, MAX_TOP_LOGPROBS};
use super::sse::{Piece, PieceWriter, respond};
use super::state::Served;
use crate::engine::TokenLogprobs;
use crate::text::output::{OutputEnd, OutputToken};
use crate::text::{OutputEvent, Tokenizer};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::Arc;

/// A prompt as it was given.
#[derive(Debug, Clone, PartialEq)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

#[derive(Debug, Clone)]
struct CompletionRequest {
    params: GenerationParams,
    prompts: Vec<Prompt>,
    echo: bool,
    /// Alternatives wanted with log-probabilities.
    logprobs: Option<usize>,
    add_special_tokens: bool,
}

impl CompletionRequest {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let logprobs = match fields.value("logprobs") {
            // Some clients send the chat's boolean.
            Some(Value::Bool(wanted)) => wanted.then_some(0),
            _ => fields.integer("logprobs", 0..=MAX_TOP_LOGPROBS)?.map(|top| usize::try_from(top).unwrap_or(0)),
        };
        let echo = fields.boolean("echo")?.unwrap_or(false);
        // Without echo there would be nothing to answer.
        let params = GenerationParams::read(fields, logprobs, i64::from(!echo))?;
        if fields.string("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::bad_field("suffix", "is not supported by this model"));
        }
        let prompts = match fields.value("prompt") {
            None => vec![Prompt::Text(String::new())],
            Some(value) => read_prompts(fields, value)?,
        };
        if prompts.len().saturating_mul(params.n) > MAX_CHOICES {
            return Err(ApiError::bad_field("prompt", format!("prompts times n is more than {MAX_CHOICES}")));
        }
        Ok(Self {
            params,
            prompts,
            echo,
            logprobs,
            add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
        })
    }

    /// Token ids of a prompt. An empty one begins with the model's BOS, where it has one.
    fn encode(&self, served: &Served, prompt: &Prompt) -> Result<Vec<u32>, ApiError> {
        let mut tokens = match prompt {
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Text(text) if self.add_special_tokens => served.text.encode_prompt(text)?,
            Prompt::Text(text) => served.text.tokenizer().encode(text, false)?,
        };
        if tokens.is_empty() {
            let bos = served
                .text
                .bos()
                .ok_or_else(|| ApiError::bad_field("prompt", "is empty, and this model has no BOS to begin with"))?;
            tokens.push(bos);
        }
        Ok(tokens)
    }
}

/// A string, an array of strings, an array of token ids, or an array of those.
fn read_prompts(fields: &Fields<'_>, value: &Value) -> Result<Vec<Prompt>, ApiError> {
    let expected = "a string, an array of strings, or token ids";
    let wrong = |value: &Value| fields.wrong("prompt", expected, value);
    let tokens = |items: &[Value]| -> Result<Prompt, ApiError> {
        items.iter().map(|item| token_id(item).ok_or_else(|| wrong(item))).collect::<Result<_, _>>().map(Prompt::Tokens)
    };
    match value {
        Value::String(text) => Ok(vec![Prompt::Text(text.clone())]),
        Value::Array(items) => match items.first() {
            None => Ok(vec![Prompt::Tokens(Vec::new())]),
            Some(Value::Number(_)) => Ok(vec![tokens(items)?]),
            Some(_) => items
                .iter()
                .map(|item| match item {
                    Value::String(text) => Ok(Prompt::Text(text.clone())),
                    Value::Array(ids) => tokens(ids),
                    other => Err(wrong(other)),
                })
                .collect(),
        },
        other => Err(wrong(other)),
    }
}

struct Running {
    choices: ChoiceSet,
    /// Token ids of each prompt.
    prompts: Vec<Vec<u32>>,
}

fn start(served: &Served, request: &CompletionRequest, tenant: Tenant) -> Result<Running, ApiError> {
    let mut requests = Vec::new();
    let mut prompts = Vec::new();
    for prompt in &request.prompts {
        let tokens = request.encode(served, prompt)?;
        for choice in 0..request.params.n {
            let mut generation = request.params.request(served, tokens.clone(), choice, tenant.salt)?;
            if request.echo {
                generation.prompt_logprobs = request.logprobs;
            }
            requests.push(generation);
        }
        prompts.push(tokens);
    }
    let choices = ChoiceSet::submit(served, requests, &request.params.output_options())?;
    Ok(Running { choices, prompts })
}

/// The handler.
///
/// # Errors
/// As an [`ApiError`].
pub async fn handle(asked: Asked) -> Result<Response, ApiError> {
    let request = Arc::new(asked.read(CompletionRequest::read)?);
    let Asked { state, served, tenant, .. } = asked;
    let envelope = Envelope::new("cmpl", &state, &served, request.params.model.as_deref())?;
    let running = {
        let (served, request) = (Arc::clone(&served), Arc::clone(&request));
        let work = move || start(&served, &request, tenant);
        state.workers.run(work).await??
    };
    let answer = CompletionAnswer::new(envelope, &request, &served, &running.prompts);
    if request.params.stream {
        let writer = CompletionWriter { answer };
        return Ok(respond(running.choices, writer, state.config.keep_alive));
    }
    Ok(answer.collect(running.choices).await?.into_response())
}

/// The making of an answer in OpenAI's shape.
struct CompletionAnswer {
    envelope: Envelope,
    tokenizer: Arc<Tokenizer>,
    n: usize,
    logprobs: bool,
    /// Text and tokens of each prompt, where they are part of the answer.
    echoed: Option<Vec<(String, Vec<u32>)>>,
    include_usage: bool,
    timings: bool,
    usage: Usage,
}

impl CompletionAnswer {
    fn new(envelope: Envelope, request: &CompletionRequest, served: &Served, prompts: &[Vec<u32>]) -> Self {
        let tokenizer = Arc::clone(served.text.tokenizer());
        let echoed = request.echo.then(|| {
            request
                .prompts
                .iter()
                .zip(prompts)
                .map(|(prompt, tokens)| {
                    let text = match prompt {
                        Prompt::Text(text) => text.clone(),
                        Prompt::Tokens(_) => tokenizer.decode(tokens, true),
                    };
                    (text, tokens.clone())
                })
                .collect()
        });
        Self {
            envelope,
            tokenizer,
            n: request.params.n,
            logprobs: request.logprobs.is_some(),
            echoed,
            include_usage: request.params.include_usage,
            timings: request.params.timings,
            usage: Usage { prompt_tokens: prompts.iter().map(Vec::len).sum(), ..Usage::default() },
        }
    }

    /// The text of a choice's prompt, where it is echoed, and its log-probabilities.
    fn echo(&self, choice: usize, logprobs: &[TokenLogprobs]) -> Option<(String, CompletionLogprobs)> {
        let (text, tokens) = self.echoed.as_ref()?.get(choice / self.n)?;
        let mut result = CompletionLogprobs::default();
        if self.logprobs
            && let Some(&first) = tokens.first()
        {
            result.push_first(&self.tokenizer, first);
            let mut chars = self.visible_chars(first);
            for logprobs in logprobs {
                result.push(&self.tokenizer, logprobs, chars);
                chars += self.visible_chars(logprobs.id);
            }
        }
        Some((text.clone(), result))
    }

    /// Characters that a prompt's token shows; a special one shows none.
    fn visible_chars(&self, id: u32) -> usize {
        if self.tokenizer.is_special(id) {
            return 0;
        }
        // Bytes that begin a character count for it, those that go on do not.
        self.tokenizer.token_bytes(id).iter().filter(|&&byte| byte & 0xc0 != 0x80).count()
    }

    fn logprobs_json(&self, logprobs: CompletionLogprobs) -> Value {
        if self.logprobs { logprobs.into_json() } else { Value::Null }
    }

    fn timings_of(&self, end: &OutputEnd) -> Value {
        timings_json(&end.timings, self.usage.prompt_tokens, end.generated_tokens)
    }

    fn count_cached(&mut self, choice: usize, cached_tokens: usize) {
        // Of the choices of one prompt, the first speaks for all.
        if choice.is_multiple_of(self.n) {
            self.usage.cached_tokens += cached_tokens;
        }
    }

    /// The whole answer at once.
    async fn collect(mut self, mut choices: ChoiceSet) -> Result<axum::Json<Value>, ApiError> {
        #[derive(Default)]
        struct Parts {
            text: String,
            echoed_chars: usize,
            logprobs: CompletionLogprobs,
            end: Option<OutputEnd>,
        }
        let mut parts: Vec<Parts> = Vec::new();
        parts.resize_with(choices.len(), Parts::default);
        while let Some((index, event)) = choices.next().await {
            let part = &mut parts[index];
            match event {
                OutputEvent::Started { cached_tokens, prompt_logprobs } => {
                    self.count_cached(index, cached_tokens);
                    if let Some((text, logprobs)) = self.echo(index, &prompt_logprobs) {
                        part.echoed_chars = text.chars().count();
                        part.text = text;
                        part.logprobs = logprobs;
                    }
                }
                OutputEvent::Delta { text, tokens } => {
                    part.text.push_str(&text);
                    part.logprobs.extend(&self.tokenizer, &tokens, part.echoed_chars);
                }
                OutputEvent::Finished(end) => {
                    self.usage.completion_tokens += end.generated_tokens;
                    part.end = Some(end);
                }
                OutputEvent::Failed(reason) => return Err(ApiError::internal(reason)),
            }
        }
        let timings = parts.last().and_then(|part| part.end.as_ref()).map(|end| self.timings_of(end));
        let choices: Vec<Value> = parts
            .into_iter()
            .enumerate()
            .map(|(index, part)| {
                json!({
                    "index": index,
                    "text": part.text,
                    "logprobs": self.logprobs_json(part.logprobs),
                    "finish_reason": part.end.as_ref().map(|end| end.reason.as_str()),
                    "stop_reason": part.end.as_ref().map_or(Value::Null, stop_reason),
                })
            })
            .collect();
        let mut object = self.envelope.object("text_completion");
        object.insert("choices".to_owned(), Value::Array(choices));
        object.insert("usage".to_owned(), self.usage.to_json());
        if let (true, Some(timings)) = (self.timings, timings) {
            object.insert("timings".to_owned(), timings);
        }
        Ok(axum::Json(Value::Object(object)))
    }
}

/// The answer in pieces.
struct CompletionWriter {
    answer: CompletionAnswer,
}

impl CompletionWriter {
    fn chunk(&self, choices: Value) -> Map<String, Value> {
        let mut object = self.answer.envelope.object("text_completion");
        object.insert("choices".to_owned(), choices);
        if self.answer.include_usage {
            object.insert("usage".to_owned(), Value::Null);
        }
        object
    }

    fn text(&self, index: usize, text: &str, logprobs: CompletionLogprobs) -> Piece {
        Piece::json(&Value::Object(self.chunk(json!([{
            "index": index,
            "text": text,
            "logprobs": self.answer.logprobs_json(logprobs),
            "finish_reason": null,
        }]))))
    }

    fn logprobs_of(&self, choice: usize, tokens: &[OutputToken]) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::default();
        let echoed = self.answer.echoed.as_ref();
        let base =
            echoed.and_then(|echoed| echoed.get(choice / self.answer.n)).map_or(0, |(text, _)| text.chars().count());
        logprobs.extend(&self.answer.tokenizer, tokens, base);
        logprobs
    }
}

impl PieceWriter for CompletionWriter {
    fn write(&mut self, choice: usize, event: OutputEvent, out: &mut VecDeque<Piece>) {
        match event {
            OutputEvent::Started { cached_tokens, prompt_logprobs } => {
                self.answer.count_cached(choice, cached_tokens);
                if let Some((text, logprobs)) = self.answer.echo(choice, &prompt_logprobs) {
                    out.push_back(self.text(choice, &text, logprobs));
                }
            }
            OutputEvent::Delta { text, tokens } => {
                if !text.is_empty() || self.answer.logprobs {
                    let logprobs = self.logprobs_of(choice, &tokens);
                    out.push_back(self.text(choice, &text, logprobs));
                }
            }
            OutputEvent::Finished(end) => {
                self.answer.usage.completion_tokens += end.generated_tokens;
                let mut chunk = self.chunk(json!([{
                    "index": choice,
                    "text": "",
                    "logprobs": null,
                    "finish_reason": end.reason.as_str(),
                    "stop_reason": stop_reason(&end),
                }]));
                if self.answer.timings {
                    chunk.insert("timings".to_owned(), self.answer.timings_of(&end));
                }
                out.push_back(Piece::json(&Value::Object(chunk)));
            }
            OutputEvent::Failed(reason) => {
                out.push_back(Piece::json(&ApiError::internal(reason).body()));
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
        let object = json!({"prompt": value});
        let map = object.as_object().cloned().unwrap_or_default();
        CompletionRequest::read(&Fields::new(&map)).map(|request| request.prompts)
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(prompts(json!("a")).unwrap(), [text("a")]);
        assert_eq!(prompts(json!(["a", ""])).unwrap(), [text("a"), text("")]);
        assert_eq!(prompts(json!([1, 2])).unwrap(), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(prompts(json!([[1], "b"])).unwrap(), [Prompt::Tokens(vec![1]), text("b")]);
        assert_eq!(prompts(json!([])).unwrap(), [Prompt::Tokens(vec![])]);
        assert_eq!(prompts(json!(null)).unwrap(), [text("")]);
        for wrong in [json!(1), json!({}), json!([1, "a"]), json!([-1]), json!([[1.5]]), json!([true])] {
            assert_eq!(prompts(wrong).unwrap_err().param.as_deref(), Some("prompt"));
        }
        assert!(prompts(json!(vec!["a"; 200])).is_err());
    }
}
