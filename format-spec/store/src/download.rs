//! Downloading one file: into an unfinished one, hashed on the way, resumed by range, moved into place only when its digests hold.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::mpsc;

use crate::contents::Entry;
use crate::error::StoreError;
use crate::hashing::{Hashers, blocking, hash_file};
use crate::progress::Meter;
use crate::retry::Retry;
use crate::source::Source;

/// Pieces that wait for the disk: bounds the memory of a transfer.
const AHEAD: usize = 16;
/// Pieces are gathered to this size before they are hashed and written.
const GATHER: usize = 1 << 20;

/// A file that is being downloaded: open, positioned at its end, everything in it hashed.
struct Partial {
    path: PathBuf,
    file: File,
    hashers: Hashers,
    at: u64,
}

impl Partial {
    /// Opens what an earlier run left, or begins anew.
    fn open(path: PathBuf, size: u64) -> Result<Self, StoreError> {
        let io = |source| StoreError::Io { path: path.clone(), source };
        let mut file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path).map_err(io)?;
        let found = file.metadata().map_err(io)?.len();
        if found > size {
            file.set_len(0).map_err(io)?;
        }
        let (hashers, at) = hash_file(&path, size)?;
        file.seek(SeekFrom::Start(at)).map_err(io)?;
        Ok(Self { path, file, hashers, at })
    }

    fn restart(&mut self) -> Result<(), StoreError> {
        self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(StoreError::io(&self.path))?;
        self.hashers = Hashers::default();
        self.at = 0;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.hashers.update(bytes);
        self.file.write_all(bytes).map_err(StoreError::io(&self.path))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Writes what comes until the sender is gone.
    fn drain(mut self, mut pieces: mpsc::Receiver<Bytes>, meter: &Meter) -> (Self, Result<(), StoreError>) {
        let mut gathered = Vec::with_capacity(GATHER);
        loop {
            let piece = pieces.blocking_recv();
            if let Some(piece) = &piece {
                gathered.extend_from_slice(piece);
            }
            if gathered.len() >= GATHER || (piece.is_none() && !gathered.is_empty()) {
                if let Err(error) = self.write(&gathered) {
                    return (self, Err(error));
                }
                meter.set(self.at);
                gathered.clear();
            }
            if piece.is_none() {
                return (self, Ok(()));
            }
        }
    }
}

/// Downloads a file to `path`, where only a whole and right one ever appears. Until then it is `part`, on the same file
/// system.
///
/// `place` is what errors call the store.
pub(crate) async fn download(
    source: &Source<'_>,
    place: &str,
    entry: &Entry,
    part: PathBuf,
    path: &Path,
    meter: &Meter,
) -> Result<(), StoreError> {
    let size = entry.size;
    let mut partial = blocking({
        let part = part.clone();
        move || Partial::open(part, size)
    })
    .await?;
    meter.set(partial.at);
    let mut retry = Retry::default();
    loop {
        let before = partial.at;
        let received;
        (partial, received) = receive(source, place, entry, partial, meter).await?;
        let error = match received {
            Ok(()) => match check(place, entry, &partial) {
                Ok(()) => break,
                Err(error) => {
                    partial.restart()?;
                    meter.set(0);
                    error
                }
            },
            Err(error) => {
                if partial.at > before {
                    retry.progressed();
                }
                error
            }
        };
        if let Err(error) = retry.after(error, meter).await {
            if matches!(error, StoreError::Digest { .. }) {
                // Nothing of it is of use to a later run.
                let _ = std::fs::remove_file(&part);
            }
            return Err(error);
        }
    }
    let target = path.to_owned();
    blocking(move || {
        partial.file.sync_all().map_err(StoreError::io(&partial.path))?;
        std::fs::rename(&partial.path, &target).map_err(StoreError::io(&target))
    })
    .await
}

/// Receives from where the file stands to its end. The outer error ends the download, the inner one may be worth a retry.
async fn receive(
    source: &Source<'_>,
    place: &str,
    entry: &Entry,
    partial: Partial,
    meter: &Meter,
) -> Result<(Partial, Result<(), StoreError>), StoreError> {
    if partial.at >= entry.size {
        return Ok((partial, Ok(())));
    }
    let mut stream = match source.open(entry, partial.at).await {
        Ok(stream) => stream,
        Err(error) => return Ok((partial, Err(error))),
    };
    let (sender, receiver) = mpsc::channel(AHEAD);
    let mut left = entry.size - partial.at;
    let writer = {
        let meter = meter.clone();
        tokio::task::spawn_blocking(move || partial.drain(receiver, &meter))
    };
    let mut outcome = Ok(());
    while let Some(piece) = stream.next().await {
        let piece = match piece {
            Ok(piece) => piece,
            Err(error) => {
                outcome = Err(error);
                break;
            }
        };
        if piece.len() as u64 > left {
            let found = entry.size.saturating_add(piece.len() as u64 - left);
            outcome = Err(StoreError::Size {
                place: place.to_owned(),
                what: entry.path.clone(),
                found,
                expected: entry.size,
            });
            break;
        }
        left -= piece.len() as u64;
        if sender.send(piece).await.is_err() {
            // The writer has failed and says why.
            break;
        }
    }
    drop(sender);
    let (partial, written) = writer.await.map_err(|failed| StoreError::Transfer {
        place: place.to_owned(),
        what: entry.path.clone(),
        reason: failed.to_string(),
        transient: false,
    })?;
    let short = outcome.is_ok() && partial.at < entry.size;
    let size = || StoreError::Size {
        place: place.to_owned(),
        what: entry.path.clone(),
        found: partial.at,
        expected: entry.size,
    };
    let result = written.and(outcome).and_then(|()| if short { Err(size()) } else { Ok(()) });
    Ok((partial, result))
}

fn check(place: &str, entry: &Entry, partial: &Partial) -> Result<(), StoreError> {
    let (blake3, sha256) = partial.hashers.finish();
    let wrong = |found: String, expected: String| StoreError::Digest {
        place: place.to_owned(),
        what: entry.path.clone(),
        found,
        expected,
    };
    if blake3 != entry.blake3 {
        return Err(wrong(format!("blake3:{blake3}"), format!("blake3:{}", entry.blake3)));
    }
    match &entry.sha256 {
        Some(expected) if *expected != sha256 => Err(wrong(format!("sha256:{sha256}"), format!("sha256:{expected}"))),
        _ => Ok(()),
    }
}

/// Whether a file is there and has the size and the BLAKE3 of an entry.
pub(crate) async fn is_whole(path: &Path, entry: &Entry) -> Result<bool, StoreError> {
    match std::fs::metadata(path) {
        Ok(meta) if meta.len() == entry.size => {}
        Ok(_) => return Ok(false),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(StoreError::io(path)(e)),
    }
    let path = path.to_owned();
    let (hashers, _) = blocking(move || hash_file(&path, u64::MAX)).await?;
    Ok(hashers.finish().0 == entry.blake3)
}
