//! The Marlin tile order: where each code of a 16 (K) x 64 (N) tile and each scale column lies.
//!
//! Axes: K in-features (reduction), N out-features. A tile feeds one warp's `mma.m16n8k16` B fragments: lane `l` owns
//! column `l / 4` of every 8-column half and rows `2 * (l % 4) + {0, 1, 8, 9}`. The order of 4- and 8-bit codes is the
//! one of the published Marlin kernels (IST-DASLab Marlin, vLLM `gptq_marlin_repack`); planes of 1 and 2 bits use the
//! slots of the 4-bit order. `SPEC.md` gives the formulas.

/// Extent of a tile along K.
pub const TILE_K: usize = 16;
/// Extent of a tile along N.
pub const TILE_N: usize = 64;
/// Codes in a tile.
pub const TILE_CODES: usize = TILE_K * TILE_N;

/// Codes of one tile, N-major: the code of column `c` and row `r` is at `c * TILE_K + r`.
pub type TileCodes = [u8; TILE_CODES];

/// `SLOT[c * TILE_K + r]` for planes of 1, 2 and 4 bits: the index of the field within the tile.
const SLOT_SUB_BYTE: [u16; TILE_CODES] = slots(false);
/// The same for planes of 8 bits.
const SLOT_BYTE: [u16; TILE_CODES] = slots(true);
/// Inverse of [`SLOT_SUB_BYTE`]: the N-major position of a slot.
const GATHER_SUB_BYTE: [u16; TILE_CODES] = inverse(&SLOT_SUB_BYTE);
/// Inverse of [`SLOT_BYTE`].
const GATHER_BYTE: [u16; TILE_CODES] = inverse(&SLOT_BYTE);

const fn slots(byte: bool) -> [u16; TILE_CODES] {
    let mut table = [0u16; TILE_CODES];
    let mut c = 0;
    while c < TILE_N {
        let mut r = 0;
        while r < TILE_K {
            let (j, half, col) = (c / 16, (c / 8) % 2, c % 8);
            let lane = 4 * col + (r % 8) / 2;
            let (odd, high) = (r % 2, r / 8);
            let within = if byte { 4 * half + high + 2 * odd } else { high + 2 * half + 4 * odd };
            table[c * TILE_K + r] = (32 * lane + 8 * j + within) as u16;
            r += 1;
        }
        c += 1;
    }
    table
}

const fn inverse(slots: &[u16; TILE_CODES]) -> [u16; TILE_CODES] {
    let mut table = [0u16; TILE_CODES];
    let mut i = 0;
    while i < TILE_CODES {
        table[slots[i] as usize] = i as u16;
        i += 1;
    }
    table
}

/// A plane of code bits in tile order: which bits of a code it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodePlane {
    /// Name in the manifest: `q4`, `q8`, `q2`, `h1`, `h2`.
    pub name: &'static str,
    /// Bits per code in this plane: 1, 2, 4 or 8.
    pub bits: u32,
    /// Position of the lowest of these bits within the code.
    pub shift: u32,
}

impl CodePlane {
    /// Bytes of one tile of this plane.
    pub const fn tile_bytes(&self) -> usize {
        TILE_CODES * self.bits as usize / 8
    }

    /// Writes the plane's bits of one tile.
    ///
    /// `out` has [`CodePlane::tile_bytes`] bytes; all are written.
    pub fn pack_tile(&self, codes: &TileCodes, out: &mut [u8]) {
        debug_assert_eq!(out.len(), self.tile_bytes());
        let mask = ((1u32 << self.bits) - 1) as u8;
        if self.bits == 8 {
            for (byte, &from) in out.iter_mut().zip(&GATHER_BYTE) {
                *byte = codes[from as usize];
            }
            return;
        }
        let per_byte = 8 / self.bits as usize;
        for (byte, from) in out.iter_mut().zip(GATHER_SUB_BYTE.chunks_exact(per_byte)) {
            let mut packed = 0u8;
            for (field, &at) in from.iter().enumerate() {
                packed |= ((codes[at as usize] >> self.shift) & mask) << (field as u32 * self.bits);
            }
            *byte = packed;
        }
    }

