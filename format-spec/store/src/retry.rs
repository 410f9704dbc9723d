//! Trying again: how often, and how long to wait.

use std::time::Duration;

use crate::error::StoreError;
use crate::progress::Meter;

/// Failures in a row, without a byte of progress between them, that end a transfer.
const ATTEMPTS: u32 = 6;
/// Wait after the first failure; doubled by each further one.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Counts failures in a row.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    failures: u32,
}

impl Retry {
    /// Something worked: the count begins anew.
    pub(crate) fn progressed(&mut self) {
        self.failures = 0;
    }

    /// Waits where another attempt is worth it, and gives the error back where it is not.
    pub(crate) async fn after(&mut self, error: StoreError, meter: &Meter) -> Result<(), StoreError> {
        self.failures += 1;
        // Wrong bytes may come from the line once; twice in a row they are in the store.
        let allowed = if matches!(error, StoreError::Digest { .. }) { 2 } else { ATTEMPTS };
        if !error.is_transient() || self.failures >= allowed {
            return Err(error);
        }
        let wait = (FIRST_WAIT * 2u32.saturating_pow(self.failures - 1)).min(LONGEST_WAIT);
        // Clients that failed together must not come back together.
        let jitter = wait.mul_f64(f64::from(std::process::id() % 97) / 400.0);
        meter.retrying(&format!("{error}; trying again in {:.1} s", (wait + jitter).as_secs_f64()));
        tokio::time::sleep(wait + jitter).await;
        Ok(())
    }
}

/// Runs a small request again while it fails for reasons that may pass.
pub(crate) async fn persistently<T, F>(meter: &Meter, mut request: impl FnMut() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut retry = Retry::default();
    loop {
        match request().await {
            Ok(value) => return Ok(value),
            Err(error) => retry.after(error, meter).await?,
        }
    }
}
