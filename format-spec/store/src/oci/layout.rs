//! An OCI image layout on disk: `oci-layout`, `index.json`, `blobs/sha256/`.

use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};

use crate::error::StoreError;
use crate::oci::model_pack::{Descriptor, ImageIndex, MAX_MANIFEST, to_bytes};
use crate::stream::{self, ByteStream};

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const MARKER: &str = "oci-layout";
const INDEX: &str = "index.json";

/// A layout, open or about to be made.
#[derive(Debug)]
pub(crate) struct Layout {
    dir: PathBuf,
}

impl Layout {
    pub(crate) fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    fn blob_path(&self, sha256: &str) -> PathBuf {
        self.dir.join("blobs/sha256").join(sha256)
    }

    fn index(&self) -> Result<ImageIndex, StoreError> {
        let path = self.dir.join(INDEX);
        let place = self.dir.display().to_string();
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map_err(|e| StoreError::NotABundle { place, reason: format!("{INDEX} is no image index: {e}") }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && self.dir.join(MARKER).exists() => {
                Ok(ImageIndex::default())
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                Err(StoreError::NotFound { place, what: "no OCI image layout is there".to_owned() })
            }
            Err(e) => Err(StoreError::io(&path)(e)),
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
        Ok(())
    }

    /// The manifest of a tag (`sha256:...` for a digest), with its digest; `None` where there is no such tag.
    pub(crate) fn manifest(&self, tag: &str) -> Result<Option<(Vec<u8>, String)>, StoreError> {
        let digest = match tag.strip_prefix("sha256:") {
            Some(hex) => hex.to_owned(),
            None => {
                let index = self.index()?;
                let tagged = |d: &&Descriptor| d.annotations.get(REF_NAME).is_some_and(|name| name == tag);
                // `skopeo` writes no name where its destination has none: a single manifest is meant then.
                let only =
                    || index.manifests.first().filter(|d| index.manifests.len() == 1 && d.annotations.is_empty());
                match index.manifests.iter().find(tagged).or_else(only).and_then(Descriptor::sha256) {
                    Some(hex) => hex.to_owned(),
                    None => return Ok(None),
                }
            }
        };
        let path = self.blob_path(&digest);
        match path.metadata() {
            Ok(meta) if meta.len() > MAX_MANIFEST => {
                let (place, what) = (path.display().to_string(), "manifest".to_owned());
                Err(StoreError::Size { place, what, found: meta.len(), expected: MAX_MANIFEST })
            }
            Ok(_) => Ok(Some((std::fs::read(&path).map_err(StoreError::io(&path))?, format!("sha256:{digest}")))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StoreError::io(&path)(e)),
        }
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

    pub(crate) fn has_blob(&self, sha256: &str, size: u64) -> bool {
        self.blob_path(sha256).metadata().is_ok_and(|meta| meta.len() == size)
    }

    pub(crate) fn read_blob(&self, sha256: &str, offset: u64) -> Result<ByteStream, StoreError> {
        let path = self.blob_path(sha256);
        let len = path.metadata().map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                StoreError::NotFound { place: self.dir.display().to_string(), what: format!("blob sha256:{sha256}") }
            }
            _ => StoreError::io(&path)(e),
        })?;
        Ok(stream::from_file(path, offset, len.len().saturating_sub(offset)))
    }

    /// Writes a blob and gives its SHA-256, which must be `expected` where that is given.
    pub(crate) async fn write_blob(
        &self,
        mut bytes: ByteStream,
        expected: Option<&str>,
        what: &str,
    ) -> Result<String, StoreError> {
        let partial = self.dir.join("blobs/sha256").join(format!(".partial-{}-{}", std::process::id(), random_name()));
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
        let partial = path.with_file_name(format!(".partial-{}-{}", std::process::id(), random_name()));
        let guard = Partial(&partial);
        let mut file = File::create(&partial).map_err(StoreError::io(&partial))?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(StoreError::io(&partial))?;
        std::fs::rename(&partial, path).map_err(StoreError::io(path))?;
        std::mem::forget(guard);
        Ok(())
    }
}

/// A name that nobody else uses at the same time.
fn random_name() -> String {
    // Every `RandomState` has other keys.
    stream::hex(&std::hash::RandomState::new().build_hasher().finish().to_le_bytes())
}

/// Removes a file that was not finished.
struct Partial<'a>(&'a Path);

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}
