//! Weights as kernels see them: borrowed views of the planes of one matrix.
//!
//! Axes: N out-features, K in-features, M rows of activations. A product `x [M, K] * W^T` is written to
//! `[M, out_stride]`, where `out_stride` is the padded N of a tiled matrix (each part of a fused matrix starts at its
//! [`PartRows::start`](vt_bundle::layout::PartRows)) and N of a row-major one.

use half::{bf16, f16};
use vt_bundle::codec::ggml::raw::RawFormat;
use vt_bundle::encoding::{MAX_SCALE_PLANES, MatrixRow, ScalePlane, Span};
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_bundle::tile::{TILE_K, TILE_N};

use crate::fragment;
use crate::recipe::{Codes, Recipe};

/// Code planes per encoding, at most.
pub const MAX_CODE_PLANES: usize = 3;

/// What can be wrong with the bytes given for a matrix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// A number of planes other than the encoding's.
    #[error("{decode}: {found} planes given, the encoding has {expected}")]
    Planes {
        /// Decode name.
        decode: &'static str,
        /// Planes given.
        found: usize,
        /// Planes of the encoding.
        expected: usize,
    },
    /// A plane of the wrong length.
    #[error("{decode}: plane {plane} has {found} bytes, expected {expected}")]
    PlaneLength {
        /// Decode name.
        decode: &'static str,
        /// Name of the plane.
        plane: &'static str,
        /// Bytes given.
        found: usize,
        /// Bytes by the geometry.
        expected: u64,
    },
    /// A row-major matrix whose bytes are not N x K elements.
    #[error("row-major {dtype:?} matrix of {n} x {k} has {found} bytes")]
    RowsLength {
        /// Element type.
        dtype: FloatType,
        /// Out-features.
        n: usize,
        /// In-features.
        k: usize,
        /// Bytes given.
        found: usize,
    },
    /// Raw ggml blocks whose bytes are not N rows of whole blocks.
    #[error("{decode}: {n} x {k} in blocks of {weights} weights has {found} bytes")]
    RawLength {
        /// Decode name.
        decode: &'static str,
        /// Out-features.
        n: usize,
        /// In-features.
        k: usize,
        /// Weights per block.
        weights: usize,
        /// Bytes given.
        found: usize,
    },
    /// More parts than a launch can name.
    #[error("{decode}: {found} parts, at most {most} are supported on a device")]
    Parts {
        /// Decode name.
        decode: &'static str,
        /// Parts of the matrix.
        found: usize,
        /// The limit.
        most: usize,
    },
    /// A decode without a CUDA kernel.
    #[error("{decode} has no CUDA kernel in this version; use --device cpu")]
    NoKernel {
        /// Decode name.
        decode: &'static str,
    },
    /// A plane at an address that kernels cannot read from.
    #[error("{decode}: a plane at address {address:#x}, expected a multiple of 16")]
    Alignment {
        /// Decode name.
        decode: &'static str,
        /// The address.
        address: u64,
    },
    /// More code planes than kernels are made for.
    #[error("{decode}: {found} code planes, at most {MAX_CODE_PLANES} are supported")]
    CodePlanes {
        /// Decode name.
        decode: &'static str,
        /// Code planes of the encoding.
        found: usize,
    },
}

/// Float types of row-major matrices and vectors, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
}

impl FloatType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            FloatType::F32 => 4,
            FloatType::F16 | FloatType::Bf16 => 2,
        }
    }

    /// Element `i` of `data` as f32, exactly.
    ///
    /// # Panics
    /// Where `data` is too short.
    pub fn get(self, data: &[u8], i: usize) -> f32 {
        match self {
            FloatType::F32 => f32::from_le_bytes([data[4 * i], data[4 * i + 1], data[4 * i + 2], data[4 * i + 3]]),
            FloatType::F16 => f16::from_le_bytes([data[2 * i], data[2 * i + 1]]).to_f32(),
            FloatType::Bf16 => bf16::from_le_bytes([data[2 * i], data[2 * i + 1]]).to_f32(),
        }
    }

    /// The elements of `data` as f32, exactly. Writes all of `out`.
    ///
    /// # Panics
    /// Where `data` has another number of elements than `out`.
    pub fn widen(self, data: &[u8], out: &mut [f32]) {
        assert_eq!(data.len(), out.len() * self.bytes(), "bytes of {} {self:?} elements", out.len());
        for (i, value) in out.iter_mut().enumerate() {
            *value = self.get(data, i);
        }
    }
}

