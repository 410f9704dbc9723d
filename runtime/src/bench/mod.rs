//! Measuring generation: a closed loop of clients, against the engine in this process or a server over HTTP.
//!
//! Closed loop: each client makes its next request when the one before has ended, so that exactly as many are under way
//! as there are clients.

mod http;
mod local;
mod report;
mod sse;

pub use http::{HttpTarget, UrlError};
pub use local::LocalTarget;
pub use report::{Distribution, Report, Summary};

use crate::engine::random::{GOLDEN, mix};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Pause after a connection that could not be made, so that a server that is gone is not asked a thousand times a second.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);

/// What is asked of a target.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Clients.
    pub concurrency: usize,
    /// When to stop.
    pub extent: Extent,
    /// Lengths of prompts, of which each request takes one.
    pub input_lengths: Vec<u32>,
    /// Tokens to generate, likewise.
    pub output_lengths: Vec<u32>,
    /// Share of the clients that leave in the middle.
    pub disconnect_fraction: f64,
    /// Share of the requests that are not valid.
    pub malformed_fraction: f64,
    /// Start of the random numbers.
    pub seed: u64,
}

/// How long a measurement goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// So many requests in all.
    Requests(u32),
    /// No request is begun after so long.
    Time(Duration),
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Length of the prompt.
    pub input: u32,
    /// Tokens to generate.
    pub output: u32,
    /// What the client does.
    pub conduct: Conduct,
    /// Chooses the prompt.
    pub seed: u64,
}

/// How a client behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conduct {
    /// Waits for the whole answer.
    Patient,
    /// Closes the connection after so many pieces.
    Leaves(u32),
    /// Sends what is no request.
    Malformed,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// With the whole answer.
    Finished,
    /// The client left, as it meant to.
    Left,
    /// Refused with 400, as it had to be.
    Refused,
    /// Told to come back, in so many seconds where the server said so.
    ToldToWait(Option<u64>),
    /// Otherwise; the kind of error.
    Failed(String),
}

/// What one request showed.
#[derive(Clone, Debug)]
pub struct Sample {
    /// How it ended.
    pub end: End,
    /// From the request to the first piece of text.
    pub first: Option<Duration>,
    /// Between one piece of text and the next.
    pub gaps: Vec<Duration>,
    /// From the request to its end.
    pub whole: Duration,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens that came back.
    pub output_tokens: u64,
}

/// Measures the times of one request's pieces.
#[derive(Debug)]
pub(crate) struct Watch {
    started: Instant,
    last: Option<Instant>,
    first: Option<Duration>,
    gaps: Vec<Duration>,
}

impl Watch {
    fn start() -> Self {
        Self { started: Instant::now(), last: None, first: None, gaps: Vec::new() }
    }

    fn piece(&mut self) {
        let now = Instant::now();
        match self.last.replace(now) {
            None => self.first = Some(now - self.started),
            Some(last) => self.gaps.push(now - last),
        }
    }

    fn end(self, end: End, input_tokens: u64, output_tokens: u64) -> Sample {
        let whole = self.started.elapsed();
        Sample { end, first: self.first, gaps: self.gaps, whole, input_tokens, output_tokens }
    }
}

/// What answers requests.
pub trait Target: Send + Sync + 'static {
    /// What one client keeps from request to request, such as a connection.
    type Session: Default + Send;

    /// Makes one request and waits for its end.
    fn request(&self, session: &mut Self::Session, request: Request) -> impl Future<Output = Sample> + Send;

    /// Seconds that the target's device has worked so far, where that is known.
    fn device_seconds(&self) -> impl Future<Output = Option<f64>> + Send {
        std::future::ready(None)
    }
}

/// Random numbers from a counter: SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn request(&mut self, load: &Load) -> Request {
        let pick =
            |numbers: &mut Self, lengths: &[u32]| lengths.get(numbers.below(lengths.len())).copied().unwrap_or(1);
        let (input, output) = (pick(self, &load.input_lengths), pick(self, &load.output_lengths));
        let kind = self.share();
        let conduct = if kind < load.malformed_fraction {
            Conduct::Malformed
        } else if kind < load.malformed_fraction + load.disconnect_fraction {
            Conduct::Leaves(1 + self.below(output as usize) as u32)
        } else {
            Conduct::Patient
        };
        Request { input, output, conduct, seed: self.next() }
    }
}

