//! One pass from the files of a bundle to the arena of a device, verified on arrival.
//!
//! Several readers fill a staging buffer together, and the last of them starts its copy, in whatever order they get done; once all copies of a group of chunks are
//! submitted, the device hashes the group's leaves behind them while the next chunks arrive. Only the 32-byte chaining
//! values come back, and are compared with the manifest's. Nothing is resident on the host but the ring.
//!
//! ```text
//! files --(readers: pread | O_DIRECT | mapping)--> ring --(copy engine)--> arena --(hash kernel)--> values == manifest
//! ```

mod chunks;
mod clock;
mod expert;
mod in_place;
mod options;
mod ring;
mod shard;
mod share;
mod source;

pub use clock::Timeline;
pub use expert::verify_expert;
pub use in_place::Probe;
pub use options::{IoMode, Residency, UploadOptions, default_readers};
pub use shard::load_shard;
pub use share::Share;
pub use source::Source;

use super::{Accelerator, LoadError, LoadReport, Piece, Resident, Verify};
use chunks::{Chunk, chunks};
use clock::Clock;
use ring::Ring;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use vt_bundle::Bundle;
use vt_bundle::hash::{Digest, LEAF_BYTES, leaf_count, leaf_digest};
use vt_bundle::manifest::Placement;

/// Bytes that one launch hashes: enough blocks to keep up with any link, small enough that little remains at the end.
const GROUP_BYTES: u64 = 32 << 20;

