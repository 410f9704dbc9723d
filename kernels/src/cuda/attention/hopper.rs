//! Prefill with the instructions of sm_90a: launches of `cuda/attention/prefill_hopper.cu`.

use super::{Prefill, THREADS};
use crate::cuda::error::Named;
use crate::cuda::kv_cache::{CudaKvCache, CudaKvType};
use crate::cuda::module::{Function, Module, arguments};
use crate::cuda::{CudaContext, CudaError, CudaStream};
use crate::kv_cache::BLOCK_LEN;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::sync::Arc;

/// Rows (tokens times heads of a group) of a thread block.
pub(super) const ROWS: u32 = 128;
/// One warp group that copies, two that compute.
const GROUPS: u32 = 3;
/// Positions of a tile.
const TILE: u32 = 128;

/// The kernel for one cache.
#[derive(Debug)]
pub(super) struct HopperPrefill {
    function: Function,
    /// The cache as rows of a head's elements, which bulk copies take blocks of.
    map: sys::CUtensorMap,
    shared: u32,
    /// The cache that `map` describes, and the rows of a layer.
    cache: u64,
    layer_rows: u64,
}

// SAFETY: the map is plain bytes; functions may be used from any thread.
unsafe impl Send for HopperPrefill {}
// SAFETY: as above.
unsafe impl Sync for HopperPrefill {}

impl HopperPrefill {
    /// `None` where the device, the build, the head size or the stored type has no such kernel.
    pub(super) fn new(context: &Arc<CudaContext>, cache: &CudaKvCache) -> Result<Option<Self>, CudaError> {
        let dim = cache.shape().head_dim as u32;
        let name = match dim {
            64 => c"vt_prefill_hopper_64",
            128 => c"vt_prefill_hopper_128",
            _ => return Ok(None),
        };
        if context.attributes().capability != 90 || cache.dtype() != CudaKvType::Bf16 {
            return Ok(None);
        }
        // Queries, two tiles of keys and two of values in bf16; barriers; what aligning them to 1024 bytes may cost.
        let shared = 5 * TILE * dim * 2 + 64 + 1024;
        let module = Module::load(context, "attention/prefill_hopper")?;
        // A build for other architectures has an empty module.
        let Ok(function) = module.function(name, shared) else { return Ok(None) };
        let rows = cache.memory().len() / u64::from(dim * 2);
        let layers = cache.shape().layers.max(1) as u64;
        if rows == 0 || rows > i32::MAX as u64 {
            return Ok(None);
        }
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (sizes, strides) = ([u64::from(dim), rows], [u64::from(dim) * 2]);
        let (extent, steps) = ([64, BLOCK_LEN as u32], [1, 1]);
        // SAFETY: the arrays have two entries (strides one less), and the call writes the map and nothing else.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
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
        let cache = cache.memory().address();
        Ok(Some(Self { function, map, shared, cache, layer_rows: rows / layers }))
    }

    /// Whether the kernel was made for that cache.
    pub(super) fn is_for(&self, cache: &CudaKvCache) -> bool {
        self.cache == cache.memory().address()
    }

    /// Submits `tiles` thread blocks for each of `kv_heads` heads.
    pub(super) fn launch(
        &self,
        stream: &CudaStream,
        layer: usize,
        kv_heads: u32,
        tiles: u32,
        mut parameters: Prefill,
    ) -> Result<(), CudaError> {
        parameters.cache_row = (self.layer_rows * layer as u64) as u32;
        let map = self.map;
        let grid = [kv_heads, tiles, 1];
        // SAFETY: `Prefill` and the map are the kernel's parameters; what they name is as large as the batch says, and the
        // caller keeps it.
        unsafe {
            self.function.launch(stream, grid, [GROUPS * THREADS, 1, 1], self.shared, &mut arguments![parameters, map])
        }
    }
}
