//! Hashing files, on threads where it may block.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::contents::Entry;
use crate::error::StoreError;
use crate::stream::hex;

/// Bytes that are hashed at once.
const PIECE: usize = 1 << 20;

/// The two digests of bytes as they come.
#[derive(Clone, Default)]
pub(crate) struct Hashers {
    blake3: blake3::Hasher,
    sha256: Sha256,
}

impl Hashers {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.blake3.update(bytes);
        self.sha256.update(bytes);
    }

    /// BLAKE3 and SHA-256 of everything so far.
    pub(crate) fn finish(&self) -> (String, String) {
        (self.blake3.finalize().to_hex().to_string(), hex(&self.sha256.clone().finalize()))
    }
}

/// Hashes a file, or its first `limit` bytes.
pub(crate) fn hash_file(path: &Path, limit: u64) -> Result<(Hashers, u64), StoreError> {
    let mut file = File::open(path).map_err(StoreError::io(path))?.take(limit);
    let mut hashers = Hashers::default();
    let mut piece = vec![0; PIECE];
    let mut total = 0;
    loop {
        match file.read(&mut piece).map_err(StoreError::io(path))? {
            0 => return Ok((hashers, total)),
            n => {
                hashers.update(&piece[..n]);
                total += n as u64;
            }
        }
    }
}

/// The SHA-256 of a bundle's file whose size and BLAKE3 are what the manifest says.
pub(crate) async fn checked_sha256(path: &Path, entry: &Entry) -> Result<String, StoreError> {
    let owned = path.to_owned();
    let (hashers, found) = blocking(move || hash_file(&owned, u64::MAX)).await?;
    if found != entry.size {
        return Err(vt_bundle::BundleError::Size { path: path.to_owned(), found, expected: entry.size }.into());
    }
    let (found, sha256) = hashers.finish();
    if found != entry.blake3 {
        let expected = entry.blake3.clone();
        return Err(vt_bundle::BundleError::Hash { path: path.to_owned(), found, expected }.into());
    }
    Ok(sha256)
}

/// Runs something that blocks on a thread of its own.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(failed) => Err(StoreError::Transfer {
            place: "this process".to_owned(),
            what: "a worker".to_owned(),
            reason: failed.to_string(),
            transient: false,
        }),
    }
}
