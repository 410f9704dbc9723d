//! References to matrices and vectors of a bundle, and what they become when a loaded bundle is at hand.

use super::GraphError;
use crate::load::{HostArena, LoadedBundle};
use vt_bundle::Bundle;
use vt_bundle::codec::ggml::raw::{self, RawFormat};
use vt_bundle::geometry::Geometry;
use vt_bundle::layout::{MAX_SCALE_PLANES, TiledMatrix};
use vt_bundle::manifest::{Layout, Tensor};
use vt_kernels::weight::MAX_CODE_PLANES;
use vt_kernels::{FloatType, RawWeight, RowsWeight, TiledWeight, Weight};

/// Planes of a tiled matrix, at most.
const MAX_PLANES: usize = MAX_CODE_PLANES + MAX_SCALE_PLANES;

/// A matrix of a bundle, all parts of a fused one together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixRef {
    tensor: usize,
    expert: u64,
}

/// A vector of floats of a bundle, or a run of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorRef {
    tensor: usize,
    expert: u64,
    first: usize,
    len: usize,
    dtype: FloatType,
}

/// The float type of a row-major tensor.
fn float_type(tensor: &Tensor) -> Option<FloatType> {
    match &tensor.layout {
        Layout::RowMajor { dtype } => match dtype.as_str() {
            "f32" => Some(FloatType::F32),
            "f16" => Some(FloatType::F16),
            "bf16" => Some(FloatType::Bf16),
            _ => None,
        },
        _ => None,
    }
}

/// The block format of a tensor of raw ggml blocks.
fn raw_format(tensor: &Tensor) -> Option<&'static RawFormat> {
    match &tensor.layout {
        Layout::GgmlRaw { ggml_type, .. } => raw::by_name(ggml_type),
        _ => None,
    }
}

pub(super) fn storage_error(tensor: &Tensor, expected: &'static str) -> GraphError {
    let layout = match &tensor.layout {
        Layout::RowMajor { dtype } => format!("row-major {dtype}"),
        Layout::GgmlRaw { ggml_type, .. } => format!("raw ggml blocks of {ggml_type}"),
        Layout::Marlin { encoding, .. } => format!("tiles of {encoding}"),
    };
    let found = format!("{layout} (decode {})", tensor.decode);
    GraphError::Storage { name: tensor.name.clone(), found, expected }
}

impl MatrixRef {
    /// A reference, if operators can read the tensor's storage.
    pub(super) fn new(index: usize, expert: u64, tensor: &Tensor, geometry: &Geometry) -> Result<Self, GraphError> {
        let readable = match geometry {
            Geometry::Tiled(matrix) => matrix.spec.codes.len() <= MAX_CODE_PLANES,
            Geometry::Rows { .. } => {
                tensor.shape.len() == 2 && (float_type(tensor).is_some() || raw_format(tensor).is_some())
            }
        };
        if !readable {
            return Err(storage_error(
                tensor,
                "matrices in tile order, raw ggml blocks and row-major f32, f16 and bf16",
            ));
        }
        Ok(Self { tensor: index, expert })
    }

    /// The weight, as operators take it.
    ///
    /// # Panics
    /// Never for the bundle that the reference was resolved against.
    pub fn weight<'a, A: HostArena>(&self, loaded: &'a LoadedBundle<A>) -> Weight<'a> {
        let view = loaded.tensor_at(self.tensor);
        match view.geometry {
            Geometry::Tiled(matrix) => {
                let mut planes: [&[u8]; MAX_PLANES] = [&[]; MAX_PLANES];
                let count = view.tensor.planes.len().min(MAX_PLANES);
                for (p, plane) in planes.iter_mut().enumerate().take(count) {
                    *plane = view.plane(p, self.expert);
                }
                let weight = TiledWeight::new(matrix, &planes[..count]);
                Weight::Tiled(weight.expect("plane sizes were checked by Bundle::open"))
            }
            Geometry::Rows { rows, .. } if let Some(format) = raw_format(view.tensor) => {
                let (n, k) = (*rows as usize, view.tensor.shape[1] as usize);
                let raw = RawWeight::new(format, n, k, view.plane(0, self.expert));
                Weight::Raw(raw.expect("plane sizes were checked by Bundle::open"))
            }
            Geometry::Rows { rows, .. } => {
                let dtype = float_type(view.tensor).expect("the type was checked by MatrixRef::new");
                let (n, k) = (*rows as usize, view.tensor.shape[1] as usize);
                let rows = RowsWeight::new(dtype, n, k, view.plane(0, self.expert));
                Weight::Rows(rows.expect("plane sizes were checked by Bundle::open"))
            }
        }
    }
}

