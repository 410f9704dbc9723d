//! API keys.

use super::asked::discard;
use super::error::ApiError;
use super::state::AppState;
use crate::engine::CacheSalt;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// Keys that are accepted, as hashes: comparing hashes of secrets tells nothing of how far two secrets
/// agree, and `blake3::Hash` compares in constant time besides.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    hashes: Vec<blake3::Hash>,
}

/// Whose request it is, as far as the prefix cache is concerned.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tenant {
    /// Separates the prefix cache of this key's requests.
    pub salt: CacheSalt,
}

impl Keys {
    /// The given keys; none means that anybody may ask.
    pub fn new(keys: &[String]) -> Self {
        Self { hashes: keys.iter().map(|key| blake3::hash(key.as_bytes())).collect() }
    }

    /// Why a key can never come with a request, if it cannot: it is empty, or no header can carry it.
    pub fn fault(key: &str) -> Option<&'static str> {
        if key.is_empty() {
            // Whoever sends an empty header would be let in.
            return Some("is empty");
        }
        let sent = key.trim() == key && HeaderValue::from_str(key).is_ok();
        (!sent).then_some("has spaces around it or characters that a header cannot carry")
    }

    /// Reads a file with one key a line; blank lines and lines that begin with `#` are skipped, as is the mark with which
    /// some editors begin a file.
    pub fn parse_file(text: &str) -> Vec<String> {
        text.trim_start_matches('\u{feff}')
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(str::to_owned)
            .collect()
    }

    /// The tenant of a request with these headers, where it may ask.
    fn admit(&self, headers: &HeaderMap) -> Option<Tenant> {
        if self.hashes.is_empty() {
            return Some(Tenant::default());
        }
        let key = presented_key(headers).filter(|key| !key.is_empty())?;
        let hash = blake3::hash(key);
        // All keys are compared, so that the time does not tell which one it was.
        let matching = self.hashes.iter().fold(false, |found, accepted| found | (*accepted == hash));
        matching.then(|| Tenant { salt: CacheSalt::from_secret(key) })
    }
}

/// The key in `Authorization: Bearer`, or in Anthropic's `x-api-key`.
fn presented_key(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let (scheme, key) = value.as_bytes().split_at_checked("Bearer ".len())?;
        return scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key);
    }
    headers.get("x-api-key").map(|value| value.as_bytes())
}

/// Lets requests with a key through, and everybody to `/health`.
pub async fn authenticate(State(state): State<Arc<AppState>>, mut request: Request, next: Next) -> Response {
    let tenant = state.keys.admit(request.headers());
    if let Some(tenant) = tenant {
        request.extensions_mut().insert(tenant);
    } else if request.uri().path() != "/health" {
        discard(request, state.config.max_body_bytes).await;
        return ApiError::unauthorized().into_response();
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::HeaderName::from_static(name), HeaderValue::from_static(value))])
    }

    #[test]
    fn keys_are_needed_where_there_are_any() {
        assert!(Keys::default().admit(&HeaderMap::new()).is_some());
        let keys = Keys::new(&Keys::parse_file("# ours\n\n first \nsecond\n"));
        let admitted = |headers: HeaderMap| keys.admit(&headers).is_some();
        assert!(admitted(with("authorization", "Bearer first")));
        assert!(admitted(with("authorization", "bearer second")));
        assert!(admitted(with("x-api-key", "second")));
        for refused in ["Bearer third", "Bearer firs", "Bearer ", "first", "Basic first", ""] {
            assert!(!admitted(with("authorization", refused)), "{refused}");
        }
        assert!(!admitted(HeaderMap::new()));
        assert_eq!(Keys::parse_file("\u{feff}first\r\n# x\r\n"), ["first"]);
    }

    #[test]
    fn keys_that_cannot_be_sent_are_found_out() {
        for good in ["a", "sk-0_.~", "two words"] {
            assert_eq!(Keys::fault(good), None, "{good}");
        }
        for bad in ["", " ", " a", "a\t", "a\nb", "a\u{7f}"] {
            assert!(Keys::fault(bad).is_some(), "{bad:?}");
        }
        // Nor would an empty one be let in.
        assert!(Keys::new(&[String::new()]).admit(&with("x-api-key", "")).is_none());
    }

    #[test]
    fn tenants_have_salts_of_their_own() {
        let keys = Keys::new(&["a".to_owned(), "b".to_owned()]);
        let salt = |key| keys.admit(&with("x-api-key", key)).unwrap().salt;
        assert_ne!(salt("a"), salt("b"));
        assert_eq!(salt("a"), salt("a"));
    }
}
