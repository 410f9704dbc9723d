//! When an upload's first and last pieces were where.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Moments of one upload, in seconds from its start: what fills the pipeline, what drains it, and what lies between.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// The first copy was started.
    pub first_copy: f64,
    /// The last byte had been read.
    pub read: f64,
    /// The last byte had arrived and been checked, as far as anybody checks.
    pub arrived: f64,
}

/// Takes the moments, from any thread.
pub(super) struct Clock {
    start: Instant,
    first_copy: AtomicU64,
    read: AtomicU64,
}

impl Clock {
    pub(super) fn start() -> Self {
        Self { start: Instant::now(), first_copy: AtomicU64::new(u64::MAX), read: AtomicU64::new(0) }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// A copy has been started.
    pub(super) fn copied(&self) {
        // Cheap after the first: no time is asked for.
        if self.first_copy.load(Ordering::Relaxed) == u64::MAX {
            self.first_copy.fetch_min(self.now(), Ordering::Relaxed);
        }
    }

    /// A reader has nothing left to read.
    pub(super) fn read(&self) {
        self.read.fetch_max(self.now(), Ordering::Relaxed);
    }

    /// Everything has arrived.
    pub(super) fn arrived(&self) -> Timeline {
        let arrived = self.now();
        let seconds = |nanos: u64| Duration::from_nanos(nanos.min(arrived)).as_secs_f64();
        let [first_copy, read] = [&self.first_copy, &self.read].map(|moment| seconds(moment.load(Ordering::Relaxed)));
        Timeline { first_copy, read, arrived: seconds(arrived) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_in_order() {
        let clock = Clock::start();
        std::thread::sleep(Duration::from_millis(2));
        clock.copied();
        let first = clock.first_copy.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(2));
        clock.copied();
        assert_eq!(clock.first_copy.load(Ordering::Relaxed), first);
        clock.read();
        let timeline = clock.arrived();
        assert!(0.002 <= timeline.first_copy && timeline.first_copy + 0.002 <= timeline.read, "{timeline:?}");
        assert!(timeline.read <= timeline.arrived);
    }
}
