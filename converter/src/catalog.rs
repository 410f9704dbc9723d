//! What a checkpoint holds, in the terms of the bundle: the meeting point of the sources and the planner.
//!
//! A source describes each logical tensor once: its Hugging Face name, how it is stored, and which bytes of which source
//! tensors make it up. The planner decides on fusion, placement and layout from this alone, without reading weights.

use std::ops::Range;

use vt_bundle::codec::{Codec, MatrixShape};
use vt_bundle::manifest::{KvCache, LowRank};
use vt_bundle::row_order::RowOrder;

use crate::source::Checkpoint;

/// A range of bytes within one source tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Index into [`crate::source::Checkpoint::tensors`].
    pub tensor: usize,
    /// First byte within the tensor.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// How one logical tensor is stored in the source.
#[derive(Clone)]
pub enum Storage {
    /// Plain elements, row-major.
    Rows {
        /// Element type in the manifest's spelling (`bf16`).
        dtype: &'static str,
        /// Shape in Hugging Face order.
        shape: Vec<u64>,
        /// The elements.
        data: Slice,
    },
    /// ggml blocks of a type without tile kernels.
    Raw {
        /// ggml's type id.
        id: u32,
        /// ggml's name of the type, lower case.
        name: &'static str,
        /// Shape in Hugging Face order.
        shape: Vec<u64>,
        /// Bytes of one row.
        row_bytes: u64,
        /// The blocks.
        data: Slice,
    },
    /// A matrix whose codec splits it into planes.
    Tiled {
        /// Splits and joins it.
        codec: &'static dyn Codec,
        /// N, K and group sizes.
        shape: MatrixShape,
        /// The codec's inputs, in its order; lengths agree with [`Codec::input_bytes`].
        inputs: Vec<Slice>,
        /// The source says that the matrix is all zero, whatever its codes and scales hold (a global scale of 0):
        /// the planes are zero and the source's bytes are kept for the restore.
        all_zero: bool,
    },
}

/// One logical tensor.
#[derive(Clone)]
pub struct Entry {
    /// Hugging Face name, unfused (`model.layers.0.self_attn.q_proj.weight`); for a stacked expert tensor that was cut
    /// into experts, the name of the expert's own tensor (`model.layers.0.mlp.experts.3.up_proj.weight`).
    pub name: String,
    /// Name in the source file.
    pub source: String,
    /// How it is stored.
    pub storage: Storage,
    /// How the bundle's rows relate to the source's.
    pub row_order: RowOrder,
    /// Outside the text model (vision tower, MTP head): goes to the cold segments.
    pub cold: bool,
    /// Per-tensor scale, for the manifest's readers.
    pub scale: Option<f32>,
    /// Static activation scale.
    pub input_scale: Option<f32>,
    /// Name of the entry that multiplies the input.
    pub pre_quant_scale: Option<String>,
    /// Names of the entries of a low-rank branch.
    pub low_rank: Option<LowRank>,
}

impl Entry {
    /// A plain entry under its own name, with nothing attached.
    pub fn new(name: impl Into<String>, source: impl Into<String>, storage: Storage) -> Self {
        Self {
            name: name.into(),
            source: source.into(),
            storage,
            row_order: RowOrder::Same,
            cold: false,
            scale: None,
            input_scale: None,
            pre_quant_scale: None,
            low_rank: None,
        }
    }
}

impl Entry {
    /// The source bytes that the entry is made of.
    pub fn slices(&self) -> &[Slice] {
        match &self.storage {
            Storage::Rows { data, .. } | Storage::Raw { data, .. } => std::slice::from_ref(data),
            Storage::Tiled { inputs, .. } => inputs,
        }
    }

    /// Gives the resident pages of those bytes back, so that they do not add up over a conversion.
    pub fn give_back(&self, checkpoint: &Checkpoint) {
        self.slices().iter().for_each(|s| checkpoint.give_back(s));
    }
}

/// Decodes the source by its own format's formula, written independently from the decoders of the bundle.
pub trait SourceDecoder: Send + Sync {
    /// Writes rows of an entry's matrix, in the order of the source, as f32 `[rows, K]`. Entries of plain elements are
    /// not asked for.
    ///
    /// A block that the rules make zero (a NaN scale over codes that are all 0, a global scale of 0) decodes to zeros.
    fn decode_rows(&self, checkpoint: &Checkpoint, entry: &Entry, rows: Range<u64>, out: &mut [f32]);
}

/// Everything that a checkpoint holds.
#[derive(Clone, Default)]
pub struct Catalog {
    /// Logical tensors, in any order. Source tensors that no entry refers to (activation scales, rotary tables) go to
    /// the restore data.
    pub entries: Vec<Entry>,
    /// `model_type`.
    pub architecture: String,
    /// Conventions in which stored values differ from the Hugging Face checkpoint (`norm-stores-1-plus-w`).
    pub conventions: Vec<String>,
    /// KV-cache scales.
    pub kv_cache: Option<KvCache>,
    /// Algorithm that the source's configuration names.
    pub declared: Option<String>,
    /// Things the user should know that do not stop the conversion.
    pub warnings: Vec<String>,
}
