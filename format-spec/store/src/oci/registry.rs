//! An OCI registry: logging in, blobs by range, writing manifests. What it answers in a few bytes is in
//! [`super::fetch`], uploads are in [`super::upload`].

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use tokio::sync::Mutex;

use crate::credentials;
use crate::error::{StoreError, causes};
use crate::oci::model_pack::{Descriptor, INDEX_TYPE, ImageIndex, to_bytes};
use crate::stream::ByteStream;

/// How long a token is used before a new one is asked for. The specification promises 60 s.
const TOKEN_AGE: Duration = Duration::from_secs(45);
/// A connection that does not come about in this time is given up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection on which nothing comes for this long is given up.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// A repository of a registry.
pub(crate) struct Registry {
    client: Client,
    pub(super) http: reqwest::Client,
    host: String,
    repository: String,
    pub(super) scheme: &'static str,
    pub(super) auth: RegistryAuth,
    pull_token: Mutex<Option<(Instant, Option<String>)>>,
    push_token: Mutex<Option<(Instant, Option<String>)>>,
    pub(super) place: String,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registry").field("place", &self.place).finish_non_exhaustive()
    }
}

/// Whether a host is this machine, where plain HTTP is as good as HTTPS.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

impl Registry {
    /// Prepares for a repository; nothing is sent.
    pub(crate) fn new(host: &str, repository: &str, plain_http: bool) -> Result<Self, StoreError> {
        let place = format!("oci://{host}/{repository}");
        let plain = plain_http || is_loopback(host);
        let auth = credentials::for_registry(host, credentials::config_file().as_deref())?;
        let system = |e: &dyn std::error::Error| StoreError::Transfer {
            place: place.clone(),
            what: "TLS".to_owned(),
            reason: format!("{}; install the system's CA certificates (package ca-certificates)", causes(e)),
            transient: false,
        };
        let user_agent = concat!("vt/", env!("CARGO_PKG_VERSION"));
        let config = ClientConfig {
            protocol: if plain { ClientProtocol::Http } else { ClientProtocol::Https },
            connect_timeout: Some(CONNECT_TIMEOUT),
            read_timeout: Some(READ_TIMEOUT),
            user_agent,
            ..ClientConfig::default()
        };
        let client = Client::try_from(config).map_err(|e| system(&e))?;
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            // An upload may take any time before it is answered, so that silence alone says nothing; bytes that are never
            // acknowledged do.
            .tcp_user_timeout(READ_TIMEOUT)
            .tcp_keepalive(READ_TIMEOUT)
            .user_agent(user_agent)
            .build()
            .map_err(|e| system(&e))?;
        let scheme = if plain { "http" } else { "https" };
        let (host, repository) = (host.to_owned(), repository.to_owned());
        Ok(Self {
            client,
            http,
            host,
            repository,
            scheme,
            auth,
            pull_token: Mutex::default(),
            push_token: Mutex::default(),
            place,
        })
    }

    fn image(&self, tag: &str) -> Reference {
        let (host, repository) = (self.host.clone(), self.repository.clone());
        match tag.starts_with("sha256:") {
            true => Reference::with_digest(host, repository, tag.to_owned()),
            false => Reference::with_tag(host, repository, tag.to_owned()),
        }
    }

    /// Host as it is connected to.
    pub(super) fn address(&self) -> String {
        self.image("latest").resolve_registry().to_owned()
    }

    pub(super) fn repository(&self) -> &str {
        &self.repository
    }

    /// Whether another store is the same registry, so that blobs can be mounted.
    pub(crate) fn shares_host(&self, other: &Self) -> bool {
        self.host == other.host && self.scheme == other.scheme
    }

    /// Logs in, so that a refusal is told as such; `client` would go on without a token.
    pub(crate) async fn login(&self, push: bool) -> Result<(), StoreError> {
        let operation = if push { RegistryOperation::Push } else { RegistryOperation::Pull };
        let token = self.client.auth(&self.image("latest"), &self.auth, operation).await;
        let token = token.map_err(|e| self.error("login", e))?;
        let slot = if push { &self.push_token } else { &self.pull_token };
        *slot.lock().await = Some((Instant::now(), token));
        Ok(())
    }

    /// The token for a push; `None` where there is none to send. `stale` asks for a new one.
    pub(super) async fn push_token(&self, stale: bool) -> Result<Option<String>, StoreError> {
        self.token(true, stale).await
    }

