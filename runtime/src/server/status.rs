//! What the server says of itself: models, health, readiness, metrics.

use super::envelope::unix_seconds;
use super::error::ApiError;
use super::state::AppState;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// `/health`: the process lives, and its engine, where it is loaded.
pub async fn health(State(state): State<Arc<AppState>>) -> Response {
    match state.loaded() {
        Some(served) if !served.engine.is_alive() => {
            (StatusCode::SERVICE_UNAVAILABLE, axum::Json(json!({"status": "engine_stopped"}))).into_response()
        }
        _ => axum::Json(json!({"status": "ok"})).into_response(),
    }
}

/// `/ready`: whether requests are answered; while loading, how far it is.
pub async fn ready(State(state): State<Arc<AppState>>) -> Response {
    let unavailable = |body: Value| {
        let mut response = (StatusCode::SERVICE_UNAVAILABLE, axum::Json(body)).into_response();
        response.headers_mut().insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        response
    };
    if state.is_draining() {
        return unavailable(json!({"status": "draining"}));
    }
    match state.loaded() {
        Some(served) if served.engine.is_alive() => axum::Json(json!({"status": "ready"})).into_response(),
        Some(_) => unavailable(json!({"status": "engine_stopped"})),
        None => {
            let (phase, bytes_done, bytes_total) = state.progress.snapshot();
            unavailable(json!({
                "status": "loading",
                "phase": phase,
                "bytes_done": bytes_done,
                "bytes_total": bytes_total,
            }))
        }
    }
}

/// `/metrics`.
pub async fn metrics(State(state): State<Arc<AppState>>) -> Response {
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], state.metrics.encode()).into_response()
}

/// `/version`.
pub async fn version() -> axum::Json<Value> {
    axum::Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `/v1/models`.
///
/// # Errors
/// 503 while loading.
pub async fn models(State(state): State<Arc<AppState>>) -> Result<axum::Json<Value>, ApiError> {
    let cards = state.model_names().iter().map(|name| card(&state, name)).collect::<Result<Vec<_>, _>>()?;
    state.served()?;
    Ok(axum::Json(json!({"object": "list", "data": cards})))
}

/// `/v1/models/NAME`.
///
/// # Errors
/// 503 while loading, 404 for another name.
pub async fn model(
    State(state): State<Arc<AppState>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<axum::Json<Value>, ApiError> {
    state.served()?;
    // What is no UTF-8 is no name.
    let Ok(Path(name)) = name else { return Err(ApiError::model_not_found("\u{fffd}")) };
    if state.model_names().contains(&name) {
        Ok(axum::Json(card(&state, &name)?))
    } else {
        Err(ApiError::model_not_found(&name))
    }
}

fn card(state: &AppState, name: &str) -> Result<Value, ApiError> {
    let served = state.served()?;
    Ok(json!({
        "id": name,
        "object": "model",
        "created": unix_seconds(),
        "owned_by": "vt",
        "max_model_len": served.engine.max_sequence_tokens(),
        "bundle_id": served.card.bundle_id,
        "architecture": served.card.architecture,
    }))
}
