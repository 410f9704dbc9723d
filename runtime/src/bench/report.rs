//! What a measurement says, for people and programs.

use super::{End, Sample};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Of some times, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// How many there are.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Half of them are at most this.
    pub p50: f64,
    /// Nine of ten.
    pub p90: f64,
    /// 99 of 100.
    pub p99: f64,
}

impl Distribution {
    /// Of these times, in any order.
    pub fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut ordered: Vec<f64> = times.map(|time| time.as_secs_f64() * 1e3).collect();
        if ordered.is_empty() {
            return Self::default();
        }
        ordered.sort_by(f64::total_cmp);
        // The nearest rank: the smallest value that so many do not exceed.
        let at = |share: f64| ordered[((ordered.len() as f64 * share).ceil() as usize).clamp(1, ordered.len()) - 1];
        let mean = ordered.iter().sum::<f64>() / ordered.len() as f64;
        Self { count: ordered.len(), mean, p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

/// One load.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Requests at once.
    pub concurrency: usize,
    /// From the first request to the last answer.
    pub seconds: f64,
    /// Seconds of these in which the device worked on steps, where the target says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_seconds: Option<f64>,
    /// Their share of all: what is missing to 1 is what the engine and the server add, or a lack of requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_busy: Option<f64>,
    /// Prompts alone, all at once: tokens per second until the last first token. Only in process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_tokens_per_second: Option<f64>,
    /// Answers alone, all at once: tokens per second from the last first token on. Only in process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_tokens_per_second: Option<f64>,
    /// Requests that got their whole answer.
    pub finished: u64,
    /// Requests whose client left.
    pub left: u64,
    /// Requests that were not valid, and were refused.
    pub refused: u64,
    /// Requests that were told to come back later.
    pub told_to_wait: u64,
    /// Everything else, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Prompt tokens of the requests that finished.
    pub input_tokens: u64,
    /// Tokens that they got.
    pub output_tokens: u64,
    /// Of those, per second.
    pub output_tokens_per_second: f64,
    /// Milliseconds to the first token.
    pub first_token: Distribution,
    /// Milliseconds between tokens.
    pub between_tokens: Distribution,
    /// Milliseconds of whole requests that finished.
    pub whole: Distribution,
    /// Milliseconds until a request was told to come back.
    pub until_told: Distribution,
}

impl Summary {
    /// Of the samples of one load.
    pub fn of(concurrency: usize, elapsed: Duration, samples: &[Sample]) -> Self {
        let mut summary = Self { concurrency, seconds: elapsed.as_secs_f64(), ..Self::default() };
        for sample in samples {
            match &sample.end {
                End::Finished => {
                    summary.finished += 1;
                    summary.input_tokens += sample.input_tokens;
                    summary.output_tokens += sample.output_tokens;
                }
                End::Left => summary.left += 1,
                End::Refused => summary.refused += 1,
                End::ToldToWait(_) => summary.told_to_wait += 1,
                End::Failed(kind) => *summary.errors.entry(kind.clone()).or_default() += 1,
            }
        }
        let answered = || samples.iter().filter(|sample| matches!(sample.end, End::Finished | End::Left));
        summary.output_tokens_per_second = summary.output_tokens as f64 / summary.seconds.max(1e-9);
        summary.first_token = Distribution::of(answered().filter_map(|sample| sample.first));
        summary.between_tokens = Distribution::of(answered().flat_map(|sample| sample.gaps.iter().copied()));
        let finished = samples.iter().filter(|sample| sample.end == End::Finished);
        summary.whole = Distribution::of(finished.map(|sample| sample.whole));
        let told = samples.iter().filter(|sample| matches!(sample.end, End::ToldToWait(_)));
        summary.until_told = Distribution::of(told.map(|sample| sample.whole));
        summary
    }
}

/// All loads of one command.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The bundle or the server.
    pub target: String,
    /// One per concurrency.
    pub loads: Vec<Summary>,
    /// What a server still had to do when the last load was over, by the names of its metrics.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub left_over: BTreeMap<String, f64>,
}

impl Report {
    /// Whether anything happened that was not the client's doing.
    pub fn has_errors(&self) -> bool {
        self.loads.iter().any(|load| !load.errors.is_empty()) || self.left_over.values().any(|value| *value != 0.0)
    }

