//! Scale planes.

use super::PartSource;
use super::direct::scales8;
use crate::encoding::{ScalePlane, Span};
use crate::layout::TiledMatrix;
use crate::row_order::RowOrder;
use crate::tile::{ScaleOrder, TILE_N};

/// Elements along K that are transposed together.
const STEP: usize = 8;

/// Writes the bytes `start .. start + out.len()` of a scale plane.
pub(super) fn pack(matrix: &TiledMatrix, parts: &[PartSource<'_>], index: usize, start: u64, out: &mut [u8]) {
    let plane = &matrix.spec.scales[index];
    let width = matrix.padded_n() as usize * plane.dtype.bytes();
    if !matches!(plane.span, Span::Group | Span::Super(_)) {
        return elements(matrix, parts, index, start, out);
    }
    // A cut row, whole rows of the plane, another cut row.
    let cut = (start as usize).next_multiple_of(width) - start as usize;
    let (head, out) = out.split_at_mut(cut.min(out.len()));
    let (body, tail) = out.split_at_mut(out.len() / width * width);
    let first_row = (start as usize).div_ceil(width);
    let rows = body.len() / width;
    for (part, source) in matrix.parts.iter().zip(parts) {
        for block in (0..part.rows).step_by(TILE_N) {
            let live = (part.rows - block).min(TILE_N as u64) as usize;
            let column = Block { matrix, plane, index, source, row: block as usize, live };
            let at = (part.start + block) as usize * plane.dtype.bytes();
            column.rows(first_row, rows, width, &mut body[at.min(rows * width)..]);
        }
    }
    elements(matrix, parts, index, start, head);
    elements(matrix, parts, index, ((first_row + rows) * width) as u64, tail);
}

/// 64 columns of a group plane: rows of one part.
struct Block<'a> {
    matrix: &'a TiledMatrix,
    plane: &'a ScalePlane,
    index: usize,
    source: &'a PartSource<'a>,
    /// First row within the part.
    row: usize,
    /// Rows that exist.
    live: usize,
}

impl Block<'_> {
    /// Writes `rows` rows of the plane from row `first` (an element along K) on, `width` bytes apart.
    fn rows(&self, first: usize, rows: usize, width: usize, out: &mut [u8]) {
        if rows == 0 {
            return;
        }
        let size = self.plane.dtype.bytes();
        let columns = self.matrix.scale_columns(self.plane) as usize;
        let order = self.plane.order();
        let direct = self.source.scale_rows(self.index);
        let mut done = 0;
        if let Some(stored) = direct
            && self.live == TILE_N
            && self.source.format.row_order == RowOrder::Same
            && order == ScaleOrder::GroupedInterleaved
        {
            while done + STEP <= rows {
                let from = &stored[self.row * columns + first + done..];
                scales8(from, columns, &mut out[done * width..], width);
                done += STEP;
            }
        }
        for r in done..rows {
            let line = &mut out[r * width..r * width + TILE_N * size];
            for (position, element) in line.chunks_exact_mut(size).enumerate() {
                let column = order.column(position);
                if column >= self.live {
                    element.fill(0);
                } else if let Some(stored) = direct {
                    let row = self.source.format.row_order.source_row(self.row + column);
                    let at = (row * columns + first + r) * size;
                    element.copy_from_slice(&stored[at..at + size]);
                } else {
                    self.source.scale(self.index, self.row + column, first + r, element);
                }
            }
        }
    }
}

/// Any range, element by element.
fn elements(matrix: &TiledMatrix, parts: &[PartSource<'_>], index: usize, start: u64, out: &mut [u8]) {
    let plane = &matrix.spec.scales[index];
    let size = plane.dtype.bytes();
    let first = start / size as u64;
    for (i, element) in out.chunks_exact_mut(size).enumerate() {
        let i = first + i as u64;
        let (row, column) = matrix.scale_place(plane, i);
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
