//! The paged key/value cache on the device: storage and writes. Which block belongs to which sequence is the engine's
//! business.
//!
//! A layer is `[blocks][2][kv_heads][16][D]`: of each block the keys, then the values, of 16 positions, so that a head's
//! keys of a block are one contiguous run. The device's side of the layout is `cuda/kv_cache/layout.cuh`.

use super::error::require;
use super::module::{Function, Module, arguments};
use super::{CudaContext, CudaError, CudaStream, DeviceMemory};
pub use crate::kv_cache::KvScales;
use crate::kv_cache::{BLOCK_LEN, KvShape};
use std::sync::Arc;

/// Slot of a token that is not stored: one that only fills up a captured batch.
pub const NO_SLOT: u32 = u32::MAX;

/// Threads of a block of every kernel here.
const THREADS: u32 = 256;

/// Stored type of keys and values on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaKvType {
    /// As the projections write them.
    Bf16,
    /// FP8 E4M3 with a scale a layer for keys and one for values; half the memory and traffic.
    E4m3,
}

impl CudaKvType {
    /// Bytes of an element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::E4m3 => 1,
        }
    }

    /// The part of kernel names.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
        }
    }
}

/// Keys and values of all layers, in one allocation.
#[derive(Debug)]
pub struct CudaKvCache {
    memory: DeviceMemory,
    shape: KvShape,
    dtype: CudaKvType,
    layer_bytes: u64,
    block_bytes: u64,
}

impl CudaKvCache {
    /// Bytes of a block of [`BLOCK_LEN`] positions in one layer; `None` on overflow.
    fn block_bytes(shape: &KvShape, dtype: CudaKvType) -> Option<u64> {
        let elements = shape.kv_heads.checked_mul(shape.head_dim)?.checked_mul(2 * BLOCK_LEN)?;
        u64::try_from(elements).ok()?.checked_mul(dtype.bytes())
    }

    /// Bytes of a cache; `None` on overflow.
    pub fn bytes(shape: &KvShape, dtype: CudaKvType) -> Option<u64> {
        let blocks = u64::try_from(shape.layers.checked_mul(shape.blocks)?).ok()?;
        Self::block_bytes(shape, dtype)?.checked_mul(blocks)
    }

    /// Allocates. The contents are whatever was there: attention reads only what was written.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] where the head is not a multiple of 8 up to 256, or there are more blocks than slots can
    /// name; [`CudaError::OutOfMemory`].
    pub fn new(context: &Arc<CudaContext>, shape: KvShape, dtype: CudaKvType) -> Result<Self, CudaError> {
        let dim = shape.head_dim;
        require(dim > 0 && dim <= 256 && dim.is_multiple_of(8), "KV cache", || format!("heads of {dim} elements"))?;
        let slots = shape.blocks.checked_mul(BLOCK_LEN).and_then(|n| u32::try_from(n).ok());
        require(slots.is_some_and(|n| n < NO_SLOT), "KV cache", || format!("{} blocks", shape.blocks))?;
        let what = "KV cache";
        let sizes = Self::bytes(&shape, dtype).zip(Self::block_bytes(&shape, dtype));
        let (bytes, block_bytes) = sizes.ok_or(CudaError::OutOfMemory { what, bytes: u64::MAX })?;
        let memory = DeviceMemory::new(context, bytes, what)?;
        Ok(Self { memory, shape, dtype, layer_bytes: block_bytes * shape.blocks as u64, block_bytes })
    }

    /// Sizes.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Stored type.
    pub fn dtype(&self) -> CudaKvType {
        self.dtype
    }

    /// The allocation.
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Address of a layer's part.
    pub(super) fn layer(&self, layer: usize) -> Result<u64, CudaError> {
        require(layer < self.shape.layers, "KV cache", || format!("layer {layer} of {}", self.shape.layers))?;
        Ok(self.memory.address() + layer as u64 * self.layer_bytes)
    }
}

/// Rows of a step whose keys and values go into the cache.
#[derive(Clone, Copy, Debug)]
pub struct KvRows {
    /// Address of bf16 rows; a multiple of 16.
    pub x: u64,
    /// Elements from row to row; a multiple of 8, as are the next two.
    pub stride: usize,
    /// Column of the keys `[kv_heads, D]`.
    pub keys_at: usize,
    /// Column of the values `[kv_heads, D]`.
    pub values_at: usize,
    /// Rows, T.
    pub tokens: usize,
    /// Address of u32 `[T]`: block * 16 + place in the block, or [`NO_SLOT`].
    pub slots: u64,
}

