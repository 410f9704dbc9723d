//! Memory of the device, and host memory that it copies from.

use super::error::{Named, check_range, of_allocation};
use super::host::{HostPlace, SharedPlace};
use super::stream::Event;
use super::{CudaContext, CudaError, CudaStream};
use cudarc::driver::{result, sys};
use std::sync::Arc;
use vt_bundle::mmap::HugePages;

/// An allocation on the device, or memory that the device shares with the host. Freed when the last owner drops it.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
    bytes: u64,
    /// The host memory that this is, where it is no allocation of its own.
    shared: Option<SharedPlace>,
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
        Ok(Self { context: Arc::clone(context), address, bytes, shared: None })
    }

    /// Takes the first `bytes` bytes of host memory as they are: the device reads them where they lie.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] where the pages cannot be locked, [`CudaError::OutOfRange`] where there are fewer bytes.
    pub fn shared(context: &Arc<CudaContext>, place: HostPlace, bytes: u64) -> Result<Self, CudaError> {
        check_range("share host memory", 0, bytes, place.bytes().len() as u64)?;
        let (shared, address) = SharedPlace::new(context, place)?;
        Ok(Self { context: Arc::clone(context), address, bytes, shared: Some(shared) })
    }

    /// Whether this is memory of the host.
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
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

    /// Starts writing zeros over everything.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn clear(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.context.bind()?;
        let len = usize::try_from(self.bytes).map_err(|_| CudaError::OutOfRange {
            what: "clear",
            start: 0,
            end: self.bytes,
            bytes: self.bytes,
        })?;
        // SAFETY: the range is the allocation, and both are alive.
        unsafe { result::memset_d8_async(self.address, 0, len, stream.stream) }.named("cuMemsetD8Async")
    }

    /// Copies bytes back to the host and waits; for tests and diagnosis.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), CudaError> {
        check_range("read from the device", offset, to.len() as u64, self.bytes)?;
        if let Some(shared) = &self.shared {
            to.copy_from_slice(&shared.bytes()[offset as usize..][..to.len()]);
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the range lies inside the allocation, and the copy is done when the call returns.
        unsafe { result::memcpy_dtoh_sync(to, self.address + offset) }.named("cuMemcpyDtoH")
    }

    /// Copies bytes to the device and waits; for small things, tests and diagnosis.
    ///
    /// # Errors
    /// [`CudaError::ReadOnly`] where the memory is a mapped file; others.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), CudaError> {
        check_range("write to the device", offset, from.len() as u64, self.bytes)?;
        if self.shared.as_ref().is_some_and(|shared| !shared.is_writable()) {
            return Err(CudaError::ReadOnly { what: "write to the device" });
        }
        self.context.bind()?;
        // SAFETY: the range lies inside the allocation; work on the device that reads it at the same time reads old or new
        // bytes, which no reference of the host can see.
        unsafe { result::memcpy_htod_sync(self.address + offset, from) }.named("cuMemcpyHtoD")?;
        // From ordinary memory the call returns once the bytes are in the driver's buffer; work in other streams could still
        // run before they arrive.
        // SAFETY: null is the default stream, in which the copy is.
        unsafe { result::stream::synchronize(std::ptr::null_mut()) }.named("cuStreamSynchronize")
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        match self.shared {
            // Unlocking and unmapping, which follow, do not wait for the device by themselves.
            // SAFETY: the context is current.
            Some(_) => _ = unsafe { sys::cuCtxSynchronize() },
            // SAFETY: allocated in `new`. The call waits for work on the device that still uses it.
            None => _ = unsafe { result::free_sync(self.address) },
        }
    }
}

/// Host memory that copies to the device start from.
#[derive(Debug)]
pub struct StagingBuffer {
    memory: Host,
    len: usize,
    /// Marks the end of the copy under way.
    pub(super) event: Event,
}

#[derive(Debug)]
struct Host {
    /// The context that the memory is page-locked through; ordinary memory, which the driver copies once more, has none.
    pinned: Option<Arc<CudaContext>>,
    memory: HugePages,
}

