//! The tile order as kernels walk it.
//!
//! A tile holds 16 (K) x 64 (N) codes. Word `4 * lane + j` of a 4-bit tile, with `lane = 4 * t + q`, holds eight codes:
//! rows `2q + {0, 8, 1, 9}` of column `16 j + t` and of column `16 j + 8 + t`. Kernels keep that order in registers:
//!
//! - *fragment order* of K: within every 16, quad `q` is `2q, 2q + 8, 2q + 1, 2q + 9` ([`FRAGMENT_ROW`]); activations
//!   are quantised into it, so that a quad of codes meets a quad of activations in one integer dot product;
//! - *panel order* of N: within every 64, position `32 h + 4 t + j` is column `16 j + 8 h + t` ([`panel_column`]);
//!   accumulators are put back into natural order once, at the end.

use vt_bundle::tile::{CodePlane, TILE_K, TILE_N};

/// Row within the tile of each position of the fragment order.
pub(crate) const FRAGMENT_ROW: [usize; TILE_K] = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15];

/// Column within the tile of position `p` of the panel order.
pub(crate) const fn panel_column(p: usize) -> usize {
    let (h, t, j) = (p / 32, p / 4 % 8, p % 4);
    16 * j + 8 * h + t
}

/// `PANEL_COLUMN[p]`: [`panel_column`] as a table.
pub(crate) const PANEL_COLUMN: [usize; TILE_N] = {
    let mut table = [0; TILE_N];
    let mut p = 0;
    while p < TILE_N {
        table[p] = panel_column(p);
        p += 1;
    }
    table
};

/// Adds (bitwise or) the plane's bits of one column of a tile to 16 codes in order of K.
pub(crate) fn add_column(plane: &CodePlane, tile: &[u8], column: usize, codes: &mut [u8; TILE_K]) {
    let (j, h, t) = (column / 16, column / 8 % 2, column % 8);
    if plane.bits == 8 {
        for (position, &row) in FRAGMENT_ROW.iter().enumerate() {
            let word = 8 * (4 * t + position / 4) + 2 * j + h;
            codes[row] |= tile[4 * word + position % 4];
        }
        return;
    }
    let bits = plane.bits as usize;
    let mask = (1u8 << bits) - 1;
    for (position, &row) in FRAGMENT_ROW.iter().enumerate() {
        // Field within the eight of a word: rows 2q, 2q + 8 first, then column + 8, then the odd rows.
        let field = position % 2 + 2 * h + 4 * (position / 2 % 2);
        let bit = (8 * (4 * (4 * t + position / 4) + j) + field) * bits;
        codes[row] |= ((tile[bit / 8] >> (bit % 8)) & mask) << plane.shift;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vt_bundle::tile::{TILE_CODES, TileCodes};

    #[test]
    fn columns_equal_the_definition_of_the_tile() {
        let codes: TileCodes = std::array::from_fn(|i| (i * 89 + i / 5) as u8);
        for (bits, shift) in [(8, 0), (4, 0), (4, 4), (2, 4), (2, 0), (1, 4), (1, 2)] {
            let plane = CodePlane { name: "test", bits, shift };
            let mut tile = vec![0u8; plane.tile_bytes()];
            plane.pack_tile(&codes, &mut tile);
            let mut expected = [0u8; TILE_CODES];
            plane.unpack_tile(&tile, &mut expected);
            for c in 0..TILE_N {
                let mut got = [0u8; TILE_K];
                add_column(&plane, &tile, c, &mut got);
                assert_eq!(got, expected[c * TILE_K..(c + 1) * TILE_K], "bits {bits}, column {c}");
            }
        }
    }

    #[test]
    fn orders_are_permutations() {
        let mut seen = [false; TILE_N];
        PANEL_COLUMN.iter().for_each(|&c| seen[c] = true);
        assert!(seen.iter().all(|s| *s));
        let mut rows = FRAGMENT_ROW;
        rows.sort_unstable();
        assert!(rows.iter().enumerate().all(|(i, r)| i == *r));
    }
}
