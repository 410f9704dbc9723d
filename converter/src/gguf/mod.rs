//! GGUF checkpoints: the container, the names, the configuration and the tokenizer that its metadata describe.
//!
//! [`open`] produces the [`Checkpoint`] and the [`GgufMetadata`] from which [`catalog`] describes every tensor to the planner. The
//! container is judged first (every part of a split model), then the model. Facts about the format follow ggml 0.25.3 and
//! gguf-py 0.19.

mod architectures;
mod catalog;
mod config;
pub mod container;
mod decoder;
mod error;
mod keys;
pub mod names;
mod split;
mod tokenizer;
pub mod types;
pub mod value;

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

pub use catalog::catalog;
pub use decoder::GgufDecoder;
pub use error::GgufError;
pub use keys::ModelFacts;

use crate::dequant::ggml::check_blocks;
use crate::source::{Checkpoint, SourceFile, SourceKind, SourceTensor};
use config::TensorFacts;
use container::{Header, parse};
use error::printable;
use keys::Keys;
use names::{Architecture, MappedName, architecture, is_known, map_name};
use types::GgmlType;
use value::Value;

/// What the metadata say beyond the [`Checkpoint`].
#[derive(Debug)]
pub struct GgufMetadata {
    /// Names elsewhere, and the order of rows.
    pub architecture: &'static Architecture,
    /// Dimensions of the model.
    pub facts: ModelFacts,
    /// `general.file_type`: the mixture that the writer names, for people; every tensor has its own type.
    pub file_type: Option<u64>,
    /// The Hugging Face name of each tensor, in the order of [`Checkpoint::tensors`].
    pub names: Vec<MappedName>,
}

/// Bytes of tensor data that are looked at, at most, to give a file without an architecture its proper message.
const GLANCE_BYTES: u64 = 64 << 20;

/// Opens a GGUF model: one file, or any part of a split set, whose other parts are found by their names beside it.
///
/// # Errors
/// [`GgufError`], which names the file, the key or the tensor, what was found and what was expected.
pub fn open(path: &Path) -> Result<(Checkpoint, GgufMetadata), GgufError> {
    let paths = split::part_paths(path)?;
    let maps: Vec<Option<Mmap>> = paths.iter().map(map).collect::<Result<_, _>>()?;
    let shown: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
    let headers: Vec<Header<'_>> = shown
        .iter()
        .zip(&maps)
        .map(|(file, map)| parse(file, map.as_deref().unwrap_or(&[])))
        .collect::<Result<_, _>>()?;
    split::check_set(&shown, &headers)?;

    let mut tensors = Vec::new();
    for (file, header) in headers.iter().enumerate() {
        let first = tensors.len();
        tensors.extend(header.tensors.iter().map(|t| SourceTensor {
            name: t.name.into(),
            dtype: t.kind.source_dtype(),
            shape: t.ne.iter().rev().copied().collect(),
            file,
            offset: header.data_start + t.offset,
            len: t.len,
        }));
        tensors[first..].sort_by_key(|t: &SourceTensor| t.offset);
    }
    let bytes = |t: &SourceTensor| {
        let map = maps[t.file].as_deref().unwrap_or(&[]);
        // The parser has checked the range.
        &map[t.offset as usize..(t.offset + t.len) as usize]
    };

    let arch = architecture_name(&shown[0], &headers[0], || glance(&shown, &tensors, bytes))?;
    if tensors.is_empty() {
        return Err(GgufError::NoTensors { file: shown[0].clone() });
    }
    let keys = Keys { file: &shown[0], arch, metadata: &headers[0].metadata };
    let facts = ModelFacts::read(&keys)?;
    let architecture = architecture(arch, facts.experts);
    let names: Vec<MappedName> = tensors.iter().map(|t| map_name(architecture, &facts, &t.name)).collect();

    let mut warnings = Vec::new();
    if !is_known(arch) {
        warnings.push(format!(
            "architecture {:?} has no table of names: common names are mapped, rows stay as in the file",
            printable(arch.as_bytes())
        ));
    }
    let unknown: Vec<&str> =
        tensors.iter().zip(&names).filter(|(_, n)| n.unknown).map(|(t, _)| t.name.as_str()).collect();
    if let Some(first) = unknown.first() {
        warnings
            .push(format!("{} tensor(s) without a Hugging Face name keep theirs, such as {first:?}", unknown.len()));
    }
    let seen = tensor_facts(&tensors, bytes);
    let config = config::build(&keys, architecture, &facts, &seen)?;
    let assets = tokenizer::rebuild(&keys, seen.vocab_rows, &mut warnings)?;
    let file_type = keys.any("general.file_type", "an integer", Value::as_u64).ok().flatten();

    let sizes: Vec<u64> = maps.iter().map(|m| m.as_deref().map_or(0, |b| b.len() as u64)).collect();
    drop(headers);
    let files = paths
        .into_iter()
        .zip(maps)
        .zip(sizes)
        .map(|((path, map), size)| SourceFile {
            name: path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
            path: path.canonicalize().unwrap_or(path),
            size,
            map,
        })
        .collect();
    let checkpoint =
        Checkpoint { kind: SourceKind::Gguf, files, tensors, config, quant_config: None, assets, warnings };
    Ok((checkpoint, GgufMetadata { architecture, facts, file_type, names }))
}

