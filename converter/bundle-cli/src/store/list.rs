//! `vt-bundle list`: the versions of a bundle in a store, or the files of one.

use std::io::Write;

use serde_json::json;
use vt_bundle::printable::line;
use vt_store::Listing;

use super::{ConnectionArgs, ReferenceArg};
use crate::failure::{Failure, Outcome};
use crate::output;

/// Arguments of `list`.
#[derive(clap::Args)]
pub struct Args {
    /// Without a tag: its versions; with one: the files of that version
    reference: ReferenceArg,
    #[command(flatten)]
    connection: ConnectionArgs,
    /// Print JSON
    #[arg(long, env = "VT_JSON")]
    json: bool,
}

/// Lists.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    let listing = args.connection.client(1)?.list(&args.reference.read()?)?;
    let mut out = output::stdout();
    match &listing {
        Listing::Versions(versions) if args.json => output::json(&json!(versions))?,
        Listing::Files { id, digest, files } if args.json => {
            let files =
                files.iter().map(|(name, bytes, blake3)| json!({ "file": name, "bytes": bytes, "blake3": blake3 }));
            output::json(&json!({ "id": id, "digest": digest, "files": files.collect::<Vec<_>>() }))?;
        }
        Listing::Versions(versions) => {
            for version in versions {
                let size = output::bytes(version.bytes);
                writeln!(out, "{:<24} {size:>10}  {}", line(&version.tag), line(&version.id))?;
            }
        }
        Listing::Files { id, digest, files } => {
            for (name, bytes, blake3) in files {
                writeln!(out, "{blake3}  {:>10}  {}", output::bytes(*bytes), line(name))?;
            }
            writeln!(out, "bundle id {id}")?;
            if let Some(digest) = digest {
                writeln!(out, "digest {digest}")?;
            }
        }
    }
    out.flush()?;
    Ok(Outcome::Clean)
}
