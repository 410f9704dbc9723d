//! The engine with a model whose text depends on every token of the context as the cache holds it.

use super::model::Model;
use super::*;
use crate::metrics::Metrics;
use crate::test_support::fake_model::Counters;
use crate::test_support::tokenizer::{EOS, VOCABULARY};
use crate::test_support::{FakeModel, Script};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

struct Rig {
    engine: EngineHandle,
    metrics: Arc<Metrics>,
    counters: Arc<Counters>,
}

fn rig(model: FakeModel) -> Rig {
    rig_with(model, 64, true)
}

fn rig_with(model: FakeModel, max_queue: usize, prefix_cache: bool) -> Rig {
    let counters = model.counters();
    let info = model.info().clone();
    let metrics = Arc::new(Metrics::new("vt"));
    let config = EngineConfig {
        limits: SchedulerLimits {
            sequences: info.max_batch_sequences,
            batch_tokens: info.max_batch_tokens,
            token_limit: VOCABULARY,
            prefix_cache,
        },
        max_queue,
        max_sequence_tokens: None,
    };
    let engine = EngineHandle::spawn(Box::new(model), config, Arc::clone(&metrics)).unwrap();
    Rig { engine, metrics, counters }
}

#[derive(Debug, Default)]
struct Answer {
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    prompt_logprobs: Vec<TokenLogprobs>,
    cached_tokens: usize,
    finish: Option<Finish>,
    failure: Option<String>,
}

async fn collect(mut events: EventStream) -> Answer {
    let mut answer = Answer::default();
    while let Some(event) = events.recv().await {
        match event {
            Event::Started { cached_tokens, prompt_logprobs } => {
                answer.cached_tokens = cached_tokens;
                answer.prompt_logprobs = prompt_logprobs;
            }
            Event::Token { id, logprobs } => {
                answer.tokens.push(id);
                answer.logprobs.extend(logprobs);
            }
            Event::Finished(finish) => answer.finish = Some(finish),
            Event::Failed(reason) => answer.failure = Some(reason),
        }
    }
    answer
}

