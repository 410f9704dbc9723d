//! Object stores: content-addressed blobs, and one small index per bundle name.
//!
//! ```text
//! PREFIX/blobs/blake3/<hex>            every file of every bundle, once; the manifest's name is the bundle id
//! PREFIX/index/<name>.json             tag -> bundle id, changed only by conditional writes
//! PREFIX/signatures/<bundle id>/<sha256 of the signature>.json
//! ```
//!
//! `file://` is the same on a disk, where a lock stands for the conditional write of the index.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::stream::FuturesUnordered;
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{HttpError, HttpErrorKind};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, ClientOptions, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
    RetryConfig, UpdateVersion,
};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::contents::{Contents, Entry};
use crate::environment;
use crate::error::{StoreError, causes};
use crate::progress::Meter;
use crate::reference::{Location, Pin, Reference, is_digest};
use crate::retry::Retry;
use crate::source::Source;
use crate::staging::Staging;
use crate::store::{Listed, Remote, State, Stored};
use crate::stream::{self, ByteStream};

/// Bytes of one part of a large blob. A segment of 1 GiB has 128; stores allow 10,000.
const PART: usize = 8 << 20;
/// Parts of one blob on the way at once; with the one that is being read they are the memory of a transfer.
const PARTS_AT_ONCE: usize = 2;
/// Attempts at an index that others change at the same time.
const INDEX_ATTEMPTS: u32 = 20;
/// Largest index and signature that is read.
const MAX_SMALL: u64 = 16 << 20;
/// Variables whose values must not be seen, should a store quote them in an error.
const SECRETS: [&str; 9] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_CLIENT_SECRET",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SERVICE_ACCOUNT",
];

/// The index of a name.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    format: String,
    version: u32,
    tags: BTreeMap<String, Tagged>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tagged {
    /// The bundle id.
    bundle: String,
    /// Bytes of the bundle.
    bytes: u64,
}

const INDEX_FORMAT: &str = "vt-store-index";
const INDEX_VERSION: u32 = 1;

