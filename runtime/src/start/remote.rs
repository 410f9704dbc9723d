//! Bundles in stores: fetched into the local cache before anything is loaded.

use super::Failure;
use crate::cli::Invocation;
use anyhow::anyhow;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use vt_store::{Cache, CachedBundle, Client, Options, Progress, Reference, StoreError};

/// Time between two lines about a fetch.
const REPORT_EVERY: Duration = Duration::from_secs(5);

/// A bundle out of a store, held in the cache while this lives.
pub struct Fetched {
    client: Client,
    cache: Cache,
    reference: Reference,
    progress: Arc<dyn Progress>,
    held: Option<CachedBundle>,
}

/// Where the bundle is named by a reference: fetches it, unless it is in the cache, and puts its folder in the place of
/// the reference.
///
/// # Errors
/// [`Failure`] with the exit code of the store's error.
pub fn fetch(invocation: &mut Invocation) -> Result<Option<Fetched>, Failure> {
    let Some((bundle, args)) = invocation.bundle() else { return Ok(None) };
    let Some(text) = bundle.to_str().filter(|text| vt_store::is_reference(text)) else { return Ok(None) };
    let reference: Reference = text.parse()?;
    let root = args.cache_dir.clone().or_else(Cache::default_root);
    let root =
        root.ok_or_else(|| Failure::new(2, anyhow!("there is no home folder for the cache; give --cache-dir")))?;
    let client = Client::new(Options { plain_http: args.plain_http, ..Options::default() })?;
    let cache = Cache::new(root);
    let progress: Arc<dyn Progress> = Arc::new(Reporter::default());
    let held = client.cached(&reference, &cache, &progress)?;
    let how = if held.fetched { "fetched into" } else { "found in" };
    tracing::info!("{reference}: {how} {}", shown(&held.dir));
    if let Invocation::Run(cli) = invocation
        && cli.server.served_model_name.is_empty()
    {
        // The folder in the cache has the bundle's id for a name.
        cli.server.served_model_name.push(reference.name());
    }
    invocation.set_bundle(&held.dir);
    Ok(Some(Fetched { client, cache, reference, progress, held: Some(held) }))
}

impl std::fmt::Debug for Fetched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetched").field("reference", &self.reference).field("held", &self.held).finish_non_exhaustive()
    }
}

impl Fetched {
    /// After a load that found wrong bytes: fetches what is damaged in the cache anew. Whether anything was, and no longer
    /// is; where it cannot be mended, the log says why.
    pub fn mend(&mut self) -> bool {
        let Some(held) = self.held.take() else { return false };
        let dir = shown(&held.dir);
        match self.client.mend(&self.reference, &self.cache, held, &self.progress) {
            Ok(Some((mended, damaged))) => {
                self.held = Some(mended);
                tracing::warn!("{dir}: {} was damaged and has been fetched anew", damaged.join(", "));
                true
            }
            Ok(None) => false,
            Err(error) => {
                tracing::warn!("{dir}: is damaged and cannot be fetched anew: {error}");
                false
            }
        }
    }
}

fn shown(dir: &Path) -> String {
    dir.display().to_string()
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::new(error.exit_code(), error)
    }
}

/// Writes a line about a fetch to the log every few seconds.
#[derive(Default)]
struct Reporter(Mutex<Option<Fetch>>);

struct Fetch {
    what: String,
    total: u64,
    done: u64,
    began: Instant,
    reported: Instant,
}

impl Fetch {
    fn line(&self) -> String {
        let seconds = self.began.elapsed().as_secs_f64().max(1e-3);
        let rate = self.done as f64 / seconds;
        let left = self.total.saturating_sub(self.done) as f64 / rate.max(1.0);
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        format!(
            "{}: {:.0} of {:.0} MiB, {:.1} MiB/s, {left:.0} s left",
            self.what,
            mib(self.done as f64),
            mib(self.total as f64),
            mib(rate)
        )
    }
}

impl Progress for Reporter {
    fn begin(&self, what: &str, total_bytes: u64) {
        let now = Instant::now();
        let fetch = Fetch { what: what.to_owned(), total: total_bytes, done: 0, began: now, reported: now };
        tracing::info!("{what}: {:.1} MiB", total_bytes as f64 / f64::from(1 << 20));
        if let Ok(mut slot) = self.0.lock() {
            *slot = Some(fetch);
        }
    }

    fn advance(&self, bytes: u64) {
        let Ok(mut slot) = self.0.lock() else { return };
        let Some(fetch) = slot.as_mut() else { return };
        fetch.done += bytes;
        if fetch.reported.elapsed() >= REPORT_EVERY {
            fetch.reported = Instant::now();
            tracing::info!("{}", fetch.line());
        }
    }

    fn retreat(&self, bytes: u64) {
        if let Ok(mut slot) = self.0.lock()
            && let Some(fetch) = slot.as_mut()
        {
            fetch.done = fetch.done.saturating_sub(bytes);
        }
    }

    fn retrying(&self, why: &str) {
        tracing::warn!("{why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_left_alone() {
        let cli = crate::cli::Cli::parse_for_test(&["--bundle", "some/folder"]);
        let mut invocation = Invocation::Run(Box::new(cli));
        assert!(fetch(&mut invocation).unwrap().is_none());
        assert_eq!(invocation.bundle().unwrap().0, Path::new("some/folder"));
    }

    #[test]
    fn what_cannot_be_fetched_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("cache");
        let missing = format!("file://{}/store/x:v1", dir.path().display());
        for (reference, code) in [("oci://host", 2), (missing.as_str(), 3)] {
            let cli = crate::cli::Cli::parse_for_test(&["--bundle", reference, "--cache-dir", cache.to_str().unwrap()]);
            let failure = fetch(&mut Invocation::Run(Box::new(cli))).unwrap_err();
            assert_eq!(failure.code, code, "{failure}");
        }
        assert!(!cache.exists());
    }
}
