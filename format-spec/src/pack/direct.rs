//! Tiles and scales straight from rows of the file, in words instead of single codes.
//!
//! Axes as in [`crate::tile`]: a tile is 16 (K) by 64 (N); column `c = 16 j + 8 h + col`, lane `4 col + q`. The formulas
//! follow from the slots there; the tests compare with them.

use crate::tile::TILE_CODES;

/// Bytes of a tile of 4-bit codes.
const NIBBLE_TILE: usize = TILE_CODES / 2;
/// Columns that one lane's column index repeats with: 8.
const OCTET: usize = 8;
/// Blocks of 16 columns.
const BLOCKS: usize = 4;

const LOW: u32 = 0x0F0F_0F0F;
const EVEN: u32 = 0x00FF_00FF;

fn word(bytes: &[u8], at: usize) -> u32 {
    let b = &bytes[at..at + 4];
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}

/// One tile of 4-bit codes from 64 rows of nibbles, `stride` bytes apart; `rows` begins at the tile's first byte.
///
/// Byte `q` of a row holds the codes `2 q` and `2 q + 1`, byte `q + 4` those 8 further: with a row's first and second four
/// bytes as words, masks and shifts give all four lanes' bytes at once. The four blocks `j` are neighbours in the output.
pub(super) fn nibbles(rows: &[u8], stride: usize, out: &mut [u8; NIBBLE_TILE]) {
    for (col, line) in out.as_chunks_mut::<{ NIBBLE_TILE / OCTET }>().0.iter_mut().enumerate() {
        // Bytes with the even and with the odd codes of a lane, per block, for either half.
        let (mut even, mut odd) = ([[0u32; BLOCKS]; 2], [[0u32; BLOCKS]; 2]);
        for h in 0..2 {
            let (mut first, mut second) = ([0u32; BLOCKS], [0u32; BLOCKS]);
            for j in 0..BLOCKS {
                let at = (16 * j + OCTET * h + col) * stride;
                let row = &rows[at..at + 8];
                (first[j], second[j]) = (word(row, 0), word(row, 4));
            }
            for j in 0..BLOCKS {
                even[h][j] = (first[j] & LOW) | ((second[j] & LOW) << 4);
                odd[h][j] = ((first[j] >> 4) & LOW) | (second[j] & !LOW);
            }
        }
        // Word `q` of block `j` is byte `q` of: even of half 0, even of half 1, odd of half 0, odd of half 1.
        let mut words = [[0u32; BLOCKS]; 4];
        for j in 0..BLOCKS {
            let even_02 = (even[0][j] & EVEN) | ((even[1][j] & EVEN) << 8);
            let even_13 = ((even[0][j] >> 8) & EVEN) | (even[1][j] & !EVEN);
            let odd_02 = (odd[0][j] & EVEN) | ((odd[1][j] & EVEN) << 8);
            let odd_13 = ((odd[0][j] >> 8) & EVEN) | (odd[1][j] & !EVEN);
            words[0][j] = (even_02 & 0xFFFF) | (odd_02 << 16);
            words[1][j] = (even_13 & 0xFFFF) | (odd_13 << 16);
            words[2][j] = (even_02 >> 16) | (odd_02 & 0xFFFF_0000);
            words[3][j] = (even_13 >> 16) | (odd_13 & 0xFFFF_0000);
        }
        for (to, word) in line.as_chunks_mut::<4>().0.iter_mut().zip(words.as_flattened()) {
            *to = word.to_le_bytes();
        }
    }
}

/// One tile of 8-bit codes from 64 rows of bytes, `stride` bytes apart; `rows` begins at the tile's first byte.
///
/// Word `2 j + h` of lane `(col, q)` holds the codes `2 q`, `2 q + 8`, `2 q + 1`, `2 q + 9` of column `16 j + 8 h + col`.
pub(super) fn bytes(rows: &[u8], stride: usize, out: &mut [u8; TILE_CODES]) {
    for (col, line) in out.as_chunks_mut::<{ TILE_CODES / OCTET }>().0.iter_mut().enumerate() {
        let mut words = [[0u32; OCTET]; 4];
        #[allow(clippy::needless_range_loop, reason = "a row of the file first, an index second")]
        for i in 0..OCTET {
            let at = (OCTET * i + col) * stride;
            let row = &rows[at..at + 16];
            for pair in 0..2 {
                let (first, second) = (word(row, 4 * pair), word(row, 8 + 4 * pair));
                words[2 * pair][i] = spread(first & 0xFFFF) | (spread(second & 0xFFFF) << 8);
                words[2 * pair + 1][i] = spread(first >> 16) | (spread(second >> 16) << 8);
            }
        }
        for (to, word) in line.as_chunks_mut::<4>().0.iter_mut().zip(words.as_flattened()) {
            *to = word.to_le_bytes();
        }
    }
}

/// Two bytes with a zero byte after each.
fn spread(pair: u32) -> u32 {
    (pair | (pair << 8)) & EVEN
}

/// Rows of a plane of 8-bit group scales for one block of 64 columns: eight elements along K of 64 rows of the file,
/// `stride` bytes apart, to eight rows of the plane, `width` bytes apart.
///
/// Position `8 i + p` of a plane's row holds column `i + 8 j` with `j = MIDDLE[p]`, so the eight rows of one `i` are an
/// 8 by 8 transpose of bytes.
pub(super) fn scales8(rows: &[u8], stride: usize, out: &mut [u8], width: usize) {
    /// `j` at a position: 1 and 2 of every four are exchanged.
    const MIDDLE: [usize; 8] = [0, 2, 1, 3, 4, 6, 5, 7];
    for i in 0..OCTET {
        let block: [u64; 8] = std::array::from_fn(|p| {
            let at = (i + OCTET * MIDDLE[p]) * stride;
            let b = &rows[at..at + 8];
            u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])
        });
        for (g, line) in transposed(block).into_iter().enumerate() {
            let at = g * width + OCTET * i;
            out[at..at + 8].copy_from_slice(&line.to_le_bytes());
        }
    }
}

/// The 8 by 8 transpose of bytes: byte `b` of word `a` becomes byte `a` of word `b`.
fn transposed(mut words: [u64; 8]) -> [u64; 8] {
    // Exchanges the off-diagonal squares of 4, then 2, then 1 bytes.
    for (distance, mask) in [(4, 0x0000_0000_FFFF_FFFF), (2, 0x0000_FFFF_0000_FFFF), (1, 0x00FF_00FF_00FF_00FF_u64)] {
        for pair in 0..4 {
            let a = pair / distance * 2 * distance + pair % distance;
            let b = a + distance;
            let shift = 8 * distance as u32;
            let t = ((words[a] >> shift) ^ words[b]) & mask;
            words[a] ^= t << shift;
            words[b] ^= t;
        }
    }
    words
}
