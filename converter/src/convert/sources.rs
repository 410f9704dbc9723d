//! BLAKE3 of the source files, read once in large sequential pieces.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use vt_bundle::hash::{Digest, LEAF_BYTES, leaf_count, leaf_digest, segment_digest};

use super::journal::Journal;
use super::ordered::in_order;
use super::{ConvertError, Progress};
use crate::source::{Checkpoint, SourceFile};

/// Leaves that are read ahead of each worker.
const AHEAD: u64 = 4;

/// Leaves of a piece: what an interrupted run does not have to read again.
const PIECE_LEAVES: u64 = 512;

/// Hashes of the source files, and how many bytes of them an earlier run had hashed.
pub type Hashed = (Vec<Digest>, u64);

/// Hashes the source files.
pub struct Hasher<'a> {
    /// The source.
    pub checkpoint: &'a Checkpoint,
    /// Finished pieces are noted here.
    pub journal: &'a Journal,
    /// Leaf digests that an earlier run noted, by file and piece.
    pub finished: &'a HashMap<(u32, u32), Vec<Digest>>,
    /// Buffers in use at once.
    pub workers: usize,
}

impl Hasher<'_> {
    /// Hashes every file, in order; `None` if the user asked to stop.
    ///
    /// Reads into buffers instead of the mapping: the pages stay in the page cache for the packer without counting as
    /// resident memory of this process.
    ///
    /// # Errors
    /// [`ConvertError::Read`] or [`ConvertError::Bundle`].
    pub fn hash(
        &self,
        progress: &dyn Progress,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Hashed>, ConvertError> {
        let mut hashes = Vec::with_capacity(self.checkpoint.files.len());
        let mut resumed = 0;
        for (source, number) in self.checkpoint.files.iter().zip(0u32..) {
            let file =
                File::open(&source.path).map_err(|e| ConvertError::Read { path: source.path.clone(), source: e })?;
            let mut leaves = Vec::new();
            for (piece, first) in (0u32..).zip((0..leaf_count(source.size)).step_by(PIECE_LEAVES as usize)) {
                let count = PIECE_LEAVES.min(leaf_count(source.size) - first);
                let known = self.finished.get(&(number, piece)).filter(|known| known.len() as u64 == count);
                if let Some(known) = known {
                    let bytes = (count * LEAF_BYTES).min(source.size - first * LEAF_BYTES);
                    resumed += bytes;
                    progress.advance(bytes);
                    leaves.extend_from_slice(known);
                    continue;
                }
                let hashed = in_order(self.workers, count, Vec::new, |buffer, index| {
                    if stop() { Ok(None) } else { self.leaf(source, &file, first + index, buffer, progress).map(Some) }
                })?;
                let Some(mut hashed) = hashed else { return Ok(None) };
                self.journal.source(number, piece, &hashed)?;
                leaves.append(&mut hashed);
            }
            // A file without bytes has no leaves, but a hash.
            hashes.push(segment_digest(&leaves).unwrap_or_else(|| *blake3::hash(&[]).as_bytes()));
        }
        Ok(Some((hashes, resumed)))
    }

    /// Reads and hashes one leaf: large enough for network file systems, and still in the core's cache when it is hashed.
    fn leaf(
        &self,
        source: &SourceFile,
        file: &File,
        index: u64,
        buffer: &mut Vec<u8>,
        progress: &dyn Progress,
    ) -> Result<Digest, ConvertError> {
        if let Some(map) = &source.map {
            let ahead = source.size.min((index + AHEAD * self.workers as u64) * LEAF_BYTES);
            let len = LEAF_BYTES.min(source.size - ahead);
            vt_bundle::mmap::will_need(map, ahead as usize, len as usize);
        }
        let start = index * LEAF_BYTES;
        buffer.resize(LEAF_BYTES.min(source.size - start) as usize, 0);
        file.read_exact_at(buffer, start).map_err(|e| ConvertError::Read { path: source.path.clone(), source: e })?;
        progress.advance(buffer.len() as u64);
        Ok(leaf_digest(buffer, start, source.size))
    }
}
