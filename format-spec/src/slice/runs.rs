//! From rows and columns to byte ranges of planes.

use serde::Serialize;

use super::rules::{Section, SliceError, Split};
use crate::codec::ggml::raw;
use crate::encoding::Span;
use crate::geometry::Geometry;
use crate::layout::{PlaneKind, TiledMatrix};
use crate::manifest::{Layout, Tensor};
use crate::tile::{TILE_K, TILE_N};

/// Byte ranges at a stride: `offset + i * stride .. offset + i * stride + len` for `i` below `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// First byte in the address space.
    pub offset: u64,
    /// Bytes of one range.
    pub len: u64,
    /// Number of ranges.
    pub count: u64,
    /// Distance between the starts of two ranges.
    pub stride: u64,
}

/// The ranges of one plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlaneRuns {
    /// Name of the plane.
    pub plane: String,
    /// Its ranges, in order of the parts.
    pub runs: Vec<Run>,
}

/// What the error of an axis says.
struct Unit {
    name: &'static str,
    size: u64,
}

/// The byte ranges of a tensor's sections, per plane.
pub(super) fn planes(
    tensor: &Tensor,
    geometry: &Geometry,
    split: Split,
    sections: &[Section],
    degree: u64,
) -> Result<Vec<PlaneRuns>, SliceError> {
    let mut all = Vec::with_capacity(tensor.planes.len());
    for (index, plane) in tensor.planes.iter().enumerate() {
        let runs = if split == Split::Replicated {
            vec![Run { offset: 0, len: plane.size, count: 1, stride: plane.size }]
        } else {
            match geometry {
                Geometry::Rows { row_bytes, .. } => rows(tensor, *row_bytes, split, sections, degree)?,
                Geometry::Tiled(matrix) => {
                    let codes = matrix.spec.codes.len();
                    let kind = if index < codes { PlaneKind::Code(index) } else { PlaneKind::Scale(index - codes) };
                    tiled(tensor, matrix, kind, split, sections, degree)?
                }
            }
        };
        let runs = runs.into_iter().map(|r| Run { offset: plane.offset + r.offset, ..r }).collect();
        all.push(PlaneRuns { plane: plane.name.clone(), runs });
    }
    Ok(all)
}

/// Refuses a section whose start or length is not whole units; the last section of an axis may end short.
fn whole(
    tensor: &Tensor,
    section: &Section,
    split: Split,
    extent: u64,
    degree: u64,
    unit: &Unit,
) -> Result<(), SliceError> {
    let ends = section.start + section.len == extent;
    if section.start.is_multiple_of(unit.size) && (section.len.is_multiple_of(unit.size) || ends) {
        return Ok(());
    }
    Err(SliceError::Axis {
        tensor: tensor.name.clone(),
        axis: if split == Split::Columns { "columns" } else { "rows" },
        extent,
        degree,
        unit: unit.name,
        unit_size: unit.size,
    })
}

/// Ranges of a plane of rows.
fn rows(
    tensor: &Tensor,
    row_bytes: u64,
    split: Split,
    sections: &[Section],
    degree: u64,
) -> Result<Vec<Run>, SliceError> {
    let columns: u64 = tensor.shape.iter().skip(1).product();
    // Elements along K that cannot be taken apart.
    let unit = match &tensor.layout {
        Layout::GgmlRaw { ggml_type, .. } => raw::by_name(ggml_type).map_or(columns, |f| f.weights as u64),
        _ => 1,
    };
    let mut runs = Vec::with_capacity(sections.len());
    for section in sections {
        let part = &tensor.parts[section.part];
        let first = part.row_start * row_bytes;
        runs.push(match split {
            Split::Columns => {
                whole(tensor, section, split, columns, degree, &Unit { name: "block", size: unit })?;
                let bytes = |elements: u64| elements * row_bytes / columns.max(1);
                let (offset, len) = (first + bytes(section.start), bytes(section.len));
                Run { offset, len, count: part.rows, stride: row_bytes }
            }
            _ => {
                let len = section.len * row_bytes;
                Run { offset: first + section.start * row_bytes, len, count: 1, stride: len }
            }
        });
    }
    Ok(runs)
}

