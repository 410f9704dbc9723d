//! Opening a checkpoint of any kind: what the input is, and the catalog of what it holds.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use vt_bundle::manifest::file_name;

use crate::catalog::{Catalog, SourceDecoder};
use crate::gguf::{self, GgufError};
use crate::safetensors::resolve::Head;
use crate::safetensors::{self, HfDecoder, ResolveError, ResolveOptions, SafetensorsError};
use crate::source::Checkpoint;

/// Why an input cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A safetensors checkpoint is invalid.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// The tensors of a safetensors checkpoint do not make a model.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// A GGUF file is invalid.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The input is a pipe, a device or a socket.
    #[error("{}: neither a file nor a folder; give a folder of safetensors or a GGUF file", path.display())]
    NotAFile {
        /// The input.
        path: PathBuf,
    },
    /// The input is what this program makes.
    #[error("{}: is a vt bundle, not a checkpoint; `vt-bundle restore` gives back the checkpoint that it was made from", path.display())]
    IsABundle {
        /// The input.
        path: PathBuf,
    },
    /// The input does not exist or cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The input.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
}

impl OpenError {
    /// The exit code that a program should end with.
    pub fn exit_code(&self) -> u8 {
        match self {
            OpenError::Safetensors(e) if e.is_io() => 6,
            OpenError::Gguf(GgufError::Io { .. }) => 6,
            OpenError::Io { .. } => 6,
            _ => 3,
        }
    }
}

/// What the user decides about an input that does not say it by itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choices {
    /// Take the embedding as the head where the head is missing and the configuration does not say that they are tied.
    /// The configuration of the opened checkpoint then says so.
    pub tie_word_embeddings: bool,
}

/// An opened checkpoint.
pub struct Opened {
    /// Files and tensors.
    pub checkpoint: Checkpoint,
    /// Logical tensors.
    pub catalog: Catalog,
    /// Decoder of the source's own formats.
    pub decoder: Box<dyn SourceDecoder>,
}

/// Opens a folder, a `.safetensors` file or a `.gguf` file.
///
/// # Errors
/// [`OpenError`].
pub fn open(input: &Path, choices: Choices) -> Result<Opened, OpenError> {
    let io = |source| OpenError::Io { path: input.to_owned(), source };
    // Opening a pipe without a writer would wait for ever.
    let kind = std::fs::metadata(input).map_err(io)?;
    if !kind.is_file() && !kind.is_dir() {
        return Err(OpenError::NotAFile { path: input.to_owned() });
    }
    if kind.is_dir() && input.join(file_name::MANIFEST).is_file() && input.join(file_name::ID).is_file() {
        return Err(OpenError::IsABundle { path: input.to_owned() });
    }
    let target = if input.is_dir() {
        only_gguf(input).map_err(io)?
    } else {
        is_gguf(input).map_err(io)?.then(|| input.to_owned())
    };
    match target {
        Some(file) => {
            let (checkpoint, metadata) = gguf::open(&file)?;
            let catalog = gguf::catalog(&checkpoint, &metadata)?;
            Ok(Opened { checkpoint, catalog, decoder: Box::new(gguf::GgufDecoder) })
        }
        None => {
            let mut checkpoint = safetensors::open(input)?;
            let mut warnings = Vec::new();
            let options = ResolveOptions { tie_word_embeddings: choices.tie_word_embeddings };
            let resolution = safetensors::resolve(&checkpoint, options, &mut warnings)?;
            if options.tie_word_embeddings && resolution.head == Head::Tied {
                tie(&mut checkpoint.config);
            }
            checkpoint.warnings.append(&mut warnings);
            let catalog = safetensors::catalog(&checkpoint, &resolution);
            Ok(Opened { checkpoint, catalog, decoder: Box::new(HfDecoder::new(resolution)) })
        }
    }
}

/// Makes a configuration say that head and embedding are one; a nested one that says otherwise too.
fn tie(config: &mut serde_json::Value) {
    const KEY: &str = "tie_word_embeddings";
    if let Some(text) = config.get_mut("text_config").and_then(|t| t.as_object_mut())
        && text.contains_key(KEY)
    {
        text.insert(KEY.into(), true.into());
    }
    if let Some(config) = config.as_object_mut() {
        config.insert(KEY.into(), true.into());
    }
}

/// Whether a file is GGUF by its name or its first bytes.
fn is_gguf(path: &Path) -> io::Result<bool> {
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
        return Ok(true);
    }
    let mut magic = Vec::new();
    File::open(path)?.take(4).read_to_end(&mut magic)?;
    Ok(magic == b"GGUF")
}

/// The first GGUF file of a folder that holds no safetensors; parts of a split model sort after its first part.
fn only_gguf(dir: &Path) -> io::Result<Option<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors" | "json") => return Ok(None),
            Some("gguf") => found.push(path),
            _ => {}
        }
    }
    found.sort();
    Ok(found.into_iter().next())
}
