//! BLAKE3 of the source files, read once in large sequential pieces.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rayon::prelude::*;
use vt_bundle::hash::{Digest, LEAF_BYTES, leaf_count, leaf_digest, segment_digest};

use super::{ConvertError, Progress};
use crate::source::Checkpoint;

/// Leaves read by one worker in one go: large enough for network file systems, small enough for the memory bound.
const LEAVES_PER_READ: u64 = 4;

/// Hashes every file, in order; `None` if the user asked to stop.
///
/// Reads into buffers instead of the mapping: the pages stay in the page cache for the packer without counting as
/// resident memory of this process.
///
/// # Errors
/// [`ConvertError::Read`].
pub fn hash(
    checkpoint: &Checkpoint,
    progress: &dyn Progress,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Option<Vec<Digest>>, ConvertError> {
    let mut hashes = Vec::with_capacity(checkpoint.files.len());
    for source in &checkpoint.files {
        let read_error = |e| ConvertError::Read { path: source.path.clone(), source: e };
        let file = File::open(&source.path).map_err(read_error)?;
        if source.size == 0 {
            hashes.push(*blake3::hash(&[]).as_bytes());
            continue;
        }
        let step = LEAVES_PER_READ * LEAF_BYTES;
        let pieces = (0..source.size.div_ceil(step)).into_par_iter().map(|i| {
            if stop() {
                return Ok(None);
            }
            let start = i * step;
            let mut buffer = vec![0; step.min(source.size - start) as usize];
            file.read_exact_at(&mut buffer, start).map_err(read_error)?;
            progress.advance(buffer.len() as u64);
            let leaves = buffer.chunks(LEAF_BYTES as usize).zip(0u64..);
            Ok(Some(leaves.map(|(leaf, n)| leaf_digest(leaf, start + n * LEAF_BYTES, source.size)).collect::<Vec<_>>()))
        });
        let pieces: Option<Vec<Vec<Digest>>> = pieces.collect::<Result<_, ConvertError>>()?;
        let Some(pieces) = pieces else { return Ok(None) };
        let leaves = pieces.concat();
        debug_assert_eq!(leaves.len() as u64, leaf_count(source.size));
        hashes.push(segment_digest(&leaves).unwrap_or_default());
    }
    Ok(Some(hashes))
}
