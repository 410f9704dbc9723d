//! Norms on the device: launches of `cuda/forward/norm.cu`.
//!
//! Axes: T tokens, R rows that are wanted, H heads, D elements of a head. Addresses are those of device memory that the
//! caller keeps allocated; norm weights are f32, the offset of the family included.

use super::module::{Function, Module, arguments};
use super::{CudaContext, CudaError, CudaStream};
use std::sync::Arc;

/// Elements of a head, at most: what the registers of a warp hold in `norm.cu`.
pub const MAX_HEAD_DIM: usize = 512;
/// Warps of a block that norms and rotates heads.
const HEAD_WARPS: u32 = 4;

/// The kernels of `norm.cu`.
#[derive(Debug)]
pub struct NormKernels {
    rms_norm: Function,
    post_norm_add: Function,
    rotations: Function,
    heads: Function,
}

/// Arguments of [`NormKernels::heads`].
#[derive(Clone, Copy, Debug)]
pub struct HeadRows {
    /// bf16 `[T, stride]`, changed in place.
    pub x: u64,
    /// Elements from row to row.
    pub stride: usize,
    /// First column and number of the query heads.
    pub queries: (usize, usize),
    /// First column and number of the key heads.
    pub keys: (usize, usize),
    /// Elements of a head, at most [`MAX_HEAD_DIM`].
    pub dim: usize,
    /// Norm weights `[D]` of queries and keys; no norm where `None`.
    pub norms: Option<(u64, u64)>,
    /// Added to the mean square.
    pub eps: f32,
    /// Angles of [`NormKernels::rotations`], `[T, half]` pairs of f32.
    pub angles: u64,
    /// Rotated pairs of a head.
    pub half: usize,
}

/// Threads of a block that reduces one row: whole warps, four elements a thread, as many as a block may have.
fn row_threads(width: usize) -> u32 {
    (width.div_ceil(4) as u32).next_multiple_of(32).clamp(32, 1024)
}

impl NormKernels {
    /// Loads them.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there are none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let module = Module::load(context, "forward/norm")?;
        Ok(Self {
            rms_norm: module.function(c"vt_rms_norm", 0)?,
            post_norm_add: module.function(c"vt_post_norm_add", 0)?,
            rotations: module.function(c"vt_rotations", 0)?,
            heads: module.function(c"vt_norm_rotate_heads", 0)?,
        })
    }

    /// `out` bf16 `[R, width] = x / sqrt(mean(x^2) + eps) * weight`. Row `r` of the result is of row `rows[r]` (u32) of `x`
    /// f32 `[T, width]`, or of row `r` where `rows` is `None`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    #[expect(clippy::too_many_arguments, reason = "a launch: every number is an argument of the kernel")]
    pub fn rms_norm(
        &self,
        stream: &CudaStream,
        x: u64,
        rows: Option<u64>,
        count: usize,
        width: usize,
        weight: u64,
        eps: f32,
        out: u64,
    ) -> Result<(), CudaError> {
        let (rows, width_arg) = (rows.unwrap_or(0), width as u32);
        let mut arguments = arguments![x, rows, weight, out, width_arg, eps];
        // SAFETY: the types and order of the kernel; the caller's addresses are device memory of the shapes named above.
        unsafe { self.rms_norm.launch(stream, [count as u32, 1, 1], [row_threads(width), 1, 1], 0, &mut arguments) }
    }

    /// `residual` f32 `[T, width] += rms_norm(block) * post`; then, where `next` names weights and a bf16 result,
    /// `result = rms_norm(residual) * weights`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    #[expect(clippy::too_many_arguments, reason = "a launch: every number is an argument of the kernel")]
    pub fn post_norm_add(
        &self,
        stream: &CudaStream,
        block: u64,
        post: u64,
        residual: u64,
        next: Option<(u64, u64)>,
        tokens: usize,
        width: usize,
        eps: f32,
    ) -> Result<(), CudaError> {
        let ((next_weight, out), width_arg) = (next.unwrap_or((0, 0)), width as u32);
        let mut arguments = arguments![block, post, residual, next_weight, out, width_arg, eps];
        // SAFETY: as above.
        unsafe {
            self.post_norm_add.launch(stream, [tokens as u32, 1, 1], [row_threads(width), 1, 1], 0, &mut arguments)
        }
    }

    /// Cosines and sines of `positions` (u32 `[T]`): pairs of f32 `[T, half]`, from `frequencies` f32 `[half]` and the
    /// amplitude `factor` of [`crate::rope::inverse_frequencies`].
    ///
    /// # Errors
    /// [`CudaError::Call`].
    #[expect(clippy::too_many_arguments, reason = "a launch: every number is an argument of the kernel")]
    pub fn rotations(
        &self,
        stream: &CudaStream,
        positions: u64,
        frequencies: u64,
        factor: f32,
        half: usize,
        tokens: usize,
        angles: u64,
    ) -> Result<(), CudaError> {
        let (half_arg, tokens_arg) = (half as u32, tokens as u32);
        let blocks = (tokens * half).div_ceil(128) as u32;
        let mut arguments = arguments![positions, frequencies, factor, half_arg, tokens_arg, angles];
        // SAFETY: as above.
        unsafe { self.rotations.launch(stream, [blocks, 1, 1], [128, 1, 1], 0, &mut arguments) }
    }

    /// Norms of query and key heads, where there are any, and their rotation, in place.
    ///
    /// # Errors
    /// [`CudaError::OutOfRange`] for heads that do not fit a row, or are wider than [`MAX_HEAD_DIM`]; [`CudaError::Call`].
    pub fn heads(&self, stream: &CudaStream, rows: &HeadRows, tokens: usize) -> Result<(), CudaError> {
        let [q_end, k_end] = [rows.queries, rows.keys].map(|(at, count)| at + count * rows.dim);
        let fits = q_end.max(k_end) <= rows.stride && 2 * rows.half <= rows.dim && rows.dim <= MAX_HEAD_DIM;
        if !fits {
            let (start, bytes) = (rows.dim as u64, rows.stride as u64);
            return Err(CudaError::OutOfRange { what: "heads of a row", start, end: q_end.max(k_end) as u64, bytes });
        }
        let HeadRows { x, eps, angles, .. } = *rows;
        let numbers = [rows.stride, rows.queries.0, rows.queries.1, rows.keys.0, rows.keys.1, rows.dim, rows.half];
        let [stride, q_at, queries, k_at, keys, dim, half] = numbers.map(|n| n as u32);
        let (q_norm, k_norm) = rows.norms.unwrap_or((0, 0));
        let mut arguments = arguments![x, stride, q_at, queries, k_at, keys, dim, q_norm, k_norm, eps, angles, half];
        let grid = [tokens as u32, (queries + keys).div_ceil(HEAD_WARPS), 1];
        // SAFETY: as above; heads lie inside rows and registers, which was checked.
        unsafe { self.heads.launch(stream, grid, [32 * HEAD_WARPS, 1, 1], 0, &mut arguments) }
    }
}
