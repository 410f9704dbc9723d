//! Where the bytes of one rank's share lie in the image, and where they go.

use crate::load::{LoadError, Piece};
use std::ops::Range;
use vt_bundle::Bundle;
use vt_bundle::layout::PLANE_ALIGN;
use vt_bundle::slice::{Run, SlicePlan};

/// The share of one rank: every plane's ranges packed, planes one after the other at multiples of 256 bytes.
///
/// The ranges of a plane keep their order in the image, which makes the packed plane the plane of a smaller matrix: a run
/// of tiles of each tile row, part after part.
#[derive(Clone, Debug)]
pub struct Share {
    planes: Vec<SharedPlane>,
    bytes: u64,
    arena_bytes: u64,
}

#[derive(Clone, Debug)]
struct SharedPlane {
    /// From the first byte of the first range to the end of the last.
    source: Range<u64>,
    runs: Vec<Run>,
    /// Start in the arena.
    to: u64,
}

impl Share {
    /// The share of `rank` among `size`.
    ///
    /// # Errors
    /// [`LoadError::Slice`] where the shapes do not allow the degree.
    pub fn new(bundle: &Bundle, rank: u32, size: u32) -> Result<Self, LoadError> {
        let mut plan = SlicePlan::new(bundle, u64::from(size))?;
        if rank as usize >= plan.ranks.len() {
            let reason = format!("--tp-rank {rank}: ranks go from 0 to {}", size.saturating_sub(1));
            return Err(LoadError::Device { device: format!("rank {rank}"), reason });
        }
        let slice = plan.ranks.swap_remove(rank as usize);
        let mut share = Self { planes: Vec::new(), bytes: 0, arena_bytes: 0 };
        for tensor_slice in &slice.tensors {
            let Some((tensor, _)) = bundle.tensor(&tensor_slice.name) else { continue };
            for expert in 0..tensor_slice.experts {
                for (plane, runs) in tensor.planes.iter().zip(&tensor_slice.planes) {
                    let moved = tensor.plane_offset(plane, expert) - plane.offset;
                    share.push(runs.runs.iter().map(|run| Run { offset: run.offset + moved, ..*run }).collect());
                }
            }
        }
        share.planes.sort_by_key(|plane| plane.source.start);
        Ok(share)
    }

    fn push(&mut self, runs: Vec<Run>) {
        let bytes: u64 = runs.iter().map(|run| run.len * run.count).sum();
        let start = runs.iter().map(|run| run.offset).min();
        let end =
            runs.iter().filter(|run| run.count > 0).map(|run| run.offset + (run.count - 1) * run.stride + run.len);
        if let (Some(start), Some(end), true) = (start, end.max(), bytes > 0) {
            let to = self.arena_bytes.next_multiple_of(PLANE_ALIGN);
            self.planes.push(SharedPlane { source: start..end, runs, to });
            self.arena_bytes = to + bytes;
            self.bytes += bytes;
        }
    }

    /// Bytes that are uploaded.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of the arena: the share and the padding between planes.
    pub fn arena_bytes(&self) -> u64 {
        self.arena_bytes.next_multiple_of(PLANE_ALIGN)
    }

    /// The pieces of a range of the image that belong to the share, in order of their source; `from` counts from the start
    /// of the range.
    pub fn pieces(&self, range: Range<u64>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let before = self.planes.partition_point(|plane| plane.source.start < range.end);
        for plane in self.planes[..before].iter().filter(|plane| plane.source.end > range.start) {
            plane.pieces(&range, &mut pieces);
        }
        pieces.sort_unstable_by_key(|piece| piece.from);
        pieces
    }
}

impl SharedPlane {
    /// Whether the runs take turns: one range of each per tile row, and so on.
    fn turns(&self) -> bool {
        let first = self.runs[0];
        let same = |run: &Run| (run.count, run.stride) == (first.count, first.stride);
        let end = self.runs.iter().map(|run| run.offset + run.len).max().unwrap_or(0);
        self.runs.iter().all(same) && end - self.source.start <= first.stride
    }

    fn pieces(&self, range: &Range<u64>, pieces: &mut Vec<Piece>) {
        let turns = self.turns();
        let row: u64 = self.runs.iter().map(|run| run.len).sum();
        let mut ahead = 0;
        for run in &self.runs {
            // Ranges that end behind the start and begin before the end.
            let first = match (range.start + 1).checked_sub(run.offset + run.len) {
                Some(past) => past.div_ceil(run.stride.max(1)),
                None => 0,
            };
            let last = match range.end.checked_sub(run.offset + 1) {
                Some(within) => (within / run.stride.max(1) + 1).min(run.count),
                None => 0,
            };
            for i in first..last {
                let at = run.offset + i * run.stride;
                let packed = self.to + if turns { i * row + ahead } else { ahead + i * run.len };
                let (start, end) = (at.max(range.start), (at + run.len).min(range.end));
                if start < end {
                    let (from, len) = ((start - range.start) as usize, (end - start) as usize);
                    pieces.push(Piece { from, len, to: packed + (start - at) });
                }
            }
            ahead += if turns { run.len } else { run.len * run.count };
        }
    }
}
