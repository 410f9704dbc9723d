//! The providers' environment variables, looked at before their libraries see them: those panic over some values, and
//! quote others in errors.

use std::str::FromStr;

use crate::error::StoreError;

/// Addresses of stores.
const ENDPOINTS: [&str; 9] = [
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
    "AZURE_MSI_ENDPOINT",
    "AZURE_IDENTITY_ENDPOINT",
    "IDENTITY_ENDPOINT",
    "GOOGLE_BASE_URL",
];
const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// What a store is opened with, out of the variables of this process: those named in `others`, then those whose names begin
/// with `prefix`. Names that a provider's library does not know are left out.
///
/// # Errors
/// [`StoreError::Unsupported`], which names the variable and never its value.
pub(crate) fn settings<Key: FromStr>(
    place: &str,
    prefix: &str,
    others: &[&str],
) -> Result<Vec<(Key, String)>, StoreError> {
    let all =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let checked = checked(place, all.filter(|(name, _)| name.starts_with(prefix) || others.contains(&name.as_str())))?;
    let (first, then): (Vec<_>, Vec<_>) = checked.into_iter().partition(|(name, _)| others.contains(&name.as_str()));
    let known = |(name, value): (String, String)| Some((name.to_ascii_lowercase().parse().ok()?, value));
    Ok(first.into_iter().chain(then).filter_map(known).collect())
}

/// Leaves out empty variables, which mean the same as none, and refuses what no provider could accept.
fn checked(
    place: &str,
    variables: impl Iterator<Item = (String, String)>,
) -> Result<Vec<(String, String)>, StoreError> {
    let ours = variables.filter(|(_, value)| !value.is_empty()).map(|(name, value)| {
        let fault = if value.chars().any(char::is_control) {
            "has a control character, perhaps a line break at its end"
        } else if ENDPOINTS.contains(&name.as_str()) && !is_endpoint(&value) {
            "is no address of a store; expected http(s)://host[:port][/path], without user and password"
        } else if REGIONS.contains(&name.as_str()) && !is_region(&value) {
            "is no region; expected letters, digits and -, as in us-east-1"
        } else {
            return Ok((name, value));
        };
        let reason = format!("environment variable {name} {fault}; set it anew or unset it");
        Err(StoreError::Unsupported { place: place.to_owned(), reason })
    });
    ours.collect()
}

fn is_endpoint(text: &str) -> bool {
    url::Url::parse(text).is_ok_and(|url| {
        let plain = url.username().is_empty() && url.password().is_none() && !text.contains('@');
        let whole = url.host_str().is_some_and(|host| !host.is_empty()) && !text.contains(char::is_whitespace);
        matches!(url.scheme(), "http" | "https") && plain && whole && url.query().is_none() && url.fragment().is_none()
    })
}

fn is_region(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, value: &str) -> Result<Vec<(String, String)>, StoreError> {
        checked("s3://bucket/x", std::iter::once((name.to_owned(), value.to_owned())))
    }

    #[test]
    fn variables_are_checked_and_their_values_not_shown() {
        for (name, value) in [
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:9000"),
            ("AWS_ENDPOINT_URL", "https://store.example.org/path"),
            ("AWS_REGION", "eu-central-1"),
            ("AWS_SECRET_ACCESS_KEY", "a/b+c="),
        ] {
            assert_eq!(check(name, value).unwrap(), [(name.to_owned(), value.to_owned())]);
        }
        for name in ["AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_BASE_URL"] {
            assert!(check(name, "").unwrap().is_empty());
        }
        for (name, value) in [
            ("AWS_ENDPOINT_URL", "http://user:hunter2@host:9000"),
            ("AWS_ENDPOINT_URL", "hunter2"),
            ("AWS_ENDPOINT_URL", "ftp://hunter2"),
            ("AWS_ENDPOINT_URL", "http://host:hunter2"),
            ("AZURE_STORAGE_ENDPOINT", "https://host/?sig=hunter2"),
            ("GOOGLE_BASE_URL", "hunter2"),
            ("IDENTITY_ENDPOINT", "http://user:hunter2@host"),
            ("GOOGLE_APPLICATION_CREDENTIALS", "/hunter2\n"),
            ("AWS_REGION", "hunter2/../x"),
            ("AWS_SECRET_ACCESS_KEY", "hunter2\n"),
        ] {
            let error = check(name, value).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(name) && !text.contains("hunter2") && error.exit_code() == 2, "{text}");
        }
    }
}
