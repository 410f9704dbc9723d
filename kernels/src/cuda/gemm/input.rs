//! Activations that a product makes itself from what the step before left, and what it leaves for the step after.

use super::params::{INPUT_GATED, INPUT_NORMED, INPUT_WEIGHTED, Request};
use super::{DeviceMatrix, GemmRequest, OutType};
use crate::activation::Gate;
use crate::cuda::CudaError;
use crate::cuda::elementwise::gate_code;
use crate::cuda::error::require;

/// Most rows that products make activations for: every block makes those that it multiplies, all blocks together many times
/// what a kernel for that alone would.
pub(super) const MAX_ROWS: u32 = 4;

/// Most rows whose norms products leave and take by halves.
const HALF_NORM_ROWS: u32 = 16;
/// Columns of a sum of squares; a mirror of `SQUARED` in `cuda/common/half_norm.cuh`.
const SQUARED: u32 = 16;

/// What the rows of a request hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GemmInput {
    /// The activations, bf16.
    Rows,
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
    /// Half a norm, as [`NormAhead`] leaves it: bf16 rows of `x * weight`. The activations are those over
    /// `sqrt(mean(x^2) + eps)`, which is multiplied onto the sums, in f32. K is a multiple of 16.
    Weighted {
        /// Address of f32 `[m, K / 16]`: sums of x^2.
        squares: u64,
        /// Added to the mean square.
        eps: f32,
    },
}

/// What a product with an f32 result x leaves for a product that takes the norm of it ([`GemmInput::Weighted`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormAhead {
    /// Weights of that norm, f32 `[N']`, at a multiple of 16.
    pub weight: u64,
    /// `x * weight`, bf16 `[m, N']`, at a multiple of 16.
    pub out: u64,
    /// f32 `[m, N' / 16]`: sums of x^2.
    pub squares: u64,
}

impl NormAhead {
    /// Bytes of the sums of squares of rows of `width` elements, of as many rows as there may be.
    pub fn squares_bytes(width: usize) -> u64 {
        u64::from(HALF_NORM_ROWS) * (width as u64).div_ceil(u64::from(SQUARED)) * 4
    }

    /// Completes a checked request.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] where the result is not of f32, or does not lie as it must.
    pub(super) fn complete(
        &self,
        matrix: &DeviceMatrix,
        request: &GemmRequest,
        checked: &Request,
    ) -> Result<Request, CudaError> {
        let addresses = [request.out, self.weight, self.out];
        let aligned =
            addresses.iter().all(|address| address.is_multiple_of(16)) && request.out_stride.is_multiple_of(4);
        let fits = aligned && request.out_type == OutType::F32 && matrix.padded_n().is_multiple_of(SQUARED);
        let what = || {
            format!("{self:?} of {:?} at {:#x}, {} elements apart", request.out_type, request.out, request.out_stride)
        };
        // The input's weights and squares would be in the same places.
        require(fits && checked.weight == 0 && checked.squares == 0, "gemm", what)?;
        Ok(Request { weight: self.weight, next: self.out, squares: self.squares, ..*checked })
    }
}

/// Which halves of norms a product can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HalfNorms {
    /// [`GemmInput::Weighted`].
    pub takes: bool,
    /// [`NormAhead`].
    pub leaves: bool,
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
        let halves = request.m <= HALF_NORM_ROWS && request.x.is_multiple_of(16);
        match self {
            Self::Rows => {
                require(halves && request.x_stride.is_multiple_of(8), "gemm", what)?;
                Ok(*checked)
            }
            Self::Weighted { squares, eps } => {
                let aligned = request.x_stride.is_multiple_of(8) && squares.is_multiple_of(4);
                require(halves && aligned && matrix.k().is_multiple_of(SQUARED), "gemm", what)?;
                Ok(Request { input: INPUT_WEIGHTED, squares, eps, ..*checked })
            }
            Self::Normed { weight, eps } => {
                let aligned = request.x_stride.is_multiple_of(4) && weight.is_multiple_of(16);
                require(few && aligned, "gemm", what)?;
                Ok(Request { input: INPUT_NORMED, weight, eps, ..*checked })
            }
            Self::Gated { gate, up_at } => {
                let aligned = request.x_stride.is_multiple_of(8) && up_at.is_multiple_of(8);
                let inside = up_at.checked_add(matrix.k()).is_some_and(|end| end <= request.x_stride);
                require(few && aligned && inside, "gemm", what)?;
                Ok(Request { input: INPUT_GATED, gate: gate_code(gate), up_at, ..*checked })
            }
        }
    }
}
