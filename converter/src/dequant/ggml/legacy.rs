//! Types with one scale (and perhaps one minimum) per block of 32: Q4_0 to Q8_0.

use super::{f16_at, u32_at};

/// W 32; d f16, 16 bytes: low nibbles are the first half of the block, high nibbles the second. y = (q - 8) d.
pub(super) fn q4_0(block: &[u8; 18], y: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    for j in 0..16 {
        let q = block[2 + j];
        y[j] = f32::from(i16::from(q & 15) - 8) * d;
        y[j + 16] = f32::from(i16::from(q >> 4) - 8) * d;
    }
}

/// W 32; d, m f16, nibbles as in Q4_0. y = q d + m.
pub(super) fn q4_1(block: &[u8; 20], y: &mut [f32; 32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    for j in 0..16 {
        let q = block[4 + j];
        y[j] = f32::from(q & 15) * d + m;
        y[j + 16] = f32::from(q >> 4) * d + m;
    }
}

/// W 32; d f16, 32 fifth bits, nibbles as in Q4_0. y = (q - 16) d.
pub(super) fn q5_0(block: &[u8; 22], y: &mut [f32; 32]) {
    let (d, high) = (f16_at(block, 0), u32_at(block, 2));
    for j in 0..16 {
        let (lo, hi) = five_bits(block[6 + j], high, j);
        y[j] = f32::from(i16::from(lo) - 16) * d;
        y[j + 16] = f32::from(i16::from(hi) - 16) * d;
    }
}

/// W 32; d, m f16, 32 fifth bits, nibbles as in Q4_0. y = q d + m.
pub(super) fn q5_1(block: &[u8; 24], y: &mut [f32; 32]) {
    let (d, m, high) = (f16_at(block, 0), f16_at(block, 2), u32_at(block, 4));
    for j in 0..16 {
        let (lo, hi) = five_bits(block[8 + j], high, j);
        y[j] = f32::from(lo) * d + m;
        y[j + 16] = f32::from(hi) * d + m;
    }
}

/// The codes of weights `j` and `j + 16`: a nibble each, and bit `j` and `j + 16` of `high`.
fn five_bits(nibbles: u8, high: u32, j: usize) -> (u8, u8) {
    let bit = |place: usize| ((high >> place) as u8 & 1) << 4;
    (nibbles & 15 | bit(j), nibbles >> 4 | bit(j + 16))
}

/// W 32; d f16, 32 signed bytes. y = q d.
pub(super) fn q8_0(block: &[u8; 34], y: &mut [f32; 32]) {
    let d = f16_at(block, 0);
    for (y, q) in y.iter_mut().zip(&block[2..]) {
        *y = f32::from(*q as i8) * d;
    }
}
