//! Small floats by their definition: sign, exponent, mantissa, multiplied out.
//!
//! OCP 8-bit Floating Point 1.0 (E4M3 without infinities) and OCP Microscaling 1.0 (E2M1, E8M0). Kept apart from the
//! bundle's own tables on purpose: the two are compared by `--verify`.

/// Values of the E4M3 codes; NaN at 0x7F and 0xFF.
pub(super) const E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = e4m3(code as u8);
        code += 1;
    }
    values
};

/// Values of the E2M1 codes: `(-1)^s * 2^(e-1) * (1 + m/2)`, and `m/2` for e = 0.
pub(super) const E2M1: [f32; 16] = {
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        let (e, m) = ((code >> 1) & 3, (code & 1) as f32);
        let magnitude = if e == 0 { m * 0.5 } else { scale_by_two(1.0 + m * 0.5, e as i32 - 1) };
        values[code] = if code >= 8 { -magnitude } else { magnitude };
        code += 1;
    }
    values
};

const fn e4m3(code: u8) -> f32 {
    let (e, m) = (((code >> 3) & 15) as i32, (code & 7) as f32);
    let magnitude = match (e, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => scale_by_two(m, -9),
        _ => scale_by_two(8.0 + m, e - 10),
    };
    if code >= 128 { -magnitude } else { magnitude }
}

/// `2^(code - 127)`; NaN for 255.
pub(super) fn e8m0(code: u8) -> f32 {
    if code == 255 { f32::NAN } else { scale_by_two(1.0, i32::from(code) - 127) }
}

/// `x * 2^power`, one exact step at a time.
const fn scale_by_two(mut x: f32, mut power: i32) -> f32 {
    while power > 0 {
        x *= 2.0;
        power -= 1;
    }
    while power < 0 {
        x *= 0.5;
        power += 1;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agree_with_the_bundle_tables() {
        for code in 0..=255u8 {
            let (own, theirs) = (E4M3[code as usize], vt_bundle::float8::E4M3[code as usize]);
            assert!(own.to_bits() == theirs.to_bits() || own.is_nan() && theirs.is_nan(), "{code:#x}");
            let (own, theirs) = (e8m0(code), vt_bundle::float8::e8m0(code));
            assert!(own.to_bits() == theirs.to_bits() || own.is_nan() && theirs.is_nan(), "{code:#x}");
        }
        assert_eq!(E2M1.map(f32::to_bits), vt_bundle::float8::E2M1.map(f32::to_bits));
    }
}
