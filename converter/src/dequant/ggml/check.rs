//! Block scales that are not numbers: found at conversion, where a message can still name the tensor.

use vt_bundle::codec::ggml::raw::iq1_m_scale;

use super::u16_at;

/// A block whose scale is infinite or not a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadBlock {
    /// Place of the block in the bytes that were given.
    pub block: u64,
    /// Name of the field in ggml's struct.
    pub field: &'static str,
}

/// f16 fields of a block: (name, byte offset).
fn f16_fields(id: u32) -> (usize, &'static [(&'static str, usize)]) {
    match id {
        2 => (18, &[("d", 0)]),
        3 => (20, &[("d", 0), ("m", 2)]),
        6 => (22, &[("d", 0)]),
        7 => (24, &[("d", 0), ("m", 2)]),
        8 => (34, &[("d", 0)]),
        10 => (84, &[("d", 80), ("dmin", 82)]),
        11 => (110, &[("d", 108)]),
        12 => (144, &[("d", 0), ("dmin", 2)]),
        13 => (176, &[("d", 0), ("dmin", 2)]),
        14 => (210, &[("d", 208)]),
        16 => (66, &[("d", 0)]),
        17 => (74, &[("d", 0)]),
        18 => (98, &[("d", 0)]),
        19 => (50, &[("d", 0)]),
        20 => (18, &[("d", 0)]),
        21 => (110, &[("d", 0)]),
        22 => (82, &[("d", 0)]),
        23 => (136, &[("d", 0)]),
        34 => (54, &[("d", 52)]),
        35 => (66, &[("d", 64)]),
        41 | 42 => (18, &[("d", 0)]),
        _ => (0, &[]),
    }
}

/// Looks for non-finite scales in whole blocks of the type `id`: f16 `d`, `m`, `dmin` that are infinite or NaN, MXFP4 exponents of
/// 255. Types without such a field always pass (NVFP4's scales are finite whatever their bits; plain floats are values, not scales).
///
/// # Errors
/// The first such block.
pub fn check_blocks(id: u32, bytes: &[u8]) -> Result<(), BadBlock> {
    let bad = |block: usize, field| Err(BadBlock { block: block as u64, field });
    match id {
        29 => match bytes.as_chunks::<56>().0.iter().position(|b| !iq1_m_scale(b).is_finite()) {
            Some(block) => bad(block, "d"),
            None => Ok(()),
        },
        39 => match bytes.as_chunks::<17>().0.iter().position(|b| b[0] == 255) {
            Some(block) => bad(block, "e"),
            None => Ok(()),
        },
        _ => {
            let (size, fields) = f16_fields(id);
            if size == 0 {
                return Ok(());
            }
            for (place, block) in bytes.chunks_exact(size).enumerate() {
                for (field, at) in fields {
                    // All exponent bits set: infinite or NaN.
                    if u16_at(block, *at) & 0x7c00 == 0x7c00 {
                        return bad(place, field);
                    }
                }
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::types::{TYPES, TypeClass};

    #[test]
    fn every_block_type_has_its_fields_in_the_table() {
        for kind in TYPES.iter().filter(|t| t.class == TypeClass::Block) {
            let (size, fields) = f16_fields(kind.id);
            match kind.id {
                29 | 39 | 40 => assert_eq!(size, 0, "{}", kind.name),
                _ => {
                    assert_eq!(size, kind.block_bytes as usize, "{}", kind.name);
                    assert!(!fields.is_empty(), "{}", kind.name);
                }
            }
        }
    }

    #[test]
    fn names_the_block_and_the_field() {
        let mut bytes = vec![0u8; 3 * 144];
        assert_eq!(check_blocks(12, &bytes), Ok(()));
        bytes[2 * 144 + 3] = 0x7c;
        assert_eq!(check_blocks(12, &bytes), Err(BadBlock { block: 2, field: "dmin" }));
        let mut bytes = vec![0u8; 34];
        bytes[17] = 255;
        assert_eq!(check_blocks(39, &bytes), Err(BadBlock { block: 1, field: "e" }));
        // The nibbles of d in IQ1_M: 0x7c00 from the words' tops.
        let mut bytes = vec![0u8; 56];
        bytes[53] = 0xc0;
        bytes[55] = 0x70;
        assert_eq!(check_blocks(29, &bytes), Err(BadBlock { block: 0, field: "d" }));
    }
}