impl StagingBuffer {
    /// Allocates page-locked memory, cached (not write-combined, as readers also read what they wrote) and usable from
    /// every context. Huge pages are touched before they are locked, outside the driver's own locks, so that several threads
    /// do it at once: much quicker than `cuMemHostAlloc`.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] where the system does not lock that much.
    pub fn pinned(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let memory = HugePages::new(bytes.max(1));
        let memory = memory.map_err(|_| CudaError::OutOfMemory { what: "host memory", bytes: bytes as u64 })?;
        Self::lock(context, memory, bytes)
    }

    /// Page-locks memory that is there already, and uses its first `bytes` bytes.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] where the system does not lock that much, [`CudaError::OutOfRange`] where there is less.
    pub fn lock(context: &Arc<CudaContext>, memory: HugePages, bytes: usize) -> Result<Self, CudaError> {
        check_range("page-lock", 0, bytes as u64, memory.len() as u64)?;
        let mut buffer = Self { memory: Host { pinned: None, memory }, len: bytes, event: Event::new(context)? };
        let what = "page-locked host memory";
        let start = buffer.memory.memory.start();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the range is mapped, owned by the buffer, and unlocked again before it is unmapped.
        unsafe { sys::cuMemHostRegister_v2(start.cast(), bytes.max(1), flags) }
            .result()
            .map_err(|e| of_allocation(e, "cuMemHostRegister", what, bytes as u64))?;
        buffer.memory.pinned = Some(Arc::clone(context));
        Ok(buffer)
    }

    /// Allocates ordinary memory, for where pinning fails.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or [`CudaError::Call`].
    pub fn pageable(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let event = Event::new(context)?;
        let memory = HugePages::new(bytes.max(1));
        let memory = memory.map_err(|_| CudaError::OutOfMemory { what: "host memory", bytes: bytes as u64 })?;
        Ok(Self { memory: Host { pinned: None, memory }, len: bytes, event })
    }

    /// The first `count` parts of `part_bytes` bytes each (the last may be shorter), to be filled by as many threads.
    pub fn split(self, part_bytes: usize, count: usize) -> Vec<StagingPart> {
        let (len, part_bytes) = (self.len, part_bytes.max(1));
        let buffer = Arc::new(self);
        let part = |start| StagingPart { buffer: Arc::clone(&buffer), start, len: part_bytes.min(len - start) };
        (0..len).step_by(part_bytes).take(count.max(1)).map(part).collect()
    }

    /// Whether the memory is page-locked.
    pub fn is_pinned(&self) -> bool {
        self.memory.pinned.is_some()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The start, without a reference to bytes that the device may be writing.
    pub(super) fn start(&self) -> *const u8 {
        self.memory.memory.start()
    }

    /// Where the device sees the start.
    pub(super) fn device_address(&self) -> Result<u64, CudaError> {
        self.event.bind()?;
        let mut address = 0;
        // SAFETY: the call writes one address, and refuses memory that is not page-locked.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, self.start().cast_mut().cast(), 0) }
            .result()
            .named("cuMemHostGetDevicePointer")?;
        Ok(address)
    }
}

impl AsMut<[u8]> for StagingBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut self.memory.memory.bytes_mut()[..len]
    }
}

/// A part of a staging buffer: nobody else reads or writes its bytes until all parts are joined.
#[derive(Debug)]
pub struct StagingPart {
    buffer: Arc<StagingBuffer>,
    start: usize,
    len: usize,
}

impl StagingPart {
    /// Gives the part back; with the last part the whole buffer returns.
    pub fn join(self) -> Option<StagingBuffer> {
        Arc::into_inner(self.buffer)
    }
}

impl AsMut<[u8]> for StagingPart {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range lies in the buffer, whose memory the `Arc` keeps. Parts do not overlap (`split`), a shared buffer
        // gives out no reference to its bytes, and no copy reads them: that takes the buffer by value, once all parts are gone.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.memory.memory.start().add(self.start), self.len) }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(context) = &self.pinned
            && context.bind().is_ok()
        {
            // SAFETY: locked in `pinned`; no copy is under way, as a copy owns its buffer.
            let _ = unsafe { sys::cuMemHostUnregister(self.memory.start().cast()) };
        }
    }
}