/// A matrix, N out-features by K in-features, in one of the forms that a bundle stores.
// A model holds a few per layer, and passes them by reference.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
pub enum Weight<'a> {
    /// Planes in tile order.
    Tiled(TiledWeight<'a>),
    /// Rows of floats, one out-feature after the other.
    Rows(RowsWeight<'a>),
    /// Rows of ggml blocks as they are in the source file.
    Raw(RawWeight<'a>),
}

impl Weight<'_> {
    /// In-features.
    pub fn k(&self) -> usize {
        match self {
            Weight::Tiled(w) => w.matrix.k as usize,
            Weight::Rows(w) => w.k,
            Weight::Raw(w) => w.k,
        }
    }

    /// Columns of a product with this matrix, padding included.
    pub fn out_stride(&self) -> usize {
        match self {
            Weight::Tiled(w) => w.matrix.padded_n() as usize,
            Weight::Rows(w) => w.n,
            Weight::Raw(w) => w.n,
        }
    }

    /// Whether products quantise activations under [`Activations::Int8`](crate::Activations::Int8).
    pub fn takes_int8(&self) -> bool {
        match self {
            Weight::Tiled(w) => w.recipe.as_ref().is_some_and(|r| matches!(r.codes, Codes::Integer { .. })),
            Weight::Rows(_) | Weight::Raw(_) => false,
        }
    }

    /// Bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        match self {
            Weight::Tiled(w) => {
                w.codes.iter().map(|p| p.data.len()).sum::<usize>() + w.scales.iter().map(|p| p.len()).sum::<usize>()
            }
            Weight::Rows(w) => w.data.len(),
            Weight::Raw(w) => w.data.len(),
        }
    }

    /// The bytes of its planes: codes, then scales; one run for rows and raw blocks.
    pub fn planes(&self) -> Vec<&[u8]> {
        match self {
            Weight::Tiled(w) => {
                let (codes, scales) = (w.matrix.spec.codes.len(), w.matrix.spec.scales.len());
                w.codes[..codes].iter().map(|plane| plane.data).chain(w.scales[..scales].iter().copied()).collect()
            }
            Weight::Rows(w) => vec![w.data],
            Weight::Raw(w) => vec![w.data],
        }
    }

    /// Decodes one row, `[K]`, as a product's column `row` sees it: counted with the padding of earlier parts. A row of
    /// padding is unspecified. Writes all of `out`.
    ///
    /// # Panics
    /// Where `row` is beyond the matrix or `out` is not of length K.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.out_stride(), "row {row} of {}", self.out_stride());
        assert_eq!(out.len(), self.k(), "length of a decoded row");
        match self {
            Weight::Tiled(w) => w.decode_row(row, out),
            Weight::Rows(w) => w.dtype.widen(w.row(row), out),
            Weight::Raw(w) => w.format.decode(w.row(row), out),
        }
    }
}

/// A matrix of floats, `[N, K]` row-major.
#[derive(Clone, Copy, Debug)]
pub struct RowsWeight<'a> {
    /// Element type.
    pub(crate) dtype: FloatType,
    /// Out-features.
    pub(crate) n: usize,
    /// In-features.
    pub(crate) k: usize,
    /// `[N, K]`, little-endian.
    pub(crate) data: &'a [u8],
}

impl<'a> RowsWeight<'a> {
    /// A view of `data` as `[n, k]`.
    ///
    /// # Errors
    /// [`WeightError::RowsLength`] where the length is another.
    pub fn new(dtype: FloatType, n: usize, k: usize, data: &'a [u8]) -> Result<Self, WeightError> {
        if n.checked_mul(k).and_then(|e| e.checked_mul(dtype.bytes())) != Some(data.len()) {
            return Err(WeightError::RowsLength { dtype, n, k, found: data.len() });
        }
        Ok(Self { dtype, n, k, data })
    }

    /// Bytes of one row.
    pub(crate) fn row(&self, row: usize) -> &'a [u8] {
        let bytes = self.k * self.dtype.bytes();
        &self.data[row * bytes..(row + 1) * bytes]
    }
}

/// A matrix of raw ggml blocks, `[N, K]` row-major: the types that have no tile layout.
#[derive(Clone, Copy, Debug)]
pub struct RawWeight<'a> {
    pub(crate) format: &'static RawFormat,
    pub(crate) n: usize,
    pub(crate) k: usize,
    data: &'a [u8],
}