fn map(path: &PathBuf) -> Result<Option<Mmap>, GgufError> {
    let fail = |action| move |source| GgufError::Io { file: path.clone(), action, source };
    // Opening a pipe without a writer would wait for ever.
    if !path.metadata().map_err(fail("open"))?.is_file() {
        return Err(GgufError::NotAFile { file: path.clone() });
    }
    let file = File::open(path).map_err(fail("open"))?;
    vt_bundle::mmap::map_readonly(&file).map_err(fail("map"))
}

/// `general.architecture` of a language model. `other_defects` is asked before its absence is reported.
fn architecture_name<'a>(
    file: &str,
    header: &Header<'a>,
    other_defects: impl FnOnce() -> Result<(), GgufError>,
) -> Result<&'a str, GgufError> {
    let text = |key: &'static str| match header.metadata.get(key) {
        None => Ok(None),
        Some(value) => value.as_str().map(Some).ok_or_else(|| GgufError::KeyValue {
            file: file.into(),
            key: key.into(),
            found: value.describe(),
            expected: "a UTF-8 string".into(),
        }),
    };
    const ARCHITECTURE: &str = "general.architecture";
    let Some(arch) = text(ARCHITECTURE)? else {
        other_defects()?;
        return Err(GgufError::MissingKey {
            file: file.into(),
            key: ARCHITECTURE.into(),
            why: "without it nobody can say what the tensors are; pass a model that llama.cpp's converter wrote",
        });
    };
    if arch == "clip" {
        return Err(GgufError::Projector { file: file.into(), key: ARCHITECTURE, found: arch.into() });
    }
    match text("general.type")? {
        Some("mmproj") => Err(GgufError::Projector { file: file.into(), key: "general.type", found: "mmproj".into() }),
        Some(other) if other != "model" => {
            Err(GgufError::NotAModel { file: file.into(), found: printable(other.as_bytes()) })
        }
        _ => Ok(arch),
    }
}

/// Block scales of a small file: damaged data is a better message than a missing key.
fn glance<'a>(
    files: &[String],
    tensors: &[SourceTensor],
    bytes: impl Fn(&SourceTensor) -> &'a [u8],
) -> Result<(), GgufError> {
    let mut left = GLANCE_BYTES;
    for tensor in tensors {
        let Some(rest) = left.checked_sub(tensor.len) else { return Ok(()) };
        left = rest;
        check_tensor(&files[tensor.file], tensor, bytes(tensor))?;
    }
    Ok(())
}

/// Refuses scales that are not finite. `data` are the tensor's bytes, or whole blocks of it.
///
/// # Errors
/// [`GgufError::BadBlock`].
pub fn check_tensor(file: &str, tensor: &SourceTensor, data: &[u8]) -> Result<(), GgufError> {
    let crate::source::SourceDtype::Ggml(id) = tensor.dtype else { return Ok(()) };
    check_blocks(id, data).map_err(|bad| GgufError::BadBlock {
        file: file.into(),
        tensor: printable(tensor.name.as_bytes()),
        block: bad.block,
        field: bad.field,
        name: GgmlType::from_id(id).map_or("?", |t| t.name),
    })
}

/// Looks over the tensors of all parts: a head in the second part is a head.
fn tensor_facts<'a>(tensors: &[SourceTensor], bytes: impl Fn(&SourceTensor) -> &'a [u8]) -> TensorFacts {
    let find = |name: &str| tensors.iter().find(|t| t.name == name);
    let ends = |end: &str| tensors.iter().any(|t| t.name.ends_with(end));
    let rope_factors = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"]
        .into_iter()
        .filter_map(find)
        .filter(|t| t.dtype == crate::source::SourceDtype::Plain(crate::source::PlainDtype::F32) && t.len < 1 << 16)
        .map(|t| {
            let values = bytes(t).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            (t.name.clone(), values)
        })
        .collect();
    TensorFacts {
        vocab_rows: find("token_embd.weight").and_then(|t| t.shape.first().copied()).unwrap_or(0),
        has_output: find("output.weight").is_some(),
        attention_bias: (ends(".attn_q.bias") || ends(".attn_qkv.bias")) && ends(".attn_output.bias"),
        mlp_bias: ends(".ffn_up.bias"),
        has_expert_bias: ends(".exp_probs_b.bias") || ends(".exp_probs_b"),
        rope_factors,
    }
}
