//! Errors as OpenAI's clients expect them: a status and `{"error": {message, type, param, code}}`.

use crate::engine::SubmitError;
use crate::text::TextError;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An answer that is an error.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// What went wrong, for a person.
    pub message: String,
    /// Class of the error, OpenAI's `type`.
    pub kind: &'static str,
    /// The field at fault.
    pub param: Option<String>,
    /// The error by name, for a program.
    pub code: Option<&'static str>,
    /// When to try again, in seconds.
    pub retry_after: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), kind, param: None, code: None, retry_after: None }
    }

    /// 400: the request cannot be understood or carried out as it is.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400 with the field at fault.
    pub fn bad_field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = param.into();
        Self { message: format!("{param}: {}", message.into()), param: Some(param), ..Self::bad_request("") }
    }

    /// 400: prompt and output do not fit the context.
    pub fn context_length(prompt_tokens: usize, max_tokens: Option<usize>, limit: usize) -> Self {
        let message = match max_tokens {
            Some(max_tokens) => format!(
                "This model's maximum context length is {limit} tokens. You asked for {max_tokens} \
                 output tokens and your prompt has {prompt_tokens}; reduce one of them."
            ),
            None => format!(
                "This model's maximum context length is {limit} tokens. Your prompt has \
                 {prompt_tokens}, which leaves no room for an answer; shorten it."
            ),
        };
        Self {
            param: Some(if max_tokens.is_some() { "max_tokens" } else { "messages" }.to_owned()),
            code: Some("context_length_exceeded"),
            ..Self::bad_request(message)
        }
    }

    /// 401.
    pub fn unauthorized() -> Self {
        Self {
            code: Some("invalid_api_key"),
            ..Self::new(
                StatusCode::UNAUTHORIZED,
                "authentication_error",
                "missing or wrong API key; send it as `Authorization: Bearer KEY`",
            )
        }
    }

    /// 404: another model than the one that is served.
    pub fn model_not_found(model: &str) -> Self {
        /// Longer names are not repeated in full.
        const SHOWN: usize = 128;
        let shown: String = model.chars().take(SHOWN).collect();
        Self {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(
                StatusCode::NOT_FOUND,
                "not_found_error",
                format!("the model `{shown}` does not exist here; see /v1/models"),
            )
        }
    }

    /// 404: no such path.
    pub fn no_route() -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found_error", "no such path")
    }

    /// 405.
    pub fn wrong_method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "this path does not answer to that method")
    }

    /// 413.
    pub fn too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "invalid_request_error",
            format!("the request body exceeds {limit} bytes"),
        )
    }

    /// 415: a body that would have to be unpacked first.
    pub fn unsupported_encoding(encoding: &str) -> Self {
        /// Longer names are not repeated in full.
        const SHOWN: usize = 32;
        let shown: String = encoding.chars().take(SHOWN).collect();
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            format!("content-encoding `{shown}` is not understood; send the JSON as it is"),
        )
    }

    /// 408: the body stopped coming.
    pub fn body_timeout() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "the rest of the request body did not come")
    }

    /// 500.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// 503: not now.
    pub fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code: Some(code),
            retry_after: Some(1),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
        }
    }

    /// 429 with an estimate of when there is room.
    pub fn queue_full(message: impl Into<String>, retry_after: u64) -> Self {
        Self {
            code: Some("queue_full"),
            retry_after: Some(retry_after),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
        }
    }

    /// Whether the request's body was left unread because of it, though the client goes on sending.
    pub fn leaves_body(&self) -> bool {
        matches!(self.status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::TOO_MANY_REQUESTS)
    }

    /// The body of the answer.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT) {
            // Ten thousand clients that are to come back later need not keep as many connections and their buffers.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        match &error {
            SubmitError::QueueFull { retry_after_seconds, .. } => {
                Self::queue_full(error.to_string(), *retry_after_seconds)
            }
            SubmitError::ShuttingDown => Self::unavailable("shutting_down", error.to_string()),
            SubmitError::Stopped => Self::unavailable("engine_stopped", error.to_string()),
            SubmitError::TooLong { prompt_tokens, max_tokens, limit } => {
                Self::context_length(*prompt_tokens, Some(*max_tokens), *limit)
            }
            SubmitError::EmptyPrompt | SubmitError::UnknownToken { .. } => Self::bad_field("prompt", error.to_string()),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::Asset { .. } => Self::internal(error.to_string()),
            TextError::TooLong { .. } => {
                Self { code: Some("context_length_exceeded"), ..Self::bad_request(error.to_string()) }
            }
            TextError::Grammar(_) => {
                Self { param: Some("response_format".to_owned()), ..Self::bad_request(error.to_string()) }
            }
            _ => Self::bad_request(error.to_string()),
        }
    }
}
