//! The CPU: the mapped image is the arena.

use super::upload::Residency;
use super::{Device, HostArena, LoadError, LoadReport, Resident, Verify};
use vt_bundle::Bundle;
use vt_bundle::manifest::Placement;
use vt_bundle::mmap::ContiguousMap;

/// Runs on the host's processors, on pages of the bundle's own files.
#[derive(Debug)]
pub struct CpuDevice {
    threads: usize,
}

impl CpuDevice {
    /// A device that checks images with `threads` threads.
    pub fn new(threads: usize) -> Self {
        Self { threads: threads.max(1) }
    }
}

impl Device for CpuDevice {
    type Arena = ContiguousMap;

    fn name(&self) -> String {
        "cpu".to_owned()
    }

    /// The check reads every page once, so that it also is the read-ahead. It covers the bytes as read now: a page that
    /// the kernel evicts is read again later, unchecked.
    fn load_image(
        &self,
        bundle: &Bundle,
        verify: Verify,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Resident<ContiguousMap>, LoadError> {
        let mut report = LoadReport::new(self.name());
        report.residency = Residency::Aliased;
        let map = bundle.map(Placement::Image)?;
        if verify != Verify::Off {
            report.verify = Verify::Host;
            let leaves = bundle.leaves()?;
            // A pool of its own, gone when the check is: `--threads` holds, and nothing stays behind.
            let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build();
            let pool = pool.map_err(|e| LoadError::System {
                what: "threads that check the image",
                source: std::io::Error::other(e),
            })?;
            pool.install(|| bundle.verify_mapped(Placement::Image, map.bytes(), &leaves, progress))?;
        }
        Ok(Resident { arena: map, report })
    }
}

impl HostArena for ContiguousMap {
    fn bytes(&self) -> &[u8] {
        ContiguousMap::bytes(self)
    }
}
