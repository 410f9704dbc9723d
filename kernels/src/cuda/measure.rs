//! What the device itself can do, as the measure of other kernels.

use super::error::{check_range, require};
use super::module::{Function, Module, arguments};
use super::{CudaContext, CudaError, CudaStream, DeviceMemory};
use std::sync::Arc;

/// Threads per block, as in `cuda/measure/read.cu`.
const THREADS: u32 = 512;
/// Blocks per multiprocessor.
const BLOCKS: u32 = 4;

/// A plain read of device memory.
#[derive(Debug)]
pub struct PlainRead {
    function: Function,
    sink: DeviceMemory,
    blocks: u32,
}

impl PlainRead {
    /// Loads the kernel.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there is none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let function = Module::load(context, "measure/read")?.function(c"vt_measure_read", 0)?;
        let sink = DeviceMemory::new(context, 4, "the sink of a read")?;
        Ok(Self { function, sink, blocks: BLOCKS * context.attributes().multiprocessors })
    }

    /// Starts reading `bytes` bytes of `memory` from `offset` on (both multiples of 16).
    ///
    /// # Errors
    /// [`CudaError::OutOfRange`], or [`CudaError::Call`].
    pub fn launch(&self, stream: &CudaStream, memory: &DeviceMemory, offset: u64, bytes: u64) -> Result<(), CudaError> {
        check_range("read of a device", offset, bytes, memory.len())?;
        require(offset.is_multiple_of(16), "read", || format!("an offset of {offset}"))?;
        let (from, count, sink) = (memory.address() + offset, bytes / 16, self.sink.address());
        // SAFETY: the kernel reads inside the allocation, and writes four bytes to the sink.
        unsafe {
            self.function.launch(stream, [self.blocks, 1, 1], [THREADS, 1, 1], 0, &mut arguments![from, count, sink])
        }
    }
}
