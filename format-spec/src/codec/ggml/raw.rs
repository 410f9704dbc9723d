//! ggml types that a bundle keeps as raw blocks (layout `ggml-raw@1`), and how they decode.
//!
//! Codebook, ternary and one- and two-bit types: they have no tile layout, and the kernel that reads them decodes whole blocks.
//! Formulas with their order of operations: `ggml-quants.c` of ggml 0.25.3; W weights per block.

use half::f16;

use super::raw_grids as grids;

/// A type kept as raw blocks.
pub struct RawFormat {
    /// ggml's name in lower case, as in the manifest.
    pub name: &'static str,
    /// `decode` name in the manifest, versioned.
    pub decode_name: &'static str,
    /// ggml's on-disk id.
    pub ggml_type: u32,
    /// Weights per block.
    pub weights: usize,
    /// Bytes per block.
    pub bytes: usize,
    decode: fn(blocks: &[u8], out: &mut [f32]),
}

impl RawFormat {
    /// Decodes whole blocks to f32, in the order of the file.
    ///
    /// `blocks` holds `out.len() / weights` blocks; what does not make a whole block is left alone.
    pub fn decode(&self, blocks: &[u8], out: &mut [f32]) {
        debug_assert_eq!(blocks.len() / self.bytes * self.weights, out.len());
        (self.decode)(blocks, out);
    }

    /// The codebook, for kernels that decode the type themselves: one `u16` per entry, the level number of value `j` in bits
    /// `w * j` to `w * j + w - 1` (`w` = 3 for the IQ3 types, whose entries hold four values, otherwise 2). Empty for types
    /// without one.
    pub fn grid(&self) -> &'static [u16] {
        match self.name {
            "iq2_xxs" => &grids::IQ2_XXS,
            "iq2_xs" => &grids::IQ2_XS,
            "iq2_s" => &grids::IQ2_S,
            "iq3_xxs" => &grids::IQ3_XXS,
            "iq3_s" => &grids::IQ3_S,
            "iq1_s" | "iq1_m" => &grids::IQ1_S,
            _ => &[],
        }
    }
}

impl std::fmt::Debug for RawFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.decode_name)
    }
}

/// Every type with this layout.
pub const FORMATS: &[RawFormat] = &[
    format("iq2_xxs", "iq2_xxs.ggml@1", 16, 256, 66, |b, y| blocks(b, y, iq2_xxs)),
    format("iq2_xs", "iq2_xs.ggml@1", 17, 256, 74, |b, y| blocks(b, y, iq2_xs)),
    format("iq3_xxs", "iq3_xxs.ggml@1", 18, 256, 98, |b, y| blocks(b, y, iq3_xxs)),
    format("iq1_s", "iq1_s.ggml@1", 19, 256, 50, |b, y| blocks(b, y, iq1_s)),
    format("iq3_s", "iq3_s.ggml@1", 21, 256, 110, |b, y| blocks(b, y, iq3_s)),
    format("iq2_s", "iq2_s.ggml@1", 22, 256, 82, |b, y| blocks(b, y, iq2_s)),
    format("iq1_m", "iq1_m.ggml@1", 29, 256, 56, |b, y| blocks(b, y, iq1_m)),
    format("tq1_0", "tq1_0.ggml@1", 34, 256, 54, |b, y| blocks(b, y, tq1_0)),
    format("tq2_0", "tq2_0.ggml@1", 35, 256, 66, |b, y| blocks(b, y, tq2_0)),
    format("q1_0", "q1_0.ggml@1", 41, 128, 18, |b, y| blocks(b, y, q1_0)),
    format("q2_0", "q2_0.ggml@1", 42, 64, 18, |b, y| blocks(b, y, q2_0)),
];

const fn format(
    name: &'static str,
    decode_name: &'static str,
    ggml_type: u32,
    weights: usize,
    bytes: usize,
    decode: fn(&[u8], &mut [f32]),
) -> RawFormat {
    RawFormat { name, decode_name, ggml_type, weights, bytes, decode }
}

/// The raw format of a ggml type by its on-disk id.
pub fn by_id(ggml_type: u32) -> Option<&'static RawFormat> {
    FORMATS.iter().find(|f| f.ggml_type == ggml_type)
}

/// The raw format of that name (`iq2_xs`).
pub fn by_name(name: &str) -> Option<&'static RawFormat> {
    FORMATS.iter().find(|f| f.name == name)
}

fn blocks<const B: usize, const W: usize>(bytes: &[u8], out: &mut [f32], decode: fn(&[u8; B], &mut [f32; W])) {
    for (block, y) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<W>().0) {
        decode(block, y);
    }
}

fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Levels of the IQ2 grids.
const IQ2_LEVELS: [f32; 4] = [8.0, 25.0, 43.0, 0.0];
/// Levels of the IQ1 grid.
const IQ1_LEVELS: [f32; 4] = [-1.0, 0.0, 1.0, 0.0];
/// Levels of the IQ3_XXS grid.
const IQ3_XXS_LEVELS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
/// Levels of the IQ3_S grid.
const IQ3_S_LEVELS: [f32; 8] = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0];
/// What IQ1 adds to, or takes from, every grid value.
const IQ1_DELTA: f32 = 0.125;

/// The sign byte of seven stored signs: the eighth makes the number of minus signs even.
fn signs_of(seven: u32) -> u8 {
    let seven = seven as u8 & 127;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Eight weights: grid entry of two-bit levels, a sign bit each.
fn eight(y: &mut [f32], scale: f32, entry: u16, signs: u8) {
    for (j, y) in y.iter_mut().enumerate() {
        let level = IQ2_LEVELS[usize::from(entry >> (2 * j) & 3)];
        *y = scale * level * sign(signs, j);
    }
}

/// Four weights: grid entry of three-bit levels, sign bits from `first`.
fn four(y: &mut [f32], scale: f32, levels: &[f32; 8], entry: u16, signs: u8, first: usize) {
    for (j, y) in y.iter_mut().enumerate() {
        *y = scale * levels[usize::from(entry >> (3 * j) & 7)] * sign(signs, first + j);
    }
}

fn sign(signs: u8, place: usize) -> f32 {
    if signs >> place & 1 == 1 { -1.0 } else { 1.0 }
}

/// W 256; d f16, per 32 weights four grid indices and a u32 of 4 x 7 signs and a four-bit scale.
/// y = d (0.5 + s) 0.25 grid sign.
fn iq2_xxs(block: &[u8; 66], y: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (group, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let at = 2 + 8 * group;
        let word = u32_at(block, at + 4);
        let db = d * (0.5 + (word >> 28) as f32) * 0.25;
        for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            eight(y, db, grids::IQ2_XXS[usize::from(block[at + l])], signs_of(word >> (7 * l)));
        }
    }
}

/// W 256; d f16, 32 u16 of a 9-bit grid index and 7 signs, 16 four-bit scales; groups of 16.
fn iq2_xs(block: &[u8; 74], y: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(block, 2 + 2 * l);
        let scale = block[66 + l / 4] >> (l / 2 % 2 * 4) & 15;
        let db = d * (0.5 + f32::from(scale)) * 0.25;
        eight(y, db, grids::IQ2_XS[usize::from(word & 511)], signs_of(u32::from(word >> 9)));
    }
}

/// W 256; d f16, 32 low index bytes, 32 sign bytes, 8 bytes of upper index bits, 16 four-bit scales; groups of 16.
fn iq2_s(block: &[u8; 82], y: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let upper = usize::from(block[66 + l / 4] >> (2 * (l % 4)) & 3);
        let index = usize::from(block[2 + l]) | upper << 8;
        let scale = block[74 + l / 4] >> (l / 2 % 2 * 4) & 15;
        let db = d * (0.5 + f32::from(scale)) * 0.25;
        eight(y, db, grids::IQ2_S[index], block[34 + l]);
    }
}

/// W 256; d f16, 64 grid indices, 8 u32 of 4 x 7 signs and a four-bit scale. y = d (0.5 + s) 0.5 grid sign.
fn iq3_xxs(block: &[u8; 98], y: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (quad, y) in y.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let word = u32_at(block, 66 + quad / 8 * 4);
        let db = d * (0.5 + (word >> 28) as f32) * 0.5;
        let entry = grids::IQ3_XXS[usize::from(block[2 + quad])];
        four(y, db, &IQ3_XXS_LEVELS, entry, signs_of(word >> (7 * (quad % 8 / 2))), quad % 2 * 4);
    }
}

/// W 256; d f16, 64 low index bytes, 8 bytes of ninth index bits, 32 sign bytes, 8 four-bit scales; groups of 32.
/// y = d (1 + 2 s) grid sign.
fn iq3_s(block: &[u8; 110], y: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (quad, y) in y.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let scale = block[106 + quad / 16] >> (quad / 8 % 2 * 4) & 15;
        let db = d * f32::from(1 + 2 * scale);
        let index = usize::from(block[2 + quad]) | usize::from(block[66 + quad / 8] >> (quad % 8) & 1) << 8;
        four(y, db, &IQ3_S_LEVELS, grids::IQ3_S[index], block[74 + quad / 2], quad % 2 * 4);
    }
}