/// Ranges of a plane of a tiled matrix, relative to the plane.
fn tiled(
    tensor: &Tensor,
    matrix: &TiledMatrix,
    kind: PlaneKind,
    split: Split,
    sections: &[Section],
    degree: u64,
) -> Result<Vec<Run>, SliceError> {
    let once = |offset: u64, len: u64| Run { offset, len, count: 1, stride: len };
    let all = once(0, matrix.plane_bytes(kind));
    let (tile, tile_k) = (TILE_N as u64, TILE_K as u64);
    if split == Split::Columns {
        // Every part has the same columns.
        let Some(section) = sections.first() else { return Ok(Vec::new()) };
        let check = |name, size| whole(tensor, section, split, matrix.k, degree, &Unit { name, size });
        check("tile", tile_k)?;
        let span = match kind {
            PlaneKind::Code(i) => {
                let row = matrix.tiles_n() * matrix.spec.codes[i].tile_bytes() as u64;
                return Ok(vec![once(section.start / tile_k * row, section.len.div_ceil(tile_k) * row)]);
            }
            PlaneKind::Scale(i) => &matrix.spec.scales[i],
        };
        let size = span.dtype.bytes() as u64;
        return Ok(vec![match span.span {
            Span::Group | Span::Super(_) => {
                let unit = if let Span::Super(s) = span.span { u64::from(s) } else { matrix.group_size };
                check("group", unit)?;
                let row = matrix.padded_n() * size;
                once(section.start / unit * row, section.len.div_ceil(unit) * row)
            }
            Span::Block => {
                check("block", matrix.block[1])?;
                let columns = matrix.scale_columns(span) * size;
                let (offset, len) =
                    (section.start / matrix.block[1] * size, section.len.div_ceil(matrix.block[1]) * size);
                Run { offset, len, count: matrix.plane_bytes(kind) / columns.max(1), stride: columns }
            }
            Span::Channel | Span::Part => all,
        }]);
    }
    let mut runs = Vec::with_capacity(sections.len());
    for (i, section) in sections.iter().enumerate() {
        let part = &matrix.parts[section.part];
        let check = |name, size| whole(tensor, section, split, part.rows, degree, &Unit { name, size });
        check("tile", tile)?;
        let first = (part.start + section.start) / tile;
        let tiles = section.len.div_ceil(tile);
        runs.push(match kind {
            PlaneKind::Code(i) => {
                let bytes = matrix.spec.codes[i].tile_bytes() as u64;
                let stride = matrix.tiles_n() * bytes;
                Run { offset: first * bytes, len: tiles * bytes, count: matrix.tiles_k(), stride }
            }
            PlaneKind::Scale(s) => {
                let plane = &matrix.spec.scales[s];
                let size = plane.dtype.bytes() as u64;
                let width = tile * size;
                match plane.span {
                    // The order of columns is a permutation within every 64, so whole tiles are contiguous.
                    Span::Group | Span::Super(_) => {
                        let (count, stride) = (matrix.scale_columns(plane), matrix.padded_n() * size);
                        Run { offset: first * width, len: tiles * width, count, stride }
                    }
                    Span::Channel => once(first * width, tiles * width),
                    Span::Part if i > 0 && sections[i - 1].part == section.part => continue,
                    Span::Part => once(section.part as u64 * size, size),
                    Span::Block => {
                        check("block", matrix.block[0])?;
                        let columns = matrix.scale_columns(plane) * size;
                        let above: u64 = matrix.parts[..section.part].iter().map(|p| matrix.block_rows(p)).sum();
                        let (start, count) = (section.start / matrix.block[0], section.len.div_ceil(matrix.block[0]));
                        once((above + start) * columns, count * columns)
                    }
                }
            }
        });
    }
    Ok(runs)
}
