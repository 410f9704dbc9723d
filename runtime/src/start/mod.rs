//! From the command line to a plan, a loaded model, an answer or a server.

mod bench;
mod chat;
mod device;
mod generation;
mod load;
mod logits;
mod prompt;
#[cfg(feature = "remote")]
mod remote;
mod serve;

use crate::cli::{Cli, StatsForm};
use crate::load::LoadError;
use crate::stats::{Startup, StartupReport};
use load::{Opened, OpenedCpu};
use std::io::{self, Write};

pub use bench::bench_load;
pub use chat::chat;
pub use generation::bench;
#[cfg(feature = "remote")]
pub use remote::{Fetched, fetch};

/// Why a run ended, and the exit code that says so.
#[derive(Debug)]
pub struct Failure {
    /// 2 usage, 3 input invalid, 4 integrity failure, 5 device, 6 I/O.
    pub code: u8,
    /// What happened.
    pub error: anyhow::Error,
}

impl Failure {
    fn new(code: u8, error: impl Into<anyhow::Error>) -> Self {
        Self { code, error: error.into() }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#}", self.error)
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        Self::new(error.exit_code(), error)
    }
}

/// Does what the command line says.
///
/// # Errors
/// [`Failure`] with the exit code. A reader that has closed standard output is not one: it has seen enough.
pub fn run(cli: &Cli, mut startup: Startup) -> Result<(), Failure> {
    if cli.plan || cli.load_only {
        if let Ok(index) = device::chosen(cli) {
            return device::run(cli, index, startup);
        }
        let opened = OpenedCpu::open(cli, &mut startup)?;
        if cli.plan {
            let plan = opened.plan();
            return print(&if cli.json { to_json(plan)? } else { plan.table() });
        }
        opened.load_only(&mut startup)?;
        return report(&startup.report(), cli.stats.unwrap_or(StatsForm::Text), true);
    }
    match prompt::Input::of(&cli.prompt) {
        None => serve::serve(cli, startup),
        Some(input) => {
            let model = Opened::open(cli, &mut startup)?.into_model(&mut startup, &|_| ())?;
            let text = model.text(cli, input.needs_text())?;
            if let Some(form) = cli.stats {
                report(&startup.report(), form, false)?;
            }
            let ids = input.encode(text.as_ref())?;
            match &cli.prompt.logits {
                Some(path) => logits::write(model, &ids, cli.prompt.logits_rows, path),
                None => prompt::answer(cli, model, text, ids),
            }
        }
    }
}

fn report(report: &StartupReport, form: StatsForm, standard_output: bool) -> Result<(), Failure> {
    let text = match form {
        StatsForm::Text => report.table(),
        StatsForm::Json => to_json(report)?,
    };
    if standard_output {
        return print(&text);
    }
    eprint!("{text}");
    Ok(())
}

fn to_json(value: &impl serde::Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure::new(6, e))?;
    Ok(text + "\n")
}

/// Writes to standard output and flushes, as the reader may be waiting for every piece.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(Failure::new(6, error)),
        Ok(()) => Ok(()),
    }
}
