//! How far logits may be from the CPU's.

use crate::routing::{check_routing, given};
use vt_bundle::mmap::ContiguousMap;
use vt_run::model::{CpuModel, StepRouting};

/// Largest difference of a logit from the CPU's, as a share of the largest logit of the model's answers.
const LOGIT_SHARE: f32 = 0.03;
/// Largest KL divergence at a position, in nats, or that of logits which differ by this share of the largest (half the square of
/// the difference), where that is more.
const KL_LIMIT: f64 = 0.01;
const KL_SHARE: f64 = 0.01;
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

/// What a device says at each position of a text.
pub struct Followed {
    pub rows: Vec<Vec<f32>>,
    /// The experts that it took; without layers where the model has none.
    pub routing: StepRouting,
}

/// A text, the CPU that it is compared on, and the CPU's own logits at each of its positions.
pub struct Compared {
    pub text: Vec<u32>,
    pub own: Vec<Vec<f32>>,
    pub cpu: CpuModel<ContiguousMap>,
}

impl Compared {
    /// The CPU's logits with the experts that the device took.
    fn expected(&mut self, what: &str, found: &Followed) -> Vec<Vec<f32>> {
        if found.routing.layers.is_empty() {
            return self.own.clone();
        }
        let (rows, own) = given(&mut self.cpu, &self.text, &found.routing);
        check_routing(what, &found.routing, &own);
        rows
    }

    /// Asserts that logits are the CPU's; gives their largest difference.
    pub fn check(&mut self, what: &str, found: &Followed) -> f32 {
        let expected = self.expected(what, found);
        let largest = largest(&expected);
        let kl_limit = KL_LIMIT.max((KL_SHARE * f64::from(largest)).powi(2) / 2.0);
        let (mut beyond, mut worst, mut worst_kl) = (0, 0.0f32, 0.0f64);
        let mut turned = 0;
        for (position, (expected, found)) in expected.iter().zip(&found.rows).enumerate() {
            let (difference, divergence) = (row_difference(expected, found), kl(expected, found));
            (worst, worst_kl) = (worst.max(difference), worst_kl.max(divergence));
            if difference > LOGIT_SHARE * largest || divergence > kl_limit {
                eprintln!("{what}: position {position}: a logit differs by {difference}, KL {divergence:.6}");
                beyond += 1;
            }
            turned += usize::from(choice(found).0 != choice(expected).0);
        }
        eprintln!(
            "{what}: largest difference {worst:.4} of logits up to {largest:.2}, KL up to {worst_kl:.6}, \
             {beyond} positions beyond, {turned} other choices"
        );
        assert!(beyond == 0, "{what}: {beyond} positions differ by more than rounding");
        worst
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
