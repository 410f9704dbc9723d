//! Encodings: which planes a quantised matrix has, and how a row of them decodes to f32.
//!
//! One [`EncodingSpec`] per `decode` name of the manifest. A spec is data plus one pure function; the layouts, the
//! packer, the reader, the kernels and the tests all take sizes and orders from here.

use crate::codec;
use crate::tile::{CodePlane, ScaleOrder};

/// How far one element of a scale plane reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// `group_size` codes along K of one column: a plane of `[ceil(K / group_size), N]`.
    Group,
    /// A fixed number of codes along K of one column (the super-blocks of k-quants): `[ceil(K / span), N]`.
    Super(u32),
    /// A whole column: `[N]`.
    Channel,
    /// A part of a fused matrix: `[parts]`.
    Part,
    /// A block of `block` rows (N) by columns (K), counted from the first row of each part:
    /// for each part `[ceil(rows / block[0]), ceil(K / block[1])]`, one part after the other.
    Block,
}

/// The stored type of a scale element. Bytes are as in the source, little-endian.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleType {
    E4M3,
    E8M0,
    U8,
    I8,
    F16,
    Bf16,
    F32,
}

impl ScaleType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            ScaleType::E4M3 | ScaleType::E8M0 | ScaleType::U8 | ScaleType::I8 => 1,
            ScaleType::F16 | ScaleType::Bf16 => 2,
            ScaleType::F32 => 4,
        }
    }

    /// Name in the manifest.
    pub const fn name(self) -> &'static str {
        match self {
            ScaleType::E4M3 => "e4m3",
            ScaleType::E8M0 => "e8m0",
            ScaleType::U8 => "u8",
            ScaleType::I8 => "i8",
            ScaleType::F16 => "f16",
            ScaleType::Bf16 => "bf16",
            ScaleType::F32 => "f32",
        }
    }
}

/// A plane of scales, minima or zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalePlane {
    /// Name in the manifest: `scales`, `global`, `d`, `m`, ...
    pub name: &'static str,
    /// Element type.
    pub dtype: ScaleType,
    /// Reach of one element.
    pub span: Span,
}

impl ScalePlane {
    /// The order of columns within a row of this plane: planes that are read beside code tiles follow the tile,
    /// the others are in natural order.
    pub const fn order(&self) -> ScaleOrder {
        match (self.span, self.dtype.bytes()) {
            (Span::Group | Span::Super(_), 1) => ScaleOrder::GroupedInterleaved,
            (Span::Group | Span::Super(_), _) => ScaleOrder::Grouped,
            _ => ScaleOrder::Natural,
        }
    }
}

/// Planes and formula of one encoding.
pub struct EncodingSpec {
    /// `decode` name in the manifest, versioned: formula and order of operations (`nvfp4.modelopt@1`).
    pub decode: &'static str,
    /// `encoding` name in the manifest: what the codes and scales are (`e2m1`), independent of the formula.
    pub encoding: &'static str,
    /// Code planes, low bits first.
    pub codes: &'static [CodePlane],
    /// Scale planes, in the order of [`MatrixRow::scales`].
    pub scales: &'static [ScalePlane],
    /// Oldest CUDA compute capability (major * 10 + minor) with a kernel for this layout.
    pub min_compute_capability: u32,
    /// Decodes one row; see [`MatrixRow`]. Writes all of `out`.
    pub decode_row: fn(row: &MatrixRow<'_>, out: &mut [f32]),
}

impl std::fmt::Debug for EncodingSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.decode)
    }
}

/// Scale planes per encoding, at most.
pub const MAX_SCALE_PLANES: usize = 4;

/// One row (one out-feature) of a matrix, taken out of its planes.
#[derive(Clone, Debug)]
pub struct MatrixRow<'a> {
    /// One code a byte, `[K]`.
    pub codes: &'a [u8],
    /// Per scale plane of the spec, the elements that apply to this row in order of K, as stored:
    /// `ceil(K / group)` of them for groups, super-blocks and blocks, one for channels and parts.
    pub scales: [&'a [u8]; MAX_SCALE_PLANES],
    /// Codes per element of [`Span::Group`] planes.
    pub group_size: usize,
    /// Rows (N) and columns (K) per element of [`Span::Block`] planes.
    pub block: [usize; 2],
}

impl MatrixRow<'_> {
    /// The `i`-th 32-bit element of a scale plane.
    pub fn f32(&self, plane: usize, i: usize) -> f32 {
        let s = &self.scales[plane][4 * i..4 * i + 4];
        f32::from_le_bytes([s[0], s[1], s[2], s[3]])
    }

    /// The `i`-th element of an f16 scale plane.
    pub fn f16(&self, plane: usize, i: usize) -> f32 {
        let s = &self.scales[plane][2 * i..2 * i + 2];
        half::f16::from_le_bytes([s[0], s[1]]).to_f32()
    }

    /// The `i`-th element of a bf16 scale plane.
    pub fn bf16(&self, plane: usize, i: usize) -> f32 {
        let s = &self.scales[plane][2 * i..2 * i + 2];
        half::bf16::from_le_bytes([s[0], s[1]]).to_f32()
    }

    /// The `i`-th element of an 8-bit scale plane.
    pub fn u8(&self, plane: usize, i: usize) -> u8 {
        self.scales[plane][i]
    }
}

/// Every encoding.
pub fn all() -> impl Iterator<Item = &'static EncodingSpec> {
    codec::families().into_iter().flatten().copied()
}

/// The encoding with that `decode` name.
pub fn find(decode: &str) -> Option<&'static EncodingSpec> {
    all().find(|spec| spec.decode == decode)
}
