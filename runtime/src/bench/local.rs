//! The engine in this process.

use super::{End, Numbers, Request, Sample, Summary, Target, Watch};
use crate::engine::{EngineHandle, Event, GenerationRequest, SubmitError};
use crate::metrics::Metrics;
use std::sync::Arc;
use std::time::Instant;
use tokio::task::JoinSet;

/// An engine, and the ids that prompts are made of.
#[derive(Debug)]
pub struct LocalTarget {
    engine: EngineHandle,
    metrics: Arc<Metrics>,
}

impl LocalTarget {
    /// The engine behind `engine`, which counts in `metrics`.
    pub fn new(engine: EngineHandle, metrics: Arc<Metrics>) -> Self {
        Self { engine, metrics }
    }

    /// A prompt of random tokens: no two have a beginning in common that a cache could know.
    fn prompt(&self, request: &Request) -> Vec<u32> {
        let mut numbers = Numbers(request.seed);
        let limit = self.engine.token_limit();
        (0..request.input).map(|_| numbers.below(limit) as u32).collect()
    }

    /// Rates of prompts and of answers by themselves: all requests begin at once.
    pub async fn phases(
        self: &Arc<Self>,
        concurrency: usize,
        input: u32,
        output: u32,
        seed: u64,
        summary: &mut Summary,
    ) {
        let prompts = self.wave(concurrency, input, 1, seed).await;
        if let Some(last) = prompts.iter().filter_map(|sample| sample.first).max() {
            let tokens = f64::from(input) * prompts.len() as f64;
            summary.prefill_tokens_per_second = Some(tokens / last.as_secs_f64());
        }
        /// Short, so that the first tokens come nearly together.
        const SHORT: u32 = 8;
        let answers = self.wave(concurrency, SHORT.min(input), output, seed.wrapping_add(1)).await;
        let begun = answers.iter().filter_map(|sample| sample.first).max().unwrap_or_default();
        let ended = answers.iter().map(|sample| sample.whole).max().unwrap_or_default();
        let after = |sample: &Sample| {
            let Some(first) = sample.first else { return 0 };
            let times = sample.gaps.iter().scan(first, |at, gap| {
                *at += *gap;
                Some(*at)
            });
            times.filter(|at| *at > begun).count()
        };
        let tokens: usize = answers.iter().map(after).sum();
        let seconds = ended.saturating_sub(begun).as_secs_f64();
        summary.decode_tokens_per_second = (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds);
    }

    /// Requests that begin at once, with times counted from there.
    async fn wave(self: &Arc<Self>, concurrency: usize, input: u32, output: u32, seed: u64) -> Vec<Sample> {
        let mut numbers = Numbers(seed);
        let mut requests = JoinSet::new();
        let started = Instant::now();
        for _ in 0..concurrency {
            let (target, seed) = (Arc::clone(self), numbers.next());
            requests.spawn(async move {
                let late = started.elapsed();
                let request = Request { input, output, conduct: super::Conduct::Patient, seed };
                let mut sample = target.request(&mut (), request).await;
                sample.first = sample.first.map(|first| first + late);
                sample.whole += late;
                sample
            });
        }
        requests.join_all().await.into_iter().filter(|sample| sample.end == End::Finished).collect()
    }
}

impl Target for LocalTarget {
    type Session = ();

    async fn device_seconds(&self) -> Option<f64> {
        Some(self.metrics.device_busy.get())
    }

    async fn request(&self, _: &mut (), request: Request) -> Sample {
        let mut watch = Watch::start();
        let input = u64::from(request.input);
        let asked = GenerationRequest::greedy(self.prompt(&request), request.output as usize);
        let mut events = match self.engine.submit(asked) {
            Ok(events) => events,
            Err(SubmitError::QueueFull { retry_after_seconds, .. }) => {
                return watch.end(End::ToldToWait(Some(retry_after_seconds)), input, 0);
            }
            Err(error) => return watch.end(End::Failed(error.to_string()), input, 0),
        };
        let mut tokens = 0;
        loop {
            match events.recv().await {
                Some(Event::Started { .. }) => {}
                Some(Event::Token { .. }) => {
                    watch.piece();
                    tokens += 1;
                }
                Some(Event::Finished(_)) => return watch.end(End::Finished, input, tokens),
                Some(Event::Failed(reason)) => return watch.end(End::Failed(reason), input, tokens),
                None => return watch.end(End::Failed("the engine has stopped".to_owned()), input, tokens),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Extent, Load, run};
    use super::*;
    use crate::engine::{EngineConfig, SchedulerLimits};
    use crate::test_support::tokenizer::VOCABULARY;
    use crate::test_support::{FakeModel, Script};

    #[tokio::test]
    async fn the_engine_is_measured() {
        let config = EngineConfig {
            limits: SchedulerLimits { sequences: 4, batch_tokens: 64, token_limit: VOCABULARY, prefix_cache: true },
            max_queue: 64,
            max_sequence_tokens: None,
        };
        let model = FakeModel::new(Script::Letters, 256, 64);
        let metrics = Arc::new(Metrics::new("vt"));
        let engine = EngineHandle::spawn(Box::new(model), config, Arc::clone(&metrics)).unwrap();
        let target = Arc::new(LocalTarget::new(engine, metrics));
        let load = Load {
            concurrency: 4,
            extent: Extent::Requests(20),
            input_lengths: vec![9, 30],
            output_lengths: vec![5],
            disconnect_fraction: 0.0,
            malformed_fraction: 0.0,
            seed: 1,
        };
        let mut summary = run(&target, &load).await;
        assert_eq!((summary.finished, summary.output_tokens), (20, 100));
        assert_eq!((summary.first_token.count, summary.between_tokens.count), (20, 80));
        assert!(summary.device_busy.is_some_and(|share| share > 0.0 && share < 1.0));
        target.phases(4, 30, 20, 7, &mut summary).await;
        assert!(summary.prefill_tokens_per_second.is_some_and(|rate| rate > 0.0));
        assert!(summary.decode_tokens_per_second.is_some_and(|rate| rate > 0.0));
        // What cannot fit is an error, not a number.
        let summary = run(&target, &Load { input_lengths: vec![10_000], ..load }).await;
        assert_eq!((summary.finished, summary.errors.values().sum::<u64>()), (0, 20));
        assert_eq!(summary.whole.count, 0);
    }
}
