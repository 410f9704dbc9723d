//! The table of ggml tensor types: ids, block sizes, and which of them may stand in a file.
//!
//! Source: `ggml.h` and `ggml-common.h` of ggml 0.25.3.

use crate::source::{PlainDtype, SourceDtype};

/// What may be done with a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeClass {
    /// One element per "block", with this plain equivalent.
    Plain(PlainDtype),
    /// A quantised block format.
    Block,
    /// Exists for activations in memory only.
    Activation,
    /// An id that ggml once used.
    Removed,
}

/// One ggml type.
#[derive(Clone, Copy, Debug)]
pub struct GgmlType {
    /// The id in the file.
    pub id: u32,
    /// ggml's name.
    pub name: &'static str,
    /// Weights per block; 0 for a removed type.
    pub block_weights: u32,
    /// Bytes per block; 0 for a removed type.
    pub block_bytes: u32,
    /// What it is.
    pub class: TypeClass,
}

impl GgmlType {
    /// The type of that id, removed and activation types included.
    pub fn from_id(id: u32) -> Option<&'static GgmlType> {
        TYPES.iter().find(|t| t.id == id)
    }

    /// The type in the words of [`crate::source`].
    pub fn source_dtype(&self) -> SourceDtype {
        match self.class {
            TypeClass::Plain(dtype) => SourceDtype::Plain(dtype),
            _ => SourceDtype::Ggml(self.id),
        }
    }

    /// Bytes of `count` weights, or `None` if they are not whole blocks or do not fit 63 bits.
    pub fn bytes_of(&self, count: u64) -> Option<u64> {
        let weights = u64::from(self.block_weights);
        if weights == 0 || !count.is_multiple_of(weights) {
            return None;
        }
        (count / weights).checked_mul(u64::from(self.block_bytes)).filter(|bytes| i64::try_from(*bytes).is_ok())
    }
}

const fn plain(id: u32, name: &'static str, bytes: u32, dtype: PlainDtype) -> GgmlType {
    GgmlType { id, name, block_weights: 1, block_bytes: bytes, class: TypeClass::Plain(dtype) }
}

const fn block(id: u32, name: &'static str, weights: u32, bytes: u32) -> GgmlType {
    GgmlType { id, name, block_weights: weights, block_bytes: bytes, class: TypeClass::Block }
}

const fn activation(id: u32, name: &'static str, weights: u32, bytes: u32) -> GgmlType {
    GgmlType { id, name, block_weights: weights, block_bytes: bytes, class: TypeClass::Activation }
}

const fn removed(id: u32, name: &'static str) -> GgmlType {
    GgmlType { id, name, block_weights: 0, block_bytes: 0, class: TypeClass::Removed }
}

/// Every id that ggml has given out, by id.
pub const TYPES: &[GgmlType] = &[
    plain(0, "F32", 4, PlainDtype::F32),
    plain(1, "F16", 2, PlainDtype::F16),
    block(2, "Q4_0", 32, 18),
    block(3, "Q4_1", 32, 20),
    removed(4, "Q4_2"),
    removed(5, "Q4_3"),
    block(6, "Q5_0", 32, 22),
    block(7, "Q5_1", 32, 24),
    block(8, "Q8_0", 32, 34),
    activation(9, "Q8_1", 32, 36),
    block(10, "Q2_K", 256, 84),
    block(11, "Q3_K", 256, 110),
    block(12, "Q4_K", 256, 144),
    block(13, "Q5_K", 256, 176),
    block(14, "Q6_K", 256, 210),
    activation(15, "Q8_K", 256, 292),
    block(16, "IQ2_XXS", 256, 66),
    block(17, "IQ2_XS", 256, 74),
    block(18, "IQ3_XXS", 256, 98),
    block(19, "IQ1_S", 256, 50),
    block(20, "IQ4_NL", 32, 18),
    block(21, "IQ3_S", 256, 110),
    block(22, "IQ2_S", 256, 82),
    block(23, "IQ4_XS", 256, 136),
    plain(24, "I8", 1, PlainDtype::I8),
    plain(25, "I16", 2, PlainDtype::I16),
    plain(26, "I32", 4, PlainDtype::I32),
    plain(27, "I64", 8, PlainDtype::I64),
    plain(28, "F64", 8, PlainDtype::F64),
    block(29, "IQ1_M", 256, 56),
    plain(30, "BF16", 2, PlainDtype::Bf16),
    removed(31, "Q4_0_4_4"),
    removed(32, "Q4_0_4_8"),
    removed(33, "Q4_0_8_8"),
    block(34, "TQ1_0", 256, 54),
    block(35, "TQ2_0", 256, 66),
    removed(36, "IQ4_NL_4_4"),
    removed(37, "IQ4_NL_4_8"),
    removed(38, "IQ4_NL_8_8"),
    block(39, "MXFP4", 32, 17),
    block(40, "NVFP4", 64, 36),
    block(41, "Q1_0", 128, 18),
    block(42, "Q2_0", 64, 18),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_their_place_in_the_table() {
        for (place, kind) in TYPES.iter().enumerate() {
            assert_eq!(kind.id as usize, place, "{}", kind.name);
        }
        assert!(GgmlType::from_id(43).is_none());
    }

    #[test]
    fn sizes_refuse_part_blocks_and_overflow() {
        let q4_0 = GgmlType::from_id(2).expect("Q4_0 is in the table");
        assert_eq!(q4_0.bytes_of(64), Some(36));
        assert_eq!(q4_0.bytes_of(48), None);
        let f64 = GgmlType::from_id(28).expect("F64 is in the table");
        assert_eq!(f64.bytes_of(1 << 61), None);
    }
}
