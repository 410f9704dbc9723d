//! `vt-run`: loads a bundle and answers.

use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;
use vt_run::cli::Invocation;
use vt_run::start::{self, Failure};
use vt_run::stats::Startup;

/// What the clients of stores may log at most, whatever is asked for: below, they write addresses and headers, in which
/// there may be credentials.
const CLIENTS: [&str; 7] =
    ["h2=info", "hyper=info", "hyper_util=info", "object_store=info", "oci_client=info", "reqwest=info", "rustls=info"];

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
            eprintln!("error: --log {filter}: {error}");
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
    log.with_target(false).with_ansi(colour).init();
    let _bundle = match bundle(&mut invocation) {
        Ok(held) => held,
        Err(failure) => return ended(Err(failure)),
    };
    ended(match &invocation {
        Invocation::Run(cli) => start::run(cli, startup),
        Invocation::BenchLoad(bench) => start::bench_load(bench),
        Invocation::Bench(bench) => start::bench(bench, startup),
        Invocation::Chat(chat) => start::chat(chat, startup),
    })
}

fn ended(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::from(failure.code)
        }
    }
}

/// Fetches a bundle that is named by a reference; what is returned holds it in the cache.
#[cfg(feature = "remote")]
fn bundle(invocation: &mut Invocation) -> Result<impl Sized + use<>, Failure> {
    start::fetch(invocation)
}

/// Without the feature `remote` a bundle is a folder.
#[cfg(not(feature = "remote"))]
fn bundle(_: &mut Invocation) -> Result<(), Failure> {
    Ok(())
}
