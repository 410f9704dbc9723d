//! The kernels of a device, and the choice among them.

use super::experts::ExpertKernels;
use super::hopper::Hopper;
use super::input::{HalfNorms, MAX_ROWS};
use super::matrix::Form;
use super::params::{Raw, Request, Rows, Tiled, float_type};
use super::small::{Chosen, SmallKernels};
use super::{DeviceMatrix, ExpertFusion, ExpertGroups, GemmInput, GemmRequest, NormAhead, checks};
use crate::cuda::module::{Function, Module, arguments};
use crate::cuda::{CudaContext, CudaError, CudaStream, DeviceMemory};
use crate::weight::FloatType;
use std::sync::Arc;
use vt_bundle::codec::ggml::raw::{self, RawFormat};

/// Columns and rows that a block of the generic kernel computes at a time, and its threads.
const GENERIC_N: u32 = 64;
const GENERIC_M: u32 = 32;
const GENERIC_THREADS: u32 = 256;
/// Alignment of the parts of a workspace.
const WORKSPACE_ALIGN: u64 = 256;
/// Columns of a block of the kernels for rows of bf16, its threads, and the rows that the two take at once.
const ROWS_N: u32 = 16;
const ROWS_THREADS: u32 = 256;
const ROWS_M: [u32; 2] = [8, 64];
/// Extent of a grid in y, at most.
const MAX_GRID_Y: u32 = 65_535;

/// The GEMM kernels, loaded for one device.
#[derive(Debug)]
pub struct Gemm {
    small: SmallKernels,
    experts: ExpertKernels,
    rows: [Function; 2],
    generic: [Function; 3],
    hopper: Option<Hopper>,
    /// Codebooks of the raw formats, one after the other.
    grids: DeviceMemory,
}

