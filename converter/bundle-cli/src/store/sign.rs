//! `vt-bundle sign`, and the part of `verify` that is about signatures.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use vt_store::sign::{SigningKey, VerifyingKey};
use vt_store::{Progress, Reference};

use super::{ConnectionArgs, Place, ReferenceArg};
use crate::failure::{Failure, Outcome, say};
use crate::output;
use crate::progress::TransferBar;

/// Largest signature file that is read.
const MAX_SIGNATURE: u64 = 16 << 20;

/// Arguments of `sign`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the bundle, or a reference: then what is in that store is signed, and the signature stored there
    bundle: ReferenceArg,
    /// Private key: ECDSA P-256 or P-384, PEM
    #[arg(long, env = "VT_KEY", value_name = "FILE")]
    key: PathBuf,
    /// Write the signature to this file [default for a folder without --attach: BUNDLE.sig.json]
    #[arg(long, env = "VT_SIGNATURE", value_name = "FILE")]
    signature: Option<PathBuf>,
    /// Also store the signature of a folder beside this copy of the bundle
    #[arg(long, env = "VT_ATTACH", value_name = "REFERENCE")]
    attach: Option<ReferenceArg>,
    #[command(flatten)]
    connection: ConnectionArgs,
    /// Print JSON
    #[arg(long, env = "VT_JSON")]
    json: bool,
    /// No progress bar, no summary
    #[arg(long, short, env = "VT_QUIET")]
    quiet: bool,
}

/// Signs.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    let attach = args.attach.as_ref().map(ReferenceArg::read).transpose()?;
    let bundle = args.bundle.place()?;
    let file = match (&args.signature, &bundle) {
        (Some(file), _) => Some(file.clone()),
        (None, Place::Folder(dir)) if attach.is_none() => Some(beside(dir)),
        _ => None,
    };
    // Before the bundle is read, which may take long.
    if let (Some(path), Place::Folder(dir)) = (&file, &bundle) {
        vt_bundle::outside::refuse_inside(path, dir)?;
    }
    if let Some(path) = file.as_ref().filter(|path| path.symlink_metadata().is_ok()) {
        return Err(exists(path));
    }
    let key = SigningKey::read(&args.key)?;
    let client = args.connection.client(1)?;
    let progress: Arc<dyn Progress> = Arc::new(TransferBar::new(args.quiet));
    let (signature, attach) = match bundle {
        Place::Folder(dir) => (client.sign_folder(&dir, &key, &progress)?, attach),
        Place::Store(reference) => (client.sign_stored(&reference, &key, &progress)?, attach.or(Some(reference))),
    };
    if let Some(reference) = &attach {
        client.attach(reference, &signature)?;
    }
    if let Some(path) = &file {
        write_new(path, &signature)?;
    }
    if args.json {
        let attached = attach.as_ref().map(Reference::to_string);
        output::json(&json!({ "key": key.hint(), "signature": file, "attached": attached }))?;
    } else if !args.quiet {
        let mut out = output::stdout();
        if let Some(path) = &file {
            writeln!(out, "{}", path.display())?;
        }
        if let Some(reference) = &attach {
            writeln!(out, "attached to {reference}")?;
        }
        writeln!(out, "signed by the key {}", key.hint())?;
        out.flush()?;
    }
    Ok(Outcome::Clean)
}

/// Writes a file that must not be there yet.
fn write_new(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let written = File::create_new(path).and_then(|mut file| file.write_all(bytes));
    written.map_err(|e| match e.kind() {
        std::io::ErrorKind::AlreadyExists => exists(path),
        _ => Failure::Other(format!("{}: {e}", path.display()), 6),
    })
}

fn exists(path: &Path) -> Failure {
    Failure::Other(format!("{}: exists; remove it or choose another file with --signature", path.display()), 2)
}

/// Beside the bundle, for no hash covers a file that is in its folder and not in its manifest.
fn beside(dir: &Path) -> PathBuf {
    let whole = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    let name = whole.file_name().map_or_else(|| "bundle".to_owned(), |name| name.to_string_lossy().into_owned());
    whole.with_file_name(format!("{name}.sig.json"))
}

/// How a signature is verified.
#[derive(clap::Args)]
pub struct SignatureArgs {
    /// Also check a signature: a file, or a reference to a copy of the bundle in a store that has it
    #[arg(long, env = "VT_SIGNATURE", value_name = "FILE|REFERENCE", requires = "key")]
    signature: Option<ReferenceArg>,
    /// Public key that the signature must be by: ECDSA P-256 or P-384, PEM
    #[arg(long, env = "VT_KEY", value_name = "FILE", requires = "signature")]
    key: Option<PathBuf>,
    #[command(flatten)]
    connection: ConnectionArgs,
}

impl SignatureArgs {
    /// Checks the signature, if one is asked for; gives the key that it is by.
    pub fn check(&self, bundle: &Path, quiet: bool) -> Result<Option<String>, Failure> {
        let (Some(place), Some(key)) = (&self.signature, &self.key) else { return Ok(None) };
        let key = VerifyingKey::read(key)?;
        let client = self.connection.client(1)?;
        let (name, signatures) = match place.place()? {
            Place::Folder(path) => {
                let name = path.display().to_string();
                (name.clone(), vec![(name, read(&path)?)])
            }
            Place::Store(reference) => {
                let stored = client.signatures(&reference)?;
                // Another one may hold; if none does, this is why.
                stored.unreadable.iter().for_each(|why| say(&format!("warning: {reference}: {why}")));
                (reference.to_string(), stored.found)
            }
        };
        let progress: Arc<dyn Progress> = Arc::new(TransferBar::new(quiet));
        client.verify_signature(bundle, &name, &signatures, &key, &progress)?;
        Ok(Some(key.hint()))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |e: std::io::Error| Failure::Other(format!("{}: {e}", path.display()), 6);
    let len = path.metadata().map_err(failed)?.len();
    if len > MAX_SIGNATURE {
        return Err(Failure::Other(format!("{}: {len} bytes are no signature", path.display()), 3));
    }
    std::fs::read(path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Verify {
        #[command(flatten)]
        signature: SignatureArgs,
    }

    #[test]
    fn a_key_without_a_signature_is_refused() {
        assert!(Verify::try_parse_from(["verify", "--key", "pub.pem"]).is_err_and(|e| e.exit_code() == 2));
        let both = Verify::try_parse_from(["verify", "--key", "pub.pem", "--signature", "x.sig.json"]).unwrap();
        assert!(both.signature.key.is_some());
    }

    #[test]
    fn a_signature_replaces_no_file() {
        let path = std::env::temp_dir().join(format!("vt-sign-{}.json", std::process::id()));
        write_new(&path, b"one").unwrap();
        let again = write_new(&path, b"two");
        let kept = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(again, Err(Failure::Other(_, 2))));
        assert_eq!(kept, b"one");
    }
}
