//! Rotary position embeddings, half style: element `i` of a head is paired with element `i + half`.
//!
//! Formulas of frequencies: Hugging Face transformers 4.x, `modeling_rope_utils.py`.

use crate::context::Context;
use crate::simd;

/// Elements that one thread handles at least; less is not worth a fork.
const ELEMENTS_PER_FORK: usize = 1 << 14;

/// How frequencies are changed for contexts longer than the trained one.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by the factor.
    Linear {
        /// Ratio of the new context to the trained one.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, between them interpolated.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are scaled.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the training.
        original_context: f64,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn {
        /// Ratio of the new context to the trained one.
        factor: f64,
        /// Rotations above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is fully interpolated.
        beta_slow: f64,
        /// Context length of the training.
        original_context: f64,
        /// Factor of cosines and sines; `None`: `0.1 ln(factor) + 1`.
        attention_factor: Option<f64>,
        /// Whether the bounds of the ramp are rounded to whole dimensions.
        truncate: bool,
    },
    /// One divisor per pair (`rope_freqs` of GGUF files, LongRoPE), and a factor of cosines and sines.
    Divisors {
        /// `[half]`.
        divisors: Vec<f32>,
        /// Factor of cosines and sines.
        attention_factor: f64,
    },
}

/// Inverse frequencies `[rotary_dim / 2]` and the factor of cosines and sines.
///
/// `rotary_dim` is the number of rotated elements of a head, the first ones.
pub fn inverse_frequencies(base: f64, rotary_dim: usize, scaling: &RopeScaling) -> (Vec<f32>, f32) {
    let dim = rotary_dim as f64;
    let plain: Vec<f64> = (0..rotary_dim / 2).map(|i| base.powf(-(2.0 * i as f64) / dim)).collect();
    let narrow = |values: Vec<f64>| values.into_iter().map(|v| v as f32).collect();
    match scaling {
        RopeScaling::None => (narrow(plain), 1.0),
        RopeScaling::Linear { factor } => (narrow(plain.iter().map(|f| f / factor).collect()), 1.0),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let scaled = plain.iter().map(|&f| {
                let wavelength = 2.0 * std::f64::consts::PI / f;
                if wavelength < original_context / high_freq_factor {
                    f
                } else if wavelength > original_context / low_freq_factor {
                    f / factor
                } else {
                    let smooth =
                        (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            });
            (narrow(scaled.collect()), 1.0)
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, attention_factor, truncate } => {
            // The dimension that makes this many rotations over the trained context.
            let dimension = |rotations: f64| {
                dim * (original_context / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * base.ln())
            };
            let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
            if low == high {
                high += 0.001;
            }
            let scaled = plain.iter().enumerate().map(|(i, &f)| {
                let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                f / factor * interpolated + f * (1.0 - interpolated)
            });
            let default = if *factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            (narrow(scaled.collect()), attention_factor.unwrap_or(default) as f32)
        }
        RopeScaling::Divisors { divisors, attention_factor } => {
            let scaled = plain.iter().zip(divisors).map(|(f, d)| f / f64::from(*d));
            (narrow(scaled.collect()), *attention_factor as f32)
        }
    }
}

/// Cosines and sines of the tokens of one step, shared by its layers.
#[derive(Debug, Default, Clone)]
pub struct Rotation {
    /// `[T, half]`.
    cos: Vec<f32>,
    /// `[T, half]`.
    sin: Vec<f32>,
    half: usize,
}

impl Rotation {
    /// Computes them for tokens at `positions`, with the results of [`inverse_frequencies`].
    ///
    /// The angle is rounded to f32 before its cosine is taken, as in the reference implementation: at large positions
    /// the rounding is part of what models were trained with.
    pub fn load(&mut self, inv_freq: &[f32], factor: f32, positions: impl IntoIterator<Item = usize>) {
        self.cos.clear();
        self.sin.clear();
        self.half = inv_freq.len();
        for position in positions {
            for f in inv_freq {
                let (sin, cos) = f64::from(position as f32 * f).sin_cos();
                self.cos.push(cos as f32 * factor);
                self.sin.push(sin as f32 * factor);
            }
        }
    }

    /// Rotates the heads `heads` of width `head_dim` that start at `offset` of each row of `x` `[T, stride]`.
    ///
    /// # Panics
    /// Where the heads do not fit in a row, or `x` has other than T rows.
    pub fn apply(&self, cx: &Context, x: &mut [f32], stride: usize, offset: usize, heads: usize, head_dim: usize) {
        let half = self.half;
        assert!(offset + heads * head_dim <= stride && 2 * half <= head_dim, "{heads} x {head_dim} at {offset}");
        assert_eq!(x.len() * half, self.cos.len() * stride, "rows of activations and of angles");
        if half == 0 {
            return;
        }
        let rows = |first: usize, rows: &mut [f32]| {
            for (i, row) in rows.chunks_exact_mut(stride).enumerate() {
                let at = (first + i) * half..(first + i + 1) * half;
                let (cos, sin) = (&self.cos[at.clone()], &self.sin[at]);
                for head in row[offset..offset + heads * head_dim].chunks_exact_mut(head_dim) {
                    simd::rotate_half(cx.isa(), &mut head[..2 * half], cos, sin);
                }
            }
        };
        if x.len() < 2 * ELEMENTS_PER_FORK { rows(0, x) } else { cx.pool().rows(x, stride, rows) }
    }
}
