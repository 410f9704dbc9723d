//! What can go wrong between a bundle and a store.
//!
//! No message carries a credential: addresses lose user, password and query (where stores put signatures) before they
//! are stored in an error, see [`public_url`].

use std::io;
use std::path::{Path, PathBuf};

use vt_bundle::BundleError;

/// Failure to push, pull, copy, list, sign or verify.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A reference cannot be understood.
    #[error("{text}: {reason}")]
    Reference {
        /// The reference as given.
        text: String,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// What was asked for is not possible with this kind of store.
    #[error("{place}: {reason}")]
    Unsupported {
        /// The store.
        place: String,
        /// Why, and what to do instead.
        reason: String,
    },
    /// The output is in the way.
    #[error("{}: exists; remove it or choose another folder", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The server does not answer.
    #[error("{place}: cannot be reached: {reason}; check the name, the network and any proxy")]
    Unreachable {
        /// Host or store.
        place: String,
        /// What the system said.
        reason: String,
    },
    /// The server refuses these credentials, or wants some.
    #[error("{place}: access denied: {reason}; {advice}")]
    Denied {
        /// The store.
        place: String,
        /// What the server said.
        reason: String,
        /// What to do about it.
        advice: String,
    },
    /// There is no such bundle, tag or blob.
    #[error("{place}: not found: {what}")]
    NotFound {
        /// The store.
        place: String,
        /// What is missing.
        what: String,
    },
    /// What is there is no bundle.
    #[error("{place}: not a vt bundle: {reason}")]
    NotABundle {
        /// The reference.
        place: String,
        /// What was expected and found.
        reason: String,
    },
    /// Bytes have another digest than they must.
    #[error(
        "{place}: {what}: digest is {found}, expected {expected}; the store or the line to it is at fault, nothing was kept; \
         `vt-bundle push --verify-existing` mends what a store holds"
    )]
    Digest {
        /// The store or file.
        place: String,
        /// File or blob.
        what: String,
        /// Digest of the bytes.
        found: String,
        /// Digest that was promised.
        expected: String,
    },
    /// A blob is shorter or longer than it must be.
    #[error(
        "{place}: {what}: {found} bytes, expected {expected}; the blob in the store is truncated or changed; \
         `vt-bundle push --verify-existing` mends it"
    )]
    Size {
        /// The store.
        place: String,
        /// File or blob.
        what: String,
        /// Bytes that came.
        found: u64,
        /// Bytes expected.
        expected: u64,
    },
    /// What was stored in the place of a damaged blob is still damaged.
    #[error(
        "{place}: {what}: the store keeps a damaged blob {digest} and takes no other in its place; have it removed there, \
         then push again"
    )]
    Unmended {
        /// The store.
        place: String,
        /// File of the bundle.
        what: String,
        /// Name of the blob.
        digest: String,
    },
    /// The bundle is another one than the reference pins.
    #[error("{place}: found {found}, the reference pins {expected}")]
    Pin {
        /// The reference.
        place: String,
        /// Digest found.
        found: String,
        /// Digest pinned.
        expected: String,
    },
    /// A transfer failed, after the retries that it was worth.
    #[error("{place}: {what}: {reason}")]
    Transfer {
        /// The store.
        place: String,
        /// File, blob or operation.
        what: String,
        /// The last failure.
        reason: String,
        /// Whether another attempt could succeed.
        transient: bool,
    },
    /// Somebody else changed the same thing again and again.
    #[error("{place}: changed by others while it was being updated; run the command again")]
    Conflict {
        /// The index or tag.
        place: String,
    },
    /// The operating system refused.
    #[error("{}: {source}{}", path.display(), io_advice(source))]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// The disk cannot hold what is coming.
    #[error("{}: {needed} bytes are needed, {free} are free; make room or choose another disk (--cache-dir, or the output)", path.display())]
    NoSpace {
        /// Folder.
        path: PathBuf,
        /// Bytes that are missing from it.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// Another process works there.
    #[error("{}: in use by another process; wait for it to end", path.display())]
    Busy {
        /// Folder.
        path: PathBuf,
    },
    /// A key cannot be used.
    #[error("{}: {reason}", path.display())]
    Key {
        /// Key file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A signature does not hold.
    #[error("{place}: signature: {reason}")]
    Signature {
        /// The signature, or where it was looked for.
        place: String,
        /// Why.
        reason: String,
    },
    /// The bundle itself is at fault.
    #[error(transparent)]
    Bundle(#[from] BundleError),
}

impl StoreError {
    /// The exit code that a program should end with: 2 usage, 3 input invalid, 4 integrity failure, 6 I/O.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Reference { .. } | Self::Unsupported { .. } | Self::Exists { .. } => 2,
            Self::NotFound { .. } | Self::NotABundle { .. } | Self::Key { .. } => 3,
            Self::Digest { .. }
            | Self::Size { .. }
            | Self::Unmended { .. }
            | Self::Pin { .. }
            | Self::Signature { .. } => 4,
            Self::Unreachable { .. }
            | Self::Denied { .. }
            | Self::Transfer { .. }
            | Self::Conflict { .. }
            | Self::Io { .. }
            | Self::NoSpace { .. }
            | Self::Busy { .. } => 6,
            Self::Bundle(e) => e.exit_code(),
        }
    }

    /// Whether another attempt could succeed. Digests and sizes count: a line can damage bytes as well as lose them.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Transfer { transient, .. } => *transient,
            Self::Unreachable { .. } | Self::Digest { .. } | Self::Size { .. } => true,
            _ => false,
        }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

fn io_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "; make room there or choose another folder, then run the same command again: finished work is kept"
        }
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "; make the folder writable or choose another one (--cache-dir for the cache)"
        }
        _ => "",
    }
}

/// An address as errors may show it: without user, password, query and fragment.
pub(crate) fn public_url(text: &str) -> String {
    match url::Url::parse(text) {
        Ok(mut url) => {
            url.set_query(None);
            url.set_fragment(None);
            let _ = url.set_username("");
            let _ = url.set_password(None);
            url.into()
        }
        Err(_) => text.split(['?', '#']).next().unwrap_or_default().to_owned(),
    }
}

/// A chain of causes in one line.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let part = next.to_string();
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = next.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lose_their_secrets() {
        let shown = public_url("https://user:hunter2@host:5000/v2/a/blobs/uploads/1?_state=secret&sig=x#y");
        assert_eq!(shown, "https://host:5000/v2/a/blobs/uploads/1");
        assert_eq!(public_url("/relative?sig=secret"), "/relative");
    }
}
