//! The container: one pass over the header of one file, every count and length checked before it is used.
//!
//! Layout (little-endian, no padding between fields), as in ggml's `docs/gguf.md` and `gguf.cpp` of ggml 0.25.3:
//! magic `GGUF`, version u32, tensor count u64, key count u64, the keys with their values, the tensor infos
//! (name, dimensions, `ne`, type, offset), zero padding to the alignment, then the data.

use super::error::{GgufError, printable};
use super::types::{GgmlType, TypeClass};
use super::value::{Array, Metadata, Value, ValueType};

/// Most keys in a file; real files have fewer than a hundred.
pub const MAX_KEYS: u64 = 1 << 16;
/// Most tensors in a file.
pub const MAX_TENSORS: u64 = 1 << 20;
/// Longest key in bytes.
pub const MAX_KEY_BYTES: u64 = 64 << 10;
/// Longest string value in bytes.
pub const MAX_STRING_BYTES: u64 = 16 << 20;
/// Most elements of an array; the largest vocabularies have a quarter of a million.
pub const MAX_ARRAY: u64 = 1 << 24;
/// Largest alignment.
pub const MAX_ALIGNMENT: u32 = 64 << 10;
/// Longest tensor name in bytes: ggml holds 64 with the closing NUL.
pub const MAX_NAME_BYTES: u64 = 63;
/// Largest header (everything before the data).
pub const MAX_HEADER_BYTES: u64 = 256 << 20;

/// Alignment where `general.alignment` does not say otherwise.
const DEFAULT_ALIGNMENT: u32 = 32;
/// The least bytes that a key with its value takes: length, one byte, type, one byte.
const MIN_KEY_ENTRY: u64 = 8 + 1 + 4 + 1;
/// The least bytes that a tensor info takes: name length, dimension count, type, offset.
const MIN_TENSOR_ENTRY: u64 = 8 + 4 + 4 + 8;

/// One tensor of the file, its range checked.
#[derive(Clone, Debug)]
pub struct TensorInfo<'a> {
    /// Name, at most 63 bytes of UTF-8.
    pub name: &'a str,
    /// Dimensions as in the file: `ne[0]` is the row length. Empty for a scalar.
    pub ne: Vec<u64>,
    /// Type.
    pub kind: &'static GgmlType,
    /// Offset from the start of the data.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The header of one file.
#[derive(Debug)]
pub struct Header<'a> {
    /// 2 or 3.
    pub version: u32,
    /// Alignment of the data.
    pub alignment: u32,
    /// Keys and values.
    pub metadata: Metadata<'a>,
    /// Tensors in file order.
    pub tensors: Vec<TensorInfo<'a>>,
    /// Absolute offset of the data.
    pub data_start: u64,
}

/// Reads the header of a GGUF file; `file` is its name for messages.
///
/// Nothing is allocated from a number of the file before that number was compared with the bytes that are left.
///
/// # Errors
/// The first defect, in file order; defects of ranges (outside the file, overlap) last.
pub fn parse<'a>(file: &str, bytes: &'a [u8]) -> Result<Header<'a>, GgufError> {
    let mut cursor = Cursor { file, bytes, at: 0 };
    let version = cursor.magic_and_version()?;
    let n_tensors = cursor.count("the tensor count", MAX_TENSORS)?;
    let n_keys = cursor.count("the key count", MAX_KEYS)?;
    cursor.fits("the tensor count", n_tensors, MIN_TENSOR_ENTRY)?;
    cursor.fits("the key count", n_keys, MIN_KEY_ENTRY)?;

    let mut metadata = Metadata::default();
    for index in 0..n_keys {
        let key = cursor.key(index)?;
        let value = cursor.value(key)?;
        if !metadata.insert(key, value) {
            return Err(GgufError::DuplicateKey { file: file.into(), key: printable(key.as_bytes()) });
        }
    }
    let alignment = alignment(file, &metadata)?;

    let mut tensors = Vec::new();
    let mut names = std::collections::HashSet::new();
    for index in 0..n_tensors {
        let tensor = cursor.tensor(index, alignment)?;
        if !names.insert(tensor.name) {
            return Err(GgufError::DuplicateTensor {
                name: printable(tensor.name.as_bytes()),
                first: file.into(),
                second: file.into(),
            });
        }
        tensors.push(tensor);
    }
    // Without tensors there is no data and no padding before it.
    let data_start = if tensors.is_empty() { cursor.at } else { cursor.at.next_multiple_of(u64::from(alignment)) };
    check_ranges(file, &tensors, data_start, bytes.len() as u64)?;
    Ok(Header { version, alignment, metadata, tensors, data_start })
}

