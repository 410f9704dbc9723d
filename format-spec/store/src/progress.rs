//! What a transfer tells while it runs.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Told of bytes as they move. All methods are called from several threads.
pub trait Progress: Send + Sync {
    /// A phase begins: what it does (`pushing`) and how many bytes it is about.
    fn begin(&self, what: &str, total_bytes: u64);
    /// Bytes are done: sent, received, or found to be there already.
    fn advance(&self, bytes: u64);
    /// Bytes must be done again after all.
    fn retreat(&self, bytes: u64);
    /// Something failed and is tried again.
    fn retrying(&self, why: &str);
}

/// Tells nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn retreat(&self, _: u64) {}
    fn retrying(&self, _: &str) {}
}

/// Counts the bytes of one blob and tells a [`Progress`]; bytes that are sent again are counted once.
#[derive(Clone)]
pub(crate) struct Meter {
    progress: Arc<dyn Progress>,
    counted: Arc<AtomicU64>,
}

impl Meter {
    pub(crate) fn new(progress: &Arc<dyn Progress>) -> Self {
        Self { progress: progress.clone(), counted: Arc::default() }
    }

    pub(crate) fn advance(&self, bytes: u64) {
        self.counted.fetch_add(bytes, Ordering::Relaxed);
        self.progress.advance(bytes);
    }

    /// Sets the count of this blob, forwards or back.
    pub(crate) fn set(&self, bytes: u64) {
        let before = self.counted.swap(bytes, Ordering::Relaxed);
        if bytes > before {
            self.progress.advance(bytes - before);
        } else {
            self.progress.retreat(before - bytes);
        }
    }

    pub(crate) fn retrying(&self, why: &str) {
        self.progress.retrying(why);
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("counted", &self.counted).finish_non_exhaustive()
    }
}
