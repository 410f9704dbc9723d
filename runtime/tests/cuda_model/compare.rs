//! How far logits may be from the CPU's.

/// Largest difference of a logit from the CPU's, as a share of the largest logit of the model's answers.
const LOGIT_SHARE: f32 = 0.03;
/// Largest KL divergence at a position, in nats.
const KL_LIMIT: f64 = 0.01;
/// Mean KL divergence with keys and values in FP8, which keeps three bits of their mantissa.
const KL_LIMIT_FP8: f64 = 0.05;
/// Share of positions that may differ by more in a mixture of experts: where two experts are almost equally likely, rounding
/// chooses between them.
const ROUTED_SHARE: f64 = 0.1;

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

/// A text and the CPU's logits at each of its positions.
pub struct Compared {
    pub text: Vec<u32>,
    pub expected: Vec<Vec<f32>>,
    /// The model has experts.
    pub routed: bool,
}

impl Compared {
    /// Asserts that logits are the CPU's; gives their largest difference.
    pub fn check(&self, what: &str, found: &[Vec<f32>]) -> f32 {
        let largest = largest(&self.expected);
        let (mut beyond, mut worst, mut worst_kl) = (0, 0.0f32, 0.0f64);
        let mut turned = 0;
        for (position, (expected, found)) in self.expected.iter().zip(found).enumerate() {
            let (difference, divergence) = (row_difference(expected, found), kl(expected, found));
            (worst, worst_kl) = (worst.max(difference), worst_kl.max(divergence));
            if difference > LOGIT_SHARE * largest || divergence > KL_LIMIT {
                eprintln!("{what}: position {position}: a logit differs by {difference}, KL {divergence:.6}");
                beyond += 1;
            }
            turned += usize::from(choice(found).0 != choice(expected).0);
        }
        eprintln!(
            "{what}: largest difference {worst:.4} of logits up to {largest:.2}, KL up to {worst_kl:.6}, \
             {beyond} positions beyond, {turned} other choices"
        );
        let allowed = if self.routed { (ROUTED_SHARE * found.len() as f64) as usize } else { 0 };
        assert!(beyond <= allowed, "{what}: {beyond} positions differ by more than rounding");
        worst
    }

    /// With keys and values in FP8.
    pub fn check_narrow(&self, what: &str, found: &[Vec<f32>]) {
        let sum: f64 = self.expected.iter().zip(found).map(|(e, f)| kl(e, f)).sum();
        let mean = sum / found.len() as f64;
        eprintln!("{what}: mean KL {mean:.6}");
        assert!(mean <= KL_LIMIT_FP8, "{what}: mean KL {mean}");
    }
}
