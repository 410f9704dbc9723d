//! From a tensor of the manifest to the geometry of its bytes, with every number checked.

use crate::codec::ggml::raw;
use crate::encoding;
use crate::layout::{LayoutError, PLANE_ALIGN, RECORD_ALIGN, TiledMatrix};
use crate::manifest::{Layout, Plane, Tensor};

/// The checked geometry of a tensor.
#[derive(Clone, Debug)]
pub enum Geometry {
    /// Rows of `row_bytes` bytes each: row-major elements or raw ggml blocks.
    Rows {
        /// Rows of all parts.
        rows: u64,
        /// Bytes of one row.
        row_bytes: u64,
    },
    /// Marlin tiles.
    Tiled(TiledMatrix),
}

impl Geometry {
    /// Name, element type and size of each plane, in order.
    pub fn planes(&self, layout: &Layout) -> Vec<(String, String, u64)> {
        match self {
            Geometry::Rows { rows, row_bytes } => {
                let (name, dtype) = match layout {
                    Layout::RowMajor { dtype } => ("data", dtype.as_str()),
                    _ => ("blocks", "u8"),
                };
                vec![(name.to_owned(), dtype.to_owned(), rows * row_bytes)]
            }
            Geometry::Tiled(m) => m
                .planes()
                .map(|p| (m.plane_name(p).to_owned(), m.plane_dtype(p).to_owned(), m.plane_bytes(p)))
                .collect(),
        }
    }
}

/// Bytes of one element of a plain type, in the manifest's spelling.
pub fn dtype_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "bool" | "u8" | "i8" | "f8_e4m3" | "f8_e5m2" | "f8_e8m0" => 1,
        "u16" | "i16" | "f16" | "bf16" => 2,
        "u32" | "i32" | "f32" => 4,
        "u64" | "i64" | "f64" => 8,
        _ => return None,
    })
}

/// The `decode` name of a plain element type.
pub fn plain_decode(dtype: &str) -> String {
    format!("plain.{dtype}@1")
}

/// Why a tensor of a manifest is impossible.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// Impossible sizes.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Something else, in words with the numbers.
    #[error("{0}")]
    Invalid(String),
}

impl Tensor {
    /// Checks the tensor's description against itself and against the size of its address space.
    ///
    /// # Errors
    /// [`GeometryError`] with what was found and what was expected.
    pub fn geometry(&self, space_bytes: u64) -> Result<Geometry, GeometryError> {
        let invalid = |text: String| Err(GeometryError::Invalid(text));
        let part_rows = self.parts.iter().try_fold(0u64, |sum, p| sum.checked_add(p.rows));
        let geometry = match &self.layout {
            Layout::RowMajor { .. } | Layout::GgmlRaw { .. } => {
                let rows = self.shape.first().copied().unwrap_or(1);
                if part_rows != Some(rows) {
                    return invalid(format!(
                        "its parts have {part_rows:?} rows, its shape {:?} has {rows}",
                        self.shape
                    ));
                }
                Geometry::Rows { rows, row_bytes: self.row_bytes(rows)? }
            }
            Layout::Marlin { encoding, group_size, block, padded_shape } => {
                let Some(spec) = encoding::find(&self.decode) else {
                    return invalid(format!("decode {:?} is unknown to this version", self.decode));
                };
                if spec.encoding != encoding {
                    return invalid(format!("encoding {encoding:?} does not belong to decode {:?}", self.decode));
                }
                let &[n, k] = &self.shape[..] else {
                    return invalid(format!("shape {:?} is not [N, K]", self.shape));
                };
                let rows: Vec<u64> = self.parts.iter().map(|p| p.rows).collect();
                let matrix = TiledMatrix::new(spec, k, &rows, group_size.unwrap_or(0), block.unwrap_or([0, 0]))?;
                if matrix.n() != n || [matrix.padded_n(), matrix.padded_k()] != *padded_shape {
                    return invalid(format!(
                        "shape {:?} padded to {padded_shape:?}, its parts give [{}, {k}] padded to [{}, {}]",
                        self.shape,
                        matrix.n(),
                        matrix.padded_n(),
                        matrix.padded_k()
                    ));
                }
                Geometry::Tiled(matrix)
            }
        };
        self.check_parts(&geometry)?;
        self.check_planes(&geometry, space_bytes)?;
        Ok(geometry)
    }