impl Gemm {
    /// Loads the kernels.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there are none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let generic = Module::load(context, "gemm/generic")?;
        let generic = [
            generic.function(c"vt_gemm_generic_tiled", 0)?,
            generic.function(c"vt_gemm_generic_rows", 0)?,
            generic.function(c"vt_gemm_generic_raw", 0)?,
        ];
        let rows = Module::load(context, "gemm/rows")?;
        let rows = [rows.function(c"vt_gemm_rows_8", 0)?, rows.function(c"vt_gemm_rows_64", 0)?];
        let grids: Vec<u8> =
            raw::FORMATS.iter().flat_map(|format| format.grid()).flat_map(|entry| entry.to_le_bytes()).collect();
        let memory = DeviceMemory::new(context, grids.len() as u64, "codebooks")?;
        memory.write(0, &grids)?;
        let (small, experts) = (SmallKernels::new(context)?, ExpertKernels::new(context)?);
        Ok(Self { small, experts, rows, generic, hopper: Hopper::new(context)?, grids: memory })
    }

    /// Bytes of workspace that products of up to `max_m` rows with this matrix need. The workspace must be zero before its
    /// first use, and may serve any number of launches that follow each other in one stream. Also loads the kernels that the
    /// products will use, so that they may be recorded.
    pub fn workspace_bytes(&self, matrix: &DeviceMatrix, max_m: u32) -> u64 {
        let small = match &matrix.form {
            Form::Tiled { params, reading: Some(reading), .. } => {
                let small = self.small.workspace_bytes(reading, params, max_m);
                // A kernel that cannot be loaded says so when it is launched.
                small.max(self.experts.workspace_bytes(reading).unwrap_or(0))
            }
            _ => 0,
        };
        self.hopper_bytes() + small
    }

    /// Bytes at the start of a workspace, of one size for all products, that the kernels of Hopper use.
    fn hopper_bytes(&self) -> u64 {
        self.hopper.as_ref().map_or(0, Hopper::workspace_bytes).next_multiple_of(WORKSPACE_ALIGN)
    }

    /// Starts one product. `workspace`: address of [`Gemm::workspace_bytes`] bytes.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] where the request does not fit the matrix, or [`CudaError::Call`].
    pub fn launch(
        &self,
        stream: &CudaStream,
        matrix: &DeviceMatrix,
        request: &GemmRequest,
        workspace: u64,
    ) -> Result<(), CudaError> {
        let checked = checks::check(matrix, request, None)?;
        if self.many(stream, matrix, request, &checked, None, workspace)? {
            return Ok(());
        }
        if !self.small(stream, matrix, request, &checked, workspace + self.hopper_bytes())? {
            self.generic(stream, matrix, &checked, 1)?;
        }
        Ok(())
    }

    /// Whether [`Gemm::launch_made`] makes norms and gates for a matrix and `m` rows. It does not where kernels that take rows
    /// as they are read the matrix faster.
    pub fn makes_inputs(&self, matrix: &DeviceMatrix, m: u32) -> bool {
        matches!(self.maker(matrix, m), Some(Maker::Small(..)))
    }

    /// Whether [`Gemm::launch_made`] takes half of a norm with a matrix and `m` rows.
    pub fn takes_half_norm(&self, matrix: &DeviceMatrix, m: u32) -> bool {
        self.maker(matrix, m).is_some_and(|maker| maker.half_norms().takes)
    }

    /// Whether [`Gemm::launch_made`] leaves half of a norm with a matrix and `m` rows.
    pub fn leaves_half_norm(&self, matrix: &DeviceMatrix, m: u32) -> bool {
        self.maker(matrix, m).is_some_and(|maker| maker.half_norms().leaves)
    }

    /// What does the products of [`Gemm::launch_made`] with a matrix and `m` rows, if anything does.
    fn maker<'a>(&'a self, matrix: &'a DeviceMatrix, m: u32) -> Option<Maker<'a>> {
        if let Some(hopper) = &self.hopper
            && let Some(half_norms) = hopper.half_norms_of_few(matrix, m)
        {
            return Some(Maker::Few(hopper, half_norms));
        }
        let Form::Tiled { params, reading: Some(reading), .. } = &matrix.form else { return None };
        let chosen = self.small.choose(reading, params, m, false)?;
        (m <= MAX_ROWS && chosen.makes_inputs()).then_some(Maker::Small(chosen, params))
    }

    /// As [`Gemm::launch`], of activations that the product makes from what the rows hold; leaves half of the norm of its result
    /// where `ahead` asks for it.
    ///
    /// # Errors
    /// As for [`Gemm::launch`]; [`CudaError::Unsupported`] where [`Gemm::makes_inputs`], [`Gemm::takes_half_norm`] or
    /// [`Gemm::leaves_half_norm`] says no to what is asked for, or results are to be deterministic.
    pub fn launch_made(
        &self,
        stream: &CudaStream,
        matrix: &DeviceMatrix,
        request: &GemmRequest,
        input: GemmInput,
        ahead: Option<&NormAhead>,
        workspace: u64,
    ) -> Result<(), CudaError> {
        let mut checked = input.complete(matrix, request, &checks::check(matrix, request, None)?)?;
        if let Some(ahead) = ahead {
            checked = ahead.complete(matrix, request, &checked)?;
        }
        let able = |maker: &Maker<'_>| {
            let takes = match input {
                GemmInput::Rows => true,
                GemmInput::Weighted { .. } => maker.half_norms().takes,
                GemmInput::Normed { .. } | GemmInput::Gated { .. } => matches!(maker, Maker::Small(..)),
            };
            takes && !request.deterministic && (ahead.is_none() || maker.half_norms().leaves)
        };
        match self.maker(matrix, request.m).filter(able) {
            Some(Maker::Few(hopper, _)) if hopper.launch(stream, matrix, &checked, None, workspace)? => Ok(()),
            Some(Maker::Small(chosen, params)) => {
                self.small.launch(stream, &chosen, params, &checked, workspace + self.hopper_bytes())
            }
            _ => {
                let what = format!("activations made from {} rows, as {input:?}, and {ahead:?}", request.m);
                Err(CudaError::Unsupported { op: "gemm", what })
            }
        }
    }

    /// Starts products of each expert's matrix with the rows that were routed to it. `matrix` is expert 0, `request.m` all
    /// rows together; rows beyond the last offset are left alone.
    ///
    /// # Errors
    /// As for [`Gemm::launch`].
    pub fn launch_grouped(
        &self,
        stream: &CudaStream,
        matrix: &DeviceMatrix,
        request: &GemmRequest,
        groups: &ExpertGroups,
        workspace: u64,
    ) -> Result<(), CudaError> {
        let fusion = ExpertFusion::default();
        let checked = checks::check(matrix, request, Some((groups, &fusion)))?;
        if self.many(stream, matrix, request, &checked, Some(groups), workspace)?
            || self.few(stream, matrix, request, &checked, groups, &fusion, workspace)?
        {
            return Ok(());
        }
        match &matrix.form {
            Form::Rows(rows) if aligned(request) && self.rows(stream, rows, &checked, Some(groups.count))? => Ok(()),
            _ => self.generic(stream, matrix, &checked, groups.count),
        }
    }

    /// The same with more done on the way, where there are kernels for that; says whether there are, and has done nothing
    /// otherwise.
    ///
    /// # Errors
    /// As for [`Gemm::launch`].
    pub fn launch_fused(
        &self,
        stream: &CudaStream,
        matrix: &DeviceMatrix,
        request: &GemmRequest,
        groups: &ExpertGroups,
        fusion: &ExpertFusion,
        workspace: u64,
    ) -> Result<bool, CudaError> {
        let checked = checks::check(matrix, request, Some((groups, fusion)))?;
        let many = self.hopper.as_ref().filter(|_| !request.deterministic);
        if many.is_some_and(|hopper| hopper.takes_experts(matrix, &checked, groups)) {
            return Ok(false);
        }
        self.few(stream, matrix, request, &checked, groups, fusion, workspace)
    }

    /// Starts a kernel for experts of few rows; `false` where there is none for the matrix or for the way the activations lie.
    #[expect(clippy::too_many_arguments, reason = "a launch and what it was asked for")]
    fn few(
        &self,
        stream: &CudaStream,
        matrix: &DeviceMatrix,
        request: &GemmRequest,
        checked: &Request,
        groups: &ExpertGroups,
        fusion: &ExpertFusion,
        workspace: u64,
    ) -> Result<bool, CudaError> {
        let Form::Tiled { params, reading: Some(reading), .. } = &matrix.form else { return Ok(false) };
        if !aligned(request) {
            return Ok(false);
        }
        let chosen = self.experts.choose(reading, params, request.m, groups, fusion, request.deterministic);
        let Some(chosen) = chosen else { return Ok(false) };
        self.experts.launch(stream, &chosen, params, checked, workspace + self.hopper_bytes())?;
        Ok(true)
    }

    /// Starts a kernel for many rows; `false` where there is none for the product.
    fn many(
        &self,
        stream: &CudaStream,
        matrix: &DeviceMatrix,
        request: &GemmRequest,
        checked: &Request,
        groups: Option<&ExpertGroups>,
        workspace: u64,
    ) -> Result<bool, CudaError> {
        match &self.hopper {
            // Its sums depend on the number of rows.
            Some(hopper) if !request.deterministic => hopper.launch(stream, matrix, checked, groups, workspace),
            _ => Ok(false),
        }
    }

    /// Starts a kernel for few rows; `false` where there is none for the matrix or for the way the activations lie.
    fn small(
        &self,
        stream: &CudaStream,
        matrix: &DeviceMatrix,
        request: &GemmRequest,
        checked: &Request,
        workspace: u64,
    ) -> Result<bool, CudaError> {
        if !aligned(request) {
            return Ok(false);
        }
        if let Form::Rows(rows) = &matrix.form {
            if let Some(hopper) = &self.hopper
                && rows.dtype == float_type(FloatType::Bf16)
                && !request.deterministic
                && hopper.launch_rows(stream, rows, checked)?
            {
                return Ok(true);
            }
            return self.rows(stream, rows, checked, None);
        }
        let Form::Tiled { params, reading: Some(reading), .. } = &matrix.form else { return Ok(false) };
        let Some(chosen) = self.small.choose(reading, params, request.m, request.deterministic) else {
            return Ok(false);
        };
        self.small.launch(stream, &chosen, params, checked, workspace)?;
        Ok(true)
    }

    /// Address of the codebook of a raw format.
    pub(super) fn codebook(&self, format: &RawFormat) -> u64 {
        let before = raw::FORMATS.iter().take_while(|other| other.name != format.name);
        let entries: usize = before.map(|other| other.grid().len()).sum();
        self.grids.address() + 2 * entries as u64
    }

    /// Starts a kernel for rows of bf16 in whole pieces of 16 bytes; `false` for others. A row's result does not depend on
    /// which of the two it is.
    fn rows(
        &self,
        stream: &CudaStream,
        rows: &Rows,
        request: &Request,
        experts: Option<u32>,
    ) -> Result<bool, CudaError> {
        if rows.dtype != float_type(FloatType::Bf16) || !rows.k.is_multiple_of(8) {
            return Ok(false);
        }
        let few = request.m <= ROWS_M[0];
        let (function, at_once) = if few { (&self.rows[0], ROWS_M[0]) } else { (&self.rows[1], ROWS_M[1]) };
        let steps = request.m.div_ceil(at_once);
        let grid = match experts {
            Some(count) => [rows.n.div_ceil(ROWS_N), steps.min(4), count],
            None => [rows.n.div_ceil(ROWS_N), steps.min(MAX_GRID_Y), 1],
        };
        // SAFETY: arguments are the kernel's; the request is checked against the matrix, and the caller keeps both allocated.
        unsafe { function.launch_early(stream, grid, [ROWS_THREADS, 1, 1], 0, &mut arguments![*rows, *request]) }?;
        Ok(true)
    }

    fn generic(
        &self,
        stream: &CudaStream,
        matrix: &DeviceMatrix,
        request: &Request,
        experts: u32,
    ) -> Result<(), CudaError> {
        let grid = [matrix.padded_n().div_ceil(GENERIC_N), request.m.div_ceil(GENERIC_M).min(MAX_GRID_Y), experts];
        let block = [GENERIC_THREADS, 1, 1];
        let [tiled, rows, raw] = &self.generic;
        // SAFETY: arguments are the kernels'; the request is checked against the matrix, and the caller keeps both allocated.
        unsafe {
            match &matrix.form {
                Form::Tiled { params, .. } => tiled.launch(stream, grid, block, 0, &mut arguments![**params, *request]),
                Form::Rows(params) => rows.launch(stream, grid, block, 0, &mut arguments![*params, *request]),
                Form::Raw { format, params } => {
                    let params = Raw { grid: self.codebook(format), ..*params };
                    raw.launch(stream, grid, block, 0, &mut arguments![params, *request])
                }
            }
        }
    }
}

/// Kernels that take activations which are not ready, or leave half of a norm.
enum Maker<'a> {
    /// For few rows on Hopper; they take rows as they are, or half a norm.
    Few(&'a Hopper, HalfNorms),
    /// For every device; they make norms and gates too.
    Small(Chosen<'a>, &'a Tiled),
}

impl Maker<'_> {
    fn half_norms(&self) -> HalfNorms {
        match self {
            Maker::Few(_, half_norms) => *half_norms,
            Maker::Small(..) => HalfNorms { takes: true, leaves: true },
        }
    }
}

/// Whether rows of activations may be read 16 bytes at a time.
fn aligned(request: &GemmRequest) -> bool {
    request.x.is_multiple_of(16) && request.x_stride.is_multiple_of(8)
}
