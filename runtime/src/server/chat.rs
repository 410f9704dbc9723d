//! `/v1/chat/completions`.

use super::auth::Tenant;
use super::choices::{ChoiceSet, Usage, timings_json};
use super::envelope::Envelope;
use super::error::{ApiError, body_rejection};
use super::fields::{Fields, parse_object};
use super::logprobs::chat_content;
use super::messages::normalise;
use super::params::{GenerationParams, MAX_TOP_LOGPROBS};
use super::sse::{Piece, PieceWriter, respond};
use super::state::{AppState, Served};
use super::work::Workers;
use crate::text::chat_template::ChatInput;
use crate::text::output::{OutputEnd, StopCause};
use crate::text::{OutputEvent, Tokenizer};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::Arc;

/// A chat to be answered, from whichever protocol.
#[derive(Debug, Clone)]
pub struct ChatRequest {
    /// The parameters.
    pub params: GenerationParams,
    /// What the template is given.
    pub input: ChatInput,
    /// Whether the answer goes on with the last message instead of starting a new one.
    pub continue_final_message: bool,
}

impl ChatRequest {
    /// Reads a request of OpenAI's chat protocol.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let wants_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
        let top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
        if top.is_some_and(|top| top > 0) && !wants_logprobs {
            return Err(ApiError::bad_field("top_logprobs", "needs logprobs to be true"));
        }
        let logprobs = wants_logprobs.then(|| usize::try_from(top.unwrap_or(0)).unwrap_or(0));
        let params = GenerationParams::read(fields, logprobs, 1)?;
        let messages = fields.array("messages")?.ok_or_else(|| ApiError::bad_field("messages", "is missing"))?;
        refuse_unsupported(fields)?;
        let continue_final_message = fields.boolean("continue_final_message")?.unwrap_or(false);
        Ok(Self {
            input: ChatInput {
                messages: normalise(messages)?,
                tools: Value::Null,
                add_generation_prompt: fields.boolean("add_generation_prompt")?.unwrap_or(!continue_final_message),
                extra: fields.object("chat_template_kwargs")?.cloned().unwrap_or_default(),
            },
            params,
            continue_final_message,
        })
    }

    /// Token ids of the chat.
    ///
    /// # Errors
    /// 400 where the template refuses the messages.
    pub fn prompt(&self, served: &Served) -> Result<Vec<u32>, ApiError> {
        if !self.continue_final_message {
            return Ok(served.text.encode_chat(&self.input)?);
        }
        let rendered = served.text.render_chat(&self.input)?;
        let last = self.input.messages.as_array().and_then(|all| all.last());
        let content = last.map_or("", |last| last["content"].as_str().unwrap_or(""));
        let content = content.trim();
        // Everything that the template puts after the last message's text closes that message.
        let end = rendered
            .rfind(content)
            .filter(|_| !content.is_empty())
            .map(|start| start + content.len())
            .ok_or_else(|| ApiError::bad_field("continue_final_message", "the last message is empty"))?;
        Ok(served.text.tokenizer().encode(&rendered[..end], false)?)
    }
}

/// Fields whose wishes cannot be met are refused rather than ignored.
fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    if fields.value("audio").is_some() {
        return Err(ApiError::bad_field("audio", "this model writes text only"));
    }
    if let Some(modalities) = fields.strings("modalities")?
        && modalities.iter().any(|modality| modality != "text")
    {
        return Err(ApiError::bad_field("modalities", "this model writes text only"));
    }
    for legacy in ["functions", "function_call"] {
        if fields.value(legacy).is_some() {
            return Err(ApiError::bad_field(legacy, "use `tools` instead"));
        }
    }
    Ok(())
}

/// A chat whose answer is being generated.
#[derive(Debug)]
pub struct RunningChat {
    /// The model that answers.
    pub served: Arc<Served>,
    /// The choices.
    pub choices: ChoiceSet,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
}

/// Renders and encodes a chat and submits its choices.
///
/// # Errors
/// What the template, the tokenizer or the engine says.
pub async fn start(
    workers: &Workers,
    served: Arc<Served>,
    request: Arc<ChatRequest>,
    tenant: Tenant,
) -> Result<RunningChat, ApiError> {
    let work = move || {
        let prompt = request.prompt(&served)?;
        let prompt_tokens = prompt.len();
        let requests = (0..request.params.n)
            .map(|choice| request.params.request(&served, prompt.clone(), choice, tenant.salt))
            .collect::<Result<Vec<_>, _>>()?;
        let choices = ChoiceSet::submit(&served, requests, &request.params.output_options())?;
        Ok(RunningChat { served, choices, prompt_tokens })
    };
    workers.run(work).await?
}

