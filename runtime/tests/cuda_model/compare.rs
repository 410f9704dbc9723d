//! How far logits may be from the CPU's: as far as rounding activations to bf16 moves them, measured in the same test.
//!
//! The CPU computes the same text again with activations rounded where CUDA rounds them ([`Rounding`]), on several grids. In a
//! model that squeezes its residual stream hard, such as Gemma 3, that alone moves all logits of some positions by several
//! percent, and hardly moves those of others, so that no share of the largest logit would be a bound for both. What is allowed
//! is a multiple of these samples: see [`Noise::judge`].

use crate::routing::{check_routing, given};
use crate::rows;
use vt_bundle::mmap::ContiguousMap;
use vt_run::model::{CpuModel, StepRouting};

/// How much further from f32 than rounding: of what is typical over all positions (KL divergence grows with the square), and at
/// one position.
const TYPICAL: f64 = 2.0;
const AT_A_POSITION: f64 = 4.0;
/// Mean KL divergence with keys and values in FP8, which keeps three bits of their mantissa.
const KL_LIMIT_FP8: f64 = 0.05;

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&v| f64::from(v - max).exp()).sum();
    row.iter().map(|&v| f64::from(v - max) - sum.ln()).collect()
}

pub fn kl(expected: &[f32], found: &[f32]) -> f64 {
    let (p, q) = (log_softmax(expected), log_softmax(found));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

pub fn largest(rows: &[Vec<f32>]) -> f32 {
    rows.iter().flatten().fold(0.0, |max, v| max.max(v.abs()))
}

/// The same over rows.
pub fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |max, (a, b)| max.max(row_difference(a, b)))
}

/// Largest difference of an element.
pub fn row_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |max, (a, b)| max.max((a - b).abs()))
}

/// The most likely token, the first of equals, and by how much.
pub fn choice(row: &[f32]) -> (u32, f32) {
    let (mut first, mut second) = ((0, f32::NEG_INFINITY), f32::NEG_INFINITY);
    for (token, &logit) in row.iter().enumerate() {
        if logit > first.1 {
            (first, second) = ((token as u32, logit), first.1);
        } else {
            second = second.max(logit);
        }
    }
    (first.0, first.1 - second)
}

/// How far a position's logits are from others.
#[derive(Clone, Copy, Debug)]
struct Distance {
    /// Largest difference of a logit.
    logit: f64,
    /// KL divergence in nats.
    kl: f64,
}

impl Distance {
    const NONE: Self = Self { logit: 0.0, kl: 0.0 };

    fn of(expected: &[f32], found: &[f32]) -> Self {
        Self { logit: f64::from(row_difference(expected, found)), kl: kl(expected, found) }
    }

    fn largest(self, other: Self) -> Self {
        Self { logit: self.logit.max(other.logit), kl: self.kl.max(other.kl) }
    }

    /// Root of the mean square of differences, mean of divergences.
    fn typical(all: &[Self]) -> Self {
        let count = all.len().max(1) as f64;
        let logit = (all.iter().map(|d| d.logit * d.logit).sum::<f64>() / count).sqrt();
        Self { logit, kl: all.iter().map(|d| d.kl).sum::<f64>() / count }
    }

    /// How many times `other` a difference is: of logits, or the root of the divergences' ratio, which grow with the square.
    fn ratio(self, other: Self) -> f64 {
        let ratio = |a: f64, b: f64| if a <= 0.0 { 0.0 } else { a / b.max(f64::MIN_POSITIVE) };
        ratio(self.logit, other.logit).max(ratio(self.kl, other.kl).sqrt())
    }
}

/// What rounding activations does to the logits of a text.
pub struct Noise {
    /// Largest of the samples, by position.
    largest: Vec<Distance>,
    /// Over all positions and samples.
    typical: Distance,
}

/// What [`Noise::judge`] found.
pub struct Judged {
    /// How many times what rounding does, typically.
    typical: f64,
    /// The most at a position, of the larger of rounding there and rounding typically.
    at_a_position: f64,
    /// Largest difference of a logit, and largest divergence.
    pub logit: f32,
    kl: f64,
}

impl Judged {
    /// Whether rounding explains it.
    pub fn is_rounding(&self) -> bool {
        self.typical <= TYPICAL && self.at_a_position <= AT_A_POSITION
    }
}

impl std::fmt::Display for Judged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { typical, at_a_position, logit, kl } = self;
        write!(f, "largest difference {logit:.4}, KL up to {kl:.6}; {typical:.2} times rounding, ")?;
        write!(f, "at a position up to {at_a_position:.2} times")
    }
}

