//! Choosing a token from a row of logits.
//!
//! Order of operations, as in vLLM: raw log-probabilities are taken first, then the grammar, the bias and
//! the penalties change the logits, then the temperature, min-p, top-k and top-p narrow the choice.

use super::model::LogitChange;
use super::random::uniform;
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

/// How tokens are chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the most likely token, of equals the one with the lowest id.
    pub temperature: f32,
    /// Keeps the `k` most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most likely tokens whose probability reaches `p`; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this likely relative to the most likely; 0 keeps all.
    pub min_p: f32,
    /// Subtracted from the logit of every token in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it is in the output.
    pub frequency_penalty: f32,
    /// Positive logits of tokens in the prompt or the output are divided by it, negative ones multiplied;
    /// 1 changes nothing.
    pub repetition_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Start of the request's random numbers; absent means fresh ones.
    pub seed: Option<u64>,
    /// Whether log-probabilities are wanted, and how many alternatives with them.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: None,
            logprobs: None,
        }
    }
}

/// Log-probability of one token, with the most likely alternatives, most likely first.
///
/// From the log-softmax of the model's logits as they are: neither temperature nor penalties nor bias
/// are in it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Alternatives, the token itself among them where it is likely enough.
    pub top: Vec<(u32, f32)>,
}

/// Space that sampling reuses from row to row.
#[derive(Debug, Default)]
pub struct SamplingScratch {
    candidates: Vec<(f32, u32)>,
}

/// A row of logits that has no meaning: one of them is not a number, or all are excluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotFinite;

/// The sampling state of one sequence.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    seed: u64,
    output_counts: HashMap<u32, u32>,
    prompt_tokens: HashSet<u32>,
}

impl Sampler {
    /// A sampler for a sequence that begins with `prompt`.
    pub fn new(params: SamplingParams, seed: u64, prompt: &[u32]) -> Self {
        let prompt_tokens =
            if params.repetition_penalty == 1.0 { HashSet::new() } else { prompt.iter().copied().collect() };
        Self { params, seed, output_counts: HashMap::new(), prompt_tokens }
    }

    /// Alternatives wanted with log-probabilities, where those are wanted at all.
    pub fn logprobs(&self) -> Option<usize> {
        self.params.logprobs
    }

    /// Records a token of the output, for the penalties.
    pub fn accept(&mut self, token: u32) {
        if self.has_penalties() {
            *self.output_counts.entry(token).or_insert(0) += 1;
        }
    }

    fn has_penalties(&self) -> bool {
        self.params.presence_penalty != 0.0
            || self.params.frequency_penalty != 0.0
            || self.params.repetition_penalty != 1.0
    }

    /// How the next token is chosen, but for what changes the logits.
    pub fn params(&self) -> (&SamplingParams, u64) {
        (&self.params, self.seed)
    }

    /// Appends what [`Sampler::adjust`] changes, each token once, in order; tokens of `excluded` lose all likelihood.
    pub fn changes(&self, excluded: &[u32], out: &mut Vec<LogitChange>) {
        let first = out.len();
        let change = |token, bias, output_count, in_prompt| LogitChange { token, bias, output_count, in_prompt };
        out.extend(self.params.logit_bias.iter().map(|&(token, bias)| change(token, bias, 0, false)));
        out.extend(excluded.iter().map(|&token| change(token, f32::NEG_INFINITY, 0, false)));
        out.extend(self.output_counts.iter().map(|(&token, &count)| change(token, 0.0, count, false)));
        out.extend(self.prompt_tokens.iter().map(|&token| change(token, 0.0, 0, true)));
        out[first..].sort_by_key(|change| change.token);
        let mut last = first;
        for i in first + 1..out.len() {
            if out[i].token == out[last].token {
                let other = out[i];
                out[last].bias += other.bias;
                out[last].output_count += other.output_count;
                out[last].in_prompt |= other.in_prompt;
            } else {
                last += 1;
                out[last] = out[i];
            }
        }
        out.truncate((last + 1).min(out.len()));
    }

