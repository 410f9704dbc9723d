//! Writing a bundle's files: segments by position, assets, and last the manifest with its id.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use crate::error::BundleError;
use crate::hash::{Digest, SEGMENT_BYTES, leaf_count, segment_digest, to_hex};
use crate::manifest::{Asset, AssetRole, Manifest, Placement, Segment, file_name};

/// Name of a segment file, relative to the bundle.
pub fn segment_file(placement: Placement, index: u64) -> String {
    let space = match placement {
        Placement::Image => "image",
        Placement::Cold => "cold",
    };
    format!("segments/{space}-{index:05}.bin")
}

/// The segment files of one address space, open for writing by position from several threads.
#[derive(Debug)]
pub struct SegmentWriter {
    placement: Placement,
    size: u64,
    files: Vec<(PathBuf, File)>,
}

impl SegmentWriter {
    /// Creates (or, on a resume, opens) the segments for an address space of `size` bytes and reserves their space, so
    /// that a full disk is found before any work is done.
    ///
    /// # Errors
    /// [`BundleError::Io`] naming the segment.
    pub fn create(dir: &Path, placement: Placement, size: u64) -> Result<Self, BundleError> {
        let mut files = Vec::new();
        for index in 0..size.div_ceil(SEGMENT_BYTES) {
            let path = dir.join(segment_file(placement, index));
            let len = SEGMENT_BYTES.min(size - index * SEGMENT_BYTES);
            let io = |source| BundleError::Io { path: path.clone(), source };
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent).map_err(io)?;
            }
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
            match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len) {
                Ok(()) => {}
                // Not every file system reserves; the write itself will then find a full disk.
                Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
                Err(e) => return Err(io(e.into())),
            }
            file.set_len(len).map_err(io)?;
            files.push((path, file));
        }
        Ok(Self { placement, size, files })
    }

    /// Bytes of the address space.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Writes bytes at an offset of the address space; they must not cross a segment.
    ///
    /// # Errors
    /// [`BundleError::Io`] naming the segment.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), BundleError> {
        let (path, file) = self.segment_of(offset)?;
        file.write_all_at(bytes, offset % SEGMENT_BYTES)
            .map_err(|source| BundleError::Io { path: path.clone(), source })
    }

    /// Reads bytes back; they must not cross a segment.
    ///
    /// # Errors
    /// [`BundleError::Io`] naming the segment.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), BundleError> {
        let (path, file) = self.segment_of(offset)?;
        file.read_exact_at(bytes, offset % SEGMENT_BYTES)
            .map_err(|source| BundleError::Io { path: path.clone(), source })
    }

    /// Flushes one segment to the disk.
    ///
    /// # Errors
    /// [`BundleError::Io`] naming the segment.
    pub fn flush(&self, index: u64) -> Result<(), BundleError> {
        let (path, file) = self.segment_of(index.saturating_mul(SEGMENT_BYTES))?;
        file.sync_all().map_err(|source| BundleError::Io { path: path.clone(), source })
    }

    fn segment_of(&self, offset: u64) -> Result<&(PathBuf, File), BundleError> {
        self.files.get((offset / SEGMENT_BYTES) as usize).ok_or_else(|| BundleError::Io {
            path: PathBuf::from(segment_file(self.placement, offset / SEGMENT_BYTES)),
            source: io::Error::from(io::ErrorKind::InvalidInput),
        })
    }

    /// Flushes everything to the disk and describes the segments; `leaves` is the leaf table of the address space.
    ///
    /// # Errors
    /// [`BundleError::Io`] naming the segment.
    pub fn finish(self, leaves: &[Digest]) -> Result<Vec<Segment>, BundleError> {
        let mut segments = Vec::with_capacity(self.files.len());
        let mut at = 0;
        for (index, (path, file)) in self.files.iter().enumerate() {
            let index = index as u64;
            file.sync_all().map_err(|source| BundleError::Io { path: path.clone(), source })?;
            let size = SEGMENT_BYTES.min(self.size - index * SEGMENT_BYTES);
            let of_segment = &leaves[at..at + leaf_count(size) as usize];
            at += of_segment.len();
            let blake3 = segment_digest(of_segment).map(|d| to_hex(&d)).unwrap_or_default();
            segments.push(Segment { file: segment_file(self.placement, index), size, blake3 });
        }
        Ok(segments)
    }
}

/// Writes one asset and describes it.
///
/// # Errors
/// [`BundleError::Io`] naming the file.
pub fn write_asset(dir: &Path, role: AssetRole, file: &str, bytes: &[u8]) -> Result<Asset, BundleError> {
    write_synced(&dir.join(file), bytes)?;
    let blake3 = blake3::hash(bytes).to_hex().to_string();
    Ok(Asset { role, file: file.to_owned(), size: bytes.len() as u64, blake3 })
}

/// Writes the manifest and the id, and flushes the folder; returns the id.
///
/// # Errors
/// [`BundleError::Io`], or [`BundleError::Manifest`] if the configuration holds a number that JSON cannot.
pub fn write_manifest(dir: &Path, manifest: &Manifest) -> Result<String, BundleError> {
    let path = dir.join(file_name::MANIFEST);
    let bytes =
        manifest.canonical_bytes().map_err(|e| BundleError::Manifest { path: path.clone(), reason: e.to_string() })?;
    let id = to_hex(blake3::hash(&bytes).as_bytes());
    write_synced(&path, &bytes)?;
    write_synced(&dir.join(file_name::ID), format!("{id}\n").as_bytes())?;
    sync_folder(dir)?;
    Ok(id)
}

/// Flushes a folder's entries to the disk.
///
/// # Errors
/// [`BundleError::Io`].
pub fn sync_folder(dir: &Path) -> Result<(), BundleError> {
    File::open(dir).and_then(|f| f.sync_all()).map_err(|source| BundleError::Io { path: dir.to_owned(), source })
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), BundleError> {
    let io = |source| BundleError::Io { path: path.to_owned(), source };
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(io)?;
    }
    let mut file = File::create(path).map_err(io)?;
    file.write_all(bytes).map_err(io)?;
    file.sync_all().map_err(io)
}
