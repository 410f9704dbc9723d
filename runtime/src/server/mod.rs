//! The HTTP server: OpenAI's protocol over one model.
//!
//! The socket is bound first and `/health` and `/ready` answer from then on; the model is loaded
//! meanwhile. Handlers read a request, render and tokenise it on worker threads, submit it to the engine
//! and turn the engine's events into JSON. Dropping a response, as happens when a client disconnects, drops
//! the event streams, and that cancels the sequences.

pub mod auth;
pub mod error;
pub mod fields;
pub mod messages;
pub mod state;

mod anthropic;
mod asked;
mod chat;
mod chat_answer;
mod choices;
mod completions;
mod envelope;
mod listen;
mod logprobs;
mod params;
mod reasoning;
mod responses;
mod sse;
mod status;
mod structured;
mod tokenize;
mod tools;
mod work;

#[cfg(test)]
mod tests;

pub use listen::{Endpoint, raise_open_files_limit};
pub use state::{AppState, LoadProgress, ModelCard, Served};

use crate::metrics::Metrics;
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, Request, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use error::ApiError;
use listen::Bound;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::sync::{oneshot, watch};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};
use tower_http::request_id::{MakeRequestId, PropagateRequestIdLayer, RequestId, SetRequestIdLayer};

/// How the server is set up.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where to listen.
    pub endpoint: Endpoint,
    /// Names of the model; none means the name of the bundle.
    pub served_model_names: Vec<String>,
    /// Whether requests for other names are answered as well.
    pub any_model_name: bool,
    /// Keys of which one must come with every request but `/health`; none means that none is needed.
    pub api_keys: Vec<String>,
    /// Whether thoughts are told from answers where the model's template speaks of them.
    pub reasoning: bool,
    /// Web origins whose pages may use the server; `*` is all, none is none.
    pub allowed_origins: Vec<String>,
    /// Largest body of a request.
    pub max_body_bytes: usize,
    /// Bytes of all bodies that are being read or have not been answered yet.
    pub max_bodies_bytes: usize,
    /// Time that a client has for the next piece of a body.
    pub body_timeout: Duration,
    /// Time between comments on a stream that has nothing else to say.
    pub keep_alive: Duration,
    /// Time that requests under way have to end when the server is told to stop.
    pub drain_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            endpoint: Endpoint::Tcp { host: "127.0.0.1".to_owned(), port: 8000 },
            served_model_names: Vec::new(),
            any_model_name: false,
            api_keys: Vec::new(),
            reasoning: true,
            allowed_origins: Vec::new(),
            max_body_bytes: 16 << 20,
            max_bodies_bytes: 512 << 20,
            // As long as nginx waits.
            body_timeout: Duration::from_secs(60),
            keep_alive: Duration::from_secs(15),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// Why the server ended; `E` is the loader's error.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError<E> {
    /// The socket could not be had.
    #[error("cannot listen on {endpoint}: {source}")]
    Bind {
        /// Where.
        endpoint: Endpoint,
        /// What the operating system said.
        source: io::Error,
    },
    /// Serving broke off.
    #[error("serving failed: {0}")]
    Io(#[from] io::Error),
    /// Not an origin as browsers write it.
    #[error("`{0}` is not a web origin such as https://example.org (lower case, no path)")]
    Origin(String),
    /// The model could not be loaded.
    #[error("{0}")]
    Load(E),
    /// The loader panicked.
    #[error("loading the model failed unexpectedly")]
    LoaderPanicked,
}

