//! What can be wrong with a bundle.

use std::io;
use std::path::PathBuf;

use crate::layout::LayoutError;

/// Failure to open, check or read a bundle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// A file that must exist does not.
    #[error("{}: missing; is this a complete vt bundle? Fetch or convert it again", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The manifest is not valid JSON of the expected form, or names something that this version does not know.
    #[error("{}: not a manifest that this version reads: {reason}", path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What the parser found.
        reason: String,
    },
    /// The manifest's bytes are not the canonical form of its content.
    #[error("{}: not in canonical form (RFC 8785); the file was changed after it was written", path.display())]
    NotCanonical {
        /// The manifest.
        path: PathBuf,
    },
    /// The format or its version is unknown.
    #[error(
        "{}: format {format:?} version {version}, this version reads {expected:?} version {expected_version}; \
         convert the checkpoint again or use a newer vt",
        path.display(),
        expected = crate::manifest::FORMAT,
        expected_version = crate::manifest::FORMAT_VERSION
    )]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Format found.
        format: String,
        /// Version found.
        version: u32,
    },
    /// A tensor's description contradicts itself.
    #[error("{}: tensor {tensor}: {reason}", path.display())]
    Tensor {
        /// The manifest.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What contradicts what, with the numbers.
        reason: String,
    },
    /// A tensor's geometry is impossible.
    #[error("{}: tensor {tensor}: {source}", path.display())]
    Layout {
        /// The manifest.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Why.
        source: LayoutError,
    },
    /// Something in the manifest outside the tensors contradicts itself.
    #[error("{}: {reason}", path.display())]
    Inconsistent {
        /// The manifest.
        path: PathBuf,
        /// What contradicts what, with the numbers.
        reason: String,
    },
    /// A file has another size than the manifest says.
    #[error("{}: {found} bytes, the manifest says {expected}; the file is truncated or was changed", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Bytes on disk.
        found: u64,
        /// Bytes expected.
        expected: u64,
    },
    /// A file has another hash than the manifest says.
    #[error("{}: BLAKE3 is {found}, expected {expected}; the file is corrupt, fetch or convert it again", path.display())]
    Hash {
        /// The file.
        path: PathBuf,
        /// Hash of the bytes.
        found: String,
        /// Hash expected.
        expected: String,
    },
    /// A leaf of a segment is corrupt.
    #[error(
        "{}: leaf {leaf} (bytes {start} to {end}) is corrupt: BLAKE3 chaining value {found}, expected {expected}; it holds {}; \
         fetch or convert the bundle again",
        path.display(),
        if tensors.is_empty() { "padding".to_owned() } else { tensors.join(", ") }
    )]
    Leaf {
        /// The segment.
        path: PathBuf,
        /// Index of the leaf within the segment.
        leaf: u64,
        /// First byte within the segment.
        start: u64,
        /// End within the segment.
        end: u64,
        /// Chaining value of the bytes.
        found: String,
        /// Chaining value expected.
        expected: String,
        /// Tensors that lie in it.
        tensors: Vec<String>,
    },
    /// The record of an expert is corrupt.
    #[error(
        "{}: the record of expert {expert} of {tensor} is corrupt: BLAKE3 is {found}, expected {expected}; \
         fetch or convert the bundle again",
        path.display()
    )]
    Record {
        /// The bundle.
        path: PathBuf,
        /// A tensor of the record.
        tensor: String,
        /// The expert.
        expert: u64,
        /// Hash of the bytes.
        found: String,
        /// Hash expected.
        expected: String,
    },
    /// The bundle's id is not the one that was asked for.
    #[error("{}: bundle id {found}, expected {expected}", path.display())]
    Id {
        /// The bundle.
        path: PathBuf,
        /// Id of the manifest.
        found: String,
        /// Id asked for.
        expected: String,
    },
    /// Padding that must be zero is not.
    #[error("{}: {place}: padding is not zero", path.display())]
    Padding {
        /// The bundle.
        path: PathBuf,
        /// A tensor, or a range of the image.
        place: String,
    },
    /// The restore recipe contradicts the bundle.
    #[error("{}: restore recipe: {reason}", path.display())]
    Recipe {
        /// The bundle.
        path: PathBuf,
        /// What contradicts what.
        reason: String,
    },
    /// An output would be made inside the bundle's own folder.
    #[error(
        "{}: lies inside the bundle {}, where no hash would cover it; choose another place",
        output.display(), bundle.display()
    )]
    OutputInside {
        /// The output.
        output: PathBuf,
        /// The bundle.
        bundle: PathBuf,
    },
}

impl BundleError {
    /// The exit code that a program should end with: 2 usage, 3 input invalid, 4 integrity failure, 6 I/O.
    pub fn exit_code(&self) -> u8 {
        match self {
            BundleError::OutputInside { .. } => 2,
            BundleError::Io { .. } => 6,
            BundleError::Missing { .. }
            | BundleError::Manifest { .. }
            | BundleError::Version { .. }
            | BundleError::Tensor { .. }
            | BundleError::Layout { .. }
            | BundleError::Inconsistent { .. }
            | BundleError::Recipe { .. } => 3,
            BundleError::NotCanonical { .. }
            | BundleError::Size { .. }
            | BundleError::Hash { .. }
            | BundleError::Leaf { .. }
            | BundleError::Record { .. }
            | BundleError::Id { .. }
            | BundleError::Padding { .. } => 4,
        }
    }
}
