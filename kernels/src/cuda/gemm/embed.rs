//! Rows of a matrix by index: launches of `cuda/forward/embedding.cu`.

use super::matrix::Form;
use super::params::Raw;
use super::{DeviceMatrix, Gemm};
use crate::cuda::module::{Function, Module, arguments};
use crate::cuda::{CudaContext, CudaError, CudaStream};
use std::sync::Arc;

/// Threads of a block.
const THREADS: u32 = 128;
/// Elements that a thread decodes.
const PER_THREAD: u32 = 8;

/// The kernels of `embedding.cu`.
#[derive(Debug)]
pub struct EmbeddingKernels {
    floats: Function,
    tiled: Function,
    raw: Function,
}

impl EmbeddingKernels {
    /// Loads them.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there are none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let module = Module::load(context, "forward/embedding")?;
        Ok(Self {
            floats: module.function(c"vt_embed_floats", 0)?,
            tiled: module.function(c"vt_embed_tiled", 0)?,
            raw: module.function(c"vt_embed_raw", 0)?,
        })
    }

    /// `out` f32 `[count, K]`: rows of `matrix`, decoded exactly, times `scale`. `tokens` u32 `[count]` are rows of the matrix,
    /// counted with the padding of parts before. `gemm` has the codebooks of raw blocks.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    #[expect(clippy::too_many_arguments, reason = "a launch: every number is an argument of the kernel")]
    pub fn embed(
        &self,
        stream: &CudaStream,
        gemm: &Gemm,
        matrix: &DeviceMatrix,
        tokens: u64,
        count: usize,
        scale: f32,
        out: u64,
    ) -> Result<(), CudaError> {
        let grid = [count as u32, matrix.k().div_ceil(THREADS * PER_THREAD), 1];
        let block = [THREADS, 1, 1];
        // SAFETY: the types and order of the kernels; the matrix is checked, and the caller keeps it and the other addresses
        // allocated and of the shapes named above.
        unsafe {
            match &matrix.form {
                Form::Tiled { params, .. } => {
                    self.tiled.launch_early(stream, grid, block, 0, &mut arguments![**params, tokens, scale, out])
                }
                Form::Rows(rows) => {
                    let mut arguments = arguments![rows.data, rows.dtype, rows.k, tokens, scale, out];
                    self.floats.launch_early(stream, grid, block, 0, &mut arguments)
                }
                Form::Raw { format, params } => {
                    let params = Raw { grid: gemm.codebook(format), ..*params };
                    self.raw.launch_early(stream, grid, block, 0, &mut arguments![params, tokens, scale, out])
                }
            }
        }
    }
}
