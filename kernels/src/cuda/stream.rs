//! Streams: work in order, and copies that own what they read.

use super::error::{Named, check_range};
use super::{CudaContext, CudaError, DeviceMemory, StagingBuffer};
use cudarc::driver::{result, sys};
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// A point in a stream that can be waited for.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<CudaContext>,
    event: sys::CUevent,
}

// SAFETY: events may be used from any thread; the driver locks inside.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        Self::create(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// One that also knows when the stream came by.
    pub(super) fn with_time(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        Self::create(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn create(context: &Arc<CudaContext>, flags: sys::CUevent_flags) -> Result<Self, CudaError> {
        context.bind()?;
        let event = result::event::create(flags).named("cuEventCreate")?;
        Ok(Self { context: Arc::clone(context), event })
    }

    pub(super) fn raw(&self) -> sys::CUevent {
        self.event
    }

    pub(super) fn record(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: event and stream are alive and of one context.
        unsafe { result::event::record(self.event, stream.stream) }.named("cuEventRecord")
    }

    pub(super) fn bind(&self) -> Result<(), CudaError> {
        self.context.bind()
    }

    /// Waits on the host. At once where nothing was recorded.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.event) }.named("cuEventSynchronize")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`; the driver keeps what work under way still needs.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

/// Work that is done in order.
#[derive(Debug)]
pub struct CudaStream {
    context: Arc<CudaContext>,
    pub(super) stream: sys::CUstream,
}

// SAFETY: streams may be used from any thread; the driver locks inside.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// A stream that does not wait for the default stream.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        context.bind()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).named("cuStreamCreate")?;
        Ok(Self { context: Arc::clone(context), stream })
    }

    /// The device's context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Waits on the host until everything submitted so far is done.
    ///
    /// # Errors
    /// [`CudaError::Call`], also of work submitted earlier.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.stream) }.named("cuStreamSynchronize")
    }

    /// Makes later work of this stream wait for what has been submitted to `other` so far.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn wait_for(&self, other: &CudaStream) -> Result<(), CudaError> {
        let event = Event::new(&self.context)?;
        event.record(other)?;
        // SAFETY: both are alive; the driver keeps the event until the wait is over.
        unsafe { result::stream::wait_event(self.stream, event.event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .named("cuStreamWaitEvent")
    }

    /// Starts copying ranges of `source`.
    ///
    /// The copy owns both sides until [`PendingUpload::wait`] gives the buffer back.
    ///
    /// # Errors
    /// [`CudaError`]; the buffer is gone then.
    pub fn upload(
        &self,
        source: StagingBuffer,
        ranges: &[UploadRange],
        target: &Arc<DeviceMemory>,
    ) -> Result<PendingUpload, CudaError> {
        for &UploadRange { from, len, to } in ranges {
            check_range("copy from a staging buffer", from as u64, len as u64, source.len() as u64)?;
            check_range("copy to the device", to, len as u64, target.len())?;
        }
        self.context.bind()?;
        // From here on the buffer is only dropped after the copy.
        let pending = PendingUpload { buffer: ManuallyDrop::new(source), target: Arc::clone(target) };
        let start = pending.buffer.start();
        let mut result = Ok(());
        for &UploadRange { from, len, to } in ranges {
            // SAFETY: both ranges are checked, and `pending` keeps them alive and unchanged until the event has passed.
            let started = unsafe {
                sys::cuMemcpyHtoDAsync_v2(target.address() + to, start.add(from).cast(), len, self.stream).result()
            };
            result = result.and(started.named("cuMemcpyHtoDAsync"));
        }
        // Also after a failure: earlier ranges are under way, and dropping `pending` waits for the event.
        pending.buffer.event.record(self)?;
        result.map(|()| pending)
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`; submitted work is completed by the driver, and owns what it uses.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
    }
}

/// Bytes of a staging buffer and their place on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadRange {
    /// First byte within the buffer.
    pub from: usize,
    /// Bytes.
    pub len: usize,
    /// First byte within the device's memory.
    pub to: u64,
}

/// A copy that may still be under way.
#[derive(Debug)]
pub struct PendingUpload {
    buffer: ManuallyDrop<StagingBuffer>,
    target: Arc<DeviceMemory>,
}

impl PendingUpload {
    /// Waits for the copy and gives the buffer back.
    ///
    /// # Errors
    /// [`CudaError::Call`] where the device failed.
    pub fn wait(mut self) -> Result<StagingBuffer, CudaError> {
        self.buffer.event.wait()?;
        // SAFETY: taken once: `self` is forgotten in the next line and its other field is dropped by hand.
        let buffer = unsafe { ManuallyDrop::take(&mut self.buffer) };
        // SAFETY: the field is valid, and `forget` keeps it from being dropped again.
        drop(unsafe { std::ptr::read(&self.target) });
        std::mem::forget(self);
        Ok(buffer)
    }
}

impl Drop for PendingUpload {
    fn drop(&mut self) {
        // Where even waiting fails the device is gone; the memory then is leaked rather than freed under a copy.
        if self.buffer.event.wait().is_ok() {
            // SAFETY: dropped once; the copy is over.
            unsafe { ManuallyDrop::drop(&mut self.buffer) };
        }
    }
}
