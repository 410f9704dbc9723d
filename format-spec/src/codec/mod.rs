//! Source codecs: how the bytes of a source matrix split into codes and scale elements, and back.
//!
//! A [`Codec`] is a pair of pure functions over bytes for one storage format of one checkpoint family. Splitting feeds
//! the packer ([`crate::pack`]); joining is its exact inverse and feeds `restore`. Neither does arithmetic on values.

use crate::encoding::{EncodingSpec, MAX_SCALE_PLANES};

pub mod ggml;
pub mod hf;

/// The encodings of every family.
pub(crate) fn families() -> [&'static [&'static EncodingSpec]; 2] {
    [hf::SPECS, ggml::SPECS]
}

/// The codec with that name, as recorded in the restore recipe.
pub fn find(name: &str) -> Option<&'static dyn Codec> {
    hf::CODECS.iter().chain(ggml::CODECS).copied().find(|codec| codec.name() == name)
}

/// The logical matrix of one part: N rows, K columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// Out-features.
    pub n: usize,
    /// In-features.
    pub k: usize,
    /// Codes per element of group planes; 0 where there are none.
    pub group_size: usize,
    /// Rows and columns per element of block planes; zeros where there are none.
    pub block: [usize; 2],
}

/// Rows of a part, taken out of the planes: the input of [`Codec::join`].
#[derive(Debug, Default)]
pub struct Band {
    /// First row, in the order of the source.
    pub first: usize,
    /// Number of rows.
    pub rows: usize,
    /// Codes `[rows, K]`, one a byte.
    pub codes: Vec<u8>,
    /// Per scale plane, the elements that apply to each row, `[rows, elements along K]`, as stored.
    pub scales: [Vec<u8>; MAX_SCALE_PLANES],
}

impl Band {
    /// The codes of the `i`-th row of the band.
    pub fn row_codes(&self, i: usize, k: usize) -> &[u8] {
        &self.codes[i * k..(i + 1) * k]
    }

    /// The elements of one scale plane for the `i`-th row of the band.
    pub fn row_scales(&self, plane: usize, i: usize) -> &[u8] {
        let width = self.scales[plane].len() / self.rows.max(1);
        &self.scales[plane][i * width..(i + 1) * width]
    }
}

/// Codes that lie in the file as rows, one after the other, with K a multiple of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeRows<'a> {
    /// Two codes a byte, the first in the low nibble: `[N, K/2]`.
    Nibbles(&'a [u8]),
    /// One code a byte: `[N, K]`.
    Bytes(&'a [u8]),
}

/// How one source format stores a matrix.
///
/// A matrix has one or more *inputs* (source tensors): the codes first and then one input per scale plane, in the order
/// of the planes (ModelOpt NVFP4: packed weight, block scales, global scale), or all in one (ggml's blocks). Lengths have been checked with [`Codec::input_bytes`] before any other
/// method is called, so the methods may index.
pub trait Codec: Sync {
    /// Name recorded in the restore recipe, versioned (`modelopt.nvfp4@1`).
    fn name(&self) -> &'static str;

    /// The planes that it splits into.
    fn spec(&self) -> &'static EncodingSpec;

    /// Number of inputs.
    fn inputs(&self) -> usize;

    /// Length of an input in bytes; `None` on overflow.
    fn input_bytes(&self, shape: &MatrixShape, input: usize) -> Option<u64>;

    /// The 16 codes of `row` from column `k0`, a multiple of 16; positions at or beyond K are set to zero.
    fn codes16(&self, shape: &MatrixShape, inputs: &[&[u8]], row: usize, k0: usize, out: &mut [u8; 16]);

    /// The `column`-th element along K of a scale plane for `row`; for channel and part planes `column` is 0.
    /// `out` has the element's size.
    fn scale(&self, shape: &MatrixShape, inputs: &[&[u8]], plane: usize, row: usize, column: usize, out: &mut [u8]);

    /// The codes as rows of the file, if that is how the format stores them: what [`Codec::codes16`] gives for every
    /// row is then there to be read in words.
    fn code_rows<'a>(&self, shape: &MatrixShape, inputs: &[&'a [u8]]) -> Option<CodeRows<'a>> {
        let _ = (shape, inputs);
        None
    }

    /// The elements of a group plane as rows of the file, `[N, elements along K]`, if that is how the format stores them.
    fn scale_rows<'a>(&self, shape: &MatrixShape, inputs: &[&'a [u8]], plane: usize) -> Option<&'a [u8]> {
        let _ = (shape, inputs, plane);
        None
    }

    /// Rows per unit of an input: the input's bytes are equal consecutive units, the `u`-th of which depends only on
    /// rows `u * unit_rows .. (u + 1) * unit_rows`. `None`: it depends on all rows at once.
    fn unit_rows(&self, shape: &MatrixShape, input: usize) -> Option<usize>;

    /// Writes the bytes of an input that belong to the band: the inverse of [`Codec::codes16`] and [`Codec::scale`].
    ///
    /// The band starts at a multiple of [`Codec::unit_rows`] and ends at one or at N; without units it is the whole part.
    fn join(&self, shape: &MatrixShape, input: usize, band: &Band, out: &mut [u8]);
}
