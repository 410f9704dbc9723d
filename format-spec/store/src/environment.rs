//! The providers' environment variables, looked at before their libraries see them: those panic over some values, and
//! quote others in errors.

use crate::error::StoreError;

/// Addresses of stores.
const ENDPOINTS: [&str; 5] =
    ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"];
const REGIONS: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

/// The variables of this process that a store is opened with: those whose names begin with `prefix`.
///
/// # Errors
/// [`StoreError::Unsupported`], which names the variable and never its value.
pub(crate) fn variables(place: &str, prefix: &str) -> Result<Vec<(String, String)>, StoreError> {
    checked(
        place,
        prefix,
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
    )
}

/// Leaves out empty variables, which mean the same as none, and refuses what no provider could accept.
fn checked(
    place: &str,
    prefix: &str,
    variables: impl Iterator<Item = (String, String)>,
) -> Result<Vec<(String, String)>, StoreError> {
    let ours = variables.filter(|(name, value)| name.starts_with(prefix) && !value.is_empty()).map(|(name, value)| {
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
        checked("s3://bucket/x", "A", std::iter::once((name.to_owned(), value.to_owned())))
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
        for name in ["AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"] {
            assert!(check(name, "").unwrap().is_empty());
        }
        for (name, value) in [
            ("AWS_ENDPOINT_URL", "http://user:hunter2@host:9000"),
            ("AWS_ENDPOINT_URL", "hunter2"),
            ("AWS_ENDPOINT_URL", "ftp://hunter2"),
            ("AWS_ENDPOINT_URL", "http://host:hunter2"),
            ("AZURE_STORAGE_ENDPOINT", "https://host/?sig=hunter2"),
            ("AWS_REGION", "hunter2/../x"),
            ("AWS_SECRET_ACCESS_KEY", "hunter2\n"),
        ] {
            let error = check(name, value).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(name) && !text.contains("hunter2") && error.exit_code() == 2, "{text}");
        }
    }
}
