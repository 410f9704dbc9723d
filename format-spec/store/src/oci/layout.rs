//! An OCI image layout on disk: `oci-layout`, `index.json`, `blobs/sha256/`.

use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};

use crate::error::StoreError;
use crate::oci::model_pack::{Descriptor, ImageIndex, MAX_MANIFEST, to_bytes};
use crate::staging::Staging;
use crate::store::State;
use crate::stream::{self, ByteStream};

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const MARKER: &str = "oci-layout";
const INDEX: &str = "index.json";
/// Largest index that is read.
const MAX_INDEX: u64 = 16 << 20;

/// A layout, open or about to be made.
#[derive(Debug)]
pub(crate) struct Layout {
    dir: PathBuf,
    staging: Staging,
}

impl Layout {
    pub(crate) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), staging: Staging::default() }
    }

    fn blob_path(&self, sha256: &str) -> PathBuf {
        self.dir.join("blobs/sha256").join(sha256)
    }

    fn index(&self) -> Result<ImageIndex, StoreError> {
        let path = self.dir.join(INDEX);
        let place = self.dir.display().to_string();
        match read_regular(&path, INDEX, MAX_INDEX)? {
            Some(bytes) => serde_json::from_slice(&bytes)
                .map_err(|e| StoreError::NotABundle { place, reason: format!("{INDEX} is no image index: {e}") }),
            None if self.dir.join(MARKER).exists() => Ok(ImageIndex::default()),
            None => Err(StoreError::NotFound { place, what: "no OCI image layout is there".to_owned() }),
        }
    }

    /// Makes the folder a layout, if it is none yet.
    pub(crate) fn prepare(&self) -> Result<(), StoreError> {
        let blobs = self.dir.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).map_err(StoreError::io(&blobs))?;
        let marker = self.dir.join(MARKER);
        if !marker.exists() {
            std::fs::write(&marker, br#"{"imageLayoutVersion":"1.0.0"}"#).map_err(StoreError::io(&marker))?;
        }
        self.staging.begin(&blobs, &[&blobs, &self.dir], is_partial);
        Ok(())
    }

    /// The manifest of a tag (`sha256:...` for a digest), with its digest; `None` where there is no such tag.
    pub(crate) fn manifest(&self, tag: &str) -> Result<Option<(Vec<u8>, String)>, StoreError> {
        let (digest, size) = match tag.strip_prefix("sha256:") {
            Some(hex) => (hex.to_owned(), None),
            None => {
                let index = self.index()?;
                let tagged = |d: &&Descriptor| d.annotations.get(REF_NAME).is_some_and(|name| name == tag);
                match index.manifests.iter().find(tagged).and_then(|d| Some((d.sha256()?, d.size))) {
                    Some((hex, size)) => (hex.to_owned(), Some(size)),
                    None => return Ok(None),
                }
            }
        };
        let path = self.blob_path(&digest);
        let Some(bytes) = read_regular(&path, "manifest", MAX_MANIFEST)? else { return Ok(None) };
        let (place, what, found) = (path.display().to_string(), "manifest".to_owned(), bytes.len() as u64);
        if let Some(expected) = size.filter(|size| *size != found) {
            return Err(StoreError::Size { place, what, found, expected });
        }
        let found = stream::sha256(&bytes);
        if found != digest {
            let (found, expected) = (format!("sha256:{found}"), format!("sha256:{digest}"));
            return Err(StoreError::Digest { place, what, found, expected });
        }
        Ok(Some((bytes, format!("sha256:{digest}"))))
    }

    /// What is meant where no tag is given: the digest of a single manifest without a name, as `skopeo` writes it where
    /// its destination has none.
    pub(crate) fn unnamed(&self) -> Result<Option<String>, StoreError> {
        let index = self.index()?;
        let only = index.manifests.first().filter(|d| index.manifests.len() == 1 && d.annotations.is_empty());
        Ok(only.and_then(Descriptor::sha256).map(|hex| format!("sha256:{hex}")))
    }

    /// Stores a manifest and gives it a tag; without a tag it is found by its digest or as a referrer.
    pub(crate) fn put_manifest(
        &self,
        tag: Option<&str>,
        bytes: &[u8],
        mut descriptor: Descriptor,
    ) -> Result<(), StoreError> {
        if let Some(sha256) = descriptor.sha256() {
            self.write_whole(&self.blob_path(sha256), bytes)?;
        }
        let lock = File::open(&self.dir).map_err(StoreError::io(&self.dir))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|e| StoreError::io(&self.dir)(e.into()))?;
        let mut index = match self.index() {
            Err(StoreError::NotFound { .. }) => ImageIndex::default(),
            other => other?,
        };
        if let Some(tag) = tag {
            index.manifests.retain(|d| d.annotations.get(REF_NAME).is_none_or(|name| name != tag));
            descriptor.annotations.insert(REF_NAME.to_owned(), tag.to_owned());
        } else {
            index.manifests.retain(|d| d.digest != descriptor.digest);
        }
        index.manifests.push(descriptor);
        let bytes = to_bytes(&index, &self.dir.display().to_string())?;
        self.write_whole(&self.dir.join(INDEX), &bytes)
    }

    /// All manifests of the index with the tag that each has.
    pub(crate) fn manifests(&self) -> Result<Vec<(Option<String>, Descriptor)>, StoreError> {
        let index = self.index()?;
        Ok(index.manifests.into_iter().map(|d| (d.annotations.get(REF_NAME).cloned(), d)).collect())
    }

    pub(crate) fn state(&self, sha256: &str, size: u64) -> State {
        match self.blob_path(sha256).metadata() {
            Ok(meta) if meta.len() == size && meta.is_file() => State::Present,
            Ok(_) => State::Damaged,
            Err(_) => State::Absent,
        }
    }

    pub(crate) fn read_blob(&self, sha256: &str, offset: u64) -> Result<ByteStream, StoreError> {
        let path = self.blob_path(sha256);
        let len = path.metadata().map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                StoreError::NotFound { place: self.dir.display().to_string(), what: format!("blob sha256:{sha256}") }
            }
            _ => StoreError::io(&path)(e),
        })?;
        if !len.is_file() {
            return Err(irregular(&path));
        }
        Ok(stream::from_file(path, offset, len.len().saturating_sub(offset)))
    }

    /// Writes a blob and gives its SHA-256, which must be `expected` where that is given.
    pub(crate) async fn write_blob(
        &self,
        mut bytes: ByteStream,
        expected: Option<&str>,
        what: &str,
    ) -> Result<String, StoreError> {
        let partial = self.dir.join("blobs/sha256").join(partial_name());
        let mut file = File::create(&partial).map_err(StoreError::io(&partial))?;
        let guard = Partial(&partial);
        let hasher = Arc::new(Mutex::new(Sha256::new()));
        bytes = stream::hashed(bytes, &hasher);
        while let Some(piece) = bytes.next().await {
            file.write_all(&piece?).map_err(StoreError::io(&partial))?;
        }
        file.sync_all().map_err(StoreError::io(&partial))?;
        let found = hasher.lock().map(|h| stream::hex(&h.clone().finalize())).unwrap_or_default();
        if let Some(expected) = expected.filter(|e| **e != found) {
            let (place, expected) = (self.dir.display().to_string(), expected.to_owned());
            return Err(StoreError::Digest { place, what: what.to_owned(), found, expected });
        }
        let path = self.blob_path(&found);
        std::fs::rename(&partial, &path).map_err(StoreError::io(&path))?;
        std::mem::forget(guard);
        Ok(found)
    }

    fn write_whole(&self, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
        let partial = path.with_file_name(partial_name());
        let guard = Partial(&partial);
        let mut file = File::create(&partial).map_err(StoreError::io(&partial))?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(StoreError::io(&partial))?;
        std::fs::rename(&partial, path).map_err(StoreError::io(path))?;
        std::mem::forget(guard);
        Ok(())
    }
}

