//! Where the bytes of a bundle come from: a folder, or another store.

use std::path::Path;

use crate::contents::{Contents, Entry};
use crate::error::StoreError;
use crate::store::Store;
use crate::stream::{self, ByteStream};

/// A bundle that can be read by ranges.
#[derive(Debug)]
pub(crate) enum Source<'a> {
    /// A bundle's folder.
    Folder(&'a Path),
    /// A bundle in a store.
    Store(&'a Store, &'a Contents),
    /// Bytes in memory, for one blob.
    Bytes(&'a [u8]),
}

impl Source<'_> {
    /// The bytes of a file from an offset on.
    pub(crate) async fn open(&self, entry: &Entry, offset: u64) -> Result<ByteStream, StoreError> {
        match self {
            Self::Folder(dir) => {
                Ok(stream::from_file(dir.join(&entry.path), offset, entry.size.saturating_sub(offset)))
            }
            Self::Store(_, contents) if contents.derived(&entry.path).is_some() => {
                Ok(stream::from_bytes(contents.derived(&entry.path).unwrap_or_default(), offset))
            }
            Self::Store(store, _) => store.open(entry, offset).await,
            Self::Bytes(bytes) => Ok(stream::from_bytes(bytes.to_vec(), offset)),
        }
    }

    /// The same for a consumer that does not know BLAKE3: bytes out of another store are read from their beginning and
    /// compared with the size and the BLAKE3 of the bundle's manifest before the last of them is passed on.
    pub(crate) async fn open_checked(&self, entry: &Entry, offset: u64) -> Result<ByteStream, StoreError> {
        match self {
            Self::Store(..) => Ok(stream::checked(self.open(entry, 0).await?, entry, offset)),
            Self::Folder(_) | Self::Bytes(_) => self.open(entry, offset).await,
        }
    }
}
