//! Streams of bytes: from files, from memory, counted, hashed.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use crate::contents::Entry;
use crate::error::StoreError;
use crate::progress::Meter;

/// Pieces of a blob in order.
pub(crate) type ByteStream = BoxStream<'static, Result<Bytes, StoreError>>;

/// Bytes of one read from a file.
const PIECE: usize = 1 << 20;
/// Pieces that are read ahead: bounds the memory of a transfer.
const AHEAD: usize = 3;

/// The bytes of a file from an offset on, `len` of them, read ahead on a thread of their own.
pub(crate) fn from_file(path: PathBuf, offset: u64, len: u64) -> ByteStream {
    let (sender, receiver) = mpsc::channel(AHEAD);
    tokio::task::spawn_blocking(move || {
        let mut left = len;
        let open = || -> std::io::Result<File> {
            let mut file = File::open(&path)?;
            file.seek(SeekFrom::Start(offset))?;
            Ok(file)
        };
        let mut file = match open() {
            Ok(file) => file,
            Err(source) => {
                let _ = sender.blocking_send(Err(StoreError::Io { path: path.clone(), source }));
                return;
            }
        };
        while left > 0 {
            let mut piece = vec![0; left.min(PIECE as u64) as usize];
            let read = file.read_exact(&mut piece).map_err(|source| StoreError::Io { path: path.clone(), source });
            left -= piece.len() as u64;
            let failed = read.is_err();
            // The receiver goes away where the transfer failed: nobody needs the rest.
            if sender.blocking_send(read.map(|()| Bytes::from(piece))).is_err() || failed {
                return;
            }
        }
    });
    stream::unfold(receiver, |mut receiver| async { receiver.recv().await.map(|piece| (piece, receiver)) }).boxed()
}

/// Bytes in memory from an offset on.
pub(crate) fn from_bytes(bytes: impl Into<Bytes>, offset: u64) -> ByteStream {
    let mut bytes = bytes.into();
    let rest = bytes.split_off(usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len()));
    stream::iter([Ok(rest)]).boxed()
}

/// Counts what passes.
pub(crate) fn counted(stream: ByteStream, meter: &Meter) -> ByteStream {
    let meter = meter.clone();
    stream
        .inspect(move |piece| {
            if let Ok(piece) = piece {
                meter.advance(piece.len() as u64);
            }
        })
        .boxed()
}

/// Hashes what passes.
pub(crate) fn hashed(stream: ByteStream, hasher: &Arc<Mutex<Sha256>>) -> ByteStream {
    let hasher = hasher.clone();
    stream
        .inspect(move |piece| {
            if let (Ok(piece), Ok(mut hasher)) = (piece, hasher.lock()) {
                hasher.update(piece);
            }
        })
        .boxed()
}

/// Passes on what must be a file of a bundle, without its first `skip` bytes. Its end is withheld until size and BLAKE3
/// hold, so that whoever waits for `entry.size` bytes never has a whole file that is another one.
pub(crate) fn checked(stream: ByteStream, entry: &Entry, mut skip: u64) -> ByteStream {
    let entry = entry.clone();
    let size = {
        let (what, expected) = (entry.path.clone(), entry.size);
        move |found| StoreError::Size { place: "source".to_owned(), what: what.clone(), found, expected }
    };
    let short = size.clone();
    let seen = Arc::new(AtomicU64::new(0));
    let (passed, len) = (seen.clone(), entry.size);
    let mut hasher = blake3::Hasher::new();
    let pieces = stream.map(move |piece| {
        let mut piece = piece?;
        let total = passed.load(Ordering::Relaxed) + piece.len() as u64;
        passed.store(total, Ordering::Relaxed);
        if total > entry.size {
            return Err(size(total));
        }
        hasher.update(&piece);
        if total == entry.size
            && let found = hasher.finalize().to_hex()
            && found.as_str() != entry.blake3
        {
            let (found, expected) = (format!("blake3:{found}"), format!("blake3:{}", entry.blake3));
            return Err(StoreError::Digest { place: "source".to_owned(), what: entry.path.clone(), found, expected });
        }
        let passed = skip.min(piece.len() as u64);
        skip -= passed;
        Ok(piece.split_off(passed as usize))
    });
    let end = stream::once(async move {
        let found = seen.load(Ordering::Relaxed);
        (found < len).then(|| Err(short(found)))
    });
    pieces.chain(end.filter_map(|end| async { end })).boxed()
}

/// Keeps the first error that passes, for a consumer that hides the causes of its failures.
pub(crate) fn watched(
    stream: ByteStream,
    slot: &Arc<Mutex<Option<StoreError>>>,
) -> BoxStream<'static, std::io::Result<Bytes>> {
    let slot = slot.clone();
    stream
        .map(move |piece| {
            piece.map_err(|error| {
                let text = error.to_string();
                if let Ok(mut slot) = slot.lock() {
                    slot.get_or_insert(error);
                }
                std::io::Error::other(text)
            })
        })
        .boxed()
}

/// Everything of a stream that must have `size` bytes, at most `limit`.
pub(crate) async fn collect(
    place: &str,
    what: &str,
    mut stream: ByteStream,
    size: u64,
    limit: u64,
) -> Result<Vec<u8>, StoreError> {
    let wrong =
        |found| StoreError::Size { place: place.to_owned(), what: what.to_owned(), found, expected: size.min(limit) };
    if size > limit {
        return Err(wrong(size));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    while let Some(piece) = stream.next().await {
        let piece = piece?;
        if bytes.len() as u64 + piece.len() as u64 > size {
            return Err(wrong(bytes.len() as u64 + piece.len() as u64));
        }
        bytes.extend_from_slice(&piece);
    }
    match bytes.len() as u64 {
        found if found != size => Err(wrong(found)),
        _ => Ok(bytes),
    }
}

/// SHA-256 of bytes, in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|b| [DIGITS[usize::from(b >> 4)], DIGITS[usize::from(b & 15)]]).map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contents::Kind;

    fn through(bytes: &[u8], promised: &[u8], skip: u64) -> (Vec<u8>, Option<StoreError>) {
        let entry = Entry {
            path: "file".to_owned(),
            size: promised.len() as u64,
            blake3: blake3::hash(promised).to_hex().to_string(),
            sha256: None,
            kind: Kind::Weights,
        };
        let pieces: Vec<_> = bytes.chunks(3).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
        let mut checked = checked(stream::iter(pieces).boxed(), &entry, skip);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut passed = Vec::new();
            while let Some(piece) = checked.next().await {
                match piece {
                    Ok(piece) => passed.extend_from_slice(&piece),
                    Err(error) => return (passed, Some(error)),
                }
            }
            (passed, None)
        })
    }

    #[test]
    fn another_file_is_never_passed_on_whole() {
        assert!(matches!(through(b"weights", b"weights", 0), (passed, None) if passed == b"weights"));
        assert!(matches!(through(b"weights", b"weights", 4), (passed, None) if passed == b"hts"));
        for skip in [0, 4] {
            let (passed, error) = through(b"weighty", b"weights", skip);
            assert!(matches!(error, Some(StoreError::Digest { .. })), "{error:?}");
            assert!((passed.len() as u64) < 7 - skip);
        }
        for other in [&b"weight"[..], b"weights and more", b""] {
            let (_, error) = through(other, b"weights", 0);
            assert!(matches!(error, Some(StoreError::Size { .. })), "{error:?}");
        }
    }
}