/// A small file of a layout; `None` where it is not there. Anything but a regular file could block or never end.
fn read_regular(path: &Path, what: &str, limit: u64) -> Result<Option<Vec<u8>>, StoreError> {
    let meta = match path.metadata() {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(StoreError::io(path)(e)),
    };
    if !meta.is_file() {
        return Err(irregular(path));
    }
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut bytes));
    read.map_err(StoreError::io(path))?;
    if bytes.len() as u64 > limit {
        let (place, what) = (path.display().to_string(), what.to_owned());
        return Err(StoreError::Size { place, what, found: meta.len().max(limit + 1), expected: limit });
    }
    Ok(Some(bytes))
}

fn irregular(path: &Path) -> StoreError {
    StoreError::NotABundle { place: path.display().to_string(), reason: "expected a regular file".to_owned() }
}

/// A name for a file that is being written, which nobody else uses at the same time.
fn partial_name() -> String {
    // Every `RandomState` has other keys.
    let random = stream::hex(&std::hash::RandomState::new().build_hasher().finish().to_le_bytes());
    format!(".partial-{}-{random}", std::process::id())
}

/// Whether a name is one of those.
fn is_partial(name: &str) -> bool {
    let parts = name.strip_prefix(".partial-").and_then(|rest| rest.split_once('-'));
    parts.is_some_and(|(process, random)| {
        let digits = !process.is_empty() && process.bytes().all(|b| b.is_ascii_digit());
        digits && random.len() == 16 && random.bytes().all(|b| b.is_ascii_hexdigit())
    })
}

