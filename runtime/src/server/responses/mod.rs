//! OpenAI's `/v1/responses`, as a thin adapter over chats. Nothing is stored: a conversation is sent whole
//! with each request.

mod answer;
mod translate;

use super::asked::Asked;
use super::chat::{ChatRequest, RunningChat, start};
use super::error::ApiError;
use super::fields::Fields;
use super::sse::respond;
use answer::{ResponseAnswer, ResponseWriter};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// The handler.
///
/// # Errors
/// As an [`ApiError`].
pub async fn handle(asked: Asked) -> Result<Response, ApiError> {
    let translated = asked.read(translate::request)?;
    let request = Arc::new(ChatRequest::read(&Fields::new(&translated))?);
    let model = asked.state.check_model(request.params.model.as_deref())?;
    let running = start(&asked, Arc::clone(&request)).await?;
    let answer = ResponseAnswer::new(model, &asked.object, running.prompt_tokens);
    let RunningChat { choices, splitter, .. } = running;
    if request.params.stream {
        return Ok(respond(choices, ResponseWriter::new(answer, splitter), asked.state.config.keep_alive));
    }
    Ok(axum::Json(answer.collect(choices, splitter).await?).into_response())
}
