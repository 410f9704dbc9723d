//! The plan: every output tensor with its layout, offset, size and inputs, as a pure function of names, shapes and
//! configuration. It is complete before the first weight byte is read; `--dry-run` prints it.

mod experts;
mod fuse;
mod place;

use std::collections::BTreeMap;

use vt_bundle::Geometry;
use vt_bundle::codec::Codec;
use vt_bundle::encoding::Span;
use vt_bundle::geometry::plain_decode;
use vt_bundle::layout::{LayoutError, TiledMatrix};
use vt_bundle::manifest::{DecodeSummary, Layout, Part, Placement, Quantization, ScaleExactness, Tensor};

use crate::catalog::{Catalog, Entry, Storage};

/// One output tensor.
pub struct PlannedTensor {
    /// Its record in the manifest, offsets included.
    pub tensor: Tensor,
    /// Its checked geometry.
    pub geometry: Geometry,
    /// The entries that it is made of: `[experts][parts]`, one expert for a tensor without.
    pub sources: Vec<Vec<Entry>>,
}

/// Where a plane of one expert lies in its address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneSpan {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Index into [`Plan::tensors`].
    pub tensor: usize,
    /// Index into the tensor's planes.
    pub plane: usize,
    /// Expert, 0 for a tensor without.
    pub expert: u64,
}

/// A record of one expert: the unit that has a hash of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordSpan {
    /// Address space that it lies in.
    pub placement: Placement,
    /// First byte.
    pub offset: u64,
    /// Bytes without the padding to the stride.
    pub size: u64,
}

/// Everything that will be written.
pub struct Plan {
    /// Tensors in the order of their offsets; the image first, then the cold segments.
    pub tensors: Vec<PlannedTensor>,
    /// Bytes of the device image.
    pub image_bytes: u64,
    /// Bytes of the cold segments.
    pub cold_bytes: u64,
    /// Expert records, in order of their hashes: those of the image, then those of the cold segments.
    pub records: Vec<RecordSpan>,
    /// Notes for the user.
    pub warnings: Vec<String>,
}

/// Why a checkpoint cannot be planned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A matrix has an impossible geometry.
    #[error("tensor {tensor}: {source}")]
    Layout {
        /// The tensor.
        tensor: String,
        /// Why.
        source: LayoutError,
    },
    /// Two source tensors would have the same name in the bundle.
    #[error("tensor {tensor}: two source tensors map to this name ({first} and {second})")]
    Duplicate {
        /// Name in the bundle.
        tensor: String,
        /// One source tensor.
        first: String,
        /// The other.
        second: String,
    },
    /// The model has no tensors.
    #[error("the checkpoint holds no tensors; nothing to convert")]
    Empty,
    /// The sizes do not fit 64 bits.
    #[error("the sizes of the tensors overflow at {tensor}")]
    TooLarge {
        /// Where.
        tensor: String,
    },
}

impl Plan {
    /// Plans a bundle.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn new(catalog: Catalog) -> Result<Self, PlanError> {
        let mut warnings = Vec::new();
        let mut names = BTreeMap::new();
        for entry in &catalog.entries {
            if let Some(first) = names.insert(entry.name.clone(), entry.source.clone()) {
                let (tensor, second) = (entry.name.clone(), entry.source.clone());
                return Err(PlanError::Duplicate { tensor, first, second });
            }
        }
        if names.is_empty() {
            return Err(PlanError::Empty);
        }
        let fusions = fuse::fusions(&catalog.architecture);
        if fusions.is_empty() {
            warnings.push(format!(
                "architecture {:?} has no description: its tensors keep their own names and are not fused",
                catalog.architecture
            ));
        }
        let units = experts::collect(catalog.entries, fusions)?;
        let mut plan = place::place(units)?;
        plan.warnings = warnings;
        Ok(plan)
    }

    /// Bytes of an address space.
    pub fn space_bytes(&self, placement: Placement) -> u64 {
        match placement {
            Placement::Image => self.image_bytes,
            Placement::Cold => self.cold_bytes,
        }
    }

    /// All planes of an address space in order of their offsets.
    pub fn spans(&self, placement: Placement) -> Vec<PlaneSpan> {
        let mut spans = Vec::new();
        for (t, planned) in self.tensors.iter().enumerate().filter(|(_, p)| p.tensor.placement == placement) {
            for expert in 0..planned.tensor.expert_count() {
                for (p, plane) in planned.tensor.planes.iter().enumerate() {
                    let offset = planned.tensor.plane_offset(plane, expert);
                    spans.push(PlaneSpan { offset, size: plane.size, tensor: t, plane: p, expert });
                }
            }
        }
        spans.sort_by_key(|s| (s.offset, s.size));
        spans
    }

    /// The quantisation summary of the manifest.
    pub fn quantization(&self, declared: Option<String>) -> Quantization {
        let mut decodes: BTreeMap<&str, DecodeSummary> = BTreeMap::new();
        for tensor in self.tensors.iter().map(|p| &p.tensor) {
            let decode = tensor.decode.as_str();
            let entry = decodes.entry(decode).or_insert_with(|| DecodeSummary {
                decode: decode.to_owned(),
                tensors: 0,
                elements: 0,
                bytes: 0,
            });
            let experts = tensor.expert_count();
            entry.tensors += 1;
            entry.elements += tensor.elements().unwrap_or(0) * experts;
            entry.bytes += tensor.planes.iter().map(|p| p.size).sum::<u64>() * experts;
        }
        Quantization { decodes: decodes.into_values().collect(), declared }
    }
}

