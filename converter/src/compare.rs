//! Comparing a bundle with its source: every tensor decodes to the same f32 bits.
//!
//! The two sides share no decoder: the bundle's values come from its planes through [`vt_bundle::unpack`], the source's
//! from [`SourceDecoder`]. Tensors of plain elements are compared byte by byte.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vt_bundle::manifest::{Part, Placement, Tensor};
use vt_bundle::mmap::ContiguousMap;
use vt_bundle::reader::{plane_bytes, tiled_view};
use vt_bundle::row_order::RowOrder;
use vt_bundle::{Bundle, BundleError, Geometry};

use crate::catalog::{Entry, SourceDecoder, Storage};
use crate::convert::in_order;
use crate::open::{self, Choices, OpenError};
use crate::source::Checkpoint;

/// A bundle that is not its source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompareError {
    /// The source cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The bundle cannot be read.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The bundle has a tensor that the source lacks.
    #[error("tensor {tensor} is in the bundle but not in the source; is this the checkpoint it was made from?")]
    NotInSource {
        /// Name of the part.
        tensor: String,
    },
    /// The source has a tensor that the bundle lacks.
    #[error("tensor {tensor} is in the source but not in the bundle; is this the checkpoint it was made from?")]
    NotInBundle {
        /// Name of the entry.
        tensor: String,
    },
    /// Shape or element type differ.
    #[error("tensor {tensor}: the bundle has {found}, the source {expected}")]
    Shape {
        /// Name of the part.
        tensor: String,
        /// In the bundle.
        found: String,
        /// In the source.
        expected: String,
    },
    /// A value differs.
    #[error("tensor {tensor}: row {row}, column {column} decodes to {found:e} ({found_bits:#010x}), the source gives {expected:e} ({expected_bits:#010x})", found_bits = found.to_bits(), expected_bits = expected.to_bits())]
    Value {
        /// Name of the part.
        tensor: String,
        /// Row in the order of the bundle.
        row: u64,
        /// Column.
        column: u64,
        /// Value of the bundle.
        found: f32,
        /// Value of the source.
        expected: f32,
    },
    /// A byte of a plain tensor differs.
    #[error("tensor {tensor}: row {row} differs from the source")]
    Bytes {
        /// Name of the part.
        tensor: String,
        /// Row in the order of the bundle.
        row: u64,
    },
}

impl CompareError {
    /// The exit code that a program should end with.
    pub fn exit_code(&self) -> u8 {
        match self {
            CompareError::Open(e) => e.exit_code(),
            CompareError::Bundle(e) => e.exit_code(),
            _ => 4,
        }
    }
}

/// Compares a bundle with a checkpoint on disk; returns the number of values compared.
///
/// `progress` is called with the bytes of planes that have been compared.
///
/// # Errors
/// [`CompareError`] for the first difference in the order of the bundle.
pub fn against(bundle: &Bundle, source: &Path, progress: &(dyn Fn(u64) + Sync)) -> Result<u64, CompareError> {
    // The bundle's configuration says whether the embedding was taken as a head that the source lacks.
    let tied = bundle.manifest().model.config.get("tie_word_embeddings").and_then(|t| t.as_bool()) == Some(true);
    let opened = open::open(source, Choices { tie_word_embeddings: tied })?;
    let compared = with_entries(
        bundle,
        opened.catalog.entries.iter(),
        &opened.checkpoint,
        opened.decoder.as_ref(),
        progress,
        &|| false,
    )?;
    Ok(compared.unwrap_or(0))
}

/// Compares a bundle with the entries of an opened checkpoint; `None` if `stop` said so.
///
/// # Errors
/// [`CompareError`] for the first difference in the order of the bundle.
pub fn with_entries<'a>(
    bundle: &Bundle,
    entries: impl Iterator<Item = &'a Entry>,
    checkpoint: &Checkpoint,
    decoder: &dyn SourceDecoder,
    progress: &(dyn Fn(u64) + Sync),
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Option<u64>, CompareError> {
    let mut entries: HashMap<&str, &Entry> = entries.map(|e| (e.name.as_str(), e)).collect();
    let spaces = [bundle.map(Placement::Image)?, bundle.map(Placement::Cold)?];
    let mut work = Vec::new();
    for (tensor, geometry) in bundle.tensors() {
        for expert in 0..tensor.expert_count() {
            for (index, part) in tensor.parts.iter().enumerate() {
                let name = part.name.replace("{expert}", &expert.to_string());
                let entry = entries.remove(name.as_str());
                let entry = entry.ok_or(CompareError::NotInSource { tensor: name })?;
                let space = match tensor.placement {
                    Placement::Image => &spaces[0],
                    Placement::Cold => &spaces[1],
                };
                let side = Side { tensor, geometry, expert, index, part, entry, space };
                side.check_shape()?;
                for bands in side.bands().chunks(side.bands_at_once()) {
                    let left = Arc::new(AtomicUsize::new(bands.len()));
                    work.extend(bands.iter().map(|rows| (side, rows.clone(), left.clone())));
                }
            }
        }
    }
    if let Some(name) = entries.into_keys().min() {
        return Err(CompareError::NotInBundle { tensor: name.to_owned() });
    }
    // In order, so that few tensors are resident at a time.
    let counted = in_order(
        rayon::current_num_threads(),
        work.len() as u64,
        || (),
        |(), index| {
            let (side, rows, left) = &work[index as usize];
            if stop() {
                return Ok(None);
            }
            let values = side.compare(rows.clone(), checkpoint, decoder)?;
            progress(side.plane_bytes(rows));
            if left.fetch_sub(1, Ordering::AcqRel) == 1 {
                side.give_back(checkpoint);
            }
            Ok::<_, CompareError>(Some(values))
        },
    )?;
    Ok(counted.map(|c| c.iter().sum()))
}