    /// The same for what only reads.
    pub(super) async fn pull_token(&self, stale: bool) -> Result<Option<String>, StoreError> {
        self.token(false, stale).await
    }

    async fn token(&self, push: bool, stale: bool) -> Result<Option<String>, StoreError> {
        let slot = if push { &self.push_token } else { &self.pull_token };
        let fresh = slot.lock().await.clone().filter(|(since, _)| !stale && since.elapsed() < TOKEN_AGE);
        if let Some((_, token)) = fresh {
            return Ok(token);
        }
        self.login(push).await?;
        Ok(slot.lock().await.clone().and_then(|(_, token)| token))
    }

    /// Stores a manifest under a tag or its digest.
    pub(crate) async fn put_manifest(
        &self,
        tag: &str,
        bytes: Vec<u8>,
        media_type: &'static str,
    ) -> Result<(), StoreError> {
        let media_type = reqwest::header::HeaderValue::from_static(media_type);
        self.client.store_auth_if_needed(&self.address(), &self.auth).await;
        let pushed = self.client.push_manifest_raw(&self.image(tag), bytes, media_type).await;
        pushed.map(|_| ()).map_err(|e| self.error("manifest", e))
    }

    pub(crate) async fn has_blob(&self, sha256: &str) -> Result<bool, StoreError> {
        self.client.store_auth_if_needed(&self.address(), &self.auth).await;
        let exists = self.client.blob_exists(&self.image("latest"), &format!("sha256:{sha256}")).await;
        exists.map_err(|e| self.error(&format!("blob sha256:{sha256}"), e))
    }

    /// Makes a blob of another repository of the same registry one of this, without moving it; whether that worked.
    pub(crate) async fn mount(&self, from: &Self, sha256: &str) -> bool {
        let mounted =
            self.client.mount_blob(&self.image("latest"), &from.image("latest"), &format!("sha256:{sha256}")).await;
        mounted.is_ok() && self.has_blob(sha256).await.unwrap_or(false)
    }

    /// The bytes of a blob from an offset on. Whoever reads them checks the digest.
    pub(crate) async fn read_blob(&self, sha256: &str, offset: u64) -> Result<ByteStream, StoreError> {
        let digest = format!("sha256:{sha256}");
        let what = format!("blob {digest}");
        let descriptor = oci_client::manifest::OciDescriptor { digest, ..Default::default() };
        self.client.store_auth_if_needed(&self.address(), &self.auth).await;
        let response = self.client.pull_blob_stream_partial(&self.image("latest"), &descriptor, offset, None).await;
        let (stream, mut skip) = match response.map_err(|e| self.error(&what, e))? {
            oci_client::client::BlobResponse::Partial(stream) => (stream.stream, 0),
            // A registry without ranges sends everything: what is there already is passed over.
            oci_client::client::BlobResponse::Full(stream) => (stream.stream, offset),
        };
        let place: Arc<str> = self.place.as_str().into();
        let what: Arc<str> = what.into();
        let pieces = stream.map(move |piece| {
            let mut piece = piece.map_err(|e| StoreError::Transfer {
                place: place.to_string(),
                what: what.to_string(),
                reason: format!("the transfer broke off: {}", broken(&e)),
                transient: true,
            })?;
            let passed = skip.min(piece.len() as u64);
            skip -= passed;
            Ok(piece.split_off(passed as usize))
        });
        Ok(pieces.boxed())
    }

    /// Notes a referrer in the index that stands for the referrers API where a registry has none: the tag
    /// `sha256-<digest of the subject>` (OCI distribution specification, "Referrers Tag Schema").
    pub(crate) async fn note_referrer(&self, subject: &str, referrer: Descriptor) -> Result<(), StoreError> {
        let artifact_type = referrer.artifact_type.clone().unwrap_or_default();
        let known = self.referrers(subject, &artifact_type).await?;
        if known.iter().any(|d| d.digest == referrer.digest) {
            return Ok(());
        }
        let tag = subject.replace(':', "-");
        let mut index = match self.manifest(&tag).await? {
            Some((bytes, _)) => serde_json::from_slice(&bytes).map_err(|e| StoreError::NotABundle {
                place: self.place.clone(),
                reason: format!("the tag {tag} is no image index: {e}"),
            })?,
            None => ImageIndex::default(),
        };
        index.manifests.push(referrer);
        self.put_manifest(&tag, to_bytes(&index, &self.place)?, INDEX_TYPE).await
    }

