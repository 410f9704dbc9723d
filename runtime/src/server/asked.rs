//! What every request that generates goes through before its protocol reads it.

use super::auth::Tenant;
use super::error::ApiError;
use super::fields::{Fields, parse_object};
use super::state::{AppState, Served};
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::header::{CONTENT_ENCODING, EXPECT};
use http_body_util::BodyExt;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;

/// A body that is a JSON object, from somebody who may ask, for a model that is there and has room in its queue. The queue is
/// looked at before anything is made of the body: a request that is refused costs next to nothing.
#[derive(Debug)]
pub struct Asked {
    /// What all handlers share.
    pub state: Arc<AppState>,
    /// The model.
    pub served: Arc<Served>,
    /// Who asks.
    pub tenant: Tenant,
    /// What is asked.
    pub object: Map<String, Value>,
    /// Held for as long as the object.
    _room: Room,
}

/// A body's share of the memory for bodies.
#[derive(Debug, Default)]
pub struct Room(Option<OwnedSemaphorePermit>);

impl Room {
    /// Bytes that are taken at once.
    pub(super) const UNIT: usize = 1 << 10;

    /// Makes room for `bytes` in all.
    fn grow(&mut self, state: &AppState, bytes: usize) -> Result<(), ApiError> {
        let held = self.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = bytes.div_ceil(Self::UNIT).saturating_sub(held);
        if missing == 0 {
            return Ok(());
        }
        let more = u32::try_from(missing).ok().and_then(|n| Arc::clone(&state.bodies).try_acquire_many_owned(n).ok());
        let more =
            more.ok_or_else(|| ApiError::queue_full("too many large requests are being read; try again in 1 s", 1))?;
        match &mut self.0 {
            Some(room) => room.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }
}

impl FromRequest<Arc<AppState>> for Asked {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<AppState>) -> Result<Self, ApiError> {
        let served = match state.served_for_generation() {
            Ok(served) => served,
            Err(error) => {
                discard(request, state.config.max_body_bytes).await;
                return Err(error);
            }
        };
        let tenant = request.extensions().get::<Tenant>().copied().unwrap_or_default();
        let (object, room) = read_object(request, state).await?;
        Ok(Self { state: Arc::clone(state), served, tenant, object, _room: room })
    }
}

impl Asked {
    /// Reads the fields, and writes to the log which of them mean nothing here.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read<T>(&self, read: impl FnOnce(&Fields<'_>) -> Result<T, ApiError>) -> Result<T, ApiError> {
        let fields = Fields::new(&self.object);
        let value = read(&fields)?;
        self.state.warn_unknown(&fields.unknown());
        Ok(value)
    }
}

/// The body of a request as a JSON object, and its share of the memory for bodies.
///
/// # Errors
/// 413 where it is too large, 415 where it is compressed, 408 where it stops coming, 429 where those of others take all the
/// memory that there is for bodies, 400 where it is no object.
pub async fn read_object(request: Request, state: &AppState) -> Result<(Map<String, Value>, Room), ApiError> {
    let limit = state.config.max_body_bytes;
    if request.body().size_hint().lower() > limit as u64 {
        discard(request, limit).await;
        return Err(ApiError::too_large(limit));
    }
    if let Some(encoding) = request.headers().get(CONTENT_ENCODING).filter(|value| *value != "identity") {
        let encoding = String::from_utf8_lossy(encoding.as_bytes()).into_owned();
        discard(request, limit).await;
        return Err(ApiError::unsupported_encoding(&encoding));
    }
    let mut body = request.into_body();
    match read_body(&mut body, state).await {
        Ok((bytes, room)) => Ok((parse_object(&bytes)?, room)),
        Err(error) => {
            if error.leaves_body() {
                drain(body, limit).await;
            }
            Err(error)
        }
    }
}

async fn read_body(body: &mut Body, state: &AppState) -> Result<(Vec<u8>, Room), ApiError> {
    let (limit, timeout) = (state.config.max_body_bytes, state.config.body_timeout);
    // What the client says that there will be is believed once it is there.
    let (mut bytes, mut room) = (Vec::new(), Room::default());
    loop {
        let frame = match tokio::time::timeout(timeout, body.frame()).await {
            Err(_) => return Err(ApiError::body_timeout()),
            Ok(None) => return Ok((bytes, room)),
            Ok(Some(Err(error))) => return Err(ApiError::bad_request(format!("the body could not be read: {error}"))),
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers say nothing here.
        let Some(piece) = frame.data_ref() else { continue };
        if bytes.len() + piece.len() > limit {
            return Err(ApiError::too_large(limit));
        }
        room.grow(state, bytes.len() + piece.len())?;
        bytes.extend_from_slice(piece);
    }
}

/// Reads the body of a request that is refused, and forgets it. Closing a connection on a client that still sends makes its
/// system throw away the answer. Bodies of several times the `limit` are not read to their end, nor slow ones, nor those that
/// the client would only send when it is told to go on.
pub async fn discard(request: Request, limit: usize) {
    if !request.headers().contains_key(EXPECT) {
        drain(request.into_body(), limit).await;
    }
}

async fn drain(body: Body, limit: usize) {
    /// As long as nginx lingers.
    const PATIENCE: Duration = Duration::from_secs(5);
    let read = async |mut body: Body| {
        let mut rest = limit.saturating_mul(4);
        while let Some(Ok(frame)) = body.frame().await {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            let Some(left) = rest.checked_sub(bytes) else { return };
            rest = left;
        }
    };
    // Whatever is left after that belongs to a client that does not listen.
    let _ = tokio::time::timeout(PATIENCE, read(body)).await;
}
