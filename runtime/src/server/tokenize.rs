//! `/tokenize` and `/detokenize`: what the model sees of a text.

use super::asked::read_object;
use super::chat::ChatRequest;
use super::error::ApiError;
use super::fields::Fields;
use super::state::AppState;
use axum::extract::{Request, State};
use serde_json::{Value, json};
use std::sync::Arc;

/// `/tokenize`: tokens of `prompt` (or `content`, llama.cpp's name), or of the chat in `messages`.
///
/// # Errors
/// As an [`ApiError`].
pub async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<axum::Json<Value>, ApiError> {
    let served = state.served()?;
    let (object, room) = read_object(request, &state).await?;
    let work = move || {
        let _room = room;
        let fields = Fields::new(&object);
        let model = fields.string("model")?.map(str::to_owned);
        let tokens = if fields.value("messages").is_some() {
            ChatRequest::read(&fields)?.prompt(&served)?
        } else {
            let text = match fields.string("prompt")? {
                Some(text) => Some(text),
                None => fields.string("content")?,
            };
            let text = text.ok_or_else(|| ApiError::bad_field("prompt", "is missing"))?;
            if fields.boolean("add_special_tokens")?.unwrap_or(true) {
                served.text.encode_prompt(text)?
            } else {
                served.text.tokenizer().encode(text, false)?
            }
        };
        let mut answer = json!({
            "count": tokens.len(),
            "max_model_len": served.engine.max_sequence_tokens(),
            "tokens": tokens,
        });
        if fields.boolean("return_token_strs")?.unwrap_or(false) {
            let tokenizer = served.text.tokenizer();
            let texts = tokens.iter().map(|&id| tokenizer.id_to_token(id));
            answer["token_strs"] = texts.map(Option::unwrap_or_default).collect();
        }
        Ok::<_, ApiError>((model, answer))
    };
    let (model, answer) = state.workers.run(work).await??;
    state.check_model(model.as_deref())?;
    Ok(axum::Json(answer))
}

/// `/detokenize`: the text of `tokens`, special ones included.
///
/// # Errors
/// As an [`ApiError`].
pub async fn detokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<axum::Json<Value>, ApiError> {
    let served = state.served()?;
    let (object, _room) = read_object(request, &state).await?;
    let fields = Fields::new(&object);
    state.check_model(fields.string("model")?)?;
    let tokens = fields.token_ids("tokens")?.ok_or_else(|| ApiError::bad_field("tokens", "is missing"))?;
    let skip = fields.boolean("skip_special_tokens")?.unwrap_or(false);
    let text = served.text.tokenizer().decode(&tokens, skip);
    Ok(axum::Json(json!({"prompt": text, "content": text})))
}
