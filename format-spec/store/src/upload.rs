//! Filling a store: from a folder, or from another store.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::{StreamExt, TryStreamExt, stream as futures};
use serde::Serialize;
use vt_bundle::Bundle;
use vt_bundle::manifest::file_name;

use crate::client::Options;
use crate::contents::{Contents, Entry};
use crate::error::StoreError;
use crate::hashing;
use crate::progress::{Meter, Progress};
use crate::reference::Reference;
use crate::source::Source;
use crate::store::{State, Store};

/// What a push or a copy did.
#[derive(Clone, Debug, Serialize)]
pub struct Pushed {
    /// Where the bundle is now.
    pub reference: String,
    /// Bundle id.
    pub id: String,
    /// Digest of the OCI manifest, in a store that has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Files of the bundle.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Files that were not there yet, or were damaged there.
    pub uploaded_files: u64,
    /// Their bytes.
    pub uploaded_bytes: u64,
}

/// Reads a bundle's folder as far as a push needs it.
pub(crate) fn open_folder(dir: &Path) -> Result<Contents, StoreError> {
    let bundle = Bundle::open(dir)?;
    let path = dir.join(file_name::MANIFEST);
    let bytes = std::fs::read(&path).map_err(StoreError::io(&path))?;
    let contents = Contents::read(&dir.display().to_string(), bytes)?;
    if contents.id != bundle.id() {
        let (found, expected) = (contents.id, bundle.id().to_owned());
        return Err(StoreError::Digest {
            place: dir.display().to_string(),
            what: file_name::MANIFEST.into(),
            found,
            expected,
        });
    }
    Ok(contents)
}

/// Stores every file that is not there yet, some at once, and then makes the bundle known.
pub(crate) async fn upload(
    source: &Source<'_>,
    mut contents: Contents,
    store: &Store,
    to: &Reference,
    options: &Options,
    progress: &Arc<dyn Progress>,
) -> Result<Pushed, StoreError> {
    store.prepare(&Meter::new(progress)).await?;
    progress.begin("pushing", contents.total_bytes());
    let (files, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    let entries = std::mem::take(&mut contents.entries);
    let (last, first): (Vec<_>, Vec<_>) = entries.into_iter().partition(|entry| entry.path == file_name::MANIFEST);
    let one = async |mut entry: Entry| -> Result<Entry, StoreError> {
        let meter = Meter::new(progress);
        if !store.keeps(&entry) {
            meter.set(entry.size);
            return Ok(entry);
        }
        if let (Source::Folder(dir), true) = (source, store.needs_sha256()) {
            entry.sha256 = Some(hashing::checked_sha256(&dir.join(&entry.path), &entry).await?);
        }
        let mut state = store.state(&entry, &meter).await?;
        if state == State::Present && options.verify_existing {
            state = store.read_back(&entry, &meter).await?;
        }
        if state == State::Present {
            meter.set(entry.size);
            return Ok(entry);
        }
        let sha256 = store.put(&entry, source, state == State::Damaged, &meter).await?;
        entry.sha256 = sha256.or(entry.sha256);
        // A store may keep what it has under this name instead of looking at it.
        if state == State::Damaged && store.read_back(&entry, &meter).await? != State::Present {
            let digest = match (&entry.sha256, store.needs_sha256()) {
                (Some(sha256), true) => format!("sha256:{sha256}"),
                _ => format!("blake3:{}", entry.blake3),
            };
            return Err(StoreError::Unmended { place: to.to_string(), what: entry.path, digest });
        }
        files.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(entry.size, Ordering::Relaxed);
        Ok(entry)
    };
    // The manifest comes last: in a store that finds a bundle by its id, it is what makes it found.
    let mut done: Vec<(usize, Entry)> = futures::iter(first.into_iter().enumerate())
        .map(async |(i, entry)| Ok::<_, StoreError>((i, one(entry).await?)))
        .buffer_unordered(options.jobs.max(1))
        .try_collect()
        .await?;
    done.sort_by_key(|(i, _)| *i);
    for entry in last {
        contents.entries.push(one(entry).await?);
    }
    contents.entries.extend(done.into_iter().map(|(_, entry)| entry));
    let digest = store.publish(to, &contents, options.verify_existing, &Meter::new(progress)).await?;
    Ok(Pushed {
        reference: to.to_string(),
        id: contents.id.clone(),
        digest,
        files: contents.entries.len() as u64,
        bytes: contents.total_bytes(),
        uploaded_files: files.into_inner(),
        uploaded_bytes: bytes.into_inner(),
    })
}
