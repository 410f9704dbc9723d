//! Progress on standard error: a bar where it is a terminal, nothing otherwise.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar over `total` bytes.
pub struct Progress(ProgressBar);

impl Progress {
    /// Starts a bar named `what`; `quiet` hides it.
    pub fn new(what: &'static str, total: u64, quiet: bool) -> Self {
        let hidden = quiet || !std::io::stderr().is_terminal();
        let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(10) };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let plain = "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(plain) {
            bar.set_style(style.progress_chars("=> "));
        }
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
