//! `vt-bundle push`, `pull` and `copy`.

use std::io::Write;
use std::path::PathBuf;

use serde_json::json;
use vt_store::Pushed;

use super::{ReferenceArg, TransferArgs};
use crate::failure::{Failure, Outcome};
use crate::output;

/// Arguments of `push`.
#[derive(clap::Args)]
pub struct PushArgs {
    /// Folder of the bundle
    bundle: PathBuf,
    /// Where to: oci://host/name:tag, oci-layout:DIR:tag, s3://bucket/name:tag, gs://, az://, file:///folder/name:tag
    reference: ReferenceArg,
    /// Read the files that the store has already, and store anew those that are damaged there
    #[arg(long, env = "VT_VERIFY_EXISTING")]
    verify_existing: bool,
    #[command(flatten)]
    transfer: TransferArgs,
}

/// Arguments of `pull`.
#[derive(clap::Args)]
pub struct PullArgs {
    /// What: oci://host/name:tag, oci-layout:DIR:tag, s3://bucket/name:tag ..., pinned by @blake3:ID or @sha256:DIGEST
    reference: ReferenceArg,
    /// Folder to make; it must not exist
    dir: PathBuf,
    #[command(flatten)]
    transfer: TransferArgs,
}

/// Arguments of `copy`.
#[derive(clap::Args)]
pub struct CopyArgs {
    /// What
    from: ReferenceArg,
    /// Where to
    to: ReferenceArg,
    /// Read the files that the store has already, and store anew those that are damaged there
    #[arg(long, env = "VT_VERIFY_EXISTING")]
    verify_existing: bool,
    #[command(flatten)]
    transfer: TransferArgs,
}

/// Stores a bundle.
pub fn push(args: &PushArgs) -> Result<Outcome, Failure> {
    let client = args.transfer.writer(args.verify_existing)?;
    let pushed = client.push(&args.bundle, &args.reference.read()?, &args.transfer.progress())?;
    print(&args.transfer, &pushed)
}

/// Copies a bundle from store to store.
pub fn copy(args: &CopyArgs) -> Result<Outcome, Failure> {
    let client = args.transfer.writer(args.verify_existing)?;
    let pushed = client.copy(&args.from.read()?, &args.to.read()?, &args.transfer.progress())?;
    print(&args.transfer, &pushed)
}

/// Fetches a bundle into a folder.
pub fn pull(args: &PullArgs) -> Result<Outcome, Failure> {
    let pulled = args.transfer.client()?.pull(&args.reference.read()?, &args.dir, &args.transfer.progress())?;
    if args.transfer.json {
        output::json(&json!(pulled))?;
    } else if !args.transfer.quiet {
        let mut out = output::stdout();
        let size = output::bytes(pulled.bytes);
        writeln!(out, "{}: {} files, {size}, each equal to its BLAKE3", pulled.dir.display(), pulled.files)?;
        writeln!(out, "bundle id {}", pulled.id)?;
        out.flush()?;
    }
    Ok(Outcome::Clean)
}

fn print(args: &TransferArgs, pushed: &Pushed) -> Result<Outcome, Failure> {
    if args.json {
        output::json(&json!(pushed))?;
    } else if !args.quiet {
        let mut out = output::stdout();
        let (size, sent) = (output::bytes(pushed.bytes), output::bytes(pushed.uploaded_bytes));
        writeln!(
            out,
            "{}: {} files, {size}; {} files, {sent} were new",
            pushed.reference, pushed.files, pushed.uploaded_files
        )?;
        writeln!(out, "bundle id {}", pushed.id)?;
        if let Some(digest) = &pushed.digest {
            writeln!(out, "digest {digest}")?;
        }
        out.flush()?;
    }
    Ok(Outcome::Clean)
}
