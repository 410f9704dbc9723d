//! `/v1/chat/completions`.

use super::asked::Asked;
use super::chat_answer::{ChatAnswer, ChatWriter};
use super::choices::ChoiceSet;
use super::envelope::Envelope;
use super::error::ApiError;
use super::fields::Fields;
use super::messages::normalise;
use super::params::{GenerationParams, MAX_TOP_LOGPROBS};
use super::reasoning::{self, ReasoningParser, Said};
use super::sse::respond;
use super::state::Served;
use super::tools::{Dialect, Part, ToolParser, ToolSet};
use crate::engine::FinishReason;
use crate::text::OutputEvent;
use crate::text::chat_template::ChatInput;
use crate::text::output::{OutputEnd, OutputToken};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::sync::Arc;

/// A chat to be answered, from whichever protocol.
#[derive(Debug, Clone)]
pub struct ChatRequest {
    /// The parameters.
    pub params: GenerationParams,
    /// What the template is given.
    pub input: ChatInput,
    /// What the model may call.
    pub tools: ToolSet,
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
            tools: ToolSet::read(fields)?,
            params,
            continue_final_message,
        })
    }

    /// Token ids of the chat.
    ///
    /// # Errors
    /// 400 where the template refuses the messages.
    pub fn prompt(&self, served: &Served) -> Result<Vec<u32>, ApiError> {
        let mut input = self.input.clone();
        self.tools.describe(&served.text, &mut input);
        if !self.continue_final_message {
            return Ok(served.text.encode_chat(&input)?);
        }
        let rendered = served.text.render_chat(&input)?;
        let last = input.messages.as_array().and_then(|all| all.last());
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
    /// Finds calls in their text.
    pub splitter: Splitter,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
}

/// Renders and encodes a chat and submits its choices.
///
/// # Errors
/// What the template, the tokenizer, the grammar or the engine says.
pub async fn start(asked: &Asked, request: Arc<ChatRequest>) -> Result<RunningChat, ApiError> {
    let (served, tenant) = (Arc::clone(&asked.served), asked.tenant);
    let reasoning = asked.state.config.reasoning;
    let work = move || {
        let prompt = request.prompt(&served)?;
        let prompt_tokens = prompt.len();
        let template = served.text.tool_template().map_or("", |template| template.source());
        let dialect = Dialect::of_template(template);
        let mut params = request.params.clone();
        if let Some(grammar) = request.tools.grammar(dialect) {
            params.grammar = Some(grammar);
        }
        let requests = (0..params.n)
            .map(|choice| params.request(&served, prompt.clone(), choice, tenant.salt))
            .collect::<Result<Vec<_>, _>>()?;
        let choices = ChoiceSet::submit(&served, requests, &params.output_options())?;
        let thinks = reasoning && ReasoningParser::suits(template);
        // An answer that must follow a grammar has no room for thoughts.
        let inside = thinks && params.grammar.is_none() && ends_with_open_thoughts(&served, &prompt);
        let parser = ChoiceParser {
            reasoning: thinks.then(|| ReasoningParser::new(inside)),
            tools: request.tools.parser(dialect),
        };
        let splitter = Splitter { choices: vec![parser; params.n] };
        Ok(RunningChat { served, choices, splitter, prompt_tokens })
    };
    asked.state.workers.run(work).await?
}

/// Whether the template has begun the model's thoughts for it.
fn ends_with_open_thoughts(served: &Served, prompt: &[u32]) -> bool {
    /// More tokens than the tag and the line break behind it take, if every byte were one.
    const TAIL: usize = 16;
    let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
    served.text.tokenizer().decode(tail, false).trim_end().ends_with(reasoning::OPEN)
}

