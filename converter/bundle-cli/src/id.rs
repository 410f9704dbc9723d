//! `vt-bundle id`: the bundle id.

use std::io::Write;
use std::path::PathBuf;

use vt_bundle::Bundle;

use crate::failure::{Failure, Outcome};
use crate::output;

/// Arguments of `id`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the bundle
    bundle: PathBuf,
    /// Print JSON
    #[arg(long, env = "VT_JSON")]
    json: bool,
}

/// Prints the id. Opening the bundle has compared it with `bundle.id`.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    let bundle = Bundle::open(&args.bundle)?;
    if args.json {
        output::json(&serde_json::json!({ "id": bundle.id() }))?;
    } else {
        let mut out = output::stdout();
        writeln!(out, "{}", bundle.id())?;
        out.flush()?;
    }
    Ok(Outcome::Clean)
}
