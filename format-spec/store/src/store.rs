//! A store of either kind, and what it tells of a bundle.

use futures_util::StreamExt;
use serde::Serialize;

use crate::contents::{Contents, Entry};
use crate::error::StoreError;
use crate::hashing::Hashers;
use crate::objects::Objects;
use crate::oci::Oci;
use crate::oci::model_pack::Descriptor;
use crate::progress::Meter;
use crate::reference::{Location, Reference};
use crate::retry::Retry;
use crate::source::Source;
use crate::stream::{self, ByteStream};

/// Where bundles are kept.
#[derive(Debug)]
pub(crate) enum Store {
    Oci(Oci),
    Objects(Objects),
}

/// What a store says of a file, without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It is not there, or that cannot be told.
    Absent,
    /// It is there, with the size that it must have where the store tells one.
    Present,
    /// Something else is there under its name.
    Damaged,
}

/// What a store has of the signatures of a bundle.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    /// Name and bytes of each that can be read.
    pub signatures: Vec<(String, Vec<u8>)>,
    /// Why others cannot.
    pub unreadable: Vec<StoreError>,
}

/// A bundle that was found in a store.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    /// Its files.
    pub contents: Contents,
    /// Its OCI manifest, in a store that has one.
    pub manifest: Option<Descriptor>,
}

/// A version of a bundle in a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// Name of the bundle.
    pub name: String,
    /// Tag.
    pub tag: String,
    /// Bundle id.
    pub id: String,
    /// Bytes of all files.
    pub bytes: u64,
    /// Digest of the OCI manifest, in a store that has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
}

impl Store {
    /// Opens the store of a reference; nothing is sent. `create` makes what a store on disk needs.
    pub(crate) fn open_at(reference: &Reference, plain_http: bool, create: bool) -> Result<Self, StoreError> {
        Ok(match &reference.location {
            Location::Registry { host, repository } => Self::Oci(Oci::registry(host, repository, plain_http)?),
            Location::Layout { dir } => Self::Oci(Oci::layout(dir)),
            location @ Location::Objects { .. } => Self::Objects(Objects::new(location, plain_http, create)?),
        })
    }

    pub(crate) fn oci(&self) -> Option<&Oci> {
        match self {
            Self::Oci(oci) => Some(oci),
            Self::Objects(_) => None,
        }
    }

    /// Whether a file must know its SHA-256 before it can be told to be there.
    pub(crate) fn needs_sha256(&self) -> bool {
        matches!(self, Self::Oci(_))
    }

    /// Whether the store keeps a file; what follows from the manifest an object store does not.
    pub(crate) fn keeps(&self, entry: &Entry) -> bool {
        match self {
            Self::Oci(_) => true,
            Self::Objects(_) => entry.path != vt_bundle::manifest::file_name::ID,
        }
    }

    /// Makes ready to write.
    pub(crate) async fn prepare(&self, meter: &Meter) -> Result<(), StoreError> {
        match self {
            Self::Oci(oci) => oci.prepare(meter).await,
            Self::Objects(objects) => objects.prepare(),
        }
    }

    pub(crate) async fn resolve(&self, reference: &Reference, meter: &Meter) -> Result<Remote, StoreError> {
        match self {
            Self::Oci(oci) => oci.resolve(reference, meter).await,
            Self::Objects(objects) => objects.resolve(reference).await,
        }
    }

    pub(crate) async fn open(&self, entry: &Entry, offset: u64) -> Result<ByteStream, StoreError> {
        match self {
            Self::Oci(oci) => oci.open(entry, offset).await,
            Self::Objects(objects) => objects.open(entry, offset).await,
        }
    }

    pub(crate) async fn state(&self, entry: &Entry, meter: &Meter) -> Result<State, StoreError> {
        match self {
            Self::Oci(oci) => oci.state(entry, meter).await,
            Self::Objects(objects) => objects.state(entry).await,
        }
    }

    /// Reads a file that is there and compares it with its digests.
    pub(crate) async fn read_back(&self, entry: &Entry, meter: &Meter) -> Result<State, StoreError> {
        let mut retry = Retry::default();
        loop {
            meter.set(0);
            match self.compare(entry, meter).await {
                Ok(state) => return Ok(state),
                Err(StoreError::Digest { .. } | StoreError::Size { .. }) => return Ok(State::Damaged),
                Err(StoreError::NotFound { .. }) => return Ok(State::Absent),
                Err(error) => retry.after(error, meter).await?,
            }
        }
    }

    async fn compare(&self, entry: &Entry, meter: &Meter) -> Result<State, StoreError> {
        let mut pieces = stream::counted(self.open(entry, 0).await?, meter);
        let (mut hashers, mut total) = (Hashers::default(), 0);
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            hashers.update(&piece);
            total += piece.len() as u64;
            if total > entry.size {
                return Ok(State::Damaged);
            }
        }
        let (blake3, sha256) = hashers.finish();
        let right = total == entry.size && blake3 == entry.blake3;
        let right = right && entry.sha256.as_ref().is_none_or(|expected| *expected == sha256);
        Ok(if right { State::Present } else { State::Damaged })
    }

    /// Stores a file, in the place of what is there where `replace` says so; gives its SHA-256 where the store needs one.
    pub(crate) async fn put(
        &self,
        entry: &Entry,
        source: &Source<'_>,
        replace: bool,
        meter: &Meter,
    ) -> Result<Option<String>, StoreError> {
        match self {
            Self::Oci(oci) => oci.put(entry, source, replace, meter).await.map(Some),
            Self::Objects(objects) => objects.put(entry, source, replace, meter).await.map(|()| None),
        }
    }

    /// Makes a bundle known under a tag, whose own blobs are looked at again where `verify` says so; gives the digest of
    /// its OCI manifest in a store that has one.
    pub(crate) async fn publish(
        &self,
        reference: &Reference,
        contents: &Contents,
        verify: bool,
        meter: &Meter,
    ) -> Result<Option<String>, StoreError> {
        match self {
            Self::Oci(oci) => oci.publish(reference, contents, verify, meter).await.map(Some),
            Self::Objects(objects) => objects.publish(reference, contents).await.map(|()| None),
        }
    }

    pub(crate) async fn list(&self, reference: &Reference, meter: &Meter) -> Result<Vec<Listed>, StoreError> {
        match self {
            Self::Oci(oci) => oci.list(reference, meter).await,
            Self::Objects(objects) => objects.list().await,
        }
    }

    pub(crate) async fn attach(&self, remote: &Remote, signature: &[u8], meter: &Meter) -> Result<(), StoreError> {
        match (self, &remote.manifest) {
            (Self::Oci(oci), Some(subject)) => oci.attach(subject, signature, meter).await.map(|_| ()),
            (Self::Oci(_), None) => Ok(()),
            (Self::Objects(objects), _) => objects.attach(&remote.contents.id, signature).await,
        }
    }

    pub(crate) async fn signatures(&self, place: &str, remote: &Remote, meter: &Meter) -> Result<Stored, StoreError> {
        match (self, &remote.manifest) {
            (Self::Oci(oci), Some(subject)) => oci.signatures(place, subject, meter).await,
            (Self::Oci(_), None) => Ok(Stored::default()),
            (Self::Objects(objects), _) => objects.signatures(&remote.contents.id).await,
        }
    }
}