    /// A table that a person reads.
    pub fn table(&self) -> String {
        let mut text = format!("{}\n", self.target);
        for load in &self.loads {
            // Writing to a string cannot fail.
            let _ = load.write(&mut text);
        }
        let left: Vec<String> = self.left_over.iter().map(|(name, value)| format!("{name} {value}")).collect();
        if !left.is_empty() {
            let _ = writeln!(text, "afterwards: {}", left.join(", "));
        }
        text
    }
}

impl Summary {
    fn write(&self, out: &mut String) -> std::fmt::Result {
        let (many, seconds) = (self.concurrency, self.seconds);
        writeln!(out, "{many} at once, {seconds:.1} s")?;
        for (name, rate) in [("prefill", self.prefill_tokens_per_second), ("decode", self.decode_tokens_per_second)] {
            if let Some(rate) = rate {
                writeln!(out, "  {name:<20} {rate:10.1} tokens/s")?;
            }
        }
        writeln!(
            out,
            "  {:<20} {:10.1} tokens/s ({} in, {} out)",
            "output", self.output_tokens_per_second, self.input_tokens, self.output_tokens
        )?;
        if let (Some(worked), Some(share)) = (self.device_seconds, self.device_busy) {
            writeln!(out, "  {:<20} {worked:10.2} s, {share:.3} of the time", "device busy")?;
        }
        let times = [
            ("to the first token", &self.first_token),
            ("between tokens", &self.between_tokens),
            ("whole requests", &self.whole),
            ("until told to wait", &self.until_told),
        ];
        for (name, times) in times.into_iter().filter(|(name, times)| times.count > 0 || !name.starts_with("until")) {
            let Distribution { mean, p50, p90, p99, .. } = times;
            writeln!(out, "  {name:<20} {p50:10.2} ms p50 {p90:10.2} p90 {p99:10.2} p99 {mean:10.2} mean")?;
        }
        write!(out, "  {} finished", self.finished)?;
        for (count, what) in [(self.left, "left"), (self.refused, "refused"), (self.told_to_wait, "told to wait")] {
            if count > 0 {
                write!(out, ", {count} {what}")?;
            }
        }
        for (kind, count) in &self.errors {
            write!(out, ", {count} x {kind}")?;
        }
        writeln!(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let times = |range: std::ops::RangeInclusive<u64>| Distribution::of(range.rev().map(Duration::from_millis));
        let hundred = times(1..=100);
        assert_eq!((hundred.p50, hundred.p90, hundred.p99, hundred.mean), (50.0, 90.0, 99.0, 50.5));
        let one = times(7..=7);
        assert_eq!((one.count, one.p50, one.p99), (1, 7.0, 7.0));
        assert_eq!(Distribution::of(std::iter::empty()), Distribution::default());
    }

    #[test]
    fn only_what_the_client_did_not_mean_is_an_error() {
        let sample = |end| Sample {
            end,
            first: Some(Duration::from_millis(3)),
            gaps: vec![Duration::from_millis(1); 2],
            whole: Duration::from_millis(5),
            input_tokens: 4,
            output_tokens: 3,
        };
        let ends = [End::Finished, End::Left, End::Refused, End::ToldToWait(None)];
        let summary = Summary::of(2, Duration::from_secs(2), &ends.map(sample));
        assert_eq!((summary.finished, summary.left, summary.refused, summary.told_to_wait), (1, 1, 1, 1));
        assert_eq!((summary.output_tokens, summary.output_tokens_per_second), (3, 1.5));
        assert_eq!((summary.first_token.count, summary.between_tokens.count, summary.whole.count), (2, 4, 1));
        let mut report = Report { target: "t".to_owned(), loads: vec![summary], left_over: BTreeMap::new() };
        assert!(!report.has_errors() && report.table().contains("1 told to wait"));
        report.left_over.insert("num_requests_running".to_owned(), 1.0);
        assert!(report.has_errors());
        let failed = Summary::of(1, Duration::from_secs(1), &[sample(End::Failed("status 500".to_owned()))]);
        let report = Report { target: "t".to_owned(), loads: vec![failed], left_over: BTreeMap::new() };
        assert!(report.has_errors() && report.table().contains("1 x status 500"));
    }
}
