//! The output folder: claimed under a lock, published by a rename.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::journal;
use rustix::fs::{FlockOperation, RenameFlags};
use vt_bundle::manifest::file_name;
use vt_bundle::outside::lies_in;
use vt_bundle::writer::sync_folder;

/// Why the output cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// Something is at the output already.
    #[error("{}: exists; give --overwrite to replace it, or another OUTPUT", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// What is at the output is not a bundle, so it is not replaced.
    #[error("{}: exists and is not a vt bundle; remove it yourself or give another OUTPUT", path.display())]
    NotABundle {
        /// The output.
        path: PathBuf,
    },
    /// What is at the place of the partial folder was not left by a converter.
    #[error("{}: exists and was not left by vt-convert; move it away or give another OUTPUT", path.display())]
    NotPartial {
        /// The partial folder.
        path: PathBuf,
    },
    /// Input and output overlap.
    #[error("OUTPUT {} is the input, or one lies inside the other ({}); give another OUTPUT", output.display(), input.display())]
    Overlap {
        /// The input.
        input: PathBuf,
        /// The output.
        output: PathBuf,
    },
    /// The folder that would hold the output does not exist.
    #[error("{}: the folder for OUTPUT does not exist; create it first", path.display())]
    NoParent {
        /// The folder.
        path: PathBuf,
    },
    /// Another converter is at work on the same output.
    #[error("{}: another vt-convert{} is writing this OUTPUT", path.display(), owner.map(|p| format!(" (process {p})")).unwrap_or_default())]
    Busy {
        /// The partial folder.
        path: PathBuf,
        /// The other process, if it could be read.
        owner: Option<u32>,
    },
    /// There is not enough space.
    #[error("{}: needs {needed} bytes free, the file system has {free}; free some space or give another OUTPUT", path.display())]
    NoSpace {
        /// The partial folder.
        path: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
}

impl OutputError {
    /// The exit code that a program should end with.
    pub fn exit_code(&self) -> u8 {
        match self {
            OutputError::Exists { .. }
            | OutputError::NotABundle { .. }
            | OutputError::NotPartial { .. }
            | OutputError::Overlap { .. } => 2,
            _ => 6,
        }
    }
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> OutputError + '_ {
    |source| OutputError::Io { path: path.to_owned(), source }
}

/// Refuses an output that is the input, lies inside it, or holds it; links count as what they point at.
///
/// # Errors
/// [`OutputError::Overlap`].
pub fn refuse_overlap(input: &Path, output: &Path) -> Result<(), OutputError> {
    // Where there is no input, whoever opens it says so.
    if !input.exists() {
        return Ok(());
    }
    let partial = real_target(output).and_then(|output| partial_of(&output));
    if lies_in(output, input) || lies_in(input, output) || partial.is_some_and(|partial| lies_in(input, &partial)) {
        return Err(OutputError::Overlap { input: input.to_owned(), output: output.to_owned() });
    }
    Ok(())
}

/// The output with links resolved, whether it exists or not.
fn real_target(output: &Path) -> Option<PathBuf> {
    if let Ok(path) = output.canonicalize() {
        return Some(path);
    }
    let parent = match output.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    Some(parent.canonicalize().ok()?.join(output.file_name()?))
}

/// The folder in which an output is made; `None` for a path without a last component.
fn partial_of(output: &Path) -> Option<PathBuf> {
    let mut name = output.file_name()?.to_owned();
    name.push(".partial");
    Some(output.with_file_name(name))
}

/// Whether a folder can be what a converter left: nobody else's files are ever taken over or removed.
fn is_ours(dir: &Path) -> io::Result<bool> {
    if !fs::symlink_metadata(dir)?.is_dir() {
        return Ok(false);
    }
    let marks = [OWNER, journal::NAME, file_name::MANIFEST];
    // Empty: a kill between making and marking it.
    Ok(marks.iter().any(|m| dir.join(m).is_file()) || fs::read_dir(dir)?.next().is_none())
}

/// The claimed `OUTPUT.partial`.
#[derive(Debug)]
pub struct Partial {
    dir: PathBuf,
    output: PathBuf,
    /// Holds the lock for as long as it lives.
    lock: File,
}

/// File in the partial folder with the process that owns it.
const OWNER: &str = "owner";