    /// Adds (bitwise or) the plane's bits of one tile to the codes: the inverse of [`CodePlane::pack_tile`].
    pub fn unpack_tile(&self, tile: &[u8], codes: &mut TileCodes) {
        debug_assert_eq!(tile.len(), self.tile_bytes());
        let mask = ((1u32 << self.bits) - 1) as u8;
        if self.bits == 8 {
            for (&byte, &to) in tile.iter().zip(&GATHER_BYTE) {
                codes[to as usize] |= byte;
            }
            return;
        }
        let per_byte = 8 / self.bits as usize;
        for (&byte, to) in tile.iter().zip(GATHER_SUB_BYTE.chunks_exact(per_byte)) {
            for (field, &at) in to.iter().enumerate() {
                codes[at as usize] |= ((byte >> (field as u32 * self.bits)) & mask) << self.shift;
            }
        }
    }
}

/// The order of a scale plane's columns within each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleOrder {
    /// Column `n` at position `n`.
    Natural,
    /// Within every 64 columns, an 8 x 8 transpose: position `8 i + j` holds column `i + 8 j` (16- and 32-bit scales).
    Grouped,
    /// [`ScaleOrder::Grouped`], then positions 1 and 2 of every four exchanged (8-bit scales), as Marlin's 8-bit scale
    /// loads expect.
    GroupedInterleaved,
}

impl ScaleOrder {
    /// The position, within a row of the plane, of column `n`.
    pub const fn position(self, n: usize) -> usize {
        let (block, c) = (n / TILE_N * TILE_N, n % TILE_N);
        let grouped = 8 * (c % 8) + c / 8;
        match self {
            ScaleOrder::Natural => n,
            ScaleOrder::Grouped => block + grouped,
            ScaleOrder::GroupedInterleaved => block + exchange_middle(grouped),
        }
    }

    /// The column at a position: the inverse of [`ScaleOrder::position`].
    pub const fn column(self, position: usize) -> usize {
        let (block, p) = (position / TILE_N * TILE_N, position % TILE_N);
        let p = match self {
            ScaleOrder::Natural => return position,
            ScaleOrder::Grouped => p,
            ScaleOrder::GroupedInterleaved => exchange_middle(p),
        };
        block + p / 8 + 8 * (p % 8)
    }
}

const fn exchange_middle(p: usize) -> usize {
    match p % 4 {
        1 => p + 1,
        2 => p - 1,
        _ => p,
    }
}

/// `value` rounded up to a multiple of `unit`, or `None` on overflow.
pub const fn round_up(value: u64, unit: u64) -> Option<u64> {
    match value.checked_add(unit - 1) {
        Some(v) => Some(v / unit * unit),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q4: CodePlane = CodePlane { name: "q4", bits: 4, shift: 0 };
    const Q8: CodePlane = CodePlane { name: "q8", bits: 8, shift: 0 };

    #[test]
    fn worked_example_of_the_spec() {
        // (k, n) = (37, 150) with N = 256: tile row 2, r = 5, tile column 2, c = 22: word 105 of the tile, nibble 4.
        let mut codes = [0u8; TILE_CODES];
        codes[22 * TILE_K + 5] = 0xF;
        let mut tile = [0u8; 512];
        Q4.pack_tile(&codes, &mut tile);
        let set: Vec<_> = tile.iter().enumerate().filter(|(_, b)| **b != 0).collect();
        assert_eq!(set, [(105 * 4 + 2, &0x0F)]);
        let mut tile = [0u8; 1024];
        Q8.pack_tile(&codes, &mut tile);
        assert_eq!(tile[210 * 4 + 2], 0xF);
    }

    #[test]
    fn every_plane_inverts() {
        let codes: TileCodes = std::array::from_fn(|i| (i * 37 + i / 7) as u8);
        for planes in [
            &[Q8][..],
            &[Q4, CodePlane { name: "h1", bits: 1, shift: 4 }],
            &[Q4, CodePlane { name: "h2", bits: 2, shift: 4 }],
            &[CodePlane { name: "q2", bits: 2, shift: 0 }, CodePlane { name: "h1", bits: 1, shift: 2 }],
        ] {
            let mut back = [0u8; TILE_CODES];
            let mut mask = 0u8;
            for p in planes {
                let mut tile = vec![0xAA; p.tile_bytes()];
                p.pack_tile(&codes, &mut tile);
                p.unpack_tile(&tile, &mut back);
                mask |= (((1u32 << p.bits) - 1) << p.shift) as u8;
            }
            assert!(back.iter().zip(&codes).all(|(b, c)| *b == c & mask));
        }
    }

    #[test]
    fn scale_orders_invert() {
        for order in [ScaleOrder::Natural, ScaleOrder::Grouped, ScaleOrder::GroupedInterleaved] {
            for n in 0..256 {
                assert_eq!(order.column(order.position(n)), n);
            }
        }
        assert_eq!(ScaleOrder::Grouped.column(8 * 3 + 5), 3 + 8 * 5);
    }
}
