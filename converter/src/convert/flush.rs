//! Writes finished segments to the disk while others are still packed, so that the flush at the end is short.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;

use vt_bundle::BundleError;
use vt_bundle::hash::SEGMENT_BYTES;
use vt_bundle::writer::SegmentWriter;

use super::window::WINDOW_BYTES;

/// Counts the windows of each segment.
pub struct Flusher {
    /// Windows to come, per segment.
    left: Vec<AtomicU64>,
    finished: Sender<u64>,
}

impl Flusher {
    /// Says that the window at `start` has been written.
    pub fn window_done(&self, start: u64) {
        let segment = start / SEGMENT_BYTES;
        if self.left[segment as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
            // The thread goes away early only with an error, which is reported at its end.
            let _ = self.finished.send(segment);
        }
    }
}

/// Runs `work`; a thread beside it flushes the segments whose windows are all done.
///
/// # Errors
/// [`BundleError::Io`] if a flush failed.
pub fn while_flushing<T>(
    segments: &SegmentWriter,
    stop: &(dyn Fn() -> bool + Sync),
    work: impl FnOnce(&Flusher) -> T,
) -> Result<T, BundleError> {
    let size = segments.size();
    let left = (0..size.div_ceil(SEGMENT_BYTES))
        .map(|i| SEGMENT_BYTES.min(size - i * SEGMENT_BYTES).div_ceil(WINDOW_BYTES))
        .map(AtomicU64::new)
        .collect();
    let (finished, queue) = mpsc::channel();
    thread::scope(|scope| {
        let flushing = scope.spawn(|| queue.into_iter().filter(|_| !stop()).try_for_each(|i| segments.flush(i)));
        let result = work(&Flusher { left, finished });
        match flushing.join() {
            Ok(flushed) => flushed.map(|()| result),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