/// Eight weights of IQ1: y = scale (grid + delta).
fn ternary(y: &mut [f32], scale: f32, entry: u16, delta: f32) {
    for (j, y) in y.iter_mut().enumerate() {
        *y = scale * (IQ1_LEVELS[usize::from(entry >> (2 * j) & 3)] + delta);
    }
}

/// W 256; d f16, 32 low index bytes, per 32 weights a u16 of 4 x 3 upper index bits, a three-bit scale and the sign of delta.
/// y = d (2 s + 1) (grid + delta).
fn iq1_s(block: &[u8; 50], y: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(block, 34 + l / 4 * 2);
        let dl = d * f32::from(2 * (word >> 12 & 7) + 1);
        let delta = if word & 0x8000 == 0 { IQ1_DELTA } else { -IQ1_DELTA };
        let index = usize::from(block[2 + l]) | usize::from(word >> (3 * (l % 4)) & 7) << 8;
        ternary(y, dl, grids::IQ1_S[index], delta);
    }
}

/// The f16 d of an IQ1_M block: a nibble at the top of each of the four scale words.
pub fn iq1_m_scale(block: &[u8; 56]) -> f16 {
    let bits = (0..4).map(|i| u16_at(block, 48 + 2 * i) >> 12 << (4 * i)).sum();
    f16::from_bits(bits)
}

/// W 256; 32 low index bytes, 16 bytes of nibbles (three upper index bits, sign of delta), 4 u16 of four three-bit scales and a
/// nibble of d; groups of 16. y = d (2 s + 1) (grid + delta).
fn iq1_m(block: &[u8; 56], y: &mut [f32; 256]) {
    let d = iq1_m_scale(block).to_f32();
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = u16_at(block, 48 + l / 8 * 2) >> (l / 2 % 4 * 3) & 7;
        let dl = d * f32::from(2 * scale + 1);
        let nibble = block[32 + l / 2] >> (l % 2 * 4) & 15;
        let delta = if nibble & 8 == 0 { IQ1_DELTA } else { -IQ1_DELTA };
        let index = usize::from(block[l]) | usize::from(nibble & 7) << 8;
        ternary(y, dl, grids::IQ1_S[index], delta);
    }
}

/// W 128; d f16, one bit per weight, low bit first: set is d, clear is -d.
fn q1_0(block: &[u8; 18], y: &mut [f32; 128]) {
    let d = f16_at(block, 0);
    for (j, y) in y.iter_mut().enumerate() {
        *y = if block[2 + j / 8] >> (j % 8) & 1 == 1 { d } else { -d };
    }
}

/// W 64; d f16, two bits per weight, low bits first. y = (q - 1) d.
fn q2_0(block: &[u8; 18], y: &mut [f32; 64]) {
    let d = f16_at(block, 0);
    for (j, y) in y.iter_mut().enumerate() {
        let q = block[2 + j / 4] >> (2 * (j % 4)) & 3;
        *y = f32::from(i16::from(q) - 1) * d;
    }
}

/// W 256; 52 bytes of five base-3 digits each, d f16. y = (digit - 1) d.
///
/// A byte holds digits as a fraction of 256: multiplying by 3^n modulo 256 brings digit n to the top.
fn tq1_0(block: &[u8; 54], y: &mut [f32; 256]) {
    const POW3: [u8; 5] = [1, 3, 9, 27, 81];
    let d = f16_at(block, 52);
    let mut at = 0;
    // (first byte, bytes, digits used of each)
    for (first, bytes, digits) in [(0, 32, 5), (32, 16, 5), (48, 4, 4)] {
        for pow in &POW3[..digits] {
            for q in &block[first..first + bytes] {
                let digit = (u16::from(q.wrapping_mul(*pow)) * 3) >> 8;
                y[at] = f32::from(digit as i16 - 1) * d;
                at += 1;
            }
        }
    }
}

/// W 256; 64 bytes in two halves, each four two-bit planes of 32 weights; d f16. y = (q - 1) d.
fn tq2_0(block: &[u8; 66], y: &mut [f32; 256]) {
    let d = f16_at(block, 64);
    for (j, y) in y.iter_mut().enumerate() {
        let q = block[j / 128 * 32 + j % 32] >> (j % 128 / 32 * 2) & 3;
        *y = f32::from(i16::from(q) - 1) * d;
    }
}
