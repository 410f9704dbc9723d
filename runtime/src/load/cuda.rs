//! CUDA devices.

use super::{Accelerator, Ledger, LoadError, Piece};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use vt_bundle::hash::{Digest, LEAF_BYTES, SEGMENT_BYTES, leaf_count};
use vt_bundle::mmap::HugePages;
use vt_kernels::cuda::{
    CudaContext, CudaError, CudaStream, DeviceMemory, HostPlace, LeafHasher, LeafRange, PendingLeaves, PendingUpload,
    StagingBuffer, StagingPart, UploadRange,
};

/// One CUDA device as this process uses it: a stream for copies, one for hashing.
#[derive(Debug)]
pub struct CudaAccelerator {
    context: Arc<CudaContext>,
    copies: CudaStream,
    hasher: OnceLock<LeafHasher>,
    ledger: Arc<Ledger>,
    shares_host_memory: bool,
    /// Touched memory for the next buffers.
    stock: Mutex<Vec<HugePages>>,
}

impl CudaAccelerator {
    /// Opens the device of that index.
    ///
    /// # Errors
    /// [`LoadError::Device`] with the reason and what to do.
    pub fn new(index: u32) -> Result<Self, LoadError> {
        let failed =
            |error: CudaError| LoadError::Device { device: format!("cuda:{index}"), reason: error.to_string() };
        let context = CudaContext::new(index).map_err(failed)?;
        let copies = CudaStream::new(&context).map_err(failed)?;
        let (hasher, ledger) = (OnceLock::new(), Arc::new(Ledger::default()));
        let shares_host_memory = context.attributes().host_addressable();
        Ok(Self { context, copies, hasher, ledger, shares_host_memory, stock: Mutex::default() })
    }

    /// The same device as if it shared the host's memory, or did not. A card behind PCIe then reads page-locked host memory
    /// through the link: slow, but the same bytes by the same code.
    #[must_use]
    pub fn sharing_host_memory(self, shares_host_memory: bool) -> Self {
        Self { shares_host_memory, ..self }
    }

    /// The device's context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Bytes of touched memory that no buffer has been made of yet.
    pub fn stocked_bytes(&self) -> u64 {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|memory| memory.len() as u64).sum()
    }

    fn failed(&self, error: CudaError) -> LoadError {
        LoadError::Device { device: self.name(), reason: error.to_string() }
    }

    fn hasher(&self) -> Result<&LeafHasher, LoadError> {
        if let Some(hasher) = self.hasher.get() {
            return Ok(hasher);
        }
        let hasher = LeafHasher::new(&self.context).map_err(|e| self.failed(e))?;
        Ok(self.hasher.get_or_init(|| hasher))
    }
}

/// Device memory of one image; the ledger hears of its end.
#[derive(Debug)]
pub struct CudaArena {
    memory: Arc<DeviceMemory>,
    values: OnceLock<Arc<StagingBuffer>>,
    ledger: Arc<Ledger>,
}

impl CudaArena {
    /// The allocation.
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }
}

impl Drop for CudaArena {
    fn drop(&mut self) {
        self.ledger.freed(self.memory.len());
    }
}

impl Accelerator for CudaAccelerator {
    type Memory = CudaArena;
    type Arena = CudaArena;
    type Buffer = StagingBuffer;
    type Part = StagingPart;
    type Copy = PendingUpload;
    type Hash = PendingLeaves;

    fn name(&self) -> String {
        format!("cuda:{}", self.context.index())
    }

    fn free_bytes(&self) -> Result<u64, LoadError> {
        Ok(self.context.memory().map_err(|e| self.failed(e))?.free)
    }

    fn allocate(&self, bytes: u64) -> Result<CudaArena, LoadError> {
        let memory = DeviceMemory::new(&self.context, bytes, "device memory for the image");
        let memory = Arc::new(memory.map_err(|e| self.failed(e))?);
        self.ledger.allocated(bytes);
        Ok(CudaArena { memory, values: OnceLock::new(), ledger: Arc::clone(&self.ledger) })
    }

    fn shares_host_memory(&self) -> bool {
        self.shares_host_memory
    }

