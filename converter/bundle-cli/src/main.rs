//! `vt-bundle`: look at, check, compare, take apart, store and fetch vt bundles.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod completions;
mod diff;
mod export;
mod failure;
mod id;
mod inspect;
mod layers;
mod output;
mod progress;
mod restore;
mod slice_plan;
mod store;
mod table;
mod unlisted;
mod verify;

use failure::Outcome;

/// Look at, check, compare, take apart, store and fetch vt bundles.
#[derive(Parser)]
#[command(name = "vt-bundle", version, about, long_about = None, max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Shown below the help of every command.
const EXIT_CODES: &str = "Exit codes: 0 ok, 1 findings (diff), 2 usage, 3 input invalid, 4 integrity failure, 6 I/O.\n\
    Results go to standard output, logs and progress to standard error.";

#[derive(Subcommand)]
enum Command {
    /// Show what a bundle holds: model, layers, layouts, sizes, provenance
    Inspect(inspect::Args),
    /// Print the bundle id, the BLAKE3 of its manifest
    Id(id::Args),
    /// Check every byte of a bundle against its hashes, and all padding against zero
    Verify(verify::Args),
    /// Write the weights as a plain F32 safetensors file under their Hugging Face names
    Export(export::Args),
    /// Rebuild the source files, byte for byte
    Restore(restore::Args),
    /// Compare two bundles; exit code 1 where they differ
    Diff(diff::Args),
    /// Show what each rank of a tensor-parallel degree reads
    SlicePlan(slice_plan::Args),
    /// Store a bundle: in an OCI registry or layout, an object store, or a folder of bundles
    Push(store::transfer::PushArgs),
    /// Fetch a bundle from a store
    Pull(store::transfer::PullArgs),
    /// Copy a bundle from store to store
    Copy(store::transfer::CopyArgs),
    /// List the versions of a bundle in a store, or the files of one
    List(store::list::Args),
    /// Look after the bundles that vt-run has fetched
    Cache(store::cache::Args),
    /// Sign a bundle by the OpenSSF Model Signing specification
    Sign(store::sign::Args),
    /// Print shell completions
    Completions(completions::Args),
    /// Print the manual page
    Man,
}

fn main() -> ExitCode {
    let cli: Cli = vt_bundle::flags::parse().unwrap_or_else(|e| e.exit());
    let outcome = match &cli.command {
        Command::Inspect(args) => inspect::run(args),
        Command::Id(args) => id::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Export(args) => export::run(args),
        Command::Restore(args) => restore::run(args),
        Command::Diff(args) => diff::run(args),
        Command::SlicePlan(args) => slice_plan::run(args),
        Command::Push(args) => store::transfer::push(args),
        Command::Pull(args) => store::transfer::pull(args),
        Command::Copy(args) => store::transfer::copy(args),
        Command::List(args) => store::list::run(args),
        Command::Cache(args) => store::cache::run(args),
        Command::Sign(args) => store::sign::run(args),
        Command::Completions(args) => completions::run::<Cli>(args),
        Command::Man => completions::manual::<Cli>(),
    };
    match outcome {
        Ok(Outcome::Clean) => ExitCode::SUCCESS,
        Ok(Outcome::Findings) => ExitCode::from(1),
        Ok(Outcome::Corrupt) => ExitCode::from(4),
        Err(failure) => failure.report(),
    }
}
