//! Work that would hold up other requests.

use super::error::ApiError;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// Threads for rendering and tokenising, which takes a good part of a second for a megabyte of text.
///
/// There are as many as processors, and they live as long as the server: the tokenizer keeps a cache in each
/// thread that uses it, which a pool of changing threads would multiply. They end when the last handle is
/// dropped.
#[derive(Debug, Clone)]
pub struct Workers {
    jobs: Sender<Job>,
}

impl Workers {
    /// Starts the threads.
    ///
    /// # Errors
    /// The operating system's, where it has no thread to give.
    pub fn start() -> io::Result<Self> {
        let (jobs, inbox) = channel::<Job>();
        let inbox = Arc::new(Mutex::new(inbox));
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        for _ in 0..count {
            let inbox = Arc::clone(&inbox);
            std::thread::Builder::new().name("vt-prepare".to_owned()).spawn(move || work(&inbox))?;
        }
        Ok(Self { jobs })
    }

    /// Runs `work` on one of the threads.
    ///
    /// # Errors
    /// 500 where the work panicked.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        let failed = || ApiError::internal("preparing the request failed; see the server's log");
        let (report, result) = oneshot::channel();
        let job = move || {
            // A client that has gone meanwhile needs neither the work nor its result.
            if !report.is_closed() {
                let _ = report.send(work());
            }
        };
        self.jobs.send(Box::new(job)).map_err(|_| failed())?;
        result.await.map_err(|_| failed())
    }
}

fn work(inbox: &Mutex<Receiver<Job>>) {
    loop {
        // The lock is held while waiting, so that one thread waits for work and the others for the lock.
        let job = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else {
            return;
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
}
