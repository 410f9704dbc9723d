//! Work that would hold up other requests.

use super::error::ApiError;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Threads for rendering and tokenising, which takes a good part of a second for a megabyte of text. There
/// are as many as processors; what comes beyond waits for its turn.
#[derive(Debug, Clone)]
pub struct Workers {
    permits: Arc<Semaphore>,
}

impl Default for Workers {
    fn default() -> Self {
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { permits: Arc::new(Semaphore::new(count)) }
    }
}

impl Workers {
    /// Runs `work` on one of the threads.
    ///
    /// # Errors
    /// 500 where the work panicked.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        let failed = || ApiError::internal("preparing the request failed; see the server's log");
        let permits = Arc::clone(&self.permits);
        let permit = permits.acquire_owned().await.map_err(|_| failed())?;
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        })
        .await
        .map_err(|_| failed())
    }
}
