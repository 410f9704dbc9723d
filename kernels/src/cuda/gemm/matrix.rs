//! Matrices on the device, as a bundle stores them.

use super::params::{self, Raw, Rows, Tiled};
use super::small::Reading;
use crate::cuda::{CudaContext, CudaError, DeviceMemory};
use crate::weight::{FloatType, Weight, WeightError};
use std::sync::Arc;
use vt_bundle::codec::ggml::raw::RawFormat;
use vt_bundle::layout::{PLANE_ALIGN, TiledMatrix};

/// A run of bytes on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePlane {
    /// First byte; a multiple of 16.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
}

/// One matrix, N out-features by K in-features, somewhere in memory that its user keeps allocated.
#[derive(Clone, Debug)]
pub struct DeviceMatrix {
    pub(super) form: Form,
    bytes: u64,
    /// Owned where [`DeviceMatrix::upload`] allocated it.
    _memory: Option<Arc<DeviceMemory>>,
}

#[derive(Clone, Debug)]
pub(super) enum Form {
    Tiled { matrix: Arc<TiledMatrix>, params: Box<Tiled>, reading: Option<Reading> },
    Rows(Rows),
    Raw { format: &'static RawFormat, params: Raw },
}

impl DeviceMatrix {
    /// A matrix in tile order; planes in the order of [`TiledMatrix::planes`].
    ///
    /// # Errors
    /// [`WeightError`] where the planes are not those of the geometry, are not aligned, or have no kernel.
    pub fn tiled(matrix: &Arc<TiledMatrix>, planes: &[DevicePlane]) -> Result<Self, WeightError> {
        let decode = matrix.spec.decode;
        let expected = matrix.spec.codes.len() + matrix.spec.scales.len();
        if planes.len() != expected {
            return Err(WeightError::Planes { decode, found: planes.len(), expected });
        }
        for (kind, plane) in matrix.planes().zip(planes) {
            let expected = matrix.plane_bytes(kind);
            if plane.bytes != expected {
                let found = usize::try_from(plane.bytes).unwrap_or(usize::MAX);
                return Err(WeightError::PlaneLength { decode, plane: matrix.plane_name(kind), found, expected });
            }
            check_alignment(decode, plane.address)?;
        }
        let addresses: Vec<u64> = planes.iter().map(|plane| plane.address).collect();
        let params = Box::new(Tiled::new(matrix, &addresses)?);
        let bytes = planes.iter().map(|plane| plane.bytes).sum();
        Ok(Self {
            form: Form::Tiled { matrix: Arc::clone(matrix), params, reading: Reading::find(matrix) },
            bytes,
            _memory: None,
        })
    }

    /// Rows of floats, `[n, k]` row-major.
    ///
    /// # Errors
    /// [`WeightError::RowsLength`] or [`WeightError::Alignment`].
    pub fn rows(dtype: FloatType, n: usize, k: usize, data: DevicePlane) -> Result<Self, WeightError> {
        let bytes = n.checked_mul(k).and_then(|e| e.checked_mul(dtype.bytes()));
        let (Ok(short_n), Ok(short_k), true) =
            (u32::try_from(n), u32::try_from(k), bytes.is_some_and(|b| b as u64 == data.bytes))
        else {
            let found = usize::try_from(data.bytes).unwrap_or(usize::MAX);
            return Err(WeightError::RowsLength { dtype, n, k, found });
        };
        check_alignment("row-major", data.address)?;
        let rows = Rows { data: data.address, dtype: params::float_type(dtype), n: short_n, k: short_k };
        Ok(Self { form: Form::Rows(rows), bytes: data.bytes, _memory: None })
    }

    /// Rows of raw ggml blocks.
    ///
    /// # Errors
    /// [`WeightError`] where the length is not that of `n` rows of whole blocks, or the type has no kernel.
    pub fn raw(format: &'static RawFormat, n: usize, k: usize, data: DevicePlane) -> Result<Self, WeightError> {
        let decode = format.decode_name;
        let bytes = (k / format.weights).checked_mul(format.bytes).and_then(|row| row.checked_mul(n));
        let whole = k > 0 && k.is_multiple_of(format.weights) && bytes.is_some_and(|b| b as u64 == data.bytes);
        let (Ok(short_n), Ok(short_k), true) = (u32::try_from(n), u32::try_from(k), whole) else {
            let found = usize::try_from(data.bytes).unwrap_or(usize::MAX);
            return Err(WeightError::RawLength { decode, n, k, weights: format.weights, found });
        };
        check_alignment(decode, data.address)?;
        let number = params::raw_format(format).ok_or(WeightError::NoKernel { decode })?;
        let params = Raw {
            blocks: data.address,
            grid: 0,
            format: number,
            weights: format.weights as u32,
            bytes: format.bytes as u32,
            n: short_n,
            k: short_k,
        };
        Ok(Self { form: Form::Raw { format, params }, bytes: data.bytes, _memory: None })
    }

