//! Super-blocks of 256 weights with packed sub-scales: Q2_K to Q6_K.

use super::{f16_at, u32_at};

/// 16 bytes of (scale, min) nibbles, 64 bytes of two-bit codes, d, dmin f16; groups of 16. y = (d sc) q - dmin mn.
///
/// Codes: halves of 128 weights share 32 bytes; within a half, weight l of plane s has bits 2s of byte l.
pub(super) fn q2_k(block: &[u8; 84], y: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    for (group, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = block[group];
        let (dl, ml) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        for (l, y) in y.iter_mut().enumerate() {
            *y = dl * f32::from(two_bits(&block[16..80], group, l)) - ml;
        }
    }
}

/// 32 bytes of high bits, 64 of two-bit codes (order of Q2_K), 16 scales of 6 bits in 12 bytes, d f16; groups of 16.
/// y = (d (sc - 32)) (q - 4), where q has three bits.
pub(super) fn q3_k(block: &[u8; 110], y: &mut [f32; 256]) {
    let d = f16_at(block, 108);
    let scales = q3_scales(&block[96..108]);
    for (group, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let dl = d * f32::from(i16::from(scales[group]) - 32);
        for (l, y) in y.iter_mut().enumerate() {
            let low = i16::from(two_bits(&block[32..96], group, l));
            // Plane p of 32 weights has its high bit at bit p of byte l: eight planes over both halves.
            let set = block[group % 2 * 16 + l] >> (group / 2) & 1 == 1;
            *y = dl * f32::from(low - if set { 0 } else { 4 });
        }
    }
}

/// The code of weight `l` (0 to 15) in a group of 16, planes of 32 weights in halves of 128.
fn two_bits(codes: &[u8], group: usize, l: usize) -> u8 {
    let (half, plane, part) = (group / 8, group % 8 / 2, group % 2);
    codes[half * 32 + part * 16 + l] >> (2 * plane) & 3
}

/// 16 six-bit scales: low nibbles in 8 bytes (scales 0 to 7 low, 8 to 15 high), the upper two bits in 4 bytes.
fn q3_scales(packed: &[u8]) -> [u8; 16] {
    let (low, third) = (u64::from(u32_at(packed, 0)) | u64::from(u32_at(packed, 4)) << 32, u32_at(packed, 8));
    let mut scales = [0; 16];
    for (i, scale) in scales.iter_mut().enumerate() {
        let nibble = (low >> (8 * (i % 8) + 4 * (i / 8))) as u8 & 15;
        let upper = (third >> (8 * (i % 4) + 2 * (i / 4))) as u8 & 3;
        *scale = nibble | upper << 4;
    }
    scales
}

/// d, dmin f16, 8 scales and 8 minima of 6 bits in 12 bytes, 128 bytes of nibbles; groups of 32.
/// y = (d sc) q - dmin mn. Chunks of 64 weights share 32 bytes: low nibbles first, then high.
pub(super) fn q4_k(block: &[u8; 144], y: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for (group, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (sc, mn) = six_bit_pair(&block[4..16], group);
        let (dl, ml) = (d * f32::from(sc), dmin * f32::from(mn));
        let bytes = &block[16 + group / 2 * 32..];
        for (y, q) in y.iter_mut().zip(bytes) {
            *y = dl * f32::from(q >> (group % 2 * 4) & 15) - ml;
        }
    }
}

/// As Q4_K, with 32 bytes of fifth bits between scales and nibbles: bit `group` of byte l.
pub(super) fn q5_k(block: &[u8; 176], y: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for (group, y) in y.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (sc, mn) = six_bit_pair(&block[4..16], group);
        let (dl, ml) = (d * f32::from(sc), dmin * f32::from(mn));
        for (l, y) in y.iter_mut().enumerate() {
            let low = block[48 + group / 2 * 32 + l] >> (group % 2 * 4) & 15;
            let high = (block[16 + l] >> group & 1) << 4;
            *y = dl * f32::from(low | high) - ml;
        }
    }
}

/// Scale and minimum `j` of 8: the first four in the low six bits of a byte each, the others in nibbles whose upper two bits
/// lie in the top of the first eight bytes.
fn six_bit_pair(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
    }
}

/// 128 bytes of low nibbles, 64 of upper two bits, 16 signed scales, d f16; groups of 16. y = (d sc) (q - 32).
///
/// Halves of 128 weights: planes 0 and 1 are the low nibbles of 64 bytes, planes 2 and 3 the high ones.
pub(super) fn q6_k(block: &[u8; 210], y: &mut [f32; 256]) {
    let d = f16_at(block, 208);
    for (group, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let dl = d * f32::from(block[192 + group] as i8);
        let (half, plane, part) = (group / 8, group % 8 / 2, group % 2);
        for (l, y) in y.iter_mut().enumerate() {
            let low = block[half * 64 + plane % 2 * 32 + part * 16 + l] >> (plane / 2 * 4) & 15;
            let high = block[128 + half * 32 + part * 16 + l] >> (2 * plane) & 3;
            *y = dl * f32::from(i16::from(low | high << 4) - 32);
        }
    }
}
