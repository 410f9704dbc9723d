//! Products on Hopper (`cuda/gemm_hopper/`): weights unpacked into registers as the A operand of the tensor cores, weights and
//! activations copied into shared memory by the copy engine.
//!
//! - `encodings`: which matrices the kernels read, and how;
//! - `few`: tiles of products with few rows;
//! - `schedule`: tiles of products with more, and who computes which;
//! - `rows`: row-major bf16 matrices of many rows, with any number of activations;
//! - here: the kernels of a device, tensor maps, launches.

mod encodings;
mod few;
mod rows;
mod schedule;

use super::input::HalfNorms;
use super::matrix::Form;
use super::params::{INPUT_WEIGHTED, Request, Rows};
use super::{DeviceMatrix, ExpertGroups};
use crate::cuda::error::Named;
use crate::cuda::module::{Function, Module, arguments};
use crate::cuda::{CudaContext, CudaError, CudaStream};
use cudarc::driver::sys::{self, CUtensorMapDataType as DataType, CUtensorMapSwizzle as Swizzle};
use encodings::{ENCODINGS, Encoding, MAX_PARTS, Reading};
use rows::RowKernels;
use schedule::{Plan, SHAPES, Schedule};
use std::ffi::CString;
use std::sync::Arc;
use vt_bundle::layout::TiledMatrix;

/// Compute capability of the kernels; they have no other.
const CAPABILITY: u32 = 90;
/// Fewest rows that the kernels are chosen for; with fewer, others read the weights faster.
const MIN_ROWS: u32 = 9;
/// Up to so many rows of an expert on average the kernels for few rows are faster, as most tiles of these would be nearly empty;
/// with more, those take tiles of 32 rows and are slower.
const MOST_ROWS_OF_FEW: u32 = 8;
/// Bytes of the flags at the start of the workspace.
const FLAG_BYTES: u64 = 4096;

/// What a kernel is given; a mirror of `Arguments` in `kernel.cuh`.
#[repr(C, align(64))]
struct Arguments {
    x: [u64; 16],
    codes: [u64; 16],
    scales: [u64; 16],
    row_scales: u64,
    bias: u64,
    out: u64,
    partial: u64,
    flags: u64,
    offsets: u64,
    expert_stride: u64,
    out_stride: u64,
    experts: u32,
    m: u32,
    n: u32,
    group_size: u32,
    row_scale_type: u32,
    row_scale_of_part: u32,
    row_scale_divides: u32,
    parts: u32,
    part_end: [u32; MAX_PARTS],
    out_f32: u32,
    accumulate: u32,
    schedule: Schedule,
    few: few::Cut,
    code_plane: u64,
    scale_plane: u64,
    squares: u64,
    norm_weight: u64,
    next: u64,
    next_squares: u64,
    eps: f32,
    k: u32,
}

/// The kernels of a Hopper device.
#[derive(Debug)]
pub(super) struct Hopper {
    /// By encoding and shape: for few rows, and for more.
    few: Vec<Vec<Function>>,
    functions: Vec<Vec<Function>>,
    rows: RowKernels,
    multiprocessors: u32,
}

impl Hopper {
    /// Loads the kernels; `None` on other devices.
    ///
    /// # Errors
    /// [`CudaError`] where the build lacks them.
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Option<Self>, CudaError> {
        if context.attributes().capability != CAPABILITY {
            return Ok(None);
        }
        let many = [Module::load(context, "gemm_hopper/floats")?, Module::load(context, "gemm_hopper/integers")?];
        let few = Module::load(context, "gemm_hopper/few")?;
        let named = |module: &Arc<Module>, kind: &str, encoding: &Encoding, shape: &str, shared: u32| {
            let name = CString::new(format!("vt_{kind}_{}_{shape}", encoding.name)).unwrap_or_default();
            module.function(&name, shared)
        };
        let of_few = |encoding: &Encoding| {
            let of_shape = |shape: &few::Shape| named(&few, "few", encoding, shape.name, shape.shared_bytes(encoding));
            few::SHAPES.iter().map(of_shape).collect::<Result<Vec<_>, _>>()
        };
        let of_many = |encoding: &Encoding| {
            let module = &many[usize::from(encoding.name.starts_with("int"))];
            let of_shape =
                |shape: &schedule::Shape| named(module, "hopper", encoding, shape.name, shape.shared_bytes(encoding));
            SHAPES.iter().map(of_shape).collect::<Result<Vec<_>, _>>()
        };
        Ok(Some(Self {
            few: ENCODINGS.iter().map(of_few).collect::<Result<_, _>>()?,
            functions: ENCODINGS.iter().map(of_many).collect::<Result<_, _>>()?,
            rows: RowKernels::new(context)?,
            multiprocessors: context.attributes().multiprocessors,
        }))
    }