impl MatrixRef {
    /// The tensor's index in the manifest, and the expert's in the tensor.
    pub fn place(&self) -> (usize, u64) {
        (self.tensor, self.expert)
    }

    /// Offsets in the image of the tensor's planes, in their order.
    ///
    /// # Panics
    /// Where the bundle is not the one that the reference was resolved against.
    pub fn plane_offsets(&self, bundle: &Bundle) -> Vec<u64> {
        let (tensor, _) = bundle.tensor_at(self.tensor);
        tensor.planes.iter().map(|plane| tensor.plane_offset(plane, self.expert)).collect()
    }

    /// How the matrix is stored.
    ///
    /// # Panics
    /// As [`MatrixRef::plane_offsets`].
    pub fn storage<'a>(&self, bundle: &'a Bundle) -> MatrixStorage<'a> {
        let (tensor, geometry) = bundle.tensor_at(self.tensor);
        match (geometry, raw_format(tensor), float_type(tensor)) {
            (Geometry::Tiled(matrix), ..) => MatrixStorage::Tiled(matrix),
            (Geometry::Rows { rows, .. }, Some(format), _) => {
                MatrixStorage::Raw { format, n: *rows as usize, k: tensor.shape[1] as usize }
            }
            (Geometry::Rows { rows, .. }, None, dtype) => {
                let dtype = dtype.expect("the type was checked by MatrixRef::new");
                MatrixStorage::Rows { dtype, n: *rows as usize, k: tensor.shape[1] as usize }
            }
        }
    }
}

/// How a matrix of a bundle is stored: what there is to know besides where its planes are.
#[derive(Clone, Copy, Debug)]
pub enum MatrixStorage<'a> {
    /// Planes in tile order.
    Tiled(&'a TiledMatrix),
    /// Rows of floats.
    Rows {
        /// Element type.
        dtype: FloatType,
        /// Out-features.
        n: usize,
        /// In-features.
        k: usize,
    },
    /// Rows of ggml blocks.
    Raw {
        /// Format of the blocks.
        format: &'static RawFormat,
        /// Out-features.
        n: usize,
        /// In-features.
        k: usize,
    },
}

impl VectorRef {
    /// A reference to `len` elements from `first` on, if the tensor is a row-major one of floats.
    pub(super) fn new(
        index: usize,
        expert: u64,
        tensor: &Tensor,
        first: usize,
        len: usize,
    ) -> Result<Self, GraphError> {
        let Some(dtype) = float_type(tensor) else {
            return Err(storage_error(tensor, "vectors of row-major f32, f16 and bf16"));
        };
        Ok(Self { tensor: index, expert, first, len, dtype })
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Stored type of an element.
    pub fn dtype(&self) -> FloatType {
        self.dtype
    }

    /// Offset in the image of the first element.
    ///
    /// # Panics
    /// Where the bundle is not the one that the reference was resolved against.
    pub fn offset(&self, bundle: &Bundle) -> u64 {
        let (tensor, _) = bundle.tensor_at(self.tensor);
        tensor.plane_offset(&tensor.planes[0], self.expert) + (self.first * self.dtype.bytes()) as u64
    }

    /// The elements as f32, exactly.
    ///
    /// # Panics
    /// Where `out` has another length, or the bundle is not the one that the reference was resolved against.
    pub fn widen<A: HostArena>(&self, loaded: &LoadedBundle<A>, out: &mut [f32]) {
        let size = self.dtype.bytes();
        let bytes = loaded.tensor_at(self.tensor).plane(0, self.expert);
        self.dtype.widen(&bytes[self.first * size..(self.first + self.len) * size], out);
    }
}
