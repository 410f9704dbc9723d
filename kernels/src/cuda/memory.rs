//! Memory of the device, and host memory that it copies from.

use super::error::{Named, check_range, of_allocation};
use super::stream::Event;
use super::{CudaContext, CudaError};
use cudarc::driver::{result, sys};
use std::sync::Arc;

/// An allocation on the device. Freed when the last owner drops it.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
    bytes: u64,
}

impl DeviceMemory {
    /// Allocates; the start is a multiple of 256 bytes. The contents are whatever was there.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or [`CudaError::Call`].
    pub fn new(context: &Arc<CudaContext>, bytes: u64, what: &'static str) -> Result<Self, CudaError> {
        context.bind()?;
        // The driver refuses zero bytes.
        let len = usize::try_from(bytes.max(1)).map_err(|_| CudaError::OutOfMemory { what, bytes })?;
        // SAFETY: the context is current; freed in `drop`.
        let address = unsafe { result::malloc_sync(len) }.map_err(|e| of_allocation(e, "cuMemAlloc", what, bytes))?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Address in the device's memory.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The device's context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Copies bytes back to the host and waits; for tests and diagnosis.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), CudaError> {
        check_range("read from the device", offset, to.len() as u64, self.bytes)?;
        self.context.bind()?;
        // SAFETY: the range lies inside the allocation, and the copy is done when the call returns.
        unsafe { result::memcpy_dtoh_sync(to, self.address + offset) }.named("cuMemcpyDtoH")
    }

    /// Copies bytes to the device and waits; for small things, tests and diagnosis.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), CudaError> {
        check_range("write to the device", offset, from.len() as u64, self.bytes)?;
        self.context.bind()?;
        // SAFETY: the range lies inside the allocation; work on the device that reads it at the same time reads old or new
        // bytes, which no reference of the host can see.
        unsafe { result::memcpy_htod_sync(self.address + offset, from) }.named("cuMemcpyHtoD")
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`. The call waits for work on the device that still uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Host memory that copies to the device start from.
#[derive(Debug)]
pub struct StagingBuffer {
    memory: Host,
    /// Marks the end of the copy under way.
    pub(super) event: Event,
}

#[derive(Debug)]
enum Host {
    /// Page-locked: the copy engine reads it directly.
    Pinned { context: Arc<CudaContext>, start: *mut u8, bytes: usize },
    /// Ordinary: the driver copies it to pinned memory of its own first.
    Pageable(Box<[u8]>),
}

// SAFETY: the pinned range is owned by this value alone, like a `Box<[u8]>`.
unsafe impl Send for Host {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Host {}

impl StagingBuffer {
    /// Allocates page-locked memory, cached (not write-combined, as readers also read what they wrote) and usable from
    /// every context. Costs about a millisecond for 2 MB.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] where the system does not lock that much.
    pub fn pinned(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let event = Event::new(context)?;
        let what = "pinned host memory";
        // SAFETY: the context is current since the event was made; freed in `drop`.
        let start = unsafe { result::malloc_host(bytes.max(1), sys::CU_MEMHOSTALLOC_PORTABLE) };
        let start = start.map_err(|e| of_allocation(e, "cuMemHostAlloc", what, bytes as u64))?.cast();
        Ok(Self { memory: Host::Pinned { context: Arc::clone(context), start, bytes }, event })
    }

    /// Allocates ordinary memory, for where pinning fails.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn pageable(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { memory: Host::Pageable(vec![0; bytes].into_boxed_slice()), event: Event::new(context)? })
    }

    /// Whether the memory is page-locked.
    pub fn is_pinned(&self) -> bool {
        matches!(self.memory, Host::Pinned { .. })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match &self.memory {
            Host::Pinned { bytes, .. } => *bytes,
            Host::Pageable(bytes) => bytes.len(),
        }
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The start, without a reference to bytes that the device may be writing.
    pub(super) fn start(&self) -> *const u8 {
        match &self.memory {
            Host::Pinned { start, .. } => *start,
            Host::Pageable(bytes) => bytes.as_ptr(),
        }
    }
}

impl AsMut<[u8]> for StagingBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            // SAFETY: allocated with that length and owned; memory that the driver gives is initialised memory of the
            // process, and a copy that reads it holds the buffer by value.
            Host::Pinned { start, bytes, .. } => unsafe { std::slice::from_raw_parts_mut(*start, *bytes) },
            Host::Pageable(bytes) => bytes,
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Host::Pinned { context, start, .. } = self
            && context.bind().is_ok()
        {
            // SAFETY: allocated in `pinned`; no copy is under way, as a copy owns its buffer.
            let _ = unsafe { result::free_host((*start).cast()) };
        }
    }
}
