//! Output that must follow a grammar.

use std::fmt::Debug;
use thiserror::Error;

/// Why a grammar cannot go on.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
#[error("the output grammar failed: {0}")]
pub struct ConstraintError(pub String);

/// A grammar's state within one sequence.
pub trait Constraint: Send + Debug {
    /// Sets the logits, `[V]`, of all tokens that cannot come next to negative infinity. A grammar that
    /// may end here leaves the stop tokens alone.
    ///
    /// # Errors
    /// [`ConstraintError`] where the grammar's own limits are exceeded.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError>;

    /// The same as bits: clears bit `i % 32` of word `i / 32` for every such token `i`. `row` is room for a row of logits.
    ///
    /// # Errors
    /// As [`Constraint::mask`].
    fn mask_bits(&mut self, row: &mut Vec<f32>, bits: &mut [u32]) -> Result<(), ConstraintError> {
        row.clear();
        row.resize(32 * bits.len(), 0.0);
        self.mask(row)?;
        for (word, row) in bits.iter_mut().zip(row.chunks_exact(32)) {
            let allowed = row.iter().rev().fold(0, |bits, logit| bits << 1 | u32::from(*logit != f32::NEG_INFINITY));
            *word &= allowed;
        }
        Ok(())
    }

    /// Advances by a token that was chosen.
    ///
    /// # Errors
    /// [`ConstraintError`] where the token does not fit.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Whether nothing but a stop token can follow.
    fn is_complete(&mut self) -> bool;
}
