//! ggml block types: what they are as codes and scale elements, and as raw blocks.
//!
//! A tiled type is a [`BlockFormat`]: functions over one block that split it into codes and scale elements, and join them
//! again. The split loses nothing: every bit of a block is a code bit or a bit of a scale element, so that joining gives the
//! block back. [`BlockFormat`] implements [`Codec`] over rows of blocks. Types without a tile layout are in [`raw`].
//!
//! Sources: `ggml-common.h` and `ggml-quants.c` of ggml 0.25.3. Block order along K is the file's; within a block, codes are
//! put into the order of K (ggml keeps low and high nibbles of one byte half a block apart).

mod fp4;
mod iq4;
mod kquants;
mod legacy;
pub mod raw;
mod raw_grids;

pub use fp4::{half_e8m0, half_ue4m3};

use super::{Band, Codec, MatrixShape};
use crate::encoding::{EncodingSpec, MAX_SCALE_PLANES, Span};

/// The tables of this family from one list of its formats.
macro_rules! family {
    ($($format:path),+ $(,)?) => {
        /// Encodings of this family.
        pub(crate) const SPECS: &[&EncodingSpec] = &[$($format.spec),+];

        /// Codecs of this family.
        pub const CODECS: &[&dyn Codec] = &[$(&$format),+];

        const FORMATS: &[&BlockFormat] = &[$(&$format),+];
    };
}

family!(
    legacy::Q4_0,
    legacy::Q4_1,
    legacy::Q5_0,
    legacy::Q5_1,
    legacy::Q8_0,
    kquants::Q2_K,
    kquants::Q3_K,
    kquants::Q4_K,
    kquants::Q5_K,
    kquants::Q6_K,
    iq4::IQ4_NL,
    iq4::IQ4_XS,
    fp4::MXFP4,
    fp4::NVFP4,
);

/// The tiled format of a ggml type by its on-disk id; `None` if the type is kept as raw blocks, or is no block type.
pub fn tiled(ggml_type: u32) -> Option<&'static BlockFormat> {
    FORMATS.iter().copied().find(|f| f.ggml_type == ggml_type)
}

/// Scale elements of one block, per plane of the spec, as stored.
type BlockScales<'a> = [&'a [u8]; MAX_SCALE_PLANES];

/// A ggml block type with a tile layout.
///
/// One input: the blocks, `[N, K / weights]`. K must be a multiple of `weights`; every function sees whole blocks.
pub struct BlockFormat {
    name: &'static str,
    /// ggml's on-disk id.
    pub ggml_type: u32,
    /// Weights per block.
    pub weights: usize,
    /// Bytes per block.
    pub bytes: usize,
    /// Codes per element of group planes: what [`MatrixShape::group_size`] must be.
    pub group_size: usize,
    spec: &'static EncodingSpec,
    /// Codes `16 * i .. 16 * i + 16` of the block.
    codes16: fn(block: &[u8], i: usize, out: &mut [u8; 16]),
    /// Element `i` within the block of a scale plane.
    scale: fn(block: &[u8], plane: usize, i: usize, out: &mut [u8]),
    /// Writes a whole block from its codes and scale elements.
    join: fn(codes: &[u8], scales: &BlockScales<'_>, block: &mut [u8]),
}

impl std::fmt::Debug for BlockFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl BlockFormat {
    fn row_bytes(&self, shape: &MatrixShape) -> usize {
        shape.k / self.weights * self.bytes
    }

    fn block<'a>(&self, shape: &MatrixShape, inputs: &[&'a [u8]], row: usize, index: usize) -> &'a [u8] {
        let at = row * self.row_bytes(shape) + index * self.bytes;
        &inputs[0][at..at + self.bytes]
    }

    /// Elements of a scale plane per block.
    fn elements(&self, plane: usize) -> usize {
        match self.spec.scales[plane].span {
            Span::Group => self.weights / self.group_size,
            _ => 1,
        }
    }
}

impl Codec for BlockFormat {
    fn name(&self) -> &'static str {
        self.name
    }

    fn spec(&self) -> &'static EncodingSpec {
        self.spec
    }

    fn inputs(&self) -> usize {
        1
    }

    fn input_bytes(&self, shape: &MatrixShape, _: usize) -> Option<u64> {
        if !shape.k.is_multiple_of(self.weights) {
            return None;
        }
        (shape.n as u64).checked_mul((shape.k / self.weights) as u64)?.checked_mul(self.bytes as u64)
    }

    fn codes16(&self, shape: &MatrixShape, inputs: &[&[u8]], row: usize, k0: usize, out: &mut [u8; 16]) {
        // K is a multiple of the block and so of 16.
        let block = self.block(shape, inputs, row, k0 / self.weights);
        (self.codes16)(block, k0 % self.weights / 16, out);
    }

    fn scale(&self, shape: &MatrixShape, inputs: &[&[u8]], plane: usize, row: usize, column: usize, out: &mut [u8]) {
        let per_block = self.elements(plane);
        let block = self.block(shape, inputs, row, column / per_block);
        (self.scale)(block, plane, column % per_block, out);
    }

    fn unit_rows(&self, _: &MatrixShape, _: usize) -> Option<usize> {
        Some(1)
    }

    fn join(&self, shape: &MatrixShape, _: usize, band: &Band, out: &mut [u8]) {
        let blocks = shape.k / self.weights;
        for (i, row) in out.chunks_exact_mut(self.row_bytes(shape)).enumerate() {
            let codes = band.row_codes(i, shape.k);
            for (b, block) in row.chunks_exact_mut(self.bytes).enumerate() {
                let mut scales = BlockScales::default();
                for (plane, elements) in scales.iter_mut().enumerate().take(self.spec.scales.len()) {
                    let all = band.row_scales(plane, i);
                    let len = all.len() / blocks;
                    *elements = &all[b * len..(b + 1) * len];
                }
                (self.join)(&codes[b * self.weights..(b + 1) * self.weights], &scales, block);
            }
        }
    }
}

/// Low nibbles of 16 bytes.
fn low_nibbles(bytes: &[u8], out: &mut [u8; 16]) {
    for (code, byte) in out.iter_mut().zip(bytes) {
        *code = byte & 15;
    }
}

/// High nibbles of 16 bytes.
fn high_nibbles(bytes: &[u8], out: &mut [u8; 16]) {
    for (code, byte) in out.iter_mut().zip(bytes) {
        *code = byte >> 4;
    }
}

/// Writes bytes whose low nibbles are the first half of `codes` and whose high nibbles are the second; upper code bits are left out.
fn join_nibbles(codes: &[u8], out: &mut [u8]) {
    let (low, high) = codes.split_at(codes.len() / 2);
    for (byte, (l, h)) in out.iter_mut().zip(low.iter().zip(high)) {
        *byte = l & 15 | h << 4;
    }
}

#[cfg(test)]
mod tests;
