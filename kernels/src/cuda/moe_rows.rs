//! What stands beside the products of routed experts: vectors that multiply their inputs, and factors and biases of their
//! results; launches of `cuda/moe/rows.cu`.
//!
//! Rows are those of [`super::moe`]: pairs of a token and an expert, sorted by expert.

use super::elementwise::{Columns, float_code};
use super::error::require;
use super::module::{Function, Module, arguments};
use super::moe::RoutingTables;
use super::{CudaContext, CudaError, CudaStream};
use crate::FloatType;
use std::ops::Range;
use std::sync::Arc;

/// Threads of a block.
const THREADS: u32 = 256;

/// Floats of one expert in device memory, as kernels find them: an entry of a table `[E]` on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertVector {
    /// Address of the first.
    pub address: u64,
    /// Their type.
    pub dtype: FloatType,
}

impl ExpertVector {
    /// u32 words of an entry.
    pub const WORDS: usize = 4;

    /// An expert's entry in a table; `None`: it has no such vector.
    pub fn entry(vector: Option<Self>) -> [u32; Self::WORDS] {
        let (address, code) = vector.map_or((0, 0), |vector| (vector.address, float_code(vector.dtype)));
        [address as u32, (address >> 32) as u32, code, 0]
    }
}

/// The rows that a launch is for: those of some experts among all that were routed.
#[derive(Clone, Debug)]
pub struct RoutedRows<'a> {
    /// Rows of all experts together.
    pub rows: usize,
    /// Where they belong.
    pub tables: &'a RoutingTables,
    /// The experts; rows of others are left alone.
    pub experts: Range<u32>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Routed {
    pairs: u64,
    experts: u64,
    first: u32,
    end: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Inputs {
    routed: Routed,
    x: u64,
    vectors: u64,
    out: u64,
    stride: u32,
    out_stride: u32,
    width: u32,
    top_k: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Results {
    routed: Routed,
    x: u64,
    factors: u64,
    biases: u64,
    out: u64,
    stride: u32,
    at: u32,
    width: u32,
    out_type: u32,
    out_stride: u32,
    out_at: u32,
}

/// The kernels of `moe/rows.cu`.
#[derive(Debug)]
pub struct ExpertRowKernels {
    inputs: Function,
    results: Function,
}

impl ExpertRowKernels {
    /// Loads them.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there are none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let module = Module::load(context, "moe/rows")?;
        Ok(Self { inputs: module.function(c"vt_moe_inputs", 0)?, results: module.function(c"vt_moe_results", 0)? })
    }

    /// `out` bf16 = `x` bf16 times the vector of the row's expert, `width` columns of each. `vectors`: address of a table of
    /// [`ExpertVector::entry`]s, without which rows are copied. With `top_k`, `x` has a row for each token; otherwise one for
    /// each row of `out`, which may be where `x` is.
    ///
    /// # Errors
    /// [`CudaError`].
    #[expect(clippy::too_many_arguments, reason = "a launch: each is an argument of the kernel")]
    pub fn inputs(
        &self,
        stream: &CudaStream,
        rows: &RoutedRows<'_>,
        x: Columns,
        top_k: Option<usize>,
        vectors: Option<u64>,
        width: usize,
        out: Columns,
    ) -> Result<(), CudaError> {
        let op = "inputs of experts";
        let parameters = Inputs {
            routed: routed(op, rows)?,
            x: x.address + 2 * x.at as u64,
            vectors: vectors.unwrap_or(0),
            out: out.address + 2 * out.at as u64,
            stride: narrow(op, x.stride)?,
            out_stride: narrow(op, out.stride)?,
            width: narrow(op, width)?,
            top_k: narrow(op, top_k.unwrap_or(0))?,
        };
        let grid = grid(rows, width);
        // SAFETY: `Inputs` is the kernel's parameter; the addresses name what is said above, which the caller keeps.
        unsafe { self.inputs.launch_early(stream, grid, [THREADS, 1, 1], 0, &mut arguments![parameters]) }
    }

    /// `width` columns of `out`, f32 or bf16 = those of `x` f32 times the factor of the row's expert plus its bias. `factors`
    /// and `biases`: addresses of tables of [`ExpertVector::entry`]s, of one number and of `width` numbers.
    ///
    /// # Errors
    /// [`CudaError`].
    #[expect(clippy::too_many_arguments, reason = "a launch: each is an argument of the kernel")]
    pub fn results(
        &self,
        stream: &CudaStream,
        rows: &RoutedRows<'_>,
        x: Columns,
        factors: Option<u64>,
        biases: Option<u64>,
        width: usize,
        out: Columns,
        dtype: FloatType,
    ) -> Result<(), CudaError> {
        let op = "results of experts";
        require(dtype != FloatType::F16, op, || "rows of f16".to_owned())?;
        let parameters = Results {
            routed: routed(op, rows)?,
            x: x.address,
            factors: factors.unwrap_or(0),
            biases: biases.unwrap_or(0),
            out: out.address,
            stride: narrow(op, x.stride)?,
            at: narrow(op, x.at)?,
            width: narrow(op, width)?,
            out_type: float_code(dtype),
            out_stride: narrow(op, out.stride)?,
            out_at: narrow(op, out.at)?,
        };
        let grid = grid(rows, width);
        // SAFETY: `Results` is the kernel's parameter; as above.
        unsafe { self.results.launch_early(stream, grid, [THREADS, 1, 1], 0, &mut arguments![parameters]) }
    }
}

fn routed(op: &'static str, rows: &RoutedRows<'_>) -> Result<Routed, CudaError> {
    require(i32::try_from(rows.rows).is_ok(), op, || format!("{} rows", rows.rows))?;
    let Range { start: first, end } = rows.experts;
    Ok(Routed { pairs: rows.tables.pairs, experts: rows.tables.experts, first, end })
}

fn narrow(op: &'static str, number: usize) -> Result<u32, CudaError> {
    u32::try_from(number).map_err(|_| CudaError::Unsupported { op, what: format!("{number} columns") })
}

fn grid(rows: &RoutedRows<'_>, width: usize) -> [u32; 3] {
    [rows.rows as u32, width.div_ceil(4 * THREADS as usize).clamp(1, 1 << 15) as u32, 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_source() {
        assert_eq!((size_of::<Routed>(), size_of::<Inputs>(), size_of::<Results>()), (24, 64, 80));
        assert_eq!(ExpertVector::entry(None), [0; 4]);
        let vector = ExpertVector { address: 0x12_3456_789A, dtype: FloatType::Bf16 };
        assert_eq!(ExpertVector::entry(Some(vector)), [0x3456_789A, 0x12, 2, 0]);
    }
}
