//! The kernels for sm_90a: launches of `cuda/attention/{decode,prefill}_hopper.cu`.

use super::{Decode, MAX_GROUP_OF_COLUMNS, Prefill};
use crate::cuda::error::Named;
use crate::cuda::kv_cache::{CudaKvCache, CudaKvType};
use crate::cuda::module::{Function, Module, arguments};
use crate::cuda::{CudaContext, CudaError, CudaStream};
use crate::kv_cache::BLOCK_LEN;
use cudarc::driver::sys;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

/// Rows (tokens times heads of a group) of a thread block of prefill.
pub(super) const ROWS: u32 = 128;
/// Threads of prefill: one warp group that copies, two that compute.
const PREFILL_THREADS: u32 = 384;
/// Positions of a tile of prefill.
const TILE: u32 = 128;
/// Threads of decode: four warps that compute, one that copies, three that merge.
const DECODE_THREADS: u32 = 8 * 32;
/// Thread blocks of decode on a multiprocessor.
const DECODE_BLOCKS: u32 = 2;
/// Bytes of decode's ring.
const RING: u32 = 64 << 10;
/// What aligning shared memory to 1024 bytes may cost.
const ALIGNING: u32 = 1024;

/// A kernel and its dynamic shared memory.
#[derive(Debug)]
struct Kernel {
    function: Function,
    shared: u32,
}

/// The kernels that one cache has.
#[derive(Debug)]
pub(super) struct Hopper {
    decode: Option<Kernel>,
    prefill: Option<Kernel>,
    /// The cache as rows of a head's elements, which bulk copies take blocks of.
    map: sys::CUtensorMap,
    /// The cache that `map` describes, and the rows of a layer.
    cache: u64,
    layer_rows: u64,
    multiprocessors: u32,
}

impl Hopper {
    /// `None` where the device, the build, the head size or the stored type has none.
    pub(super) fn new(context: &Arc<CudaContext>, cache: &CudaKvCache) -> Result<Option<Self>, CudaError> {
        let (dim, dtype) = (cache.shape().head_dim as u32, cache.dtype());
        let (decode, prefill) = match (dtype, dim) {
            (CudaKvType::Bf16, 64) => (c"vt_decode_hopper_bf16_64", Some(c"vt_prefill_hopper_64")),
            (CudaKvType::Bf16, 128) => (c"vt_decode_hopper_bf16_128", Some(c"vt_prefill_hopper_128")),
            (CudaKvType::E4m3, 128) => (c"vt_decode_hopper_e4m3_128", None),
            _ => return Ok(None),
        };
        let rows = cache.memory().len() / (u64::from(dim) * dtype.bytes());
        if context.attributes().capability != 90 || rows == 0 || rows > i32::MAX as u64 {
            return Ok(None);
        }
        // A ring, twice the sums, maximum and weight of 4 warps and 8 heads, barriers; the prefix is added at a launch.
        let decode_shared = RING + 2 * 4 * 8 * (dim + 6) * 4 + 8 * 36 + ALIGNING;
        // Queries, two tiles of keys and two of values in bf16, barriers.
        let prefill_shared = 5 * TILE * dim * 2 + 64 + ALIGNING;
        let most = decode_shared + 4 * (super::MAX_DECODE_SEQUENCES as u32 + 1);
        let decode = kernel(context, "attention/decode_hopper", decode, most)?;
        let prefill = match prefill {
            Some(name) => kernel(context, "attention/prefill_hopper", name, prefill_shared)?,
            None => None,
        };
        Ok(Some(Self {
            decode: decode.map(|function| Kernel { function, shared: decode_shared }),
            prefill: prefill.map(|function| Kernel { function, shared: prefill_shared }),
            map: map(cache, rows)?,
            cache: cache.memory().address(),
            layer_rows: rows / cache.shape().layers.max(1) as u64,
            multiprocessors: context.attributes().multiprocessors,
        }))
    }

    /// Whether the kernels were made for that cache.
    pub(super) fn is_for(&self, cache: &CudaKvCache) -> bool {
        self.cache == cache.memory().address()
    }

    /// Whether there is a decode kernel for groups of that many query heads.
    pub(super) fn has_decode(&self, group: u32) -> bool {
        self.decode.is_some() && group <= MAX_GROUP_OF_COLUMNS
    }

    pub(super) fn has_prefill(&self) -> bool {
        self.prefill.is_some()
    }

    /// Submits decode for up to `units` units of work; `None` where there is no kernel for it.
    pub(super) fn decode(
        &self,
        stream: &CudaStream,
        layer: usize,
        units: usize,
        mut parameters: Decode,
    ) -> Option<Result<(), CudaError>> {
        let kernel = self.decode.as_ref().filter(|_| self.has_decode(parameters.group))?;
        parameters.cache_row = (self.layer_rows * layer as u64) as u32;
        let shared = kernel.shared + 4 * (parameters.sequences + 1);
        let blocks = units.min((self.multiprocessors * DECODE_BLOCKS) as usize) as u32;
        let map = self.map;
        // SAFETY: `Decode` and the map are the kernel's parameters; what they name is as large as the batch and the
        // workspace say, and the caller keeps it.
        Some(unsafe {
            let arguments = &mut arguments![parameters, map];
            kernel.function.launch_early(stream, [blocks, 1, 1], [DECODE_THREADS, 1, 1], shared, arguments)
        })
    }

    /// Submits `tiles` thread blocks of prefill for each of `kv_heads` heads; `None` where there is no kernel for it.
    pub(super) fn prefill(
        &self,
        stream: &CudaStream,
        layer: usize,
        kv_heads: u32,
        tiles: u32,
        mut parameters: Prefill,
    ) -> Option<Result<(), CudaError>> {
        let kernel = self.prefill.as_ref()?;
        parameters.cache_row = (self.layer_rows * layer as u64) as u32;
        let map = self.map;
        // SAFETY: `Prefill` and the map are the kernel's parameters; as in `decode`.
        Some(unsafe {
            let arguments = &mut arguments![parameters, map];
            kernel.function.launch_early(
                stream,
                [kv_heads, tiles, 1],
                [PREFILL_THREADS, 1, 1],
                kernel.shared,
                arguments,
            )
        })
    }
}

/// A kernel of a module that is empty in builds for other architectures.
fn kernel(
    context: &Arc<CudaContext>,
    module: &'static str,
    name: &CStr,
    shared: u32,
) -> Result<Option<Function>, CudaError> {
    match Module::load(context, module)?.function(name, shared) {
        Ok(function) => Ok(Some(function)),
        Err(CudaError::Call { name, .. }) if name == "CUDA_ERROR_NOT_FOUND" => Ok(None),
        Err(error) => Err(error),
    }
}

/// Boxes of 16 rows by 128 bytes, swizzled.
fn map(cache: &CudaKvCache, rows: u64) -> Result<sys::CUtensorMap, CudaError> {
    use sys::CUtensorMapDataType as Type;
    let (bytes, dim) = (cache.dtype().bytes(), cache.shape().head_dim as u64);
    let dtype = match cache.dtype() {
        CudaKvType::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        CudaKvType::E4m3 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    let (sizes, strides) = ([dim, rows], [dim * bytes]);
    let (extent, steps) = ([(128 / bytes) as u32, BLOCK_LEN as u32], [1, 1]);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays have two entries (strides one less), and the call writes the map and nothing else.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            dtype,
            2,
            cache.memory().address() as *mut c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            extent.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .named("cuTensorMapEncodeTiled")?;
    Ok(map)
}