/// Makes the image of `bundle` resident on `accelerator`.
///
/// # Errors
/// [`LoadError`]; everything that had been allocated is freed.
pub fn load_image<A: Accelerator>(
    accelerator: &A,
    bundle: &Bundle,
    verify: Verify,
    options: &UploadOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Resident<A::Arena>, LoadError> {
    let options = options.checked();
    if accelerator.shares_host_memory() && options.residency != Residency::Copied {
        return in_place::load_in_place(accelerator, bundle, verify, &options, progress);
    }
    let mut report = LoadReport::new(accelerator.name());
    let bytes = bundle.space(Placement::Image).size;
    let source = report.phase("open-image", || Source::open(bundle, options.io, options.drop_cache))?;
    report.notes.extend(source.note().map(str::to_owned));
    report.io = source.mode().name();
    let free = accelerator.free_bytes()?;
    if bytes > free {
        let advice = format!("the image does not fit into the free memory of {}", accelerator.name());
        return Err(LoadError::DoesNotFit { needed: bytes, available: free, advice });
    }
    let ring = Ring::new(accelerator, options.chunk_bytes as usize, options.buffers(bytes));
    // Buffers are page-locked while everything else gets ready.
    let (memory, timeline) = std::thread::scope(|scope| {
        scope.spawn(|| {
            if let Err(error) = ring.prepare() {
                ring.fail(error);
            }
        });
        let result = load_copied(accelerator, bundle, verify, &options, &source, &ring, &mut report, progress);
        // Where this has failed nobody needs buffers any more.
        ring.close();
        result
    })?;
    let warning = report.phase("release-staging", || ring.finish())?;
    report.notes.extend(warning);
    report.timeline = Some(timeline);
    let arena = report.phase("seal", || accelerator.seal(memory))?;
    report.ledger = Some(accelerator.ledger().totals());
    Ok(Resident { arena, report })
}

/// Allocates the arena and fills it through the ring.
#[expect(clippy::too_many_arguments, reason = "the second half of `load_image`, with what the first half made")]
fn load_copied<A: Accelerator>(
    accelerator: &A,
    bundle: &Bundle,
    verify: Verify,
    options: &UploadOptions,
    source: &Source,
    ring: &Ring<'_, A>,
    report: &mut LoadReport,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(A::Memory, Timeline), LoadError> {
    let bytes = source.len();
    let leaves = match verify {
        Verify::Off => None,
        Verify::Device | Verify::Host => Some(report.phase("leaf-table", || bundle.leaves())?.image),
    };
    let memory = report.phase("allocate", || accelerator.allocate(bytes))?;
    let mut verify = verify;
    if verify == Verify::Device
        && let Err(error) = report.phase("prepare-hash", || accelerator.prepare_hash(&memory))
    {
        report.notes.push(format!("{error}; the image is checked on the host"));
        verify = Verify::Host;
    }
    report.verify = verify;
    let group_bytes = GROUP_BYTES.max(options.chunk_bytes);
    let upload = Upload {
        accelerator,
        bundle,
        verify,
        source,
        leaves: leaves.as_deref().unwrap_or(&[]),
        memory: &memory,
        part_bytes: options.part_bytes,
        ring,
        open: Mutex::new(Open {
            chunks: chunks(bytes, options.chunk_bytes).into_iter(),
            parts: Vec::new().into_iter(),
        }),
        group_bytes,
        groups: (0..bytes.div_ceil(group_bytes))
            .map(|group| AtomicU64::new(group_bytes.min(bytes - group * group_bytes)))
            .collect(),
        clock: Clock::start(),
        progress,
    };
    let timeline = upload.run(options.readers)?;
    report.uploaded(timeline.arrived, bytes);
    Ok((memory, timeline))
}

/// Checks a resident image against the manifest once more, on the device.
///
/// # Errors
/// [`vt_bundle::BundleError::Leaf`] for the first corrupt leaf.
pub fn verify_resident<A: Accelerator>(
    accelerator: &A,
    bundle: &Bundle,
    leaves: &[Digest],
    memory: &A::Memory,
) -> Result<(), LoadError> {
    let bytes = bundle.space(Placement::Image).size;
    accelerator.prepare_hash(memory)?;
    let count = u32::try_from(leaf_count(bytes)).map_err(|_| LoadError::Device {
        device: accelerator.name(),
        reason: format!("an image of {bytes} bytes has too many leaves for one launch"),
    })?;
    let found = accelerator.hashed(accelerator.hash(memory, 0, count)?)?;
    compare(bundle, leaves, 0, &found)
}

fn compare(bundle: &Bundle, leaves: &[Digest], first: u64, found: &[Digest]) -> Result<(), LoadError> {
    let expected = &leaves[first as usize..first as usize + found.len()];
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        None => Ok(()),
        Some(i) => Err(bundle.leaf_error(Placement::Image, first + i as u64, &found[i], &expected[i]).into()),
    }
}

/// One upload, shared by its threads.
struct Upload<'a, A: Accelerator> {
    accelerator: &'a A,
    bundle: &'a Bundle,
    verify: Verify,
    source: &'a Source,
    leaves: &'a [Digest],
    memory: &'a A::Memory,
    part_bytes: u64,
    ring: &'a Ring<'a, A>,
    open: Mutex<Open<A::Part>>,
    /// Bytes that are hashed at once: whole chunks.
    group_bytes: u64,
    /// Bytes of each group whose copies have not been submitted.
    groups: Vec<AtomicU64>,
    clock: Clock,
    progress: &'a (dyn Fn(u64) + Sync),
}

/// The chunk that is being handed out to readers.
struct Open<P> {
    /// Chunks that nobody reads yet.
    chunks: std::vec::IntoIter<Chunk>,
    /// Parts of the chunk handed out last that nobody reads yet.
    parts: std::vec::IntoIter<Part<P>>,
}

/// What one reader reads at once.
struct Part<P> {
    chunk: Chunk,
    room: P,
    offset: u64,
    len: u64,
}

