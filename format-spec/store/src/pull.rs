//! Fetching a bundle into a folder: complete, checked, or not there.
//!
//! Work happens in `DIR.partial/`, which is locked, marked as ours, left by a kill and continued by the next run.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream as futures};
use rustix::fs::FlockOperation;
use serde::Serialize;
use vt_bundle::Bundle;

use crate::contents::{Contents, Entry};
use crate::download::{download, is_whole, part_of};
use crate::error::StoreError;
use crate::progress::{Meter, Progress};
use crate::source::Source;

/// File that marks a folder of unfinished work, and the bundle that it is for.
const MARKER: &str = ".vt-pull";

/// What a pull did.
#[derive(Clone, Debug, Serialize)]
pub struct Pulled {
    /// Folder of the bundle.
    pub dir: PathBuf,
    /// Bundle id.
    pub id: String,
    /// Files of the bundle.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Fetches a bundle to `dir`.
pub(crate) async fn pull(
    source: &Source<'_>,
    place: &str,
    contents: &Contents,
    dir: &Path,
    jobs: usize,
    progress: &Arc<dyn Progress>,
) -> Result<Pulled, StoreError> {
    // Without a slash at its end, which would put the unfinished work into the folder itself.
    let dir: &Path = &dir.components().collect::<PathBuf>();
    if dir.symlink_metadata().is_ok() {
        return Err(StoreError::Exists { path: dir.to_owned() });
    }
    let mut partial = dir.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let _lock = claim(&partial, &contents.id)?;
    let present = present_bytes(&partial, &contents.entries);
    require_space(&partial, contents.total_bytes().saturating_sub(present))?;
    progress.begin("pulling", contents.total_bytes());
    let (derived, fetched): (Vec<&Entry>, Vec<&Entry>) =
        contents.entries.iter().partition(|entry| contents.derived(&entry.path).is_some());
    for entry in &fetched {
        make_parent(&partial.join(&entry.path))?;
    }
    futures::iter(fetched)
        .map(async |entry| {
            let meter = Meter::new(progress);
            let path = partial.join(&entry.path);
            if is_whole(&path, entry).await? {
                meter.set(entry.size);
                return Ok(());
            }
            download(source, place, entry, &path, &meter).await
        })
        .buffer_unordered(jobs.max(1))
        .try_collect::<()>()
        .await?;
    for entry in derived {
        write_synced(&partial.join(&entry.path), &contents.derived(&entry.path).unwrap_or_default())?;
        progress.advance(entry.size);
    }
    finish(&partial, dir, contents)?;
    Ok(Pulled {
        dir: dir.to_owned(),
        id: contents.id.clone(),
        files: contents.entries.len() as u64,
        bytes: contents.total_bytes(),
    })
}

/// Makes or takes over the folder of unfinished work. What an earlier run left of another bundle is removed.
fn claim(partial: &Path, id: &str) -> Result<File, StoreError> {
    refuse_links(partial)?;
    std::fs::create_dir_all(partial).map_err(StoreError::io(partial))?;
    let lock = File::open(partial).map_err(StoreError::io(partial))?;
    if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(StoreError::Busy { path: partial.to_owned() });
    }
    let marker = partial.join(MARKER);
    let known = match std::fs::read(&marker) {
        Ok(bytes) => Some(bytes),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
        Err(e) => return Err(StoreError::io(&marker)(e)),
    };
    let mut entries = std::fs::read_dir(partial).map_err(StoreError::io(partial))?;
    match known {
        Some(bytes) if bytes == id.as_bytes() => return Ok(lock),
        None if entries.next().is_some() => return Err(StoreError::Exists { path: partial.to_owned() }),
        _ => {}
    }
    for entry in std::fs::read_dir(partial).map_err(StoreError::io(partial))? {
        let path = entry.map_err(StoreError::io(partial))?.path();
        let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        removed.map_err(StoreError::io(&path))?;
    }
    std::fs::write(&marker, id).map_err(StoreError::io(&marker))?;
    Ok(lock)
}

