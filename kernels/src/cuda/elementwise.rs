//! Element-wise kernels between the products of a layer: launches of `cuda/forward/elementwise.cu`.
//!
//! Axes: T tokens, R rows of logits, K in-features. Addresses are those of device memory that the caller keeps allocated.

use super::module::{Function, Module, arguments};
use super::{CudaContext, CudaError, CudaStream};
use crate::FloatType;
use crate::activation::Gate;
use std::sync::Arc;

/// Threads of a block.
const THREADS: u32 = 256;
/// Elements of one 16-byte access.
const WIDE: usize = 8;

/// The kernels of `elementwise.cu`.
#[derive(Debug)]
pub struct ElementwiseKernels {
    widen: Function,
    gated: Function,
    scale_inputs: Function,
    place_columns: Function,
    soft_cap: Function,
}

/// Columns of rows: where they start and how far it is from row to row, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// Address of the first row.
    pub address: u64,
    /// Elements from row to row.
    pub stride: usize,
    /// First column.
    pub at: usize,
}

/// Where [`ElementwiseKernels::place_columns`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placing {
    /// f32, over what is there.
    F32,
    /// bf16, over what is there.
    Bf16,
    /// f32, added to what is there.
    AddF32,
}

pub(super) fn float_code(dtype: FloatType) -> u32 {
    match dtype {
        FloatType::F32 => 0,
        FloatType::F16 => 1,
        FloatType::Bf16 => 2,
    }
}

/// Blocks for `rows` rows of `width` columns, `per_thread` of them a thread.
fn grid(rows: usize, width: usize, per_thread: usize) -> [u32; 3] {
    let columns = width.div_ceil(THREADS as usize * per_thread).clamp(1, 1 << 15);
    [rows as u32, columns as u32, 1]
}

/// As in `cuda/common/gates.cuh`.
pub(super) fn gate_code(gate: Gate) -> u32 {
    match gate {
        Gate::Silu => 0,
        Gate::GeluTanh => 1,
    }
}

impl ElementwiseKernels {
    /// Loads them.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there are none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let module = Module::load(context, "forward/elementwise")?;
        Ok(Self {
            widen: module.function(c"vt_widen", 0)?,
            gated: module.function(c"vt_gated", 0)?,
            scale_inputs: module.function(c"vt_scale_inputs", 0)?,
            place_columns: module.function(c"vt_place_columns", 0)?,
            soft_cap: module.function(c"vt_soft_cap", 0)?,
        })
    }

    /// `out` f32 `[len] = x + offset`, of floats of any type.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn widen(
        &self,
        stream: &CudaStream,
        x: u64,
        dtype: FloatType,
        offset: f32,
        out: u64,
        len: usize,
    ) -> Result<(), CudaError> {
        let (code, len_arg) = (float_code(dtype), len as u32);
        let mut arguments = arguments![x, code, offset, out, len_arg];
        let blocks = (len as u32).div_ceil(THREADS);
        // SAFETY: the types and order of the kernel; the caller's addresses are device memory of the shapes named above.
        unsafe { self.widen.launch_early(stream, [blocks, 1, 1], [THREADS, 1, 1], 0, &mut arguments) }
    }

    /// `out` bf16 `[rows, width] = gate(g) * u`, where row `r` of `x` bf16 `[rows, stride]` holds `g` at `gate_at` and `u` at
    /// `up_at`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    #[expect(clippy::too_many_arguments, reason = "a launch: every number is an argument of the kernel")]
    pub fn gated(
        &self,
        stream: &CudaStream,
        gate: Gate,
        x: u64,
        rows: usize,
        stride: usize,
        gate_at: usize,
        up_at: usize,
        width: usize,
        out: u64,
    ) -> Result<(), CudaError> {
        let kind = gate_code(gate);
        let aligned = [stride, gate_at, up_at, width].iter().all(|n| n.is_multiple_of(WIDE))
            && [x, out].iter().all(|a| a.is_multiple_of(16));
        let wide = u32::from(aligned);
        let [stride_arg, gate_arg, up_arg, width_arg] = [stride, gate_at, up_at, width].map(|n| n as u32);
        let mut arguments = arguments![x, stride_arg, gate_arg, up_arg, width_arg, kind, wide, out];
        let grid = grid(rows, width, if aligned { WIDE } else { 1 });
        // SAFETY: as above.
        unsafe { self.gated.launch_early(stream, grid, [THREADS, 1, 1], 0, &mut arguments) }
    }

    /// `out` bf16 `[T, K] = x` bf16 `[T, K] * scale` f32 `[K]`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn scale_inputs(
        &self,
        stream: &CudaStream,
        x: u64,
        scale: u64,
        tokens: usize,
        width: usize,
        out: u64,
    ) -> Result<(), CudaError> {
        let width_arg = width as u32;
        let mut arguments = arguments![x, scale, width_arg, out];
        // SAFETY: as above.
        unsafe { self.scale_inputs.launch_early(stream, grid(tokens, width, 1), [THREADS, 1, 1], 0, &mut arguments) }
    }

    /// `width` columns of f32 rows into another place, times one f32 at the address `scale`, plus `bias` f32 `[width]`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    #[expect(clippy::too_many_arguments, reason = "a launch: every number is an argument of the kernel")]
    pub fn place_columns(
        &self,
        stream: &CudaStream,
        from: Columns,
        to: Columns,
        placing: Placing,
        rows: usize,
        width: usize,
        scale: Option<u64>,
        bias: Option<u64>,
    ) -> Result<(), CudaError> {
        let [from_stride, from_at, width_arg, to_stride, to_at] =
            [from.stride, from.at, width, to.stride, to.at].map(|n| n as u32);
        let (x, out, scale, bias) = (from.address, to.address, scale.unwrap_or(0), bias.unwrap_or(0));
        let out_type = float_code(if placing == Placing::Bf16 { FloatType::Bf16 } else { FloatType::F32 });
        let accumulate = u32::from(placing == Placing::AddF32);
        let mut arguments =
            arguments![x, from_stride, from_at, width_arg, scale, bias, out, out_type, to_stride, to_at, accumulate];
        // SAFETY: as above.
        unsafe { self.place_columns.launch_early(stream, grid(rows, width, 1), [THREADS, 1, 1], 0, &mut arguments) }
    }

    /// `x = cap * tanh(x / cap)` in the first `width` columns of `x` f32 `[R, stride]`.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn soft_cap(
        &self,
        stream: &CudaStream,
        x: u64,
        rows: usize,
        stride: usize,
        width: usize,
        cap: f32,
    ) -> Result<(), CudaError> {
        let (stride_arg, width_arg) = (stride as u32, width as u32);
        let mut arguments = arguments![x, stride_arg, width_arg, cap];
        // SAFETY: as above.
        unsafe { self.soft_cap.launch_early(stream, grid(rows, width, 4), [THREADS, 1, 1], 0, &mut arguments) }
    }
}
