//! The local cache: bundles that were fetched from stores, ready to be mapped.
//!
//! ```text
//! ROOT/bundles/<bundle id>/...      whole bundles, made of hard links into ...
//! ROOT/blobs/<BLAKE3>               ... files, each once, read-only; `.part` while they come
//! ROOT/info/<bundle id>.json        what it was fetched as; its time is that of the last use
//! ROOT/locks/                       one lock per bundle, one per blob, one for pruning
//! ```
//!
//! A bundle appears under `bundles/` by a rename, after every file's digest was checked. Of several processes that want
//! the same bundle one fetches it and the others wait for it.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::{StreamExt, TryStreamExt, stream as futures};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use vt_bundle::Bundle;

use crate::contents::{Contents, Entry};
use crate::download::{download, is_whole};
use crate::error::StoreError;
use crate::hashing::blocking;
use crate::progress::{Meter, Progress};
use crate::pull::{make_parent, require_space, write_synced};
use crate::reference::{Reference, is_digest};
use crate::source::Source;

/// Name of the lock that pruning takes alone and fetching takes together.
const ALL: &str = "cache";

/// A cache folder.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// A bundle in the cache. While this lives, pruning leaves it alone.
#[derive(Debug)]
pub struct CachedBundle {
    /// Its folder.
    pub dir: PathBuf,
    /// Its id.
    pub id: String,
    /// Whether it was fetched just now.
    pub fetched: bool,
    _lock: Option<File>,
}

/// What the cache knows of a bundle.
#[derive(Clone, Debug, Serialize)]
pub struct CacheEntry {
    /// Bundle id.
    pub id: String,
    /// What it was last fetched as.
    pub reference: String,
    /// Bytes of its files; files that it shares with others are counted for each.
    pub bytes: u64,
    /// Seconds since it was last used.
    pub idle_seconds: u64,
    /// Its folder.
    pub dir: PathBuf,
}

/// What pruning did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Pruned {
    /// Bundles that were removed.
    pub removed: Vec<String>,
    /// Bytes freed.
    pub freed_bytes: u64,
    /// Bytes that remain.
    pub remaining_bytes: u64,
    /// Bundles that were kept because a process uses them.
    pub in_use: Vec<String>,
}

/// A bundle of the cache that is not what its manifest says, locked so that nobody else uses or fetches it.
#[derive(Debug)]
pub(crate) struct Damage {
    /// The files that are wrong.
    pub files: Vec<String>,
    lock: File,
}

#[derive(Serialize, Deserialize)]
struct Info {
    reference: String,
}

