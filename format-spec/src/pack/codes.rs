//! Code planes.

use super::{PartSource, direct};
use crate::codec::CodeRows;
use crate::layout::TiledMatrix;
use crate::tile::{CodePlane, TILE_CODES, TILE_K, TILE_N};

/// Largest tile of any code plane, in bytes.
const MAX_TILE_BYTES: usize = TILE_CODES;

/// Rows of tiles that are packed together: for 4-bit codes eight of them read one cache line of every source row, and of a
/// wide matrix, whose rows lie on pages of their own, a page is looked up less often.
const TILE_ROWS: u64 = 32;

/// Writes the bytes `start .. start + out.len()` of a code plane.
pub(super) fn pack(matrix: &TiledMatrix, parts: &[PartSource<'_>], plane: &CodePlane, start: u64, out: &mut [u8]) {
    let packer = Packer { matrix, parts, plane, rows: parts.iter().map(PartSource::code_rows).collect() };
    let tile_bytes = plane.tile_bytes() as u64;
    let end = start + out.len() as u64;
    // Whole tiles, and what is cut off at either end.
    let (first, last) = (start.div_ceil(tile_bytes), end / tile_bytes);
    if first > last {
        return packer.cut(start / tile_bytes, start, out);
    }
    let (head, out) = out.split_at_mut((first * tile_bytes - start) as usize);
    let (body, tail) = out.split_at_mut(((last - first) * tile_bytes) as usize);
    if !head.is_empty() {
        packer.cut(first - 1, start, head);
    }
    packer.whole(first, last, body);
    if !tail.is_empty() {
        packer.cut(last, last * tile_bytes, tail);
    }
}

struct Packer<'a> {
    matrix: &'a TiledMatrix,
    parts: &'a [PartSource<'a>],
    plane: &'a CodePlane,
    /// Per part, its codes as rows of the file.
    rows: Vec<Option<CodeRows<'a>>>,
}

impl Packer<'_> {
    /// A range within one tile that is not all of it.
    fn cut(&self, tile: u64, start: u64, out: &mut [u8]) {
        let mut scratch = [0u8; MAX_TILE_BYTES];
        let scratch = &mut scratch[..self.plane.tile_bytes()];
        let tiles_n = self.matrix.tiles_n();
        self.tile((tile / tiles_n) as usize, (tile % tiles_n) as usize, scratch);
        let from = (start - tile * scratch.len() as u64) as usize;
        out.copy_from_slice(&scratch[from..from + out.len()]);
    }

    /// The tiles `first .. last` in order, block by block for the sake of the cache.
    fn whole(&self, first: u64, last: u64, out: &mut [u8]) {
        let tiles_n = self.matrix.tiles_n();
        let tile_bytes = self.plane.tile_bytes();
        let mut tile = first;
        while tile < last {
            let (tile_k, column) = (tile / tiles_n, tile % tiles_n);
            let left = last - tile;
            let (depth, columns) = if column > 0 || left < tiles_n {
                (1, left.min(tiles_n - column))
            } else {
                ((left / tiles_n).min(TILE_ROWS - tile_k % TILE_ROWS), tiles_n)
            };
            for c in 0..columns {
                for d in 0..depth {
                    let at = (tile - first + d * tiles_n + c) as usize * tile_bytes;
                    self.tile((tile_k + d) as usize, (column + c) as usize, &mut out[at..at + tile_bytes]);
                }
            }
            tile += depth * columns;
        }
    }

    /// One tile; zero where it reaches beyond a part's rows or K.
    fn tile(&self, tile_k: usize, tile_n: usize, out: &mut [u8]) {
        let first = (tile_n * TILE_N) as u64;
        let at = self.matrix.part_of(first);
        let place = &self.matrix.parts[at];
        let row = (first - place.start) as usize;
        let live = (place.rows as usize - row).min(TILE_N);
        let k = self.matrix.k as usize;
        match (self.rows[at], self.plane.bits) {
            (Some(CodeRows::Nibbles(rows)), 4) if live == TILE_N => {
                if let Ok(out) = out.try_into() {
                    return direct::nibbles(&rows[row * (k / 2) + tile_k * (TILE_K / 2)..], k / 2, out);
                }
            }
            (Some(CodeRows::Bytes(rows)), 8) if live == TILE_N => {
                if let Ok(out) = out.try_into() {
                    return direct::bytes(&rows[row * k + tile_k * TILE_K..], k, out);
                }
            }
            _ => {}
        }
        let mut codes = [0u8; TILE_CODES];
        for (c, column) in codes.as_chunks_mut::<TILE_K>().0.iter_mut().enumerate().take(live) {
            self.parts[at].codes16(row + c, tile_k * TILE_K, column);
        }
        self.plane.pack_tile(&codes, out);
    }
}
