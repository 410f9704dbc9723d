//! Codebook types: a grid entry per four or eight weights, signs apart (IQ1, IQ2, IQ3); a table of 16 values (IQ4).

use half::f16;

use super::iq_tables as grids;
use super::{f16_at, u16_at, u32_at};

/// Values of the four-bit table.
const IQ4: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];
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

/// W 32; d f16, nibbles: low are the first half. y = d K[q].
pub(super) fn iq4_nl(block: &[u8; 18], y: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    for j in 0..16 {
        y[j] = d * IQ4[usize::from(block[2 + j] & 15)];
        y[j + 16] = d * IQ4[usize::from(block[2 + j] >> 4)];
    }
}

/// W 256; d f16, upper two bits of 8 scales u16, lower four in 4 bytes, nibbles as IQ4_NL; groups of 32.
/// y = (d (ls - 32)) K[q].
pub(super) fn iq4_xs(block: &[u8; 136], y: &mut [f32; 256]) {
    let (d, high) = (f16_at(block, 0), u16_at(block, 2));
    for (group, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
        let ls = i16::from(low) | (high >> (2 * group) & 3).cast_signed() << 4;
        let dl = d * f32::from(ls - 32);
        let bytes = &block[8 + 16 * group..];
        for j in 0..16 {
            y[j] = dl * IQ4[usize::from(bytes[j] & 15)];
            y[j + 16] = dl * IQ4[usize::from(bytes[j] >> 4)];
        }
    }
}

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
pub(super) fn iq2_xxs(block: &[u8; 66], y: &mut [f32; 256]) {
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
pub(super) fn iq2_xs(block: &[u8; 74], y: &mut [f32; 256]) {
    let d = f16_at(block, 0);
    for (l, y) in y.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = u16_at(block, 2 + 2 * l);
        let scale = block[66 + l / 4] >> (l / 2 % 2 * 4) & 15;
        let db = d * (0.5 + f32::from(scale)) * 0.25;
        eight(y, db, grids::IQ2_XS[usize::from(word & 511)], signs_of(u32::from(word >> 9)));
    }
}

/// W 256; d f16, 32 low index bytes, 32 sign bytes, 8 bytes of upper index bits, 16 four-bit scales; groups of 16.
pub(super) fn iq2_s(block: &[u8; 82], y: &mut [f32; 256]) {
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
pub(super) fn iq3_xxs(block: &[u8; 98], y: &mut [f32; 256]) {
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
pub(super) fn iq3_s(block: &[u8; 110], y: &mut [f32; 256]) {
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
pub(super) fn iq1_s(block: &[u8; 50], y: &mut [f32; 256]) {
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
pub(super) fn iq1_m_scale(block: &[u8; 56]) -> f16 {
    let bits = (0..4).map(|i| u16_at(block, 48 + 2 * i) >> 12 << (4 * i)).sum();
    f16::from_bits(bits)
}

/// W 256; 32 low index bytes, 16 bytes of nibbles (three upper index bits, sign of delta), 4 u16 of four three-bit scales and a
/// nibble of d; groups of 16. y = d (2 s + 1) (grid + delta).
pub(super) fn iq1_m(block: &[u8; 56], y: &mut [f32; 256]) {
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
