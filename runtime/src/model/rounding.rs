//! Rounding of activations to the precision of bf16, for measuring what that alone changes.

/// Rounds activations to eight bits of precision wherever the forward pass on CUDA writes bf16: inputs of products, rows of
/// queries, keys, values, gates and ups. (Probabilities of attention stay f32.)
///
/// `bf16(x * grid) / grid`: 1 is bf16 itself; any other factor between 1 and 2 puts the values that can be represented
/// elsewhere, equally far apart on average. So each gives another sample of the same error, whose size says how far from f32
/// a correct forward pass with bf16 activations may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounding {
    grid: f32,
}

impl Rounding {
    /// Rounding to the values of bf16 divided by `grid`.
    ///
    /// # Panics
    /// Unless `grid` is a normal positive number.
    pub fn new(grid: f32) -> Self {
        assert!(grid.is_normal() && grid > 0.0, "a grid of {grid}");
        Self { grid }
    }

    /// Rounds to the nearest value, ties to even.
    pub fn apply(self, values: &mut [f32]) {
        for value in values {
            let bits = (*value * self.grid).to_bits();
            let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000;
            *value = if value.is_finite() { f32::from_bits(rounded) / self.grid } else { *value };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_of_precision_remain() {
        let mut values = [1.0, 1.003, 1.004, -3.0, 0.0, f32::INFINITY, 1.0 + 3.0 / 256.0];
        Rounding::new(1.0).apply(&mut values);
        assert_eq!(values, [1.0, 1.0, 1.007_812_5, -3.0, 0.0, f32::INFINITY, 1.015_625]);
        let original: Vec<f32> = (1..4000).map(|i| (i as f32).sin() * 50.0).collect();
        let mut samples = [1.0, 1.31, 1.73].map(|grid| {
            let mut values = original.clone();
            Rounding::new(grid).apply(&mut values);
            values
        });
        for values in &samples {
            let errors = values.iter().zip(&original).map(|(v, o)| ((v - o) / o).abs());
            let (largest, sum) = errors.fold((0.0f32, 0.0), |(m, s), e| (m.max(e), s + e));
            assert!(largest <= 1.01 / 256.0 && largest > 0.9 / 512.0, "{largest}");
            assert!((0.0010..0.0018).contains(&(sum / original.len() as f32)), "{sum}");
        }
        samples.sort_by(|a, b| a.partial_cmp(b).unwrap());
        assert!(samples[0] != samples[1] && samples[1] != samples[2]);
    }
}
