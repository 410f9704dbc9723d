//! Types with one scale (and perhaps one minimum) per block: Q4_0 to Q8_0, the ternary and the one- and two-bit types.

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

/// W 128; d f16, one bit per weight, low bit first: set is d, clear is -d.
pub(super) fn q1_0(block: &[u8; 18], y: &mut [f32; 128]) {
    let d = f16_at(block, 0);
    for (j, y) in y.iter_mut().enumerate() {
        *y = if block[2 + j / 8] >> (j % 8) & 1 == 1 { d } else { -d };
    }
}

/// W 64; d f16, two bits per weight, low bits first. y = (q - 1) d.
pub(super) fn q2_0(block: &[u8; 18], y: &mut [f32; 64]) {
    let d = f16_at(block, 0);
    for (j, y) in y.iter_mut().enumerate() {
        let q = block[2 + j / 4] >> (2 * (j % 4)) & 3;
        *y = f32::from(i16::from(q) - 1) * d;
    }
}

/// W 256; 52 bytes of five base-3 digits each, d f16. y = (digit - 1) d.
///
/// A byte holds digits as a fraction of 256: multiplying by 3^n modulo 256 brings digit n to the top.
pub(super) fn tq1_0(block: &[u8; 54], y: &mut [f32; 256]) {
    const POW3: [u8; 5] = [1, 3, 9, 27, 81];
    let d = f16_at(block, 52);
    let mut at = 0;
    // (first byte, bytes, digits used of each)
    for (first, bytes, digits) in [(0, 32, 5), (32, 16, 5), (48, 4, 4)] {
        for pow in &POW3[..digits] {
            for q in &block[first..first + bytes] {
                let digit = u16::from(q.wrapping_mul(*pow)) * 3 >> 8;
                y[at] = f32::from(digit as i16 - 1) * d;
                at += 1;
            }
        }
    }
}

/// W 256; 64 bytes in two halves, each four two-bit planes of 32 weights; d f16. y = (q - 1) d.
pub(super) fn tq2_0(block: &[u8; 66], y: &mut [f32; 256]) {
    let d = f16_at(block, 64);
    for (j, y) in y.iter_mut().enumerate() {
        let q = block[j / 128 * 32 + j % 32] >> (j % 128 / 32 * 2) & 3;
        *y = f32::from(i16::from(q) - 1) * d;
    }
}
