//! Small pieces of page-locked memory that go to the device, or come from it, once a step.

use super::error::{Named, check_range};
use super::{CudaContext, CudaError, CudaStream, StagingBuffer};
use cudarc::driver::sys;
use std::sync::Arc;

/// Host memory that is written, sent, and written again once it has left.
#[derive(Debug)]
pub struct Outbox {
    buffer: StagingBuffer,
}

impl Outbox {
    /// Page-locked memory of `bytes` bytes.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { buffer: StagingBuffer::pinned(context, bytes)? })
    }

    /// The memory, after the last copy has left it.
    ///
    /// # Errors
    /// [`CudaError::Call`] where the device failed.
    pub fn bytes(&mut self) -> Result<&mut [u8], CudaError> {
        self.buffer.event.wait()?;
        Ok(self.buffer.as_mut())
    }

    /// Starts copying the first `len` bytes to the device's address `to`.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn send(&mut self, stream: &CudaStream, len: usize, to: u64) -> Result<(), CudaError> {
        check_range("send to the device", 0, len as u64, self.buffer.len() as u64)?;
        self.buffer.event.bind()?;
        // SAFETY: the range is checked; `bytes` and `drop` wait for the event before anyone writes or frees it. The address is
        // device memory of the caller.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, self.buffer.start().cast(), len, stream.stream) }
            .result()
            .named("cuMemcpyHtoDAsync")?;
        self.buffer.event.record(stream)
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        let _ = self.buffer.event.wait();
    }
}

/// Host memory that copies from the device arrive in.
#[derive(Debug)]
pub struct Inbox {
    buffer: StagingBuffer,
    arrived: usize,
}

impl Inbox {
    /// Page-locked memory of `bytes` bytes.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { buffer: StagingBuffer::pinned(context, bytes)?, arrived: 0 })
    }

    /// Bytes that fit.
    pub fn capacity(&self) -> usize {
        self.buffer.len()
    }

    /// Starts copying `len` bytes from the device's address `from`, in order of the stream.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn receive(&mut self, stream: &CudaStream, from: u64, len: usize) -> Result<(), CudaError> {
        check_range("receive from the device", 0, len as u64, self.buffer.len() as u64)?;
        self.buffer.event.wait()?;
        // SAFETY: the range is checked; `wait` and `drop` wait for the event before anyone reads or frees it. The address is
        // device memory of the caller.
        unsafe { sys::cuMemcpyDtoHAsync_v2(self.buffer.start().cast_mut().cast(), from, len, stream.stream) }
            .result()
            .named("cuMemcpyDtoHAsync")?;
        self.arrived = len;
        self.buffer.event.record(stream)
    }

    /// What arrived last, once it has.
    ///
    /// # Errors
    /// [`CudaError::Call`] where the device failed.
    pub fn wait(&mut self) -> Result<&[u8], CudaError> {
        self.buffer.event.wait()?;
        let arrived = self.arrived;
        Ok(&self.buffer.as_mut()[..arrived])
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        let _ = self.buffer.event.wait();
    }
}
