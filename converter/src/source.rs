//! What a checkpoint looks like once it is opened: mapped files, a table of tensors, a configuration.
//!
//! Both readers ([`crate::safetensors`], [`crate::gguf`]) produce a [`Checkpoint`]; the planner sees nothing else.
//! Every range in it has been checked against the size of its file.

use std::path::PathBuf;

use memmap2::Mmap;

use crate::catalog::Slice;

/// The container family of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// A folder of safetensors files with a `config.json`.
    Safetensors,
    /// A GGUF file, or a set of split GGUF files.
    Gguf,
}

/// One file that the converter read and that `restore` rebuilds byte for byte.
#[derive(Debug)]
pub struct SourceFile {
    /// Name relative to the checkpoint folder, with `/` separators and no `..`.
    pub name: String,
    /// Where it was opened, links resolved.
    pub path: PathBuf,
    /// Bytes in the file.
    pub size: u64,
    /// The mapping; `None` for an empty file.
    pub map: Option<Mmap>,
}

impl SourceFile {
    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}

/// The element type of a source tensor, as its container declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceDtype {
    /// A plain element type.
    Plain(PlainDtype),
    /// A ggml block type, by its on-disk id (GGUF only; F32, F16, BF16 and integers are `Plain`).
    Ggml(u32),
}

/// Element types with a fixed size, in safetensors spelling.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlainDtype {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    F16,
    Bf16,
    F32,
    F64,
}

impl PlainDtype {
    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 | Self::F8E8M0 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Name in a safetensors header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::U16 => "U16",
            Self::I16 => "I16",
            Self::U32 => "U32",
            Self::I32 => "I32",
            Self::U64 => "U64",
            Self::I64 => "I64",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E8M0 => "F8_E8M0",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::F64 => "F64",
        }
    }
}

impl PlainDtype {
    /// The manifest's spelling.
    pub const fn manifest_name(self) -> &'static str {
        match self {
            PlainDtype::Bool => "bool",
            PlainDtype::U8 => "u8",
            PlainDtype::I8 => "i8",
            PlainDtype::U16 => "u16",
            PlainDtype::I16 => "i16",
            PlainDtype::U32 => "u32",
            PlainDtype::I32 => "i32",
            PlainDtype::U64 => "u64",
            PlainDtype::I64 => "i64",
            PlainDtype::F8E4M3 => "f8_e4m3",
            PlainDtype::F8E5M2 => "f8_e5m2",
            PlainDtype::F8E8M0 => "f8_e8m0",
            PlainDtype::F16 => "f16",
            PlainDtype::Bf16 => "bf16",
            PlainDtype::F32 => "f32",
            PlainDtype::F64 => "f64",
        }
    }
}

/// One tensor of the source: where its bytes lie.
#[derive(Clone, Debug)]
pub struct SourceTensor {
    /// Name in the source file (`blk.0.attn_q.weight`, `model.layers.0.self_attn.q_proj.weight`).
    pub name: String,
    /// Declared type.
    pub dtype: SourceDtype,
    /// Shape in Hugging Face order (slowest axis first), GGUF's `ne` reversed.
    pub shape: Vec<u64>,
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// Absolute offset of the first byte in that file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// An opened, validated checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    /// Container family.
    pub kind: SourceKind,
    /// Weight files first, in shard order, then the small files (configuration, tokenizer).
    pub files: Vec<SourceFile>,
    /// All tensors, in file order and by offset within a file.
    pub tensors: Vec<SourceTensor>,
    /// Configuration in the form of a Hugging Face `config.json` (rebuilt from the metadata for GGUF).
    pub config: serde_json::Value,
    /// What `hf_quant_config.json` says, if it exists.
    pub quant_config: Option<serde_json::Value>,
    /// Assets for the bundle: name (`tokenizer.json`, `chat_template.jinja`, `generation_config.json`, ...) and bytes.
    pub assets: Vec<(String, Vec<u8>)>,
    /// Things the user should know that do not stop the conversion.
    pub warnings: Vec<String>,
}

impl Checkpoint {
    /// The bytes of a tensor.
    pub fn data(&self, tensor: &SourceTensor) -> &[u8] {
        // Ranges were checked against the file when the checkpoint was opened.
        &self.files[tensor.file].bytes()[tensor.offset as usize..(tensor.offset + tensor.len) as usize]
    }

    /// The bytes of a slice of a tensor.
    pub fn slice(&self, slice: &Slice) -> &[u8] {
        let data = self.data(&self.tensors[slice.tensor]);
        &data[slice.offset as usize..(slice.offset + slice.len) as usize]
    }

    /// Asks for a slice to be read ahead.
    pub fn will_need(&self, slice: &Slice) {
        let tensor = &self.tensors[slice.tensor];
        if let Some(map) = &self.files[tensor.file].map {
            vt_bundle::mmap::will_need(map, (tensor.offset + slice.offset) as usize, slice.len as usize);
        }
    }

    /// Gives the resident pages of a slice back; a later access reads them again.
    pub fn give_back(&self, slice: &Slice) {
        let tensor = &self.tensors[slice.tensor];
        if let Some(map) = &self.files[tensor.file].map {
            vt_bundle::mmap::release(map, (tensor.offset + slice.offset) as usize, slice.len as usize);
        }
    }

    /// The tensor of that name, if there is one.
    pub fn tensor(&self, name: &str) -> Option<&SourceTensor> {
        self.tensors.iter().find(|t| t.name == name)
    }
}