    /// Bytes at the start of a workspace that belong to these kernels, whatever the product: flags, which are zero between
    /// launches, sums of tiles that several blocks share, which are not, and those of the kernels for few rows, which are.
    pub(super) fn workspace_bytes(&self) -> u64 {
        self.few_sums_at() + u64::from(self.multiprocessors) * u64::from(few::given_bytes())
    }

    /// Where the sums of the kernels for few rows lie in a workspace.
    fn few_sums_at(&self) -> u64 {
        let most = SHAPES.iter().map(|shape| shape.floats()).max().unwrap_or(0);
        FLAG_BYTES + u64::from(self.multiprocessors) * u64::from(most) * 4
    }

    /// Starts a product with a row-major bf16 matrix, where there is a kernel for it, and says whether it did.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub(super) fn launch_rows(&self, stream: &CudaStream, rows: &Rows, request: &Request) -> Result<bool, CudaError> {
        self.rows.launch(stream, rows, request)
    }

    /// How the kernels read the matrix, where they are the ones for this product.
    fn reading(&self, matrix: &DeviceMatrix, request: &Request, groups: Option<&ExpertGroups>) -> Option<Reading> {
        let Form::Tiled { matrix, .. } = &matrix.form else { return None };
        // Rows of activations are copied, and results stored, 16 bytes at a time.
        let out_align = if request.out_bf16 == 1 { 8 } else { 4 };
        let aligned = request.x.is_multiple_of(16)
            && request.x_stride.is_multiple_of(8)
            && request.out.is_multiple_of(16)
            && request.out_stride.is_multiple_of(out_align);
        let enough = groups.is_none_or(|groups| request.m > MOST_ROWS_OF_FEW.saturating_mul(groups.count));
        if aligned && enough { Reading::of(matrix) } else { None }
    }

    /// Whether these kernels are the ones for the products of experts.
    pub(super) fn takes_experts(&self, matrix: &DeviceMatrix, request: &Request, groups: &ExpertGroups) -> bool {
        self.reading(matrix, request, Some(groups)).is_some()
    }

    /// Which halves of norms a product of `m` rows can do, where one of the kernels for few rows is the one for it.
    pub(super) fn half_norms_of_few(&self, matrix: &DeviceMatrix, m: u32) -> Option<HalfNorms> {
        let Form::Tiled { matrix, params, .. } = &matrix.form else { return None };
        let (shape, cut) = few::plan(params.n, params.k, m, self.multiprocessors)?;
        Reading::of(matrix).map(|_| few::SHAPES[shape].half_norms(&cut))
    }

    /// Starts the product where these kernels are the ones for it, and says whether it did.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub(super) fn launch(
        &self,
        stream: &CudaStream,
        matrix: &DeviceMatrix,
        request: &Request,
        groups: Option<&ExpertGroups>,
        workspace: u64,
    ) -> Result<bool, CudaError> {
        let Form::Tiled { matrix: geometry, params, .. } = &matrix.form else { return Ok(false) };
        let Some(reading) = self.reading(matrix, request, groups) else { return Ok(false) };
        let encoding = &ENCODINGS[reading.encoding];
        let experts = groups.map_or(1, |groups| groups.count);
        let Some(launch) = self.cut(reading.encoding, request, params.k, groups) else { return Ok(false) };
        let address = |plane: usize| match plane.checked_sub(geometry.spec.codes.len()) {
            None => params.codes[plane].data,
            Some(scale) => params.scales[scale].data,
        };
        let maps = Maps { geometry, rows: launch.rows, experts, stride: request.expert_stride };
        let mut parts = [0; MAX_PARTS];
        for (end, part) in parts.iter_mut().zip(&geometry.parts) {
            *end = (part.start + part.padded()) as u32;
        }
        let row_scale = reading.row_scale;
        let arguments = Arguments {
            x: match launch.few {
                Some((halves, _)) => activations_in_halves(request, params.k, launch.box_tokens, halves)?,
                None => activations(request, params.k, launch.box_tokens)?,
            },
            codes: maps.codes(address(0), encoding.bits)?,
            scales: match reading.scales {
                Some(plane) => maps.scales(address(plane), encoding)?,
                None => [0; 16],
            },
            row_scales: row_scale.map_or(0, |scale| address(scale.plane)),
            bias: request.bias,
            out: request.out,
            partial: workspace + if launch.few.is_some() { self.few_sums_at() } else { FLAG_BYTES },
            flags: workspace,
            offsets: request.offsets,
            expert_stride: request.expert_stride,
            out_stride: u64::from(request.out_stride),
            experts,
            m: request.m,
            n: request.n,
            group_size: geometry.group_size as u32,
            row_scale_type: row_scale.map_or(0, |scale| scale.dtype),
            row_scale_of_part: row_scale.map_or(0, |scale| u32::from(scale.of_part)),
            row_scale_divides: row_scale.map_or(0, |scale| u32::from(scale.divides)),
            parts: geometry.parts.len() as u32,
            part_end: parts,
            out_f32: 1 - request.out_bf16,
            accumulate: request.accumulate,
            schedule: launch.schedule,
            few: launch.few.map_or_else(few::Cut::default, |(_, cut)| cut),
            code_plane: address(0),
            scale_plane: reading.scales.map_or(0, address),
            squares: if request.input == INPUT_WEIGHTED { request.squares } else { 0 },
            norm_weight: request.weight,
            next: request.next,
            next_squares: request.squares,
            eps: request.eps,
            k: params.k,
        };
        let (grid, block) = ([launch.blocks, 1, 1], [launch.threads, 1, 1]);
        let (function, shared) = (launch.function, launch.shared_bytes);
        let arguments = &mut arguments![arguments];
        // SAFETY: the argument is the kernel's; planes are those of the geometry, the request is checked against it, and the
        // workspace has the bytes that `workspace_bytes` asks for; the caller keeps all of it allocated. Before it waits for
        // earlier work the kernel only reads weights.
        unsafe { function.launch_early(stream, grid, block, shared, arguments)? };
        Ok(true)
    }
}

