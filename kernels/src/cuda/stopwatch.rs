//! Time as the device spends it, between two points of a stream.

use super::error::Named;
use super::stream::Event;
use super::{CudaContext, CudaError, CudaStream};
use cudarc::driver::result;
use std::sync::Arc;
use std::time::Duration;

/// Two points of a stream. From the first to the second the device does what was submitted between them, and waits where that
/// comes too slowly; what it waits for before the first is not counted.
#[derive(Debug)]
pub struct Stopwatch {
    begin: Event,
    end: Event,
}

impl Stopwatch {
    /// A stopwatch that has not been started.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        Ok(Self { begin: Event::with_time(context)?, end: Event::with_time(context)? })
    }

    /// Counts from when the device has done everything submitted to `stream` so far.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn begin(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.begin.record(stream)
    }

    /// Counts until then.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn end(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.end.record(stream)
    }

    /// What was counted, once the device has come that far. The resolution is about half a microsecond.
    ///
    /// # Errors
    /// [`CudaError::Call`], also where it was not begun and ended.
    pub fn elapsed(&self) -> Result<Duration, CudaError> {
        self.end.wait()?;
        // SAFETY: both events are alive, and record times.
        let milliseconds = unsafe { result::event::elapsed(self.begin.raw(), self.end.raw()) };
        let milliseconds = milliseconds.named("cuEventElapsedTime")?;
        Ok(Duration::try_from_secs_f64(f64::from(milliseconds) / 1e3).unwrap_or_default())
    }
}
