//! Four-bit codes into a table of sixteen values.

use super::{f16_at, u16_at};

/// Values of the four-bit table.
const IQ4: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

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
