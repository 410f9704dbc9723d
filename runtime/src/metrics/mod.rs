//! Prometheus metrics, under the names that dashboards for vLLM know (its `v1/metrics/loggers.py`), with
//! a prefix of our own.
//!
//! A registry belongs to one server; there is no global recorder, so two servers in one process do not
//! count each other's requests.

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Seconds to the first token, vLLM's buckets.
const FIRST_TOKEN_BUCKETS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Seconds between tokens, vLLM's buckets.
const INTER_TOKEN_BUCKETS: [f64; 19] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Seconds of whole requests and of their parts, vLLM's buckets.
const REQUEST_BUCKETS: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Tokens in one step of the engine, vLLM's buckets.
const ITERATION_BUCKETS: [f64; 15] =
    [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0];

/// Seconds in which a request is told to come back later.
const REFUSAL_BUCKETS: [f64; 12] =
    [0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5];

type FloatGauge = Gauge<f64, AtomicU64>;
type FloatCounter = Counter<f64, AtomicU64>;

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabel {
    finished_reason: String,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PhaseLabel {
    phase: String,
}

/// A phase of start-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadPhase {
    /// Reading and checking the manifest, planning memory.
    Open,
    /// Checking hashes.
    Verify,
    /// Moving weights to where they are used.
    Upload,
    /// First steps, graph capture.
    Warmup,
}

impl LoadPhase {
    fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Verify => "verify",
            Self::Upload => "upload",
            Self::Warmup => "warmup",
        }
    }
}

/// Everything that one server counts.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<Registry>,
    prefix: String,
    /// Sequences in the batch.
    pub num_requests_running: Gauge,
    /// Requests in the queue.
    pub num_requests_waiting: Gauge,
    /// Share of the cache's blocks in use, 0 to 1.
    pub kv_cache_usage_perc: FloatGauge,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_cache_queries: Counter,
    /// Prompt tokens found there.
    pub prefix_cache_hits: Counter,
    /// Prompt tokens of requests that started.
    pub prompt_tokens: Counter,
    /// Tokens generated.
    pub generation_tokens: Counter,
    /// Sequences that lost their cache to others and are computed again.
    pub num_preemptions: Counter,
    /// Requests given up because the client went away.
    pub cancelled: Counter,
    /// From arrival to the first token.
    pub time_to_first_token: Histogram,
    /// Between tokens of a sequence.
    pub inter_token_latency: Histogram,
    /// From arrival to the end.
    pub e2e_request_latency: Histogram,
    /// From arrival to the first step.
    pub request_queue_time: Histogram,
    /// From the first step to the first token.
    pub request_prefill_time: Histogram,
    /// From the first token to the last.
    pub request_decode_time: Histogram,
    /// Tokens per step.
    pub iteration_tokens: Histogram,
    /// From a request's head to the answer that the queue is full.
    pub request_refusal_time: Histogram,
    /// Seconds that the device spent on steps; on the CPU, seconds of the steps themselves.
    pub device_busy: FloatCounter,
    /// Bytes read while loading.
    pub load_bytes: Counter,
    /// Loads refused because bytes did not match their hash.
    pub verify_failures: Counter,
    request_success: Family<ReasonLabel, Counter>,
    load_seconds: Family<PhaseLabel, FloatGauge>,
}