    fn share(&self, place: HostPlace, bytes: u64) -> Result<CudaArena, LoadError> {
        let memory = DeviceMemory::shared(&self.context, place, bytes).map_err(|e| self.failed(e))?;
        self.ledger.shared(bytes);
        Ok(CudaArena { memory: Arc::new(memory), values: OnceLock::new(), ledger: Arc::clone(&self.ledger) })
    }

    fn stock(&self, memory: Vec<HugePages>) {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner).extend(memory);
    }

    fn buffer(&self, bytes: usize, pinned: bool) -> Result<StagingBuffer, LoadError> {
        let stocked = || self.stock.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let buffer = match if pinned { stocked().filter(|memory| memory.len() >= bytes) } else { None } {
            Some(memory) => StagingBuffer::lock(&self.context, memory, bytes),
            None if pinned => StagingBuffer::pinned(&self.context, bytes),
            None => StagingBuffer::pageable(&self.context, bytes),
        };
        let buffer = buffer.map_err(|e| self.failed(e))?;
        self.ledger.staged(bytes as u64, pinned);
        Ok(buffer)
    }

    fn split(&self, buffer: StagingBuffer, part_bytes: usize, count: usize) -> Vec<StagingPart> {
        buffer.split(part_bytes, count)
    }

    fn join(&self, part: StagingPart) -> Option<StagingBuffer> {
        part.join()
    }

    fn copy(&self, source: StagingBuffer, pieces: &[Piece], to: &CudaArena) -> Result<PendingUpload, LoadError> {
        let ranges: Vec<UploadRange> =
            pieces.iter().map(|p| UploadRange { from: p.from, len: p.len, to: p.to }).collect();
        let copy = self.copies.upload(source, &ranges, &to.memory).map_err(|e| self.failed(e))?;
        pieces.iter().for_each(|piece| self.ledger.copied(piece.len as u64));
        Ok(copy)
    }

    fn wait(&self, copy: PendingUpload) -> Result<StagingBuffer, LoadError> {
        self.ledger.waited();
        copy.wait().map_err(|e| self.failed(e))
    }

    fn can_hash(&self) -> Result<(), LoadError> {
        self.hasher().map(|_| ())
    }

    fn prepare_hash(&self, memory: &CudaArena) -> Result<(), LoadError> {
        let hasher = self.hasher()?;
        if memory.values.get().is_none() {
            let table = hasher.table(leaf_count(memory.memory.len())).map_err(|e| self.failed(e))?;
            memory.values.get_or_init(|| table);
        }
        Ok(())
    }

    fn hash(&self, memory: &CudaArena, first: u64, count: u32) -> Result<PendingLeaves, LoadError> {
        self.prepare_hash(memory)?;
        let (hasher, values) = (self.hasher()?, &memory.values);
        let Some(values) = values.get() else {
            return Err(LoadError::Device { device: self.name(), reason: "no table for leaf values".to_owned() });
        };
        let leaves = LeafRange { start: 0, bytes: memory.memory.len(), segment_bytes: SEGMENT_BYTES, first, count };
        let hash = hasher.hash(&memory.memory, &leaves, values, Some(&self.copies)).map_err(|e| self.failed(e))?;
        self.ledger.hashed(u64::from(count));
        Ok(hash)
    }

    fn hash_message(&self, memory: &CudaArena, start: u64, bytes: u64) -> Result<PendingLeaves, LoadError> {
        let hasher = self.hasher()?;
        let count = u32::try_from(leaf_count(bytes)).map_err(|_| LoadError::Device {
            device: self.name(),
            reason: format!("a message of {bytes} bytes has too many leaves for one launch"),
        })?;
        let values = hasher.table(u64::from(count)).map_err(|e| self.failed(e))?;
        let leaves = LeafRange { start, bytes, segment_bytes: bytes, first: 0, count };
        let hash = hasher.hash(&memory.memory, &leaves, &values, Some(&self.copies)).map_err(|e| self.failed(e))?;
        self.ledger.hashed(u64::from(count));
        Ok(hash)
    }

    fn hashed(&self, hash: PendingLeaves) -> Result<Vec<Digest>, LoadError> {
        hash.wait().map_err(|e| self.failed(e))
    }

    fn seal(&self, memory: CudaArena) -> Result<CudaArena, LoadError> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.copies.synchronize().map_err(|e| self.failed(e))?;
        Ok(memory)
    }

    fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }
}

const _: () = assert!(SEGMENT_BYTES.is_multiple_of(LEAF_BYTES));
