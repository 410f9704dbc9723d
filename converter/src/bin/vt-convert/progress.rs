//! Progress on standard error: a bar with rate and time left on a terminal, notes anywhere.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Once};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use vt_bundle::printable::line;
use vt_convert::convert::{Progress, Stage};

/// The bar of the current stage.
pub struct Bars {
    bar: Mutex<Option<ProgressBar>>,
    quiet: bool,
    interrupt: Arc<AtomicBool>,
    listening: Once,
}

impl Bars {
    /// No bar where `quiet` is set or standard error is no terminal. From the first stage on a signal sets `interrupt`.
    pub fn new(quiet: bool, interrupt: Arc<AtomicBool>) -> Self {
        Self { bar: Mutex::new(None), quiet, interrupt, listening: Once::new() }
    }

    /// The first signal asks for an orderly stop, the second one ends the process as usual. Before there is work to keep,
    /// and where there is no handler, a signal simply ends it, however long a file takes to open.
    fn listen(&self) {
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            let _ = signal_hook::flag::register_conditional_default(signal, self.interrupt.clone());
            let _ = signal_hook::flag::register(signal, self.interrupt.clone());
        }
    }

    /// Takes the last bar away.
    pub fn finish(&self) {
        if let Some(bar) = self.current().take() {
            bar.finish_and_clear();
        }
    }

    fn current(&self) -> std::sync::MutexGuard<'_, Option<ProgressBar>> {
        self.bar.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Progress for Bars {
    fn begin(&self, stage: Stage, bytes: u64) {
        self.finish();
        self.listening.call_once(|| self.listen());
        if self.quiet || !io::stderr().is_terminal() {
            return;
        }
        let name = match stage {
            Stage::Hash => "hashing source",
            Stage::Pack => "packing",
            Stage::Verify => "verifying",
        };
        let template = "{msg:15} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} left";
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
        *self.current() = Some(bar.with_style(style).with_message(name));
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = &*self.current() {
            bar.inc(bytes);
        }
    }

    fn warn(&self, text: &str) {
        if self.quiet {
            return;
        }
        match &*self.current() {
            Some(bar) => bar.println(format!("vt-convert: warning: {}", line(text))),
            None => {
                // A closed standard error leaves nobody to tell.
                let _ = writeln!(io::stderr(), "vt-convert: warning: {}", line(text));
            }
        }
    }
}