impl Metrics {
    /// Metrics named `PREFIX:NAME`; the usual prefixes are `vt` and, for dashboards made for it, `vllm`.
    pub fn new(prefix: &str) -> Self {
        let metrics = Self {
            registry: Mutex::new(Registry::default()),
            prefix: prefix.to_owned(),
            num_requests_running: Gauge::default(),
            num_requests_waiting: Gauge::default(),
            kv_cache_usage_perc: FloatGauge::default(),
            prefix_cache_queries: Counter::default(),
            prefix_cache_hits: Counter::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            num_preemptions: Counter::default(),
            cancelled: Counter::default(),
            time_to_first_token: Histogram::new(FIRST_TOKEN_BUCKETS),
            inter_token_latency: Histogram::new(INTER_TOKEN_BUCKETS),
            e2e_request_latency: Histogram::new(REQUEST_BUCKETS),
            request_queue_time: Histogram::new(REQUEST_BUCKETS),
            request_prefill_time: Histogram::new(REQUEST_BUCKETS),
            request_decode_time: Histogram::new(REQUEST_BUCKETS),
            iteration_tokens: Histogram::new(ITERATION_BUCKETS),
            request_refusal_time: Histogram::new(REFUSAL_BUCKETS),
            device_busy: FloatCounter::default(),
            load_bytes: Counter::default(),
            verify_failures: Counter::default(),
            request_success: Family::default(),
            load_seconds: Family::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&self) {
        let mut registry = self.lock();
        let name = |suffix: &str| format!("{}:{suffix}", self.prefix);
        macro_rules! add {
            ($($field:ident as $suffix:literal: $help:literal;)*) => {
                $(registry.register(name($suffix), $help, self.$field.clone());)*
            };
        }
        add! {
            num_requests_running as "num_requests_running": "Sequences in the batch";
            num_requests_waiting as "num_requests_waiting": "Requests in the queue";
            kv_cache_usage_perc as "kv_cache_usage_perc": "Share of cache blocks in use";
            prefix_cache_queries as "prefix_cache_queries": "Prompt tokens looked up in the prefix cache";
            prefix_cache_hits as "prefix_cache_hits": "Prompt tokens found in the prefix cache";
            prompt_tokens as "prompt_tokens": "Prompt tokens";
            generation_tokens as "generation_tokens": "Tokens generated";
            num_preemptions as "num_preemptions": "Sequences preempted and recomputed";
            cancelled as "request_cancelled": "Requests given up by their client";
            time_to_first_token as "time_to_first_token_seconds": "Arrival to first token";
            inter_token_latency as "inter_token_latency_seconds": "Between tokens of a sequence";
            e2e_request_latency as "e2e_request_latency_seconds": "Arrival to end";
            request_queue_time as "request_queue_time_seconds": "Arrival to first step";
            request_prefill_time as "request_prefill_time_seconds": "First step to first token";
            request_decode_time as "request_decode_time_seconds": "First token to last";
            iteration_tokens as "iteration_tokens_total": "Tokens per step";
            request_refusal_time as "request_refusal_time_seconds": "Head of a request to 429";
            device_busy as "device_busy_seconds": "Time that the device spent on steps";
            load_bytes as "load_bytes": "Bytes read while loading";
            verify_failures as "verify_failures": "Loads refused because of a wrong hash";
            request_success as "request_success": "Requests that ended, by reason";
            load_seconds as "load_seconds": "Start-up time by phase";
        }
    }

    /// Counts a request that ended for `reason`.
    pub fn count_finished(&self, reason: &'static str) {
        let label = ReasonLabel { finished_reason: reason.to_owned() };
        self.request_success.get_or_create(&label).inc();
    }

    /// Records how long a phase of start-up took.
    pub fn set_load_time(&self, phase: LoadPhase, time: Duration) {
        let label = PhaseLabel { phase: phase.as_str().to_owned() };
        self.load_seconds.get_or_create(&label).set(time.as_secs_f64());
    }

    /// Says which bundle is served. Call once, when it is known.
    pub fn set_bundle(&self, digest: &str, layout: &str, format: &str) {
        let labels = vec![
            ("digest".to_owned(), digest.to_owned()),
            ("layout".to_owned(), layout.to_owned()),
            ("format".to_owned(), format.to_owned()),
        ];
        // An info metric is written as `NAME_info`.
        let name = format!("{}:bundle", self.prefix);
        self.lock().register(name, "The bundle that is served", Info::new(labels));
    }

    /// All metrics in the OpenMetrics text format.
    pub fn encode(&self) -> String {
        let mut output = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut output, &self.lock());
        output
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_reference() {
        let metrics = Metrics::new("vt");
        metrics.count_finished("stop");
        metrics.set_load_time(LoadPhase::Open, Duration::from_millis(1500));
        metrics.set_bundle("abc", "marlin", "1");
        metrics.num_requests_running.set(3);
        metrics.generation_tokens.inc_by(7);
        metrics.time_to_first_token.observe(0.2);
        let text = metrics.encode();
        for line in [
            "vt:num_requests_running 3",
            "vt:num_requests_waiting 0",
            "vt:kv_cache_usage_perc 0.0",
            "vt:prefix_cache_queries_total 0",
            "vt:prefix_cache_hits_total 0",
            "vt:prompt_tokens_total 0",
            "vt:generation_tokens_total 7",
            "vt:request_success_total{finished_reason=\"stop\"} 1",
            "vt:num_preemptions_total 0",
            "vt:time_to_first_token_seconds_bucket{le=\"0.25\"} 1",
            "vt:inter_token_latency_seconds_count 0",
            "vt:e2e_request_latency_seconds_count 0",
            "vt:request_queue_time_seconds_count 0",
            "vt:request_prefill_time_seconds_count 0",
            "vt:request_decode_time_seconds_count 0",
            "vt:iteration_tokens_total_count 0",
            "vt:load_seconds{phase=\"open\"} 1.5",
            "vt:request_refusal_time_seconds_count 0",
            "vt:device_busy_seconds_total 0.0",
            "vt:load_bytes_total 0",
            "vt:bundle_info{digest=\"abc\",layout=\"marlin\",format=\"1\"} 1",
            "vt:verify_failures_total 0",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert!(Metrics::new("vllm").encode().contains("vllm:num_requests_running"));
    }
}
