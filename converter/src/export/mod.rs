//! Exporting a bundle as a plain F32 safetensors file under the Hugging Face names.
//!
//! Every part of a fused projection becomes a tensor of its own, every expert too. Quantised matrices are decoded by
//! the formula that their `decode` names; a `pre_quant_scale` is multiplied into the columns of the weight that it
//! belongs to, in f32, `w[n, k] * p[k]`. Tensors that are not floating point keep their type. The file is written front
//! to back with bounded memory and appears under its name only when it is complete and on the disk.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use vt_bundle::manifest::Placement;
use vt_bundle::{Bundle, BundleError};

mod items;
mod values;

use items::{Item, Items, collect};
use values::Values;

/// Failure to export.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The bundle cannot be read.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The output cannot be written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file being written.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// Two tensors of the bundle would have the same name in the file.
    #[error("{}: tensor {name} is listed by {first} and by {second}; the bundle is inconsistent", path.display())]
    Duplicate {
        /// The bundle.
        path: PathBuf,
        /// The name of both.
        name: String,
        /// Bundle tensor that gives the first.
        first: String,
        /// Bundle tensor that gives the second.
        second: String,
    },
    /// A part refers to a scale that is missing or of another length.
    #[error("{}: tensor {tensor}: pre_quant_scale {scale} {reason}", path.display())]
    PreQuantScale {
        /// The bundle.
        path: PathBuf,
        /// The weight.
        tensor: String,
        /// The scale that it names.
        scale: String,
        /// What is wrong with it, with the numbers.
        reason: String,
    },
    /// The raw block type has no decoder in this version.
    #[error("{}: tensor {tensor}: blocks of {found} ({found_row_bytes} bytes a row) cannot be decoded by this version", path.display())]
    Raw {
        /// The bundle.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// ggml's name of the type.
        found: String,
        /// Bytes of a row, as the manifest says.
        found_row_bytes: u64,
    },
}

impl ExportError {
    /// The exit code that a program should end with.
    pub fn exit_code(&self) -> u8 {
        match self {
            ExportError::Bundle(e) => e.exit_code(),
            ExportError::Io { .. } => 6,
            ExportError::Duplicate { .. } | ExportError::PreQuantScale { .. } | ExportError::Raw { .. } => 3,
        }
    }
}

/// What an export wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Tensors in the file.
    pub tensors: usize,
    /// Bytes of the file, header included.
    pub bytes: u64,
}

/// Bytes that [`dequantize`] will write, header included, without writing them.
///
/// # Errors
/// As [`dequantize`], without those of the output.
pub fn planned_bytes(bundle: &Bundle) -> Result<u64, ExportError> {
    let items = collect(bundle)?;
    Ok(header(bundle, &items.written).len() as u64 + items.written.iter().map(|i| i.bytes).sum::<u64>())
}

/// Writes all tensors of a bundle to `file` as F32 safetensors. An existing file is replaced.
///
/// `progress` is called with the bytes written.
///
/// # Errors
/// [`ExportError`]; on an error nothing is left under `file`'s name that was not there before.
pub fn dequantize(bundle: &Bundle, file: &Path, progress: &(dyn Fn(u64) + Sync)) -> Result<Summary, ExportError> {
    vt_bundle::outside::refuse_inside(file, bundle.dir())?;
    let items = collect(bundle)?;
    let mut temporary = file.as_os_str().to_owned();
    temporary.push(".vt-partial");
    let temporary = PathBuf::from(temporary);
    let written = write(bundle, &items, &temporary, progress).and_then(|bytes| {
        std::fs::rename(&temporary, file).map_err(|source| ExportError::Io { path: file.to_owned(), source })?;
        let parent = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        vt_bundle::writer::sync_folder(parent)?;
        Ok(Summary { tensors: items.written.len(), bytes })
    });
    if written.is_err() {
        // The error at hand matters more than whether the leftover can be removed.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

fn write(bundle: &Bundle, items: &Items, path: &Path, progress: &(dyn Fn(u64) + Sync)) -> Result<u64, ExportError> {
    let io = |source| ExportError::Io { path: path.to_owned(), source };
    let image = bundle.map(Placement::Image)?;
    let cold = bundle.map(Placement::Cold)?;
    let values = Values::new(bundle, items, image.bytes(), cold.bytes());
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path).map_err(io)?);
    let header = header(bundle, &items.written);
    out.write_all(&header).map_err(io)?;
    let mut total = header.len() as u64;
    progress(total);
    for item in &items.written {
        let prepared = values.prepare(item)?;
        let bands = prepared.bands();
        for step in bands.chunks(rayon::current_num_threads().max(1) * 2) {
            let decoded: Vec<Vec<u8>> = step.par_iter().map(|rows| prepared.bytes(rows.clone())).collect();
            for bytes in &decoded {
                out.write_all(bytes).map_err(io)?;
                total += bytes.len() as u64;
                progress(bytes.len() as u64);
            }
        }
    }
    let file = out.into_inner().map_err(|e| io(e.into_error()))?;
    file.sync_all().map_err(io)?;
    Ok(total)
}

/// The length prefix and the JSON header of the file, padded with spaces to a multiple of 8 bytes.
fn header(bundle: &Bundle, items: &[Item]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let mut metadata = serde_json::Map::new();
    metadata.insert("format".into(), "pt".into());
    metadata.insert("vt.bundle_id".into(), bundle.id().into());
    let conventions = &bundle.manifest().model.conventions;
    if !conventions.is_empty() {
        metadata.insert("vt.conventions".into(), conventions.join(",").into());
    }
    entries.insert("__metadata__".into(), metadata.into());
    let mut at = 0;
    for item in items {
        let end = at + item.bytes;
        let entry = serde_json::json!({ "dtype": item.dtype, "shape": item.shape, "data_offsets": [at, end] });
        entries.insert(item.name.clone(), entry);
        at = end;
    }
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(&json);
    bytes
}
