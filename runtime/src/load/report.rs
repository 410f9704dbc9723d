//! What a load did and where its time went.

use super::upload::{Probe, Residency, Timeline};
use super::{LedgerTotals, Verify};
use crate::stats::Phase;
use serde::Serialize;
use std::time::Instant;

/// An arena and how it came to be.
#[derive(Debug)]
pub struct Resident<A> {
    /// The memory.
    pub arena: A,
    /// How it was filled.
    pub report: LoadReport,
}

/// One load of an image.
#[derive(Clone, Debug, Serialize)]
pub struct LoadReport {
    /// Device as on the command line.
    pub device: String,
    /// Where they are resident.
    pub residency: Residency,
    /// What decided on it, where there was a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub probe: Option<Probe>,
    /// How the bytes were read: `mmap`, `pread`, `direct`; `mapped` where the mapping is the arena.
    pub io: &'static str,
    /// Who checked them.
    pub verify: Verify,
    /// Stages in order.
    pub phases: Vec<Phase>,
    /// Moments of the upload, where there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
    /// What the device's memory saw, where the device has memory of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ledger: Option<LedgerTotals>,
    /// What to know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl LoadReport {
    pub(super) fn new(device: String) -> Self {
        Self {
            device,
            residency: Residency::Copied,
            probe: None,
            io: "mapped",
            verify: Verify::Off,
            phases: Vec::new(),
            timeline: None,
            ledger: None,
            notes: Vec::new(),
        }
    }

    pub(super) fn phase<T>(&mut self, name: &'static str, stage: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = stage();
        self.took(name, start.elapsed().as_secs_f64());
        result
    }

    pub(super) fn uploaded(&mut self, seconds: f64, bytes: u64) {
        self.moved("upload", seconds, bytes);
    }

    pub(super) fn took(&mut self, name: &'static str, seconds: f64) {
        self.phases.push(Phase { name, seconds, bytes: None });
    }

    pub(super) fn moved(&mut self, name: &'static str, seconds: f64, bytes: u64) {
        self.phases.push(Phase { name, seconds, bytes: Some(bytes) });
    }

    /// Bytes a second of the upload, verification included.
    pub fn upload_rate(&self) -> Option<f64> {
        let phase = self.phases.iter().find(|p| p.name == "upload")?;
        Some(phase.bytes? as f64 / phase.seconds)
    }
}
