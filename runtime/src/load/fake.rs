//! A device on host memory, for tests: late copies, faults on demand.

use super::{Accelerator, HostArena, Ledger, LoadError, Piece};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use vt_bundle::hash::{Digest, LEAF_BYTES, SEGMENT_BYTES, leaf_digest};
use vt_bundle::mmap::HugePages;
use vt_kernels::cuda::HostPlace;

/// Alignment of buffers, as page-locked memory has it.
const PAGE: usize = 4096;

/// What goes wrong.
#[derive(Clone, Debug)]
pub struct Faults {
    /// Bytes of memory that the device has.
    pub memory_bytes: u64,
    /// Allocations of at least this many bytes fail, whatever is free.
    pub allocation_fails_at: Option<u64>,
    /// One bit of this byte of the arena arrives flipped.
    pub flipped_byte: Option<u64>,
    /// Pinning fails once this many bytes are pinned.
    pub pinned_limit: Option<u64>,
    /// The device has no hash kernel.
    pub cannot_hash: bool,
    /// Copies that stay undone until someone waits for them, at most.
    pub lag: usize,
    /// No fault: the device reads host memory in place.
    pub shares_host_memory: bool,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            memory_bytes: 1 << 40,
            allocation_fails_at: None,
            flipped_byte: None,
            pinned_limit: None,
            cannot_hash: false,
            lag: 5,
            shares_host_memory: false,
        }
    }
}

/// The fake. Its copies and hashes are done in order by a thread of its own, as late as somebody lets it.
#[derive(Debug)]
pub struct FakeAccelerator {
    faults: Faults,
    ledger: Arc<Ledger>,
    space: Arc<Mutex<AddressSpace>>,
    pinned: Mutex<u64>,
    work: Arc<Work>,
    worker: Option<JoinHandle<()>>,
}

/// First-fit addresses, so that what is freed is used again at once, as real allocators do.
#[derive(Debug, Default)]
struct AddressSpace {
    /// Size by start of what is allocated.
    taken: BTreeMap<u64, u64>,
}

impl AddressSpace {
    fn take(&mut self, bytes: u64, capacity: u64) -> Option<u64> {
        let mut at = 256;
        for (&start, &size) in &self.taken {
            if start - at >= bytes {
                break;
            }
            at = (start + size).next_multiple_of(256);
        }
        let fits = at.checked_add(bytes).is_some_and(|end| end <= capacity.saturating_add(256));
        fits.then(|| self.taken.insert(at, bytes.max(1)));
        fits.then_some(at)
    }

    fn used(&self) -> u64 {
        self.taken.values().sum()
    }
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    submitted: u64,
    completed: u64,
    /// Jobs below this one are waited for.
    demanded: u64,
    closing: bool,
}

#[derive(Default)]
struct Work {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

impl Work {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(&self, job: Job) -> u64 {
        let mut queue = self.lock();
        queue.jobs.push_back(job);
        queue.submitted += 1;
        self.changed.notify_all();
        queue.submitted
    }

