//! Geometry: the sizes and the order of every plane of a tensor, in one place.
//!
//! Axes: N out-features (rows of the Hugging Face orientation), K in-features. The writer, the reader, the planner, the
//! kernels and the tests compute sizes with this module only.

use crate::encoding::{EncodingSpec, ScalePlane, Span};
use crate::tile::{CodePlane, TILE_K, TILE_N, round_up};

pub use crate::encoding::MAX_SCALE_PLANES;

/// Every plane and every tensor starts at a multiple of this many bytes.
pub const PLANE_ALIGN: u64 = 256;
/// Every expert record starts at a multiple of this many bytes.
pub const RECORD_ALIGN: u64 = 4096;
/// Largest extent of an axis.
pub const MAX_AXIS: u64 = 1 << 31;
/// Largest number of codes in a padded matrix; keeps every plane's size in bytes within `u64`.
pub const MAX_CODES: u64 = 1 << 56;

/// What can be wrong with the geometry of a matrix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// An axis is zero or beyond [`MAX_AXIS`].
    #[error("axis {axis} is {found}, expected 1 to {MAX_AXIS}")]
    Axis {
        /// N or K.
        axis: char,
        /// Its extent.
        found: u64,
    },
    /// The matrix has more than [`MAX_CODES`] codes.
    #[error("{n} x {k} codes are more than {MAX_CODES}")]
    TooLarge {
        /// Padded out-features.
        n: u64,
        /// In-features.
        k: u64,
    },
    /// K is not a whole number of groups.
    #[error("K = {k} is not a multiple of the group size {group_size}")]
    Group {
        /// In-features.
        k: u64,
        /// Codes per scale.
        group_size: u64,
    },
    /// The group or block size is zero or too large.
    #[error("group or block size {found} is out of range")]
    GroupSize {
        /// The size.
        found: u64,
    },
}

/// One part of a fused matrix: a run of rows that was a tensor of its own in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartRows {
    /// First row in the padded N axis, a multiple of 64.
    pub start: u64,
    /// Logical rows.
    pub rows: u64,
}

impl PartRows {
    /// Rows including the padding to the tile.
    pub const fn padded(&self) -> u64 {
        self.rows.div_ceil(TILE_N as u64) * TILE_N as u64
    }
}

/// A plane of a tiled matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneKind {
    /// Code bits, an index into [`EncodingSpec::codes`].
    Code(usize),
    /// Scales, an index into [`EncodingSpec::scales`].
    Scale(usize),
}

/// A matrix in tile order: the parts of a fused projection one after the other along N, each padded to the tile.
#[derive(Clone, Debug)]
pub struct TiledMatrix {
    /// Encoding.
    pub spec: &'static EncodingSpec,
    /// In-features.
    pub k: u64,
    /// Codes per element of [`Span::Group`] planes; 0 if the encoding has none.
    pub group_size: u64,
    /// Rows and columns per element of [`Span::Block`] planes; zeros if the encoding has none.
    pub block: [u64; 2],
    /// Parts in order of `start`.
    pub parts: Vec<PartRows>,
}

