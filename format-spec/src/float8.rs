//! Eight- and four-bit floating point: the tables that decode them exactly.
//!
//! Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3: bias 7, no infinity, `S.1111.111` is NaN) and OCP
//! Microscaling Formats 1.0 (E2M1, E8M0).

/// E2M1 values of the 16 codes; bit 3 is the sign, so code 8 is -0.
pub const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// E4M3 (the FN variant) values of the 256 codes; 0x7F and 0xFF are NaN.
pub const E4M3: [f32; 256] = e4m3_table();

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0f32; 256];
    let mut code = 0usize;
    while code < 256 {
        let (sign, exponent, mantissa) = (code as u32 >> 7, (code as u32 >> 3) & 15, code as u32 & 7);
        let magnitude = if exponent == 15 && mantissa == 7 {
            f32::NAN.to_bits()
        } else if exponent != 0 {
            // 2^(e - 7) * (1 + m / 8): rebias to 127 and move the mantissa to the top.
            ((exponent + 120) << 23) | (mantissa << 20)
        } else {
            // Subnormal, m * 2^-9: exact in f32.
            (mantissa as f32 * 0.001953125).to_bits()
        };
        table[code] = f32::from_bits(magnitude | (sign << 31));
        code += 1;
    }
    table
}

/// E8M0: `2^(code - 127)`; code 0 is the f32 subnormal 2^-127, 255 is NaN.
pub const fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        e => f32::from_bits((e as u32) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_known_values() {
        assert_eq!(E4M3[0x38], 1.0);
        assert_eq!(E4M3[0x7E], 448.0);
        assert_eq!(E4M3[0x01], 2f32.powi(-9));
        assert_eq!(E4M3[0x08], 2f32.powi(-6));
        assert_eq!(E4M3[0x80].to_bits(), (-0.0f32).to_bits());
        assert!(E4M3[0x7F].is_nan() && E4M3[0xFF].is_nan());
        assert_eq!(E4M3[0xB8], -1.0);
    }

    #[test]
    fn e8m0_known_values() {
        assert_eq!(e8m0(127), 1.0);
        assert_eq!(e8m0(0), 2f32.powi(-127));
        assert_eq!(e8m0(254), 2f32.powi(127));
        assert!(e8m0(255).is_nan());
    }
}
