//! The commands that use stores: push, pull, copy, list, cache, sign.

pub mod cache;
pub mod list;
pub mod sign;
pub mod transfer;

use std::path::PathBuf;
use std::sync::Arc;

use vt_store::{Cache, Client, Options, Progress, Reference};

use crate::failure::Failure;
use crate::progress::TransferBar;

/// How transfers are made.
#[derive(clap::Args)]
pub struct TransferArgs {
    /// Files on the way at once
    #[arg(long, env = "VT_JOBS", value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,
    #[command(flatten)]
    connection: ConnectionArgs,
    /// Print JSON
    #[arg(long, env = "VT_JSON")]
    json: bool,
    /// No progress bar, no summary
    #[arg(long, short, env = "VT_QUIET")]
    quiet: bool,
}

/// How stores are reached.
#[derive(clap::Args)]
pub struct ConnectionArgs {
    /// Plain HTTP for every host; for this machine it is taken anyway
    #[arg(long, env = "VT_PLAIN_HTTP")]
    plain_http: bool,
}

impl ConnectionArgs {
    fn client(&self, jobs: u16) -> Result<Client, Failure> {
        Ok(Client::new(Options { jobs: jobs.into(), plain_http: self.plain_http, ..Options::default() })?)
    }
}

impl TransferArgs {
    fn client(&self) -> Result<Client, Failure> {
        self.connection.client(self.jobs)
    }

    /// The same for what writes to a store.
    fn writer(&self, verify_existing: bool) -> Result<Client, Failure> {
        let plain_http = self.connection.plain_http;
        Ok(Client::new(Options { jobs: self.jobs.into(), plain_http, verify_existing })?)
    }

    fn progress(&self) -> Arc<dyn Progress> {
        Arc::new(TransferBar::new(self.quiet))
    }
}

/// A reference as given. It is read by the command and not by the parser of the command line, which would quote what it
/// cannot read, credentials included.
#[derive(Clone, Debug)]
pub struct ReferenceArg(String);

impl From<String> for ReferenceArg {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl ReferenceArg {
    /// The reference.
    pub fn read(&self) -> Result<Reference, Failure> {
        Ok(self.0.parse()?)
    }

    /// The reference, or the folder or file that it is where it names no store.
    pub fn place(&self) -> Result<Place, Failure> {
        match vt_store::is_reference(&self.0) {
            true => self.read().map(Place::Store),
            false => Ok(Place::Folder(PathBuf::from(&self.0))),
        }
    }
}

/// A folder of a bundle, or a reference to one in a store.
#[derive(Clone, Debug)]
pub enum Place {
    /// A folder, or a file.
    Folder(PathBuf),
    /// A reference.
    Store(Reference),
}

/// The cache that a flag names, or the usual one.
fn cache(dir: Option<&PathBuf>) -> Result<Cache, Failure> {
    let root = dir.cloned().or_else(Cache::default_root);
    root.map(Cache::new)
        .ok_or_else(|| Failure::Other("there is no home folder for the cache; give --cache-dir".to_owned(), 2))
}
