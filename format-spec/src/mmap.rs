//! Read-only file mappings: the one place of this crate, and for the converter, that holds `unsafe`.

use std::fs::File;
use std::io;

use memmap2::{Advice, Mmap, MmapOptions, UncheckedAdvice};

/// Maps a whole file read-only; `None` for an empty file, which cannot be mapped.
///
/// The caller must treat the bytes as untrusted: another process may change the file while it is mapped, and every
/// consumer of this crate validates or hashes what it reads. Truncation by another process while the mapping is in use
/// ends the process with SIGBUS; bundles and checkpoints are immutable by contract.
///
/// # Errors
/// What the operating system says about `fstat` or `mmap`.
pub fn map_readonly(file: &File) -> io::Result<Option<Mmap>> {
    let len = file.metadata()?.len();
    if len == 0 {
        return Ok(None);
    }
    let len = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    // SAFETY: the mapping is read-only and private to this process; the documented contract above is that files are
    // not truncated while mapped, and no reference to the bytes assumes that they stay constant.
    let map = unsafe { MmapOptions::new().len(len).map(file)? };
    Ok(Some(map))
}

/// Asks the kernel to read a range of the mapping ahead, without waiting.
pub fn will_need(map: &Mmap, offset: usize, len: usize) {
    // Advice is a hint: an error changes nothing that the caller can act on.
    let _ = map.advise_range(Advice::WillNeed, offset, len);
}

/// Gives the resident pages of a range back; a later access reads them from the file again.
pub fn release(map: &Mmap, offset: usize, len: usize) {
    // SAFETY: the mapping is file-backed and read-only, so dropped pages are re-read from the file with the same bytes.
    let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, len) };
}
