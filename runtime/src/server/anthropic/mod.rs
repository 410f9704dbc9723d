//! Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, as a thin adapter: a request is translated
//! to a chat, its answer back.

mod answer;
mod translate;

use super::asked::{Asked, read_object};
use super::chat::{ChatRequest, RunningChat, start};
use super::error::ApiError;
use super::fields::Fields;
use super::sse::respond;
use super::state::AppState;
use answer::{MessageAnswer, MessageWriter};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// An error in Anthropic's shape: `{"type": "error", "error": {type, message}}`.
#[derive(Debug)]
pub struct MessageError(ApiError);

impl From<ApiError> for MessageError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

/// The body of an error.
fn error_body(error: &ApiError) -> Value {
    let kind = match error.status.as_u16() {
        400 => "invalid_request_error",
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}

impl IntoResponse for MessageError {
    fn into_response(self) -> Response {
        let body = error_body(&self.0);
        // Status and headers are those of any error; the body is not.
        let (mut parts, _) = self.0.into_response().into_parts();
        parts.headers.remove(axum::http::header::CONTENT_LENGTH);
        (parts, axum::Json(body)).into_response()
    }
}

/// Reads a request as one of the chat protocol.
fn read(fields: &Fields<'_>, counting: bool) -> Result<ChatRequest, ApiError> {
    ChatRequest::read(&Fields::new(&translate::request(fields, counting)?))
}

/// The handler of `/v1/messages`.
///
/// # Errors
/// As a [`MessageError`].
pub async fn handle(asked: Result<Asked, ApiError>) -> Result<Response, MessageError> {
    let asked = asked?;
    let request = Arc::new(asked.read(|fields| read(fields, false))?);
    let model = asked.state.check_model(request.params.model.as_deref())?;
    let running = start(&asked, Arc::clone(&request)).await?;
    let answer = MessageAnswer::new(model, running.prompt_tokens);
    let RunningChat { choices, splitter, .. } = running;
    if request.params.stream {
        return Ok(respond(choices, MessageWriter::new(answer, splitter), asked.state.config.keep_alive));
    }
    Ok(axum::Json(answer.collect(choices, splitter).await?).into_response())
}

/// The handler of `/v1/messages/count_tokens`.
///
/// # Errors
/// As a [`MessageError`].
pub async fn count_tokens(
    State(state): State<Arc<AppState>>,
    request: Request,
) -> Result<axum::Json<Value>, MessageError> {
    let served = state.served()?;
    let (object, _room) = read_object(request, &state).await?;
    let fields = Fields::new(&object);
    let request = read(&fields, true)?;
    state.warn_unknown(&fields.unknown());
    state.check_model(request.params.model.as_deref())?;
    let work = move || request.prompt(&served).map(|prompt| prompt.len());
    let count = state.workers.run(work).await??;
    Ok(axum::Json(json!({"input_tokens": count})))
}