    /// Copies a matrix of the host into memory of its own and waits; for tests and measurements.
    ///
    /// # Errors
    /// [`CudaError`]; [`CudaError::Unsupported`] where the matrix has no kernel.
    pub fn upload(context: &Arc<CudaContext>, weight: &Weight<'_>) -> Result<Self, CudaError> {
        Self::upload_experts(context, std::slice::from_ref(weight)).map(|(matrix, _)| matrix)
    }

    /// Copies matrices of one geometry into records one after the other and waits: the first of them, and the bytes from a
    /// record to the next. For tests and measurements.
    ///
    /// # Errors
    /// As for [`DeviceMatrix::upload`].
    pub fn upload_experts(context: &Arc<CudaContext>, experts: &[Weight<'_>]) -> Result<(Self, u64), CudaError> {
        let unsupported = |what: String| CudaError::Unsupported { op: "gemm", what };
        let first = experts.first().ok_or_else(|| unsupported("no experts".to_owned()))?;
        let round = |bytes: usize| (bytes as u64).next_multiple_of(PLANE_ALIGN);
        let lengths = |weight: &Weight<'_>| weight.planes().iter().map(|plane| plane.len()).collect::<Vec<_>>();
        let stride = lengths(first).into_iter().map(round).sum::<u64>();
        let memory = Arc::new(DeviceMemory::new(context, stride * experts.len() as u64, "matrices")?);
        let mut planes = Vec::new();
        for (e, expert) in experts.iter().enumerate() {
            if lengths(expert) != lengths(first) {
                return Err(unsupported(format!("expert {e} of another size than expert 0")));
            }
            let mut offset = stride * e as u64;
            for plane in expert.planes() {
                memory.write(offset, plane)?;
                planes.push(DevicePlane { address: memory.address() + offset, bytes: plane.len() as u64 });
                offset += round(plane.len());
            }
        }
        let made = match first {
            Weight::Tiled(w) => Self::tiled(&Arc::new(w.matrix().clone()), &planes[..first.planes().len()]),
            Weight::Rows(w) => Self::rows(w.dtype, w.n, w.k, planes[0]),
            Weight::Raw(w) => Self::raw(w.format, w.n, w.k, planes[0]),
        };
        let matrix = made.map_err(|error| unsupported(error.to_string()))?;
        Ok((Self { _memory: Some(memory), ..matrix }, stride))
    }

    /// In-features.
    pub fn k(&self) -> u32 {
        match &self.form {
            Form::Tiled { params, .. } => params.k,
            Form::Rows(rows) => rows.k,
            Form::Raw { params, .. } => params.k,
        }
    }

    /// Columns of a product with this matrix, padding included.
    pub fn padded_n(&self) -> u32 {
        match &self.form {
            Form::Tiled { params, .. } => params.n,
            Form::Rows(rows) => rows.n,
            Form::Raw { params, .. } => params.n,
        }
    }

    /// Geometry of a matrix in tile order.
    pub fn geometry(&self) -> Option<&TiledMatrix> {
        match &self.form {
            Form::Tiled { matrix, .. } => Some(matrix),
            Form::Rows(_) | Form::Raw { .. } => None,
        }
    }

    /// Type and address of a matrix in rows of floats.
    pub(in crate::cuda) fn float_rows(&self) -> Option<(FloatType, u64)> {
        match &self.form {
            Form::Rows(rows) => Some((params::float_type_of(rows.dtype)?, rows.data)),
            Form::Tiled { .. } | Form::Raw { .. } => None,
        }
    }

    /// Bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn check_alignment(decode: &'static str, address: u64) -> Result<(), WeightError> {
    if address.is_multiple_of(16) { Ok(()) } else { Err(WeightError::Alignment { decode, address }) }
}