/// The kernels that write into a cache.
#[derive(Debug)]
pub struct KvWriter {
    bf16: Function,
    e4m3: Function,
    copy: Function,
}

/// As in `cuda/kv_cache/write.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Write {
    x: u64,
    slots: u64,
    cache: u64,
    stride: u32,
    keys_at: u32,
    values_at: u32,
    tokens: u32,
    kv_heads: u32,
    dim: u32,
    key_scale: f32,
    value_scale: f32,
}

/// As in `cuda/kv_cache/write.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BlockCopy {
    cache: u64,
    layer_bytes: u64,
    block_bytes: u64,
    from: u32,
    to: u32,
}

impl KvWriter {
    /// Loads the kernels.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there are none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let module = Module::load(context, "kv_cache/write")?;
        Ok(Self {
            bf16: module.function(c"vt_kv_write_bf16", 0)?,
            e4m3: module.function(c"vt_kv_write_e4m3", 0)?,
            copy: module.function(c"vt_kv_copy_block", 0)?,
        })
    }

    /// Writes the keys and values of `rows` into `layer`. The slots must lie in the cache.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn write(
        &self,
        stream: &CudaStream,
        cache: &CudaKvCache,
        layer: usize,
        scales: KvScales,
        rows: &KvRows,
    ) -> Result<(), CudaError> {
        let op = "KV write";
        let shape = &cache.shape;
        let width = shape.kv_heads * shape.head_dim;
        let fits = rows.keys_at.max(rows.values_at).checked_add(width).is_some_and(|end| end <= rows.stride);
        require(fits, op, || format!("{width} columns at {} and {} of {}", rows.keys_at, rows.values_at, rows.stride))?;
        let aligned = rows.x.is_multiple_of(16) && (rows.stride | rows.keys_at | rows.values_at).is_multiple_of(8);
        require(aligned, op, || format!("rows that are not aligned to 16 bytes: {rows:?}"))?;
        let threads = (rows.tokens as u64).checked_mul(width as u64 / 4);
        let blocks = threads.and_then(|n| u32::try_from(n.div_ceil(u64::from(THREADS))).ok());
        let (Some(blocks), Ok(stride)) = (blocks.filter(|b| *b < 1 << 31), u32::try_from(rows.stride)) else {
            return Err(CudaError::Unsupported { op, what: format!("{} rows of {}", rows.tokens, rows.stride) });
        };
        let parameters = Write {
            x: rows.x,
            slots: rows.slots,
            cache: cache.layer(layer)?,
            stride,
            keys_at: rows.keys_at as u32,
            values_at: rows.values_at as u32,
            tokens: rows.tokens as u32,
            kv_heads: shape.kv_heads as u32,
            dim: shape.head_dim as u32,
            key_scale: scales.key,
            value_scale: scales.value,
        };
        let function = match cache.dtype {
            CudaKvType::Bf16 => &self.bf16,
            CudaKvType::E4m3 => &self.e4m3,
        };
        // SAFETY: `Write` is the kernel's parameter; it writes one slot of the layer a row, reads `stride` elements of each at
        // most, and the caller keeps what the addresses name.
        unsafe { function.launch_early(stream, [blocks, 1, 1], [THREADS, 1, 1], 0, &mut arguments![parameters]) }
    }

    /// Copies a block of every layer to another: a shared prefix that one sequence is about to extend.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn copy_block(
        &self,
        stream: &CudaStream,
        cache: &CudaKvCache,
        from: usize,
        to: usize,
    ) -> Result<(), CudaError> {
        let (blocks, layers) = (cache.shape.blocks, cache.shape.layers);
        require(from.max(to) < blocks && layers <= 65_535, "KV copy", || format!("blocks {from}, {to} of {blocks}"))?;
        let parameters = BlockCopy {
            cache: cache.memory.address(),
            layer_bytes: cache.layer_bytes,
            block_bytes: cache.block_bytes,
            from: from as u32,
            to: to as u32,
        };
        let grid = [cache.block_bytes.div_ceil(u64::from(THREADS) * 16) as u32, layers as u32, 1];
        // SAFETY: `BlockCopy` is the kernel's parameter, and both blocks lie in the cache.
        unsafe { self.copy.launch_early(stream, grid, [THREADS, 1, 1], 0, &mut arguments![parameters]) }
    }
}