/// The manifest record of a tensor made of `parts` (one expert's), without offsets, and its geometry.
///
/// The parts agree in storage, K and group sizes; [`fuse`] has seen to that.
fn describe(name: String, parts: &[Entry]) -> Result<(Tensor, Geometry), PlanError> {
    let first = &parts[0];
    let (layout, decode, geometry, shape, capability) = match &first.storage {
        Storage::Rows { dtype, shape, .. } => {
            let rows = parts.iter().map(rows_of).sum();
            let shape = with_rows(shape, rows);
            let row_bytes = row_bytes(&first.storage);
            let layout = Layout::RowMajor { dtype: (*dtype).to_owned() };
            (layout, plain_decode(dtype), Geometry::Rows { rows, row_bytes }, shape, None)
        }
        Storage::Raw { name, shape, row_bytes, .. } => {
            let rows = parts.iter().map(rows_of).sum();
            let layout = Layout::GgmlRaw { ggml_type: (*name).to_owned(), row_bytes: *row_bytes };
            let geometry = Geometry::Rows { rows, row_bytes: *row_bytes };
            (layout, format!("{name}.ggml@1"), geometry, with_rows(shape, rows), None)
        }
        Storage::Tiled { codec, shape, .. } => {
            let spec = codec.spec();
            let rows: Vec<u64> = parts.iter().map(rows_of).collect();
            let uses = |span: fn(&Span) -> bool| spec.scales.iter().any(|s| span(&s.span));
            let group = uses(|s| *s == Span::Group).then_some(shape.group_size as u64);
            let block = uses(|s| *s == Span::Block).then_some(shape.block.map(|b| b as u64));
            let matrix = TiledMatrix::new(spec, shape.k as u64, &rows, group.unwrap_or(0), block.unwrap_or([0, 0]))
                .map_err(|source| PlanError::Layout { tensor: first.source.clone(), source })?;
            let layout = Layout::Marlin {
                encoding: spec.encoding.to_owned(),
                group_size: group,
                block,
                padded_shape: [matrix.padded_n(), matrix.padded_k()],
            };
            let shape = vec![matrix.n(), matrix.k];
            let decode = spec.decode.to_owned();
            (layout, decode, Geometry::Tiled(matrix), shape, Some(spec.min_compute_capability))
        }
    };
    let mut row_start = 0;
    let mut described = Vec::with_capacity(parts.len());
    for (i, part) in parts.iter().enumerate() {
        let rows = rows_of(part);
        if let Geometry::Tiled(matrix) = &geometry {
            row_start = matrix.parts[i].start;
        }
        described.push(Part {
            name: part.name.clone(),
            source: part.source.clone(),
            row_start,
            rows,
            row_order: part.row_order,
            scale: part.scale,
            input_scale: part.input_scale,
            pre_quant_scale: part.pre_quant_scale.clone(),
            low_rank: part.low_rank.clone(),
        });
        row_start += rows;
    }
    let tensor = Tensor {
        name,
        placement: if first.cold { Placement::Cold } else { Placement::Image },
        shape,
        layout,
        decode,
        scales: ScaleExactness::Exact,
        planes: Vec::new(),
        parts: described,
        experts: None,
        min_compute_capability: capability,
    };
    Ok((tensor, geometry))
}

/// Logical rows of an entry: its first axis, 1 for a scalar.
fn rows_of(entry: &Entry) -> u64 {
    match &entry.storage {
        Storage::Rows { shape, .. } | Storage::Raw { shape, .. } => shape.first().copied().unwrap_or(1),
        Storage::Tiled { shape, .. } => shape.n as u64,
    }
}

/// Bytes of one row of a row-major or raw entry.
pub(crate) fn row_bytes(storage: &Storage) -> u64 {
    match storage {
        Storage::Rows { data, shape, .. } => data.len / shape.first().copied().unwrap_or(1).max(1),
        Storage::Raw { row_bytes, .. } => *row_bytes,
        Storage::Tiled { .. } => 0,
    }
}

fn with_rows(shape: &[u64], rows: u64) -> Vec<u64> {
    match shape.split_first() {
        None => Vec::new(),
        Some((_, rest)) => std::iter::once(rows).chain(rest.iter().copied()).collect(),
    }
}

/// Whether two codecs are the same one.
fn same_codec(a: &dyn Codec, b: &dyn Codec) -> bool {
    a.name() == b.name()
}
