//! Packing an address space window by window, in parallel, straight into the segments.
//!
//! A window's bytes depend on the plan and the source alone, so windows can be packed in any order, on any number of
//! threads, by several runs, and give the same image. Each is checked, hashed by leaves and written while it is in the
//! worker's buffer.

use std::collections::HashMap;

use rayon::prelude::*;
use vt_bundle::BundleError;
use vt_bundle::Geometry;
use vt_bundle::hash::{Digest, LEAF_BYTES, SEGMENT_BYTES, leaf_digest};
use vt_bundle::layout::PlaneKind;
use vt_bundle::manifest::Placement;
use vt_bundle::pack::{PartFormat, PartSource, RowsSource, pack_rows, pack_tiled};
use vt_bundle::writer::SegmentWriter;

use super::check;
use super::journal::Journal;
use super::{ConvertError, Progress};
use crate::catalog::{Entry, Storage};
use crate::plan::{Plan, PlaneSpan, PlannedTensor};
use crate::source::Checkpoint;

/// Bytes of a window: a multiple of the leaf that divides the segment.
pub const WINDOW_BYTES: u64 = 8 << 20;
const _: () = assert!(SEGMENT_BYTES.is_multiple_of(WINDOW_BYTES) && WINDOW_BYTES.is_multiple_of(LEAF_BYTES));

/// Leaf digests of an address space and the number of windows that an earlier run had finished.
pub type Packed = (Vec<Digest>, u64);

/// Packs the windows of a plan.
pub struct Packer<'a> {
    plan: &'a Plan,
    checkpoint: &'a Checkpoint,
    /// Windows in work at once.
    in_flight: usize,
}

impl<'a> Packer<'a> {
    /// A packer that keeps the buffers of the windows in work below `max_memory` bytes (one window at least).
    pub fn new(plan: &'a Plan, checkpoint: &'a Checkpoint, max_memory: u64) -> Self {
        let fits = usize::try_from(max_memory / (2 * WINDOW_BYTES)).unwrap_or(usize::MAX);
        Self { plan, checkpoint, in_flight: fits.clamp(1, rayon::current_num_threads()) }
    }