impl<'a> RawWeight<'a> {
    /// A view of `data` as `[n, k]`.
    ///
    /// # Errors
    /// [`WeightError::RawLength`] where rows are not whole blocks or the length is another.
    pub fn new(format: &'static RawFormat, n: usize, k: usize, data: &'a [u8]) -> Result<Self, WeightError> {
        let bytes = (k / format.weights).checked_mul(format.bytes).and_then(|row| row.checked_mul(n));
        if k == 0 || !k.is_multiple_of(format.weights) || bytes != Some(data.len()) {
            let (decode, weights) = (format.decode_name, format.weights);
            return Err(WeightError::RawLength { decode, n, k, weights, found: data.len() });
        }
        Ok(Self { format, n, k, data })
    }

    /// The blocks of one row.
    pub(crate) fn row(&self, row: usize) -> &'a [u8] {
        let bytes = self.k / self.format.weights * self.format.bytes;
        &self.data[row * bytes..(row + 1) * bytes]
    }
}

/// A matrix in tile order and its planes.
#[derive(Clone, Debug)]
pub struct TiledWeight<'a> {
    pub(crate) matrix: &'a TiledMatrix,
    /// Code planes, low bits first; empty where the encoding has fewer.
    codes: [TilePlane<'a>; MAX_CODE_PLANES],
    /// Scale planes; empty where the encoding has fewer.
    pub(crate) scales: [&'a [u8]; MAX_SCALE_PLANES],
    /// How scale planes that have a row per group or super-block are walked.
    rows: [Option<ScaleRows>; MAX_SCALE_PLANES],
    /// How the fast kernels decode it; `None`: through [`vt_bundle::encoding::EncodingSpec::decode_row`].
    pub(crate) recipe: Option<Recipe>,
}

/// A code plane and the distances in it, worked out once.
#[derive(Clone, Copy, Debug, Default)]
struct TilePlane<'a> {
    data: &'a [u8],
    /// Bytes of a tile.
    tile: usize,
    /// Bytes of a row of tiles.
    row: usize,
}

/// Distances in a scale plane of [`Span::Group`] or [`Span::Super`].
#[derive(Clone, Copy, Debug)]
struct ScaleRows {
    /// Codes along K per row.
    reach: usize,
    /// Bytes of the elements of a tile column.
    tile: usize,
    /// Bytes of a row.
    row: usize,
}

