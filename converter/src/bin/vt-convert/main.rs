//! `vt-convert INPUT OUTPUT`: a checkpoint into a bundle, ahead of time and without a GPU.

mod cli;
mod dry_run;
mod progress;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Parser;
use vt_convert::convert::{self, ConvertError};

use cli::Cli;

/// Exit code of a usage error.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version are asked for, not errors; a closed pipe while printing them changes nothing.
            let _ = e.print();
            return if e.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            let _ = writeln!(io::stderr(), "vt-convert: {e}");
            ExitCode::from(e.exit_code())
        }
    }
}

fn run(cli: &Cli) -> Result<(), ConvertError> {
    if cli.dry_run {
        let prepared = convert::prepare(&cli.input, cli.choices())?;
        print(&dry_run::render(&prepared, cli.json));
        return Ok(());
    }
    let interrupt = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // The first signal asks for an orderly stop, the second one ends the process as usual. Without the handler
        // a signal simply ends it, and the next run resumes all the same.
        let _ = signal_hook::flag::register_conditional_default(signal, interrupt.clone());
        let _ = signal_hook::flag::register(signal, interrupt.clone());
    }
    let progress = progress::Bars::new(cli.quiet);
    let report = convert::convert(&cli.options(), &progress, &interrupt);
    progress.finish();
    let report = report?;
    if cli.json {
        print(&format!("{:#}\n", serde_json::json!(report)));
    } else if !cli.quiet {
        let verified = report.verified_values.map(|v| format!(", {v} values verified")).unwrap_or_default();
        print(&format!(
            "{}\n  bundle id {}\n  {} tensors, image {} bytes{}\n",
            cli.output.display(),
            report.id,
            report.tensors,
            report.image_bytes,
            verified
        ));
    }
    Ok(())
}

/// Writes to standard output; a reader that went away has what it wanted.
fn print(text: &str) {
    let _ = io::stdout().write_all(text.as_bytes());
}
