//! The source's values, by ggml's own formulas.

use std::ops::Range;

use crate::catalog::{Entry, SourceDecoder, Storage};
use crate::dequant::ggml::dequantize;
use crate::source::{Checkpoint, SourceDtype};

/// Decoder of GGUF tensors.
#[derive(Debug, Default)]
pub struct GgufDecoder;

impl SourceDecoder for GgufDecoder {
    fn decode_rows(&self, checkpoint: &Checkpoint, entry: &Entry, rows: Range<u64>, out: &mut [f32]) {
        let (data, total) = match &entry.storage {
            Storage::Rows { data, shape, .. } | Storage::Raw { data, shape, .. } => {
                (data, shape.first().copied().unwrap_or(1))
            }
            Storage::Tiled { inputs, shape, .. } => (&inputs[0], shape.n as u64),
        };
        let tensor = &checkpoint.tensors[data.tensor];
        let SourceDtype::Ggml(id) = tensor.dtype else { return };
        let row_bytes = data.len / total.max(1);
        let start = data.offset + rows.start * row_bytes;
        let bytes = &checkpoint.data(tensor)[start as usize..(start + (rows.end - rows.start) * row_bytes) as usize];
        // A length that does not fit leaves `out` as it was, which the comparison reports.
        let _ = dequantize(id, bytes, out);
    }
}
