//! What an interrupted conversion had finished, so that the next run does not do it again.
//!
//! An append-only file of records, each ended by the first eight bytes of its BLAKE3. A torn or foreign tail is ignored.
//! The key ties it to the source files (names, sizes, times of change), the plan and the version of this program.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use vt_bundle::BundleError;
use vt_bundle::hash::Digest;
use vt_bundle::manifest::Placement;

use crate::plan::Plan;
use crate::source::Checkpoint;

use super::window::WINDOW_BYTES;

/// File in the partial folder.
pub const NAME: &str = "journal";

/// Bytes of the check at the end of a record.
const CHECK_BYTES: usize = 8;

/// What the journal says is done.
#[derive(Debug, Default)]
pub struct Done {
    /// Leaf digests of source files, by file and piece.
    pub sources: HashMap<(u32, u32), Vec<Digest>>,
    /// Leaf digests of finished windows, by address space and index.
    pub windows: HashMap<(Placement, u64), Vec<Digest>>,
}

/// The open journal.
pub struct Journal {
    path: PathBuf,
    file: Mutex<File>,
}

/// The key of a conversion.
pub fn key(checkpoint: &Checkpoint, plan: &Plan) -> Digest {
    let mut hasher = blake3::Hasher::new();
    let mut add = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    add(env!("CARGO_PKG_VERSION").as_bytes());
    add(&WINDOW_BYTES.to_le_bytes());
    for file in &checkpoint.files {
        add(file.name.as_bytes());
        let stat = fs::metadata(&file.path);
        let state = stat.map(|m| (m.len(), m.mtime(), m.mtime_nsec(), m.ino())).unwrap_or_default();
        add(format!("{state:?}").as_bytes());
    }
    for planned in &plan.tensors {
        add(format!("{:?}", planned.tensor).as_bytes());
    }
    *hasher.finalize().as_bytes()
}

fn check(record: &[u8]) -> [u8; CHECK_BYTES] {
    let mut short = [0; CHECK_BYTES];
    short.copy_from_slice(&blake3::hash(record).as_bytes()[..CHECK_BYTES]);
    short
}

impl Journal {
    /// Opens the journal of a partial folder. Where it has another key, or `resume` is off, everything that an earlier
    /// run left is removed first.
    ///
    /// # Errors
    /// [`BundleError::Io`].
    pub fn open(dir: &Path, key: Digest, resume: bool) -> Result<(Self, Done), BundleError> {
        let path = dir.join(NAME);
        let io = |source| BundleError::Io { path: path.clone(), source };
        let mut bytes = Vec::new();
        match File::open(&path) {
            Ok(mut file) => {
                file.read_to_end(&mut bytes).map_err(io)?;
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(io(e)),
        }
        let records = parse(&bytes);
        let mut valid = records.last().map_or(0, |r| r.end);
        let ours = records.first().is_some_and(|r| r.payload == key);
        let mut done = Done::default();
        if resume && ours {
            records[1..].iter().for_each(|r| done.add(r));
        } else {
            for name in ["segments", "assets", vt_bundle::manifest::file_name::MANIFEST] {
                let stale = dir.join(name);
                let removed = if stale.is_dir() { fs::remove_dir_all(&stale) } else { fs::remove_file(&stale) };
                match removed {
                    Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                        return Err(BundleError::Io { path: stale, source: e });
                    }
                    _ => {}
                }
            }
            valid = 0;
        }
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(io)?;
        file.set_len(valid as u64).map_err(io)?;
        let journal =
            Self { path: path.clone(), file: Mutex::new(OpenOptions::new().append(true).open(&path).map_err(io)?) };
        if valid == 0 {
            journal.append(b'K', 0, &key)?;
        }
        Ok((journal, done))
    }

    /// Notes the leaf digests of a piece of a source file.
    ///
    /// # Errors
    /// [`BundleError::Io`].
    pub fn source(&self, file: u32, piece: u32, leaves: &[Digest]) -> Result<(), BundleError> {
        self.append(b'S', u64::from(file) << 32 | u64::from(piece), leaves.as_flattened())
    }

