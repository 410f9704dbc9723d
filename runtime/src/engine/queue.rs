//! How many requests wait and how many are under way, counted by tickets that count themselves out.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// Counts shared by the scheduler's thread and those who submit.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: AtomicUsize,
    in_flight: AtomicUsize,
    emptied: Notify,
    /// Running mean of the time that requests take, in microseconds; 0 before the first.
    mean_request_micros: AtomicU64,
}

/// Held by a request from acceptance to its end.
#[derive(Debug)]
pub(super) struct Tickets {
    queue: Arc<Queue>,
    waiting: bool,
}

impl Queue {
    /// Admits a request unless `limit` requests wait already.
    pub fn admit(self: &Arc<Self>, limit: usize) -> Option<Tickets> {
        self.waiting
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |waiting| (waiting < limit).then_some(waiting + 1))
            .ok()?;
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        Some(Tickets { queue: Arc::clone(self), waiting: true })
    }

    /// Requests that have not had their first step.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    /// Requests that have not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    /// Waits until no request is under way.
    pub async fn emptied(&self) {
        loop {
            let notified = self.emptied.notified();
            tokio::pin!(notified);
            // Registers before the count is read, so that the last ticket cannot slip in between.
            notified.as_mut().enable();
            if self.in_flight() == 0 {
                return;
            }
            notified.await;
        }
    }

    /// Records how long a request took.
    pub fn record_duration(&self, duration: Duration) {
        let new = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let old = self.mean_request_micros.load(Ordering::Relaxed);
        let mean = if old == 0 { new } else { old - old / 8 + new / 8 };
        self.mean_request_micros.store(mean.max(1), Ordering::Relaxed);
    }

    /// When a request that is refused now may find room: the time in which one round of `parallel`
    /// requests ends, at least a second and at most a minute.
    pub fn retry_after_seconds(&self, parallel: usize) -> u64 {
        let mean = self.mean_request_micros.load(Ordering::Relaxed);
        let rounds = (self.waiting() / parallel.max(1)) as u64 + 1;
        (mean.saturating_mul(rounds) / 2 / 1_000_000).clamp(1, 60)
    }
}

impl Tickets {
    /// The request has had its first step.
    pub fn leave_waiting(&mut self) {
        if std::mem::take(&mut self.waiting) {
            self.queue.waiting.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The counts.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }
}

impl Drop for Tickets {
    fn drop(&mut self) {
        self.leave_waiting();
        if self.queue.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.queue.emptied.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_count_themselves_out() {
        let queue = Arc::new(Queue::default());
        let mut first = queue.admit(1).unwrap();
        assert!(queue.admit(1).is_none());
        first.leave_waiting();
        first.leave_waiting();
        assert_eq!((queue.waiting(), queue.in_flight()), (0, 1));
        let second = queue.admit(1).unwrap();
        drop(first);
        drop(second);
        assert_eq!((queue.waiting(), queue.in_flight()), (0, 0));
    }

    #[test]
    fn the_wait_is_estimated_within_bounds() {
        let queue = Arc::new(Queue::default());
        assert_eq!(queue.retry_after_seconds(8), 1);
        queue.record_duration(Duration::from_secs(20));
        assert_eq!(queue.retry_after_seconds(8), 10);
        queue.record_duration(Duration::from_secs(100_000));
        assert_eq!(queue.retry_after_seconds(8), 60);
    }

    #[tokio::test]
    async fn the_end_is_noticed() {
        let queue = Arc::new(Queue::default());
        queue.emptied().await;
        let ticket = queue.admit(1).unwrap();
        let waiter = tokio::spawn({
            let queue = Arc::clone(&queue);
            async move { queue.emptied().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        drop(ticket);
        waiter.await.unwrap();
    }
}
