//! How a command ends: outcomes, failures and their exit codes.

use std::io::{self, Write};
use std::process::ExitCode;

use vt_bundle::BundleError;
use vt_bundle::printable::line;
use vt_convert::export::ExportError;
use vt_store::StoreError;

/// How a command ended that could do its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing to report.
    Clean,
    /// There are differences.
    Findings,
    /// The bundle is not what it should be; each finding has been printed.
    Corrupt,
}

/// Why a command could not do its work.
#[derive(Debug)]
pub enum Failure {
    /// The bundle is invalid, corrupt or unreadable.
    Bundle(BundleError),
    /// The export failed.
    Export(ExportError),
    /// A store failed, or what it holds is not what it should be.
    Store(StoreError),
    /// Standard output or a file cannot be written; a reader that went away is no failure.
    Output(io::Error),
    /// Anything else: what happened, and the exit code that it earns.
    Other(String, u8),
}

impl Failure {
    /// Prints the failure to standard error and gives its exit code. A closed pipe is a success: the reader has what it
    /// wanted.
    pub fn report(&self) -> ExitCode {
        let (text, code) = match self {
            Failure::Output(e) if e.kind() == io::ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
            Failure::Output(e) => (format!("standard output: {e}"), 6),
            Failure::Bundle(e) => (e.to_string(), e.exit_code()),
            Failure::Export(e) => (e.to_string(), e.exit_code()),
            Failure::Store(e) => (e.to_string(), e.exit_code()),
            Failure::Other(text, code) => (text.clone(), *code),
        };
        say(&text);
        ExitCode::from(code)
    }
}

/// Writes one line to standard error; where that is closed too, the exit code has to speak.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "vt-bundle: {}", line(text));
}

impl From<BundleError> for Failure {
    fn from(e: BundleError) -> Self {
        Failure::Bundle(e)
    }
}

impl From<ExportError> for Failure {
    fn from(e: ExportError) -> Self {
        Failure::Export(e)
    }
}

impl From<StoreError> for Failure {
    fn from(e: StoreError) -> Self {
        Failure::Store(e)
    }
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Failure::Output(e)
    }
}
