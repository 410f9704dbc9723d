//! `vt-bundle export`: a plain safetensors file.

use std::io::Write;
use std::path::PathBuf;

use vt_bundle::Bundle;
use vt_convert::export;

use crate::failure::{Failure, Outcome};
use crate::output;
use crate::progress::Progress;

/// Arguments of `export`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the bundle
    bundle: PathBuf,
    /// The safetensors file to write
    file: PathBuf,
    /// Decode every weight to F32, the only form so far
    #[arg(long, required = true)]
    dequantize: bool,
    /// Replace the file if it exists
    #[arg(long, env = "VT_OVERWRITE")]
    overwrite: bool,
    /// No progress bar, no summary
    #[arg(long, short, env = "VT_QUIET")]
    quiet: bool,
}

/// Writes the file.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    let bundle = Bundle::open(&args.bundle)?;
    vt_bundle::outside::refuse_inside(&args.file, bundle.dir())?;
    if !args.overwrite && args.file.symlink_metadata().is_ok() {
        return Err(Failure::Other(format!("{}: exists; give --overwrite to replace it", args.file.display()), 2));
    }
    let summary = {
        let progress = Progress::new("exporting", export::planned_bytes(&bundle)?, args.quiet);
        export::dequantize(&bundle, &args.file, &|n| progress.add(n))?
    };
    if !args.quiet {
        let mut out = output::stdout();
        let size = output::bytes(summary.bytes);
        writeln!(out, "{}: {} tensors, {size}", args.file.display(), summary.tensors)?;
        out.flush()?;
    }
    Ok(Outcome::Clean)
}