/// Refuses a folder of unfinished work that is, or has below it, anything but folders and regular files: through a link
/// the work would go to a place that nobody named.
fn refuse_links(path: &Path) -> Result<(), StoreError> {
    let kind = match path.symlink_metadata() {
        Ok(meta) => meta.file_type(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(StoreError::io(path)(e)),
    };
    if !kind.is_dir() && !kind.is_file() {
        let reason =
            "is a link or no regular file, within a folder of unfinished work; remove it or choose another folder";
        return Err(StoreError::Unsupported { place: path.display().to_string(), reason: reason.to_owned() });
    }
    if kind.is_dir() {
        for entry in std::fs::read_dir(path).map_err(StoreError::io(path))? {
            refuse_links(&entry.map_err(StoreError::io(path))?.path())?;
        }
    }
    Ok(())
}

/// Sees that the folder is the bundle and nothing else, and moves it into place.
fn finish(partial: &Path, dir: &Path, contents: &Contents) -> Result<(), StoreError> {
    let bundle = Bundle::open(partial)?;
    if bundle.id() != contents.id {
        let (found, expected) = (bundle.id().to_owned(), contents.id.clone());
        return Err(vt_bundle::BundleError::Id { path: partial.to_owned(), found, expected }.into());
    }
    let marker = partial.join(MARKER);
    std::fs::remove_file(&marker).map_err(StoreError::io(&marker))?;
    sync_folder(partial)?;
    if dir.symlink_metadata().is_ok() {
        return Err(StoreError::Exists { path: dir.to_owned() });
    }
    std::fs::rename(partial, dir).map_err(StoreError::io(dir))?;
    sync_folder(dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")))
}

/// Bytes of a bundle's files that a folder holds, whole or in part.
fn present_bytes(dir: &Path, entries: &[Entry]) -> u64 {
    let len = |path: &Path| path.metadata().map_or(0, |meta| meta.len());
    entries.iter().map(|e| len(&dir.join(&e.path)).max(len(&part_of(&dir.join(&e.path)))).min(e.size)).sum()
}

/// Refuses work that the disk cannot hold before it begins.
pub(crate) fn require_space(dir: &Path, needed: u64) -> Result<(), StoreError> {
    // A file system that does not tell is tried.
    let Ok(stat) = rustix::fs::statvfs(dir) else { return Ok(()) };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < needed {
        return Err(StoreError::NoSpace { path: dir.to_owned(), needed, free });
    }
    Ok(())
}

pub(crate) fn make_parent(path: &Path) -> Result<(), StoreError> {
    match path.parent() {
        Some(parent) => std::fs::create_dir_all(parent).map_err(StoreError::io(parent)),
        None => Ok(()),
    }
}

pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let io = |source| StoreError::Io { path: path.to_owned(), source };
    let mut file = File::create(path).map_err(io)?;
    std::io::Write::write_all(&mut file, bytes).and_then(|()| file.sync_all()).map_err(io)
}

pub(crate) fn sync_folder(dir: &Path) -> Result<(), StoreError> {
    File::open(dir).and_then(|folder| folder.sync_all()).map_err(StoreError::io(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_work_goes_through_no_link() {
        let root = tempfile::tempdir().unwrap();
        let (elsewhere, partial) = (root.path().join("elsewhere"), root.path().join("out.partial"));
        std::fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &partial).unwrap();
        assert!(matches!(claim(&partial, "id"), Err(StoreError::Unsupported { .. })));
        std::fs::remove_file(&partial).unwrap();
        drop(claim(&partial, "id").unwrap());
        std::fs::create_dir(partial.join("segments")).unwrap();
        std::os::unix::fs::symlink(elsewhere.join("file"), partial.join("segments/image-00000.bin")).unwrap();
        assert!(matches!(claim(&partial, "id"), Err(StoreError::Unsupported { .. })));
        assert!(std::fs::read_dir(&elsewhere).unwrap().next().is_none());
    }
}