/// What happens to an answer, with thoughts and calls told from text.
#[derive(Debug, Clone, PartialEq)]
pub enum ChatEvent {
    /// The prompt has been computed.
    Started {
        /// Prompt tokens that were in the prefix cache.
        cached_tokens: usize,
    },
    /// More of the answer.
    Parts {
        /// Thoughts, text and calls.
        parts: Vec<Part>,
        /// Tokens that the text of the answer completes, those of calls among them.
        tokens: Vec<OutputToken>,
    },
    /// The end.
    Finished {
        /// OpenAI's name for why.
        reason: &'static str,
        /// All there is to say of it.
        end: OutputEnd,
    },
    /// The engine could not go on.
    Failed(String),
}

/// What finds the parts of one choice's text.
#[derive(Debug, Clone)]
struct ChoiceParser {
    reasoning: Option<ReasoningParser>,
    tools: Option<ToolParser>,
}

impl ChoiceParser {
    fn push(&mut self, text: String) -> Vec<Part> {
        match &mut self.reasoning {
            Some(reasoning) => {
                let said = reasoning.push(&text);
                self.take(said)
            }
            None => self.take(vec![Said::Text(text)]),
        }
    }

    fn finish(&mut self) -> Vec<Part> {
        let said = self.reasoning.as_mut().map(ReasoningParser::finish).unwrap_or_default();
        let mut parts = self.take(said);
        parts.extend(self.tools.as_mut().map(ToolParser::finish).unwrap_or_default());
        parts
    }

    fn take(&mut self, said: Vec<Said>) -> Vec<Part> {
        let mut parts = Vec::new();
        for said in said {
            match (said, &mut self.tools) {
                (Said::Thought(text), _) => parts.push(Part::Thought(text)),
                (Said::Text(text), Some(tools)) => parts.extend(tools.push(&text)),
                (Said::Text(text), None) if text.is_empty() => {}
                (Said::Text(text), None) => parts.push(Part::Text(text)),
            }
        }
        parts
    }

    fn calls(&self) -> usize {
        self.tools.as_ref().map_or(0, ToolParser::calls)
    }
}

/// Tells thoughts and calls from text, for every choice of a chat.
#[derive(Debug)]
pub struct Splitter {
    choices: Vec<ChoiceParser>,
}

impl Splitter {
    /// What an event of a choice means.
    pub fn split(&mut self, choice: usize, event: OutputEvent) -> Vec<ChatEvent> {
        let Some(parser) = self.choices.get_mut(choice) else { return Vec::new() };
        match event {
            OutputEvent::Started { cached_tokens, .. } => vec![ChatEvent::Started { cached_tokens }],
            OutputEvent::Delta { text, tokens } => {
                vec![ChatEvent::Parts { parts: parser.push(text), tokens }]
            }
            OutputEvent::Finished(end) => {
                let mut events = Vec::new();
                let mut reason = end.reason.as_str();
                let parts = parser.finish();
                if !parts.is_empty() {
                    events.push(ChatEvent::Parts { parts, tokens: Vec::new() });
                }
                if parser.calls() > 0 && end.reason == FinishReason::Stop {
                    reason = "tool_calls";
                }
                events.push(ChatEvent::Finished { reason, end });
                events
            }
            OutputEvent::Failed(reason) => vec![ChatEvent::Failed(reason)],
        }
    }
}

/// The handler.
///
/// # Errors
/// As an [`ApiError`].
pub async fn handle(asked: Asked) -> Result<Response, ApiError> {
    let request = Arc::new(asked.read(ChatRequest::read)?);
    let envelope = Envelope::new("chatcmpl", &asked.state, &asked.served, request.params.model.as_deref())?;
    let running = start(&asked, Arc::clone(&request)).await?;
    let answer = ChatAnswer::new(envelope, &request, &running);
    let RunningChat { choices, splitter, .. } = running;
    if request.params.stream {
        return Ok(respond(choices, ChatWriter::new(answer, splitter), asked.state.config.keep_alive));
    }
    Ok(answer.collect(choices, splitter).await?.into_response())
}