/// An object store and the place in it.
pub(crate) struct Objects {
    store: Arc<dyn ObjectStore>,
    scheme: &'static str,
    root: Key,
    name: String,
    /// The folder of a `file://` store.
    folder: Option<PathBuf>,
    staging: Staging,
    place: String,
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Objects {
    /// Opens a store with the credentials and endpoints of its provider's usual environment variables. `create` makes
    /// the folder of a `file://` store.
    pub(crate) fn new(location: &Location, plain_http: bool, create: bool) -> Result<Self, StoreError> {
        let place = location.to_string();
        let Location::Objects { scheme, bucket, prefix, name } = location else {
            return Err(StoreError::Unsupported { place, reason: "is no object store".to_owned() });
        };
        let retry = RetryConfig {
            backoff: BackoffConfig { init_backoff: Duration::from_millis(200), ..BackoffConfig::default() },
            max_retries: 4,
            retry_timeout: Duration::from_secs(60),
        };
        // A whole blob may take any time; a connection on which nothing comes may not.
        let options = ClientOptions::new()
            .with_connect_timeout(Duration::from_secs(10))
            .with_timeout_disabled()
            .with_read_timeout(Duration::from_secs(120));
        let mut folder = None;
        let built: Result<Arc<dyn ObjectStore>, object_store::Error> = match *scheme {
            "s3" => {
                let settings = environment::settings(&place, "AWS_", &[])?;
                let builder =
                    settings.into_iter().fold(AmazonS3Builder::new(), |b, (key, value)| b.with_config(key, value));
                let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
                let endpoint = endpoint.iter().find_map(|key| builder.get_config_value(key)).unwrap_or_default();
                let http = plain_http || is_loopback_url(&endpoint) || allows_http("AWS_ALLOW_HTTP");
                let builder = builder.with_client_options(options.with_allow_http(http)).with_bucket_name(bucket);
                builder.with_retry(retry).build().map(|s| Arc::new(s) as _)
            }
            "gs" => {
                let settings = environment::settings(&place, "GOOGLE_", &["SERVICE_ACCOUNT"])?;
                let builder = GoogleCloudStorageBuilder::new();
                let builder = settings.into_iter().fold(builder, |b, (key, value)| b.with_config(key, value));
                let endpoint = builder.get_config_value(&GoogleConfigKey::BaseUrl).unwrap_or_default();
                let http = plain_http || is_loopback_url(&endpoint) || allows_http("GOOGLE_ALLOW_HTTP");
                let builder = builder.with_client_options(options.with_allow_http(http)).with_bucket_name(bucket);
                builder.with_retry(retry).build().map(|s| Arc::new(s) as _)
            }
            "az" => {
                let settings = environment::settings(&place, "AZURE_", &["IDENTITY_ENDPOINT"])?;
                let builder = MicrosoftAzureBuilder::new();
                let builder = settings.into_iter().fold(builder, |b, (key, value)| b.with_config(key, value));
                let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint).unwrap_or_default();
                let http = plain_http || is_loopback_url(&endpoint) || allows_http("AZURE_ALLOW_HTTP");
                let builder = builder.with_client_options(options.with_allow_http(http)).with_container_name(bucket);
                builder.with_retry(retry).build().map(|s| Arc::new(s) as _)
            }
            _ => {
                let dir = PathBuf::from(prefix);
                if create {
                    std::fs::create_dir_all(&dir).map_err(StoreError::io(&dir))?;
                }
                if !dir.is_dir() {
                    return Err(StoreError::NotFound { place, what: format!("the folder {}", dir.display()) });
                }
                folder = Some(dir.clone());
                LocalFileSystem::new_with_prefix(&dir).map(|s| Arc::new(s) as _)
            }
        };
        let store = built.map_err(|e| StoreError::Denied {
            place: place.clone(),
            reason: redacted(&causes(&e)),
            advice: advice(scheme).to_owned(),
        })?;
        let root = if folder.is_some() { Key::default() } else { Key::from(prefix.as_str()) };
        Ok(Self { store, scheme, root, name: name.clone(), folder, staging: Staging::default(), place })
    }

    fn key(&self, parts: &[&str]) -> Key {
        parts.iter().fold(self.root.clone(), |key, part| key.join(*part))
    }

    fn blob(&self, blake3: &str) -> Key {
        self.key(&["blobs", "blake3", blake3])
    }

    fn index_key(&self) -> Key {
        self.key(&["index", &format!("{}.json", self.name)])
    }