    fn wait(&self, number: u64) {
        let mut queue = self.lock();
        queue.demanded = queue.demanded.max(number);
        self.changed.notify_all();
        while queue.completed < number {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, lag: usize) {
        let mut queue = self.lock();
        loop {
            let due = queue.jobs.len() > lag || queue.demanded > queue.completed || queue.closing;
            match if due { queue.jobs.pop_front() } else { None } {
                Some(job) => {
                    drop(queue);
                    job();
                    queue = self.lock();
                    queue.completed += 1;
                    self.changed.notify_all();
                }
                None if queue.closing => return,
                None => queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl FakeAccelerator {
    /// A device that fails as told.
    ///
    /// # Panics
    /// If there is no thread to be had.
    pub fn new(faults: Faults) -> Self {
        let work = Arc::new(Work::default());
        let (shared, lag) = (Arc::clone(&work), faults.lag);
        let worker = std::thread::Builder::new().name("fake-device".to_owned()).spawn(move || shared.run(lag));
        let worker = Some(worker.expect("a test can start a thread"));
        let (ledger, space) = (Arc::new(Ledger::default()), Arc::default());
        Self { faults, ledger, space, pinned: Mutex::new(0), work, worker }
    }

    fn error(&self, reason: String) -> LoadError {
        LoadError::Device { device: self.name(), reason }
    }
}

impl Drop for FakeAccelerator {
    fn drop(&mut self) {
        self.work.lock().closing = true;
        self.work.changed.notify_all();
        if let Some(worker) = self.worker.take() {
            // A panic of the worker has been reported by whoever waited for it.
            let _ = worker.join();
        }
    }
}

/// The place of an allocation; given back when dropped.
#[derive(Debug)]
struct Place {
    address: u64,
    bytes: u64,
    space: Arc<Mutex<AddressSpace>>,
    ledger: Arc<Ledger>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.space.lock().unwrap_or_else(PoisonError::into_inner).taken.remove(&self.address);
        self.ledger.freed(self.bytes);
    }
}

/// Where the bytes of an allocation lie.
#[derive(Debug)]
enum Store {
    Own(Vec<u8>),
    Shared(HostPlace, u64),
}

impl Store {
    fn bytes(&self) -> &[u8] {
        match self {
            Store::Own(bytes) => bytes,
            Store::Shared(place, bytes) => &place.bytes()[..*bytes as usize],
        }
    }
}

/// Memory that is being filled.
#[derive(Debug)]
pub struct FakeMemory {
    bytes: Arc<Mutex<Store>>,
    place: Place,
}

/// A filled arena.
#[derive(Debug)]
pub struct FakeArena {
    bytes: Store,
    place: Place,
}

impl FakeArena {
    /// Address on the device. Freed addresses are given out again.
    pub fn address(&self) -> u64 {
        self.place.address
    }
}

impl HostArena for FakeArena {
    fn bytes(&self) -> &[u8] {
        self.bytes.bytes()
    }
}

/// A staging buffer.
#[derive(Debug)]
pub struct FakeBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AsMut<[u8]> for FakeBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

impl FakeBuffer {
    fn new(bytes: usize) -> Self {
        let memory = vec![0x5A; bytes + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        Self { bytes: memory, start, len: bytes }
    }
}

/// A part of a staging buffer, beside it until it is joined.
#[derive(Debug)]
pub struct FakePart {
    whole: Arc<Mutex<FakeBuffer>>,
    start: usize,
    filled: FakeBuffer,
}

impl AsMut<[u8]> for FakePart {
    fn as_mut(&mut self) -> &mut [u8] {
        self.filled.as_mut()
    }
}

/// Work of the fake's thread that leaves a value.
#[derive(Debug)]
pub struct FakePending<T> {
    number: u64,
    result: Arc<Mutex<Option<T>>>,
}

impl<T> FakePending<T> {
    fn take(self, work: &Work) -> Option<T> {
        work.wait(self.number);
        self.result.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Accelerator for FakeAccelerator {
    type Memory = FakeMemory;
    type Arena = FakeArena;
    type Buffer = FakeBuffer;
    type Part = FakePart;
    type Copy = FakePending<FakeBuffer>;
    type Hash = FakePending<Vec<Digest>>;

    fn name(&self) -> String {
        "fake:0".to_owned()
    }

    fn free_bytes(&self) -> Result<u64, LoadError> {
        let used = self.space.lock().unwrap_or_else(PoisonError::into_inner).used();
        Ok(self.faults.memory_bytes.saturating_sub(used))
    }

    fn allocate(&self, bytes: u64) -> Result<FakeMemory, LoadError> {
        if self.faults.allocation_fails_at.is_some_and(|limit| bytes >= limit) {
            return Err(self.error(format!("{bytes} bytes could not be allocated")));
        }
        let mut space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(address) = space.take(bytes, self.faults.memory_bytes) else {
            return Err(self.error(format!("{bytes} bytes could not be allocated")));
        };
        drop(space);
        self.ledger.allocated(bytes);
        let place = Place { address, bytes, space: Arc::clone(&self.space), ledger: Arc::clone(&self.ledger) };
        // Never zero: what is not written shows.
        Ok(FakeMemory { bytes: Arc::new(Mutex::new(Store::Own(vec![0xA5; bytes as usize]))), place })
    }

    fn shares_host_memory(&self) -> bool {
        self.faults.shares_host_memory
    }

    fn share(&self, mut host: HostPlace, bytes: u64) -> Result<FakeMemory, LoadError> {
        let len = host.bytes().len() as u64;
        if !self.faults.shares_host_memory || bytes > len {
            return Err(self.error(format!("{bytes} bytes of {len} bytes of host memory cannot be addressed")));
        }
        if let (Some(byte), HostPlace::Own(memory)) = (self.faults.flipped_byte, &mut host) {
            memory.bytes_mut()[byte as usize] ^= 0x10;
        }
        self.ledger.shared(bytes);
        let address = host.bytes().as_ptr() as u64;
        let place = Place { address, bytes, space: Arc::clone(&self.space), ledger: Arc::clone(&self.ledger) };
        Ok(FakeMemory { bytes: Arc::new(Mutex::new(Store::Shared(host, bytes))), place })
    }

    /// The fake touches nothing ahead.
    fn stock(&self, _: Vec<HugePages>) {}

    fn buffer(&self, bytes: usize, pinned: bool) -> Result<FakeBuffer, LoadError> {
        if pinned {
            let mut total = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
            if self.faults.pinned_limit.is_some_and(|limit| *total + bytes as u64 > limit) {
                return Err(self.error(format!("{bytes} bytes could not be pinned")));
            }
            *total += bytes as u64;
        }
        self.ledger.staged(bytes as u64, pinned);
        Ok(FakeBuffer::new(bytes))
    }

    fn split(&self, buffer: FakeBuffer, part_bytes: usize, count: usize) -> Vec<FakePart> {
        let len = buffer.len;
        let whole = Arc::new(Mutex::new(buffer));
        let part =
            |start| FakePart { whole: Arc::clone(&whole), start, filled: FakeBuffer::new(part_bytes.min(len - start)) };
        (0..len).step_by(part_bytes).take(count).map(part).collect()
    }

    fn join(&self, mut part: FakePart) -> Option<FakeBuffer> {
        let range = part.start..part.start + part.filled.len;
        let mut whole = part.whole.lock().unwrap_or_else(PoisonError::into_inner);
        whole.as_mut()[range].copy_from_slice(part.filled.as_mut());
        drop(whole);
        Arc::into_inner(part.whole).map(|whole| whole.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn copy(
        &self,
        mut source: FakeBuffer,
        pieces: &[Piece],
        to: &FakeMemory,
    ) -> Result<FakePending<FakeBuffer>, LoadError> {
        for piece in pieces {
            let end = piece.to as usize + piece.len;
            if end > to.place.bytes as usize || piece.from + piece.len > source.len {
                return Err(self.error(format!("a copy to {} to {end} of {} bytes", piece.to, to.place.bytes)));
            }
            self.ledger.copied(piece.len as u64);
        }
        let result = Arc::new(Mutex::new(None));
        let (memory, done, flipped) = (Arc::clone(&to.bytes), Arc::clone(&result), self.faults.flipped_byte);
        let pieces = pieces.to_vec();
        let number = self.work.submit(Box::new(move || {
            let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
            // Nothing is copied to an image that is shared.
            let Store::Own(memory) = &mut *memory else { return };
            for piece in pieces {
                let range = piece.to as usize..piece.to as usize + piece.len;
                memory[range.clone()].copy_from_slice(&source.as_mut()[piece.from..piece.from + piece.len]);
                if let Some(byte) = flipped.filter(|&b| range.contains(&(b as usize))) {
                    memory[byte as usize] ^= 0x10;
                }
            }
            *done.lock().unwrap_or_else(PoisonError::into_inner) = Some(source);
        }));
        Ok(FakePending { number, result })
    }

    fn wait(&self, copy: FakePending<FakeBuffer>) -> Result<FakeBuffer, LoadError> {
        self.ledger.waited();
        copy.take(&self.work).ok_or_else(|| self.error("a copy was lost".to_owned()))
    }

    fn can_hash(&self) -> Result<(), LoadError> {
        match self.faults.cannot_hash {
            true => Err(self.error("no kernel for this device".to_owned())),
            false => Ok(()),
        }
    }

    fn prepare_hash(&self, _: &FakeMemory) -> Result<(), LoadError> {
        self.can_hash()
    }

    fn hash(&self, memory: &FakeMemory, first: u64, count: u32) -> Result<FakePending<Vec<Digest>>, LoadError> {
        self.ledger.hashed(u64::from(count));
        let result = Arc::new(Mutex::new(None));
        let (bytes, done) = (Arc::clone(&memory.bytes), Arc::clone(&result));
        let number = self.work.submit(Box::new(move || {
            let bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
            let bytes = bytes.bytes();
            let total = bytes.len() as u64;
            let digest = |leaf: u64| {
                let start = leaf * LEAF_BYTES;
                let segment = start / SEGMENT_BYTES * SEGMENT_BYTES;
                let segment_bytes = SEGMENT_BYTES.min(total - segment);
                leaf_digest(
                    &bytes[start as usize..total.min(start + LEAF_BYTES) as usize],
                    start - segment,
                    segment_bytes,
                )
            };
            let digests = (first..first + u64::from(count)).map(digest).collect();
            *done.lock().unwrap_or_else(PoisonError::into_inner) = Some(digests);
        }));
        Ok(FakePending { number, result })
    }

    fn hash_message(&self, memory: &FakeMemory, start: u64, len: u64) -> Result<FakePending<Vec<Digest>>, LoadError> {
        self.ledger.hashed(len.div_ceil(LEAF_BYTES));
        let result = Arc::new(Mutex::new(None));
        let (bytes, done) = (Arc::clone(&memory.bytes), Arc::clone(&result));
        let number = self.work.submit(Box::new(move || {
            let bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
            let message = &bytes.bytes()[start as usize..(start + len) as usize];
            let leaves = (0..).step_by(LEAF_BYTES as usize).zip(message.chunks(LEAF_BYTES as usize));
            let digests = leaves.map(|(at, leaf)| leaf_digest(leaf, at, len)).collect();
            *done.lock().unwrap_or_else(PoisonError::into_inner) = Some(digests);
        }));
        Ok(FakePending { number, result })
    }

    fn hashed(&self, hash: FakePending<Vec<Digest>>) -> Result<Vec<Digest>, LoadError> {
        hash.take(&self.work).ok_or_else(|| self.error("a hash was lost".to_owned()))
    }

    fn seal(&self, memory: FakeMemory) -> Result<FakeArena, LoadError> {
        let submitted = self.work.lock().submitted;
        self.work.wait(submitted);
        let FakeMemory { bytes, place } = memory;
        let mut bytes = bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = std::mem::replace(&mut *bytes, Store::Own(Vec::new()));
        Ok(FakeArena { bytes, place })
    }

    fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }
}
