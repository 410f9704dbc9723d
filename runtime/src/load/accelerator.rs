//! The memory operations of a device that images are uploaded to.
//!
//! [`super::upload`] is written against this trait, so that everything that it promises about residency is tested on a fake
//! ([`super::FakeAccelerator`]) and holds on CUDA. Ownership is the protocol: a copy takes its buffer by value and
//! gives it back when it is over, so that a buffer cannot be written, and memory cannot be freed, under a copy.

use super::{Ledger, LoadError};
use std::sync::Arc;
use vt_bundle::hash::Digest;
use vt_bundle::mmap::HugePages;
use vt_kernels::cuda::HostPlace;

/// Bytes of a staging buffer and their place on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte within the buffer.
    pub from: usize,
    /// Bytes.
    pub len: usize,
    /// First byte within the device's memory.
    pub to: u64,
}

/// A device with memory of its own, asynchronous copies and, as an operation of its own, BLAKE3 of what has arrived.
pub trait Accelerator: Send + Sync {
    /// Memory that is being filled.
    type Memory: Send + Sync;
    /// The same memory, filled. Dropping it frees.
    type Arena: Send + Sync;
    /// Host memory that copies start from, page-aligned.
    type Buffer: AsMut<[u8]> + Send;
    /// Part of a buffer, page-aligned where its size is, that one thread fills while others fill the rest.
    type Part: AsMut<[u8]> + Send;
    /// A copy that may be under way.
    type Copy: Send;
    /// A hash that may be under way.
    type Hash: Send;

    /// Name as on the command line (`cuda:0`).
    fn name(&self) -> String;

    /// Bytes that can be allocated now.
    ///
    /// # Errors
    /// [`LoadError::Device`].
    fn free_bytes(&self) -> Result<u64, LoadError>;

    /// Allocates the arena. 256-aligned, not initialised.
    ///
    /// # Errors
    /// [`LoadError::Device`] where there is not enough memory.
    fn allocate(&self, bytes: u64) -> Result<Self::Memory, LoadError>;

    /// Whether the device reads host memory as fast as any, so that an image need not be copied (Jetson, GB10, GH200).
    fn shares_host_memory(&self) -> bool;

    /// Takes host memory as the memory of an image of `bytes` bytes. 256-aligned.
    ///
    /// # Errors
    /// [`LoadError::Device`] where the device cannot address it.
    fn share(&self, place: HostPlace, bytes: u64) -> Result<Self::Memory, LoadError>;

    /// Takes memory that has been touched for buffers that are asked for later: touching takes longer than anything else of
    /// making one, and needs no device.
    fn stock(&self, memory: Vec<HugePages>);

    /// Host memory for copies: page-locked, or ordinary where pinning has failed.
    ///
    /// # Errors
    /// [`LoadError::Device`].
    fn buffer(&self, bytes: usize, pinned: bool) -> Result<Self::Buffer, LoadError>;

    /// The first `count` parts of a buffer, of `part_bytes` bytes each.
    fn split(&self, buffer: Self::Buffer, part_bytes: usize, count: usize) -> Vec<Self::Part>;

    /// Takes a part that has been filled; with the last one the buffer returns.
    fn join(&self, part: Self::Part) -> Option<Self::Buffer>;

    /// Starts copying pieces of `source`. Copies are done in the order of the calls.
    ///
    /// # Errors
    /// [`LoadError::Device`].
    fn copy(&self, source: Self::Buffer, pieces: &[Piece], to: &Self::Memory) -> Result<Self::Copy, LoadError>;

    /// Waits for a copy and gives its buffer back.
    ///
    /// # Errors
    /// [`LoadError::Device`].
    fn wait(&self, copy: Self::Copy) -> Result<Self::Buffer, LoadError>;

    /// Whether the device has a hash kernel.
    ///
    /// # Errors
    /// [`LoadError::Device`] where it has none; the host does it then.
    fn can_hash(&self) -> Result<(), LoadError>;

    /// Gets ready to hash the image that fills `memory`, in segments of [`vt_bundle::hash::SEGMENT_BYTES`].
    ///
    /// # Errors
    /// [`LoadError::Device`] where the device cannot hash; the host does it then.
    fn prepare_hash(&self, memory: &Self::Memory) -> Result<(), LoadError>;

    /// Starts hashing leaves `first .. first + count` of the image, after every copy submitted so far.
    ///
    /// # Errors
    /// [`LoadError::Device`].
    fn hash(&self, memory: &Self::Memory, first: u64, count: u32) -> Result<Self::Hash, LoadError>;

    /// Starts hashing the leaves of a message of its own within the image: `bytes` bytes from `start`, a multiple of 16.
    ///
    /// # Errors
    /// [`LoadError::Device`].
    fn hash_message(&self, memory: &Self::Memory, start: u64, bytes: u64) -> Result<Self::Hash, LoadError>;

    /// Waits for leaf values.
    ///
    /// # Errors
    /// [`LoadError::Device`].
    fn hashed(&self, hash: Self::Hash) -> Result<Vec<Digest>, LoadError>;

    /// Waits for all work and hands the memory over.
    ///
    /// # Errors
    /// [`LoadError::Device`].
    fn seal(&self, memory: Self::Memory) -> Result<Self::Arena, LoadError>;

    /// What has been allocated, copied and freed so far.
    fn ledger(&self) -> &Arc<Ledger>;
}
