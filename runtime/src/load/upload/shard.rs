//! Loading one rank's share of an image.
//!
//! A leaf that the share touches is read whole and hashed on the host, since its hash covers bytes that this rank does not
//! keep. Only the share goes into staging buffers, packed, and to the device.

use super::ring::Ring;
use super::share::Share;
use super::{Source, UploadOptions, compare};
use crate::load::{Accelerator, LoadError, LoadReport, Piece, Resident, Verify};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use vt_bundle::Bundle;
use vt_bundle::hash::{Digest, LEAF_BYTES, SEGMENT_BYTES, leaf_digest};
use vt_bundle::manifest::Placement;

/// Makes the share of one rank resident on `accelerator`. `progress` is called with bytes of the share.
///
/// # Errors
/// [`LoadError`]; everything that had been allocated is freed.
pub fn load_shard<A: Accelerator>(
    accelerator: &A,
    bundle: &Bundle,
    share: &Share,
    verify: Verify,
    options: &UploadOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Resident<A::Arena>, LoadError> {
    let options = options.checked();
    let mut report = LoadReport::new(accelerator.name());
    report.verify = if verify == Verify::Off { Verify::Off } else { Verify::Host };
    let leaves = match verify {
        Verify::Off => Vec::new(),
        Verify::Device | Verify::Host => report.phase("leaf-table", || bundle.leaves())?.image,
    };
    let source = report.phase("open-image", || Source::open(bundle, options.io, options.drop_cache))?;
    report.notes.extend(source.note().map(str::to_owned));
    report.io = source.mode().name();
    let needed = share.arena_bytes();
    let memory = report.phase("allocate", || {
        let available = accelerator.free_bytes()?;
        if needed > available {
            let advice = format!("the share does not fit into the free memory of {}", accelerator.name());
            return Err(LoadError::DoesNotFit { needed, available, advice });
        }
        accelerator.allocate(needed)
    })?;
    let chunk = options.alone_bytes();
    let shard = Shard {
        accelerator,
        bundle,
        share,
        source: &source,
        leaves: (verify != Verify::Off).then_some(leaves.as_slice()),
        memory: &memory,
        chunk,
        ring: Ring::new(accelerator, chunk as usize, options.depth * (options.chunk_bytes / chunk) as usize),
        next: AtomicU64::new(0),
        failure: Mutex::new(None),
        progress,
    };
    let start = Instant::now();
    let warning = shard.run(options.readers)?;
    report.uploaded(start.elapsed().as_secs_f64(), share.bytes());
    report.notes.extend(warning);
    let arena = report.phase("seal", || accelerator.seal(memory))?;
    report.ledger = Some(accelerator.ledger().totals());
    Ok(Resident { arena, report })
}

struct Shard<'a, A: Accelerator> {
    accelerator: &'a A,
    bundle: &'a Bundle,
    share: &'a Share,
    source: &'a Source,
    /// Expected values, where the host checks.
    leaves: Option<&'a [Digest]>,
    memory: &'a A::Memory,
    chunk: u64,
    ring: Ring<'a, A>,
    next: AtomicU64,
    failure: Mutex<Option<LoadError>>,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl<A: Accelerator> Shard<'_, A> {
    fn run(self, readers: usize) -> Result<Option<String>, LoadError> {
        std::thread::scope(|scope| {
            for _ in 0..readers {
                scope.spawn(|| {
                    if let Err(error) = self.read() {
                        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        self.ring.close();
                    }
                });
            }
        });
        let failure = self.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        let finished = self.ring.finish();
        match failure {
            Some(error) => Err(error),
            None => finished,
        }
    }

    fn read(&self) -> Result<(), LoadError> {
        // What is read lies beside the staging buffer: only a part of it is staged.
        let mut whole = self.accelerator.buffer(self.chunk as usize, false)?;
        loop {
            let offset = self.next.fetch_add(self.chunk, Ordering::Relaxed);
            if offset >= self.source.len() {
                return Ok(());
            }
            let len = self.chunk.min(self.source.len() - offset);
            let pieces = self.share.pieces(offset..offset + len);
            if pieces.is_empty() {
                continue;
            }
            self.fill(offset, len, &pieces, whole.as_mut())?;
            let Some(mut buffer) = self.ring.acquire()? else { return Ok(()) };
            let staged = gather(&pieces, whole.as_mut(), buffer.as_mut());
            let bytes = staged.iter().map(|piece| piece.len as u64).sum();
            self.ring.busy(self.accelerator.copy(buffer, &staged, self.memory)?);
            (self.progress)(bytes);
        }
    }

    /// Reads and checks the leaves that the pieces touch, each run of them at once.
    fn fill(&self, offset: u64, len: u64, pieces: &[Piece], whole: &mut [u8]) -> Result<(), LoadError> {
        let leaf = LEAF_BYTES as usize;
        let mut touched = vec![false; (len as usize).div_ceil(leaf)];
        for piece in pieces {
            touched[piece.from / leaf..=(piece.from + piece.len - 1) / leaf].fill(true);
        }
        let mut at = 0;
        while at < touched.len() {
            let count = touched[at..].iter().take_while(|&&t| t).count();
            if count > 0 {
                let (start, end) = (at * leaf, (len as usize).min((at + count) * leaf));
                self.source.read(offset + start as u64, end - start, &mut whole[start..])?;
                self.check(offset + start as u64, &whole[start..end])?;
            }
            at += count.max(1);
        }
        Ok(())
    }

    fn check(&self, offset: u64, bytes: &[u8]) -> Result<(), LoadError> {
        let Some(expected) = self.leaves else { return Ok(()) };
        let first = offset / LEAF_BYTES;
        let segment_bytes = self.bundle.segment_bytes(Placement::Image, first);
        for (i, leaf) in (0u64..).zip(bytes.chunks(LEAF_BYTES as usize)) {
            let found = leaf_digest(leaf, (offset + i * LEAF_BYTES) % SEGMENT_BYTES, segment_bytes);
            compare(self.bundle, expected, first + i, &[found])?;
        }
        Ok(())
    }
}

/// Packs the pieces, and joins those that are neighbours on the device too.
fn gather(pieces: &[Piece], whole: &[u8], buffer: &mut [u8]) -> Vec<Piece> {
    let mut staged: Vec<Piece> = Vec::new();
    let mut at = 0;
    for piece in pieces {
        buffer[at..at + piece.len].copy_from_slice(&whole[piece.from..piece.from + piece.len]);
        match staged.last_mut() {
            Some(last) if last.to + last.len as u64 == piece.to => last.len += piece.len,
            _ => staged.push(Piece { from: at, ..*piece }),
        }
        at += piece.len;
    }
    staged
}
