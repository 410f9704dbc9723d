//! Packing: source bytes to any byte range of any plane, a pure function.
//!
//! The packer is driven by the output: a worker asks for a window of the image and gets its bytes, whatever part of
//! which tensors falls into it. Windows are independent, so the result cannot depend on threads or interruptions.
//!
//! Codecs whose codes and scales lie in the file as plain rows say so ([`Codec::code_rows`], [`Codec::scale_rows`]); their
//! tiles are then written straight from the source's words. The bytes are the same either way.

use std::ops::Range;

use crate::codec::{CodeRows, Codec, MatrixShape};
use crate::layout::{PlaneKind, TiledMatrix};
use crate::row_order::RowOrder;
use crate::tile::TILE_K;

mod codes;
mod direct;
mod scales;

/// How one part of a tiled matrix is stored in its source.
#[derive(Clone, Copy)]
pub struct PartFormat<'a> {
    /// How its bytes are stored.
    pub codec: &'a dyn Codec,
    /// N, K and group sizes.
    pub shape: MatrixShape,
    /// Permutation of rows.
    pub row_order: RowOrder,
}

/// One part of a tiled matrix, in the source.
pub struct PartSource<'a> {
    /// Storage format.
    pub format: PartFormat<'a>,
    /// The codec's inputs, lengths checked with [`Codec::input_bytes`].
    pub inputs: Vec<&'a [u8]>,
    /// The matrix is zero by its scale, whatever the inputs hold: clean zeros in every plane.
    pub all_zero: bool,
}

impl<'a> PartSource<'a> {
    /// The codes as rows of the file, in the order of the bundle, where they are stored so.
    fn code_rows(&self) -> Option<CodeRows<'a>> {
        let PartFormat { codec, shape, row_order } = &self.format;
        if self.all_zero || *row_order != RowOrder::Same {
            return None;
        }
        codec.code_rows(shape, &self.inputs)
    }

    /// The elements of a scale plane as rows of the file, where they are stored so.
    fn scale_rows(&self, plane: usize) -> Option<&'a [u8]> {
        let PartFormat { codec, shape, .. } = &self.format;
        if self.all_zero { None } else { codec.scale_rows(shape, &self.inputs, plane) }
    }

    fn codes16(&self, bundle_row: usize, k0: usize, out: &mut [u8; TILE_K]) {
        if self.all_zero {
            return out.fill(0);
        }
        let PartFormat { codec, shape, row_order } = &self.format;
        codec.codes16(shape, &self.inputs, row_order.source_row(bundle_row), k0, out);
    }

    fn scale(&self, plane: usize, bundle_row: usize, column: usize, out: &mut [u8]) {
        if self.all_zero {
            return out.fill(0);
        }
        let PartFormat { codec, shape, row_order } = &self.format;
        codec.scale(shape, &self.inputs, plane, row_order.source_row(bundle_row), column, out);
    }
}

/// Writes the bytes `start .. start + out.len()` of a plane. Every byte of `out` is written.
///
/// `start` and `start + out.len()` are multiples of 4 or the end of the plane, so that no scale element is cut.
pub fn pack_tiled(matrix: &TiledMatrix, parts: &[PartSource<'_>], plane: PlaneKind, start: u64, out: &mut [u8]) {
    match plane {
        PlaneKind::Code(i) => codes::pack(matrix, parts, &matrix.spec.codes[i], start, out),
        PlaneKind::Scale(i) => scales::pack(matrix, parts, i, start, out),
    }
}

/// One part of a row-major tensor, in the source.
pub struct RowsSource<'a> {
    /// The rows, one after the other.
    pub data: &'a [u8],
    /// Number of rows.
    pub rows: u64,
    /// Permutation of rows.
    pub row_order: RowOrder,
}

/// Writes a byte range of a row-major plane, the parts one after the other. Every byte of `out` is written.
pub fn pack_rows(parts: &[RowsSource<'_>], row_bytes: u64, range: Range<u64>, out: &mut [u8]) {
    let mut at = 0u64;
    for part in parts {
        let len = part.rows * row_bytes;
        let (from, to) = (range.start.max(at), range.end.min(at + len));
        if from < to {
            let target = &mut out[(from - range.start) as usize..(to - range.start) as usize];
            copy_rows(part, row_bytes, from - at, target);
        }
        at += len;
    }
}

fn copy_rows(part: &RowsSource<'_>, row_bytes: u64, start: u64, out: &mut [u8]) {
    if part.row_order == RowOrder::Same {
        out.copy_from_slice(&part.data[start as usize..start as usize + out.len()]);
        return;
    }
    let mut at = start;
    let mut rest = out;
    while !rest.is_empty() {
        let (row, skip) = (at / row_bytes, at % row_bytes);
        let len = ((row_bytes - skip) as usize).min(rest.len());
        let from = part.row_order.source_row(row as usize) as u64 * row_bytes + skip;
        let (now, later) = rest.split_at_mut(len);
        now.copy_from_slice(&part.data[from as usize..from as usize + len]);
        rest = later;
        at += len as u64;
    }
}