    /// Notes a finished window, after its bytes have been written.
    ///
    /// # Errors
    /// [`BundleError::Io`].
    pub fn window(&self, placement: Placement, index: u64, leaves: &[Digest]) -> Result<(), BundleError> {
        let tag = match placement {
            Placement::Image => b'I',
            Placement::Cold => b'C',
        };
        self.append(tag, index, leaves.as_flattened())
    }

    fn append(&self, tag: u8, index: u64, payload: &[u8]) -> Result<(), BundleError> {
        let mut record = Vec::with_capacity(13 + payload.len() + CHECK_BYTES);
        record.push(tag);
        record.extend_from_slice(&index.to_le_bytes());
        record.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        record.extend_from_slice(payload);
        record.extend_from_slice(&check(&record));
        let mut file = self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.write_all(&record).map_err(|source| BundleError::Io { path: self.path.clone(), source })
    }

    /// Removes the journal: the work is complete.
    ///
    /// # Errors
    /// [`BundleError::Io`].
    pub fn remove(self) -> Result<(), BundleError> {
        fs::remove_file(&self.path).map_err(|source| BundleError::Io { path: self.path.clone(), source })
    }
}

struct Record<'a> {
    tag: u8,
    index: u64,
    payload: &'a [u8],
    end: usize,
}

fn parse(bytes: &[u8]) -> Vec<Record<'_>> {
    let mut records = Vec::new();
    let mut at = 0;
    while let Some(record) = parse_one(bytes, at) {
        at = record.end;
        records.push(record);
    }
    records
}

fn parse_one(bytes: &[u8], at: usize) -> Option<Record<'_>> {
    let head = bytes.get(at..at.checked_add(13)?)?;
    let index = u64::from_le_bytes(head[1..9].try_into().ok()?);
    let len = u32::from_le_bytes(head[9..13].try_into().ok()?) as usize;
    let body_end = (at + 13).checked_add(len)?;
    let payload = bytes.get(at + 13..body_end)?;
    let end = body_end.checked_add(CHECK_BYTES)?;
    (bytes.get(body_end..end)? == check(&bytes[at..body_end])).then_some(Record { tag: head[0], index, payload, end })
}

impl Done {
    fn add(&mut self, record: &Record<'_>) {
        let (digests, rest) = record.payload.as_chunks::<32>();
        if !rest.is_empty() {
            return;
        }
        match record.tag {
            b'S' => {
                self.sources.insert(((record.index >> 32) as u32, record.index as u32), digests.to_vec());
            }
            b'I' => {
                self.windows.insert((Placement::Image, record.index), digests.to_vec());
            }
            b'C' => {
                self.windows.insert((Placement::Cold, record.index), digests.to_vec());
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_tail_and_a_foreign_key_are_ignored() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let (journal, done) = Journal::open(dir.path(), [1; 32], true).expect("new journal");
        assert!(done.sources.is_empty() && done.windows.is_empty());
        journal.source(3, 1, &[[2; 32]]).expect("appended");
        journal.window(Placement::Image, 7, &[[3; 32], [4; 32]]).expect("appended");
        drop(journal);
        let path = dir.path().join(NAME);
        let whole = fs::read(&path).expect("read");
        for cut in [0, 1, 30, whole.len() - 1] {
            fs::write(&path, &whole[..cut]).expect("written");
            let (_, done) = Journal::open(dir.path(), [1; 32], true).expect("opened");
            assert!(done.windows.is_empty(), "cut at {cut}");
        }
        fs::write(&path, &whole).expect("written");
        let (_, done) = Journal::open(dir.path(), [1; 32], true).expect("opened");
        assert_eq!(done.windows.get(&(Placement::Image, 7)), Some(&vec![[3; 32], [4; 32]]));
        assert_eq!(done.sources.get(&(3, 1)), Some(&vec![[2; 32]]));
        let (_, done) = Journal::open(dir.path(), [9; 32], true).expect("opened");
        assert!(done.sources.is_empty());
    }
}
