//! Split models: which files belong together, and whether they are all there.
//!
//! llama.cpp names parts `<prefix>-%05d-of-%05d.gguf`, counting from 1; the metadata counts from 0 (`split.no`). The names of
//! the other parts come from the name that the user gave, never from the content of a file.

use std::path::{Path, PathBuf};

use super::container::Header;
use super::error::GgufError;
use super::value::Metadata;

/// A file name of the pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartName {
    prefix: String,
    /// From 1.
    pub(crate) number: u32,
    pub(crate) count: u32,
}

impl PartName {
    /// Reads the pattern; `None` for another name, and for numbers that cannot be (0, or above the count).
    pub(crate) fn parse(file_name: &str) -> Option<Self> {
        let stem = file_name.strip_suffix(".gguf")?;
        let (rest, count) = five_digits(stem)?;
        let (prefix, number) = five_digits(rest.strip_suffix("-of")?)?;
        (1..=count).contains(&number).then(|| Self { prefix: prefix.to_owned(), number, count })
    }

    /// The name of another part of the set.
    pub(crate) fn sibling(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count)
    }
}

/// Cuts `-ddddd` off the end.
fn five_digits(text: &str) -> Option<(&str, u32)> {
    let (rest, digits) = text.rsplit_once('-')?;
    let good = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
    good.then(|| digits.parse().ok()).flatten().map(|n| (rest, n))
}

/// The files of the set that `path` belongs to, in order; `path` alone if its name is not of the pattern.
///
/// # Errors
/// [`GgufError::MissingParts`] names every part that is not on disk.
pub(crate) fn part_paths(path: &Path) -> Result<Vec<PathBuf>, GgufError> {
    let name = path.file_name().and_then(|n| n.to_str()).and_then(PartName::parse);
    let Some(name) = name.filter(|n| n.count > 1) else { return Ok(vec![path.to_owned()]) };
    let paths: Vec<PathBuf> = (1..=name.count).map(|n| path.with_file_name(name.sibling(n))).collect();
    let missing: Vec<&PathBuf> = paths.iter().filter(|p| !p.exists()).collect();
    if missing.is_empty() {
        return Ok(paths);
    }
    const SHOWN: usize = 8;
    let mut listed: Vec<String> = missing.iter().take(SHOWN).map(|p| p.display().to_string()).collect();
    if missing.len() > SHOWN {
        listed.push(format!("and {} more", missing.len() - SHOWN));
    }
    Err(GgufError::MissingParts { file: path.display().to_string(), missing: listed, count: name.count })
}

/// Checks the `split.*` keys of every part against the set.
///
/// # Errors
/// [`GgufError::Split`] for a file that was renamed, joined with `cat`, or belongs to another set;
/// [`GgufError::DuplicateTensor`] for a name in two parts.
pub(crate) fn check_set(files: &[String], headers: &[Header<'_>]) -> Result<(), GgufError> {
    let count = headers.len() as u64;
    for (place, (file, header)) in files.iter().zip(headers).enumerate() {
        let keys = &header.metadata;
        let declared = split_key(file, keys, "split.count")?;
        if count == 1 {
            // A single file may carry `split.count` 0 or 1.
            return match declared {
                Some(n) if n > 1 => Err(GgufError::Split {
                    file: file.clone(),
                    found: format!("split.count is {n} in a file that is not named as a part"),
                    expected: "a name like model-00001-of-00002.gguf".into(),
                    action: "give the parts their names back; if they were joined with cat, take the parts again and join them \
                             with `llama-gguf-split --merge`",
                }),
                _ => Ok(()),
            };
        }
        if declared != Some(count) {
            return Err(GgufError::Split {
                file: file.clone(),
                found: declared.map_or("no split.count".into(), |n| format!("split.count {n}")),
                expected: format!("{count}, as in the file's name"),
                action: "the file was renamed or belongs to another set: take all parts from one place",
            });
        }
        let number = split_key(file, keys, "split.no")?;
        if number != Some(place as u64) {
            return Err(GgufError::Split {
                file: file.clone(),
                found: number.map_or("no split.no".into(), |n| format!("split.no {n}")),
                expected: format!("{place} (the name counts from 1)"),
                action: "the file was renamed or belongs to another set: take all parts from one place",
            });
        }
    }
    check_tensor_total(files, headers)
}

fn check_tensor_total(files: &[String], headers: &[Header<'_>]) -> Result<(), GgufError> {
    let total: u64 = headers.iter().map(|h| h.tensors.len() as u64).sum();
    for (file, header) in files.iter().zip(headers) {
        if let Some(declared) = split_key(file, &header.metadata, "split.tensors.count")?
            && declared != total
        {
            return Err(GgufError::Split {
                file: file.clone(),
                found: format!("split.tensors.count is {declared}, the parts hold {total} tensors"),
                expected: "equal numbers".into(),
                action: "a part is from another version of the model: take all parts from one place",
            });
        }
    }
    let mut seen = std::collections::HashMap::new();
    for (file, header) in files.iter().zip(headers) {
        for tensor in &header.tensors {
            if let Some(first) = seen.insert(tensor.name, file) {
                return Err(GgufError::DuplicateTensor {
                    name: super::error::printable(tensor.name.as_bytes()),
                    first: first.clone(),
                    second: file.clone(),
                });
            }
        }
    }
    Ok(())
}

fn split_key(file: &str, keys: &Metadata<'_>, key: &str) -> Result<Option<u64>, GgufError> {
    let Some(value) = keys.get(key) else { return Ok(None) };
    value.as_u64().map(Some).ok_or_else(|| GgufError::KeyValue {
        file: file.into(),
        key: key.into(),
        found: value.describe(),
        expected: "an integer that is not negative".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts() {
        let name = PartName::parse("a-b-00002-of-00003.gguf").expect("the pattern");
        assert_eq!((name.number, name.count), (2, 3));
        assert_eq!(name.sibling(1), "a-b-00001-of-00003.gguf");
        for bad in [
            "model.gguf",
            "m-00000-of-00002.gguf",
            "m-00003-of-00002.gguf",
            "m-0001-of-0002.gguf",
            "m-00001-of-00002.bin",
            "m-+0001-of-00002.gguf",
        ] {
            assert_eq!(PartName::parse(bad), None, "{bad}");
        }
    }
}
