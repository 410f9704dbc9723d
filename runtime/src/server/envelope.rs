//! What every answer carries: an id, the time, the model.

use super::error::ApiError;
use super::state::{AppState, Served};
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// The fields that all pieces of one answer share.
#[derive(Debug, Clone)]
pub struct Envelope {
    /// Unique id, with the prefix of its kind.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Model by the name under which it was asked.
    pub model: String,
    fingerprint: String,
}

impl Envelope {
    /// An envelope for an answer of a kind such as `chatcmpl`.
    ///
    /// # Errors
    /// 404 where the model is not served here.
    pub fn new(kind: &str, state: &AppState, served: &Served, model: Option<&str>) -> Result<Self, ApiError> {
        let digest: String = served.card.bundle_id.chars().take(12).collect();
        Ok(Self {
            id: unique_id(kind),
            created: unix_seconds(),
            model: state.check_model(model)?,
            fingerprint: format!("vt-{digest}"),
        })
    }

    /// An object that begins with the shared fields.
    pub fn object(&self, object: &str) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".to_owned(), json!(self.id));
        map.insert("object".to_owned(), json!(object));
        map.insert("created".to_owned(), json!(self.created));
        map.insert("model".to_owned(), json!(self.model));
        map.insert("system_fingerprint".to_owned(), json!(self.fingerprint));
        map
    }
}

/// An id that no other answer has.
pub fn unique_id(kind: &str) -> String {
    use crate::engine::random::fresh_seed;
    format!("{kind}-{:016x}{:016x}", fresh_seed(), fresh_seed())
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
