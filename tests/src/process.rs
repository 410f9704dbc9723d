//! Running the binaries.

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::binaries::binary;

/// What a program printed and how it ended.
#[derive(Debug)]
pub struct Ran {
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Ran {
    /// Asserts that the program ended well.
    ///
    /// # Panics
    /// If it did not.
    pub fn ok(self) -> Self {
        self.exits(0)
    }

    /// Asserts an exit code.
    ///
    /// # Panics
    /// If there was another.
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        self
    }

    /// Standard output as JSON.
    ///
    /// # Panics
    /// If it is not.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {}", self.out))
    }
}

/// A command of one of the binaries, without the environment twins that a developer may have set.
pub fn command<S: AsRef<OsStr>>(name: &str, args: &[S]) -> Command {
    let mut command = Command::new(binary(name));
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("VT_")) {
        command.env_remove(key);
    }
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs a binary to its end.
///
/// # Panics
/// If it cannot be started.
pub fn run<S: AsRef<OsStr>>(name: &str, args: &[S]) -> Ran {
    finish(command(name, args))
}

/// Runs a command to its end.
///
/// # Panics
/// If it cannot be started.
pub fn finish(mut command: Command) -> Ran {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ran { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// Runs a binary and gives, beside its result, the most anonymous memory that it had, in bytes, looking every
/// millisecond.
///
/// # Panics
/// If it cannot be started.
pub fn run_measured<S: AsRef<OsStr>>(name: &str, args: &[S]) -> (Ran, u64) {
    let mut child = command(name, args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().expect("waited").is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let anonymous = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = anonymous.and_then(|v| v.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0);
        peak = peak.max(kib * 1024);
        std::thread::sleep(Duration::from_millis(1));
    }
    let output = child.wait_with_output().expect("output read");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (Ran { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }, peak)
}

/// Pseudo-random numbers for tests: SplitMix64 (Steele, Lea, Flood 2014), so that a failure can be seen again.
#[derive(Clone, Debug)]
pub struct Numbers(pub u64);

impl Numbers {
    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound.max(1)
    }
}
