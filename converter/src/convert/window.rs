//! Packing an address space window by window, in parallel, straight into the segments.
//!
//! A window's bytes depend on the plan and the source alone, so windows can be packed in any order, on any number of
//! threads, by several runs, and give the same image. Each is checked, hashed by leaves and by expert records, and written
//! while it is in the worker's buffer.

use std::collections::HashMap;

use vt_bundle::Geometry;
use vt_bundle::hash::{Digest, LEAF_BYTES, SEGMENT_BYTES, leaf_digest};
use vt_bundle::layout::PlaneKind;
use vt_bundle::manifest::Placement;
use vt_bundle::pack::{RowsSource, pack_rows, pack_tiled};
use vt_bundle::row_order::RowOrder;
use vt_bundle::writer::SegmentWriter;

use super::check::{self, Checks};
use super::flush::while_flushing;
use super::journal::Journal;
use super::load::{BUFFERED_BYTES, Loader, Sources};
use super::ordered::in_order;
use super::records::RecordHashes;
use super::{ConvertError, Progress};
use crate::catalog::{Entry, Storage};
use crate::plan::{Plan, PlaneSpan, PlannedTensor};
use crate::source::Checkpoint;

/// Bytes of a window: a multiple of the leaf that divides the segment.
pub const WINDOW_BYTES: u64 = 8 << 20;
const _: () = assert!(SEGMENT_BYTES.is_multiple_of(WINDOW_BYTES) && WINDOW_BYTES.is_multiple_of(LEAF_BYTES));

/// Anonymous memory of one worker: a window, the source bytes of a matrix, and room for what the allocator keeps.
const WORKER_BYTES: u64 = WINDOW_BYTES + BUFFERED_BYTES + (4 << 20);

/// Leaf digests of an address space and the number of windows that an earlier run had finished.
pub type Packed = (Vec<Digest>, u64);

/// Packs the windows of a plan.
pub struct Packer<'a> {
    /// What to pack.
    pub plan: &'a Plan,
    /// From what.
    pub checkpoint: &'a Checkpoint,
    /// Finished windows are noted here.
    pub journal: &'a Journal,
    /// Windows that an earlier run finished, with their leaf digests.
    pub finished: &'a HashMap<(Placement, u64), Vec<Digest>>,
    /// Collects the hashes of expert records.
    pub records: &'a RecordHashes<'a>,
    /// Collects what the checks of values find.
    pub checks: &'a Checks,
    /// Windows in work at once.
    pub workers: usize,
}

/// The number of workers whose buffers fit `max_memory` bytes, one at least and one a thread at most.
pub fn workers(max_memory: u64) -> usize {
    let fit = usize::try_from(max_memory / WORKER_BYTES).unwrap_or(usize::MAX);
    fit.clamp(1, rayon::current_num_threads())
}

/// What a worker keeps from window to window.
struct Worker<'a> {
    window: Vec<u8>,
    loader: Loader<'a>,
}

