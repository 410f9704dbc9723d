//! The kernels of a device, and the choice among them.

use super::hopper::Hopper;
use super::matrix::Form;
use super::params::{Raw, Request};
use super::{DeviceMatrix, ExpertGroups, GemmRequest, checks};
use crate::cuda::module::{Function, Module, arguments};
use crate::cuda::{CudaContext, CudaError, CudaStream, DeviceMemory};
use std::sync::Arc;
use vt_bundle::codec::ggml::raw::{self, RawFormat};

/// Columns and rows that a block of the generic kernel computes at a time, and its threads.
const GENERIC_N: u32 = 64;
const GENERIC_M: u32 = 32;
const GENERIC_THREADS: u32 = 256;
/// Extent of a grid in y, at most.
const MAX_GRID_Y: u32 = 65_535;

/// The GEMM kernels, loaded for one device.
#[derive(Debug)]
pub struct Gemm {
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
        let grids: Vec<u8> =
            raw::FORMATS.iter().flat_map(|format| format.grid()).flat_map(|entry| entry.to_le_bytes()).collect();
        let memory = DeviceMemory::new(context, grids.len() as u64, "codebooks")?;
        memory.write(0, &grids)?;
        Ok(Self { generic, hopper: Hopper::new(context)?, grids: memory })
    }

    /// Bytes of workspace that products of up to `max_m` rows with this matrix need. The workspace must be zero before its
    /// first use, and may serve any number of launches that follow each other in one stream.
    pub fn workspace_bytes(&self, _matrix: &DeviceMatrix, _max_m: u32) -> u64 {
        // At its start, of one size for all products, what the kernels of Hopper use.
        self.hopper.as_ref().map_or(0, Hopper::workspace_bytes)
    }

    /// Starts one product.
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
        if let (Some(hopper), false) = (&self.hopper, request.deterministic)
            && hopper.launch(stream, matrix, &checked, None, workspace)?
        {
            return Ok(());
        }
        self.generic(stream, matrix, &checked, 1)
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
        let checked = checks::check(matrix, request, Some(groups))?;
        if let (Some(hopper), false) = (&self.hopper, request.deterministic)
            && hopper.launch(stream, matrix, &checked, Some(groups), workspace)?
        {
            return Ok(());
        }
        self.generic(stream, matrix, &checked, groups.count)
    }

    /// Address of the codebook of a raw format.
    pub(super) fn codebook(&self, format: &RawFormat) -> u64 {
        let before = raw::FORMATS.iter().take_while(|other| other.name != format.name);
        let entries: usize = before.map(|other| other.grid().len()).sum();
        self.grids.address() + 2 * entries as u64
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
