//! The header of one safetensors file: parsing, and every check that needs no tensor data.
//!
//! A file is `u64 n`, `n` bytes of JSON, data. Written from the format's description (README of the safetensors
//! project); stricter than its reader in that names that occur twice are refused.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};

use super::error::SafetensorsError as Error;
use crate::source::PlainDtype;

/// Longest header that is read, the limit of the reference reader.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// What a Git LFS pointer starts with.
const LFS_PREFIX: &[u8] = b"version https://git-lfs";

/// Longest target of a symbolic link on Linux (`PATH_MAX`).
const MAX_LINK_TEXT: usize = 4096;

/// One tensor of a file, its range checked.
#[derive(Debug, PartialEq)]
pub(crate) struct HeaderTensor {
    pub name: String,
    pub dtype: PlainDtype,
    pub shape: Vec<u64>,
    /// Absolute offset in the file.
    pub offset: u64,
    pub len: u64,
}

/// Parses and checks the header of `file`, the whole content of the file at `path`.
///
/// On success the tensors come sorted by offset, and together they cover the data exactly.
///
/// # Errors
/// Everything [`Error`] can say about a single weights file.
pub(crate) fn parse(path: &Path, file: &[u8]) -> Result<Vec<HeaderTensor>, Error> {
    let size = file.len() as u64;
    if size == 0 {
        return Err(Error::Empty { path: path.into() });
    }
    refuse_placeholder(path, file)?;
    let length_error = |found, limit| Error::HeaderLength { path: path.into(), found, limit, size };
    let Some((prefix, rest)) = file.split_first_chunk::<8>() else {
        return Err(length_error(0, 0));
    };
    let header_len = u64::from_le_bytes(*prefix);
    let limit = MAX_HEADER_BYTES.min(rest.len() as u64);
    if header_len > limit {
        return Err(length_error(header_len, limit));
    }
    let (json, data) = rest.split_at(header_len as usize);
    let text = std::str::from_utf8(json).map_err(|e| Error::HeaderJson {
        path: path.into(),
        reason: format!("not UTF-8 at byte {}", e.valid_up_to()),
    })?;
    let raw: RawHeader =
        serde_json::from_str(text).map_err(|e| Error::HeaderJson { path: path.into(), reason: e.to_string() })?;

    let mut tensors = Vec::with_capacity(raw.tensors.len());
    {
        let mut seen = HashSet::with_capacity(raw.tensors.len());
        if let Some(name) = raw.twice {
            return Err(Error::DuplicateKey { path: path.into(), name });
        }
        for (name, _) in &raw.tensors {
            if !seen.insert(name.as_str()) {
                return Err(Error::DuplicateKey { path: path.into(), name: name.clone() });
            }
        }
    }
    for (name, info) in raw.tensors {
        tensors.push(check_tensor(path, name, info, 8 + header_len)?);
    }
    check_cover(path, &mut tensors, 8 + header_len, data.len() as u64, size)?;
    Ok(tensors)
}

/// Refuses the two kinds of short text that stand in for content: a Git LFS pointer and the text of a lost link.
pub(crate) fn refuse_placeholder(path: &Path, file: &[u8]) -> Result<(), Error> {
    if file.starts_with(LFS_PREFIX) {
        return Err(Error::LfsPointer { path: path.into(), size: file.len() as u64 });
    }
    if file.len() <= MAX_LINK_TEXT
        && file.starts_with(b"../")
        && let Ok(text) = std::str::from_utf8(file)
        && !text.contains(|c: char| c.is_control())
    {
        return Err(Error::LinkText { path: path.into(), target: text.into() });
    }
    Ok(())
}

