//! Credentials for registries: Docker's configuration file and its credential helpers.
//!
//! Read are `auths`, `credHelpers` and `credsStore` of `$DOCKER_CONFIG/config.json` (`~/.docker/config.json`), as `docker
//! login` writes them; a helper is a program `docker-credential-NAME` that is given the host and answers in JSON.

use std::collections::HashMap;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use base64::Engine;
use serde::Deserialize;

use crate::error::StoreError;

/// Name that a helper and an entry give instead of a user where the secret is an identity token.
const TOKEN_USER: &str = "<token>";

/// What a registry is asked with.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Credentials {
    /// Nothing.
    Anonymous,
    /// User and password.
    Basic(String, String),
    /// A token that the registry takes as it is.
    Bearer(String),
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Anonymous => "Anonymous",
            Self::Basic(..) => "Basic(***)",
            Self::Bearer(_) => "Bearer(***)",
        })
    }
}

/// Any of it may be missing or null, which Docker takes for the same.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Config {
    auths: Option<HashMap<String, Option<Auth>>>,
    #[serde(rename = "credHelpers")]
    helpers: Option<HashMap<String, Option<String>>>,
    #[serde(rename = "credsStore")]
    store: Option<String>,
}

impl Config {
    /// The helper that is asked for a host; a host's own entry counts even where it is empty and so means none.
    fn helper(&self, names: &[String]) -> Option<&str> {
        let own = self.helpers.as_ref().and_then(|helpers| names.iter().find_map(|name| helpers.get(name)));
        own.unwrap_or(&self.store).as_deref().filter(|helper| !helper.is_empty())
    }

    fn entry(&self, names: &[String]) -> Option<&Auth> {
        let auths = self.auths.as_ref()?;
        names.iter().find_map(|name| auths.get(name).and_then(Option::as_ref))
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Auth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// The file that holds credentials: `$DOCKER_CONFIG/config.json` or `~/.docker/config.json`.
pub(crate) fn config_file() -> Option<PathBuf> {
    let dir = match std::env::var_os("DOCKER_CONFIG").filter(|v| !v.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".docker"),
    };
    Some(dir.join("config.json"))
}

/// Credentials for a registry; anonymous where there are none.
///
/// # Errors
/// [`StoreError::Denied`] where the file or a helper cannot be understood. Neither is quoted: they hold secrets.
pub(crate) fn for_registry(host: &str, file: Option<&Path>) -> Result<Credentials, StoreError> {
    let Some(path) = file else { return Ok(Credentials::Anonymous) };
    let denied = |reason: String| StoreError::Denied {
        place: host.to_owned(),
        reason,
        advice: "log in again (`docker login HOST` writes the file), or mend it".to_owned(),
    };
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Credentials::Anonymous),
        Err(e) => return Err(denied(format!("{}: {e}", path.display()))),
    };
    if bytes.trim_ascii().is_empty() {
        return Ok(Credentials::Anonymous);
    }
    let config: Option<Config> = serde_json::from_slice(&bytes)
        .map_err(|e| denied(format!("{}: not valid at line {}", path.display(), e.line())))?;
    let config = config.unwrap_or_default();
    let names = names_of(host);
    if let Some(helper) = config.helper(&names)
        && let Some(auth) = ask_helper(helper, &names).map_err(denied)?
    {
        return Ok(auth);
    }
    match config.entry(&names) {
        Some(auth) => from_entry(auth).map_err(|reason| denied(format!("{}: {reason}", path.display()))),
        None => Ok(Credentials::Anonymous),
    }
}

/// The keys under which a host's credentials may stand. Docker Hub has a name of its own there.
fn names_of(host: &str) -> Vec<String> {
    let mut names =
        vec![host.to_owned(), format!("https://{host}"), format!("https://{host}/"), format!("http://{host}")];
    names.extend([format!("https://{host}/v1/"), format!("https://{host}/v2/")]);
    if ["docker.io", "index.docker.io", "registry-1.docker.io"].contains(&host) {
        names.insert(0, "https://index.docker.io/v1/".to_owned());
    }
    names
}

