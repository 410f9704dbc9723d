//! The generator of tests and of benches, each of which uses some of it.

#![allow(dead_code)]

/// SplitMix64: whoever uses it names its seed, so that what happened can be repeated.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in -1 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Values of mixed magnitude, as activations are: most near 1, a few much larger.
    pub fn activations(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit() * if self.below(50) == 0 { 20.0 } else { 1.0 }).collect()
    }
}
