//! Types of E2M1 codes: MXFP4 and ggml's NVFP4.

/// E2M1 values, doubled so that they are integers; code 8 (-0) is +0, as in ggml.
const E2M1_DOUBLED: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// W 32; e E8M0, nibbles: low are the first half. y = 2^(e - 128) k, the halving belongs to the doubled codes.
pub(super) fn mxfp4(block: &[u8; 17], y: &mut [f32; 32]) {
    let d = e8m0_half(block[0]);
    for j in 0..16 {
        y[j] = E2M1_DOUBLED[usize::from(block[1 + j] & 15)] * d;
        y[j + 16] = E2M1_DOUBLED[usize::from(block[1 + j] >> 4)] * d;
    }
}

/// 2^(e - 128), the first two of them subnormal.
fn e8m0_half(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}

/// W 64; four UE4M3 scales of 16 weights each, then 8 bytes of nibbles per scale: low are the first eight. y = d k.
pub(super) fn nvfp4(block: &[u8; 36], y: &mut [f32; 64]) {
    for (group, y) in y.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let d = ue4m3_half(block[group]);
        let bytes = &block[4 + 8 * group..];
        for j in 0..8 {
            y[j] = E2M1_DOUBLED[usize::from(bytes[j] & 15)] * d;
            y[j + 8] = E2M1_DOUBLED[usize::from(bytes[j] >> 4)] * d;
        }
    }
}

/// Half of an unsigned E4M3 number, bias 7. Bit 7 is ignored, but 0x7f is zero while 0xff is not.
fn ue4m3_half(byte: u8) -> f32 {
    if byte == 0 || byte == 0x7f {
        return 0.0;
    }
    let (exponent, mantissa) = (byte >> 3 & 15, f32::from(byte & 7));
    let value = if exponent == 0 {
        mantissa * f32::from_bits((127 - 9) << 23)
    } else {
        (1.0 + mantissa / 8.0) * f32::from_bits(u32::from(exponent + 120) << 23)
    };
    value * 0.5
}
