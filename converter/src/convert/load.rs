//! Reading source bytes for the packer, so that neither buffers nor mapped pages add up.
//!
//! The tensors of one output matrix are read into a worker's buffers in large sequential reads, once for all windows in a
//! row that need them. A matrix that is too large for that stays mapped while windows need it, and its pages are given
//! back after the last of them.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use vt_bundle::Geometry;
use vt_bundle::pack::{PartFormat, PartSource};

use super::ConvertError;
use super::window::WINDOW_BYTES;
use crate::catalog::{Entry, Slice, Storage};
use crate::plan::{Plan, PlaneSpan, PlannedTensor};
use crate::source::Checkpoint;

/// Source bytes of one matrix that a worker reads into its buffers, at most.
pub const BUFFERED_BYTES: u64 = 12 << 20;

/// Source bytes of one matrix whose pages stay resident from window to window, at most; beyond that they are given back
/// after every window and read again from the page cache.
const RESIDENT_BYTES: u64 = 128 << 20;

/// A tensor and an expert of it: what is read at once.
type Key = (usize, u64);

/// The open source files, and how many windows still need each mapped matrix.
pub struct Sources<'a> {
    plan: &'a Plan,
    checkpoint: &'a Checkpoint,
    files: Vec<File>,
    /// Windows to come, per mapped matrix.
    needed: HashMap<Key, AtomicU64>,
}

impl<'a> Sources<'a> {
    /// Opens the files; `spans` are the planes of the address space that will be packed.
    ///
    /// # Errors
    /// [`ConvertError::Read`].
    pub fn open(plan: &'a Plan, checkpoint: &'a Checkpoint, spans: &[PlaneSpan]) -> Result<Self, ConvertError> {
        let open = |file: &crate::source::SourceFile| {
            File::open(&file.path).map_err(|source| ConvertError::Read { path: file.path.clone(), source })
        };
        let files = checkpoint.files.iter().map(open).collect::<Result<_, _>>()?;
        // The planes of a matrix follow one another, so its windows are one run.
        let mut runs: HashMap<Key, (u64, u64)> = HashMap::new();
        for span in spans.iter().filter(|s| s.size > 0) {
            let windows = (span.offset / WINDOW_BYTES, (span.offset + span.size - 1) / WINDOW_BYTES);
            let (planned, key) = (&plan.tensors[span.tensor], (span.tensor, span.expert));
            if is_tiled(planned) && bytes_of(entries(planned, key)) > BUFFERED_BYTES {
                let run = runs.entry(key).or_insert(windows);
                *run = (run.0.min(windows.0), run.1.max(windows.1));
            }
        }
        let needed = runs.into_iter().map(|(key, (first, last))| (key, AtomicU64::new(last - first + 1))).collect();
        Ok(Self { plan, checkpoint, files, needed })
    }

    /// Asks for the source bytes of the spans to be read ahead.
    pub fn prefetch(&self, spans: &[PlaneSpan], window: u64) {
        let mut last = None;
        for span in spans {
            let key = (span.tensor, span.expert);
            let begins_here = span.offset / WINDOW_BYTES == window;
            let planned = &self.plan.tensors[span.tensor];
            if last == Some(key) || !begins_here || !is_tiled(planned) {
                continue;
            }
            last = Some(key);
            let entries = entries(planned, key);
            if bytes_of(entries) <= RESIDENT_BYTES {
                entries.iter().flat_map(Entry::slices).for_each(|s| self.checkpoint.will_need(s));
            }
        }
    }

    /// Says that a window with these spans is done.
    pub fn done(&self, spans: &[PlaneSpan]) {
        let mut last = None;
        for span in spans {
            let key = (span.tensor, span.expert);
            let Some(needed) = self.needed.get(&key).filter(|_| last != Some(key)) else { continue };
            last = Some(key);
            let entries = entries(&self.plan.tensors[span.tensor], key);
            let was_last = needed.fetch_sub(1, Ordering::AcqRel) == 1;
            if was_last || bytes_of(entries) > RESIDENT_BYTES {
                entries.iter().for_each(|e| e.give_back(self.checkpoint));
            }
        }
    }

    /// Reads a part of a slice.
    ///
    /// # Errors
    /// [`ConvertError::Read`].
    pub fn read(&self, slice: &Slice, from: u64, out: &mut [u8]) -> Result<(), ConvertError> {
        let tensor = &self.checkpoint.tensors[slice.tensor];
        let read = self.files[tensor.file].read_exact_at(out, tensor.offset + slice.offset + from);
        read.map_err(|source| ConvertError::Read { path: self.checkpoint.files[tensor.file].path.clone(), source })
    }
}

/// A worker's buffers.
pub struct Loader<'a> {
    sources: &'a Sources<'a>,
    /// What the buffers hold.
    key: Option<Key>,
    /// One per slice, entry by entry.
    buffers: Vec<Vec<u8>>,
}

impl<'a> Loader<'a> {
    /// Empty buffers.
    pub fn new(sources: &'a Sources<'a>) -> Self {
        Self { sources, key: None, buffers: Vec::new() }
    }

    /// The parts of a tiled matrix with their source bytes.
    ///
    /// # Errors
    /// [`ConvertError::Read`].
    pub fn parts(&mut self, span: &PlaneSpan) -> Result<Vec<PartSource<'_>>, ConvertError> {
        let key = (span.tensor, span.expert);
        let entries = entries(&self.sources.plan.tensors[span.tensor], key);
        let mapped = self.sources.needed.contains_key(&key);
        if !mapped && self.key != Some(key) {
            // A failed read leaves nothing that looks complete.
            self.key = None;
            let slices: Vec<&Slice> = entries.iter().flat_map(Entry::slices).collect();
            self.buffers.resize_with(slices.len().max(self.buffers.len()), Vec::new);
            for (buffer, slice) in self.buffers.iter_mut().zip(slices) {
                buffer.resize(slice.len as usize, 0);
                self.sources.read(slice, 0, buffer)?;
            }
            self.key = Some(key);
        }
        let mut buffers = self.buffers.iter();
        let mut parts = Vec::with_capacity(entries.len());
        for entry in entries {
            let Storage::Tiled { codec, shape, inputs, all_zero } = &entry.storage else { continue };
            let format = PartFormat { codec: *codec, shape: *shape, row_order: entry.row_order };
            let inputs = inputs.iter().map(|slice| match buffers.next().filter(|_| !mapped) {
                Some(buffer) => buffer.as_slice(),
                None => self.sources.checkpoint.slice(slice),
            });
            parts.push(PartSource { format, inputs: inputs.collect(), all_zero: *all_zero });
        }
        Ok(parts)
    }
}

fn is_tiled(planned: &PlannedTensor) -> bool {
    matches!(planned.geometry, Geometry::Tiled(_))
}

fn entries(planned: &PlannedTensor, key: Key) -> &[Entry] {
    &planned.sources[key.1 as usize]
}

fn bytes_of(entries: &[Entry]) -> u64 {
    entries.iter().flat_map(Entry::slices).map(|s| s.len).sum()
}