    /// What an error of the client means.
    fn error(&self, what: &str, error: OciDistributionError) -> StoreError {
        let place = self.place.clone();
        let transfer = |reason: String, transient| StoreError::Transfer {
            place: self.place.clone(),
            what: what.to_owned(),
            reason,
            transient,
        };
        match error {
            OciDistributionError::RequestError(e) => self.request_error(what, e),
            OciDistributionError::AuthenticationFailure(reason) => self.denied(&reason),
            OciDistributionError::UnauthorizedError { .. } => self.denied("unauthorized"),
            OciDistributionError::ServerError { code, message, .. } => self.status_error(what, code, &message),
            OciDistributionError::ImageManifestNotFoundError(_) => {
                StoreError::NotFound { place, what: what.to_owned() }
            }
            OciDistributionError::RegistryError { envelope, .. } => {
                let text = envelope.to_string();
                let has = |codes: &[OciErrorCode]| envelope.errors.iter().any(|e| codes.contains(&e.code));
                if has(&[OciErrorCode::Unauthorized, OciErrorCode::Denied]) {
                    self.denied(&text)
                } else if has(&[
                    OciErrorCode::BlobUnknown,
                    OciErrorCode::ManifestUnknown,
                    OciErrorCode::NameUnknown,
                    OciErrorCode::NotFound,
                ]) {
                    StoreError::NotFound { place, what: what.to_owned() }
                } else {
                    transfer(shortened(&text), has(&[OciErrorCode::Toomanyrequests]))
                }
            }
            OciDistributionError::DigestError(e) => match e {
                oci_client::errors::DigestError::VerificationError { expected, actual } => {
                    StoreError::Digest { place, what: what.to_owned(), found: actual, expected }
                }
                other => transfer(other.to_string(), false),
            },
            OciDistributionError::IoError(e) => transfer(broken(&e), true),
            other => transfer(shortened(&other.to_string()), false),
        }
    }

    /// What an error of a request means. Its address is left out: uploads and redirects carry signatures there.
    pub(super) fn request_error(&self, what: &str, error: reqwest::Error) -> StoreError {
        let error = error.without_url();
        if let Some(status) = error.status() {
            return self.status_error(what, status.as_u16(), "");
        }
        if error.is_connect() {
            return StoreError::Unreachable { place: self.place.clone(), reason: causes(&error) };
        }
        let (place, what) = (self.place.clone(), what.to_owned());
        StoreError::Transfer { place, what, reason: causes(&error), transient: !error.is_builder() }
    }

    /// What a status of a response means.
    pub(super) fn status_error(&self, what: &str, status: u16, message: &str) -> StoreError {
        let place = self.place.clone();
        match status {
            401 | 403 => self.denied(&format!("{status} {}", shortened(message))),
            404 => StoreError::NotFound { place, what: what.to_owned() },
            _ => StoreError::Transfer {
                place,
                what: what.to_owned(),
                reason: format!("the registry answers {status} {}", shortened(message)).trim_end().to_owned(),
                transient: status == 408 || status == 429 || status == 499 || status >= 500,
            },
        }
    }

    fn denied(&self, reason: &str) -> StoreError {
        let file = credentials::config_file().unwrap_or_else(|| Path::new("~/.docker/config.json").to_owned());
        let advice = match self.auth {
            RegistryAuth::Anonymous => {
                format!(
                    "there are no credentials for {} in {}; run `docker login {}`",
                    self.host,
                    file.display(),
                    self.host
                )
            }
            _ => format!(
                "the credentials for {} in {} do not suffice; run `docker login {}`",
                self.host,
                file.display(),
                self.host
            ),
        };
        StoreError::Denied { place: self.place.clone(), reason: shortened(reason.trim()), advice }
    }
}

/// Why a body broke off.
fn broken(error: &std::io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<reqwest::Error>()) {
        // Its own text names the address, in which there may be a signature; its causes do not.
        Some(inner) => std::error::Error::source(inner).map_or_else(|| "connection lost".to_owned(), causes),
        None => causes(error),
    }
}

/// A message of a server in one line of bearable length.
fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(300) {
        Some((at, _)) => format!("{}...", &line[..at]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_needs_no_tls() {
        for host in ["localhost:5000", "127.0.0.1", "127.0.0.1:5000", "[::1]:5000", "localhost"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["ghcr.io", "10.0.0.1:5000", "localhost.example.org", "[2001:db8::1]"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
