//! Counts of everything that touches a device's memory.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one device object, shared with the arenas that it made. Only ever counts up.
#[derive(Debug, Default)]
pub struct Ledger {
    allocations: AtomicU64,
    allocated_bytes: AtomicU64,
    shared_bytes: AtomicU64,
    frees: AtomicU64,
    freed_bytes: AtomicU64,
    copies: AtomicU64,
    copied_bytes: AtomicU64,
    waits: AtomicU64,
    hashed_leaves: AtomicU64,
    staging_buffers: AtomicU64,
    staging_bytes: AtomicU64,
    pinned_bytes: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LedgerTotals {
    /// Allocations of device memory, and images that the device reads in host memory.
    pub allocations: u64,
    /// Their bytes.
    pub allocated_bytes: u64,
    /// Those of them in host memory, which the device shares.
    pub shared_bytes: u64,
    /// Allocations freed.
    pub frees: u64,
    /// Their bytes.
    pub freed_bytes: u64,
    /// Copies to the device.
    pub copies: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Waits for a copy.
    pub waits: u64,
    /// Leaves hashed on the device.
    pub hashed_leaves: u64,
    /// Host buffers that copies started from.
    pub staging_buffers: u64,
    /// Their bytes.
    pub staging_bytes: u64,
    /// Those of them that were page-locked.
    pub pinned_bytes: u64,
}

impl Ledger {
    pub(super) fn allocated(&self, bytes: u64) {
        add(&self.allocations, 1);
        add(&self.allocated_bytes, bytes);
    }

    pub(super) fn shared(&self, bytes: u64) {
        self.allocated(bytes);
        add(&self.shared_bytes, bytes);
    }

    pub(super) fn freed(&self, bytes: u64) {
        add(&self.frees, 1);
        add(&self.freed_bytes, bytes);
    }

    pub(super) fn copied(&self, bytes: u64) {
        add(&self.copies, 1);
        add(&self.copied_bytes, bytes);
    }

    pub(super) fn waited(&self) {
        add(&self.waits, 1);
    }

    pub(super) fn hashed(&self, leaves: u64) {
        add(&self.hashed_leaves, leaves);
    }

    pub(super) fn staged(&self, bytes: u64, pinned: bool) {
        add(&self.staging_buffers, 1);
        add(&self.staging_bytes, bytes);
        if pinned {
            add(&self.pinned_bytes, bytes);
        }
    }

    /// The counters now.
    pub fn totals(&self) -> LedgerTotals {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LedgerTotals {
            allocations: get(&self.allocations),
            allocated_bytes: get(&self.allocated_bytes),
            shared_bytes: get(&self.shared_bytes),
            frees: get(&self.frees),
            freed_bytes: get(&self.freed_bytes),
            copies: get(&self.copies),
            copied_bytes: get(&self.copied_bytes),
            waits: get(&self.waits),
            hashed_leaves: get(&self.hashed_leaves),
            staging_buffers: get(&self.staging_buffers),
            staging_bytes: get(&self.staging_bytes),
            pinned_bytes: get(&self.pinned_bytes),
        }
    }
}

fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}