/// About how many values are decoded at once on either side; bounds the memory of a worker.
const BAND_VALUES: u64 = 1 << 18;

/// Bytes of planes between two moments at which the pages of a part are given back, about: bounds what is mapped of a part
/// of any size. A band of rows touches pages all over the planes, since tiles lie in the order of K; what others still need
/// comes back from the page cache.
const RESIDENT_BYTES: u64 = 8 << 20;

/// One part of one expert in the bundle, and its entry in the source.
#[derive(Clone, Copy)]
struct Side<'a> {
    tensor: &'a Tensor,
    geometry: &'a Geometry,
    expert: u64,
    index: usize,
    part: &'a Part,
    entry: &'a Entry,
    space: &'a ContiguousMap,
}

impl Side<'_> {
    /// Gives the pages of both sides back, so that they do not add up.
    fn give_back(&self, checkpoint: &Checkpoint) {
        for plane in &self.tensor.planes {
            self.space.release(self.tensor.plane_offset(plane, self.expert) as usize, plane.size as usize);
        }
        self.entry.give_back(checkpoint);
    }

    fn check_shape(&self) -> Result<(), CompareError> {
        let found = format!("{} rows of {:?} as {}", self.part.rows, &self.tensor.shape.get(1..), self.tensor.decode);
        let expected = match &self.entry.storage {
            Storage::Rows { dtype, shape, .. } => {
                let rows = shape.first().copied().unwrap_or(1);
                format!("{rows} rows of {:?} as plain.{dtype}@1", shape.get(1..))
            }
            Storage::Raw { name, shape, .. } => {
                format!("{} rows of {:?} as {name}.ggml@1", shape.first().copied().unwrap_or(1), shape.get(1..))
            }
            Storage::Tiled { codec, shape, .. } => {
                format!("{} rows of {:?} as {}", shape.n, Some(&[shape.k as u64][..]), codec.spec().decode)
            }
        };
        let same_order = self.part.row_order == self.entry.row_order;
        if found != expected || !same_order {
            return Err(CompareError::Shape { tensor: self.part.name.clone(), found, expected });
        }
        Ok(())
    }

    /// Runs of rows that hold the same rows in both orders.
    fn bands(&self) -> Vec<Range<u64>> {
        let columns = self.tensor.shape.iter().skip(1).product::<u64>().max(1);
        let unit = match self.part.row_order {
            RowOrder::Same => 64,
            RowOrder::RopeInterleaved { head_dim } => u64::from(head_dim).max(1),
        };
        let step = (BAND_VALUES / columns / unit).max(1) * unit;
        (0..self.part.rows).step_by(step as usize).map(|r| r..(r + step).min(self.part.rows)).collect()
    }

    /// How many bands are compared before pages are given back.
    fn bands_at_once(&self) -> usize {
        let band = self.bands().first().map_or(1, |rows| self.plane_bytes(rows).max(1));
        usize::try_from(RESIDENT_BYTES / band).unwrap_or(usize::MAX).max(1)
    }

    fn plane_bytes(&self, rows: &Range<u64>) -> u64 {
        let bytes: u64 = self.tensor.planes.iter().map(|p| p.size).sum();
        let total: u64 = self.tensor.parts.iter().map(|p| p.rows).sum();
        (u128::from(bytes) * u128::from(rows.end - rows.start) / u128::from(total.max(1))) as u64
    }

    fn compare(
        &self,
        rows: Range<u64>,
        checkpoint: &Checkpoint,
        decoder: &dyn SourceDecoder,
    ) -> Result<u64, CompareError> {
        let order = self.part.row_order;
        match (self.geometry, &self.entry.storage) {
            (Geometry::Rows { row_bytes, .. }, Storage::Rows { data, .. } | Storage::Raw { data, .. }) => {
                let row_bytes = *row_bytes as usize;
                let ours = plane_bytes(self.tensor, 0, self.expert, self.space.bytes());
                let theirs = checkpoint.slice(data);
                for row in rows.clone() {
                    let at = (self.part.row_start + row) as usize * row_bytes;
                    let from = order.source_row(row as usize) * row_bytes;
                    if ours[at..at + row_bytes] != theirs[from..from + row_bytes] {
                        return Err(CompareError::Bytes { tensor: self.part.name.clone(), row });
                    }
                }
                Ok((rows.end - rows.start) * self.tensor.shape.iter().skip(1).product::<u64>())
            }
            (Geometry::Tiled(matrix), _) => {
                let k = matrix.k as usize;
                let count = (rows.end - rows.start) as usize;
                let (mut ours, mut theirs) = (vec![f32::NAN; count * k], vec![0.0; count * k]);
                if let Some(view) = tiled_view(self.tensor, self.geometry, self.expert, self.space.bytes()) {
                    view.decode_rows(self.index, rows.start as usize..rows.end as usize, &mut ours);
                }
                decoder.decode_rows(checkpoint, self.entry, rows.clone(), &mut theirs);
                for (i, ours) in ours.chunks_exact(k).enumerate() {
                    let row = rows.start + i as u64;
                    let from = order.source_row(row as usize) - rows.start as usize;
                    let theirs = &theirs[from * k..(from + 1) * k];
                    if let Some(c) = ours.iter().zip(theirs).position(|(a, b)| a.to_bits() != b.to_bits()) {
                        return Err(CompareError::Value {
                            tensor: self.part.name.clone(),
                            row,
                            column: c as u64,
                            found: ours[c],
                            expected: theirs[c],
                        });
                    }
                }
                Ok((count * k) as u64)
            }
            // `check_shape` has compared the storage.
            _ => Ok(0),
        }
    }
}
