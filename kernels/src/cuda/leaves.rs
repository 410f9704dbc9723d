//! BLAKE3 of an image on the device: launches of `cuda/blake3.cu`.

use super::error::{Named, check_range};
use super::stream::Event;
use super::{CudaContext, CudaError, CudaStream, DeviceMemory, StagingBuffer};
use cudarc::driver::{result, sys};
use std::ffi::c_void;
use std::sync::Arc;
use vt_bundle::hash::{Digest, LEAF_BYTES, leaf_count};

/// Threads per block, as in the source.
const THREADS: u32 = 256;
/// Shared memory of a block: 1024 chunk values, and two stages of 32 padded blocks for each of 8 warps.
const SHARED_BYTES: u32 = 1024 * 32 + 8 * 2 * 32 * 80;

/// The kernel and a stream for it.
#[derive(Debug)]
pub struct LeafHasher {
    stream: CudaStream,
    module: sys::CUmodule,
    function: sys::CUfunction,
}

// SAFETY: modules and functions may be used from any thread; the driver locks inside.
unsafe impl Send for LeafHasher {}
// SAFETY: as above.
unsafe impl Sync for LeafHasher {}

impl LeafHasher {
    /// Loads the kernel.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there is none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let stream = CudaStream::new(context)?;
        let module = context.load_module("blake3")?;
        // SAFETY: the module is loaded and of this context.
        let function = unsafe { result::module::get_function(module, c"vt_blake3_leaves".to_owned()) };
        let hasher = Self { stream, module, function: function.named("cuModuleGetFunction")? };
        let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of this context.
        unsafe { result::function::set_function_attribute(hasher.function, limit, SHARED_BYTES as i32) }
            .named("cuFuncSetAttribute")?;
        Ok(hasher)
    }

    /// The stream that the kernel runs in.
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// A table for the values of that many leaves: host memory that the device writes to directly, so that nothing is
    /// allocated on the device and nothing is copied back.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn table(&self, leaves: u64) -> Result<Arc<StagingBuffer>, CudaError> {
        let bytes = leaves.checked_mul(32).and_then(|b| usize::try_from(b).ok());
        let bytes = bytes.ok_or(CudaError::OutOfMemory { what: "leaf values", bytes: u64::MAX })?;
        StagingBuffer::pinned(self.stream.context(), bytes).map(Arc::new)
    }

    /// Starts hashing leaves `first .. first + count` of the image that fills the first `bytes` bytes of `memory`, after
    /// everything submitted to `after` so far. Leaf `i` gets entry `i` of `table`.
    ///
    /// The chunk counter starts again every `segment_bytes`, a multiple of the leaf.
    ///
    /// # Errors
    /// [`CudaError`].
    #[expect(clippy::too_many_arguments, reason = "a launch: every number is an argument of the kernel")]
    pub fn hash(
        &self,
        memory: &Arc<DeviceMemory>,
        bytes: u64,
        segment_bytes: u64,
        first: u64,
        count: u32,
        table: &Arc<StagingBuffer>,
        after: Option<&CudaStream>,
    ) -> Result<PendingLeaves, CudaError> {
        check_range("hash", 0, bytes, memory.len())?;
        check_range("hash leaves", first, u64::from(count), leaf_count(bytes))?;
        check_range("leaf values", first, u64::from(count), table.len() as u64 / 32)?;
        if let Some(copies) = after {
            self.stream.wait_for(copies)?;
        }
        let event = Event::new(self.stream.context())?;
        let segment_leaves = segment_bytes / LEAF_BYTES;
        let data = memory.address();
        let values = table.device_address()? + first * 32;
        let mut arguments: [*mut c_void; 5] = [
            (&raw const data).cast_mut().cast(),
            (&raw const bytes).cast_mut().cast(),
            (&raw const first).cast_mut().cast(),
            (&raw const segment_leaves).cast_mut().cast(),
            (&raw const values).cast_mut().cast(),
        ];
        if count > 0 {
            // SAFETY: the arguments have the kernel's types in its order and are copied by the call; the kernel reads inside
            // `bytes` and writes `count` entries, both checked; `PendingLeaves` keeps the memory until the kernel is done.
            unsafe {
                result::launch_kernel(
                    self.function,
                    (count, 1, 1),
                    (THREADS, 1, 1),
                    SHARED_BYTES,
                    self.stream.stream,
                    &mut arguments,
                )
            }
            .named("cuLaunchKernel")?;
        }
        event.record(&self.stream)?;
        Ok(PendingLeaves { event, _memory: Arc::clone(memory), table: Arc::clone(table), first, count })
    }
}

impl Drop for LeafHasher {
    fn drop(&mut self) {
        if self.stream.synchronize().is_ok() {
            // SAFETY: loaded in `new`; nothing of it is running.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// Leaf values that are being computed.
#[derive(Debug)]
pub struct PendingLeaves {
    event: Event,
    _memory: Arc<DeviceMemory>,
    table: Arc<StagingBuffer>,
    first: u64,
    count: u32,
}

impl PendingLeaves {
    /// Index of the first leaf.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Waits, and gives the values in order.
    ///
    /// # Errors
    /// [`CudaError::Call`] where the device failed.
    pub fn wait(self) -> Result<Vec<Digest>, CudaError> {
        self.event.wait()?;
        // Read through the pointer, without a reference to the whole table: other entries may be being written.
        let start = self.table.start().cast::<Digest>();
        let read = |i: u32| {
            // SAFETY: the entry lies in the table (checked at launch) and the kernel that wrote it is done.
            unsafe { start.add(self.first as usize + i as usize).read_volatile() }
        };
        Ok((0..self.count).map(read).collect())
    }
}

impl Drop for PendingLeaves {
    fn drop(&mut self) {
        // The table may be freed next.
        let _ = self.event.wait();
    }
}