impl Noise {
    /// Of samples: the logits of every position.
    pub fn new(expected: &[Vec<f32>], samples: impl Iterator<Item = Vec<Vec<f32>>>) -> Self {
        let mut all = Vec::new();
        let mut largest = vec![Distance::NONE; expected.len()];
        for sample in samples {
            for ((expected, found), most) in expected.iter().zip(&sample).zip(&mut largest) {
                let distance = Distance::of(expected, found);
                *most = most.largest(distance);
                all.push(distance);
            }
        }
        assert!(!all.is_empty(), "samples");
        Self { largest, typical: Distance::typical(&all) }
    }

    /// Compares distances from `expected` with those of the samples: typically at most [`TYPICAL`] times as far; at a position
    /// at most [`AT_A_POSITION`] times as far as the furthest sample there, or as what is typical.
    pub fn judge(&self, expected: &[Vec<f32>], found: &[Vec<f32>]) -> Judged {
        assert_eq!(expected.len(), found.len());
        let distances: Vec<_> = expected.iter().zip(found).map(|(e, f)| Distance::of(e, f)).collect();
        let ratios = distances.iter().zip(&self.largest).map(|(d, most)| d.ratio(most.largest(self.typical)));
        let most = distances.iter().fold(Distance::NONE, |most, d| most.largest(*d));
        Judged {
            typical: Distance::typical(&distances).ratio(self.typical),
            at_a_position: ratios.fold(0.0, f64::max),
            logit: most.logit as f32,
            kl: most.kl,
        }
    }
}

/// What a device says at each position of a text.
pub struct Followed {
    pub rows: Vec<Vec<f32>>,
    /// The experts that it took; without layers where the model has none.
    pub routing: StepRouting,
}

/// A text, the CPU that it is compared on, and the CPU's own logits at each of its positions.
pub struct Compared {
    pub text: Vec<u32>,
    pub cpu: CpuModel<ContiguousMap>,
    /// The CPU with activations rounded.
    pub rounded: Vec<CpuModel<ContiguousMap>>,
    own: Vec<Vec<f32>>,
    noise: Noise,
}

impl Compared {
    pub fn new(
        text: Vec<u32>,
        own: Vec<Vec<f32>>,
        cpu: CpuModel<ContiguousMap>,
        mut rounded: Vec<CpuModel<ContiguousMap>>,
    ) -> Self {
        let noise = Noise::new(&own, rounded.iter_mut().map(|model| rows(model, &text)));
        Self { text, cpu, rounded, own, noise }
    }

    /// The CPU's logits with the experts that the device took, and how far the device's are from them.
    fn with_experts(&mut self, what: &str, found: &Followed) -> (Vec<Vec<f32>>, Judged) {
        if found.routing.layers.is_empty() {
            return (self.own.clone(), self.noise.judge(&self.own, &found.rows));
        }
        let (expected, own) = given(&mut self.cpu, &self.text, &found.routing);
        check_routing(what, &found.routing, &own);
        let samples = self.rounded.iter_mut().map(|model| given(model, &self.text, &found.routing).0);
        let judged = Noise::new(&expected, samples).judge(&expected, &found.rows);
        (expected, judged)
    }

    /// Asserts that logits are the CPU's but for rounding; gives their largest difference.
    pub fn check(&mut self, what: &str, found: &Followed) -> f32 {
        let (expected, judged) = self.with_experts(what, found);
        let turned = expected.iter().zip(&found.rows).filter(|(e, f)| choice(e).0 != choice(f).0).count();
        eprintln!("{what}: {judged}; logits up to {:.2}, {turned} other choices", largest(&expected));
        assert!(judged.is_rounding(), "{what}: differs by more than rounding");
        judged.logit
    }

    /// With keys and values in FP8.
    pub fn check_narrow(&mut self, what: &str, found: &Followed) {
        let expected = match found.routing.layers.is_empty() {
            true => self.own.clone(),
            false => given(&mut self.cpu, &self.text, &found.routing).0,
        };
        let sum: f64 = expected.iter().zip(&found.rows).map(|(e, f)| kl(e, f)).sum();
        let mean = sum / found.rows.len() as f64;
        eprintln!("{what}: mean KL {mean:.6}");
        assert!(mean <= KL_LIMIT_FP8, "{what}: mean KL {mean}");
    }
}
