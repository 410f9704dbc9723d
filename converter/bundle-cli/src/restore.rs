//! `vt-bundle restore`: the source files, byte for byte.

use std::io::Write;
use std::path::PathBuf;

use vt_bundle::Bundle;

use crate::failure::{Failure, Outcome};
use crate::output;
use crate::progress::Progress;

/// Arguments of `restore`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the bundle
    bundle: PathBuf,
    /// Folder for the source files; made where it does not exist
    dir: PathBuf,
    /// Replace files that exist
    #[arg(long, env = "VT_OVERWRITE")]
    overwrite: bool,
    /// No progress bar, no summary
    #[arg(long, short, env = "VT_QUIET")]
    quiet: bool,
}

/// Rebuilds every source file and checks it against the BLAKE3 in the manifest.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    let bundle = Bundle::open(&args.bundle)?;
    vt_bundle::restore::refuse_inside(&bundle, &args.dir)?;
    let files = &bundle.manifest().source.files;
    if !args.overwrite {
        // `symlink_metadata` sees a dangling link too: writing through it would surprise.
        if let Some(file) = files.iter().map(|f| args.dir.join(&f.name)).find(|p| p.symlink_metadata().is_ok()) {
            return Err(Failure::Other(format!("{}: exists; give --overwrite to replace it", file.display()), 2));
        }
    }
    std::fs::create_dir_all(&args.dir).map_err(|e| Failure::Other(format!("{}: {e}", args.dir.display()), 6))?;
    let total = files.iter().map(|f| f.size).sum();
    {
        let progress = Progress::new("restoring", total, args.quiet);
        vt_bundle::restore::restore(&bundle, &args.dir, &|n| progress.add(n))?;
    }
    if !args.quiet {
        let mut out = output::stdout();
        let size = output::bytes(total);
        writeln!(out, "{}: {} files, {size}, each equal to its BLAKE3", args.dir.display(), files.len())?;
        out.flush()?;
    }
    Ok(Outcome::Clean)
}