    /// Applies bias and penalties to `logits`, `[V]`, in place.
    pub fn adjust(&self, logits: &mut [f32]) {
        for &(token, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if !self.has_penalties() {
            return;
        }
        let penalty = self.params.repetition_penalty;
        let repeated = self
            .prompt_tokens
            .iter()
            .chain(self.output_counts.keys().filter(|token| !self.prompt_tokens.contains(token)));
        if penalty != 1.0 {
            for &token in repeated {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                }
            }
        }
        for (&token, &count) in &self.output_counts {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= self.params.frequency_penalty * count as f32 + self.params.presence_penalty;
            }
        }
    }

    /// Chooses a token from adjusted `logits`, `[V]`; `position` counts the tokens of the output so far.
    ///
    /// # Errors
    /// [`NotFinite`] where nothing can be chosen.
    pub fn choose(&self, logits: &[f32], position: u64, scratch: &mut SamplingScratch) -> Result<u32, NotFinite> {
        let (best, max) = argmax(logits)?;
        if self.params.temperature <= 0.0 {
            return Ok(best);
        }
        let scale = 1.0 / f64::from(self.params.temperature);
        let weight = |logit: f32| ((f64::from(logit) - f64::from(max)) * scale).exp();
        let draw = uniform(self.seed, position);

        let limited = self.params.top_k > 0 && self.params.top_k < logits.len();
        if !limited && self.params.top_p >= 1.0 && self.params.min_p <= 0.0 {
            let total: f64 = logits.iter().map(|&logit| weight(logit)).sum();
            let pairs = logits.iter().copied().zip(0u32..);
            return Ok(walk(pairs.map(|(logit, id)| (weight(logit), id)), draw * total, best));
        }

        let least = if self.params.min_p > 0.0 { f64::from(self.params.min_p) } else { 0.0 };
        let candidates = &mut scratch.candidates;
        candidates.clear();
        candidates.extend(
            logits
                .iter()
                .copied()
                .zip(0u32..)
                .filter(|&(logit, _)| logit > f32::NEG_INFINITY && weight(logit) >= least),
        );
        if limited {
            keep_top(candidates, self.params.top_k);
        }
        let kept = if self.params.top_p < 1.0 {
            nucleus(candidates, f64::from(self.params.top_p), weight)
        } else {
            candidates.sort_unstable_by(by_likelihood);
            candidates.len()
        };
        let kept = &candidates[..kept];
        let total: f64 = kept.iter().map(|&(logit, _)| weight(logit)).sum();
        let pairs = kept.iter().map(|&(logit, id)| (weight(logit), id));
        Ok(walk(pairs, draw * total, best))
    }
}

/// The first token at which the running sum of weights exceeds `target`.
fn walk(weights: impl Iterator<Item = (f64, u32)>, target: f64, fallback: u32) -> u32 {
    let mut sum = 0.0;
    let mut last = fallback;
    for (weight, id) in weights {
        sum += weight;
        if weight > 0.0 {
            last = id;
            if sum > target {
                return id;
            }
        }
    }
    // Rounding can leave the sum an ulp short of the target.
    last
}

