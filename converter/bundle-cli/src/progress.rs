//! Progress on standard error: a bar where it is a terminal, nothing otherwise.

use std::io::IsTerminal;

use crate::failure::say;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar over `total` bytes.
pub struct Progress(ProgressBar);

impl Progress {
    /// Starts a bar named `what`; `quiet` hides it.
    pub fn new(what: &'static str, total: u64, quiet: bool) -> Self {
        let bar = bar(total, quiet);
        bar.set_message(what);
        Self(bar)
    }

    /// Counts bytes.
    pub fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn bar(total: u64, quiet: bool) -> ProgressBar {
    let hidden = quiet || !std::io::stderr().is_terminal();
    let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(10) };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    let plain = "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(plain) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// A bar over transfers, which begin phases of their own and may have to go back. What is tried again is said even where
/// there is no bar, unless it is to be quiet.
pub struct TransferBar {
    bar: ProgressBar,
    quiet: bool,
}

impl TransferBar {
    /// A bar that appears with the first phase; `quiet` hides it.
    pub fn new(quiet: bool) -> Self {
        Self { bar: bar(0, quiet), quiet }
    }
}

impl vt_store::Progress for TransferBar {
    fn begin(&self, what: &str, total_bytes: u64) {
        self.bar.reset();
        self.bar.set_length(total_bytes);
        self.bar.set_message(what.to_owned());
    }

    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn retreat(&self, bytes: u64) {
        self.bar.dec(bytes);
    }

    fn retrying(&self, why: &str) {
        if !self.quiet {
            self.bar.suspend(|| say(why));
        }
    }
}

impl Drop for TransferBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