/// The handler.
///
/// # Errors
/// As an [`ApiError`].
pub async fn handle(
    State(state): State<Arc<AppState>>,
    Extension(tenant): Extension<Tenant>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let served = state.served_for_generation()?;
    let body = body.map_err(|error| body_rejection(&error, state.config.max_body_bytes))?;
    let object = parse_object(&body)?;
    let fields = Fields::new(&object);
    let request = ChatRequest::read(&fields)?;
    state.warn_unknown(&fields.unknown());
    let envelope = Envelope::new("chatcmpl", &state, &served, request.params.model.as_deref())?;
    let request = Arc::new(request);
    let running = start(&state.workers, served, Arc::clone(&request), tenant).await?;
    let answer = ChatAnswer::new(envelope, &request, &running);
    if request.params.stream {
        let writer = ChatWriter { answer };
        return Ok(respond(running.choices, writer, state.config.keep_alive));
    }
    Ok(answer.collect(running.choices).await?.into_response())
}

/// The making of an answer in OpenAI's shape.
struct ChatAnswer {
    envelope: Envelope,
    tokenizer: Arc<Tokenizer>,
    logprobs: bool,
    include_usage: bool,
    timings: bool,
    usage: Usage,
}

impl ChatAnswer {
    fn new(envelope: Envelope, request: &ChatRequest, running: &RunningChat) -> Self {
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
    async fn collect(mut self, mut choices: ChoiceSet) -> Result<axum::Json<Value>, ApiError> {
        let mut parts: Vec<(String, Vec<Value>, Option<OutputEnd>)> = Vec::new();
        parts.resize_with(choices.len(), Default::default);
        while let Some((index, event)) = choices.next().await {
            match event {
                OutputEvent::Started { cached_tokens, .. } => {
                    self.usage.cached_tokens = self.usage.cached_tokens.max(cached_tokens);
                }
                OutputEvent::Delta { text, tokens } => {
                    parts[index].0.push_str(&text);
                    parts[index].1.extend(chat_content(&self.tokenizer, &tokens));
                }
                OutputEvent::Finished(end) => {
                    self.usage.completion_tokens += end.generated_tokens;
                    parts[index].2 = Some(end);
                }
                OutputEvent::Failed(reason) => return Err(ApiError::internal(reason)),
            }
        }
        let mut timings = None;
        let choices: Vec<Value> = parts
            .into_iter()
            .enumerate()
            .map(|(index, (text, logprobs, end))| {
                if let Some(end) = &end {
                    timings = Some(self.timings_of(end));
                }
                json!({
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": null},
                    "logprobs": self.logprobs_json(logprobs),
                    "finish_reason": end.as_ref().map(|end| end.reason.as_str()),
                    "stop_reason": end.as_ref().map_or(Value::Null, stop_reason),
                })
            })
            .collect();
        let mut object = self.envelope.object("chat.completion");
        object.insert("choices".to_owned(), Value::Array(choices));
        object.insert("usage".to_owned(), self.usage.to_json());
        if let (true, Some(timings)) = (self.timings, timings) {
            object.insert("timings".to_owned(), timings);
        }
        Ok(axum::Json(Value::Object(object)))
    }

    fn timings_of(&self, end: &OutputEnd) -> Value {
        timings_json(&end.timings, self.usage.prompt_tokens, end.generated_tokens)
    }

    fn logprobs_json(&self, content: Vec<Value>) -> Value {
        if self.logprobs { json!({"content": content, "refusal": null}) } else { Value::Null }
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
struct ChatWriter {
    answer: ChatAnswer,
}

impl ChatWriter {
    fn chunk(&self, choices: Value) -> Map<String, Value> {
        let mut object = self.answer.envelope.object("chat.completion.chunk");
        object.insert("choices".to_owned(), choices);
        // OpenAI: null in every piece but the last, and only where usage was asked for.
        if self.answer.include_usage {
            object.insert("usage".to_owned(), Value::Null);
        }
        object
    }

    fn delta(&self, index: usize, delta: Value, logprobs: Value) -> Piece {
        Piece::json(&Value::Object(self.chunk(json!([{
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": null,
        }]))))
    }
}

impl PieceWriter for ChatWriter {
    fn write(&mut self, choice: usize, event: OutputEvent, out: &mut VecDeque<Piece>) {
        match event {
            OutputEvent::Started { cached_tokens, .. } => {
                let usage = &mut self.answer.usage;
                usage.cached_tokens = usage.cached_tokens.max(cached_tokens);
                let delta = json!({"role": "assistant", "content": ""});
                out.push_back(self.delta(choice, delta, Value::Null));
            }
            OutputEvent::Delta { text, tokens } => {
                let content = chat_content(&self.answer.tokenizer, &tokens);
                let logprobs = self.answer.logprobs_json(content);
                // Tokens without text matter to those only who want their probabilities.
                if !text.is_empty() || self.answer.logprobs {
                    out.push_back(self.delta(choice, json!({"content": text}), logprobs));
                }
            }
            OutputEvent::Finished(end) => {
                self.answer.usage.completion_tokens += end.generated_tokens;
                let mut chunk = self.chunk(json!([{
                    "index": choice,
                    "delta": {},
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
