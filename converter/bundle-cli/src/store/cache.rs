//! `vt-bundle cache`: what was fetched, and removing it.

use std::io::Write;
use std::path::PathBuf;

use clap::Subcommand;
use serde_json::json;
use vt_bundle::printable::line;

use crate::failure::{Failure, Outcome, say};
use crate::output;

/// Arguments of `cache`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Show the bundles in the cache, the one used last first
    List(ListArgs),
    /// Remove bundles, the one used longest ago first, until the cache is small enough
    Prune(PruneArgs),
}

#[derive(clap::Args)]
struct ListArgs {
    #[command(flatten)]
    folder: Folder,
    /// Print JSON
    #[arg(long, env = "VT_JSON")]
    json: bool,
}

#[derive(clap::Args)]
struct PruneArgs {
    #[command(flatten)]
    folder: Folder,
    /// What may remain: bytes, or with K, M, G or T in powers of 1024; 0 removes everything
    #[arg(long, env = "VT_MAX_SIZE", value_name = "SIZE", value_parser = size)]
    max_size: u64,
    /// Print JSON
    #[arg(long, env = "VT_JSON")]
    json: bool,
}

#[derive(clap::Args)]
struct Folder {
    /// Folder of the cache [default: $XDG_CACHE_HOME/vt, ~/.cache/vt]
    #[arg(long, env = "VT_CACHE_DIR", value_name = "DIR")]
    cache_dir: Option<PathBuf>,
}

fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G', 'T']) {
        Some(digits) => (digits, 10 * (1 + "KMGT".find(&text[digits.len()..]).unwrap_or(0))),
        None => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| "expected a number, perhaps with K, M, G or T".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

/// Lists or prunes.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    match &args.command {
        Command::List(args) => list(args),
        Command::Prune(args) => prune(args),
    }
}

fn list(args: &ListArgs) -> Result<Outcome, Failure> {
    let entries = super::cache(args.folder.cache_dir.as_ref())?.list()?;
    if args.json {
        output::json(&json!(entries))?;
        return Ok(Outcome::Clean);
    }
    let mut out = output::stdout();
    for entry in &entries {
        let (size, idle) = (output::bytes(entry.bytes), duration(entry.idle_seconds));
        writeln!(out, "{}  {size:>10}  {idle:>9}  {}", entry.id, line(&entry.reference))?;
    }
    out.flush()?;
    Ok(Outcome::Clean)
}

fn prune(args: &PruneArgs) -> Result<Outcome, Failure> {
    let pruned = super::cache(args.folder.cache_dir.as_ref())?.prune(args.max_size)?;
    if args.json {
        output::json(&json!(pruned))?;
        return Ok(Outcome::Clean);
    }
    for id in &pruned.in_use {
        say(&format!("{id}: in use, kept"));
    }
    let mut out = output::stdout();
    for id in &pruned.removed {
        writeln!(out, "removed {id}")?;
    }
    writeln!(out, "{} freed, {} remain", output::bytes(pruned.freed_bytes), output::bytes(pruned.remaining_bytes))?;
    out.flush()?;
    Ok(Outcome::Clean)
}

/// How long ago, for people.
fn duration(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s ago"),
        120..=7199 => format!("{} min ago", seconds / 60),
        7200..=172_799 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!((size("0"), size("12"), size("3K"), size("2G")), (Ok(0), Ok(12), Ok(3072), Ok(2 << 30)));
        for wrong in ["", "G", "1.5G", "-1", "99999999999T"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
