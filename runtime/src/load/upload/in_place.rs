//! Images for devices that share the host's memory: no byte is copied twice.
//!
//! Either the mapped files are the arena, or they are read once, past the page cache, into memory that is. The first costs
//! nothing where the files are in the page cache; the second reads faster where they are not, and leaves huge pages. Which
//! one it is a probe of the files decides, and the report says.

use super::{IoMode, Residency, Source, UploadOptions, compare};
use crate::load::{Accelerator, LoadError, LoadReport, Resident, Verify};
use crate::stats::human_bytes;
use serde::Serialize;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use vt_bundle::Bundle;
use vt_bundle::hash::{Digest, LEAF_BYTES, SEGMENT_BYTES, leaf_count, leaf_digest};
use vt_bundle::manifest::Placement;
use vt_bundle::mmap::{ContiguousMap, HugePages};
use vt_kernels::cuda::HostPlace;

/// Chunks that the probe reads each way, spread over the image.
const PROBE_CHUNKS: u64 = 16;
/// Bytes that one launch hashes.
const GROUP_BYTES: u64 = 256 << 20;
/// Memory for direct reads is a multiple of this.
const PAGE: u64 = 4096;

/// Rates at which the files became resident, of a sample each, in bytes a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Probe {
    /// Bytes of each sample.
    pub bytes: u64,
    /// As pages of a mapping.
    pub aliased_rate: f64,
    /// Read into memory.
    pub placed_rate: f64,
}

impl Probe {
    /// The faster way.
    pub fn faster(&self) -> Residency {
        if self.aliased_rate >= self.placed_rate { Residency::Aliased } else { Residency::Placed }
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (aliased, placed) = (self.aliased_rate / 1e9, self.placed_rate / 1e9);
        let (bytes, faster) = (human_bytes(self.bytes), self.faster().name());
        write!(f, "probe of {bytes} each way: mapped {aliased:.2} GB/s, read {placed:.2} GB/s: {faster}")
    }
}

