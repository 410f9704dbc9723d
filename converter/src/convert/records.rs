//! Hashes of expert records, from the windows as they are packed: no byte is read back.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use vt_bundle::hash::{Digest, TreeNodes, add_tree_nodes, tree_digest};
use vt_bundle::manifest::Placement;

use crate::plan::{Plan, RecordSpan};

/// What is known of the records so far.
pub struct RecordHashes<'a> {
    records: &'a [RecordSpan],
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Records of which some windows are done: nodes, and bytes covered.
    open: HashMap<usize, (TreeNodes, u64)>,
    done: HashMap<usize, Digest>,
}

impl<'a> RecordHashes<'a> {
    /// Nothing known yet.
    pub fn new(plan: &'a Plan) -> Self {
        Self { records: &plan.records, state: Mutex::default() }
    }

    /// Takes in a window, `start .. start + bytes.len()` of an address space. Each window once, in any order.
    pub fn add(&self, placement: Placement, start: u64, bytes: &[u8]) {
        let end = start + bytes.len() as u64;
        // Records of the image come first, each address space in order of its offsets.
        let first = self.records.partition_point(|r| (r.placement, r.offset + r.size) <= (placement, start));
        for (index, record) in (first..).zip(&self.records[first..]) {
            if record.placement != placement || record.offset >= end {
                break;
            }
            let (from, to) = (start.max(record.offset), end.min(record.offset + record.size));
            let own = &bytes[(from - start) as usize..(to - start) as usize];
            let mut nodes = TreeNodes::new();
            add_tree_nodes(record.size, from - record.offset, own, &mut nodes);
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let (known, covered) = state.open.entry(index).or_default();
            known.append(&mut nodes);
            *covered += to - from;
            if *covered == record.size {
                let digest = tree_digest(record.size, known);
                state.open.remove(&index);
                state.done.extend(digest.map(|d| (index, d)));
            }
        }
    }

    /// The hashes in order; `None` unless every window has been taken in.
    pub fn finish(self) -> Option<Vec<Digest>> {
        let done = self.state.into_inner().unwrap_or_else(PoisonError::into_inner).done;
        (0..self.records.len()).map(|index| done.get(&index).copied()).collect()
    }
}
