//! Random numbers for sampling: a function of a seed and a counter.
//!
//! Without a hidden state the n-th number of a request is the same whether the request runs alone, in a
//! batch, or again after it was preempted.

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection whose output bits all depend on all
/// input bits.
pub(crate) fn mix(mut value: u64) -> u64 {
    value ^= value >> 30;
    value = value.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value ^= value >> 27;
    value = value.wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The increment of SplitMix64, 2^64 divided by the golden ratio, made odd.
pub(crate) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number in [0, 1) with 53 random bits: draw `counter` of the stream `seed`.
pub fn uniform(seed: u64, counter: u64) -> f64 {
    // The seed is mixed before the counter is added, so that the streams of neighbouring seeds do not
    // overlap.
    let start = mix(seed.wrapping_add(GOLDEN));
    let bits = mix(start.wrapping_add(counter.wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// A seed that differs between calls and between processes, for requests that bring none.
pub fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // RandomState takes its first keys from the operating system and steps them with each instance.
    mix(RandomState::new().hash_one(GOLDEN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_uniform_and_repeatable() {
        let mut buckets = [0usize; 16];
        for counter in 0..16_000 {
            let value = uniform(7, counter);
            assert!((0.0..1.0).contains(&value));
            assert_eq!(value, uniform(7, counter));
            buckets[(value * 16.0) as usize] += 1;
        }
        assert!(buckets.iter().all(|&count| (850..1150).contains(&count)), "{buckets:?}");
    }

    #[test]
    fn neighbouring_seeds_are_unrelated() {
        let agreeing = (0..10_000).filter(|&n| (uniform(1, n) < 0.5) == (uniform(2, n) < 0.5)).count();
        assert!((4_700..5_300).contains(&agreeing), "{agreeing}");
        assert_ne!(uniform(1, 1), uniform(2, 0));
        assert_ne!(fresh_seed(), fresh_seed());
    }
}
