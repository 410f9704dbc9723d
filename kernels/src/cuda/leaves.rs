//! BLAKE3 of an image on the device: launches of `cuda/blake3.cu`.

use super::error::check_range;
use super::module::{Function, Module, arguments};
use super::stream::Event;
use super::{CudaContext, CudaError, CudaStream, DeviceMemory, StagingBuffer};
use std::sync::Arc;
use vt_bundle::hash::{Digest, LEAF_BYTES, leaf_count};

/// Threads per block, as in the source.
const THREADS: u32 = 256;
/// Shared memory of a block: 1024 chunk values, and two stages of 32 padded blocks for each of 8 warps.
const SHARED_BYTES: u32 = 1024 * 32 + 8 * 2 * 32 * 80;

/// Bytes that the kernel reads at once, at multiples of as many.
const LOAD_BYTES: u64 = 16;

/// Leaves of a message that lies in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeafRange {
    /// First byte of the message within the memory, a multiple of 16.
    pub start: u64,
    /// Bytes of the message.
    pub bytes: u64,
    /// Bytes after which the chunk counter starts again, rounded up to whole leaves: each segment is a file of its own.
    pub segment_bytes: u64,
    /// Index of the first leaf.
    pub first: u64,
    /// Leaves.
    pub count: u32,
}

/// The kernel and a stream for it.
#[derive(Debug)]
pub struct LeafHasher {
    stream: CudaStream,
    function: Function,
}

impl LeafHasher {
    /// Loads the kernel.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there is none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let stream = CudaStream::new(context)?;
        let function = Module::load(context, "blake3")?.function(c"vt_blake3_leaves", SHARED_BYTES)?;
        Ok(Self { stream, function })
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

    /// Starts hashing leaves of `memory`, after everything submitted to `after` so far. Leaf `i` gets entry `i` of `table`.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn hash(
        &self,
        memory: &Arc<DeviceMemory>,
        leaves: &LeafRange,
        table: &Arc<StagingBuffer>,
        after: Option<&CudaStream>,
    ) -> Result<PendingLeaves, CudaError> {
        let LeafRange { start, bytes, segment_bytes, first, count } = *leaves;
        check_range("hash", start, bytes, memory.len())?;
        check_range("hash leaves", first, u64::from(count), leaf_count(bytes))?;
        check_range("leaf values", first, u64::from(count), table.len() as u64 / 32)?;
        if !start.is_multiple_of(LOAD_BYTES) {
            return Err(CudaError::OutOfRange { what: "hash from an odd start", start, end: start, bytes });
        }
        if let Some(copies) = after {
            self.stream.wait_for(copies)?;
        }
        let event = Event::new(self.stream.context())?;
        let segment_leaves = segment_bytes.div_ceil(LEAF_BYTES).max(1);
        let data = memory.address() + start;
        let values = table.device_address()? + first * 32;
        // SAFETY: the arguments have the kernel's types in its order; the kernel reads inside `bytes` and writes `count`
        // entries, both checked; `PendingLeaves` keeps the memory until the kernel is done.
        unsafe {
            self.function.launch(
                &self.stream,
                [count, 1, 1],
                [THREADS, 1, 1],
                SHARED_BYTES,
                &mut arguments![data, bytes, first, segment_leaves, values],
            )
        }?;
        event.record(&self.stream)?;
        Ok(PendingLeaves { event, _memory: Arc::clone(memory), table: Arc::clone(table), first, count })
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
