//! The parameters that chats and completions share.

use super::error::ApiError;
use super::fields::{Fields, token_id};
use super::state::Served;
use super::structured;
use crate::engine::{CacheSalt, GenerationRequest, SamplingParams};
use crate::text::{Grammar, OutputOptions};
use std::collections::BTreeSet;

/// Alternatives to a token that may be asked for.
pub const MAX_TOP_LOGPROBS: i64 = 20;
/// Choices of one request.
pub const MAX_CHOICES: usize = 128;
/// Stop strings of one request, and bytes of one of them: enough for any use, too few to make matching
/// them slow.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 4096;

/// Fields that change nothing here and are not worth a warning.
const HARMLESS: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
];

/// What a request asks of the generation, before it is known which model answers.
#[derive(Debug, Clone)]
pub struct GenerationParams {
    /// Model by name.
    pub model: Option<String>,
    /// Whether the answer comes in pieces.
    pub stream: bool,
    /// Whether the last piece is the usage.
    pub include_usage: bool,
    /// Whether to say where the time went.
    pub timings: bool,
    /// Choices per prompt.
    pub n: usize,
    /// Most tokens to generate, where the request says so.
    pub max_tokens: Option<usize>,
    min_tokens: usize,
    sampling: SamplingParams,
    given: Given,
    stop: Vec<String>,
    include_stop: bool,
    stop_token_ids: Vec<u32>,
    ignore_eos: bool,
    keep_special_tokens: bool,
    cache_salt: Option<String>,
    /// What the output must look like.
    pub grammar: Option<Grammar>,
}

/// Which parameters the request gives itself; the others come from the model's author.
#[derive(Debug, Clone, Copy, Default)]
struct Given {
    temperature: bool,
    top_p: bool,
    top_k: bool,
    min_p: bool,
    repetition_penalty: bool,
}