/// A kernel and how a product is cut for it.
struct Launch<'a> {
    function: &'a Function,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    /// Rows of N of a block, and rows of activations that it copies at once.
    rows: u32,
    box_tokens: u32,
    /// The cut of a kernel for many rows, or of one for few, and times 64 columns of its steps.
    schedule: Schedule,
    few: Option<(u32, few::Cut)>,
}

impl Hopper {
    /// The kernel for a product, and its cut, where there is one that is the fastest.
    fn cut(&self, encoding: usize, request: &Request, k: u32, groups: Option<&ExpertGroups>) -> Option<Launch<'_>> {
        let (n, m, sms) = (request.n, request.m, self.multiprocessors);
        let read = &ENCODINGS[encoding];
        let plan = match groups {
            Some(groups) => Plan::of_experts(n, k, m, groups.count, sms),
            None => {
                if let Some((index, cut)) = few::plan(n, k, m, sms) {
                    let shape = &few::SHAPES[index];
                    return Some(Launch {
                        function: &self.few[encoding][index],
                        blocks: cut.blocks(),
                        threads: shape.threads(),
                        shared_bytes: shape.shared_bytes(read),
                        rows: shape.rows(),
                        box_tokens: shape.tokens,
                        schedule: Schedule::default(),
                        few: Some((shape.halves, cut)),
                    });
                }
                if m < MIN_ROWS {
                    return None;
                }
                Plan::cheapest(n, k, m, read.bits, sms)
            }
        };
        let shape = &SHAPES[plan.shape];
        Some(Launch {
            function: &self.functions[encoding][plan.shape],
            blocks: plan.workers * shape.cluster,
            threads: shape.threads(),
            shared_bytes: shape.shared_bytes(read),
            rows: shape.rows(),
            box_tokens: shape.tokens / shape.cluster,
            schedule: plan.schedule,
            few: None,
        })
    }
}

