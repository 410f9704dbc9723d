//! Fetching a bundle into a folder: complete, checked, or not there.
//!
//! Work happens in `DIR.partial/`, which is locked, marked as ours, left by a kill and continued by the next run:
//!
//! ```text
//! DIR.partial/.vt-pull        the bundle that it is for
//! DIR.partial/bundle/         what becomes DIR: nothing but files of the bundle, whatever they are called
//! DIR.partial/parts/<n>       the bundle's file n while it comes
//! ```

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream as futures};
use rustix::fs::FlockOperation;
use serde::Serialize;
use vt_bundle::Bundle;

use crate::contents::{Contents, Entry};
use crate::download::{download, is_whole};
use crate::error::StoreError;
use crate::progress::{Meter, Progress};
use crate::source::Source;

/// File that marks a folder of unfinished work, and the bundle that it is for.
const MARKER: &str = ".vt-pull";
const WHOLE: &str = "bundle";
const PARTS: &str = "parts";

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
    let (whole, parts) = (partial.join(WHOLE), partial.join(PARTS));
    for folder in [&whole, &parts] {
        std::fs::create_dir_all(folder).map_err(StoreError::io(folder))?;
    }
    let files: Vec<Incoming<'_>> =
        contents.entries.iter().enumerate().map(|(n, entry)| Incoming { n, entry }).collect();
    let present: u64 = files.iter().map(|file| file.present(&whole, &parts)).sum();
    require_space(&partial, contents.total_bytes().saturating_sub(present))?;
    progress.begin("pulling", contents.total_bytes());
    let (derived, fetched): (Vec<Incoming<'_>>, Vec<Incoming<'_>>) =
        files.into_iter().partition(|file| contents.derived(&file.entry.path).is_some());
    futures::iter(fetched)
        .map(async |file| {
            let meter = Meter::new(progress);
            let path = file.whole(&whole);
            make_parent(&path)?;
            if is_whole(&path, file.entry).await? {
                meter.set(file.entry.size);
                return Ok(());
            }
            download(source, place, file.entry, file.part(&parts), &path, &meter).await
        })
        .buffer_unordered(jobs.max(1))
        .try_collect::<()>()
        .await?;
    for Incoming { entry, .. } in derived {
        write_synced(&whole.join(&entry.path), &contents.derived(&entry.path).unwrap_or_default())?;
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

/// A file of a bundle that is pulled.
struct Incoming<'a> {
    /// Its number in the bundle.
    n: usize,
    entry: &'a Entry,
}

impl Incoming<'_> {
    fn whole(&self, folder: &Path) -> PathBuf {
        folder.join(&self.entry.path)
    }

    fn part(&self, folder: &Path) -> PathBuf {
        folder.join(self.n.to_string())
    }

    /// Bytes of it that are there, whole or in part.
    fn present(&self, whole: &Path, parts: &Path) -> u64 {
        let len = |path: &Path| path.metadata().map_or(0, |meta| meta.len());
        len(&self.whole(whole)).max(len(&self.part(parts))).min(self.entry.size)
    }
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

/// Sees that the bundle is one, and moves it into place.
fn finish(partial: &Path, dir: &Path, contents: &Contents) -> Result<(), StoreError> {
    let whole = partial.join(WHOLE);
    let bundle = Bundle::open(&whole)?;
    if bundle.id() != contents.id {
        let (found, expected) = (bundle.id().to_owned(), contents.id.clone());
        return Err(vt_bundle::BundleError::Id { path: whole, found, expected }.into());
    }
    sync_folder(&whole)?;
    if dir.symlink_metadata().is_ok() {
        return Err(StoreError::Exists { path: dir.to_owned() });
    }
    std::fs::rename(&whole, dir).map_err(StoreError::io(dir))?;
    sync_folder(dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")))?;
    std::fs::remove_dir_all(partial).map_err(StoreError::io(partial))
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
        std::fs::create_dir(partial.join(PARTS)).unwrap();
        std::os::unix::fs::symlink(elsewhere.join("file"), partial.join(PARTS).join("3")).unwrap();
        assert!(matches!(claim(&partial, "id"), Err(StoreError::Unsupported { .. })));
        assert!(std::fs::read_dir(&elsewhere).unwrap().next().is_none());
    }
}