    /// Makes ready to write.
    pub(crate) fn prepare(&self) -> Result<(), StoreError> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let blobs = folder.join("blobs/blake3");
        std::fs::create_dir_all(&blobs).map_err(StoreError::io(&blobs))?;
        self.staging.begin(&blobs, &[&blobs, &folder.join("index")], is_staged);
        Ok(())
    }

    /// Finds a bundle and reads its manifest, whose BLAKE3 must be the id.
    pub(crate) async fn resolve(&self, reference: &Reference) -> Result<Remote, StoreError> {
        let id = match &reference.pin {
            Some(Pin::Blake3(id)) if reference.tag.is_none() => id.clone(),
            _ => self.tagged(reference).await?,
        };
        if let Some(Pin::Blake3(pinned)) = &reference.pin
            && *pinned != id
        {
            let (found, expected) = (format!("blake3:{id}"), format!("blake3:{pinned}"));
            return Err(StoreError::Pin { place: reference.to_string(), found, expected });
        }
        let what = format!("bundle {id}");
        let bytes = self.small(&self.blob(&id), &what, vt_bundle::reader::MAX_MANIFEST_BYTES).await?;
        let (bytes, _) = bytes.ok_or_else(|| StoreError::NotFound { place: self.place.clone(), what: what.clone() })?;
        let found = blake3::hash(&bytes).to_hex().to_string();
        if found != id {
            return Err(StoreError::Digest {
                place: self.place.clone(),
                what: "manifest.json".to_owned(),
                found,
                expected: id,
            });
        }
        Ok(Remote { contents: Contents::read(&reference.to_string(), bytes)?, manifest: None })
    }

    async fn tagged(&self, reference: &Reference) -> Result<String, StoreError> {
        let tag = reference.tag_or_default();
        let (index, _) = self.index().await?;
        let known = index.tags.get(tag).map(|t| t.bundle.clone());
        known.filter(|id| is_digest(id)).ok_or_else(|| StoreError::NotFound {
            place: reference.to_string(),
            what: format!("no tag {tag}; `vt-bundle list` shows what there is"),
        })
    }

    /// The index and its version; empty where there is none.
    async fn index(&self) -> Result<(Index, Option<UpdateVersion>), StoreError> {
        let Some((bytes, version)) = self.small(&self.index_key(), "index", MAX_SMALL).await? else {
            return Ok((Index { format: INDEX_FORMAT.into(), version: INDEX_VERSION, tags: BTreeMap::new() }, None));
        };
        let wrong = |reason| StoreError::NotABundle { place: format!("{}/{}", self.place, self.index_key()), reason };
        let index: Index = serde_json::from_slice(&bytes).map_err(|e| wrong(format!("no index: {e}")))?;
        if index.format != INDEX_FORMAT || index.version != INDEX_VERSION {
            let (format, version) = (&index.format, index.version);
            return Err(wrong(format!(
                "index {format:?} version {version}, this version reads {INDEX_FORMAT:?} {INDEX_VERSION}"
            )));
        }
        Ok((index, Some(version)))
    }

    /// A small object and its version; `None` where it is not there.
    async fn small(&self, key: &Key, what: &str, limit: u64) -> Result<Option<(Vec<u8>, UpdateVersion)>, StoreError> {
        let got = match self.store.get_opts(key, GetOptions::default()).await {
            Ok(got) => got,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.error(what, error)),
        };
        let version = UpdateVersion { e_tag: got.meta.e_tag.clone(), version: got.meta.version.clone() };
        let size = got.meta.size;
        let pieces = self.pieces(what, got);
        Ok(Some((stream::collect(&self.place, what, pieces, size, limit).await?, version)))
    }

    fn pieces(&self, what: &str, got: object_store::GetResult) -> ByteStream {
        let (place, what) = (self.place.clone(), what.to_owned());
        let pieces = got.into_stream().map_err(move |e| StoreError::Transfer {
            place: place.clone(),
            what: what.clone(),
            reason: format!("the transfer broke off: {}", redacted(&causes(&e))),
            transient: true,
        });
        pieces.boxed()
    }

    /// The bytes of a file from an offset on.
    pub(crate) async fn open(&self, entry: &Entry, offset: u64) -> Result<ByteStream, StoreError> {
        if offset >= entry.size {
            return Ok(stream::from_bytes(Vec::new(), 0));
        }
        let range = (offset > 0).then_some(GetRange::Offset(offset));
        let options = GetOptions { range, ..GetOptions::default() };
        let got = self.store.get_opts(&self.blob(&entry.blake3), options).await;
        let got = got.map_err(|e| self.error(&entry.path, e))?;
        if got.meta.size != entry.size {
            let (place, what) = (self.place.clone(), entry.path.clone());
            return Err(StoreError::Size { place, what, found: got.meta.size, expected: entry.size });
        }
        Ok(self.pieces(&entry.path, got))
    }

    /// Whether a file is there already.
    pub(crate) async fn state(&self, entry: &Entry) -> Result<State, StoreError> {
        match self.store.head(&self.blob(&entry.blake3)).await {
            Ok(meta) => Ok(if meta.size == entry.size { State::Present } else { State::Damaged }),
            Err(object_store::Error::NotFound { .. }) => Ok(State::Absent),
            Err(error) => Err(self.error(&entry.path, error)),
        }
    }

    /// Stores a file; its BLAKE3 is checked before it becomes visible.
    pub(crate) async fn put(
        &self,
        entry: &Entry,
        source: &Source<'_>,
        replace: bool,
        meter: &Meter,
    ) -> Result<(), StoreError> {
        let mut retry = Retry::default();
        loop {
            meter.set(0);
            let written = match entry.size as usize <= PART {
                true => self.put_whole(entry, source, replace, meter).await,
                false => self.put_parts(entry, source, meter).await,
            };
            match written {
                Ok(()) => return Ok(()),
                Err(error) => retry.after(error, meter).await?,
            }
        }
    }

    async fn put_whole(
        &self,
        entry: &Entry,
        source: &Source<'_>,
        replace: bool,
        meter: &Meter,
    ) -> Result<(), StoreError> {
        let bytes = stream::counted(source.open(entry, 0).await?, meter);
        let bytes = stream::collect(&self.place, &entry.path, bytes, entry.size, PART as u64).await?;
        self.check(entry, &blake3::hash(&bytes))?;
        let mode = if replace { PutMode::Overwrite } else { PutMode::Create };
        let options = PutOptions { mode, ..PutOptions::default() };
        let key = self.blob(&entry.blake3);
        let payload = PutPayload::from(bytes);
        match self.store.put_opts(&key, payload.clone(), options).await {
            Ok(_) => Ok(()),
            // Somebody else was faster.
            Err(object_store::Error::AlreadyExists { .. }) if self.state(entry).await? == State::Present => Ok(()),
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::NotImplemented { .. }) => {
                self.store.put(&key, payload).await.map(|_| ()).map_err(|e| self.error(&entry.path, e))
            }
            Err(error) => Err(self.error(&entry.path, error)),
        }
    }

    async fn put_parts(&self, entry: &Entry, source: &Source<'_>, meter: &Meter) -> Result<(), StoreError> {
        let mut bytes = stream::counted(source.open(entry, 0).await?, meter);
        let upload = self.store.put_multipart(&self.blob(&entry.blake3)).await;
        let mut upload = upload.map_err(|e| self.error(&entry.path, e))?;
        let sent = async {
            let mut hasher = blake3::Hasher::new();
            let mut parts = FuturesUnordered::new();
            let mut part = BytesMut::with_capacity(PART);
            let mut total = 0;
            loop {
                let piece = bytes.next().await.transpose()?;
                let ended = piece.is_none();
                let mut piece = piece.unwrap_or_default();
                total += piece.len() as u64;
                hasher.update(&piece);
                while !piece.is_empty() || (ended && !part.is_empty()) {
                    let taken = piece.split_to(piece.len().min(PART - part.len()));
                    part.extend_from_slice(&taken);
                    if part.len() < PART && !ended {
                        continue;
                    }
                    while parts.len() >= PARTS_AT_ONCE {
                        parts.next().await.transpose().map_err(|e| self.error(&entry.path, e))?;
                    }
                    let whole = std::mem::replace(&mut part, BytesMut::with_capacity(PART));
                    parts.push(upload.put_part(whole.freeze().into()));
                }
                if ended {
                    break;
                }
            }
            while let Some(done) = parts.next().await {
                done.map_err(|e| self.error(&entry.path, e))?;
            }
            if total != entry.size {
                let (place, what) = (self.place.clone(), entry.path.clone());
                return Err(StoreError::Size { place, what, found: total, expected: entry.size });
            }
            self.check(entry, &hasher.finalize())
        };
        match sent.await {
            Ok(()) => upload.complete().await.map(|_| ()).map_err(|e| self.error(&entry.path, e)),
            Err(error) => {
                // What cannot be taken back, the store's own rules for unfinished uploads remove.
                let _ = upload.abort().await;
                Err(error)
            }
        }
    }

    fn check(&self, entry: &Entry, found: &blake3::Hash) -> Result<(), StoreError> {
        let found = found.to_hex().to_string();
        if found == entry.blake3 {
            return Ok(());
        }
        let (place, what, expected) = (self.place.clone(), entry.path.clone(), entry.blake3.clone());
        Err(StoreError::Digest { place, what, found, expected })
    }

    /// Makes a bundle whose blobs are all there known under a tag.
    pub(crate) async fn publish(&self, reference: &Reference, contents: &Contents) -> Result<(), StoreError> {
        let lock = match &self.folder {
            Some(folder) => {
                let file = File::open(folder).map_err(StoreError::io(folder))?;
                rustix::fs::flock(&file, FlockOperation::LockExclusive)
                    .map_err(|e| StoreError::io(folder)(e.into()))?;
                Some(file)
            }
            None => None,
        };
        for attempt in 0..INDEX_ATTEMPTS {
            let (mut index, version) = self.index().await?;
            let tagged = Tagged { bundle: contents.id.clone(), bytes: contents.total_bytes() };
            let tag = reference.tag_or_default().to_owned();
            if index.tags.get(&tag) == Some(&tagged) {
                return Ok(());
            }
            index.tags.insert(tag, tagged);
            let bytes = serde_json::to_vec_pretty(&index)
                .map_err(|e| StoreError::NotABundle { place: self.place.clone(), reason: e.to_string() })?;
            let mode = match version {
                _ if lock.is_some() => PutMode::Overwrite,
                Some(version) => PutMode::Update(version),
                None => PutMode::Create,
            };
            let options = PutOptions { mode, ..PutOptions::default() };
            match self.store.put_opts(&self.index_key(), bytes.into(), options).await {
                Ok(_) => return Ok(()),
                Err(object_store::Error::Precondition { .. } | object_store::Error::AlreadyExists { .. }) => {
                    let wait = u64::from(std::process::id() % 50 + attempt * 20);
                    tokio::time::sleep(Duration::from_millis(wait)).await;
                }
                Err(error) => return Err(self.error("index", error)),
            }
        }
        Err(StoreError::Conflict { place: format!("{} (index)", self.place) })
    }

    /// The tags of the name; where there is no such name, the names below.
    pub(crate) async fn list(&self) -> Result<Vec<Listed>, StoreError> {
        let (index, version) = self.index().await?;
        if version.is_some() {
            let listed = index.tags.into_iter().map(|(tag, tagged)| Listed {
                name: self.name.clone(),
                tag,
                id: tagged.bundle,
                bytes: tagged.bytes,
                digest: None,
            });
            return Ok(listed.collect());
        }
        Err(StoreError::NotFound { place: self.place.clone(), what: "no bundle of this name".to_owned() })
    }

    /// Stores a signature of a bundle.
    pub(crate) async fn attach(&self, id: &str, signature: &[u8]) -> Result<(), StoreError> {
        let key = self.key(&["signatures", id, &format!("{}.json", stream::sha256(signature))]);
        let put = self.store.put(&key, PutPayload::from(signature.to_vec())).await;
        put.map(|_| ()).map_err(|e| self.error("signature", e))
    }

    /// The signatures of a bundle. One that cannot be read hides no other.
    pub(crate) async fn signatures(&self, id: &str) -> Result<Stored, StoreError> {
        let prefix = self.key(&["signatures", id]);
        let found: Vec<_> =
            self.store.list(Some(&prefix)).try_collect().await.map_err(|e| self.error("signatures", e))?;
        let mut stored = Stored::default();
        for meta in found {
            let file = meta.location.filename().unwrap_or_default().to_owned();
            let (place, what) = (self.place.clone(), format!("signature {file}"));
            match self.small(&meta.location, &what, MAX_SMALL).await {
                Ok(Some((bytes, _))) if file == format!("{}.json", stream::sha256(&bytes)) => {
                    stored.signatures.push((what, bytes));
                }
                Ok(Some((bytes, _))) => {
                    let (found, expected) = (stream::sha256(&bytes), file.trim_end_matches(".json").to_owned());
                    stored.unreadable.push(StoreError::Digest { place, what, found, expected });
                }
                Ok(None) => {}
                Err(error) => stored.unreadable.push(error),
            }
        }
        Ok(stored)
    }

    fn error(&self, what: &str, error: object_store::Error) -> StoreError {
        use object_store::Error as E;
        let place = self.place.clone();
        let reason = redacted(&causes(&error));
        let denied =
            |reason| StoreError::Denied { place: place.clone(), reason, advice: advice(self.scheme).to_owned() };
        match &error {
            E::NotFound { .. } => StoreError::NotFound { place, what: what.to_owned() },
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => denied(reason),
            // Without credentials in the environment the machine's own are asked for, at an address that only
            // machines in a cloud can reach.
            _ if reason.contains("169.254.169.254") || reason.contains("metadata.google.internal") => {
                denied("no credentials were found in the environment, and this machine has none of its own".to_owned())
            }
            _ if self.folder.is_some() && io_cause(&error).is_some() => {
                let folder = self.folder.clone().unwrap_or_default();
                let source = io_cause(&error).unwrap_or_else(|| std::io::Error::other(reason));
                StoreError::Io { path: folder, source }
            }
            _ if cannot_connect(&error) => StoreError::Unreachable { place, reason },
            _ => StoreError::Transfer { place, what: what.to_owned(), reason, transient: false },
        }
    }
}