/// Runs a load to its end.
pub async fn run<T: Target>(target: &Arc<T>, load: &Load) -> Summary {
    let begun = Arc::new(AtomicU32::new(0));
    let worked = target.device_seconds().await;
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for client in 0..load.concurrency {
        let (target, load, begun) = (Arc::clone(target), load.clone(), Arc::clone(&begun));
        clients.spawn(async move {
            let mut numbers = Numbers(load.seed.wrapping_mul(0x1_0001).wrapping_add(client as u64));
            let mut session = T::Session::default();
            let mut samples = Vec::new();
            loop {
                let goes_on = match load.extent {
                    Extent::Requests(count) => begun.fetch_add(1, Ordering::Relaxed) < count,
                    Extent::Time(time) => started.elapsed() < time,
                };
                if !goes_on {
                    return samples;
                }
                let sample = target.request(&mut session, numbers.request(&load)).await;
                match &sample.end {
                    End::ToldToWait(seconds) => {
                        let seconds = seconds.unwrap_or(1).min(5);
                        tokio::time::sleep(Duration::from_secs(seconds)).await;
                    }
                    End::Failed(_) => tokio::time::sleep(PAUSE_AFTER_ERROR).await,
                    _ => {}
                }
                samples.push(sample);
            }
        });
    }
    let samples = clients.join_all().await.concat();
    let mut summary = Summary::of(load.concurrency, started.elapsed(), &samples);
    if let (Some(before), Some(after)) = (worked, target.device_seconds().await) {
        summary.device_seconds = Some(after - before);
        summary.device_busy = Some((after - before) / summary.seconds.max(1e-9));
    }
    summary
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers at once, and counts what it was asked.
    #[derive(Default)]
    struct Echo {
        malformed: AtomicU32,
        leaving: AtomicU32,
        under_way: AtomicU32,
        most: AtomicU32,
    }

    impl Target for Echo {
        type Session = ();

        async fn request(&self, _: &mut (), request: Request) -> Sample {
            let now = self.under_way.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(now, Ordering::SeqCst);
            let mut watch = Watch::start();
            tokio::task::yield_now().await;
            watch.piece();
            watch.piece();
            self.under_way.fetch_sub(1, Ordering::SeqCst);
            let end = match request.conduct {
                Conduct::Patient => End::Finished,
                Conduct::Leaves(after) => {
                    assert!((1..=request.output).contains(&after));
                    self.leaving.fetch_add(1, Ordering::SeqCst);
                    End::Left
                }
                Conduct::Malformed => {
                    self.malformed.fetch_add(1, Ordering::SeqCst);
                    End::Failed("status 200".to_owned())
                }
            };
            watch.end(end, u64::from(request.input), u64::from(request.output))
        }
    }

    #[tokio::test]
    async fn as_many_at_once_as_asked_and_as_many_in_all() {
        let target = Arc::new(Echo::default());
        let load = Load {
            concurrency: 7,
            extent: Extent::Requests(400),
            input_lengths: vec![3, 5],
            output_lengths: vec![2],
            disconnect_fraction: 0.2,
            malformed_fraction: 0.1,
            seed: 3,
        };
        let summary = run(&target, &load).await;
        assert_eq!(target.most.load(Ordering::SeqCst), 7);
        let count = |counter: &AtomicU32| u64::from(counter.load(Ordering::SeqCst));
        let (left, failed) = (count(&target.leaving), count(&target.malformed));
        assert!((40..120).contains(&left) && (15..75).contains(&failed), "{left} {failed}");
        assert_eq!((summary.left, summary.errors["status 200"]), (left, failed));
        assert_eq!(summary.finished + left + failed, 400);
        assert!(summary.input_tokens > 3 * summary.finished && summary.input_tokens < 5 * summary.finished);
        assert_eq!(summary.between_tokens.count as u64, summary.finished + left);
    }
}