fn check_tensor(path: &Path, name: String, info: RawTensor, data_start: u64) -> Result<HeaderTensor, Error> {
    let dtype = match dtype_of(&info.dtype) {
        Ok(dtype) => dtype,
        Err(hint) => return Err(Error::Dtype { path: path.into(), tensor: name, dtype: info.dtype, hint }),
    };
    let [begin, end] = info.data_offsets;
    let Some(len) = end.checked_sub(begin) else {
        return Err(Error::RangeReversed { path: path.into(), tensor: name, begin, end });
    };
    let bytes = info.shape.iter().try_fold(dtype.size(), |product, &dim| product.checked_mul(dim));
    if bytes != Some(len) {
        return Err(Error::RangeSize {
            path: path.into(),
            tensor: name,
            dtype: info.dtype,
            shape: info.shape,
            expected: bytes.map_or_else(|| "more than 2^64".into(), |b| b.to_string()),
            found: len,
        });
    }
    // A range may reach past any file here; `check_cover` compares with the size. Saturation keeps it past the end.
    Ok(HeaderTensor { name, dtype, shape: info.shape, offset: data_start.saturating_add(begin), len })
}

/// Sorts by offset and checks that the ranges tile `[data_start, size)`.
fn check_cover(
    path: &Path,
    tensors: &mut [HeaderTensor],
    data_start: u64,
    data_len: u64,
    size: u64,
) -> Result<(), Error> {
    // Empty tensors sort before the tensor that begins at the same byte; names make the order a function of content.
    tensors.sort_by(|a, b| (a.offset, a.len, &a.name).cmp(&(b.offset, b.len, &b.name)));
    let mut next = data_start;
    let mut previous = "";
    for t in tensors.iter() {
        if t.offset < next {
            return Err(Error::Overlap {
                path: path.into(),
                first: previous.into(),
                second: t.name.clone(),
                at: t.offset - data_start,
            });
        }
        let end = t.offset.saturating_add(t.len);
        if t.offset > next {
            if end > size {
                return Err(Error::FileSize { path: path.into(), expected: end, found: size });
            }
            return Err(Error::Hole { path: path.into(), tensor: t.name.clone(), len: t.offset - next });
        }
        next = end;
        previous = &t.name;
    }
    if next - data_start != data_len {
        return Err(Error::FileSize { path: path.into(), expected: next, found: size });
    }
    Ok(())
}

/// The element type of that safetensors name, or a remark on why there is none.
fn dtype_of(name: &str) -> Result<PlainDtype, &'static str> {
    const ALL: [PlainDtype; 16] = [
        PlainDtype::Bool,
        PlainDtype::U8,
        PlainDtype::I8,
        PlainDtype::U16,
        PlainDtype::I16,
        PlainDtype::U32,
        PlainDtype::I32,
        PlainDtype::U64,
        PlainDtype::I64,
        PlainDtype::F8E4M3,
        PlainDtype::F8E5M2,
        PlainDtype::F8E8M0,
        PlainDtype::F16,
        PlainDtype::Bf16,
        PlainDtype::F32,
        PlainDtype::F64,
    ];
    ALL.into_iter().find(|dtype| dtype.name() == name).ok_or(if name.ends_with("FNUZ") {
        ": its bytes mean other values than those of F8_E4M3 (bias 8, 0x80 is NaN); export the checkpoint with F8_E4M3"
    } else {
        "; expected one of BOOL, U8 to U64, I8 to I64, F8_E4M3, F8_E5M2, F8_E8M0, F16, BF16, F32, F64"
    })
}

/// Fields that later versions of the format may add are passed over; the derive refuses one that occurs twice.
#[derive(serde::Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    /// Set where `__metadata__`, or a key in it, occurs twice.
    twice: Option<String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader { tensors: Vec::new(), twice: None };
                let mut has_metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        let StringPairs(pairs) = map.next_value()?;
                        let mut seen = HashSet::new();
                        let again = pairs.into_iter().map(|(k, _)| k).find(|k| !seen.insert(k.clone()));
                        header.twice = header.twice.or(again).or_else(|| has_metadata.then(|| name.clone()));
                        has_metadata = true;
                        continue;
                    }
                    let info = map
                        .next_value::<RawTensor>()
                        .map_err(|e| de::Error::custom(format_args!("tensor {name}: {e}")))?;
                    header.tensors.push((name, info));
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

/// A JSON object of strings, in order and with repeated keys kept.
pub(crate) struct StringPairs(pub Vec<(String, String)>);

impl<'de> Deserialize<'de> for StringPairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor;
        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = StringPairs;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StringPairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(StringPairs(pairs))
            }
        }
        deserializer.deserialize_map(PairsVisitor)
    }
}