/// Binds, answers `/health` and `/ready`, runs `loader` on a thread of its own, then serves until SIGINT or
/// SIGTERM; a second signal ends the drain at once. `announce` is called with the address when the model
/// is ready.
///
/// # Errors
/// [`ServeError`]; a loader's error is handed through.
pub async fn serve<E: Send + 'static>(
    config: ServerConfig,
    metrics: Arc<Metrics>,
    loader: impl FnOnce(Arc<LoadProgress>) -> Result<Served, E> + Send + 'static,
    announce: impl FnOnce(&str),
) -> Result<(), ServeError<E>> {
    listen::raise_open_files_limit();
    let bound = Bound::bind(&config.endpoint)
        .await
        .map_err(|source| ServeError::Bind { endpoint: config.endpoint.clone(), source })?;
    let address = bound.address();
    let state = Arc::new(AppState::new(config, metrics)?);
    let app = router(&state).map_err(ServeError::Origin)?;
    let (stop, stopped) = watch::channel(false);
    let mut serving = tokio::spawn(bound.serve(app, stopped));

    let progress = Arc::clone(&state.progress);
    let (report, loaded) = oneshot::channel();
    // A thread of its own, which does not hold up the end of the process when it is not done by then.
    std::thread::Builder::new().name("vt-load".to_owned()).spawn(move || {
        // Nobody listens any more when the server was told to stop meanwhile.
        let _ = report.send(loader(progress));
    })?;
    tokio::select! {
        loaded = loaded => match loaded {
            Ok(Ok(served)) => state.set_served(served),
            Ok(Err(error)) => return Err(ServeError::Load(error)),
            Err(_) => return Err(ServeError::LoaderPanicked),
        },
        // Loading cannot be interrupted; the process ends with it under way.
        ended = listen::termination() => return Ok(ended?),
        ended = &mut serving => return flatten(ended),
    }
    announce(&address);

    tokio::select! {
        ended = listen::termination() => ended?,
        ended = &mut serving => return flatten(ended),
    }
    let impatience = async {
        if listen::termination().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    listen::drain(&state, impatience).await;
    // Receivers that are gone need not be told.
    let _ = stop.send(true);
    /// A client that reads nothing must not keep the server alive.
    const LAST_WRITES: Duration = Duration::from_secs(5);
    match tokio::time::timeout(LAST_WRITES, &mut serving).await {
        Ok(ended) => flatten(ended),
        Err(_) => {
            tracing::warn!("connections were still open and are closed");
            serving.abort();
            Ok(())
        }
    }
}

fn flatten<E>(ended: Result<(), tokio::task::JoinError>) -> Result<(), ServeError<E>> {
    ended.map_err(|error| ServeError::Io(io::Error::other(error)))
}

/// All routes, with authentication, limits, request ids and CORS around them.
///
/// # Errors
/// An origin of the configuration that cannot be one.
pub fn router(state: &Arc<AppState>) -> Result<Router, String> {
    let request_id = HeaderName::from_static("x-request-id");
    let mut app = Router::new()
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/responses", post(responses::handle))
        .route("/v1/messages", post(anthropic::handle))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/models", get(status::models))
        .route("/v1/models/{*name}", get(status::model))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/health", get(status::health))
        .route("/ready", get(status::ready))
        .route("/metrics", get(status::metrics))
        .route("/version", get(status::version))
        .fallback(|| async { ApiError::no_route() })
        .method_not_allowed_fallback(|| async { ApiError::wrong_method() })
        .layer(from_fn_with_state(Arc::clone(state), auth::authenticate))
        .layer(CatchPanicLayer::custom(|_| {
            ApiError::internal("the request made the server fail; see its log").into_response()
        }))
        .layer(from_fn_with_state(Arc::clone(state), time_refusals))
        .layer(PropagateRequestIdLayer::new(request_id.clone()))
        .layer(SetRequestIdLayer::new(request_id, NewRequestId));
    if !state.config.allowed_origins.is_empty() {
        app = app.layer(cors(&state.config.allowed_origins)?);
    }
    Ok(app.with_state(Arc::clone(state)))
}

fn cors(origins: &[String]) -> Result<CorsLayer, String> {
    // What is asked for instead of `*`, which does not stand for `Authorization`.
    let layer = CorsLayer::new().allow_methods(Any).allow_headers(AllowHeaders::mirror_request()).expose_headers(Any);
    if origins.iter().any(|origin| origin == "*") {
        return Ok(layer.allow_origin(Any));
    }
    let origins =
        origins.iter().map(|origin| web_origin(origin).ok_or_else(|| origin.clone())).collect::<Result<Vec<_>, _>>()?;
    Ok(layer.allow_origin(AllowOrigin::list(origins)))
}

/// An origin as browsers write it, which is what it is compared with: scheme and host in lower case, perhaps a port, and
/// nothing behind; or `null`, that of files.
fn web_origin(text: &str) -> Option<HeaderValue> {
    if text != "null" {
        let uri: axum::http::Uri = text.parse().ok()?;
        let written = format!("{}://{}", uri.scheme_str()?, uri.authority()?);
        if written != text || text.contains('@') || text.chars().any(|c| c.is_ascii_uppercase()) {
            return None;
        }
    }
    HeaderValue::from_str(text).ok()
}

/// Measures how long requests wait for being told to come back later.
async fn time_refusals(State(state): State<Arc<AppState>>, request: axum::extract::Request, next: Next) -> Response {
    let arrived = Instant::now();
    let response = next.run(request).await;
    if response.status() == StatusCode::TOO_MANY_REQUESTS {
        state.metrics.request_refusal_time.observe(arrived.elapsed().as_secs_f64());
    }
    response
}

/// Gives requests that bring no id one of ours.
#[derive(Debug, Clone, Copy)]
struct NewRequestId;

impl MakeRequestId for NewRequestId {
    fn make_request_id<B>(&mut self, _: &Request<B>) -> Option<RequestId> {
        let value = HeaderValue::from_str(&envelope::unique_id("req")).ok()?;
        Some(RequestId::new(value))
    }
}