impl Cache {
    /// A cache in a folder, which is made when something is fetched.
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// `$XDG_CACHE_HOME/vt`, or `~/.cache/vt`; `None` where there is no home.
    pub fn default_root() -> Option<PathBuf> {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        Some(
            set("XDG_CACHE_HOME").filter(|p| p.is_absolute()).or_else(|| Some(set("HOME")?.join(".cache")))?.join("vt"),
        )
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn bundle_dir(&self, id: &str) -> PathBuf {
        self.root.join("bundles").join(id)
    }

    fn info_path(&self, id: &str) -> PathBuf {
        self.root.join("info").join(format!("{id}.json"))
    }

    fn lock_path(&self, name: &str) -> PathBuf {
        self.root.join("locks").join(format!("{name}.lock"))
    }

    /// A bundle that is there already, its manifest's BLAKE3 compared with the id; what is damaged counts as not there.
    ///
    /// # Errors
    /// None but those of the file system.
    pub fn find(&self, id: &str) -> Result<Option<CachedBundle>, StoreError> {
        let dir = self.bundle_dir(id);
        // A cache that cannot be written has no lock to take, and nobody who could remove anything either.
        let lock = File::open(self.lock_path(id)).ok();
        if let Some(lock) = &lock {
            rustix::fs::flock(lock, FlockOperation::LockShared).map_err(|e| StoreError::io(&dir)(e.into()))?;
        }
        match Bundle::open(&dir) {
            Ok(bundle) if bundle.id() == id => {
                Ok(Some(CachedBundle { dir, id: id.to_owned(), fetched: false, _lock: lock }))
            }
            _ => Ok(None),
        }
    }

    /// Notes the use of a bundle, for `prune` and `list`. A cache that cannot be written forgets it.
    fn touch(&self, id: &str, reference: &Reference) {
        let info = Info { reference: reference.to_string() };
        if let Ok(bytes) = serde_json::to_vec(&info) {
            let path = self.info_path(id);
            let _ = make_parent(&path).and_then(|()| std::fs::write(&path, bytes).map_err(StoreError::io(&path)));
        }
    }

    /// A bundle out of the cache, fetched if it is not there.
    pub(crate) async fn get(
        &self,
        source: &Source<'_>,
        reference: &Reference,
        contents: &Contents,
        jobs: usize,
        progress: &Arc<dyn Progress>,
    ) -> Result<CachedBundle, StoreError> {
        if let Some(found) = self.find(&contents.id)? {
            self.touch(&contents.id, reference);
            return Ok(found);
        }
        for folder in ["bundles", "blobs", "info", "locks"] {
            let path = self.root.join(folder);
            std::fs::create_dir_all(&path).map_err(StoreError::io(&path))?;
        }
        let _all = self.lock(ALL, FlockOperation::LockShared).await?;
        let lock = self.lock(&contents.id, FlockOperation::LockExclusive).await?;
        let dir = self.bundle_dir(&contents.id);
        // Another process may have fetched it while this one waited.
        let there = Bundle::open(&dir).is_ok_and(|bundle| bundle.id() == contents.id);
        if !there {
            self.fill(source, reference, contents, jobs, progress).await?;
        }
        self.touch(&contents.id, reference);
        rustix::fs::flock(&lock, FlockOperation::LockShared).map_err(|e| StoreError::io(&dir)(e.into()))?;
        Ok(CachedBundle { dir, id: contents.id.clone(), fetched: !there, _lock: Some(lock) })
    }

    /// Hashes a bundle that is there. `None` where every file is right.
    pub(crate) async fn damage(&self, id: &str) -> Result<Option<Damage>, StoreError> {
        let dir = self.bundle_dir(id);
        let lock = self.try_lock(id)?.ok_or_else(|| StoreError::Busy { path: dir.clone() })?;
        let mut files = Vec::new();
        match Bundle::open(&dir) {
            Ok(bundle) if bundle.id() == id => {
                let path = dir.join(vt_bundle::manifest::file_name::MANIFEST);
                let bytes = std::fs::read(&path).map_err(StoreError::io(&path))?;
                for entry in Contents::read(id, bytes)?.entries {
                    if !is_whole(&dir.join(&entry.path), &entry).await? {
                        files.push(entry.path);
                    }
                }
            }
            _ => files.push(vt_bundle::manifest::file_name::MANIFEST.to_owned()),
        }
        Ok((!files.is_empty()).then_some(Damage { files, lock }))
    }

    /// Makes a damaged bundle anew; blobs that are right are kept.
    pub(crate) async fn renew(
        &self,
        source: &Source<'_>,
        reference: &Reference,
        contents: &Contents,
        jobs: usize,
        progress: &Arc<dyn Progress>,
        damage: Damage,
    ) -> Result<CachedBundle, StoreError> {
        let _all = self.lock(ALL, FlockOperation::LockShared).await?;
        self.fill(source, reference, contents, jobs, progress).await?;
        self.touch(&contents.id, reference);
        let dir = self.bundle_dir(&contents.id);
        rustix::fs::flock(&damage.lock, FlockOperation::LockShared).map_err(|e| StoreError::io(&dir)(e.into()))?;
        Ok(CachedBundle { dir, id: contents.id.clone(), fetched: true, _lock: Some(damage.lock) })
    }

    /// Makes a bundle's folder out of blobs, downloading those that are missing. The caller holds the bundle's lock.
    async fn fill(
        &self,
        source: &Source<'_>,
        reference: &Reference,
        contents: &Contents,
        jobs: usize,
        progress: &Arc<dyn Progress>,
    ) -> Result<(), StoreError> {
        let dir = self.bundle_dir(&contents.id);
        let partial = self.root.join("bundles").join(format!("{}.partial", contents.id));
        for stale in [&dir, &partial] {
            remove_tree(stale)?;
        }
        std::fs::create_dir_all(&partial).map_err(StoreError::io(&partial))?;
        let size = |entry: &&Entry| self.blob_path(entry).metadata().map_or(0, |meta| meta.len()).min(entry.size);
        let present: u64 = contents.entries.iter().map(|entry| size(&entry)).sum();
        require_space(&self.root, contents.total_bytes().saturating_sub(present))?;
        progress.begin("fetching", contents.total_bytes());
        let place = reference.to_string();
        futures::iter(&contents.entries)
            .map(async |entry| {
                let meter = Meter::new(progress);
                let target = partial.join(&entry.path);
                make_parent(&target)?;
                if let Some(bytes) = contents.derived(&entry.path) {
                    write_synced(&target, &bytes)?;
                    meter.set(entry.size);
                    return Ok(());
                }
                let blob = self.blob(source, &place, entry, &meter).await?;
                link(&blob, &target)
            })
            .buffer_unordered(jobs.max(1))
            .try_collect::<()>()
            .await?;
        let bundle = Bundle::open(&partial)?;
        if bundle.id() != contents.id {
            let (found, expected) = (bundle.id().to_owned(), contents.id.clone());
            return Err(vt_bundle::BundleError::Id { path: partial, found, expected }.into());
        }
        std::fs::rename(&partial, &dir).map_err(StoreError::io(&dir))
    }

    fn blob_path(&self, entry: &Entry) -> PathBuf {
        self.root.join("blobs").join(&entry.blake3)
    }

    /// A blob, downloaded if it is not there. One that is there is hashed before a new bundle is made of it.
    async fn blob(
        &self,
        source: &Source<'_>,
        place: &str,
        entry: &Entry,
        meter: &Meter,
    ) -> Result<PathBuf, StoreError> {
        let path = self.blob_path(entry);
        let _lock = self.lock(&entry.blake3, FlockOperation::LockExclusive).await?;
        if is_whole(&path, entry).await? {
            meter.set(entry.size);
            return Ok(path);
        }
        download(source, place, entry, path.with_extension("part"), &path, meter).await?;
        // Nobody has a reason to write to it again.
        std::fs::set_permissions(&path, Permissions::from_mode(0o444)).map_err(StoreError::io(&path))?;
        Ok(path)
    }

    async fn lock(&self, name: &str, operation: FlockOperation) -> Result<File, StoreError> {
        let path = self.lock_path(name);
        blocking(move || {
            let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
            let file = file.map_err(StoreError::io(&path))?;
            rustix::fs::flock(&file, operation).map_err(|e| StoreError::io(&path)(e.into()))?;
            Ok(file)
        })
        .await
    }

    /// The bundles of the cache, the one used last first.
    ///
    /// # Errors
    /// [`StoreError::Io`]; a cache that does not exist is empty.
    pub fn list(&self) -> Result<Vec<CacheEntry>, StoreError> {
        let now = SystemTime::now();
        let mut found = Vec::new();
        for name in self.bundle_names()? {
            let Ok(bundle) = Bundle::open(&self.bundle_dir(&name)) else { continue };
            let path = bundle.dir().join(vt_bundle::manifest::file_name::MANIFEST);
            let bytes = std::fs::read(&path).map_err(StoreError::io(&path))?;
            let bytes = Contents::read(&name, bytes)?.total_bytes();
            let info = self.info_path(&name);
            let reference = std::fs::read(&info).ok().and_then(|bytes| serde_json::from_slice::<Info>(&bytes).ok());
            let used =
                info.metadata().or_else(|_| bundle.dir().metadata()).and_then(|meta| meta.modified()).unwrap_or(now);
            found.push(CacheEntry {
                id: name,
                reference: reference.map(|i| i.reference).unwrap_or_default(),
                bytes,
                idle_seconds: now.duration_since(used).map_or(0, |d| d.as_secs()),
                dir: bundle.dir().to_owned(),
            });
        }
        found.sort_by(|a, b| a.idle_seconds.cmp(&b.idle_seconds).then_with(|| a.id.cmp(&b.id)));
        Ok(found)
    }

    /// Removes bundles, the one used longest ago first, until the cache has at most `max_bytes`; then what no bundle uses.
    ///
    /// # Errors
    /// [`StoreError::Busy`] while a process fetches; [`StoreError::Io`].
    pub fn prune(&self, max_bytes: u64) -> Result<Pruned, StoreError> {
        let mut pruned = Pruned::default();
        if !self.root.join("bundles").exists() {
            return Ok(pruned);
        }
        let locks = self.root.join("locks");
        if !locks.is_dir() && !self.root.join("info").is_dir() {
            let reason = "is no cache of vt: it has bundles/, but neither info/ nor locks/; nothing was removed";
            return Err(StoreError::Unsupported { place: self.root.display().to_string(), reason: reason.to_owned() });
        }
        std::fs::create_dir_all(&locks).map_err(StoreError::io(&locks))?;
        let _all = self.try_lock(ALL)?.ok_or_else(|| StoreError::Busy { path: self.root.clone() })?;
        let before = self.used_bytes()?;
        for name in names(&self.root.join("bundles"))?.iter().filter(|name| is_unfinished(name, ".partial")) {
            remove_tree(&self.root.join("bundles").join(name))?;
        }
        self.remove_unused()?;
        let mut idle: Vec<String> = self.list()?.into_iter().map(|entry| entry.id).collect();
        // What is no bundle any more nobody can use: it goes first, however much may remain.
        let known: HashSet<&String> = idle.iter().collect();
        let broken: Vec<String> = self.bundle_names()?.into_iter().filter(|name| !known.contains(name)).collect();
        let mut unusable = broken.len();
        idle.extend(broken);
        while unusable > 0 || self.used_bytes()? > max_bytes {
            let Some(id) = idle.pop() else { break };
            unusable = unusable.saturating_sub(1);
            let Some(_lock) = self.try_lock(&id)? else {
                pruned.in_use.push(id);
                continue;
            };
            remove_tree(&self.bundle_dir(&id))?;
            let _ = std::fs::remove_file(self.info_path(&id));
            pruned.removed.push(id);
            self.remove_unused()?;
        }
        pruned.remaining_bytes = self.used_bytes()?;
        pruned.freed_bytes = before.saturating_sub(pruned.remaining_bytes);
        Ok(pruned)
    }

    /// A lock for oneself, `None` where somebody holds it.
    fn try_lock(&self, name: &str) -> Result<Option<File>, StoreError> {
        let path = self.lock_path(name);
        let file =
            OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(StoreError::io(&path))?;
        Ok(rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok().then_some(file))
    }

    /// Blobs, whole and unfinished; what else somebody put there is none of ours.
    fn blobs(&self) -> Result<Vec<PathBuf>, StoreError> {
        let blobs = self.root.join("blobs");
        let ours = names(&blobs)?.into_iter().filter(|name| is_digest(name) || is_unfinished(name, ".part"));
        Ok(ours.map(|name| blobs.join(name)).collect())
    }

    /// Removes blobs that no bundle links to, unfinished ones included.
    fn remove_unused(&self) -> Result<(), StoreError> {
        for path in self.blobs()? {
            if path.metadata().is_ok_and(|meta| meta.nlink() == 1) {
                std::fs::remove_file(&path).map_err(StoreError::io(&path))?;
            }
        }
        Ok(())
    }

    /// Names of bundles, whether they can be opened or not.
    fn bundle_names(&self) -> Result<Vec<String>, StoreError> {
        Ok(names(&self.root.join("bundles"))?.into_iter().filter(|name| is_digest(name)).collect())
    }

    /// Bytes of blobs and bundles. What has two names is counted once: where the file system has no hard links, the copies
    /// in the bundles count, too.
    fn used_bytes(&self) -> Result<u64, StoreError> {
        let mut seen = HashSet::new();
        let mut total = 0;
        let mut left = self.blobs()?;
        left.extend(self.bundle_names()?.iter().map(|name| self.bundle_dir(name)));
        while let Some(path) = left.pop() {
            // Somebody may be removing it.
            let Ok(meta) = path.symlink_metadata() else { continue };
            if meta.is_dir() {
                left.extend(names(&path)?.iter().map(|name| path.join(name)));
            } else if seen.insert((meta.dev(), meta.ino())) {
                total += meta.len();
            }
        }
        Ok(total)
    }
}

/// Whether a name is that of something unfinished: a digest and an ending.
fn is_unfinished(name: &str, ending: &str) -> bool {
    name.strip_suffix(ending).is_some_and(is_digest)
}

/// Names in a folder; none where there is no folder.
fn names(dir: &Path) -> Result<Vec<String>, StoreError> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(StoreError::io(dir)(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry.map_err(StoreError::io(dir))?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn remove_tree(path: &Path) -> Result<(), StoreError> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(StoreError::io(path)(e)),
        _ => Ok(()),
    }
}

/// Gives a blob a second name: a hard link, or where there are none a copy that shares its blocks, or a plain copy.
fn link(blob: &Path, target: &Path) -> Result<(), StoreError> {
    if std::fs::hard_link(blob, target).is_ok() {
        return Ok(());
    }
    let from = File::open(blob).map_err(StoreError::io(blob))?;
    let to = File::create(target).map_err(StoreError::io(target))?;
    if rustix::fs::ioctl_ficlone(&to, &from).is_ok() {
        return Ok(());
    }
    std::fs::copy(blob, target).map(|_| ()).map_err(StoreError::io(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pruning_removes_nothing_but_what_a_cache_makes() {
        let root = tempfile::tempdir().unwrap();
        let hex = "a".repeat(64);
        for name in ["bundles/mine", &format!("bundles/{hex}.partial"), "blobs"] {
            std::fs::create_dir_all(root.path().join(name)).unwrap();
        }
        let (foreign, blob, part) =
            ("blobs/thesis.txt".to_owned(), format!("blobs/{hex}"), format!("blobs/{hex}.part"));
        for name in [&foreign, &blob, &part] {
            std::fs::write(root.path().join(name), "text").unwrap();
        }
        let there = |name: &str| root.path().join(name).exists();
        let cache = Cache::new(root.path().to_owned());
        let error = cache.prune(0).unwrap_err();
        assert!(error.to_string().contains("no cache of vt") && error.exit_code() == 2, "{error}");
        assert!(there(&blob) && there(&part) && !there("locks"));
        std::fs::create_dir(root.path().join("info")).unwrap();
        cache.prune(0).unwrap();
        assert!(there("bundles/mine") && there(&foreign));
        assert!(!there(&blob) && !there(&part) && !there(&format!("bundles/{hex}.partial")));
    }

    #[test]
    fn what_can_no_longer_be_opened_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let hex = "b".repeat(64);
        let broken = root.path().join("bundles").join(&hex);
        std::fs::create_dir_all(&broken).unwrap();
        std::fs::create_dir(root.path().join("info")).unwrap();
        std::fs::write(broken.join("manifest.json"), "{}").unwrap();
        let cache = Cache::new(root.path().to_owned());
        let held = cache.try_lock(&hex);
        assert!(held.is_err(), "there is no folder of locks yet");
        std::fs::create_dir(root.path().join("locks")).unwrap();
        let held = cache.try_lock(&hex).unwrap();
        assert_eq!(cache.prune(u64::MAX).unwrap().in_use, std::slice::from_ref(&hex));
        drop(held);
        let pruned = cache.prune(u64::MAX).unwrap();
        assert_eq!((pruned.removed, pruned.freed_bytes, pruned.remaining_bytes), (vec![hex], 2, 0));
        assert!(!broken.exists());
    }
}
