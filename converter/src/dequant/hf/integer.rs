//! Integer weights: `(q - z) * s`.

use super::Matrix;
use crate::safetensors::SourceEncoding as Encoding;
use crate::safetensors::resolve::IntScales;

/// Position, within an AWQ word, of the code of column `i` of its eight (four) columns: the inverse of the order
/// 0, 2, 4, 6, 1, 3, 5, 7 (0, 2, 1, 3) in which AutoAWQ packs.
const AWQ_FIELD_4: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
const AWQ_FIELD_8: [usize; 4] = [0, 2, 1, 3];

impl Matrix<'_> {
    /// One row of any integer encoding.
    pub(super) fn integers(&self, n: usize, out: &mut [f32]) {
        let k = self.k;
        match self.encoding {
            Encoding::Int4ModelOpt { group } => {
                let bytes = &self.codes[n / 2 * k..][..k];
                let codes = bytes.iter().map(|b| {
                    let nibble = i32::from(if n.is_multiple_of(2) { b & 15 } else { b >> 4 });
                    if nibble > 7 { nibble - 16 } else { nibble }
                });
                self.scaled(n, group as usize, codes, |_| 0, out);
            }
            Encoding::Int8 { scales, zero_points } => {
                let codes = self.codes[n * k..][..k].iter().map(|&b| i32::from(b as i8));
                let zero = |i: usize| if zero_points { i32::from(self.zeros[i] as i8) } else { 0 };
                match scales {
                    IntScales::Group(group) => {
                        let first = n * (k / group as usize);
                        self.scaled(n, group as usize, codes, |g| zero(first + g), out);
                    }
                    IntScales::Tensor => {
                        let (z, s) = (zero(0), self.float_scales.get(0));
                        for (value, q) in out.iter_mut().zip(codes) {
                            *value = (q - z) as f32 * s;
                        }
                    }
                }
            }
            Encoding::Packed { bits, group, zero_points } => {
                let per_word = 32 / bits as usize;
                let half = 1i32 << (bits - 1);
                let codes =
                    (0..k).map(|i| field(self.codes, n * (k / per_word) + i / per_word, i % per_word, bits) - half);
                let groups = k / group as usize;
                let zero = |g: usize| {
                    if zero_points {
                        field(self.zeros, n / per_word * groups + g, n % per_word, bits) - half
                    } else {
                        0
                    }
                };
                self.scaled(n, group as usize, codes, zero, out);
            }
            Encoding::Gptq { bits, group, zero_minus_one } => {
                let per_word = 32 / bits as usize;
                let codes = (0..k).map(|i| field(self.codes, i / per_word * self.n + n, i % per_word, bits));
                let zero = |g: usize| {
                    field(self.zeros, g * (self.n / per_word) + n / per_word, n % per_word, bits)
                        + i32::from(zero_minus_one)
                };
                self.scaled_columns(n, group as usize, codes, zero, out);
            }
            Encoding::Awq { bits, group } => {
                let per_word = 32 / bits as usize;
                let at = if bits == 4 { AWQ_FIELD_4[n % per_word] } else { AWQ_FIELD_8[n % per_word] };
                let words = self.n / per_word;
                let codes = (0..k).map(|i| field(self.codes, i * words + n / per_word, at, bits));
                let zero = |g: usize| field(self.zeros, g * words + n / per_word, at, bits);
                self.scaled_columns(n, group as usize, codes, zero, out);
            }
            // The other encodings hold floats; `Matrix::row` decodes them.
            _ => out.fill(f32::NAN),
        }
    }

    /// Scales in rows: `[N, G]`.
    fn scaled(
        &self,
        n: usize,
        group: usize,
        codes: impl Iterator<Item = i32>,
        zero: impl Fn(usize) -> i32,
        out: &mut [f32],
    ) {
        let first = n * (self.k / group);
        self.apply(group, codes, zero, |g| self.float_scales.get(first + g), out);
    }

    /// Scales in columns: `[G, N]`.
    fn scaled_columns(
        &self,
        n: usize,
        group: usize,
        codes: impl Iterator<Item = i32>,
        zero: impl Fn(usize) -> i32,
        out: &mut [f32],
    ) {
        self.apply(group, codes, zero, |g| self.float_scales.get(g * self.n + n), out);
    }

    fn apply(
        &self,
        group: usize,
        mut codes: impl Iterator<Item = i32>,
        zero: impl Fn(usize) -> i32,
        scale: impl Fn(usize) -> f32,
        out: &mut [f32],
    ) {
        for (g, values) in out.chunks_mut(group).enumerate() {
            let (z, s) = (zero(g), scale(g));
            for (value, q) in values.iter_mut().zip(codes.by_ref()) {
                *value = (q - z) as f32 * s;
            }
        }
    }
}

/// Field `i` of the `word`-th little-endian 32-bit word, lowest bits first.
fn field(words: &[u8], word: usize, i: usize, bits: u32) -> i32 {
    let bit = i as u32 * bits;
    let byte = words[4 * word + (bit / 8) as usize];
    i32::from(if bits == 8 { byte } else { (byte >> (bit % 8)) & 15 })
}
