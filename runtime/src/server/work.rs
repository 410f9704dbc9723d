//! Work that would hold up other requests.

use super::error::ApiError;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Threads: together they tokenise some megabytes a second, many times what devices compute of prompts.
const MOST: usize = 4;

type Job = Box<dyn FnOnce() + Send>;

/// Threads for rendering and tokenising, which takes a good part of a second for a megabyte of text.
///
/// There are as many as processors, but at most [`MOST`], and they live as long as the server. The one that was idle
/// last gets the next job, so that only as many are ever used as jobs were under way at once: the allocator keeps
/// for each thread what it needed most, and with jobs that go around all of them would grow towards that for hours.
/// They end when the last handle is dropped.
#[derive(Debug, Clone)]
pub struct Workers {
    office: Arc<Office>,
}

/// Where jobs are handed out; its end is the end of the threads.
#[derive(Debug)]
struct Office(Arc<Mutex<Desk>>);

#[derive(Default)]
struct Desk {
    /// Jobs that found nobody idle, the oldest first.
    jobs: VecDeque<Job>,
    /// Threads that wait, the one that was idle last at the end.
    idle: Vec<Seat>,
    closed: bool,
}

/// Wakes a thread with a job, and goes back to it with the job.
struct Seat(SyncSender<(Job, Seat)>);

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("jobs", &self.jobs.len()).field("idle", &self.idle.len()).finish_non_exhaustive()
    }
}

impl Drop for Office {
    fn drop(&mut self) {
        let mut desk = lock(&self.0);
        desk.closed = true;
        desk.idle.clear();
    }
}

impl Workers {
    /// Starts the threads.
    ///
    /// # Errors
    /// The operating system's, where it has no thread to give.
    pub fn start() -> io::Result<Self> {
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MOST);
        Self::with_threads(count)
    }

    fn with_threads(count: usize) -> io::Result<Self> {
        let workers = Self { office: Arc::new(Office(Arc::default())) };
        for _ in 0..count {
            let desk = Arc::clone(&workers.office.0);
            std::thread::Builder::new().name("vt-prepare".to_owned()).spawn(move || {
                let (seat, calls) = sync_channel(1);
                work(&desk, Seat(seat), &calls);
            })?;
        }
        Ok(workers)
    }

    /// Runs `work` on one of the threads.
    ///
    /// # Errors
    /// 500 where the work panicked.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        let (report, result) = oneshot::channel();
        let job = move || {
            // A client that has gone meanwhile needs neither the work nor its result.
            if !report.is_closed() {
                let _ = report.send(work());
            }
        };
        self.submit(Box::new(job));
        result.await.map_err(|_| ApiError::internal("preparing the request failed; see the server's log"))
    }

    fn submit(&self, job: Job) {
        let mut desk = lock(&self.office.0);
        match desk.idle.pop() {
            None => desk.jobs.push_back(job),
            Some(seat) => {
                drop(desk);
                let call = seat.0.clone();
                // Received by the thread whose seat was taken: it waits for nothing else.
                let _ = call.send((job, seat));
            }
        }
    }
}

fn lock(desk: &Mutex<Desk>) -> MutexGuard<'_, Desk> {
    desk.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread does until the office closes.
fn work(desk: &Mutex<Desk>, mut seat: Seat, calls: &Receiver<(Job, Seat)>) {
    loop {
        let mut open = lock(desk);
        let job = match open.jobs.pop_front() {
            Some(job) => {
                drop(open);
                job
            }
            None if open.closed => return,
            None => {
                open.idle.push(seat);
                drop(open);
                let Ok((job, own)) = calls.recv() else { return };
                seat = own;
                job
            }
        };
        // The panic has been reported by its hook, and the request is told by its dropped channel.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn results_come_back_and_panics_do_not_end_the_threads() {
        let workers = Workers::start().unwrap();
        for _ in 0..200 {
            let outcome = workers.run(|| -> u8 { panic!("on purpose") }).await;
            assert_eq!(outcome.unwrap_err().status, 500);
        }
        assert_eq!(workers.run(|| 5).await.unwrap(), 5);
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_is_not_done() {
        let workers = Workers::start().unwrap();
        let (done, started) = std::sync::mpsc::channel();
        // The future is dropped before it is first polled, or while its job waits.
        drop(workers.run(move || done.send(())));
        assert!(started.recv().is_err());
    }

    #[tokio::test]
    async fn jobs_one_by_one_are_done_by_one_thread() {
        let workers = Workers::with_threads(4).unwrap();
        let mut threads = std::collections::HashSet::new();
        for _ in 0..50 {
            // Threads take their time to begin, and an answer comes a little before its thread is idle again.
            while lock(&workers.office.0).idle.len() < 4 {
                tokio::task::yield_now().await;
            }
            threads.insert(workers.run(|| std::thread::current().id()).await.unwrap());
        }
        assert_eq!(threads.len(), 1);
    }

    #[tokio::test]
    async fn jobs_at_once_are_done_at_once_and_more_than_threads_wait() {
        let workers = Workers::with_threads(3).unwrap();
        let together = Arc::new(std::sync::Barrier::new(3));
        let jobs: Vec<_> = (0..30)
            .map(|n| {
                let (workers, together) = (workers.clone(), Arc::clone(&together));
                tokio::spawn(async move {
                    let done = workers.run(move || {
                        together.wait();
                        n
                    });
                    done.await.unwrap()
                })
            })
            .collect();
        for (n, job) in jobs.into_iter().enumerate() {
            assert_eq!(job.await.unwrap(), n);
        }
    }

    #[test]
    fn threads_end_with_the_last_handle_and_do_what_was_asked_before() {
        let workers = Workers::with_threads(2).unwrap();
        let desk = Arc::downgrade(&workers.office.0);
        let (done, results) = std::sync::mpsc::channel();
        for n in 0..20 {
            let done = done.clone();
            workers.submit(Box::new(move || done.send(n).unwrap()));
        }
        drop((workers, done));
        assert_eq!(results.iter().count(), 20);
        let begun = std::time::Instant::now();
        while desk.strong_count() > 0 {
            assert!(begun.elapsed().as_secs() < 10, "a thread is left");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
