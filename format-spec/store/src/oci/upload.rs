//! Uploading a blob to a registry: one session, one request for all bytes, resumed where the registry says it stands.
//!
//! `POST` opens a session, `PATCH` sends, `GET` on the session tells how far it got after a failure, `PUT` closes it with
//! the digest, against which the registry checks what it received (OCI distribution specification, "Pushing a blob in
//! chunks").

use std::sync::{Arc, Mutex};

use reqwest::header::{CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, LOCATION, RANGE};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use sha2::{Digest, Sha256};
use url::Url;

use crate::contents::Entry;
use crate::error::StoreError;
use crate::oci::registry::Registry;
use crate::progress::Meter;
use crate::retry::Retry;
use crate::source::Source;
use crate::stream;

impl Registry {
    /// Uploads a blob and gives its SHA-256. Where the entry knows it, a broken upload is resumed and the registry
    /// refuses other bytes; where not, it is computed on the way.
    pub(crate) async fn write_blob(
        &self,
        entry: &Entry,
        source: &Source<'_>,
        meter: &Meter,
    ) -> Result<String, StoreError> {
        let mut retry = Retry::default();
        let mut session: Option<(Url, u64)> = None;
        loop {
            let hasher = entry.sha256.is_none().then(|| Arc::new(Mutex::new(Sha256::new())));
            let (location, at) = match session.take() {
                Some(open) => open,
                None => match self.open_session(entry).await {
                    Ok(location) => (location, 0),
                    Err(error) => {
                        retry.after(error, meter).await?;
                        continue;
                    }
                },
            };
            meter.set(at);
            let error = match self.send(location.clone(), at, entry, source, hasher.as_ref(), meter).await {
                Ok(sha256) => return Ok(sha256),
                Err(error) => error,
            };
            retry.after(error, meter).await?;
            if hasher.is_none()
                && let Some((location, reached)) = self.session_state(location).await
                && reached <= entry.size
            {
                if reached > at {
                    retry.progressed();
                }
                session = Some((location, reached));
            }
        }
    }

    /// What an answer says that is no success.
    async fn message(&self, response: Response, what: &str) -> String {
        let bytes = self.bounded(response, what).await.unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    async fn open_session(&self, entry: &Entry) -> Result<Url, StoreError> {
        let url = self.url(&["blobs", "uploads", ""], &entry.path)?;
        let response =
            self.authorized(Method::POST, &url, |request| request.header(CONTENT_LENGTH, 0), &entry.path).await?;
        self.location(&url, response, StatusCode::ACCEPTED, &entry.path).await
    }

    /// Sends the bytes from `at` on and closes the session.
    async fn send(
        &self,
        mut location: Url,
        at: u64,
        entry: &Entry,
        source: &Source<'_>,
        hasher: Option<&Arc<Mutex<Sha256>>>,
        meter: &Meter,
    ) -> Result<String, StoreError> {
        if at < entry.size {
            let mut bytes = stream::counted(source.open_checked(entry, at).await?, meter);
            if let Some(hasher) = hasher {
                bytes = stream::hashed(bytes, hasher);
            }
            let failed = Arc::new(Mutex::new(None));
            let body = reqwest::Body::wrap_stream(stream::watched(bytes, &failed));
            let token = self.push_token(false).await?;
            let request = self.request(Method::PATCH, &location, token.as_deref());
            let sent = request
                .header(CONTENT_TYPE, "application/octet-stream")
                .header(CONTENT_LENGTH, entry.size - at)
                .header(CONTENT_RANGE, format!("{at}-{}", entry.size - 1))
                .body(body)
                .send()
                .await;
            // The cause is ours where reading failed: the client only says that the body broke off.
            if let Some(error) = failed.lock().ok().and_then(|mut slot| slot.take()) {
                return Err(error);
            }
            let response = sent.map_err(|e| self.request_error(&entry.path, e))?;
            if response.status() == StatusCode::UNAUTHORIZED {
                return Err(self.expired(&entry.path).await);
            }
            location = self.location(&location, response, StatusCode::ACCEPTED, &entry.path).await?;
        }
        let sha256 = match (&entry.sha256, hasher.and_then(|h| h.lock().ok())) {
            (Some(sha256), _) => sha256.clone(),
            (None, Some(hasher)) => stream::hex(&hasher.clone().finalize()),
            (None, None) => return Err(self.malformed(&entry.path, "its SHA-256 is not known")),
        };
        location.query_pairs_mut().append_pair("digest", &format!("sha256:{sha256}"));
        let close = |request: RequestBuilder| request.header(CONTENT_LENGTH, 0);
        let response = self.authorized(Method::PUT, &location, close, &entry.path).await?;
        match response.status() {
            StatusCode::CREATED | StatusCode::NO_CONTENT | StatusCode::OK => Ok(sha256),
            status => {
                let message = self.message(response, "answer").await;
                if message.contains("DIGEST_INVALID") {
                    let (place, what) = (self.place.clone(), entry.path.clone());
                    let found = "another one, says the registry".to_owned();
                    return Err(StoreError::Digest { place, what, found, expected: format!("sha256:{sha256}") });
                }
                Err(self.status_error(&entry.path, status.as_u16(), &message))
            }
        }
    }

    /// Where a session stands: its present address and the bytes that arrived; `None` where it is gone.
    async fn session_state(&self, location: Url) -> Option<(Url, u64)> {
        let response = self.authorized(Method::GET, &location, |request| request, "upload").await.ok()?;
        if response.status() != StatusCode::NO_CONTENT {
            return None;
        }
        let range = response.headers().get(RANGE)?.to_str().ok()?;
        let last: u64 = range.trim_start_matches("bytes=").split_once('-')?.1.parse().ok()?;
        let next = response.headers().get(LOCATION).and_then(|v| v.to_str().ok()).and_then(|v| location.join(v).ok());
        // `0-0` is what a registry says of nothing as well as of one byte.
        let reached = if last == 0 { 0 } else { last + 1 };
        (reached > 0).then(|| (next.unwrap_or(location), reached))
    }

    /// A token that expired during a long upload: the next attempt has a new one.
    async fn expired(&self, what: &str) -> StoreError {
        match self.push_token(true).await {
            Ok(_) => StoreError::Transfer {
                place: self.place.clone(),
                what: what.to_owned(),
                reason: "the registry's token has expired".to_owned(),
                transient: true,
            },
            Err(error) => error,
        }
    }

    async fn location(
        &self,
        base: &Url,
        response: Response,
        expected: StatusCode,
        what: &str,
    ) -> Result<Url, StoreError> {
        let status = response.status();
        if status != expected && status != StatusCode::CREATED && status != StatusCode::NO_CONTENT {
            let message = self.message(response, "answer").await;
            return Err(self.status_error(what, status.as_u16(), &message));
        }
        let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
        location.and_then(|text| base.join(text).ok()).ok_or_else(|| self.malformed(what, "the answer has no Location"))
    }
}
