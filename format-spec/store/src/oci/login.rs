//! Logging in: what a registry asks for, and the token of the server that it names (Docker's "Token Authentication
//! Specification"). Answers are bounded as all others are.

use reqwest::header::WWW_AUTHENTICATE;
use reqwest::{Method, Response};
use serde::Deserialize;
use url::Url;

use crate::credentials::Credentials;
use crate::error::StoreError;
use crate::oci::registry::{READ_TIMEOUT, Registry};

/// Where a token comes from.
#[derive(Debug, PartialEq, Eq)]
struct Challenge {
    realm: String,
    service: Option<String>,
}

/// The answer of a token server; older ones have only the first.
#[derive(Deserialize)]
struct Answer {
    token: Option<String>,
    access_token: Option<String>,
}

impl Registry {
    /// A new token; `None` where the registry asks for none, or for user and password with each request.
    pub(super) async fn ask_token(&self, push: bool) -> Result<Option<String>, StoreError> {
        if let Credentials::Bearer(token) = &self.credentials {
            return Ok(Some(token.clone()));
        }
        let what = "login";
        let address = format!("{}://{}/v2/", self.scheme, self.address());
        let home = Url::parse(&address).map_err(|e| self.malformed(what, &e.to_string()))?;
        let asked = self.http.get(home.clone()).timeout(READ_TIMEOUT).send().await;
        let Some(challenge) = challenge_of(&asked.map_err(|e| self.request_error(what, e))?) else { return Ok(None) };
        let mut realm = home.join(&challenge.realm).map_err(|e| self.malformed(what, &format!("its realm: {e}")))?;
        let scope = format!("repository:{}:{}", self.repository(), if push { "pull,push" } else { "pull" });
        realm.query_pairs_mut().append_pair("scope", &scope);
        if let Some(service) = &challenge.service {
            realm.query_pairs_mut().append_pair("service", service);
        }
        let mut request = self.http.request(Method::GET, realm).timeout(READ_TIMEOUT);
        if let Credentials::Basic(user, password) = &self.credentials {
            request = request.basic_auth(user, Some(password));
        }
        let response = request.send().await.map_err(|e| self.request_error(what, e))?;
        let status = response.status();
        if status.is_client_error() && status.as_u16() != 408 && status.as_u16() != 429 {
            let reason = self.bounded(response, what).await.unwrap_or_default();
            return Err(self.denied(&format!("{} {}", status.as_u16(), String::from_utf8_lossy(&reason))));
        }
        let body = self.successful(response, what).await?;
        // What cannot be read is not quoted: it may hold the token.
        let answer: Option<Answer> = serde_json::from_slice(&body).ok();
        let token = answer.and_then(|answer| answer.token.or(answer.access_token)).filter(|token| !token.is_empty());
        token.map(Some).ok_or_else(|| self.malformed(what, "the answer of the token server holds no token"))
    }
}

fn challenge_of(response: &Response) -> Option<Challenge> {
    let headers = response.headers().get_all(WWW_AUTHENTICATE);
    headers.iter().filter_map(|value| value.to_str().ok()).find_map(bearer)
}

/// The Bearer challenge among those of a header (RFC 9110, "WWW-Authenticate": `scheme key=value, key="value", scheme ...`).
fn bearer(header: &str) -> Option<Challenge> {
    let (mut scheme, mut realm, mut service) = ("", None, None);
    let mut rest = header;
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        let word_end = rest.find(['=', ' ', '\t', ',']).unwrap_or(rest.len());
        let word = &rest[..word_end];
        if word.is_empty() {
            break;
        }
        rest = rest[word_end..].trim_start_matches([' ', '\t']);
        let Some(value) = rest.strip_prefix('=') else {
            if realm.is_some() {
                break;
            }
            scheme = word;
            continue;
        };
        let value = value.trim_start_matches([' ', '\t']);
        let (text, after) = match value.strip_prefix('"') {
            Some(quoted) => unquoted(quoted)?,
            None => {
                let end = value.find([' ', '\t', ',']).unwrap_or(value.len());
                (value[..end].to_owned(), &value[end..])
            }
        };
        rest = after;
        if scheme.eq_ignore_ascii_case("bearer") {
            match word.to_ascii_lowercase().as_str() {
                "realm" => realm = Some(text),
                "service" => service = Some(text),
                _ => {}
            }
        }
    }
    realm.map(|realm| Challenge { realm, service })
}

/// A quoted string whose first quote has been read, and what comes after it; `None` where it does not end.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(letters.next()?.1),
            _ => value.push(letter),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_read_as_registries_write_them() {
        let challenge = |realm: &str, service: Option<&str>| {
            Some(Challenge { realm: realm.to_owned(), service: service.map(str::to_owned) })
        };
        for (header, expected) in [
            (
                r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io""#,
                challenge("https://auth.docker.io/token", Some("registry.docker.io")),
            ),
            (r#"Basic realm="a, b=c", bearer Realm=/t , scope="x y""#, challenge("/t", None)),
            (r#"Bearer realm="a\"b", Basic realm="other""#, challenge("a\"b", None)),
            (r#"Basic realm="Registry Realm""#, None),
            (r#"Bearer realm="https://never.ends"#, None),
            ("", None),
            ("= , =", None),
        ] {
            assert_eq!(bearer(header), expected, "{header}");
        }
    }
}