/// Whether a name is that of a file that `object_store` has not finished: a blob's or an index's, `#` and a number.
fn is_staged(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    name.rsplit_once('#').is_some_and(|(name, n)| number(n) && (is_digest(name) || name.ends_with(".json")))
}

/// The operating system's error below an error, if there is one.
fn io_cause(error: &(dyn std::error::Error + 'static)) -> Option<std::io::Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(code) = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error) {
            return Some(std::io::Error::from_raw_os_error(code));
        }
        cause = error.source();
    }
    None
}

fn cannot_connect(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<HttpError>().is_some_and(|e| e.kind() == HttpErrorKind::Connect) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// What to do where credentials are missing or wrong.
fn advice(scheme: &str) -> &'static str {
    match scheme {
        "s3" => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), AWS_REGION, and AWS_ENDPOINT_URL for a \
             store that is not Amazon's"
        }
        "gs" => "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account that may use the bucket",
        "az" => "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the variables of a service principal",
        _ => "make the folder readable, and writable to push",
    }
}

fn allows_http(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|v| v.eq_ignore_ascii_case("true") || v == "1")
}

fn is_loopback_url(text: &str) -> bool {
    let host = url::Url::parse(text).ok().and_then(|url| url.host_str().map(str::to_owned)).unwrap_or_default();
    host == "localhost" || host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// A message in one line, of bearable length, without the value of any variable that is a secret.
fn redacted(text: &str) -> String {
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for variable in SECRETS {
        if let Ok(value) = std::env::var(variable)
            && value.len() >= 4
        {
            line = line.replace(&value, "***");
        }
    }
    match line.char_indices().nth(500) {
        Some((at, _)) => format!("{}...", &line[..at]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_killed_pushes_left_is_removed_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let location = format!("file://{}/name", root.path().display()).parse::<Reference>().unwrap().location;
        let open = || Objects::new(&location, false, true).unwrap();
        let hex = "a".repeat(64);
        let first = open();
        first.prepare().unwrap();
        std::fs::create_dir(root.path().join("index")).unwrap();
        let left = [format!("blobs/blake3/{hex}#1"), "index/name.json#12".to_owned()];
        let others = [format!("blobs/blake3/{hex}"), "blobs/blake3/notes#1".to_owned(), "index/name.json".to_owned()];
        for name in left.iter().chain(&others) {
            std::fs::write(root.path().join(name), "half").unwrap();
        }
        // The first is at work still.
        open().prepare().unwrap();
        assert!(left.iter().chain(&others).all(|name| root.path().join(name).exists()));
        drop(first);
        open().prepare().unwrap();
        assert!(left.iter().all(|name| !root.path().join(name).exists()));
        assert!(others.iter().all(|name| root.path().join(name).exists()));
    }
}