/// Most likely first; of equals, the lower id.
fn by_likelihood(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Keeps the `count` most likely candidates, in no order.
fn keep_top(candidates: &mut Vec<(f32, u32)>, count: usize) {
    if count > 0 && count < candidates.len() {
        candidates.select_nth_unstable_by(count - 1, by_likelihood);
        candidates.truncate(count);
    }
}

/// Orders the smallest set of most likely candidates whose share of the weight reaches `top_p` to the
/// front; returns its size, at least 1.
fn nucleus(candidates: &mut [(f32, u32)], top_p: f64, weight: impl Fn(f32) -> f64) -> usize {
    let total: f64 = candidates.iter().map(|&(logit, _)| weight(logit)).sum();
    let target = top_p * total;
    // A nucleus is small as a rule: sorting the whole vocabulary for it would cost more than the rest of
    // the sampling, so the sorted front grows until it is enough.
    let mut sorted = 0;
    let mut sum = 0.0;
    let mut front = 256;
    while sorted < candidates.len() {
        let rest = &mut candidates[sorted..];
        let count = front.min(rest.len());
        if count < rest.len() {
            rest.select_nth_unstable_by(count, by_likelihood);
        }
        rest[..count].sort_unstable_by(by_likelihood);
        for (index, &(logit, _)) in rest[..count].iter().enumerate() {
            sum += weight(logit);
            if sum >= target {
                return sorted + index + 1;
            }
        }
        sorted += count;
        front *= 8;
    }
    candidates.len()
}

/// The most likely token and its logit; of equals, the lowest id.
fn argmax(logits: &[f32]) -> Result<(u32, f32), NotFinite> {
    let mut best = (0u32, f32::NEG_INFINITY);
    for (&logit, id) in logits.iter().zip(0u32..) {
        if logit.is_nan() {
            return Err(NotFinite);
        }
        if logit > best.1 {
            best = (id, logit);
        }
    }
    if best.1.is_finite() { Ok(best) } else { Err(NotFinite) }
}

/// Log-probabilities of `token` and of the `top` most likely tokens of raw `logits`, `[V]`.
///
/// # Errors
/// [`NotFinite`] where the logits have no softmax.
pub fn logprobs_of(
    logits: &[f32],
    token: u32,
    top: usize,
    scratch: &mut SamplingScratch,
) -> Result<TokenLogprobs, NotFinite> {
    let normaliser = log_normaliser(logits)?;
    let logprob = |logit: f32| (f64::from(logit) - normaliser) as f32;
    let mut alternatives = Vec::new();
    if top > 0 {
        let candidates = &mut scratch.candidates;
        candidates.clear();
        candidates.extend(logits.iter().copied().zip(0u32..).filter(|&(logit, _)| logit > f32::NEG_INFINITY));
        keep_top(candidates, top);
        candidates.sort_unstable_by(by_likelihood);
        alternatives.extend(candidates.iter().map(|&(logit, id)| (id, logprob(logit))));
    }
    let chosen = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    Ok(TokenLogprobs { id: token, logprob: logprob(chosen), top: alternatives })
}

/// The logarithm of the sum of exponentials of `logits`, `[V]`.
fn log_normaliser(logits: &[f32]) -> Result<f64, NotFinite> {
    let (_, max) = argmax(logits)?;
    let max = f64::from(max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum();
    Ok(max + sum.ln())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(params, 42, &[1])
    }

    /// How often each token comes in `draws` draws.
    fn histogram(params: SamplingParams, logits: &[f32], draws: u64) -> Vec<u64> {
        let sampler = sampler(params);
        let mut scratch = SamplingScratch::default();
        let mut counts = vec![0; logits.len()];
        for position in 0..draws {
            let token = sampler.choose(logits, position, &mut scratch).unwrap();
            counts[token as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        assert_eq!(histogram(SamplingParams::default(), &[1.0, 3.0, 3.0], 5), [0, 5, 0]);
    }

    #[test]
    fn sampling_follows_the_softmax() {
        let params = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
        let logits = [0.0, (2.0f32).ln(), f32::NEG_INFINITY, (5.0f32).ln()];
        let counts = histogram(params, &logits, 80_000);
        assert_eq!(counts[2], 0);
        for (count, expected) in counts.iter().zip([10_000.0, 20_000.0, 0.0, 50_000.0]) {
            assert!((*count as f64 - expected).abs() < 1_000.0, "{counts:?}");
        }
    }

    #[test]
    fn temperature_sharpens() {
        let params = SamplingParams { temperature: 0.5, ..SamplingParams::default() };
        let counts = histogram(params, &[0.0, (3.0f32).ln()], 10_000);
        assert!((850..1_150).contains(&counts[0]), "{counts:?}");
    }

    #[test]
    fn filters_narrow_the_choice() {
        let logits: Vec<f32> = [1.0f32, 2.0, 3.0, 4.0].iter().map(|p| p.ln()).collect();
        let base = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
        let zeros =
            |params| -> Vec<bool> { histogram(params, &logits, 2_000).iter().map(|&count| count == 0).collect() };
        let top_k = SamplingParams { top_k: 2, ..base.clone() };
        assert_eq!(zeros(top_k), [true, true, false, false]);
        // 0.4 + 0.3 reaches 0.7 - and 0.69 needs both.
        let top_p = SamplingParams { top_p: 0.69, ..base.clone() };
        assert_eq!(zeros(top_p), [true, true, false, false]);
        let tiny = SamplingParams { top_p: 1e-9, ..base.clone() };
        assert_eq!(zeros(tiny), [true, true, true, false]);
        let min_p = SamplingParams { min_p: 0.6, ..base.clone() };
        assert_eq!(zeros(min_p), [true, true, false, false]);
        let both = SamplingParams { top_k: 3, top_p: 0.4, ..base };
        assert_eq!(zeros(both), [true, true, true, false]);
    }

    #[test]
    fn penalties_follow_their_formulas() {
        let params = SamplingParams {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            repetition_penalty: 2.0,
            logit_bias: vec![(3, -100.0), (99, 1.0)],
            ..SamplingParams::default()
        };
        let mut sampler = sampler(params);
        sampler.accept(2);
        sampler.accept(2);
        let mut logits = [1.0, -1.0, 4.0, 0.0];
        sampler.adjust(&mut logits);
        // Token 1 is in the prompt: doubled. Token 2: 4 / 2 - 2 * 0.25 - 0.5.
        assert_eq!(logits, [1.0, -2.0, 1.0, -100.0]);
    }

    #[test]
    fn changes_are_one_a_token() {
        let params = SamplingParams {
            frequency_penalty: 0.25,
            repetition_penalty: 2.0,
            logit_bias: vec![(3, -1.0), (2, 0.5), (3, 4.0)],
            ..SamplingParams::default()
        };
        let mut sampler = sampler(params);
        sampler.accept(2);
        sampler.accept(2);
        let before = LogitChange { token: 9, bias: 1.0, output_count: 0, in_prompt: false };
        let mut changes = vec![before];
        sampler.changes(&[7, 2], &mut changes);
        let change = |token, bias, output_count, in_prompt| LogitChange { token, bias, output_count, in_prompt };
        let expected = [
            before,
            change(1, 0.0, 0, true),
            change(2, f32::NEG_INFINITY, 2, false),
            change(3, 3.0, 0, false),
            change(7, f32::NEG_INFINITY, 0, false),
        ];
        assert_eq!(changes, expected);
        let mut none = Vec::new();
        Sampler::new(SamplingParams::default(), 1, &[4]).changes(&[], &mut none);
        assert!(none.is_empty());
    }

    #[test]
    fn meaningless_rows_are_refused() {
        let sampler = sampler(SamplingParams { temperature: 1.0, ..SamplingParams::default() });
        let mut scratch = SamplingScratch::default();
        for row in [vec![f32::NAN, 1.0], vec![f32::NEG_INFINITY; 3], vec![f32::INFINITY, 0.0], vec![]] {
            assert_eq!(sampler.choose(&row, 0, &mut scratch), Err(NotFinite));
            assert!(logprobs_of(&row, 0, 1, &mut scratch).is_err());
        }
    }

    #[test]
    fn logprobs_are_the_log_softmax() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.7].iter().map(|p| p.ln() + 5.0).collect();
        let mut scratch = SamplingScratch::default();
        let result = logprobs_of(&logits, 0, 2, &mut scratch).unwrap();
        assert!((result.logprob - 0.1f32.ln()).abs() < 1e-6);
        assert_eq!(result.top.iter().map(|pair| pair.0).collect::<Vec<_>>(), [2, 1]);
        assert!((result.top[0].1 - 0.7f32.ln()).abs() < 1e-6);
        assert!(logprobs_of(&logits, 0, 0, &mut scratch).unwrap().top.is_empty());
    }

    proptest! {
        #[test]
        fn the_nucleus_is_the_sorted_prefix(
            logits in proptest::collection::vec(-8.0f32..8.0, 1..1200),
            top_p in 0.01f64..1.0,
        ) {
            let weight = |logit: f32| f64::from(logit).exp();
            let mut candidates: Vec<_> = logits.iter().copied().zip(0u32..).collect();
            let mut expected = candidates.clone();
            let kept = nucleus(&mut candidates, top_p, weight);
            expected.sort_unstable_by(by_likelihood);
            prop_assert_eq!(&candidates[..kept], &expected[..kept]);
            let share = |count: usize| -> f64 {
                expected[..count].iter().map(|pair| weight(pair.0)).sum()
            };
            let total: f64 = logits.iter().map(|&logit| weight(logit)).sum();
            prop_assert!(share(kept) >= top_p * total * (1.0 - 1e-12));
            prop_assert!(kept == 1 || share(kept - 1) < top_p * total * (1.0 + 1e-12));
        }
    }
}
