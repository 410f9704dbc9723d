//! What can be wrong with a safetensors checkpoint as a container.

use std::io;
use std::path::{Path, PathBuf};

/// Why a folder (or file) cannot be opened as a safetensors checkpoint.
///
/// Every variant names the file; where a tensor is at fault it is named too, with what was found and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SafetensorsError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was attempted, as a verb phrase.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// A name of the checkpoint is that of a folder, a pipe or a device.
    #[error("{}: not a regular file; expected the file itself or a link to it", path.display())]
    NotAFile {
        /// What is there.
        path: PathBuf,
    },
    /// A symbolic link leads nowhere, as in a copied or half-deleted hub cache.
    #[error(
        "{}: the link points at {}, which does not exist; copy the checkpoint with links resolved (cp -rL), or download it again",
        link.display(), target.display()
    )]
    DanglingLink {
        /// The link.
        link: PathBuf,
        /// What it points at, as stored in the link.
        target: PathBuf,
    },
    /// A file holds the text of a link, as left by copies that lose links (git with `core.symlinks=false`, some archives).
    #[error(
        "{}: not the file itself but the text of a link to {target}; the links of the hub cache were lost in a copy: \
         copy the checkpoint with links resolved (cp -rL), or download it again",
        path.display()
    )]
    LinkText {
        /// The file.
        path: PathBuf,
        /// The text: what the link pointed at.
        target: String,
    },
    /// The folder has no safetensors weights at all.
    #[error("{}: no .safetensors file in the folder; expected model.safetensors, or shards with model.safetensors.index.json", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
    },
    /// Only pickled weights are there, which are never loaded.
    #[error(
        "{}: {} holds pickled weights, which can run code when loaded and are not read; convert the checkpoint to safetensors first \
         (load it with transformers and save_pretrained(safe_serialization=True))",
        folder.display(), file
    )]
    OnlyPickle {
        /// The folder.
        folder: PathBuf,
        /// One of the pickled files.
        file: String,
    },
    /// Several sets of weights lie side by side and nothing says which one is the model.
    #[error("{}: several sets of weights ({}) and no model.safetensors.index.json to choose; give one file as the input, or remove the others", folder.display(), sets.join(", "))]
    AmbiguousWeights {
        /// The folder.
        folder: PathBuf,
        /// One name per set.
        sets: Vec<String>,
    },
    /// A file the checkpoint cannot do without is missing.
    #[error("{}: {file} is missing; {why}", folder.display())]
    MissingFile {
        /// The folder.
        folder: PathBuf,
        /// Its name.
        file: String,
        /// What it is needed for.
        why: &'static str,
    },
    /// The file is empty.
    #[error("{}: the file is empty (0 bytes); the download is incomplete", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file is the text that Git LFS leaves in place of the content.
    #[error("{}: this is a Git LFS pointer ({size} bytes of text), not the weights; run `git lfs pull`, or download the file itself", path.display())]
    LfsPointer {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The header cannot be as long as the file says.
    #[error("{}: the first 8 bytes give a header of {found} bytes; expected at most {limit} ({size} bytes are in the file); it is truncated, or no safetensors file", path.display())]
    HeaderLength {
        /// The file.
        path: PathBuf,
        /// Length that the file declares.
        found: u64,
        /// Most that can be accepted here.
        limit: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// The header is not the JSON that the format asks for.
    #[error("{}: the header is not valid: {reason}; expected a JSON object of tensors", path.display())]
    HeaderJson {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        reason: String,
    },
    /// One key occurs twice in a header or an index.
    #[error("{}: the name {name} occurs twice; readers disagree on which one counts, so the file is refused", path.display())]
    DuplicateKey {
        /// The file.
        path: PathBuf,
        /// The key.
        name: String,
    },
    /// A tensor has an element type that is not supported.
    #[error("{}: tensor {tensor} has dtype {dtype}, which is not supported{hint}", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What the header says.
        dtype: String,
        /// More about it, starting with punctuation; may be empty.
        hint: &'static str,
    },
    /// A tensor's byte range ends before it begins.
    #[error("{}: tensor {tensor} has data_offsets [{begin}, {end}], which end before they begin", path.display())]
    RangeReversed {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// First byte, relative to the data.
        begin: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A tensor's shape and its byte range differ.
    #[error("{}: tensor {tensor} of dtype {dtype} and shape {shape:?} takes {expected} bytes, but its data_offsets hold {found}", path.display())]
    RangeSize {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes by shape and dtype (`more than 2^64` where the product overflows).
        expected: String,
        /// Bytes in its range.
        found: u64,
    },
    /// Two tensors share bytes.
    #[error("{}: tensors {first} and {second} overlap at byte {at} of the data; every tensor must have its own bytes", path.display())]
    Overlap {
        /// The file.
        path: PathBuf,
        /// The tensor that begins first.
        first: String,
        /// The other.
        second: String,
        /// Where, relative to the data.
        at: u64,
    },
    /// Some bytes belong to no tensor.
    #[error("{}: {len} bytes before tensor {tensor} belong to no tensor; the format allows no holes", path.display())]
    Hole {
        /// The file.
        path: PathBuf,
        /// The tensor after the hole.
        tensor: String,
        /// Length of the hole.
        len: u64,
    },
    /// The file's size does not match its header.
    #[error("{}: the header asks for a file of {expected} bytes, but it has {found}; {}", path.display(),
        if found < expected { "it is truncated: download it again" } else { "the bytes at the end belong to no tensor" })]
    FileSize {
        /// The file.
        path: PathBuf,
        /// 8 + header + end of the last tensor.
        expected: u64,
        /// Size of the file.
        found: u64,
    },
    /// A configuration or index file is not what it should be.
    #[error("{}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A small file (configuration, tokenizer) is too large to be one.
    #[error("{}: {size} bytes; expected at most {limit} for this kind of file", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        size: u64,
        /// The most that is read.
        limit: u64,
    },
    /// The index sends a tensor to a file name that is not a plain name.
    #[error("{}: tensor {tensor} is mapped to {file:?}; expected the plain name of a .safetensors file in the same folder", index.display())]
    IndexName {
        /// The index.
        index: PathBuf,
        /// A tensor that is mapped there.
        tensor: String,
        /// The name found.
        file: String,
    },
    /// The index names shards that are not there.
    #[error("{}: {} of {total} shards are missing: {}; the download is incomplete", index.display(), missing.len(), missing.join(", "))]
    MissingShards {
        /// The index, or the folder where the shards' own numbers tell.
        index: PathBuf,
        /// All of the missing names.
        missing: Vec<String>,
        /// How many there should be.
        total: usize,
    },
    /// The index says a tensor is in a shard that does not have it.
    #[error("{}: tensors that are not in the shard that the index names: {count}; the first is {tensor}, expected in {file}{}", index.display(),
        match elsewhere { Some(f) => format!(" but found in {f}"), None => String::from(" and found in no shard") })]
    IndexTensor {
        /// The index.
        index: PathBuf,
        /// The first such tensor by name.
        tensor: String,
        /// Where the index has it.
        file: String,
        /// Where it really is, if anywhere.
        elsewhere: Option<String>,
        /// How many such tensors there are.
        count: usize,
    },
    /// Two files hold a tensor of the same name, and no index decides.
    #[error("tensor {tensor} is in {} and in {}, and there is no index to decide; remove one, or add model.safetensors.index.json", first.display(), second.display())]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
}

impl SafetensorsError {
    /// Whether the operating system, not the content of a file, is at fault (exit status 6 rather than 3).
    pub fn is_io(&self) -> bool {
        matches!(self, Self::Io { .. })
    }

    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { path, action, source }
    }
}
