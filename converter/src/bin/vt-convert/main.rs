//! `vt-convert INPUT OUTPUT`: a checkpoint into a bundle, ahead of time and without a GPU.

mod cli;
mod dry_run;
mod progress;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vt_bundle::flags;
use vt_bundle::printable::{Printable, line};
use vt_convert::convert::{self, ConvertError, OutputError};

use cli::Cli;

/// Exit code of a usage error.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = match flags::parse::<Cli>() {
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
            let _ = writeln!(io::stderr(), "vt-convert: {}", line(&e.to_string()));
            ExitCode::from(e.exit_code())
        }
    }
}

fn run(cli: &Cli) -> Result<(), ConvertError> {
    if cli.dry_run {
        let prepared = convert::prepare(&cli.input, cli.choices())?;
        return print(&dry_run::render(&prepared, cli.json));
    }
    let interrupt = Arc::new(AtomicBool::new(false));
    let progress = progress::Bars::new(cli.quiet, interrupt.clone());
    let report = convert::convert(&cli.options(), &progress, &interrupt);
    progress.finish();
    let report = report?;
    if cli.json {
        print(&format!("{:#}\n", serde_json::json!(report)))?;
    } else if !cli.quiet {
        let verified = report.verified_values.map(|v| format!(", {v} values verified")).unwrap_or_default();
        print(&format!(
            "{}\n  bundle id {}\n  {} tensors, image {} bytes{}\n",
            cli.options().output.display(),
            report.id,
            report.tensors,
            report.image_bytes,
            verified
        ))?;
    }
    Ok(())
}

/// Writes to standard output; a reader that went away has what it wanted.
fn print(text: &str) -> Result<(), ConvertError> {
    let mut out = Printable::new(io::stdout().lock());
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
            Err(OutputError::Io { path: "standard output".into(), source }.into())
        }
        _ => Ok(()),
    }
}
