//! What every request that generates goes through before its protocol reads it.

use super::auth::Tenant;
use super::error::{ApiError, body_rejection};
use super::fields::{Fields, parse_object};
use super::state::{AppState, Served};
use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use serde_json::{Map, Value};
use std::sync::Arc;

/// A body that is a JSON object, from somebody who may ask, for a model that is there and has room in its queue. The queue is
/// looked at before the body is read: a request that is refused costs nothing.
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
}

impl FromRequest<Arc<AppState>> for Asked {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<AppState>) -> Result<Self, ApiError> {
        let served = state.served_for_generation()?;
        let tenant = request.extensions().get::<Tenant>().copied().unwrap_or_default();
        let object = read_object(request, state).await?;
        Ok(Self { state: Arc::clone(state), served, tenant, object })
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

/// The body of a request as a JSON object.
///
/// # Errors
/// 413 where it is too large, 400 where it is no object.
pub async fn read_object(request: Request, state: &AppState) -> Result<Map<String, Value>, ApiError> {
    let body = Bytes::from_request(request, &()).await;
    let body = body.map_err(|error| body_rejection(&error, state.config.max_body_bytes))?;
    parse_object(&body)
}
