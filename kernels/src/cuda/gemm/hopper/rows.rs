//! Products with row-major bf16 matrices of many rows on Hopper: launches of `cuda/gemm_hopper/rows.cu`.

use super::encode;
use crate::cuda::gemm::params::{Request, Rows};
use crate::cuda::module::{Function, Module, arguments};
use crate::cuda::{CudaContext, CudaError, CudaStream};
use cudarc::driver::sys::{CUtensorMapDataType as DataType, CUtensorMapSwizzle as Swizzle};
use std::ffi::CString;
use std::sync::Arc;

/// Elements along K of a stage of a block's ring.
const STEP: u32 = 64;
/// Tokens and columns of a block, and the stages of its ring.
const SHAPES: [Shape; 4] = [
    Shape { tokens: 16, columns: 128, stages: 6 },
    Shape { tokens: 32, columns: 128, stages: 5 },
    Shape { tokens: 64, columns: 128, stages: 4 },
    Shape { tokens: 128, columns: 192, stages: 5 },
];
/// Fewest columns of a matrix for each multiprocessor, which keep it busy.
const MIN_COLUMNS: u32 = 128;
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
        let function = |shape: &Shape| {
            let name = CString::new(format!("vt_hopper_rows_{}", shape.tokens)).unwrap_or_default();
            module.function(&name, shape.shared_bytes())
        };
        let functions = SHAPES.iter().map(function).collect::<Result<_, _>>()?;
        Ok(Self { functions, min_columns: MIN_COLUMNS * context.attributes().multiprocessors })
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
        let index = SHAPES.iter().position(|shape| shape.tokens >= request.m).unwrap_or(SHAPES.len() - 1);
        let shape = &SHAPES[index];
        let map = |address: u64, count: u32, stride: u64, boxed: u32| {
            let dims = [u64::from(rows.k), u64::from(count)];
            let swizzle = Swizzle::CU_TENSOR_MAP_SWIZZLE_128B;
            let dtype = DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
            encode(dtype, address, &dims, &[2 * stride], &[STEP, boxed], swizzle)
        };
        let w = TensorMap(map(rows.data, rows.n, u64::from(rows.k), shape.columns)?);
        let x = TensorMap(map(request.x, request.m, u64::from(request.x_stride), shape.tokens)?);
        let grid = [rows.n.div_ceil(shape.columns), request.m.div_ceil(shape.tokens), 1];
        let (k, block, shared) = (rows.k, [shape.threads(), 1, 1], shape.shared_bytes());
        let arguments = &mut arguments![w, x, *request, k];
        // SAFETY: arguments are the kernel's; the request is checked against the matrix, and the caller keeps both allocated.
        // Before it waits for earlier work the kernel only reads the matrix.
        unsafe { self.functions[index].launch_early(stream, grid, block, shared, arguments)? };
        Ok(true)
    }
}

/// As the kernels take it.
#[repr(C, align(64))]
struct TensorMap([u64; 16]);

/// A kernel, as `Ring` in the source.
#[derive(Debug)]
struct Shape {
    tokens: u32,
    columns: u32,
    stages: u32,
}

impl Shape {
    fn shared_bytes(&self) -> u32 {
        self.stages * (self.columns + self.tokens) * STEP * 2 + ALIGN
    }

    /// A warp for each 16 columns, and one that copies.
    fn threads(&self) -> u32 {
        2 * self.columns + 32
    }
}