impl TiledMatrix {
    /// Places parts of `part_rows` rows each, in order.
    ///
    /// # Errors
    /// [`LayoutError`] where an axis, a group or a block has an impossible size.
    pub fn new(
        spec: &'static EncodingSpec,
        k: u64,
        part_rows: &[u64],
        group_size: u64,
        block: [u64; 2],
    ) -> Result<Self, LayoutError> {
        let axis = |axis, found| {
            if found == 0 || found > MAX_AXIS { Err(LayoutError::Axis { axis, found }) } else { Ok(()) }
        };
        axis('K', k)?;
        axis('N', part_rows.iter().try_fold(0u64, |sum, &n| sum.checked_add(n)).unwrap_or(u64::MAX))?;
        let mut parts = Vec::with_capacity(part_rows.len());
        let mut start = 0;
        for &rows in part_rows {
            axis('N', rows)?;
            let part = PartRows { start, rows };
            start += part.padded();
            parts.push(part);
        }
        axis('N', start)?;
        if k * start > MAX_CODES {
            return Err(LayoutError::TooLarge { n: start, k });
        }
        for plane in spec.scales {
            match plane.span {
                Span::Group if group_size == 0 || group_size > MAX_AXIS => {
                    return Err(LayoutError::GroupSize { found: group_size });
                }
                Span::Group if !k.is_multiple_of(group_size) => {
                    return Err(LayoutError::Group { k, group_size });
                }
                Span::Super(span) if !k.is_multiple_of(u64::from(span)) => {
                    return Err(LayoutError::Group { k, group_size: u64::from(span) });
                }
                Span::Block => {
                    for found in block {
                        if found == 0 || found > MAX_AXIS {
                            return Err(LayoutError::GroupSize { found });
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(Self { spec, k, group_size, block, parts })
    }

    /// Logical out-features: the sum of the parts' rows.
    pub fn n(&self) -> u64 {
        self.parts.iter().map(|p| p.rows).sum()
    }

    /// Out-features including each part's padding to the tile.
    pub fn padded_n(&self) -> u64 {
        self.parts.last().map_or(0, |p| p.start + p.padded())
    }

    /// In-features including the padding to the tile.
    pub fn padded_k(&self) -> u64 {
        self.k.div_ceil(TILE_K as u64) * TILE_K as u64
    }

    /// Tiles along K.
    pub fn tiles_k(&self) -> u64 {
        self.padded_k() / TILE_K as u64
    }

    /// Tiles along N.
    pub fn tiles_n(&self) -> u64 {
        self.padded_n() / TILE_N as u64
    }

    /// The planes in their order in the image: codes, then scales.
    pub fn planes(&self) -> impl Iterator<Item = PlaneKind> + use<> {
        let spec = self.spec;
        (0..spec.codes.len()).map(PlaneKind::Code).chain((0..spec.scales.len()).map(PlaneKind::Scale))
    }

    /// Manifest name of a plane.
    pub fn plane_name(&self, plane: PlaneKind) -> &'static str {
        match plane {
            PlaneKind::Code(i) => self.spec.codes[i].name,
            PlaneKind::Scale(i) => self.spec.scales[i].name,
        }
    }

    /// Manifest element type of a plane: `u32` words for codes.
    pub fn plane_dtype(&self, plane: PlaneKind) -> &'static str {
        match plane {
            PlaneKind::Code(_) => "u32",
            PlaneKind::Scale(i) => self.spec.scales[i].dtype.name(),
        }
    }

    /// Elements of a scale plane along K, for one column, channel, part or row of blocks.
    pub fn scale_columns(&self, plane: &ScalePlane) -> u64 {
        match plane.span {
            Span::Group => self.k.div_ceil(self.group_size),
            Span::Super(span) => self.k.div_ceil(u64::from(span)),
            Span::Channel | Span::Part => 1,
            Span::Block => self.k.div_ceil(self.block[1]),
        }
    }

    /// Rows of blocks of one part.
    pub fn block_rows(&self, part: &PartRows) -> u64 {
        part.rows.div_ceil(self.block[0])
    }

    /// Size of a plane in bytes.
    pub fn plane_bytes(&self, plane: PlaneKind) -> u64 {
        match plane {
            PlaneKind::Code(i) => self.tiles_k() * self.tiles_n() * self.spec.codes[i].tile_bytes() as u64,
            PlaneKind::Scale(i) => {
                let scale = &self.spec.scales[i];
                let elements = match scale.span {
                    Span::Group | Span::Super(_) => self.scale_columns(scale) * self.padded_n(),
                    Span::Channel => self.padded_n(),
                    Span::Part => self.parts.len() as u64,
                    Span::Block => {
                        self.parts.iter().map(|p| self.block_rows(p)).sum::<u64>() * self.scale_columns(scale)
                    }
                };
                elements * scale.dtype.bytes() as u64
            }
        }
    }

    /// Index of the element of a scale plane for padded row `row` and element `column` along K.
    ///
    /// `row` counts from the start of the matrix (part start + row within the part).
    pub fn scale_index(&self, plane: &ScalePlane, row: u64, column: u64) -> u64 {
        let order = plane.order();
        match plane.span {
            Span::Group | Span::Super(_) => column * self.padded_n() + order.position(row as usize) as u64,
            Span::Channel => order.position(row as usize) as u64,
            Span::Part => self.part_of(row) as u64,
            Span::Block => {
                let at = self.part_of(row);
                let above: u64 = self.parts[..at].iter().map(|p| self.block_rows(p)).sum();
                let within = (row - self.parts[at].start) / self.block[0];
                (above + within) * self.scale_columns(plane) + column
            }
        }
    }

    /// Padded row (for a block, its first one) and element along K of the `i`-th element of a scale plane: the inverse
    /// of [`TiledMatrix::scale_index`].
    pub fn scale_place(&self, plane: &ScalePlane, i: u64) -> (u64, u64) {
        let order = plane.order();
        match plane.span {
            Span::Group | Span::Super(_) => {
                let width = self.padded_n();
                (order.column((i % width) as usize) as u64, i / width)
            }
            Span::Channel => (order.column(i as usize) as u64, 0),
            Span::Part => (self.parts[i as usize].start, 0),
            Span::Block => {
                let columns = self.scale_columns(plane);
                let (mut block_row, column) = (i / columns, i % columns);
                for part in &self.parts {
                    let rows = self.block_rows(part);
                    if block_row < rows {
                        return (part.start + block_row * self.block[0], column);
                    }
                    block_row -= rows;
                }
                // Beyond the plane; callers stay within `plane_bytes`.
                (0, column)
            }
        }
    }

    /// Byte offset of a tile within a code plane.
    pub fn tile_offset(&self, plane: &CodePlane, tile_k: u64, tile_n: u64) -> u64 {
        (tile_k * self.tiles_n() + tile_n) * plane.tile_bytes() as u64
    }

    /// Index of the part that holds a padded row.
    pub fn part_of(&self, row: u64) -> usize {
        self.parts.partition_point(|p| p.start <= row).saturating_sub(1)
    }

    /// Size of all planes, each rounded up to [`PLANE_ALIGN`].
    pub fn bytes(&self) -> u64 {
        self.planes().map(|p| round_up(self.plane_bytes(p), PLANE_ALIGN).unwrap_or(u64::MAX)).sum()
    }
}