/// Makes the image of `bundle` resident in memory that `accelerator` shares with the host.
///
/// # Errors
/// [`LoadError`]; everything that had been allocated is freed.
pub(super) fn load_in_place<A: Accelerator>(
    accelerator: &A,
    bundle: &Bundle,
    verify: Verify,
    options: &UploadOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Resident<A::Arena>, LoadError> {
    let mut report = LoadReport::new(accelerator.name());
    let bytes = bundle.space(Placement::Image).size;
    let mut verify = verify;
    if verify == Verify::Device
        && let Err(error) = report.phase("prepare-hash", || accelerator.can_hash())
    {
        report.notes.push(format!("{error}; the image is checked on the host"));
        verify = Verify::Host;
    }
    report.verify = verify;
    let leaves = match verify {
        Verify::Off => None,
        Verify::Device | Verify::Host => Some(report.phase("leaf-table", || bundle.leaves())?.image),
    };
    let (map, source) = report.phase("open-image", || {
        // A file that is read into its final place gains nothing from the page cache.
        let io = if options.io == IoMode::Auto { IoMode::Direct } else { options.io };
        Ok::<_, LoadError>((bundle.map(Placement::Image)?, Source::open(bundle, io, options.drop_cache)?))
    })?;
    let filling = Filling {
        bundle,
        source: &source,
        leaves: leaves.as_deref().filter(|_| verify == Verify::Host),
        options,
        bytes,
        progress,
    };
    report.residency = match options.residency {
        Residency::Auto => {
            report.probe = report.phase("probe", || filling.probe(&map))?;
            report.probe.map_or(Residency::Aliased, |probe| probe.faster())
        }
        asked => asked,
    };
    let start = Instant::now();
    let place = if report.residency == Residency::Placed {
        report.io = source.mode().name();
        report.notes.extend(source.note().map(str::to_owned));
        drop(map);
        HostPlace::Own(filling.place(accelerator)?)
    } else {
        filling.alias(&map)?;
        HostPlace::Mapped(map)
    };
    report.moved("fill", start.elapsed().as_secs_f64(), bytes);
    let memory = report.phase("share", || accelerator.share(place, bytes))?;
    if let (Verify::Device, Some(leaves)) = (verify, &leaves) {
        let start = Instant::now();
        check(accelerator, bundle, leaves, &memory, bytes)?;
        report.moved("verify", start.elapsed().as_secs_f64(), bytes);
    }
    let arena = report.phase("seal", || accelerator.seal(memory))?;
    report.ledger = Some(accelerator.ledger().totals());
    Ok(Resident { arena, report })
}

/// Compares all leaves, hashed on the device.
fn check<A: Accelerator>(
    accelerator: &A,
    bundle: &Bundle,
    leaves: &[Digest],
    memory: &A::Memory,
    bytes: u64,
) -> Result<(), LoadError> {
    accelerator.prepare_hash(memory)?;
    let mut hashes = Vec::new();
    for start in (0..bytes).step_by(GROUP_BYTES as usize) {
        let count = leaf_count(GROUP_BYTES.min(bytes - start)) as u32;
        hashes.push((start / LEAF_BYTES, accelerator.hash(memory, start / LEAF_BYTES, count)?));
    }
    for (first, hash) in hashes {
        compare(bundle, leaves, first, &accelerator.hashed(hash)?)?;
    }
    Ok(())
}

/// What the threads that make an image resident share.
struct Filling<'a> {
    bundle: &'a Bundle,
    source: &'a Source,
    /// Expected values, where the host checks.
    leaves: Option<&'a [Digest]>,
    options: &'a UploadOptions,
    bytes: u64,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl Filling<'_> {
    /// Reads a sample of chunks each way; `None` where the image is too small to tell.
    fn probe(&self, map: &ContiguousMap) -> Result<Option<Probe>, LoadError> {
        let chunk = self.options.alone_bytes();
        let chunks = self.bytes / chunk;
        let sample = (chunks / 2).min(PROBE_CHUNKS);
        if sample == 0 {
            return Ok(None);
        }
        let apart = chunks / sample * chunk;
        let bytes = sample * chunk;
        let rate = |start: Instant| bytes as f64 / start.elapsed().as_secs_f64().max(1e-9);
        let start = Instant::now();
        let next = AtomicU64::new(0);
        self.in_parallel(|| {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index < sample {
                map.populate((index * apart) as usize, chunk as usize);
            }
            Ok(index < sample)
        })?;
        let aliased_rate = rate(start);
        let start = Instant::now();
        let mut memory = untouched(bytes)?;
        let rooms = Mutex::new(memory.bytes_mut().chunks_mut(chunk as usize).enumerate());
        self.in_parallel(|| {
            let Some((index, room)) = rooms.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                return Ok(false);
            };
            // The chunk beside the one of the mapping: as far away on the disk, and not read yet.
            self.source.read(index as u64 * apart + chunk, chunk as usize, room)?;
            Ok(true)
        })?;
        Ok(Some(Probe { bytes, aliased_rate, placed_rate: rate(start) }))
    }

    /// Makes every page of the mapping resident.
    fn alias(&self, map: &ContiguousMap) -> Result<(), LoadError> {
        let chunk = self.options.alone_bytes();
        let next = AtomicU64::new(0);
        self.in_parallel(|| {
            let offset = next.fetch_add(chunk, Ordering::Relaxed);
            if offset >= self.bytes {
                return Ok(false);
            }
            let len = chunk.min(self.bytes - offset);
            map.populate(offset as usize, len as usize);
            self.filled(offset, &map.bytes()[offset as usize..(offset + len) as usize])?;
            Ok(true)
        })
    }

    /// Reads every byte into memory of its own.
    fn place<A: Accelerator>(&self, accelerator: &A) -> Result<HugePages, LoadError> {
        let available = accelerator.free_bytes()?;
        if self.bytes > available {
            let advice = format!("the image does not fit into the free memory of {}", accelerator.name());
            return Err(LoadError::DoesNotFit { needed: self.bytes, available, advice });
        }
        let chunk = self.options.alone_bytes();
        let mut memory = untouched(self.bytes.next_multiple_of(PAGE))?;
        let rooms = Mutex::new((0..).zip(memory.bytes_mut().chunks_mut(chunk as usize)));
        self.in_parallel(|| {
            let Some((index, room)) = rooms.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                return Ok(false);
            };
            let offset: u64 = index * chunk;
            let len = chunk.min(self.bytes - offset) as usize;
            self.source.read(offset, len, room)?;
            self.filled(offset, &room[..len])?;
            Ok(true)
        })?;
        Ok(memory)
    }

    fn filled(&self, offset: u64, bytes: &[u8]) -> Result<(), LoadError> {
        if let Some(expected) = self.leaves {
            let first = offset / LEAF_BYTES;
            let segment_bytes = self.bundle.segment_bytes(Placement::Image, first);
            for (i, leaf) in (0u64..).zip(bytes.chunks(LEAF_BYTES as usize)) {
                let found = leaf_digest(leaf, (offset + i * LEAF_BYTES) % SEGMENT_BYTES, segment_bytes);
                compare(self.bundle, expected, first + i, &[found])?;
            }
        }
        (self.progress)(bytes.len() as u64);
        Ok(())
    }

    /// Calls `step` on all readers until it says that nothing is left, or fails.
    fn in_parallel(&self, step: impl Fn() -> Result<bool, LoadError> + Sync) -> Result<(), LoadError> {
        let failure = Mutex::new(None);
        let failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..self.options.readers {
                scope.spawn(|| {
                    while !failed.load(Ordering::Relaxed) {
                        match step() {
                            Ok(true) => {}
                            Ok(false) => return,
                            Err(error) => {
                                failed.store(true, Ordering::Relaxed);
                                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                            }
                        }
                    }
                });
            }
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

fn untouched(bytes: u64) -> Result<HugePages, LoadError> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    HugePages::untouched(len).map_err(|source| LoadError::System { what: "memory for the image", source })
}
