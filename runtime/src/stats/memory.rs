//! Resident memory of this process, anonymous and file-backed apart, as Linux counts it.

use serde::Serialize;
use std::time::Duration;

/// Resident memory at one moment, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Heap, stacks, anonymous mappings (`RssAnon`).
    pub anonymous: u64,
    /// Pages of mapped files and of shared memory (`RssFile` and `RssShmem`).
    pub file: u64,
    /// High-water mark of the sum (`VmHWM`).
    pub peak: u64,
}

impl ProcessMemory {
    /// What `/proc/self/status` says; `None` where there is no such file.
    pub fn now() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/self/status").ok()?)
    }

    fn parse(status: &str) -> Option<Self> {
        let field = |key: &str| {
            let rest = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
            rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        let file = field("RssFile")?.saturating_add(field("RssShmem").unwrap_or(0));
        Some(Self { anonymous: field("RssAnon")?, file, peak: field("VmHWM")? })
    }
}

/// The largest values seen.
///
/// The kernel keeps a high-water mark of the sum only; the two parts are the largest of the samples taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPeak {
    /// Anonymous memory, in bytes.
    pub anonymous: u64,
    /// File-backed memory, in bytes.
    pub file: u64,
    /// Their sum at its highest, in bytes.
    pub resident: u64,
}

impl MemoryPeak {
    /// Takes a sample into account.
    pub fn add(&mut self, now: &ProcessMemory) {
        self.anonymous = self.anonymous.max(now.anonymous);
        self.file = self.file.max(now.file);
        self.resident = self.resident.max(now.peak);
    }
}

/// Time since this process was started, to a tick of the kernel (10 ms); `None` where the system does not say.
pub(super) fn process_age() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    age(&stat, &uptime, rustix::param::clock_ticks_per_second())
}

fn age(stat: &str, uptime: &str, ticks_per_second: u64) -> Option<Duration> {
    // The second field is the name in parentheses, which may hold anything; starttime is the 22nd field.
    let (_, rest) = stat.rsplit_once(')')?;
    let start = rest.split_whitespace().nth(19)?.parse::<u64>().ok()? as f64 / ticks_per_second as f64;
    let now = uptime.split_whitespace().next()?.parse::<f64>().ok()?;
    Duration::try_from_secs_f64(now - start).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_parsed() {
        let text = "VmHWM:\t   300 kB\nRssAnon:\t   100 kB\nRssFile:\t   40 kB\nRssShmem:\t   2 kB\n";
        let memory = ProcessMemory::parse(text).unwrap();
        assert_eq!(memory, ProcessMemory { anonymous: 102_400, file: 43_008, peak: 307_200 });
        assert_eq!(ProcessMemory::parse("VmHWM: 3 kB"), None);
        assert!(ProcessMemory::now().unwrap().peak > 0);
    }

    #[test]
    fn age_survives_odd_names() {
        let stat = format!("7 (a) b c) S {} 500 0", vec!["0"; 18].join(" "));
        assert_eq!(age(&stat, "12.5 1.0\n", 100), Some(Duration::from_millis(7500)));
        assert_eq!(age(&stat, "1.0 1.0\n", 100), None);
        assert!(process_age().is_some());
    }
}
