//! Permutations of whole rows between a source and its bundle.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the rows of a bundle matrix relate to the rows of its source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum RowOrder {
    /// Row for row.
    #[default]
    Same,
    /// The source holds each head's rows as interleaved rotary pairs `(2 i, 2 i + 1)`, the bundle as halves
    /// `(i, i + head_dim / 2)`, which is the Hugging Face order. llama.cpp's converter permutes llama's q and k so.
    RopeInterleaved {
        /// Rows of one head; even.
        head_dim: u32,
    },
}

impl RowOrder {
    /// The source row of a bundle row.
    pub fn source_row(self, row: usize) -> usize {
        match self {
            RowOrder::Same => row,
            RowOrder::RopeInterleaved { head_dim } => {
                let d = head_dim as usize;
                let (head, within) = (row / d * d, row % d);
                if within < d / 2 { head + 2 * within } else { head + 2 * (within - d / 2) + 1 }
            }
        }
    }

    /// The bundle row of a source row: the inverse of [`RowOrder::source_row`].
    pub fn bundle_row(self, row: usize) -> usize {
        match self {
            RowOrder::Same => row,
            RowOrder::RopeInterleaved { head_dim } => {
                let d = head_dim as usize;
                let (head, within) = (row / d * d, row % d);
                head + within / 2 + (within % 2) * (d / 2)
            }
        }
    }

    /// Whether it permutes a matrix of that many rows: heads must be even and whole.
    pub fn fits(self, rows: u64) -> bool {
        match self {
            RowOrder::Same => true,
            RowOrder::RopeInterleaved { head_dim } => {
                head_dim > 0 && head_dim % 2 == 0 && rows.is_multiple_of(u64::from(head_dim))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_pairs_become_halves() {
        let order = RowOrder::RopeInterleaved { head_dim: 6 };
        let source: Vec<_> = (0..12).map(|r| order.source_row(r)).collect();
        assert_eq!(source, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert!((0..12).all(|r| order.bundle_row(order.source_row(r)) == r));
        assert!(order.fits(12) && !order.fits(10) && !RowOrder::RopeInterleaved { head_dim: 3 }.fits(3));
    }
}