impl Partial {
    /// Claims the partial folder of an output, creating it if need be.
    ///
    /// # Errors
    /// [`OutputError`].
    pub fn claim(output: &Path, overwrite: bool) -> Result<Self, OutputError> {
        let dir = partial_of(output).ok_or_else(|| OutputError::NotABundle { path: output.to_owned() })?;
        refuse_existing(output, overwrite)?;
        let parent = match dir.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        if !parent.is_dir() {
            return Err(OutputError::NoParent { path: parent.to_owned() });
        }
        // The folder may be renamed or removed by its owner between opening and locking it: look again afterwards.
        for _ in 0..16 {
            match fs::create_dir(&dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(io_error(&dir)(e)),
                _ => {}
            }
            match is_ours(&dir) {
                Ok(true) => {}
                Ok(false) => return Err(OutputError::NotPartial { path: dir }),
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(io_error(&dir)(e)),
            }
            let lock = match File::open(&dir) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(io_error(&dir))?,
            };
            if let Err(e) = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                if e != rustix::io::Errno::WOULDBLOCK {
                    return Err(io_error(&dir)(e.into()));
                }
                let owner = fs::read_to_string(dir.join(OWNER)).ok().and_then(|t| t.trim().parse().ok());
                return Err(OutputError::Busy { path: dir, owner });
            }
            let ours = lock.metadata().map_err(io_error(&dir))?;
            let same = fs::metadata(&dir).is_ok_and(|m| (m.dev(), m.ino()) == (ours.dev(), ours.ino()));
            if same {
                fs::write(dir.join(OWNER), format!("{}\n", std::process::id())).map_err(io_error(&dir))?;
                // Another run may have published while this one waited for the folder.
                let partial = Self { dir, output: output.to_owned(), lock };
                if let Err(e) = refuse_existing(output, overwrite) {
                    partial.discard();
                    return Err(e);
                }
                return Ok(partial);
            }
        }
        Err(OutputError::Busy { path: dir, owner: None })
    }

    /// The folder to work in.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Checks that the file system can hold `needed` bytes, counting what an interrupted run already occupies.
    ///
    /// # Errors
    /// [`OutputError::NoSpace`] with both numbers.
    pub fn require_space(&self, needed: u64) -> Result<(), OutputError> {
        let stat = rustix::fs::statvfs(&self.dir).map_err(|e| io_error(&self.dir)(e.into()))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        let occupied = occupied_bytes(&self.dir);
        if free.saturating_add(occupied) < needed {
            return Err(OutputError::NoSpace { path: self.dir.clone(), needed, free });
        }
        Ok(())
    }

    /// Renames the folder to the output.
    ///
    /// # Errors
    /// [`OutputError::Io`]; the folder is left as it is.
    pub fn publish(self, overwrite: bool) -> Result<(), OutputError> {
        let owner = self.dir.join(OWNER);
        fs::remove_file(&owner).map_err(io_error(&owner))?;
        sync_folder(&self.dir).map_err(|e| io_error(&self.dir)(io::Error::other(e)))?;
        let here = rustix::fs::CWD;
        if overwrite && self.output.exists() {
            // Exchanged in one step, so that a bundle is at the output at every moment.
            match rustix::fs::renameat_with(here, &self.dir, here, &self.output, RenameFlags::EXCHANGE) {
                Ok(()) => fs::remove_dir_all(&self.dir).map_err(io_error(&self.dir))?,
                Err(_) => {
                    fs::remove_dir_all(&self.output).map_err(io_error(&self.output))?;
                    fs::rename(&self.dir, &self.output).map_err(io_error(&self.output))?;
                }
            }
        } else {
            fs::rename(&self.dir, &self.output).map_err(io_error(&self.output))?;
        }
        if let Some(parent) = self.output.parent().filter(|p| !p.as_os_str().is_empty()) {
            sync_folder(parent).map_err(|e| io_error(parent)(io::Error::other(e)))?;
        }
        drop(self.lock);
        Ok(())
    }

    /// Removes the folder and everything in it.
    pub fn discard(&self) {
        // Reached on an error that is about to be reported; a folder that cannot be removed is visible by itself.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn refuse_existing(output: &Path, overwrite: bool) -> Result<(), OutputError> {
    let path = || output.to_owned();
    match fs::symlink_metadata(output) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(OutputError::Io { path: path(), source }),
        Ok(_) if !overwrite => Err(OutputError::Exists { path: path() }),
        Ok(meta) if meta.is_dir() => {
            let empty = fs::read_dir(output).map_err(io_error(output))?.next().is_none();
            let bundle = output.join(file_name::MANIFEST).is_file() && output.join(file_name::ID).is_file();
            if empty || bundle { Ok(()) } else { Err(OutputError::NotABundle { path: path() }) }
        }
        Ok(_) => Err(OutputError::NotABundle { path: path() }),
    }
}

fn occupied_bytes(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|e| match e.metadata() {
            Ok(m) if m.is_dir() => occupied_bytes(&e.path()),
            Ok(m) => m.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}

/// Writes the receipt of a verification beside the bundle, as `OUTPUT.verified.json`.
///
/// # Errors
/// [`OutputError::Io`].
pub fn write_receipt(output: &Path, id: &str, values: u64) -> Result<(), OutputError> {
    let mut name = output.file_name().unwrap_or_default().to_owned();
    name.push(".verified.json");
    let path = output.with_file_name(name);
    let receipt = serde_json::json!({
        "bundle_id": id,
        "values_compared": values,
        "version": env!("CARGO_PKG_VERSION"),
    });
    fs::write(&path, format!("{receipt:#}\n")).map_err(io_error(&path))
}
