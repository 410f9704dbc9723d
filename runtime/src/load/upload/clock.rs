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
    /// Time that all readers together spent in reads: as many times `read` as there are readers where reading is what limits.
    pub reading: f64,
    /// Time that they spent waiting for a buffer whose copy was over.
    pub waiting: f64,
}

/// Takes the moments, from any thread.
pub(super) struct Clock {
    start: Instant,
    first_copy: AtomicU64,
    read: AtomicU64,
    reading: AtomicU64,
    waiting: AtomicU64,
}

impl Clock {
    pub(super) fn start() -> Self {
        let [read, reading, waiting] = [0; 3].map(AtomicU64::new);
        Self { start: Instant::now(), first_copy: AtomicU64::new(u64::MAX), read, reading, waiting }
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

    /// Counts the time of one read.
    pub(super) fn reading<T>(&self, read: impl FnOnce() -> T) -> T {
        timed(&self.reading, read)
    }

    /// Counts the time of one wait for a buffer.
    pub(super) fn waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        timed(&self.waiting, wait)
    }

    /// A chunk has been read.
    pub(super) fn read(&self) {
        self.read.fetch_max(self.now(), Ordering::Relaxed);
    }

    /// Everything has arrived.
    pub(super) fn arrived(&self) -> Timeline {
        let arrived = self.now();
        let seconds = |nanos: u64| Duration::from_nanos(nanos.min(arrived)).as_secs_f64();
        let [first_copy, read] = [&self.first_copy, &self.read].map(|moment| seconds(moment.load(Ordering::Relaxed)));
        let [reading, waiting] =
            [&self.reading, &self.waiting].map(|sum| Duration::from_nanos(sum.load(Ordering::Relaxed)).as_secs_f64());
        Timeline { first_copy, read, arrived: seconds(arrived), reading, waiting }
    }
}

fn timed<T>(sum: &AtomicU64, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    sum.fetch_add(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    result
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
        clock.reading(|| std::thread::sleep(Duration::from_millis(3)));
        clock.waiting(|| ());
        clock.read();
        let timeline = clock.arrived();
        assert!(timeline.reading >= 0.003 && timeline.waiting < timeline.reading, "{timeline:?}");
        assert!(0.002 <= timeline.first_copy && timeline.first_copy + 0.002 <= timeline.read, "{timeline:?}");
        assert!(timeline.read <= timeline.arrived);
    }
}