/// Waits until every block is free; the gauge follows the last event after a moment.
async fn all_blocks_free(rig: &Rig) {
    rig.engine.drained().await;
    let deadline = std::time::Instant::now() + Duration::from_secs(2);
    while rig.metrics.kv_cache_usage_perc.get() != 0.0 {
        assert!(std::time::Instant::now() < deadline, "blocks were lost");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn prompt(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn sampled(text: &str, max_tokens: usize, seed: u64) -> GenerationRequest {
    let mut request = GenerationRequest::greedy(prompt(text), max_tokens);
    request.sampling.temperature = 1.0;
    request.sampling.seed = Some(seed);
    request
}

fn letters(blocks: usize) -> FakeModel {
    FakeModel::new(Script::Letters, 512, blocks)
}

/// The text of a request on an engine of its own with room to spare.
async fn alone(request: GenerationRequest) -> Vec<u32> {
    let rig = rig_with(letters(64), 4, false);
    collect(rig.engine.submit(request).unwrap()).await.tokens
}

#[tokio::test]
async fn c80_texts_do_not_depend_on_neighbours() {
    let rig = rig(letters(128));
    let requests = || (0..12).map(|n| sampled(&"abc ".repeat(n as usize * 3 + 1), 40, n));
    let together: Vec<_> = requests().map(|r| rig.engine.submit(r).unwrap()).collect();
    for (request, events) in requests().zip(together) {
        let answer = collect(events).await;
        assert_eq!(answer.tokens.len(), 40);
        assert_eq!(answer.tokens, alone(request).await);
    }
    assert!(rig.counters.widest.load(Ordering::SeqCst) > 1);
}

#[tokio::test]
async fn c80_seeds_decide_and_their_absence_does_not() {
    let rig = rig(letters(64));
    let mut texts = Vec::new();
    for seed in [Some(1), Some(1), Some(2), None, None] {
        let mut request = sampled("x", 24, 0);
        request.sampling.seed = seed;
        texts.push(collect(rig.engine.submit(request).unwrap()).await.tokens);
    }
    assert_eq!(texts[0], texts[1]);
    assert_ne!(texts[0], texts[2]);
    assert_ne!(texts[3], texts[4]);
}

#[tokio::test]
async fn preemption_loses_nothing() {
    // 8 sequences that grow to 8 blocks each, in a cache of 20.
    let rig = rig(letters(20));
    let requests = || (0..8).map(|n| sampled(&format!("prompt {n} of eight"), 100, n));
    let together: Vec<_> = requests().map(|r| rig.engine.submit(r).unwrap()).collect();
    for (request, events) in requests().zip(together) {
        let answer = collect(events).await;
        assert_eq!(answer.tokens, alone(request).await);
    }
    assert!(rig.metrics.num_preemptions.get() > 0);
    all_blocks_free(&rig).await;
}

#[tokio::test]
async fn prefixes_are_computed_once() {
    let rig = rig(letters(64));
    let text = "0123456789abcdef".repeat(10);
    let first = collect(rig.engine.submit(sampled(&text, 8, 1)).unwrap()).await;
    let before = rig.counters.tokens.load(Ordering::SeqCst);
    let second = collect(rig.engine.submit(sampled(&text, 8, 1)).unwrap()).await;
    assert_eq!(first.tokens, second.tokens);
    assert_eq!((first.cached_tokens, second.cached_tokens), (0, 144));
    // The last block of the prompt, and the output but its last token.
    assert_eq!(rig.counters.tokens.load(Ordering::SeqCst) - before, 16 + 7);
    assert_eq!(rig.metrics.prefix_cache_hits.get(), 144);

    let mut salted = sampled(&text, 8, 1);
    salted.cache_salt = CacheSalt::from_secret(b"another user");
    let other = collect(rig.engine.submit(salted).unwrap()).await;
    assert_eq!((other.cached_tokens, &other.tokens), (0, &first.tokens));
}

#[tokio::test]
async fn a_conversation_reuses_its_own_output() {
    let rig = rig(letters(64));
    let mut tokens = prompt(&"x".repeat(20));
    let first = collect(rig.engine.submit(GenerationRequest::greedy(tokens.clone(), 60)).unwrap()).await;
    tokens.extend(&first.tokens);
    tokens.extend(prompt("and then"));
    let second = collect(rig.engine.submit(GenerationRequest::greedy(tokens, 4)).unwrap()).await;
    // 79 positions were computed, four full blocks of them.
    assert_eq!(second.cached_tokens, 64);
}

#[tokio::test]
async fn c78_a_dropped_receiver_frees_everything() {
    let rig = rig(letters(64).with_step_delay(Duration::from_millis(2)));
    let mut events = rig.engine.submit(sampled("long", 400, 1)).unwrap();
    while !matches!(events.recv().await, Some(Event::Token { .. })) {}
    drop(events);
    tokio::time::timeout(Duration::from_secs(2), rig.engine.drained()).await.unwrap();
    let steps = rig.counters.steps.load(Ordering::SeqCst);
    assert!(steps < 20, "{steps} steps");
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(rig.counters.steps.load(Ordering::SeqCst), steps);
    all_blocks_free(&rig).await;
    assert_eq!(rig.metrics.cancelled.get(), 1);
}

#[tokio::test]
async fn a_full_queue_refuses_at_once() {
    let model = letters(64).with_step_delay(Duration::from_millis(5)).with_batch(64, 1);
    let rig = rig_with(model, 2, true);
    let mut accepted = Vec::new();
    let mut refused = 0;
    for n in 0..50 {
        match rig.engine.submit(sampled("x", 3, n)) {
            Ok(events) => accepted.push(events),
            Err(SubmitError::QueueFull { waiting, retry_after_seconds }) => {
                assert!(waiting <= 2 && retry_after_seconds >= 1);
                refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused >= 40, "{refused}");
    for events in accepted {
        assert_eq!(collect(events).await.tokens.len(), 3);
    }
}

#[tokio::test]
async fn a_short_prompt_does_not_wait_for_a_long_one() {
    let rig = rig(letters(128).with_batch(32, 8));
    let long = rig.engine.submit(GenerationRequest::greedy(prompt(&"l".repeat(480)), 1)).unwrap();
    let short = rig.engine.submit(GenerationRequest::greedy(prompt("s"), 1)).unwrap();
    let (long, short) = tokio::join!(collect(long), collect(short));
    let (long, short) = (long.finish.unwrap(), short.finish.unwrap());
    assert!(short.timings.prefill < long.timings.prefill);
}

#[tokio::test]
async fn stop_tokens_end_and_are_not_sent() {
    let reply = vec![u32::from(b'h'), u32::from(b'i')];
    let rig = rig(FakeModel::new(Script::Reply(reply.clone()), 512, 64));
    let mut head = vec![crate::test_support::tokenizer::START];
    head.extend(prompt("assistant\n"));
    let mut request = GenerationRequest::greedy(head.clone(), 10);
    request.stop_token_ids = vec![EOS];
    let answer = collect(rig.engine.submit(request).unwrap()).await;
    assert_eq!(answer.tokens, reply);
    let finish = answer.finish.unwrap();
    assert_eq!((finish.reason, finish.stop_token), (FinishReason::Stop, Some(EOS)));
    assert_eq!(finish.generated_tokens, 3);

    let mut longer = GenerationRequest::greedy(head, 5);
    longer.stop_token_ids = vec![EOS];
    longer.min_tokens = 4;
    let answer = collect(rig.engine.submit(longer).unwrap()).await;
    assert_eq!(answer.tokens.len(), 4);
}

#[tokio::test]
async fn c86_rows_without_a_token_are_never_chosen() {
    let rig = rig(letters(64));
    let mut request = sampled("x", 200, 3);
    request.sampling.temperature = 5.0;
    request.sampling.logprobs = Some(20);
    let answer = collect(rig.engine.submit(request).unwrap()).await;
    assert_eq!(answer.tokens.len(), 200);
    let known = |id: u32| (id as usize) < VOCABULARY;
    assert!(answer.tokens.iter().all(|&id| known(id)));
    for logprobs in &answer.logprobs {
        assert_eq!(logprobs.top.len(), 20);
        assert!(logprobs.top.iter().all(|&(id, logprob)| known(id) && logprob <= 0.0));
    }
}

#[tokio::test]
async fn prompts_have_logprobs_too() {
    let rig = rig(letters(64));
    let text = "abcd".repeat(30);
    let plain = GenerationRequest::greedy(prompt(&text), 2);
    collect(rig.engine.submit(plain).unwrap()).await;
    let mut request = GenerationRequest::greedy(prompt(&text), 0);
    request.prompt_logprobs = Some(2);
    let answer = collect(rig.engine.submit(request).unwrap()).await;
    assert_eq!(answer.prompt_logprobs.len(), text.len() - 1);
    assert_eq!(answer.prompt_logprobs[0].id, u32::from(b'b'));
    assert_eq!(answer.tokens.len(), 0);
    assert_eq!(answer.finish.unwrap().reason, FinishReason::Length);
}

#[tokio::test]
async fn what_does_not_fit_is_refused() {
    let rig = rig(letters(4));
    let submit = |tokens: Vec<u32>, max| rig.engine.submit(GenerationRequest::greedy(tokens, max));
    assert!(matches!(submit(vec![], 1), Err(SubmitError::EmptyPrompt)));
    assert!(matches!(submit(vec![1; 60], 5), Err(SubmitError::TooLong { limit: 64, .. })));
    assert!(matches!(submit(vec![1; 2], usize::MAX), Err(SubmitError::TooLong { .. })));
    assert!(matches!(submit(vec![300], 1), Err(SubmitError::UnknownToken { id: 300, limit: 260 })));
    assert_eq!(collect(submit(vec![97; 60], 4).unwrap()).await.tokens.len(), 4);
}

#[tokio::test]
async fn shutting_down_drains_or_aborts() {
    let rig = rig(letters(64).with_step_delay(Duration::from_millis(1)));
    let short = rig.engine.submit(sampled("x", 3, 1)).unwrap();
    let long = rig.engine.submit(sampled("x", 500, 1)).unwrap();
    rig.engine.stop_accepting();
    let refused = rig.engine.submit(sampled("x", 3, 1));
    assert!(matches!(refused, Err(SubmitError::ShuttingDown)));
    assert_eq!(collect(short).await.tokens.len(), 3);
    rig.engine.abort();
    let answer = collect(long).await;
    assert_eq!(answer.finish.unwrap().reason, FinishReason::Abort);
    rig.engine.drained().await;
}

#[tokio::test]
async fn a_lost_device_fails_every_request_and_stops() {
    let rig = rig(letters(64).failing_at(5));
    let requests: Vec<_> = (0..10).map(|n| rig.engine.submit(sampled("x", 50, n))).collect();
    assert!(requests[0].is_ok());
    for request in requests {
        match request {
            Ok(events) => assert!(collect(events).await.failure.unwrap().contains("lost")),
            // The device was lost before it could be asked.
            Err(error) => assert_eq!(error, SubmitError::Stopped),
        }
    }
    assert!(!rig.engine.is_alive());
    assert!(matches!(rig.engine.submit(sampled("x", 1, 0)), Err(SubmitError::Stopped)));
}

#[tokio::test]
async fn random_load_leaves_nothing_behind() {
    let rig = rig_with(letters(40), 1000, true);
    let mut tasks = Vec::new();
    for n in 0..200u64 {
        let shared_prefix = "shared prefix ".repeat((n % 7) as usize);
        let text = format!("{shared_prefix}{n}");
        let mut events = rig.engine.submit(sampled(&text, 1 + (n % 50) as usize, n)).unwrap();
        tasks.push(tokio::spawn(async move {
            if n % 10 == 3 {
                for _ in 0..n % 5 {
                    events.recv().await;
                }
                return true;
            }
            collect(events).await.tokens.len() == 1 + (n % 50) as usize
        }));
    }
    for task in tasks {
        assert!(task.await.unwrap());
    }
    all_blocks_free(&rig).await;
}