    fn row_bytes(&self, rows: u64) -> Result<u64, GeometryError> {
        let overflow = || GeometryError::Invalid(format!("shape {:?} overflows", self.shape));
        let row_bytes = match &self.layout {
            Layout::RowMajor { dtype } => {
                let Some(size) = dtype_bytes(dtype) else {
                    return Err(GeometryError::Invalid(format!("element type {dtype:?} is unknown to this version")));
                };
                if self.decode != plain_decode(dtype) {
                    return Err(GeometryError::Invalid(format!("decode {:?} does not belong to {dtype}", self.decode)));
                }
                let row = self.shape.iter().skip(1).try_fold(size, |product, &axis| product.checked_mul(axis));
                row.ok_or_else(overflow)?
            }
            Layout::GgmlRaw { ggml_type, row_bytes } => {
                let invalid = |text: String| GeometryError::Invalid(text);
                let format = raw::by_name(ggml_type)
                    .ok_or_else(|| invalid(format!("ggml type {ggml_type:?} is unknown to this version")))?;
                if self.decode != format.decode_name {
                    return Err(invalid(format!("decode {:?} does not belong to {ggml_type}", self.decode)));
                }
                let k = self.shape.iter().skip(1).try_fold(1u64, |product, &axis| product.checked_mul(axis));
                let weights = format.weights as u64;
                let expected = k.filter(|k| k.is_multiple_of(weights)).map(|k| k / weights);
                let expected = expected.and_then(|blocks| blocks.checked_mul(format.bytes as u64));
                if expected != Some(*row_bytes) {
                    let shape = &self.shape;
                    let text = format!("rows of {row_bytes} bytes, {ggml_type} of shape {shape:?} gives {expected:?}");
                    return Err(invalid(text));
                }
                *row_bytes
            }
            Layout::Marlin { .. } => 0,
        };
        rows.checked_mul(row_bytes).ok_or_else(overflow)?;
        Ok(row_bytes)
    }

    fn check_parts(&self, geometry: &Geometry) -> Result<(), GeometryError> {
        let mut expected = 0;
        for (i, part) in self.parts.iter().enumerate() {
            let start = match geometry {
                Geometry::Rows { .. } => expected,
                Geometry::Tiled(m) => m.parts[i].start,
            };
            if part.row_start != start {
                let found = part.row_start;
                return Err(GeometryError::Invalid(format!(
                    "part {} starts at row {found}, expected {start}",
                    part.name
                )));
            }
            if !part.row_order.fits(part.rows) {
                let text =
                    format!("row order {:?} does not fit the {} rows of {}", part.row_order, part.rows, part.name);
                return Err(GeometryError::Invalid(text));
            }
            expected += part.rows;
        }
        Ok(())
    }

    fn check_planes(&self, geometry: &Geometry, space_bytes: u64) -> Result<(), GeometryError> {
        let expected = geometry.planes(&self.layout);
        let described: Vec<_> = self.planes.iter().map(|p| (p.name.clone(), p.dtype.clone(), p.size)).collect();
        if expected != described {
            return Err(GeometryError::Invalid(format!("its planes are {described:?}, its layout gives {expected:?}")));
        }
        let (first, end) = match &self.experts {
            None => (0, space_bytes),
            Some(e) => {
                let record_end = e.record_offset.checked_add(e.record_size);
                let last = match (e.stride, &e.offsets) {
                    (Some(stride), None) => {
                        let whole = stride >= e.record_size.max(RECORD_ALIGN) && stride.is_multiple_of(RECORD_ALIGN);
                        e.count
                            .checked_sub(1)
                            .filter(|_| whole)
                            .and_then(|n| n.checked_mul(stride))
                            .and_then(|distance| distance.checked_add(record_end?))
                    }
                    (None, Some(list)) if list.len() as u64 == e.count && list.first() == Some(&e.record_offset) => {
                        let aligned = list.iter().all(|o| o.is_multiple_of(RECORD_ALIGN));
                        list.iter().max().filter(|_| aligned).and_then(|o| o.checked_add(e.record_size))
                    }
                    _ => None,
                };
                let inside = last.is_some_and(|end| end <= space_bytes) && e.record_offset.is_multiple_of(RECORD_ALIGN);
                match record_end.filter(|_| inside) {
                    Some(end) => (e.record_offset, end),
                    None => {
                        let text = format!("its experts {e:?} do not fit the {space_bytes} bytes of the image");
                        return Err(GeometryError::Invalid(text));
                    }
                }
            }
        };
        for Plane { name, offset, size, .. } in &self.planes {
            let inside = *offset >= first && offset.checked_add(*size).is_some_and(|e| e <= end);
            if !inside || !offset.is_multiple_of(PLANE_ALIGN) {
                let text =
                    format!("plane {name} at {offset} of {size} bytes is misaligned or outside {first} to {end}");
                return Err(GeometryError::Invalid(text));
            }
        }
        Ok(())
    }

    /// Offset of a plane for one expert (0 where there are none).
    pub fn plane_offset(&self, plane: &Plane, expert: u64) -> u64 {
        match &self.experts {
            None => plane.offset,
            Some(e) => match &e.offsets {
                None => plane.offset + expert * e.stride.unwrap_or(0),
                Some(list) => plane.offset - e.record_offset + list[expert as usize],
            },
        }
    }

    /// Number of experts, 1 for a tensor without.
    pub fn expert_count(&self) -> u64 {
        self.experts.as_ref().map_or(1, |e| e.count)
    }
}
