//! OpenAI's `/v1/responses`, as a thin adapter over chats. Nothing is stored: a conversation is sent whole
//! with each request.

mod answer;
mod translate;

use super::auth::Tenant;
use super::chat::{ChatRequest, RunningChat, start};
use super::error::{ApiError, body_rejection};
use super::fields::{Fields, parse_object};
use super::sse::respond;
use super::state::AppState;
use answer::{ResponseAnswer, ResponseWriter};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

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
    let translated = translate::request(&fields)?;
    state.warn_unknown(&fields.unknown());
    let request = Arc::new(ChatRequest::read(&Fields::new(&translated))?);
    let model = state.check_model(request.params.model.as_deref())?;
    let running = start(&state.workers, served, Arc::clone(&request), tenant).await?;
    let answer = ResponseAnswer::new(model, &object, running.prompt_tokens);
    let RunningChat { choices, splitter, .. } = running;
    if request.params.stream {
        return Ok(respond(choices, ResponseWriter::new(answer, splitter), state.config.keep_alive));
    }
    Ok(axum::Json(answer.collect(choices, splitter).await?).into_response())
}
