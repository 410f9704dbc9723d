//! An OCI registry: its address, blobs by range, writing manifests, what its errors mean. Logging in is in
//! [`super::login`], what it answers in a few bytes in [`super::fetch`], uploads are in [`super::upload`].

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use reqwest::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, RANGE};
use reqwest::{ClientBuilder, Method, RequestBuilder, Response, StatusCode};
use tokio::sync::Mutex;
use url::Url;

use crate::credentials::{self, Credentials};
use crate::error::{StoreError, causes};
use crate::oci::model_pack::{Descriptor, INDEX_TYPE, ImageIndex, to_bytes};
use crate::store::State;
use crate::stream::ByteStream;

/// How long a token is used before a new one is asked for. The specification promises 60 s.
const TOKEN_AGE: Duration = Duration::from_secs(45);
/// A connection that does not come about in this time is given up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection on which nothing comes for this long is given up.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// A repository of a registry.
pub(crate) struct Registry {
    /// For requests whose answer may take any time.
    pub(super) http: reqwest::Client,
    /// For requests that only read: silence means that nothing comes any more.
    reading: reqwest::Client,
    host: String,
    repository: String,
    pub(super) scheme: &'static str,
    pub(super) credentials: Credentials,
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
        let credentials = credentials::for_registry(host, credentials::config_file().as_deref())?;
        let built = |builder: ClientBuilder| {
            builder.build().map_err(|e| StoreError::Transfer {
                place: place.clone(),
                what: "TLS".to_owned(),
                reason: format!("{}; install the system's CA certificates (package ca-certificates)", causes(&e)),
                transient: false,
            })
        };
        let base = || {
            let user_agent = concat!("vt/", env!("CARGO_PKG_VERSION"));
            reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT).user_agent(user_agent)
        };
        // An upload may take any time before it is answered, so that silence alone says nothing; bytes that are never
        // acknowledged do.
        let http = built(base().tcp_user_timeout(READ_TIMEOUT).tcp_keepalive(READ_TIMEOUT))?;
        let reading = built(base().read_timeout(READ_TIMEOUT))?;
        let scheme = if plain { "http" } else { "https" };
        let (host, repository) = (host.to_owned(), repository.to_owned());
        let (pull_token, push_token) = (Mutex::default(), Mutex::default());
        Ok(Self { http, reading, host, repository, scheme, credentials, pull_token, push_token, place })
    }

    /// Host as it is connected to: Docker Hub answers at another name than it is called by.
    pub(super) fn address(&self) -> &str {
        if self.host == "docker.io" { "index.docker.io" } else { &self.host }
    }

    pub(super) fn repository(&self) -> &str {
        &self.repository
    }

    /// Whether another store is the same registry, so that blobs can be mounted.
    pub(crate) fn shares_host(&self, other: &Self) -> bool {
        self.host == other.host && self.scheme == other.scheme
    }

    /// Logs in.
    pub(crate) async fn login(&self, push: bool) -> Result<(), StoreError> {
        let token = self.ask_token(push).await?;
        let slot = if push { &self.push_token } else { &self.pull_token };
        *slot.lock().await = Some((Instant::now(), token));
        Ok(())
    }

    /// The token for a push; `None` where there is none to send. `stale` asks for a new one.
    pub(super) async fn push_token(&self, stale: bool) -> Result<Option<String>, StoreError> {
        self.token(true, stale).await
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

    /// An address below the repository.
    pub(super) fn url(&self, path: &[&str], what: &str) -> Result<Url, StoreError> {
        let address = format!("{}://{}/v2/{}/{}", self.scheme, self.address(), self.repository, path.join("/"));
        Url::parse(&address).map_err(|e| self.malformed(what, &e.to_string()))
    }

    /// A request with credentials, if it goes to the registry that they belong to.
    pub(super) fn request(&self, method: Method, url: &Url, token: Option<&str>) -> RequestBuilder {
        let client = if method == Method::GET || method == Method::HEAD { &self.reading } else { &self.http };
        let request = client.request(method, url.clone());
        let home = Url::parse(&format!("{}://{}", self.scheme, self.address())).ok();
        if home.is_none_or(|home| home.origin() != url.origin()) {
            return request;
        }
        match (token, &self.credentials) {
            (Some(token), _) => request.bearer_auth(token),
            (None, Credentials::Basic(user, password)) => request.basic_auth(user, Some(password)),
            _ => request,
        }
    }

    /// A request that can be made again; once more with a new token where the old one has expired.
    pub(super) async fn authorized(
        &self,
        method: Method,
        url: &Url,
        more: impl Fn(RequestBuilder) -> RequestBuilder,
        what: &str,
    ) -> Result<Response, StoreError> {
        let push = method != Method::GET && method != Method::HEAD;
        for stale in [false, true] {
            let token = self.token(push, stale).await?;
            let response = more(self.request(method.clone(), url, token.as_deref())).send().await;
            let response = response.map_err(|e| self.request_error(what, e))?;
            if response.status() != StatusCode::UNAUTHORIZED || stale {
                return Ok(response);
            }
        }
        Err(self.status_error(what, StatusCode::UNAUTHORIZED.as_u16(), ""))
    }

    /// The body of an answer that says that all went well.
    pub(super) async fn successful(&self, response: Response, what: &str) -> Result<Vec<u8>, StoreError> {
        let status = response.status();
        let body = self.bounded(response, what).await;
        if status.is_success() {
            return body;
        }
        let message = body.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        Err(self.status_error(what, status.as_u16(), &message))
    }

    /// Stores a manifest under a tag or its digest.
    pub(crate) async fn put_manifest(
        &self,
        tag: &str,
        bytes: Vec<u8>,
        media_type: &'static str,
    ) -> Result<(), StoreError> {
        let what = "manifest";
        let with_body = |request: RequestBuilder| request.header(CONTENT_TYPE, media_type).body(bytes.clone());
        let response = self.authorized(Method::PUT, &self.url(&["manifests", tag], what)?, with_body, what).await?;
        self.successful(response, what).await.map(|_| ())
    }

    /// What the repository says of a blob. One of another size than it must have is damaged, whatever its name.
    pub(crate) async fn state(&self, sha256: &str, size: u64) -> Result<State, StoreError> {
        let what = format!("blob sha256:{sha256}");
        let url = self.url(&["blobs", &format!("sha256:{sha256}")], &what)?;
        let response = self.authorized(Method::HEAD, &url, |request| request, &what).await?;
        if response.status() == StatusCode::NOT_FOUND {
            return Ok(State::Absent);
        }
        let found = response.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        self.successful(response, &what).await?;
        Ok(if found.is_none_or(|found| found == size) { State::Present } else { State::Damaged })
    }

    /// Makes a blob of another repository of the same registry one of this, without moving it; whether that worked.
    pub(crate) async fn mount(&self, from: &Self, sha256: &str, size: u64) -> bool {
        let Ok(mut url) = self.url(&["blobs", "uploads", ""], "mount") else { return false };
        url.query_pairs_mut().append_pair("mount", &format!("sha256:{sha256}")).append_pair("from", from.repository());
        let more = |request: RequestBuilder| request.header(CONTENT_LENGTH, 0);
        let mounted = self.authorized(Method::POST, &url, more, "mount").await;
        mounted.is_ok_and(|response| response.status() == StatusCode::CREATED)
            && self.state(sha256, size).await.is_ok_and(|state| state == State::Present)
    }

    /// The bytes of a blob from an offset on. Whoever reads them checks the digest.
    pub(crate) async fn read_blob(&self, sha256: &str, offset: u64) -> Result<ByteStream, StoreError> {
        let what = format!("blob sha256:{sha256}");
        let url = self.url(&["blobs", &format!("sha256:{sha256}")], &what)?;
        let more = |request: RequestBuilder| match offset {
            0 => request.header(ACCEPT, "*/*"),
            _ => request.header(ACCEPT, "*/*").header(RANGE, format!("bytes={offset}-")),
        };
        let response = self.authorized(Method::GET, &url, more, &what).await?;
        let mut skip = match response.status() {
            StatusCode::PARTIAL_CONTENT => 0,
            // A registry without ranges sends everything: what is there already is passed over.
            StatusCode::OK => offset,
            status => {
                let message = self.bounded(response, &what).await.unwrap_or_default();
                return Err(self.status_error(&what, status.as_u16(), &String::from_utf8_lossy(&message)));
            }
        };
        let place: Arc<str> = self.place.as_str().into();
        let what: Arc<str> = what.into();
        let pieces = response.bytes_stream().map(move |piece| {
            let mut piece = piece.map_err(|e| StoreError::Transfer {
                place: place.to_string(),
                what: what.to_string(),
                reason: format!("the transfer broke off: {}", causes(&e.without_url())),
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

    pub(super) fn malformed(&self, what: &str, reason: &str) -> StoreError {
        let (place, what, reason) = (self.place.clone(), what.to_owned(), reason.to_owned());
        StoreError::Transfer { place, what, reason, transient: false }
    }

    pub(super) fn denied(&self, reason: &str) -> StoreError {
        let file = credentials::config_file().unwrap_or_else(|| Path::new("~/.docker/config.json").to_owned());
        let advice = match self.credentials {
            Credentials::Anonymous => {
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
