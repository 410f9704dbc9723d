//! Products with row-major bf16 matrices of many rows on Hopper: launches of `cuda/gemm_hopper/rows.cu`.

use super::encode;
use crate::cuda::gemm::params::{Request, Rows};
use crate::cuda::module::{Function, Module, arguments};
use crate::cuda::{CudaContext, CudaError, CudaStream};
use cudarc::driver::sys::{CUtensorMapDataType as DataType, CUtensorMapSwizzle as Swizzle};
use std::ffi::CString;
use std::sync::Arc;

/// Columns of a block, its threads, and elements along K of a stage of its ring.
const COLUMNS: u32 = 128;
const THREADS: u32 = 288;
const STEP: u32 = 64;
/// Tokens of a block, and the stages of its ring.
const SHAPES: [(u32, u32); 4] = [(16, 6), (32, 5), (64, 4), (128, 3)];
/// What aligning the ring may cost.
const ALIGN: u32 = 1024;

/// The kernels.
#[derive(Debug)]
pub(super) struct RowKernels {
    /// By shape.
    functions: Vec<Function>,
    /// Fewest columns that keep the device busy.
    min_columns: u32,
}

impl RowKernels {
    /// Loads the kernels.
    ///
    /// # Errors
    /// [`CudaError`] where the build lacks them.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let module = Module::load(context, "gemm_hopper/rows")?;
        let function = |&(tokens, stages): &(u32, u32)| {
            let name = CString::new(format!("vt_hopper_rows_{tokens}")).unwrap_or_default();
            module.function(&name, shared_bytes(tokens, stages))
        };
        let functions = SHAPES.iter().map(function).collect::<Result<_, _>>()?;
        Ok(Self { functions, min_columns: COLUMNS * context.attributes().multiprocessors })
    }

    /// Starts the product where these kernels are the ones for it, and says whether it did.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub(super) fn launch(&self, stream: &CudaStream, rows: &Rows, request: &Request) -> Result<bool, CudaError> {
        let aligned = request.x.is_multiple_of(16)
            && request.x_stride.is_multiple_of(8)
            && rows.data.is_multiple_of(16)
            && rows.k.is_multiple_of(8);
        if !aligned || request.m == 0 || rows.n < self.min_columns {
            return Ok(false);
        }
        let shape = SHAPES.iter().position(|(tokens, _)| *tokens >= request.m).unwrap_or(SHAPES.len() - 1);
        let (tokens, stages) = SHAPES[shape];
        let map = |address: u64, count: u32, stride: u64, boxed: u32| {
            let dims = [u64::from(rows.k), u64::from(count)];
            let swizzle = Swizzle::CU_TENSOR_MAP_SWIZZLE_128B;
            let dtype = DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
            encode(dtype, address, &dims, &[2 * stride], &[STEP, boxed], swizzle)
        };
        let w = TensorMap(map(rows.data, rows.n, u64::from(rows.k), COLUMNS)?);
        let x = TensorMap(map(request.x, request.m, u64::from(request.x_stride), tokens)?);
        let grid = [rows.n.div_ceil(COLUMNS), request.m.div_ceil(tokens), 1];
        let (k, shared) = (rows.k, shared_bytes(tokens, stages));
        let arguments = &mut arguments![w, x, *request, k];
        // SAFETY: arguments are the kernel's; the request is checked against the matrix, and the caller keeps both allocated.
        // Before it waits for earlier work the kernel only reads the matrix.
        unsafe { self.functions[shape].launch_early(stream, grid, [THREADS, 1, 1], shared, arguments)? };
        Ok(true)
    }
}

/// As the kernels take it.
#[repr(C, align(64))]
struct TensorMap([u64; 16]);

fn shared_bytes(tokens: u32, stages: u32) -> u32 {
    stages * (COLUMNS + tokens) * STEP * 2 + ALIGN
}