/// Tensor maps of a matrix's planes.
struct Maps<'a> {
    geometry: &'a TiledMatrix,
    /// Rows of N of a tile of the product.
    rows: u32,
    experts: u32,
    /// Bytes from an expert to the next.
    stride: u64,
}

impl Maps<'_> {
    /// Box: the tiles of 64 columns. Elements are of 8 bytes, as an axis of a box has at most 256.
    fn codes(&self, address: u64, bits: u32) -> Result<[u64; 16], CudaError> {
        let tile = 128 * u64::from(bits);
        let tile_rows = self.geometry.padded_k() / 16;
        self.encode(DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8, address, tile, tile_rows, 4)
    }

    /// Box: the scales of 64 columns.
    fn scales(&self, address: u64, encoding: &Encoding) -> Result<[u64; 16], CudaError> {
        let tile = 64 * u64::from(encoding.scale_bytes);
        let groups = self.geometry.k / self.geometry.group_size.max(1);
        self.encode(DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, address, tile, groups, encoding.scale_rows)
    }

    /// `tile` bytes for 64 rows of N, those of all of N adjacent, `along_k` such runs.
    fn encode(
        &self,
        dtype: DataType,
        element: u64,
        address: u64,
        tile: u64,
        along_k: u64,
        box_k: u32,
    ) -> Result<[u64; 16], CudaError> {
        let tiles = self.geometry.padded_n() / 64;
        let dims = [tile / element, tiles, along_k, u64::from(self.experts)];
        // One expert has no next one, and a stride of nothing is refused.
        let run = tile * tiles;
        let stride = if self.experts > 1 { self.stride } else { run * along_k };
        let boxed = [(tile / element) as u32, self.rows / 64, box_k, 1];
        encode(dtype, address, &dims, &[tile, run, stride], &boxed, Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE)
    }
}

/// Tensor map of the activations. Box: 64 columns of `tokens` rows.
fn activations(request: &Request, k: u32, tokens: u32) -> Result<[u64; 16], CudaError> {
    let dims = [u64::from(k), u64::from(request.m)];
    let strides = [u64::from(request.x_stride) * 2];
    let swizzle = Swizzle::CU_TENSOR_MAP_SWIZZLE_128B;
    encode(DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, request.x, &dims, &strides, &[64, tokens], swizzle)
}

/// The same with K in runs of 64 columns. Box: `halves` of them, for `tokens` rows.
fn activations_in_halves(request: &Request, k: u32, tokens: u32, halves: u32) -> Result<[u64; 16], CudaError> {
    let dims = [64, u64::from(request.m), u64::from(k / 64)];
    let strides = [u64::from(request.x_stride) * 2, 128];
    let swizzle = Swizzle::CU_TENSOR_MAP_SWIZZLE_128B;
    encode(DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, request.x, &dims, &strides, &[64, tokens, halves], swizzle)
}

/// Encodes a map: axes innermost first, `strides` of all but the first in bytes. What a box has beyond the tensor is zero.
fn encode(
    dtype: DataType,
    address: u64,
    dims: &[u64],
    strides: &[u64],
    boxed: &[u32],
    swizzle: Swizzle,
) -> Result<[u64; 16], CudaError> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let ones = [1u32; 4];
    // SAFETY: the arrays have an element per axis (strides one less), at most four; the map is written, nothing else.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            dtype,
            dims.len() as u32,
            address as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            boxed.as_ptr(),
            ones.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .named("cuTensorMapEncodeTiled")?;
    Ok(map.opaque)
}

const _: () = assert!(schedule::flag_words() * 4 <= FLAG_BYTES, "flags of every block");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_laid_out_as_in_the_header() {
        // Three maps, eight addresses and strides, 8 + 8 + 2 words, the cuts, two addresses, rounded up to the alignment.
        let words = (8 + MAX_PARTS + 2 + 5 + 7usize).next_multiple_of(2);
        assert_eq!(size_of::<Arguments>(), (3 * 128 + 8 * 8 + 4 * words + 2 * 8).next_multiple_of(64));
    }
}
