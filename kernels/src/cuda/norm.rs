//! Norms on the device: launches of `cuda/forward/norm.cu`.
//!
//! Axes: T tokens, R rows that are wanted, H heads, D elements of a head. Addresses are those of device memory that the
//! caller keeps allocated; norm weights are f32, the offset of the family included.

use super::error::require;
use super::kv_cache::{CudaKvCache, CudaKvType, KvScales};
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
    heads_bf16: Function,
    heads_e4m3: Function,
}

/// The heads that a step projects, and where they go: arguments of [`NormKernels::heads_to_cache`].
#[derive(Clone, Copy, Debug)]
pub struct HeadRows {
    /// bf16 `[T, stride]`; queries are changed in place.
    pub x: u64,
    /// Elements from row to row.
    pub stride: usize,
    /// First column and number of the query heads.
    pub queries: (usize, usize),
    /// First column of the key heads.
    pub keys_at: usize,
    /// First column of the value heads.
    pub values_at: usize,
    /// Norm weights `[D]` of queries and keys; no norm where `None`.
    pub norms: Option<(u64, u64)>,
    /// Added to the mean square.
    pub eps: f32,
    /// Angles of [`NormKernels::rotations`], `[T, half]` pairs of f32.
    pub angles: u64,
    /// Rotated pairs of a head.
    pub half: usize,
    /// u32 `[T]`: block * 16 + place in the block, or [`NO_SLOT`](super::kv_cache::NO_SLOT).
    pub slots: u64,
}

/// As in `norm.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heads {
    x: u64,
    q_norm: u64,
    k_norm: u64,
    angles: u64,
    stride: u32,
    q_at: u32,
    queries: u32,
    k_at: u32,
    keys: u32,
    dim: u32,
    half: u32,
    eps: f32,
}

/// As in `norm.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Store {
    cache: u64,
    slots: u64,
    v_at: u32,
    key_scale: f32,
    value_scale: f32,
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
            heads_bf16: module.function(c"vt_heads_to_cache_bf16", 0)?,
            heads_e4m3: module.function(c"vt_heads_to_cache_e4m3", 0)?,
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
        unsafe {
            self.rms_norm.launch_early(stream, [count as u32, 1, 1], [row_threads(width), 1, 1], 0, &mut arguments)
        }
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
            self.post_norm_add.launch_early(
                stream,
                [tokens as u32, 1, 1],
                [row_threads(width), 1, 1],
                0,
                &mut arguments,
            )
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
        unsafe { self.rotations.launch_early(stream, [blocks, 1, 1], [128, 1, 1], 0, &mut arguments) }
    }

    /// Norms the query and key heads of `tokens` rows, where there are norms, rotates them, and writes keys and values into
    /// `layer` of the cache. Equal to the bit to doing one after the other, with [`super::kv_cache::KvWriter`].
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for heads that do not fit a row; [`CudaError::Call`].
    pub fn heads_to_cache(
        &self,
        stream: &CudaStream,
        rows: &HeadRows,
        cache: &CudaKvCache,
        layer: usize,
        scales: KvScales,
        tokens: usize,
    ) -> Result<(), CudaError> {
        let (dim, keys) = (cache.shape().head_dim, cache.shape().kv_heads);
        let (q_at, queries) = rows.queries;
        let ends = [(q_at, queries), (rows.keys_at, keys), (rows.values_at, keys)].map(|(at, count)| at + count * dim);
        let fits = ends.iter().all(|end| *end <= rows.stride) && 2 * rows.half <= dim && dim <= MAX_HEAD_DIM;
        require(fits, "heads", || format!("heads of {dim} elements in {rows:?}"))?;
        let (q_norm, k_norm) = rows.norms.unwrap_or((0, 0));
        let numbers = [rows.stride, q_at, queries, rows.keys_at, keys, dim, rows.half, rows.values_at];
        let [stride, q_at, queries, k_at, keys, dim, half, v_at] = numbers.map(|n| n as u32);
        let (x, angles, eps) = (rows.x, rows.angles, rows.eps);
        let heads = Heads { x, q_norm, k_norm, angles, stride, q_at, queries, k_at, keys, dim, half, eps };
        let (slots, key_scale, value_scale) = (rows.slots, scales.key, scales.value);
        let store = Store { cache: cache.layer(layer)?, slots, v_at, key_scale, value_scale };
        let function = match cache.dtype() {
            CudaKvType::Bf16 => &self.heads_bf16,
            CudaKvType::E4m3 => &self.heads_e4m3,
        };
        let grid = [tokens as u32, (queries + 2 * keys).div_ceil(HEAD_WARPS), 1];
        // SAFETY: both are the kernels' parameters; heads lie inside rows and registers, which was checked, slots in the cache,
        // and the caller keeps what the addresses name.
        unsafe { function.launch_early(stream, grid, [32 * HEAD_WARPS, 1, 1], 0, &mut arguments![heads, store]) }
    }
}
