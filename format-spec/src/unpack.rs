//! Unpacking: rows of a matrix out of its planes, as codes, as f32 values, or back to source bytes.

use crate::codec::Band;
#[cfg(doc)]
use crate::codec::Codec;
use crate::encoding::{MAX_SCALE_PLANES, MatrixRow};
use crate::layout::{PlaneKind, TiledMatrix};
use crate::pack::PartFormat;
use crate::tile::{TILE_CODES, TILE_K, TILE_N};

/// Code planes per encoding, at most.
pub const MAX_CODE_PLANES: usize = 2;

/// A tiled matrix and the bytes of its planes.
#[derive(Clone, Copy, Debug)]
pub struct TiledView<'a> {
    /// Geometry.
    pub matrix: &'a TiledMatrix,
    /// Code planes, in the order of the spec.
    pub codes: [&'a [u8]; MAX_CODE_PLANES],
    /// Scale planes, in the order of the spec.
    pub scales: [&'a [u8]; MAX_SCALE_PLANES],
}

impl<'a> TiledView<'a> {
    /// A view over planes; `bytes` gives each plane's bytes, which must have the length of
    /// [`TiledMatrix::plane_bytes`]. `None` if one does not.
    pub fn new(matrix: &'a TiledMatrix, mut bytes: impl FnMut(PlaneKind) -> &'a [u8]) -> Option<Self> {
        let mut view = Self { matrix, codes: [&[]; MAX_CODE_PLANES], scales: [&[]; MAX_SCALE_PLANES] };
        for plane in matrix.planes() {
            let data = bytes(plane);
            if data.len() as u64 != matrix.plane_bytes(plane) {
                return None;
            }
            match plane {
                PlaneKind::Code(i) => view.codes[i] = data,
                PlaneKind::Scale(i) => view.scales[i] = data,
            }
        }
        Some(view)
    }

    /// The codes of one tile, N-major (`[64, 16]`).
    pub fn tile_codes(&self, tile_k: usize, tile_n: usize, codes: &mut [u8; TILE_CODES]) {
        codes.fill(0);
        for (plane, data) in self.matrix.spec.codes.iter().zip(self.codes) {
            let at = self.matrix.tile_offset(plane, tile_k as u64, tile_n as u64) as usize;
            plane.unpack_tile(&data[at..at + plane.tile_bytes()], codes);
        }
    }

    /// Takes rows of one part out of the planes: codes `[rows, K]` and scale elements.
    ///
    /// `rows` are rows within the part, in the order of the bundle; the band keeps the order given. `first` is what
    /// [`Band::first`] shall say.
    pub fn band(&self, part: usize, first: usize, rows: &[usize]) -> Band {
        let k = self.matrix.k as usize;
        let start = self.matrix.parts[part].start as usize;
        let mut band = Band { first, rows: rows.len(), codes: vec![0; rows.len() * k], ..Band::default() };
        // Tiles are visited once for all rows that they hold: (row within the band, column of the tile).
        let mut by_tile: Vec<(usize, usize, usize)> =
            rows.iter().enumerate().map(|(i, &r)| ((start + r) / TILE_N, i, (start + r) % TILE_N)).collect();
        by_tile.sort_unstable();
        let mut codes = [0u8; TILE_CODES];
        for group in by_tile.chunk_by(|a, b| a.0 == b.0) {
            for tile_k in 0..self.matrix.tiles_k() as usize {
                self.tile_codes(tile_k, group[0].0, &mut codes);
                let k0 = tile_k * TILE_K;
                let len = TILE_K.min(k - k0);
                for &(_, i, column) in group {
                    band.codes[i * k + k0..i * k + k0 + len].copy_from_slice(&codes[column * TILE_K..][..len]);
                }
            }
        }
        for (p, plane) in self.matrix.spec.scales.iter().enumerate() {
            let size = plane.dtype.bytes();
            let columns = self.matrix.scale_columns(plane);
            let elements = &mut band.scales[p];
            elements.reserve_exact(rows.len() * columns as usize * size);
            for &r in rows {
                for column in 0..columns {
                    let at = self.matrix.scale_index(plane, (start + r) as u64, column) as usize * size;
                    elements.extend_from_slice(&self.scales[p][at..at + size]);
                }
            }
        }
        band
    }

    /// Decodes a row of a band to f32: `[K]`.
    pub fn decode_band_row(&self, band: &Band, i: usize, out: &mut [f32]) {
        let mut scales = [&[][..]; MAX_SCALE_PLANES];
        for (p, s) in scales.iter_mut().enumerate().take(self.matrix.spec.scales.len()) {
            *s = band.row_scales(p, i);
        }
        let row = MatrixRow {
            codes: band.row_codes(i, self.matrix.k as usize),
            scales,
            group_size: self.matrix.group_size as usize,
            block: self.matrix.block.map(|b| b as usize),
        };
        (self.matrix.spec.decode_row)(&row, out);
    }

    /// Decodes rows of one part, in the order of the bundle: `out` is `[rows, K]`.
    pub fn decode_rows(&self, part: usize, rows: std::ops::Range<usize>, out: &mut [f32]) {
        let list: Vec<usize> = rows.clone().collect();
        let band = self.band(part, rows.start, &list);
        for (i, values) in out.chunks_exact_mut(self.matrix.k as usize).enumerate() {
            self.decode_band_row(&band, i, values);
        }
    }

    /// Rebuilds a range of units of a source input: the inverse of the packer.
    ///
    /// `units` counts units of [`Codec::unit_rows`] rows in the order of the source; without units it is `0..1`.
    /// `out` has exactly the bytes of those units.
    pub fn join(
        &self,
        part: usize,
        format: &PartFormat<'_>,
        input: usize,
        units: std::ops::Range<usize>,
        out: &mut [u8],
    ) {
        let PartFormat { codec, shape, row_order } = format;
        let (first, last) = match codec.unit_rows(shape, input) {
            Some(rows) => (units.start * rows, (units.end * rows).min(shape.n)),
            None => (0, shape.n),
        };
        let rows: Vec<usize> = (first..last).map(|r| row_order.bundle_row(r)).collect();
        let band = self.band(part, first, &rows);
        codec.join(shape, input, &band, out);
    }

    /// Whether everything beyond the logical rows and columns is zero: code padding and scale padding.
    pub fn padding_is_zero(&self) -> bool {
        let m = self.matrix;
        let mut codes = [0u8; TILE_CODES];
        for (tile_n, first) in (0..m.tiles_n()).map(|t| (t, t * TILE_N as u64)) {
            let part = &m.parts[m.part_of(first)];
            let live = (part.start + part.rows - first).min(TILE_N as u64) as usize;
            for tile_k in 0..m.tiles_k() {
                let live_k = (m.k - tile_k * TILE_K as u64).min(TILE_K as u64) as usize;
                if live == TILE_N && live_k == TILE_K {
                    continue;
                }
                self.tile_codes(tile_k as usize, tile_n as usize, &mut codes);
                let zero = codes
                    .chunks_exact(TILE_K)
                    .enumerate()
                    .all(|(c, column)| column.iter().enumerate().all(|(r, &v)| v == 0 || (c < live && r < live_k)));
                if !zero {
                    return false;
                }
            }
        }
        m.spec.scales.iter().zip(self.scales).all(|(plane, data)| {
            use crate::encoding::Span;
            if matches!(plane.span, Span::Part | Span::Block) {
                return true;
            }
            let size = plane.dtype.bytes();
            let order = plane.order();
            let width = m.padded_n() as usize;
            data.chunks_exact(size).enumerate().all(|(i, element)| {
                let row = order.column(i % width) as u64;
                let part = &m.parts[m.part_of(row)];
                row - part.start < part.rows || element.iter().all(|&b| b == 0)
            })
        })
    }
}
