//! `vt-run`: loads a bundle and answers.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;
use vt_bundle::printable::line;
use vt_run::cli::Invocation;
use vt_run::start::{self, Failure};
use vt_run::stats::Startup;

/// What the clients of stores may log at most, whatever is asked for: below, they write addresses and headers, in which
/// there may be credentials.
const CLIENTS: [&str; 6] =
    ["h2=info", "hyper=info", "hyper_util=info", "object_store=info", "reqwest=info", "rustls=info"];

/// Exit code of a bundle that is not what its hashes say.
const INTEGRITY: u8 = 4;

fn main() -> ExitCode {
    let startup = Startup::begin();
    let mut invocation = Invocation::parse();
    let filter = match &invocation {
        Invocation::Run(cli) => cli.log.as_str(),
        Invocation::BenchLoad(_) => "warn",
        Invocation::Bench(bench) => &bench.log,
        Invocation::Chat(chat) => &chat.log,
    };
    let filter = match EnvFilter::try_new(filter) {
        Ok(filter) => filter,
        Err(error) => {
            complain(&format!("--log {filter}: {error}"));
            return ExitCode::from(2);
        }
    };
    // https://no-color.org: any non-empty value.
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let filter = CLIENTS.iter().fold(filter, |filter, directive| match directive.parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    });
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A log that cannot be written (a full disk, a pipe whose reader has gone) must not end what it is about.
    log.with_target(false).with_ansi(colour).log_internal_errors(false).init();
    let mut fetched = match fetch(&mut invocation) {
        Ok(fetched) => fetched,
        Err(failure) => return ended(Err(failure)),
    };
    let result = begin(&invocation, startup);
    let result = match result {
        // Hashes have been compared while it was loaded; nothing has been served.
        Err(failure) if failure.code == INTEGRITY && mend(&mut fetched) => begin(&invocation, Startup::begin()),
        other => other,
    };
    ended(result)
}

/// Does what the command line says.
fn begin(invocation: &Invocation, startup: Startup) -> Result<(), Failure> {
    match invocation {
        Invocation::Run(cli) => start::run(cli, startup),
        Invocation::BenchLoad(bench) => start::bench_load(bench),
        Invocation::Bench(bench) => start::bench(bench, startup),
        Invocation::Chat(chat) => start::chat(chat, startup),
    }
}

fn ended(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            complain(&failure.to_string());
            ExitCode::from(failure.code)
        }
    }
}

/// Writes one line to standard error; where that is closed too, the exit code has to speak.
fn complain(text: &str) {
    let _ = writeln!(std::io::stderr(), "error: {}", line(text));
}

/// Fetches a bundle that is named by a reference; what is returned holds it in the cache.
#[cfg(feature = "remote")]
fn fetch(invocation: &mut Invocation) -> Result<Option<start::Fetched>, Failure> {
    start::fetch(invocation)
}

/// Fetches anew what is damaged in the cache; whether anything was.
#[cfg(feature = "remote")]
fn mend(fetched: &mut Option<start::Fetched>) -> bool {
    fetched.as_mut().is_some_and(start::Fetched::mend)
}

/// Without the feature `remote` a bundle is a folder.
#[cfg(not(feature = "remote"))]
fn fetch(_: &mut Invocation) -> Result<(), Failure> {
    Ok(())
}

/// A folder is left as it is.
#[cfg(not(feature = "remote"))]
fn mend(_: &mut ()) -> bool {
    false
}