/// Removes a file that was not finished.
struct Partial<'a>(&'a Path);

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A layout with one manifest under the tag `v1`.
    fn layout(dir: &Path, name: Option<&str>) -> (Layout, String) {
        let layout = Layout::new(dir);
        layout.prepare().unwrap();
        let bytes = br#"{"schemaVersion":2}"#;
        let descriptor = Descriptor::new(crate::oci::model_pack::MANIFEST_TYPE, bytes);
        let hex = descriptor.sha256().unwrap().to_owned();
        layout.put_manifest(name, bytes, descriptor).unwrap();
        (layout, hex)
    }

    #[test]
    fn a_manifest_must_have_the_digest_that_names_it() {
        let root = tempfile::tempdir().unwrap();
        let (layout, hex) = layout(root.path(), Some("v1"));
        assert!(layout.manifest("v1").unwrap().is_some());
        let path = layout.blob_path(&hex);
        std::fs::write(&path, br#"{"schemaVersion":3}"#).unwrap();
        for tag in ["v1".to_owned(), format!("sha256:{hex}")] {
            let error = layout.manifest(&tag).unwrap_err();
            assert!(matches!(error, StoreError::Digest { .. }) && error.exit_code() == 4, "{error}");
        }
        std::fs::write(&path, b"{}").unwrap();
        assert!(matches!(layout.manifest("v1"), Err(StoreError::Size { .. })));
    }

    #[test]
    fn a_tag_that_is_given_must_be_there() {
        let root = tempfile::tempdir().unwrap();
        let (layout, hex) = layout(root.path(), None);
        assert!(layout.manifest("v1").unwrap().is_none());
        assert_eq!(layout.unnamed().unwrap(), Some(format!("sha256:{hex}")));
    }

    #[test]
    fn an_index_is_a_file_of_bounded_size() {
        let root = tempfile::tempdir().unwrap();
        let (layout, _) = layout(root.path(), Some("v1"));
        let index = root.path().join(INDEX);
        File::create(&index).unwrap().set_len(MAX_INDEX + 1).unwrap();
        assert!(matches!(layout.manifests(), Err(StoreError::Size { .. })));
        std::fs::remove_file(&index).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &index).unwrap();
        assert!(matches!(layout.manifests(), Err(StoreError::NotABundle { .. })));
    }

    #[test]
    fn what_others_keep_in_an_index_stays() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join(MARKER), "{}").unwrap();
        let mut foreign: serde_json::Value = serde_json::from_str(
            r#"{"schemaVersion":2,"annotations":{"made.by":"others"},"manifests":[{"mediaType":"m","digest":"sha256:0",
                "size":1,"platform":{"os":"linux"},"urls":["u"],"data":"e30=","annotations":null}]}"#,
        )
        .unwrap();
        std::fs::write(root.path().join(INDEX), foreign.to_string()).unwrap();
        layout(root.path(), Some("v1"));
        let bytes = std::fs::read(root.path().join(INDEX)).unwrap();
        let mut found: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(found["manifests"].as_array_mut().unwrap().pop().unwrap()["annotations"][REF_NAME], "v1");
        found.as_object_mut().unwrap().remove("mediaType");
        // Null and nothing are the same.
        foreign["manifests"][0].as_object_mut().unwrap().remove("annotations");
        assert_eq!(found, foreign);
        std::fs::write(root.path().join(INDEX), r#"{"schemaVersion":2,"manifests":null}"#).unwrap();
        layout(root.path(), Some("v1"));
    }

    #[test]
    fn what_killed_pushes_left_is_removed_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let (own, hex) = layout(root.path(), Some("v1"));
        let left = [".partial-1-0123456789abcdef", "blobs/sha256/.partial-4711-fedcba9876543210"];
        let others = [".partial-x", "blobs/sha256/oci-put-blob123", "blobs/sha256/.partial-1-thesis"];
        for name in left.iter().chain(&others) {
            std::fs::write(root.path().join(name), "half").unwrap();
        }
        // `own` is at work still.
        Layout::new(root.path()).prepare().unwrap();
        assert!(left.iter().chain(&others).all(|name| root.path().join(name).exists()));
        drop(own);
        Layout::new(root.path()).prepare().unwrap();
        assert!(left.iter().all(|name| !root.path().join(name).exists()));
        assert!(others.iter().all(|name| root.path().join(name).exists()));
        assert!(root.path().join("blobs/sha256").join(hex).exists());
    }
}