fn from_entry(auth: &Auth) -> Result<Credentials, String> {
    if let Some(token) = auth.registrytoken.as_ref().filter(|t| !t.is_empty()) {
        return Ok(Credentials::Bearer(token.clone()));
    }
    if auth.identitytoken.as_ref().is_some_and(|t| !t.is_empty()) {
        return Err(
            "holds an identity token, which is not supported; log in with a user and an access token".to_owned()
        );
    }
    if let (Some(user), Some(password)) = (&auth.username, &auth.password) {
        return Ok(Credentials::Basic(user.clone(), password.clone()));
    }
    let Some(encoded) = auth.auth.as_ref().filter(|a| !a.is_empty()) else {
        return Ok(Credentials::Anonymous);
    };
    let decoded = base64::engine::general_purpose::STANDARD.decode(encoded.trim()).ok();
    let text = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
    match text.as_deref().and_then(|text| text.trim_end_matches('\0').split_once(':')) {
        Some((user, password)) => Ok(Credentials::Basic(user.to_owned(), password.to_owned())),
        None => Err("an entry's `auth` is not user:password in base64".to_owned()),
    }
}

/// Asks a helper; `None` where it has nothing for this host.
fn ask_helper(helper: &str, names: &[String]) -> Result<Option<Credentials>, String> {
    let program = format!("docker-credential-{helper}");
    if !helper.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b)) {
        return Err("the name of a credential helper has other characters than letters, digits, _ . and -".to_owned());
    }
    for name in names {
        let spawned = Command::new(&program)
            .arg("get")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut child =
            spawned.map_err(|e| format!("{program}: {e}; install it or remove it from the configuration"))?;
        if let Some(mut input) = child.stdin.take() {
            // A helper that does not read its input says so by its exit code.
            let _ = input.write_all(name.as_bytes());
        }
        let output = child.wait_with_output().map_err(|e| format!("{program}: {e}"))?;
        if !output.status.success() {
            continue;
        }
        let answer: Answer = serde_json::from_slice(&output.stdout)
            .map_err(|_| format!("{program}: its answer is not the expected JSON"))?;
        if answer.username == TOKEN_USER {
            return Err(format!("{program}: gives an identity token, which is not supported; use an access token"));
        }
        return Ok(Some(Credentials::Basic(answer.username, answer.secret)));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auth_of(config: &str, host: &str) -> Result<Credentials, StoreError> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.json");
        std::fs::write(&file, config).unwrap();
        for_registry(host, Some(&file))
    }

    #[test]
    fn entries_of_the_file() {
        let config =
            r#"{"auths":{"host:5000":{"auth":"dXNlcjpodW50ZXIy"},"https://index.docker.io/v1/":{"auth":"YTpi"}}}"#;
        assert_eq!(auth_of(config, "host:5000").unwrap(), Credentials::Basic("user".into(), "hunter2".into()));
        assert_eq!(auth_of(config, "docker.io").unwrap(), Credentials::Basic("a".into(), "b".into()));
        assert_eq!(auth_of(config, "other").unwrap(), Credentials::Anonymous);
        assert_eq!(for_registry("x", Some(Path::new("/no/such/file"))).unwrap(), Credentials::Anonymous);
    }

    #[test]
    fn what_is_empty_is_not_there() {
        let auths = r#""auths":{"h":{"auth":"dXNlcjpodW50ZXIy","identitytoken":null,"username":null}}"#;
        for members in [
            r#""credsStore":"""#,
            r#""credsStore":null"#,
            r#""credHelpers":null"#,
            r#""credHelpers":{"h":""},"credsStore":"is-not-installed""#,
            r#""credHelpers":{"h":null},"credsStore":"is-not-installed""#,
        ] {
            let found = auth_of(&format!("{{{auths},{members}}}"), "h").unwrap();
            assert_eq!(found, Credentials::Basic("user".into(), "hunter2".into()), "{members}");
        }
        for config in ["", " \n", "null", "{}", r#"{"auths":null}"#, r#"{"auths":{"h":null}}"#, r#"{"auths":{"h":{}}}"#]
        {
            assert_eq!(auth_of(config, "h").unwrap(), Credentials::Anonymous, "{config}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_without_the_secret() {
        for config in [
            r#"{"auths":{"h":{"auth":"aHVudGVyMg=="}}}"#,
            r#"{"auths":{"h":{"auth":"hunter2!"}}}"#,
            r#"{"auths":{"h":{"identitytoken":"hunter2"}}}"#,
            r#"{"auths":{"h":"hunter2"#,
            r#"{"credsStore":"hunter2/../x"}"#,
        ] {
            let error = auth_of(config, "h").unwrap_err();
            assert_eq!(error.exit_code(), 6);
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
        assert!(auth_of(r#"{"credsStore":"is-not-installed"}"#, "h").unwrap_err().to_string().contains("install it"));
    }
}
