//! What all handlers share: the configuration, the metrics, and the model once it is loaded.

use super::ServerConfig;
use super::asked::Room;
use super::auth::Keys;
use super::error::ApiError;
use super::work::Workers;
use crate::engine::EngineHandle;
use crate::metrics::Metrics;
use crate::text::BundleText;
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tokio::sync::Semaphore;

/// What a server says of its model.
#[derive(Debug, Clone, Default)]
pub struct ModelCard {
    /// Name where the configuration gives none; the bundle's folder, as a rule.
    pub name: String,
    /// BLAKE3 of the bundle's manifest, in hexadecimal.
    pub bundle_id: String,
    /// Architecture by name.
    pub architecture: String,
    /// Layout of most of the weights, for the metrics.
    pub layout: String,
    /// Version of the bundle format.
    pub format: String,
}

/// A model that is ready to answer.
#[derive(Debug)]
pub struct Served {
    /// Where requests go.
    pub engine: EngineHandle,
    /// Tokenizer, template and stop tokens.
    pub text: Arc<BundleText>,
    /// What is said of it.
    pub card: ModelCard,
}

/// How far loading has come; written by the loader, read by `/ready`.
#[derive(Debug, Default)]
pub struct LoadProgress {
    bytes_done: AtomicU64,
    bytes_total: AtomicU64,
    phase: Mutex<&'static str>,
}

impl LoadProgress {
    /// Names what is being done now.
    pub fn set_phase(&self, phase: &'static str) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    /// Sets how many bytes there are.
    pub fn set_total(&self, bytes: u64) {
        self.bytes_total.store(bytes, Ordering::Relaxed);
    }

    /// Adds bytes that are done.
    pub fn add_done(&self, bytes: u64) {
        self.bytes_done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Phase, bytes done and bytes in all.
    pub fn snapshot(&self) -> (&'static str, u64, u64) {
        (
            *self.phase.lock().unwrap_or_else(PoisonError::into_inner),
            self.bytes_done.load(Ordering::Relaxed),
            self.bytes_total.load(Ordering::Relaxed),
        )
    }
}

/// The state behind every handler.
#[derive(Debug)]
pub struct AppState {
    /// The configuration.
    pub config: ServerConfig,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Accepted API keys.
    pub keys: Keys,
    /// How far loading is.
    pub progress: Arc<LoadProgress>,
    /// Threads for rendering and tokenising.
    pub workers: Workers,
    /// What is left of the memory for bodies, in KiB.
    pub bodies: Arc<Semaphore>,
    served: OnceLock<Arc<Served>>,
    draining: AtomicBool,
    warned: Mutex<BTreeSet<String>>,
}

impl AppState {
    /// The state of a server that has not loaded anything.
    ///
    /// # Errors
    /// The operating system's, where it has no thread to give.
    pub fn new(config: ServerConfig, metrics: Arc<Metrics>) -> io::Result<Self> {
        Ok(Self {
            keys: Keys::new(&config.api_keys),
            bodies: Arc::new(Semaphore::new(config.max_bodies_bytes.div_ceil(Room::UNIT).min(Semaphore::MAX_PERMITS))),
            config,
            metrics,
            progress: Arc::default(),
            workers: Workers::start()?,
            served: OnceLock::new(),
            draining: AtomicBool::new(false),
            warned: Mutex::default(),
        })
    }

    /// Makes the model known. A second call changes nothing.
    pub fn set_served(&self, served: Served) {
        let card = &served.card;
        self.metrics.set_bundle(&card.bundle_id, &card.layout, &card.format);
        // Set once, by the loader.
        let _ = self.served.set(Arc::new(served));
    }

    /// The model, where it is loaded.
    pub fn loaded(&self) -> Option<&Arc<Served>> {
        self.served.get()
    }

    /// The model, for a request that needs it.
    ///
    /// # Errors
    /// 503 while it is loading and while the server drains.
    pub fn served(&self) -> Result<Arc<Served>, ApiError> {
        if self.is_draining() {
            return Err(ApiError::unavailable("shutting_down", "the server is shutting down"));
        }
        self.loaded().cloned().ok_or_else(|| ApiError::unavailable("loading", "the model is loading; see /ready"))
    }

    /// The model, for a request that generates.
    ///
    /// # Errors
    /// As [`Self::served`]; 429 where the queue is full, before any work is put into the request.
    pub fn served_for_generation(&self) -> Result<Arc<Served>, ApiError> {
        let served = self.served()?;
        served.engine.check_queue()?;
        Ok(served)
    }

    /// Whether the server takes no new work.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Takes no new work from now on.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Release);
        if let Some(served) = self.loaded() {
            served.engine.stop_accepting();
        }
    }

    /// Names under which the model is served; the first is the one that responses carry.
    pub fn model_names(&self) -> Vec<String> {
        if self.config.served_model_names.is_empty() {
            self.loaded().map(|served| vec![served.card.name.clone()]).unwrap_or_default()
        } else {
            self.config.served_model_names.clone()
        }
    }

    /// The name that a response to a request for `model` carries.
    ///
    /// # Errors
    /// 404 where `model` is not served here. A request without a name means the model that there is.
    pub fn check_model(&self, model: Option<&str>) -> Result<String, ApiError> {
        let names = self.model_names();
        match model {
            Some(model) if names.iter().any(|name| name == model) => Ok(model.to_owned()),
            Some(model) if !self.config.any_model_name => Err(ApiError::model_not_found(model)),
            _ => Ok(names.into_iter().next().unwrap_or_default()),
        }
    }

    /// Writes to the log, once for each name, that fields of requests are ignored.
    pub fn warn_unknown(&self, names: &[&str]) {
        /// Names to remember; a client that makes up more is not worth the log.
        const REMEMBERED: usize = 64;
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        for &name in names {
            if warned.len() < REMEMBERED && name.len() <= 64 && warned.insert(name.to_owned()) {
                tracing::warn!(field = name, "an unknown request field is ignored");
            }
        }
    }
}
