//! Unfinished files in stores on disk: whose they are, and when they may go.
//!
//! Whoever writes to a store on disk holds a shared lock on its folder of blobs, which a kill releases. So whoever gets
//! that lock alone knows that every file with the name of an unfinished one was left behind.

use std::fs::File;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::FlockOperation;

/// The claim of a process that writes to a store on disk; it lasts as long as this lives.
#[derive(Debug, Default)]
pub(crate) struct Staging(OnceLock<Option<File>>);

impl Staging {
    /// Claims, and removes what killed writers left in some folders unless another one is at work. Where the file system
    /// has no locks nothing is removed.
    pub(crate) fn begin(&self, blobs: &Path, folders: &[&Path], unfinished: impl Fn(&str) -> bool) {
        self.0.get_or_init(|| {
            let claim = File::open(blobs).ok()?;
            if rustix::fs::flock(&claim, FlockOperation::NonBlockingLockExclusive).is_ok() {
                for folder in folders {
                    remove(folder, &unfinished);
                }
            }
            rustix::fs::flock(&claim, FlockOperation::LockShared).ok()?;
            Some(claim)
        });
    }
}

/// Removes files by their names; what cannot be removed is in nobody's way.
fn remove(folder: &Path, unfinished: &impl Fn(&str) -> bool) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && entry.file_name().to_str().is_some_and(unfinished) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
