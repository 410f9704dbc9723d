//! Where start-up time went, and how much memory the process has touched.

mod memory;

pub use memory::{MemoryPeak, ProcessMemory};

use serde::Serialize;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// One stage of start-up.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    /// `process`, `open`, `plan`, `load`, `model`, ...
    pub name: &'static str,
    /// How long it took.
    pub seconds: f64,
    /// Bytes that it moved or checked, where that is what it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// Stopwatch and memory gauge of a start-up. One per process start, passed by reference.
#[derive(Debug)]
pub struct Startup {
    /// From the start of the process to the start of `main`, as far as the kernel's clock ticks tell.
    before_main: Duration,
    main: Instant,
    phases: Vec<Phase>,
    peak: Mutex<MemoryPeak>,
}

/// What a start-up was like, for people and programs.
#[derive(Clone, Debug, Serialize)]
pub struct StartupReport {
    /// Stages in order.
    pub phases: Vec<Phase>,
    /// From the start of the process until now.
    pub total_seconds: f64,
    /// Largest resident memory seen.
    pub peak: MemoryPeak,
}

impl Startup {
    /// Starts the watch; the first thing that `main` does.
    pub fn begin() -> Self {
        let before_main = memory::process_age().unwrap_or_default();
        let process = Phase { name: "process", seconds: before_main.as_secs_f64(), bytes: None };
        let startup =
            Self { before_main, main: Instant::now(), phases: vec![process], peak: Mutex::new(MemoryPeak::default()) };
        startup.sample();
        startup
    }

    /// Runs one stage. `bytes` is evaluated after it.
    pub fn phase<T>(&mut self, name: &'static str, stage: impl FnOnce(&Self) -> T) -> T {
        let start = Instant::now();
        let result = stage(self);
        self.phases.push(Phase { name, seconds: start.elapsed().as_secs_f64(), bytes: None });
        self.sample();
        result
    }

    /// Adds stages that were timed elsewhere.
    pub fn record(&mut self, phases: &[Phase]) {
        self.phases.extend_from_slice(phases);
        self.sample();
    }

    /// Says how many bytes the last stage moved.
    pub fn moved(&mut self, bytes: u64) {
        if let Some(last) = self.phases.last_mut() {
            last.bytes = Some(bytes);
        }
    }

    /// Looks at the resident memory now. Cheap enough for every few megabytes of a load.
    pub fn sample(&self) {
        if let Some(now) = ProcessMemory::now() {
            self.peak.lock().unwrap_or_else(std::sync::PoisonError::into_inner).add(&now);
        }
    }

    /// The report until now.
    pub fn report(&self) -> StartupReport {
        self.sample();
        StartupReport {
            phases: self.phases.clone(),
            total_seconds: (self.before_main + self.main.elapsed()).as_secs_f64(),
            peak: self.peak.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone(),
        }
    }
}

impl StartupReport {
    /// A table that a person reads.
    pub fn table(&self) -> String {
        let mut text = String::from("start-up\n");
        for phase in &self.phases {
            let rate = phase.bytes.map(|b| format!("  {}, {:.2} GB/s", human_bytes(b), b as f64 / phase.seconds / 1e9));
            text.push_str(&format!("  {:<10} {:>9.3} s{}\n", phase.name, phase.seconds, rate.unwrap_or_default()));
        }
        text.push_str(&format!("  {:<10} {:>9.3} s\n", "total", self.total_seconds));
        let MemoryPeak { anonymous, file, resident } = self.peak;
        text.push_str(&format!(
            "peak resident memory {} (anonymous {}, file-backed {})\n",
            human_bytes(resident),
            human_bytes(anonymous),
            human_bytes(file)
        ));
        text
    }
}

/// Bytes in the largest binary unit that leaves a number of at least one.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_keep_their_order_and_bytes() {
        let mut startup = Startup::begin();
        assert_eq!(startup.phase("open", |_| 7), 7);
        startup.moved(3 << 20);
        let report = startup.report();
        assert_eq!(report.phases.iter().map(|p| p.name).collect::<Vec<_>>(), ["process", "open"]);
        assert_eq!(report.phases[1].bytes, Some(3 << 20));
        assert!(report.peak.resident > 0 && report.total_seconds > 0.0);
        assert!(report.table().contains("3.0 MiB"));
    }

    #[test]
    fn bytes_for_people() {
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(5 << 30), "5.0 GiB");
    }
}