impl<'a> TiledWeight<'a> {
    /// A view of the planes of `matrix`, in the order of [`TiledMatrix::planes`].
    ///
    /// # Errors
    /// [`WeightError`] where their number or a length is not the geometry's.
    pub fn new(matrix: &'a TiledMatrix, planes: &[&'a [u8]]) -> Result<Self, WeightError> {
        let (spec, decode) = (matrix.spec, matrix.spec.decode);
        if spec.codes.len() > MAX_CODE_PLANES {
            return Err(WeightError::CodePlanes { decode, found: spec.codes.len() });
        }
        let expected = spec.codes.len() + spec.scales.len();
        if planes.len() != expected {
            return Err(WeightError::Planes { decode, found: planes.len(), expected });
        }
        let mut codes = [TilePlane::default(); MAX_CODE_PLANES];
        let mut rows = [None; MAX_SCALE_PLANES];
        let mut scales: [&[u8]; MAX_SCALE_PLANES] = [&[]; MAX_SCALE_PLANES];
        for (kind, &data) in matrix.planes().zip(planes) {
            let expected = matrix.plane_bytes(kind);
            if data.len() as u64 != expected {
                let plane = matrix.plane_name(kind);
                return Err(WeightError::PlaneLength { decode, plane, found: data.len(), expected });
            }
            match kind {
                PlaneKind::Code(i) => {
                    let tile = spec.codes[i].tile_bytes();
                    codes[i] = TilePlane { data, tile, row: matrix.tile_offset(&spec.codes[i], 1, 0) as usize };
                }
                PlaneKind::Scale(i) => {
                    scales[i] = data;
                    rows[i] = ScaleRows::of(matrix, &spec.scales[i]);
                }
            }
        }
        Ok(Self { matrix, codes, scales, rows, recipe: Recipe::find(matrix) })
    }

    /// Geometry.
    pub fn matrix(&self) -> &'a TiledMatrix {
        self.matrix
    }

    /// One tile of a code plane.
    #[inline]
    pub(crate) fn tile(&self, plane: usize, tile_k: usize, tile_n: usize) -> &'a [u8] {
        let TilePlane { data, tile, row } = self.codes[plane];
        let at = tile_k * row + tile_n * tile;
        &data[at..at + tile]
    }

    /// The 64 elements of a scale plane that the strip at `k0` of a tile column begins with, where the plane has a row
    /// per group or super-block.
    #[inline]
    pub(crate) fn scale_row(&self, plane: usize, k0: usize, tile_n: usize) -> Option<&'a [u8]> {
        let ScaleRows { reach, tile, row } = self.rows[plane]?;
        let at = k0 / reach * row + tile_n * tile;
        self.scales[plane].get(at..at + tile)
    }

    /// `row`, or the last row of its part where it is padding: block planes have no elements for padding.
    pub(crate) fn readable_row(&self, row: usize) -> usize {
        let part = &self.matrix.parts[self.matrix.part_of(row as u64)];
        row.min((part.start + part.rows - 1) as usize)
    }

    /// The elements of a scale plane for padded row `row` that apply to `k0 .. k0 + len` along K, as stored, appended
    /// to `out`.
    pub(crate) fn row_scales(&self, plane: usize, row: usize, k0: usize, len: usize, out: &mut Vec<u8>) {
        let scale = &self.matrix.spec.scales[plane];
        let reach = match scale.span {
            Span::Group => self.matrix.group_size as usize,
            Span::Super(span) => span as usize,
            Span::Block => self.matrix.block[1] as usize,
            Span::Channel | Span::Part => usize::MAX,
        };
        let size = scale.dtype.bytes();
        for column in k0 / reach..=(k0 + len - 1) / reach {
            let at = self.matrix.scale_index(scale, row as u64, column as u64) as usize * size;
            out.extend_from_slice(&self.scales[plane][at..at + size]);
        }
    }

    /// The extent along K in which [`TiledWeight::decode_strip`] may cut: no scale element is shared between two pieces
    /// in a way that depends on its position.
    pub(crate) fn strip_unit(&self) -> usize {
        let k = self.matrix.k as usize;
        let mut unit = 2 * TILE_K;
        for scale in self.matrix.spec.scales {
            let reach = match scale.span {
                Span::Group => self.matrix.group_size as usize,
                Span::Super(span) => span as usize,
                Span::Block => self.matrix.block[1] as usize,
                Span::Channel | Span::Part => continue,
            };
            // A formula may address packed sub-scales by their place in the super-block, so that one is never cut.
            let divides = unit.is_multiple_of(reach);
            let whole = reach.is_multiple_of(unit) && !matches!(scale.span, Span::Super(_));
            if !(divides || whole) {
                unit = if reach.is_multiple_of(unit) { reach } else { return k };
            }
        }
        unit.min(k)
    }

    /// Decodes `out.len()` codes from `k0` on of one padded row by the encoding's own formula. `k0` and the length are
    /// multiples of [`TiledWeight::strip_unit`], or reach to K.
    pub(crate) fn decode_strip(&self, row: usize, k0: usize, scratch: &mut StripScratch, out: &mut [f32]) {
        let (tile_n, column) = (row / TILE_N, row % TILE_N);
        let codes = &mut scratch.codes;
        codes.clear();
        codes.resize(out.len().next_multiple_of(TILE_K), 0);
        for (plane, spec) in self.matrix.spec.codes.iter().enumerate() {
            for (i, sixteen) in codes.as_chunks_mut::<TILE_K>().0.iter_mut().enumerate() {
                fragment::add_column(spec, self.tile(plane, k0 / TILE_K + i, tile_n), column, sixteen);
            }
        }
        for (plane, bytes) in scratch.scales.iter_mut().enumerate().take(self.matrix.spec.scales.len()) {
            bytes.clear();
            self.row_scales(plane, row, k0, out.len(), bytes);
        }
        let row = MatrixRow {
            codes: &codes[..out.len()],
            scales: std::array::from_fn(|i| scratch.scales[i].as_slice()),
            group_size: self.matrix.group_size as usize,
            block: self.matrix.block.map(|b| b as usize),
        };
        (self.matrix.spec.decode_row)(&row, out);
    }

    fn decode_row(&self, row: usize, out: &mut [f32]) {
        self.decode_strip(self.readable_row(row), 0, &mut StripScratch::default(), out);
    }
}

impl ScaleRows {
    fn of(matrix: &TiledMatrix, plane: &ScalePlane) -> Option<Self> {
        let reach = match plane.span {
            Span::Group => matrix.group_size as usize,
            Span::Super(span) => span as usize,
            Span::Channel | Span::Part | Span::Block => return None,
        };
        let size = plane.dtype.bytes();
        Some(Self { reach, tile: TILE_N * size, row: matrix.padded_n() as usize * size })
    }
}

/// Buffers of [`TiledWeight::decode_strip`], reused from call to call.
#[derive(Debug, Default)]
pub(crate) struct StripScratch {
    codes: Vec<u8>,
    scales: [Vec<u8>; MAX_SCALE_PLANES],
}