fn alignment(file: &str, metadata: &Metadata<'_>) -> Result<u32, GgufError> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    match *value {
        Value::Unsigned(ValueType::U32, v) if v.is_power_of_two() && v <= u64::from(MAX_ALIGNMENT) => Ok(v as u32),
        _ => Err(GgufError::Alignment { file: file.into(), found: value.describe(), max: MAX_ALIGNMENT }),
    }
}

/// Every tensor inside the file, no two sharing a byte. Gaps are allowed: writers may align more than they say.
fn check_ranges(file: &str, tensors: &[TensorInfo<'_>], data_start: u64, size: u64) -> Result<(), GgufError> {
    let room = size.saturating_sub(data_start);
    let outside = |t: &&TensorInfo<'_>| t.len > room || t.offset > room - t.len;
    let mut lost = tensors.iter().filter(outside);
    if let Some(first) = lost.next() {
        let others: Vec<String> = lost.map(|t| printable(t.name.as_bytes())).collect();
        let also = match others.len() {
            0 => String::new(),
            1..=8 => format!(" (nor do {})", others.join(", ")),
            n => format!(" (nor do {n} more, from {} to {})", others[0], others[n - 1]),
        };
        return Err(GgufError::OutOfFile {
            file: file.into(),
            tensor: printable(first.name.as_bytes()),
            bytes: first.len,
            offset: first.offset,
            data_start,
            size,
            also,
        });
    }
    let mut order: Vec<&TensorInfo<'_>> = tensors.iter().collect();
    order.sort_by_key(|t| t.offset);
    for pair in order.windows(2) {
        let end = pair[0].offset + pair[0].len;
        if end > pair[1].offset {
            return Err(GgufError::Overlap {
                file: file.into(),
                first: printable(pair[0].name.as_bytes()),
                second: printable(pair[1].name.as_bytes()),
                start: pair[1].offset,
                end: end.min(pair[1].offset + pair[1].len),
            });
        }
    }
    Ok(())
}

/// A place in the file; every read is checked against what is left.
struct Cursor<'f, 'a> {
    file: &'f str,
    bytes: &'a [u8],
    at: u64,
}

impl<'a> Cursor<'_, 'a> {
    fn left(&self) -> u64 {
        self.bytes.len() as u64 - self.at
    }

    /// The next `len` bytes; `what` is only asked for when they are not there.
    fn take(&mut self, len: u64, what: impl FnOnce() -> String) -> Result<&'a [u8], GgufError> {
        if len > self.left() {
            return Err(GgufError::Truncated {
                file: self.file.into(),
                what: what(),
                offset: self.at,
                needed: len,
                left: self.left(),
            });
        }
        // Both ends are at most `bytes.len()`, so they fit usize.
        let taken = &self.bytes[self.at as usize..(self.at + len) as usize];
        self.at += len;
        if self.at > MAX_HEADER_BYTES {
            return Err(self.too_large(
                "the header".into(),
                self.at.to_string(),
                MAX_HEADER_BYTES,
                "bytes before the data",
            ));
        }
        Ok(taken)
    }

    fn u32(&mut self, what: impl FnOnce() -> String) -> Result<u32, GgufError> {
        let mut word = [0; 4];
        word.copy_from_slice(self.take(4, what)?);
        Ok(u32::from_le_bytes(word))
    }

    fn u64(&mut self, what: impl FnOnce() -> String) -> Result<u64, GgufError> {
        let mut word = [0; 8];
        word.copy_from_slice(self.take(8, what)?);
        Ok(u64::from_le_bytes(word))
    }

    fn too_large(&self, what: String, found: String, limit: u64, why: &'static str) -> GgufError {
        GgufError::TooLarge { file: self.file.into(), what, found, limit, why }
    }

    fn magic_and_version(&mut self) -> Result<u32, GgufError> {
        let head = &self.bytes[..self.bytes.len().min(4)];
        if head != b"GGUF" {
            let hint = match head {
                b"" => ": the file is empty",
                b"vers" => ": it looks like a Git LFS pointer, fetch the file itself with `git lfs pull`",
                b"lmgg" | b"tjgg" | b"fmgg" | b"ggml" | b"ggjt" | b"ggmf" => {
                    ": it is a file from before GGUF, convert the model again with a current llama.cpp"
                }
                [b'P', b'K', ..] => ": it is a zip archive, unpack it",
                _ => "",
            };
            return Err(GgufError::Magic { file: self.file.into(), found: format!("\"{}\"", printable(head)), hint });
        }
        self.at = 4;
        let version = self.u32(|| "the version".into())?;
        match version {
            2 | 3 => Ok(version),
            // A small number whose bytes are swapped.
            v if v != 0 && v & 0xffff == 0 => Err(GgufError::BigEndian { file: self.file.into(), version }),
            _ => Err(GgufError::Version { file: self.file.into(), found: version }),
        }
    }

    fn count(&mut self, what: &'static str, limit: u64) -> Result<u64, GgufError> {
        let found = self.u64(|| what.into())?;
        if found > limit {
            // The file declares these as i64: a negative one is shown as such.
            let found = (found as i64).to_string();
            return Err(self.too_large(what.into(), found, limit, "more than any model has"));
        }
        Ok(found)
    }

    fn fits(&self, what: &'static str, count: u64, each: u64) -> Result<(), GgufError> {
        let limit = self.left() / each;
        if count > limit {
            return Err(self.too_large(what.into(), count.to_string(), limit, "what the rest of the file can hold"));
        }
        Ok(())
    }

    /// A length-prefixed string of at most `limit` bytes.
    fn string(&mut self, limit: u64, what: impl Fn() -> String) -> Result<&'a [u8], GgufError> {
        let len = self.u64(|| format!("the length of {}", what()))?;
        if len > limit {
            return Err(self.too_large(format!("the length of {}", what()), len.to_string(), limit, "bytes"));
        }
        self.take(len, &what)
    }

    fn key(&mut self, index: u64) -> Result<&'a str, GgufError> {
        let raw = self.string(MAX_KEY_BYTES, || format!("metadata key {index}"))?;
        let why = match std::str::from_utf8(raw) {
            Ok("") => "an empty key, expected a name",
            Ok(key) if key.contains('\0') => "holds a NUL byte, which hides what follows from C readers",
            Ok(key) => return Ok(key),
            Err(_) => "not UTF-8",
        };
        Err(GgufError::Key { file: self.file.into(), index, key: printable(raw), why })
    }

    fn value(&mut self, key: &str) -> Result<Value<'a>, GgufError> {
        match self.value_type(key, "value")? {
            ValueType::Array => self.array(key),
            ValueType::Str => {
                let what = || format!("the string of key {:?}", printable(key.as_bytes()));
                Ok(Value::Str(self.string(MAX_STRING_BYTES, what)?))
            }
            kind => self.scalar(key, kind),
        }
    }

    fn value_type(&mut self, key: &str, what: &'static str) -> Result<ValueType, GgufError> {
        let found = self.u32(|| format!("the {what} type of key {:?}", printable(key.as_bytes())))?;
        ValueType::from_id(found).ok_or_else(|| GgufError::ValueType {
            file: self.file.into(),
            key: printable(key.as_bytes()),
            what,
            found,
        })
    }

    fn scalar(&mut self, key: &str, kind: ValueType) -> Result<Value<'a>, GgufError> {
        use ValueType::*;
        let width = kind.min_bytes();
        let raw = self.take(width, || format!("the value of key {:?}", printable(key.as_bytes())))?;
        let mut wide = [0u8; 8];
        wide[..raw.len()].copy_from_slice(raw);
        let word = u64::from_le_bytes(wide);
        Ok(match kind {
            I8 => Value::Signed(kind, i64::from(word as i8)),
            I16 => Value::Signed(kind, i64::from(word as i16)),
            I32 => Value::Signed(kind, i64::from(word as i32)),
            I64 => Value::Signed(kind, word as i64),
            F32 => Value::Float(kind, f64::from(f32::from_bits(word as u32))),
            F64 => Value::Float(kind, f64::from_bits(word)),
            Bool if word > 1 => return Err(self.not_a_bool(key, word as u8)),
            Bool => Value::Bool(word == 1),
            _ => Value::Unsigned(kind, word),
        })
    }

    fn not_a_bool(&self, key: &str, found: u8) -> GgufError {
        GgufError::Bool { file: self.file.into(), key: printable(key.as_bytes()), found }
    }

    fn array(&mut self, key: &str) -> Result<Value<'a>, GgufError> {
        let shown = || printable(key.as_bytes());
        let element = self.value_type(key, "array element")?;
        if element == ValueType::Array {
            return Err(GgufError::NestedArray { file: self.file.into(), key: shown() });
        }
        let what = || format!("the array of key {:?}", shown());
        let count = self.u64(|| format!("the length of {}", what()))?;
        let limit = (self.left() / element.min_bytes()).min(MAX_ARRAY);
        if count > limit {
            let why = "elements, what the rest of the file can hold";
            return Err(self.too_large(format!("the length of {}", what()), count.to_string(), limit, why));
        }
        let start = self.at as usize;
        if element == ValueType::Str {
            for index in 0..count {
                self.string(MAX_STRING_BYTES, || format!("element {index} of {}", what()))?;
            }
        } else {
            self.take(count * element.min_bytes(), what)?;
        }
        let raw = &self.bytes[start..self.at as usize];
        if element == ValueType::Bool
            && let Some(found) = raw.iter().find(|b| **b > 1)
        {
            return Err(self.not_a_bool(key, *found));
        }
        Ok(Value::Array(Array::new(element, count as usize, raw)))
    }

    fn tensor(&mut self, index: u64, alignment: u32) -> Result<TensorInfo<'a>, GgufError> {
        let name = self.tensor_name(index)?;
        let shown = || printable(name.as_bytes());
        let dims = self.u32(|| format!("the dimension count of tensor {:?}", shown()))?;
        if dims > 4 {
            return Err(GgufError::DimensionCount { file: self.file.into(), tensor: shown(), found: dims });
        }
        let mut ne = Vec::with_capacity(dims as usize);
        for _ in 0..dims {
            ne.push(self.u64(|| format!("the shape of tensor {:?}", shown()))?);
        }
        let id = self.u32(|| format!("the type of tensor {:?}", shown()))?;
        let offset = self.u64(|| format!("the offset of tensor {:?}", shown()))?;

        let shape = |why| GgufError::Shape { file: self.file.into(), tensor: shown(), shape: ne.clone(), why };
        let mut count = 1u64;
        for &d in &ne {
            if d == 0 {
                return Err(shape("a dimension of 0, expected at least 1"));
            }
            if i64::try_from(d).is_err() {
                return Err(shape("a negative dimension, expected at least 1"));
            }
            count = count.checked_mul(d).filter(|n| i64::try_from(*n).is_ok()).ok_or_else(|| {
                shape("the number of values does not fit 63 bits, expected a tensor that fits the file")
            })?;
        }
        let Some(kind) = GgmlType::from_id(id) else {
            return Err(GgufError::UnknownType { file: self.file.into(), tensor: shown(), id });
        };
        match kind.class {
            TypeClass::Removed => {
                return Err(GgufError::RemovedType { file: self.file.into(), tensor: shown(), id, name: kind.name });
            }
            TypeClass::Activation => {
                return Err(GgufError::ActivationType { file: self.file.into(), tensor: shown(), id, name: kind.name });
            }
            _ => {}
        }
        let columns = ne.first().copied().unwrap_or(1);
        if !columns.is_multiple_of(u64::from(kind.block_weights)) {
            return Err(GgufError::RaggedRow {
                file: self.file.into(),
                tensor: shown(),
                columns,
                block: kind.block_weights,
                name: kind.name,
            });
        }
        let len = kind
            .bytes_of(count)
            .ok_or_else(|| shape("the number of bytes does not fit 63 bits, expected a tensor that fits the file"))?;
        if !offset.is_multiple_of(u64::from(alignment)) {
            return Err(GgufError::Misaligned { file: self.file.into(), tensor: shown(), offset, alignment });
        }
        Ok(TensorInfo { name, ne, kind, offset, len })
    }

    fn tensor_name(&mut self, index: u64) -> Result<&'a str, GgufError> {
        let raw = self.string(MAX_NAME_BYTES, || format!("the name of tensor {index}"))?;
        let why = match std::str::from_utf8(raw) {
            Ok("") => "an empty name",
            Ok(name) if name.contains('\0') => "holds a NUL byte, which hides what follows from C readers",
            Ok(name) if name.contains(['/', '\\']) => "holds a path separator, which no tensor name has",
            Ok(name) if name.chars().any(char::is_control) => "holds a control character",
            Ok(name) => return Ok(name),
            Err(_) => "not UTF-8",
        };
        Err(GgufError::TensorName { file: self.file.into(), index, name: printable(raw), why })
    }
}
