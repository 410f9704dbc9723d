//! Rotary position embeddings: which frequencies a configuration asks for.

use super::ConfigError;
use super::family::{Family, RopeOfKind};
use super::reader::ConfigReader;
use serde_json::Value;
use vt_kernels::rope::{RopeScaling, inverse_frequencies};

/// One rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that are rotated, the first ones; even.
    pub rotary_dim: usize,
    /// How the frequencies differ from the plain ones.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Radians per position, `[rotary_dim / 2]`, and the factor of sines and cosines.
    pub fn frequencies(&self) -> (Vec<f32>, f32) {
        inverse_frequencies(self.theta, self.rotary_dim, &self.scaling)
    }
}

/// Reads the rotary embeddings of a configuration, in any of the forms that transformers has written over time:
/// `rope_parameters` (plain, or one entry per kind of layer), or `rope_theta`, `rope_local_base_freq` and `rope_scaling`.
pub(super) fn read(
    read: &ConfigReader<'_>,
    family: &Family,
    head_dim: usize,
    max_positions: usize,
) -> Result<(Vec<Rope>, RopeOfKind), ConfigError> {
    let parse = |parameters: Option<&Value>, theta: Option<f64>| {
        one(read, parameters, theta.unwrap_or(family.default_rope_theta), head_dim, max_positions)
    };
    let outer_theta = read.optional_positive("rope_theta")?;
    if let Some(parameters) = read.get("rope_parameters") {
        let of_kind = |kind: &str| parameters.get(kind).filter(|v| v.is_object());
        if let (Some(full), Some(sliding)) = (of_kind("full_attention"), of_kind("sliding_attention")) {
            let ropes = vec![parse(Some(full), outer_theta)?, parse(Some(sliding), outer_theta)?];
            return Ok((ropes, RopeOfKind { full: 0, sliding: 1 }));
        }
        return Ok((vec![parse(Some(parameters), outer_theta)?], RopeOfKind { full: 0, sliding: 0 }));
    }
    let full = parse(read.get("rope_scaling"), outer_theta)?;
    match read.optional_positive("rope_local_base_freq")? {
        Some(local) => Ok((vec![full, parse(None, Some(local))?], RopeOfKind { full: 0, sliding: 1 })),
        None => Ok((vec![full], RopeOfKind { full: 0, sliding: 0 })),
    }
}

fn one(
    outer: &ConfigReader<'_>,
    parameters: Option<&Value>,
    theta: f64,
    head_dim: usize,
    max_positions: usize,
) -> Result<Rope, ConfigError> {
    let partial = outer.optional_positive("partial_rotary_factor")?;
    let Some(parameters) = parameters else {
        let rotary_dim = rotary_dim(outer, partial, head_dim)?;
        return Ok(Rope { theta, rotary_dim, scaling: RopeScaling::None });
    };
    let read = outer.within(parameters);
    let theta = read.optional_positive("rope_theta")?.unwrap_or(theta);
    let rotary_dim = rotary_dim(&read, read.optional_positive("partial_rotary_factor")?.or(partial), head_dim)?;
    let type_key = if read.has("rope_type") { "rope_type" } else { "type" };
    let kind = read.optional_text(type_key)?.unwrap_or("default");
    let original = || -> Result<f64, ConfigError> {
        Ok(read.optional_positive("original_max_position_embeddings")?.unwrap_or(max_positions as f64))
    };
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: read.positive("factor")? },
        "llama3" => {
            let (low, high) = (read.positive("low_freq_factor")?, read.positive("high_freq_factor")?);
            if low >= high {
                return Err(read.wrong("low_freq_factor", "a number below high_freq_factor"));
            }
            RopeScaling::Llama3 {
                factor: read.positive("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: original()?,
            }
        }
        "yarn" => {
            let original = original()?;
            let factor = match read.optional_positive("factor")? {
                Some(factor) => factor,
                None => max_positions as f64 / original,
            };
            RopeScaling::Yarn {
                factor,
                beta_fast: read.optional_positive("beta_fast")?.unwrap_or(32.0),
                beta_slow: read.optional_positive("beta_slow")?.unwrap_or(1.0),
                original_context: original,
                truncate: read.flag("truncate", true)?,
                attention_factor: Some(yarn_attention_factor(&read, factor)?),
            }
        }
        // What GGUF files of no known scaling hold (`rope_freqs`): a divisor for every pair.
        "frequency-factors" => {
            let divisors = read.get("frequency_factors").and_then(Value::as_array).and_then(|list| {
                let divisor = |v: &Value| v.as_f64().map(|d| d as f32).filter(|d| d.is_normal() && *d > 0.0);
                list.iter().map(divisor).collect::<Option<Vec<f32>>>()
            });
            let half = rotary_dim / 2;
            let divisors = divisors
                .filter(|d| d.len() == half)
                .ok_or_else(|| read.wrong("frequency_factors", &format!("{half} positive numbers")))?;
            RopeScaling::Divisors { divisors, attention_factor: 1.0 }
        }
        _ => return Err(read.unsupported(type_key, "default, linear, llama3, yarn and frequency-factors")),
    };
    Ok(Rope { theta, rotary_dim, scaling })
}

fn rotary_dim(read: &ConfigReader<'_>, partial: Option<f64>, head_dim: usize) -> Result<usize, ConfigError> {
    let rotary_dim = (head_dim as f64 * partial.unwrap_or(1.0)) as usize;
    if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
        return Err(read.wrong("partial_rotary_factor", &format!("a fraction that leaves an even part of {head_dim}")));
    }
    Ok(rotary_dim)
}

fn yarn_attention_factor(read: &ConfigReader<'_>, factor: f64) -> Result<f64, ConfigError> {
    if let Some(given) = read.optional_positive("attention_factor")? {
        return Ok(given);
    }
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    Ok(match (read.optional_positive("mscale")?, read.optional_positive("mscale_all_dim")?) {
        (Some(m), Some(all)) => scale(m) / scale(all),
        _ => scale(1.0),
    })
}
