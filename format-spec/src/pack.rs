//! Packing: source bytes to any byte range of any plane, a pure function.
//!
//! The packer is driven by the output: a worker asks for a window of the image and gets its bytes, whatever part of
//! which tensors falls into it. Windows are independent, so the result cannot depend on threads or interruptions.

use std::ops::Range;

use crate::codec::{Codec, MatrixShape};
use crate::layout::{PlaneKind, TiledMatrix};
use crate::row_order::RowOrder;
use crate::tile::{CodePlane, TILE_CODES, TILE_K, TILE_N};

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

impl PartSource<'_> {
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

/// Largest tile of any code plane, in bytes.
const MAX_TILE_BYTES: usize = TILE_CODES;

/// Writes the bytes `start .. start + out.len()` of a plane. Every byte of `out` is written.
///
/// `start` and `start + out.len()` are multiples of 4 or the end of the plane, so that no scale element is cut.
pub fn pack_tiled(matrix: &TiledMatrix, parts: &[PartSource<'_>], plane: PlaneKind, start: u64, out: &mut [u8]) {
    match plane {
        PlaneKind::Code(i) => pack_codes(matrix, parts, &matrix.spec.codes[i], start, out),
        PlaneKind::Scale(i) => pack_scales(matrix, parts, i, start, out),
    }
}

fn pack_codes(matrix: &TiledMatrix, parts: &[PartSource<'_>], plane: &CodePlane, start: u64, out: &mut [u8]) {
    let tile_bytes = plane.tile_bytes() as u64;
    let end = start + out.len() as u64;
    let mut codes = [0u8; TILE_CODES];
    let mut scratch = [0u8; MAX_TILE_BYTES];
    let mut tile = start / tile_bytes;
    while tile * tile_bytes < end {
        let (tile_k, tile_n) = (tile / matrix.tiles_n(), tile % matrix.tiles_n());
        gather_tile(matrix, parts, tile_k as usize, tile_n as usize, &mut codes);
        let at = tile * tile_bytes;
        let inside = at.max(start)..(at + tile_bytes).min(end);
        let to = (inside.start - start) as usize..(inside.end - start) as usize;
        if inside.end - inside.start == tile_bytes {
            plane.pack_tile(&codes, &mut out[to]);
        } else {
            let scratch = &mut scratch[..tile_bytes as usize];
            plane.pack_tile(&codes, scratch);
            out[to].copy_from_slice(&scratch[(inside.start - at) as usize..(inside.end - at) as usize]);
        }
        tile += 1;
    }
}

/// The codes of one tile, zero where the tile reaches beyond a part's rows or K.
fn gather_tile(
    matrix: &TiledMatrix,
    parts: &[PartSource<'_>],
    tile_k: usize,
    tile_n: usize,
    codes: &mut [u8; TILE_CODES],
) {
    let first = (tile_n * TILE_N) as u64;
    let at = matrix.part_of(first);
    let (place, source) = (&matrix.parts[at], &parts[at]);
    let k0 = tile_k * TILE_K;
    for (c, column) in codes.as_chunks_mut::<TILE_K>().0.iter_mut().enumerate() {
        let row = (first - place.start) as usize + c;
        if row < place.rows as usize {
            source.codes16(row, k0, column);
        } else {
            column.fill(0);
        }
    }
}

fn pack_scales(matrix: &TiledMatrix, parts: &[PartSource<'_>], index: usize, start: u64, out: &mut [u8]) {
    use crate::encoding::Span;
    let plane = &matrix.spec.scales[index];
    let size = plane.dtype.bytes();
    let width = matrix.padded_n();
    let order = plane.order();
    let first = start / size as u64;
    for (i, element) in out.chunks_exact_mut(size).enumerate() {
        let i = first + i as u64;
        let (row, column) = match plane.span {
            Span::Group | Span::Super(_) => (order.column((i % width) as usize) as u64, i / width),
            Span::Channel => (order.column(i as usize) as u64, 0),
            Span::Part => (matrix.parts[i as usize].start, 0),
            Span::Block => block_element(matrix, i, matrix.scale_columns(plane)),
        };
        let at = matrix.part_of(row);
        let (place, source) = (&matrix.parts[at], &parts[at]);
        let within = row - place.start;
        if within < place.rows {
            source.scale(index, within as usize, column as usize, element);
        } else {
            element.fill(0);
        }
    }
}

/// First padded row and column of the `i`-th element of a block plane.
fn block_element(matrix: &TiledMatrix, i: u64, columns: u64) -> (u64, u64) {
    let (mut block_row, column) = (i / columns, i % columns);
    for part in &matrix.parts {
        let rows = matrix.block_rows(part);
        if block_row < rows {
            return (part.start + block_row * matrix.block[0], column);
        }
        block_row -= rows;
    }
    // Beyond the plane; callers stay within `plane_bytes`.
    (0, column)
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
