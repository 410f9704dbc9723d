//! Everything that can be wrong with a GGUF file, one variant per cause that a user can act on.

use std::io;
use std::path::PathBuf;

/// Why a GGUF checkpoint was refused.
///
/// `file` is the path as it was opened; names that come from a file are escaped, so that a message is always one line of
/// printable text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum GgufError {
    /// The operating system refused to open, size or map a file.
    #[error("{file}: cannot {action}: {source}", file = file.display())]
    Io { file: PathBuf, action: &'static str, source: io::Error },

    /// The name is that of a folder, a pipe or a device.
    #[error("{}: not a regular file; expected a GGUF file or a link to one", file.display())]
    NotAFile { file: PathBuf },

    /// The file does not begin with `GGUF`.
    #[error("{file}: not a GGUF file: it begins with {found}, expected the four bytes \"GGUF\"{hint}")]
    Magic { file: String, found: String, hint: &'static str },

    /// A byte-swapped file.
    #[error(
        "{file}: a big-endian GGUF (the version reads {version:#010x}); only little-endian files are read: \
         write it again on a little-endian machine, or with gguf_convert_endian.py of gguf-py"
    )]
    BigEndian { file: String, version: u32 },

    /// A version of the container that nobody reads any more, or not yet.
    #[error("{file}: GGUF version {found}, expected 2 or 3: write the file again with a current llama.cpp")]
    Version { file: String, found: u32 },

    /// The file ends inside something.
    #[error(
        "{file}: ends inside {what} (byte {offset}: {needed} bytes needed, {left} left): the file is damaged or its \
         download is incomplete, fetch it again"
    )]
    Truncated { file: String, what: String, offset: u64, needed: u64, left: u64 },

    /// A count, length or size that is above what fits or what is reasonable.
    #[error(
        "{file}: {what} is {found}, expected at most {limit} ({why}): the file is damaged or hostile, fetch it again"
    )]
    TooLarge { file: String, what: String, found: String, limit: u64, why: &'static str },

    /// A metadata value of a type that does not exist.
    #[error("{file}: key {key:?}: unknown {what} type {found}, expected 0 to 12")]
    ValueType { file: String, key: String, what: &'static str, found: u32 },

    /// An array of arrays.
    #[error("{file}: key {key:?}: an array of arrays, which no reader of models accepts; expected scalars or strings")]
    NestedArray { file: String, key: String },

    /// A boolean byte other than 0 and 1.
    #[error("{file}: key {key:?}: {found} as a boolean, expected 0 or 1")]
    Bool { file: String, key: String, found: u8 },

    /// A key that is empty, too long, or not plain UTF-8.
    #[error("{file}: metadata key {index} ({key}): {why}; the file is damaged or hostile")]
    Key { file: String, index: u64, key: String, why: &'static str },

    /// The same key twice.
    #[error("{file}: key {key:?} appears twice; which value counts is undefined: write the file again")]
    DuplicateKey { file: String, key: String },

    /// `general.alignment` is not usable.
    #[error("{file}: general.alignment is {found}, expected a u32 power of two from 1 to {max}")]
    Alignment { file: String, found: String, max: u32 },

    /// A tensor name that is empty, too long, or not plain UTF-8.
    #[error("{file}: tensor {index} ({name}): {why}; the file is damaged or hostile")]
    TensorName { file: String, index: u64, name: String, why: &'static str },

    /// The same tensor twice, in one file or across the parts of a split model.
    #[error(
        "tensor {name:?} appears twice, in {first} and in {second}; which data counts is undefined: write the model again"
    )]
    DuplicateTensor { name: String, first: String, second: String },

    /// More than four dimensions.
    #[error("{file}: tensor {tensor:?}: {found} dimensions, expected 0 to 4")]
    DimensionCount { file: String, tensor: String, found: u32 },

    /// A dimension of zero, a negative one, or a product that does not fit 63 bits.
    #[error("{file}: tensor {tensor:?}: shape {shape:?} (ne order): {why}")]
    Shape { file: String, tensor: String, shape: Vec<u64>, why: &'static str },

    /// A tensor type that ggml has withdrawn.
    #[error(
        "{file}: tensor {tensor:?} has type {id} ({name}), which ggml has withdrawn: quantise the model again, with a \
         current type such as Q4_0 or IQ4_NL"
    )]
    RemovedType { file: String, tensor: String, id: u32, name: &'static str },

    /// A type that only exists for activations in memory.
    #[error(
        "{file}: tensor {tensor:?} has type {id} ({name}), which holds activations and is not for files: quantise the model again"
    )]
    ActivationType { file: String, tensor: String, id: u32, name: &'static str },

    /// A type id that this version does not know.
    #[error(
        "{file}: tensor {tensor:?} has the unknown type {id}, expected one of the ids 0 to 42 in use: a newer vt may know it"
    )]
    UnknownType { file: String, tensor: String, id: u32 },

    /// A row that is not whole blocks.
    #[error(
        "{file}: tensor {tensor:?}: rows of {columns} values, expected a multiple of {block}, the block of {name}: rows would \
         run into each other, so the file was written wrongly"
    )]
    RaggedRow { file: String, tensor: String, columns: u64, block: u32, name: &'static str },

    /// An offset that is not a multiple of the alignment.
    #[error(
        "{file}: tensor {tensor:?}: offset {offset} is not a multiple of the alignment {alignment}: the file is damaged"
    )]
    Misaligned { file: String, tensor: String, offset: u64, alignment: u32 },

    /// A tensor outside the file.
    #[error(
        "{file}: tensor {tensor:?}: {bytes} bytes at offset {offset} of the data (which starts at byte {data_start}) do not fit a \
         file of {size} bytes{also}: the file is damaged or its download is incomplete, fetch it again"
    )]
    OutOfFile { file: String, tensor: String, bytes: u64, offset: u64, data_start: u64, size: u64, also: String },

    /// Two tensors that share bytes.
    #[error(
        "{file}: tensors {first:?} and {second:?} overlap in bytes {start} to {end} of the data: the file is damaged"
    )]
    Overlap { file: String, first: String, second: String, start: u64, end: u64 },

    /// A name of a part that contradicts its metadata, or a set that is not complete.
    #[error("{file}: split model: {found}, expected {expected}: {action}")]
    Split { file: String, found: String, expected: String, action: &'static str },

    /// Parts that are not on disk.
    #[error("{file}: split model: part(s) not found: {missing}; put all {count} parts into one folder", missing = missing.join(", "))]
    MissingParts { file: String, missing: Vec<String>, count: u32 },

    /// A metadata key that the conversion needs.
    #[error("{file}: key {key:?} is missing: {why}")]
    MissingKey { file: String, key: String, why: &'static str },

    /// A metadata key with a value that cannot be.
    #[error("{file}: key {key:?} is {found}, expected {expected}")]
    KeyValue { file: String, key: String, found: String, expected: String },

    /// A vision or audio projector.
    #[error(
        "{file}: this is a projector ({key} is {found:?}), not a language model: pass the text model's GGUF; \
         projectors (clip, mmproj) are not converted"
    )]
    Projector { file: String, key: &'static str, found: String },

    /// A LoRA or another kind of file that is not a model.
    #[error(
        "{file}: general.type is {found:?}, expected \"model\": merge the adapter into its model, or pass the model"
    )]
    NotAModel { file: String, found: String },

    /// A tensor whose shape contradicts the metadata.
    #[error(
        "{file}: tensor {tensor:?} has shape {found:?}, expected {expected}: the metadata and the tensors do not belong together"
    )]
    TensorShape { file: String, tensor: String, found: Vec<u64>, expected: String },

    /// A model without tensors.
    #[error("{file}: no tensors: it holds a vocabulary only; pass the model's GGUF")]
    NoTensors { file: String },

    /// A tokenizer that cannot be rebuilt exactly.
    #[error("{file}: key {key:?}: {found}; expected {expected}")]
    Tokenizer { file: String, key: &'static str, found: String, expected: String },

    /// A block scale that is infinite or not a number.
    #[error(
        "{file}: tensor {tensor:?}: block {block}: field {field} is not finite (type {name}), expected a finite scale: the file is \
         damaged, or the model overflowed when it was quantised"
    )]
    BadBlock { file: String, tensor: String, block: u64, field: &'static str, name: &'static str },
}

/// A name from a file as printable text: UTF-8 kept, the rest and control characters escaped, cut at 80 characters.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut out: String = text.chars().take(80).flat_map(char::escape_debug).collect();
    if text.chars().nth(80).is_some() {
        out.push_str("...");
    }
    out
}