impl<A: Accelerator> Upload<'_, A> {
    fn run(self, readers: usize) -> Result<Timeline, LoadError> {
        let (sender, receiver) = channel();
        std::thread::scope(|scope| {
            for _ in 0..readers {
                let sender = sender.clone();
                let upload = &self;
                scope.spawn(move || {
                    if let Err(error) = upload.read(&sender) {
                        upload.ring.fail(error);
                    }
                });
            }
            drop(sender);
            self.check(&receiver);
        });
        if let Some(error) = self.ring.failure() {
            return Err(error);
        }
        self.ring.drain()?;
        Ok(self.clock.arrived())
    }

    /// What one reader does until nothing is left.
    fn read(&self, hashes: &Sender<(u64, A::Hash)>) -> Result<(), LoadError> {
        while let Some(part) = self.clock.waiting(|| self.take())? {
            let Part { chunk, mut room, offset, len } = part;
            self.clock.reading(|| self.fill(room.as_mut(), offset, len))?;
            self.clock.read();
            (self.progress)(len);
            // Whoever reads the last part starts the copy.
            if let Some(buffer) = self.accelerator.join(room) {
                let piece = Piece { from: 0, len: chunk.len as usize, to: chunk.offset };
                self.ring.busy(self.accelerator.copy(buffer, &[piece], self.memory)?);
                self.clock.copied();
                if self.verify == Verify::Device {
                    self.submitted(chunk, hashes)?;
                }
            }
        }
        Ok(())
    }

    /// The next part to read. Where no buffer is free, one reader waits for the oldest copy and the others for that reader.
    fn take(&self) -> Result<Option<Part<A::Part>>, LoadError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(part) = open.parts.next() {
            return Ok(Some(part));
        }
        let Some(chunk) = open.chunks.next() else { return Ok(None) };
        let Some(buffer) = self.ring.acquire()? else { return Ok(None) };
        let count = chunk.len.div_ceil(self.part_bytes) as usize;
        let rooms = self.accelerator.split(buffer, self.part_bytes as usize, count);
        let part = |(at, room): (u64, A::Part)| {
            let from = at * self.part_bytes;
            Part { chunk, room, offset: chunk.offset + from, len: self.part_bytes.min(chunk.len - from) }
        };
        open.parts = (0..).zip(rooms).map(part).collect::<Vec<_>>().into_iter();
        Ok(open.parts.next())
    }

    /// Fills a part of a buffer and, where the host checks, checks it.
    fn fill(&self, room: &mut [u8], offset: u64, len: u64) -> Result<(), LoadError> {
        self.source.read(offset, len as usize, room)?;
        if self.verify == Verify::Host {
            let first = offset / LEAF_BYTES;
            let segment_bytes = self.bundle.segment_bytes(Placement::Image, first);
            for (i, leaf) in room[..len as usize].chunks(LEAF_BYTES as usize).enumerate() {
                let at = offset % vt_bundle::hash::SEGMENT_BYTES + i as u64 * LEAF_BYTES;
                let found = leaf_digest(leaf, at, segment_bytes);
                compare(self.bundle, self.leaves, first + i as u64, &[found])?;
            }
        }
        Ok(())
    }

    /// Counts a chunk of its group, and starts the group's hash with the last one.
    fn submitted(&self, chunk: Chunk, hashes: &Sender<(u64, A::Hash)>) -> Result<(), LoadError> {
        let group = chunk.offset / self.group_bytes;
        if self.groups[group as usize].fetch_sub(chunk.len, Ordering::AcqRel) == chunk.len {
            let start = group * self.group_bytes;
            let first = start / LEAF_BYTES;
            let len = self.group_bytes.min(self.source.len() - start);
            // A group has a segment's leaves at most.
            let hash = self.accelerator.hash(self.memory, first, leaf_count(len) as u32)?;
            // Where nobody listens any more the load has failed already.
            let _ = hashes.send((first, hash));
        }
        Ok(())
    }

    /// Compares values as they come back.
    fn check(&self, hashes: &Receiver<(u64, A::Hash)>) {
        for (first, hash) in hashes {
            let found = self.accelerator.hashed(hash);
            let checked = found.and_then(|found| compare(self.bundle, self.leaves, first, &found));
            if let Err(error) = checked {
                self.ring.fail(error);
            }
        }
    }
}
