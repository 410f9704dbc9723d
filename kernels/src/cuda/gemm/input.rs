//! Activations that a product makes itself from what the step before left.

use super::params::Request;
use super::{DeviceMatrix, GemmRequest};
use crate::activation::Gate;
use crate::cuda::CudaError;
use crate::cuda::elementwise::gate_code;
use crate::cuda::error::require;

/// Most rows that products make activations for: every block makes those that it multiplies, all blocks together many times
/// what a kernel for that alone would.
pub(super) const MAX_ROWS: u32 = 4;

/// What the rows of a request hold, where they are not the activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GemmInput {
    /// f32 rows; the activations are their RMS norm, `x / sqrt(mean(x^2) + eps) * weight`, rounded to bf16. The mean is over
    /// all K.
    Normed {
        /// Address of f32 `[K]`, a multiple of 16.
        weight: u64,
        /// Added to the mean square.
        eps: f32,
    },
    /// bf16 rows of `g [K]` and, `up_at` elements behind it, of `u [K]`; the activations are `gate(g) * u`, rounded to bf16.
    Gated {
        /// The gate.
        gate: Gate,
        /// A multiple of 8.
        up_at: u32,
    },
}

impl GemmInput {
    /// Completes a checked request.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] where the rows do not lie as they must.
    pub(super) fn complete(
        self,
        matrix: &DeviceMatrix,
        request: &GemmRequest,
        checked: &Request,
    ) -> Result<Request, CudaError> {
        let what = || format!("{self:?} of rows at {:#x}, {} elements apart", request.x, request.x_stride);
        let few = request.m <= MAX_ROWS && request.x.is_multiple_of(16);
        match self {
            Self::Normed { weight, eps } => {
                let aligned = request.x_stride.is_multiple_of(4) && weight.is_multiple_of(16);
                require(few && aligned, "gemm", what)?;
                Ok(Request { input: 1, weight, eps, ..*checked })
            }
            Self::Gated { gate, up_at } => {
                let aligned = request.x_stride.is_multiple_of(8) && up_at.is_multiple_of(8);
                let inside = up_at.checked_add(matrix.k()).is_some_and(|end| end <= request.x_stride);
                require(few && aligned && inside, "gemm", what)?;
                Ok(Request { input: 2, gate: gate_code(gate), up_at, ..*checked })
            }
        }
    }
}
