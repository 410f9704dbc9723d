//! Reading a Hugging Face checkpoint: a folder of safetensors files with a `config.json`.
//!
//! [`open`] checks every file's size and header before anything else happens and returns the table of tensors;
//! nothing in it has been decoded yet. [`resolve`](mod@resolve) then says what each tensor is: which scales belong to which
//! weight, in which encoding; [`catalog`](fn@catalog) puts that in the terms of the planner. Values (NaN codes, negative
//! scales) are checked while they are packed.

mod assets;
mod catalog;
mod error;
mod folder;
mod header;
pub mod quant_config;
pub mod resolve;

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;

pub use catalog::{HfDecoder, catalog};
pub use error::SafetensorsError;
use folder::Listing;
pub use resolve::{Resolution, ResolveError, ResolveOptions, ResolvedWeight, SourceEncoding, resolve};

use crate::source::{Checkpoint, SourceDtype, SourceFile, SourceKind, SourceTensor};

/// Opens the checkpoint at `input`: a folder, or one `.safetensors` file in a folder.
///
/// Every weight file is mapped, its size and header are checked, and the index (if any) is compared with what the
/// files hold. Tensor data is not read.
///
/// # Errors
/// [`SafetensorsError`], naming the file.
pub fn open(input: &Path) -> Result<Checkpoint, SafetensorsError> {
    let Listing { folder, weights, index, small, mut warnings } = folder::list(input)?;

    let mut files = Vec::with_capacity(weights.len() + small.len() + 1);
    let mut headers = Vec::with_capacity(weights.len());
    for name in &weights {
        let file = folder::open_file(&folder, name)?;
        // Errors name the file as the user knows it: the link in a hub cache, not the blob behind it.
        headers.push(header::parse(&folder.join(name), file.bytes())?);
        files.push(file);
    }

    let tensors = table(&folder, &weights, headers, index.as_ref(), &mut warnings)?;

    if let Some(index) = &index {
        files.push(folder::open_file(&folder, &index.name)?);
    }
    for name in small {
        let file = folder::open_file(&folder, name)?;
        folder::check_small(&file)?;
        files.push(file);
    }
    let json = |name: &str| -> Result<Option<Value>, SafetensorsError> {
        let Some(file) = files.iter().find(|f| f.name == name) else { return Ok(None) };
        read_object(&folder.join(name), file).map(Some)
    };
    let config = json("config.json")?.ok_or_else(|| SafetensorsError::MissingFile {
        folder: folder.clone(),
        file: "config.json".into(),
        why: "it says what the model is",
    })?;
    let quant_config = json("hf_quant_config.json")?;
    let assets = assets::collect(&files, &mut warnings);
    Ok(Checkpoint { kind: SourceKind::Safetensors, files, tensors, config, quant_config, assets, warnings })
}

fn read_object(path: &Path, file: &SourceFile) -> Result<Value, SafetensorsError> {
    let error = |reason| SafetensorsError::Json { path: path.into(), reason };
    header::refuse_placeholder(path, file.bytes())?;
    let value: Value = serde_json::from_slice(file.bytes()).map_err(|e| error(format!("not valid JSON: {e}")))?;
    if !value.is_object() {
        return Err(error("expected a JSON object at the top".into()));
    }
    Ok(value)
}

/// One table of all tensors, in file order and by offset within a file; one entry per name.
fn table(
    folder: &Path,
    weights: &[String],
    headers: Vec<Vec<header::HeaderTensor>>,
    index: Option<&folder::Index>,
    warnings: &mut Vec<String>,
) -> Result<Vec<SourceTensor>, SafetensorsError> {
    // Which files hold each name; nearly always exactly one.
    let mut holders: HashMap<&str, Vec<usize>> = HashMap::new();
    for (file, header) in headers.iter().enumerate() {
        for t in header {
            holders.entry(&t.name).or_default().push(file);
        }
    }
    if let Some(index) = index {
        check_index(folder, weights, index, &holders)?;
    }
    let mapped =
        |name: &str| index.and_then(|i| i.weight_map.get(name)).and_then(|file| weights.iter().position(|w| w == file));
    let mut keep: HashMap<String, usize> = HashMap::new();
    let mut twice: Vec<&str> = holders.iter().filter(|(_, files)| files.len() > 1).map(|(name, _)| *name).collect();
    twice.sort_unstable();
    for name in &twice {
        let Some(file) = mapped(name) else {
            let files = &holders[name];
            return Err(SafetensorsError::DuplicateTensor {
                tensor: name.to_string(),
                first: folder.join(&weights[files[0]]),
                second: folder.join(&weights[files[1]]),
            });
        };
        keep.insert(name.to_string(), file);
    }
    if let Some(first) = twice.first() {
        warnings.push(format!(
            "tensors in several shards: {} (the first is {first}); the copy that the index names is used",
            twice.len()
        ));
    }
    if let Some(index) = index {
        let mut unlisted: Vec<&str> =
            holders.keys().copied().filter(|name| !index.weight_map.contains_key(*name)).collect();
        unlisted.sort_unstable();
        if let Some(first) = unlisted.first() {
            warnings.push(format!(
                "{} leaves out tensors of its shards: {} (the first is {first}); they are kept",
                index.name,
                unlisted.len()
            ));
        }
    }

    let mut tensors = Vec::with_capacity(holders.len());
    for (file, header) in headers.into_iter().enumerate() {
        for t in header {
            if keep.get(&t.name).is_some_and(|&kept| kept != file) {
                continue;
            }
            tensors.push(SourceTensor {
                name: t.name,
                dtype: SourceDtype::Plain(t.dtype),
                shape: t.shape,
                file,
                offset: t.offset,
                len: t.len,
            });
        }
    }
    Ok(tensors)
}

/// Every tensor of the index must be in the shard that the index names.
fn check_index(
    folder: &Path,
    weights: &[String],
    index: &folder::Index,
    holders: &HashMap<&str, Vec<usize>>,
) -> Result<(), SafetensorsError> {
    let mut wrong: Vec<(&String, &String)> = index
        .weight_map
        .iter()
        .filter(|(tensor, file)| {
            let files = holders.get(tensor.as_str()).map_or(&[][..], Vec::as_slice);
            !files.iter().any(|&f| &weights[f] == *file)
        })
        .collect();
    wrong.sort_unstable();
    let Some((tensor, file)) = wrong.first() else { return Ok(()) };
    let elsewhere = holders.get(tensor.as_str()).map(|files| weights[files[0]].clone());
    Err(SafetensorsError::IndexTensor {
        index: folder.join(&index.name),
        tensor: tensor.to_string(),
        file: file.to_string(),
        elsewhere,
        count: wrong.len(),
    })
}

#[cfg(test)]
mod tests;