impl GenerationParams {
    /// Reads the shared fields. `logprobs` is read by the caller, whose shape of it differs; `least` is
    /// the least `max_tokens`.
    ///
    /// # Errors
    /// 400 naming the field.
    pub fn read(fields: &Fields<'_>, logprobs: Option<usize>, least: i64) -> Result<Self, ApiError> {
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let include_usage = match fields.object("stream_options")? {
            Some(options) => {
                let options = Fields::within("stream_options", options);
                options.boolean("include_usage")?.unwrap_or(false)
            }
            None => false,
        };
        let temperature = fields.number("temperature", 0.0..=100.0)?;
        let top_p = fields.number("top_p", f32::MIN_POSITIVE..=1.0)?;
        let top_k = fields.integer("top_k", -1..=i64::from(i32::MAX))?;
        let min_p = fields.number("min_p", 0.0..=1.0)?;
        let repetition_penalty = fields.number("repetition_penalty", f32::MIN_POSITIVE..=100.0)?;
        let seed = fields.integer("seed", i64::MIN..=i64::MAX)?;
        let n = fields.integer("n", 1..=MAX_CHOICES as i64)?.unwrap_or(1);
        if let Some(best_of) = fields.integer("best_of", 1..=i64::MAX)?
            && best_of != n
        {
            return Err(ApiError::bad_field("best_of", "must equal n"));
        }
        let stop = fields.strings("stop")?.unwrap_or_default();
        if stop.len() > MAX_STOPS || stop.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
            return Err(ApiError::bad_field(
                "stop",
                format!("at most {MAX_STOPS} strings of at most {MAX_STOP_BYTES} bytes"),
            ));
        }
        let max_tokens = match fields.count("max_completion_tokens", least)? {
            Some(count) => Some(count),
            None => fields.count("max_tokens", least)?,
        };
        for name in HARMLESS {
            fields.value(name);
        }
        Ok(Self {
            model: fields.string("model")?.map(str::to_owned),
            stream,
            include_usage,
            timings: fields.boolean("timings")?.unwrap_or(false),
            n: usize::try_from(n).unwrap_or(1),
            max_tokens,
            min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
            sampling: SamplingParams {
                temperature: temperature.unwrap_or(1.0),
                top_p: top_p.unwrap_or(1.0),
                top_k: usize::try_from(top_k.unwrap_or(0)).unwrap_or(0),
                min_p: min_p.unwrap_or(0.0),
                presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
                frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
                repetition_penalty: repetition_penalty.unwrap_or(1.0),
                logit_bias: read_logit_bias(fields)?,
                seed: seed.map(|seed| seed as u64),
                logprobs,
            },
            given: Given {
                temperature: temperature.is_some(),
                top_p: top_p.is_some(),
                top_k: top_k.is_some(),
                min_p: min_p.is_some(),
                repetition_penalty: repetition_penalty.is_some(),
            },
            stop,
            include_stop: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
            stop_token_ids: fields.token_ids("stop_token_ids")?.unwrap_or_default(),
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            keep_special_tokens: !fields.boolean("skip_special_tokens")?.unwrap_or(true),
            cache_salt: fields.string("cache_salt")?.map(str::to_owned),
            grammar: structured::read(fields)?,
        })
    }

    /// Whether log-probabilities are wanted.
    pub fn wants_logprobs(&self) -> bool {
        self.sampling.logprobs.is_some()
    }

    /// How tokens become text.
    pub fn output_options(&self) -> OutputOptions {
        OutputOptions {
            stop: self.stop.clone(),
            include_stop: self.include_stop,
            keep_special_tokens: self.keep_special_tokens,
        }
    }

    /// The engine's request for one choice of one prompt.
    ///
    /// # Errors
    /// 400 where the prompt, or the prompt and the output asked for, do not fit.
    pub fn request(
        &self,
        served: &Served,
        prompt: Vec<u32>,
        choice: usize,
        tenant: CacheSalt,
    ) -> Result<GenerationRequest, ApiError> {
        let limit = served.engine.max_sequence_tokens();
        let room = limit.saturating_sub(prompt.len());
        let max_tokens = match self.max_tokens {
            Some(wanted) if wanted > room => {
                let given = if prompt.len() > limit { None } else { self.max_tokens };
                return Err(ApiError::context_length(prompt.len(), given, limit));
            }
            Some(wanted) => wanted,
            None if room == 0 => return Err(ApiError::context_length(prompt.len(), None, limit)),
            None => room,
        };
        let mut stops: BTreeSet<u32> = self.stop_token_ids.iter().copied().collect();
        if !self.ignore_eos {
            stops.extend(served.text.stop_token_ids());
        }
        let constraint = match &self.grammar {
            Some(grammar) => Some(served.text.grammars()?.compile(grammar)?),
            None => None,
        };
        // A grammar that is complete leaves nothing but the end.
        let min_tokens = if constraint.is_some() { 0 } else { self.min_tokens.min(max_tokens) };
        Ok(GenerationRequest {
            prompt,
            max_tokens,
            min_tokens,
            stop_token_ids: stops.into_iter().collect(),
            sampling: self.sampling_for(served, choice),
            prompt_logprobs: None,
            cache_salt: self.salt(tenant),
            constraint,
        })
    }

    /// The request's own parameters, then the author's, then the neutral ones.
    fn sampling_for(&self, served: &Served, choice: usize) -> SamplingParams {
        let mut sampling = self.sampling.clone();
        let defaults = served.text.sampling_defaults();
        if let (false, Some(value)) = (self.given.temperature, defaults.temperature) {
            sampling.temperature = value;
        }
        if let (false, Some(value)) = (self.given.top_p, defaults.top_p) {
            sampling.top_p = value;
        }
        if let (false, Some(value)) = (self.given.top_k, defaults.top_k) {
            sampling.top_k = value as usize;
        }
        if let (false, Some(value)) = (self.given.min_p, defaults.min_p) {
            sampling.min_p = value;
        }
        if let (false, Some(value)) = (self.given.repetition_penalty, defaults.repetition_penalty) {
            sampling.repetition_penalty = value;
        }
        // Choices of one request differ, and each can be had again alone.
        sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(choice as u64));
        sampling
    }

    /// A salt of the request's own narrows the tenant's.
    fn salt(&self, tenant: CacheSalt) -> CacheSalt {
        match &self.cache_salt {
            None => tenant,
            Some(salt) => {
                let mut secret = tenant.as_bytes().to_vec();
                secret.extend_from_slice(salt.as_bytes());
                CacheSalt::from_secret(&secret)
            }
        }
    }
}

/// `logit_bias`: an object from token ids, as strings, to numbers.
fn read_logit_bias(fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(biases) = fields.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    biases
        .iter()
        .map(|(id, bias)| {
            let name = format!("logit_bias.{id}");
            let id = serde_json::from_str(id).ok().as_ref().and_then(token_id);
            let id = id.ok_or_else(|| ApiError::bad_field(&name, "the key is not a token id"))?;
            match bias.as_f64() {
                Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((id, bias as f32)),
                _ => Err(ApiError::bad_field(&name, "expected a number between -100 and 100")),
            }
        })
        .collect()
}