impl Packer<'_> {
    /// Packs an address space into its segments; `None` if the user asked to stop.
    ///
    /// # Errors
    /// [`ConvertError::Value`] for a value that no valid checkpoint has, [`ConvertError::Read`] or
    /// [`ConvertError::Bundle`].
    pub fn pack(
        &self,
        placement: Placement,
        segments: &SegmentWriter,
        progress: &dyn Progress,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Packed>, ConvertError> {
        let spans = self.plan.spans(placement);
        let sources = Sources::open(self.plan, self.checkpoint, &spans)?;
        let size = self.plan.space_bytes(placement);
        let windows = size.div_ceil(WINDOW_BYTES);
        let worker = || Worker { window: Vec::new(), loader: Loader::new(&sources) };
        let packed = while_flushing(segments, stop, |flusher| {
            in_order(self.workers, windows, worker, |worker, index| {
                if stop() {
                    return Ok(None);
                }
                let start = index * WINDOW_BYTES;
                let end = size.min(start + WINDOW_BYTES);
                if let Some(ahead) = index.checked_add(self.workers as u64).filter(|&i| i < windows) {
                    sources.prefetch(within(&spans, ahead * WINDOW_BYTES, (ahead + 1) * WINDOW_BYTES), ahead);
                }
                worker.window.resize((end - start) as usize, 0);
                let spans = within(&spans, start, end);
                let digests = |window: &[u8]| -> Vec<Digest> {
                    let segment_start = start / SEGMENT_BYTES * SEGMENT_BYTES;
                    let segment_bytes = SEGMENT_BYTES.min(size - segment_start);
                    let leaves = window.chunks(LEAF_BYTES as usize).zip(0u64..);
                    leaves
                        .map(|(leaf, n)| leaf_digest(leaf, start - segment_start + n * LEAF_BYTES, segment_bytes))
                        .collect()
                };
                let mut resumed = false;
                if let Some(expected) = self.finished.get(&(placement, index)) {
                    segments.read_at(&mut worker.window, start)?;
                    resumed = digests(&worker.window) == *expected;
                }
                if !resumed {
                    self.fill(&sources, worker, spans, start)?;
                    segments.write_at(&worker.window, start)?;
                }
                let leaves = digests(&worker.window);
                if !resumed {
                    self.journal.window(placement, index, &leaves)?;
                }
                self.records.add(placement, start, &worker.window);
                sources.done(spans);
                flusher.window_done(start);
                progress.advance(end - start);
                Ok::<_, ConvertError>(Some((leaves, resumed)))
            })
        })??;
        let Some(packed) = packed else { return Ok(None) };
        let resumed = packed.iter().filter(|(_, resumed)| *resumed).count() as u64;
        Ok(Some((packed.into_iter().flat_map(|(leaves, _)| leaves).collect(), resumed)))
    }

    /// Writes the planes that fall into a window, and zeros between them.
    fn fill(
        &self,
        sources: &Sources<'_>,
        worker: &mut Worker<'_>,
        spans: &[PlaneSpan],
        start: u64,
    ) -> Result<(), ConvertError> {
        let end = start + worker.window.len() as u64;
        let mut written = 0;
        for span in spans {
            let (from, to) = (span.offset.max(start), (span.offset + span.size).min(end));
            if from >= to {
                continue;
            }
            let range = (from - start) as usize..(to - start) as usize;
            worker.window[written..range.start].fill(0);
            written = range.end;
            let target = &mut worker.window[range];
            let planned = &self.plan.tensors[span.tensor];
            let entries = &planned.sources[span.expert as usize];
            let within = from - span.offset;
            match &planned.geometry {
                Geometry::Rows { row_bytes, .. } => self.fill_rows(sources, entries, *row_bytes, within, target)?,
                Geometry::Tiled(matrix) => {
                    let parts = worker.loader.parts(span)?;
                    let kind = plane_kind(planned, span.plane);
                    pack_tiled(matrix, &parts, kind, within, target);
                    let (checkpoint, checks) = (self.checkpoint, self.checks);
                    let from = check::From { parts: &parts, entries, checkpoint, checks };
                    check::plane(matrix, &from, kind, within, target)?;
                }
            }
        }
        worker.window[written..].fill(0);
        Ok(())
    }

    /// Writes a range of a row-major plane.
    fn fill_rows(
        &self,
        sources: &Sources<'_>,
        entries: &[Entry],
        row_bytes: u64,
        start: u64,
        out: &mut [u8],
    ) -> Result<(), ConvertError> {
        let plain = |e: &Entry| matches!(e.storage, Storage::Rows { .. }) && e.row_order == RowOrder::Same;
        if !entries.iter().all(plain) {
            let parts: Vec<RowsSource<'_>> = entries.iter().map(|e| rows_source(self.checkpoint, e)).collect();
            let end = start + out.len() as u64;
            pack_rows(&parts, row_bytes, start..end, out);
            check::rows(entries, self.checkpoint, start, end - start, row_bytes)?;
            // The next window of the same tensor finds the pages in the page cache.
            entries.iter().for_each(|e| e.give_back(self.checkpoint));
            return Ok(());
        }
        // The parts lie one after the other, each as in its file.
        let (mut at, mut out) = (0, out);
        let mut start = start;
        for slice in entries.iter().flat_map(Entry::slices) {
            if start < at + slice.len && !out.is_empty() {
                let len = (at + slice.len - start).min(out.len() as u64);
                let (now, later) = out.split_at_mut(len as usize);
                sources.read(slice, start - at, now)?;
                (out, start) = (later, start + len);
            }
            at += slice.len;
        }
        Ok(())
    }
}

/// The spans that touch `start .. end`.
fn within(spans: &[PlaneSpan], start: u64, end: u64) -> &[PlaneSpan] {
    let first = spans.partition_point(|s| s.offset + s.size <= start);
    let len = spans[first..].partition_point(|s| s.offset < end);
    &spans[first..first + len]
}

fn rows_source<'a>(checkpoint: &'a Checkpoint, entry: &Entry) -> RowsSource<'a> {
    let (data, rows) = match &entry.storage {
        Storage::Rows { data, shape, .. } | Storage::Raw { data, shape, .. } => {
            (checkpoint.slice(data), shape.first().copied().unwrap_or(1))
        }
        Storage::Tiled { .. } => (&[][..], 0),
    };
    RowsSource { data, rows, row_order: entry.row_order }
}

/// The plane kind of a tiled tensor's `index`-th plane.
fn plane_kind(planned: &PlannedTensor, index: usize) -> PlaneKind {
    match &planned.geometry {
        Geometry::Tiled(m) if index >= m.spec.codes.len() => PlaneKind::Scale(index - m.spec.codes.len()),
        _ => PlaneKind::Code(index),
    }
}