    /// Packs an address space into its segments; `None` if the user asked to stop.
    ///
    /// # Errors
    /// [`ConvertError::Value`] for a value that no valid checkpoint has, or [`ConvertError::Bundle`].
    pub fn pack(
        &self,
        placement: Placement,
        segments: &SegmentWriter,
        journal: &mut Journal,
        done: &HashMap<(Placement, u64), Vec<Digest>>,
        progress: &dyn Progress,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Packed>, ConvertError> {
        let spans = self.plan.spans(placement);
        let size = self.plan.space_bytes(placement);
        let windows = size.div_ceil(WINDOW_BYTES);
        let journal = &*journal;
        let one = |index: u64| -> Result<Option<(Vec<Digest>, bool)>, ConvertError> {
            if stop() {
                return Ok(None);
            }
            let start = index * WINDOW_BYTES;
            let mut buffer = vec![0u8; WINDOW_BYTES.min(size - start) as usize];
            let digests = |buffer: &[u8]| -> Vec<Digest> {
                let segment_start = start / SEGMENT_BYTES * SEGMENT_BYTES;
                let segment_bytes = SEGMENT_BYTES.min(size - segment_start);
                let leaves = buffer.chunks(LEAF_BYTES as usize).zip(0u64..);
                leaves
                    .map(|(leaf, n)| leaf_digest(leaf, start - segment_start + n * LEAF_BYTES, segment_bytes))
                    .collect()
            };
            if let Some(expected) = done.get(&(placement, index)) {
                segments.read_at(&mut buffer, start)?;
                if digests(&buffer) == *expected {
                    progress.advance(buffer.len() as u64);
                    return Ok(Some((expected.clone(), true)));
                }
                buffer.fill(0);
            }
            self.fill(&spans, start, &mut buffer)?;
            segments.write_at(&buffer, start)?;
            let leaves = digests(&buffer);
            journal.window(placement, index, &leaves)?;
            progress.advance(buffer.len() as u64);
            Ok(Some((leaves, false)))
        };
        let mut leaves = Vec::new();
        let mut resumed = 0;
        let all: Vec<u64> = (0..windows).collect();
        // Small enough batches keep the number of buffers bounded; the batch is large enough to keep all workers busy.
        for batch in all.chunks(self.in_flight * 8) {
            let run = || batch.par_iter().with_max_len(1).map(|&i| one(i)).collect::<Result<Option<Vec<_>>, _>>();
            let packed = if self.in_flight < rayon::current_num_threads() {
                batch.iter().map(|&i| one(i)).collect::<Result<Option<Vec<_>>, _>>()?
            } else {
                run()?
            };
            let Some(packed) = packed else { return Ok(None) };
            for (of_window, was_done) in packed {
                leaves.extend(of_window);
                resumed += u64::from(was_done);
            }
        }
        Ok(Some((leaves, resumed)))
    }

    /// Writes the planes that fall into the window `start .. start + out.len()`; `out` is zero elsewhere.
    fn fill(&self, spans: &[PlaneSpan], start: u64, out: &mut [u8]) -> Result<(), ConvertError> {
        let end = start + out.len() as u64;
        let first = spans.partition_point(|s| s.offset + s.size <= start);
        for span in spans[first..].iter().take_while(|s| s.offset < end) {
            let (from, to) = (span.offset.max(start), (span.offset + span.size).min(end));
            if from >= to {
                continue;
            }
            let target = &mut out[(from - start) as usize..(to - start) as usize];
            let planned = &self.plan.tensors[span.tensor];
            let entries = &planned.sources[span.expert as usize];
            let within = from - span.offset;
            match &planned.geometry {
                Geometry::Rows { row_bytes, .. } => {
                    let parts: Vec<RowsSource<'_>> = entries.iter().map(|e| self.rows_source(e)).collect();
                    pack_rows(&parts, *row_bytes, within..within + target.len() as u64, target);
                    check::rows(entries, self.checkpoint, within, target.len() as u64, *row_bytes)?;
                }
                Geometry::Tiled(matrix) => {
                    let parts: Vec<PartSource<'_>> =
                        entries.iter().filter_map(|e| part_source(self.checkpoint, e)).collect();
                    let kind = plane_kind(planned, span.plane);
                    pack_tiled(matrix, &parts, kind, within, target);
                    check::plane(matrix, &parts, entries, self.checkpoint, kind, within, target)?;
                }
            }
            // A window that comes to the same tensor again finds the pages in the page cache.
            entries.iter().for_each(|e| e.give_back(self.checkpoint));
        }
        Ok(())
    }

    fn rows_source(&self, entry: &Entry) -> RowsSource<'a> {
        let (data, rows) = match &entry.storage {
            Storage::Rows { data, shape, .. } | Storage::Raw { data, shape, .. } => {
                (self.checkpoint.slice(data), shape.first().copied().unwrap_or(1))
            }
            Storage::Tiled { .. } => (&[][..], 0),
        };
        RowsSource { data, rows, row_order: entry.row_order }
    }
}

/// The plane kind of a tiled tensor's `index`-th plane.
pub fn plane_kind(planned: &PlannedTensor, index: usize) -> PlaneKind {
    match &planned.geometry {
        Geometry::Tiled(m) if index >= m.spec.codes.len() => PlaneKind::Scale(index - m.spec.codes.len()),
        _ => PlaneKind::Code(index),
    }
}

/// The packer's view of a tiled entry; `None` for other storage.
pub fn part_source<'a>(checkpoint: &'a Checkpoint, entry: &'a Entry) -> Option<PartSource<'a>> {
    let Storage::Tiled { codec, shape, inputs, all_zero } = &entry.storage else { return None };
    let format = PartFormat { codec: *codec, shape: *shape, row_order: entry.row_order };
    let inputs = inputs.iter().map(|i| checkpoint.slice(i)).collect();
    Some(PartSource { format, inputs, all_zero: *all_zero })
}

/// BLAKE3 of every expert record, read back from the segments of its address space.
///
/// # Errors
/// [`BundleError::Io`].
pub fn hash_records(plan: &Plan, image: &SegmentWriter, cold: &SegmentWriter) -> Result<Vec<Digest>, BundleError> {
    plan.records
        .par_iter()
        .map(|record| {
            let segments = match record.placement {
                Placement::Image => image,
                Placement::Cold => cold,
            };
            let mut hasher = blake3::Hasher::new();
            let mut buffer = vec![0u8; LEAF_BYTES.min(record.size) as usize];
            let (mut at, end) = (record.offset, record.offset + record.size);
            while at < end {
                // A read must not cross a segment.
                let segment_end = (at / SEGMENT_BYTES + 1) * SEGMENT_BYTES;
                let len = (end.min(segment_end) - at).min(buffer.len() as u64) as usize;
                segments.read_at(&mut buffer[..len], at)?;
                hasher.update(&buffer[..len]);
                at += len as u64;
            }
            Ok(*hasher.finalize().as_bytes())
        })
        .collect()
}
