//! References to bundles in stores.
//!
//! | reference | store |
//! |---|---|
//! | `oci://host[:port]/repository[:tag]` | an OCI registry |
//! | `oci-layout:DIR[:tag]` | an OCI image layout on disk, as `skopeo` and `oras` read it |
//! | `s3://bucket/prefix/name[:tag]`, `gs://`, `az://` | an object store |
//! | `file:///folder/name[:tag]` | the same on a disk |
//!
//! Each may end in `@blake3:<bundle id>`, and those in OCI form in `@sha256:<digest of the manifest>`: then it names these
//! bytes and no others. Without a tag `latest` is meant.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::error::StoreError;

/// Tag of a reference that names none.
pub const DEFAULT_TAG: &str = "latest";

/// Schemes that make a text a reference instead of a folder.
const SCHEMES: [&str; 6] = ["oci://", "oci-layout:", "s3://", "gs://", "az://", "file://"];

/// Whether a text is a reference to a store and not a path.
pub fn is_reference(text: &str) -> bool {
    SCHEMES.iter().any(|scheme| text.starts_with(scheme))
}

/// A bundle in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Where.
    pub location: Location,
    /// Tag, where one is given.
    pub tag: Option<String>,
    /// Digest that the bundle must have, where one is given.
    pub pin: Option<Pin>,
}

/// A place for the versions of one bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A repository of an OCI registry.
    Registry {
        /// Host with optional port.
        host: String,
        /// Repository.
        repository: String,
    },
    /// An OCI image layout.
    Layout {
        /// Its folder.
        dir: PathBuf,
    },
    /// A name in an object store.
    Objects {
        /// `s3`, `gs`, `az` or `file`.
        scheme: &'static str,
        /// Bucket or container; empty for `file`.
        bucket: String,
        /// Root of the store within the bucket, without slashes at its ends; for `file` the folder, absolute.
        prefix: String,
        /// Name of the bundle.
        name: String,
    },
}

/// A digest that pins a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pin {
    /// The bundle id.
    Blake3(String),
    /// SHA-256 of the OCI manifest.
    Sha256(String),
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blake3(hex) => write!(f, "blake3:{hex}"),
            Self::Sha256(hex) => write!(f, "sha256:{hex}"),
        }
    }
}

impl Reference {
    /// The tag, or the one that is meant where none is given.
    pub fn tag_or_default(&self) -> &str {
        self.tag.as_deref().unwrap_or(DEFAULT_TAG)
    }

    /// The name that people would call the bundle by: the last part of the repository, the folder or the name.
    pub fn name(&self) -> String {
        let last = |text: &str| text.rsplit('/').next().unwrap_or(text).to_owned();
        match &self.location {
            Location::Registry { repository, .. } => last(repository),
            Location::Layout { dir } => {
                dir.file_name().map_or_else(|| "bundle".to_owned(), |n| n.to_string_lossy().into())
            }
            Location::Objects { name, .. } => name.clone(),
        }
    }
}

impl Location {
    /// The folders that a store on a disk writes to; none for any other.
    pub(crate) fn folders(&self) -> Vec<PathBuf> {
        match self {
            Self::Layout { dir } => vec![dir.join("blobs")],
            Self::Objects { scheme: "file", prefix, .. } => {
                ["blobs", "index", "signatures"].iter().map(|part| PathBuf::from(prefix).join(part)).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry { host, repository } => write!(f, "oci://{host}/{repository}"),
            Self::Layout { dir } => write!(f, "oci-layout:{}", dir.display()),
            Self::Objects { scheme, bucket, prefix, name } => {
                write!(f, "{scheme}://{bucket}")?;
                let rooted = if prefix.is_empty() || prefix.starts_with('/') { "" } else { "/" };
                write!(f, "{rooted}{prefix}/{name}")
            }
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.location)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(pin) = &self.pin {
            write!(f, "@{pin}")?;
        }
        Ok(())
    }
}

impl FromStr for Reference {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let wrong =
            |reason: &str| StoreError::Reference { text: crate::error::public_url(text), reason: reason.to_owned() };
        let Some(scheme) = SCHEMES.iter().find(|scheme| text.starts_with(**scheme)) else {
            return Err(wrong("not a reference; expected oci://, oci-layout:, s3://, gs://, az:// or file://"));
        };
        let rest = &text[scheme.len()..];
        let (rest, pin) = match rest.rsplit_once('@') {
            Some((before, digest)) if digest.starts_with("blake3:") || digest.starts_with("sha256:") => {
                (before, Some(parse_pin(digest).ok_or_else(|| wrong("a digest has 64 lower-case hexadecimal digits"))?))
            }
            Some(_) => {
                return Err(wrong("after @ comes blake3:ID or sha256:DIGEST; credentials are no part of a reference"));
            }
            None => (rest, None),
        };
        let (path, tag) = split_tag(rest);
        if let Some(tag) = &tag
            && !is_tag(tag)
        {
            return Err(wrong("a tag has 1 to 128 letters, digits, _ . or -, and begins with a letter, a digit or _"));
        }
        let objects = |scheme, rest: &str| {
            let (bucket, key) = rest.split_once('/').ok_or_else(|| wrong("expected bucket/name"))?;
            let (prefix, name) = split_name(key);
            if !is_bucket(bucket) || !is_name(name) || !prefix.split('/').all(|part| prefix.is_empty() || is_name(part))
            {
                return Err(wrong("expected bucket/prefix/name of letters, digits, _ . and -"));
            }
            Ok(Location::Objects { scheme, bucket: bucket.into(), prefix: prefix.into(), name: name.into() })
        };
        let location = match *scheme {
            "oci://" => {
                let (host, repository) = path.split_once('/').ok_or_else(|| wrong("expected oci://host/name:tag"))?;
                if !is_host(host) {
                    return Err(wrong(
                        "expected oci://host[:port]/name:tag; a host is a name or an address, IPv6 in []",
                    ));
                }
                if !is_repository(repository) {
                    return Err(wrong(
                        "expected oci://host/name:tag; a name is lower-case letters and digits, with . _ __ or - between",
                    ));
                }
                Location::Registry { host: host.into(), repository: repository.into() }
            }
            "oci-layout:" if path.is_empty() => return Err(wrong("expected oci-layout:DIR:tag")),
            "oci-layout:" => Location::Layout { dir: path.into() },
            "s3://" => objects("s3", path)?,
            "gs://" => objects("gs", path)?,
            "az://" => objects("az", path)?,
            _ => {
                let (prefix, name) = split_name(path);
                if !prefix.starts_with('/') || !is_name(name) {
                    return Err(wrong("expected file:///folder/name:tag with an absolute folder"));
                }
                Location::Objects { scheme: "file", bucket: String::new(), prefix: prefix.into(), name: name.into() }
            }
        };
        if matches!(location, Location::Objects { .. }) && matches!(pin, Some(Pin::Sha256(_))) {
            return Err(wrong("sha256 pins an OCI manifest; an object store has none, pin with @blake3:ID"));
        }
        Ok(Self { location, tag, pin })
    }
}

/// A tag stands behind the last colon, unless a slash comes later (then it belongs to a port).
fn split_tag(text: &str) -> (&str, Option<String>) {
    match text.rsplit_once(':') {
        Some((before, tag)) if !tag.contains('/') => (before, Some(tag.to_owned())),
        _ => (text, None),
    }
}

fn split_name(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

fn parse_pin(text: &str) -> Option<Pin> {
    let (algorithm, hex) = text.split_once(':')?;
    if !is_digest(hex) {
        return None;
    }
    match algorithm {
        "blake3" => Some(Pin::Blake3(hex.to_owned())),
        "sha256" => Some(Pin::Sha256(hex.to_owned())),
        _ => None,
    }
}

/// Whether a text is a digest of 256 bits in lower-case hexadecimal, and so a safe file name.
pub(crate) fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Whether a text is a tag, and so safe to be shown and to be part of an address.
pub(crate) fn is_tag(text: &str) -> bool {
    let ok = |b: u8| b.is_ascii_alphanumeric() || b"_.-".contains(&b);
    (1..=128).contains(&text.len()) && text.bytes().all(ok) && !text.starts_with(['.', '-'])
}

fn is_name(text: &str) -> bool {
    is_tag(text) && text != ".."
}

fn is_bucket(text: &str) -> bool {
    let ok = |b: u8| b.is_ascii_alphanumeric() || b"_.-".contains(&b);
    text.bytes().all(ok) && text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
}

/// Host with optional port. Port 0 is none that anybody listens on.
fn is_host(text: &str) -> bool {
    let (name, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) if address.parse::<std::net::Ipv6Addr>().is_ok() => {
            (None, if rest.is_empty() { None } else { Some(rest.strip_prefix(':').unwrap_or_default()) })
        }
        Some(_) => return false,
        None => text.split_once(':').map_or((Some(text), None), |(name, port)| (Some(name), Some(port))),
    };
    let digits = |port: &str| port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|n| n > 0);
    name.is_none_or(is_host_name) && port.is_none_or(digits)
}

/// A name of the DNS, with the `_` that names of containers have, or an IPv4 address: a name that ends in a number is
/// nothing else (URL Standard, "ends in a number").
fn is_host_name(text: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let name = text.strip_suffix('.').unwrap_or(text);
    let number = name.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
    name.len() <= 253 && name.split('.').all(label) && (!number || text.parse::<std::net::Ipv4Addr>().is_ok())
}

/// The name of a repository (OCI distribution specification, "Pulling manifests").
fn is_repository(text: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let part = |part: &str| {
        let separators: Vec<&str> = part.split(|c: char| c.is_ascii() && alphanumeric(c as u8)).collect();
        let ends = part.bytes().next().is_some_and(alphanumeric) && part.bytes().last().is_some_and(alphanumeric);
        let separator = |s: &str| matches!(s, "" | "." | "_" | "__") || s.bytes().all(|b| b == b'-');
        ends && separators.into_iter().all(separator)
    };
    text.len() <= 255 && text.split('/').all(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_read_and_written_back() {
        let id = "a".repeat(64);
        for text in [
            "oci://localhost:5000/team/llama:v1".to_owned(),
            "oci://ghcr.io/x/y".to_owned(),
            "oci://[::1]:5000/x.y/a__b--c_d:v1".to_owned(),
            "oci://10.0.0.1/x".to_owned(),
            "oci://my_registry.local.:80/x".to_owned(),
            format!("oci://ghcr.io/x/y:v1@sha256:{id}"),
            "oci-layout:/tmp/layout:v1".to_owned(),
            "oci-layout:relative/layout".to_owned(),
            format!("s3://bucket/some/prefix/llama:v1@blake3:{id}"),
            "gs://bucket/llama".to_owned(),
            "az://container/llama:1".to_owned(),
            "file:///srv/models/llama:v1".to_owned(),
        ] {
            let reference: Reference = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(reference.to_string(), text);
        }
        let reference: Reference = "oci://localhost:5000/llama".parse().unwrap();
        let expected = Location::Registry { host: "localhost:5000".into(), repository: "llama".into() };
        assert_eq!(reference.location, expected);
        assert_eq!((reference.tag_or_default(), reference.name().as_str()), ("latest", "llama"));
    }

    #[test]
    fn wrong_references_are_refused_without_showing_secrets() {
        let id = "a".repeat(64);
        for text in [
            "llama".to_owned(),
            "ftp://host/x".to_owned(),
            "oci://host".to_owned(),
            "oci://host/UPPER:v1".to_owned(),
            "oci://host/x:bad tag".to_owned(),
            "oci://host/x@sha256:12".to_owned(),
            "oci://host/../x".to_owned(),
            "oci://ho st/x:v1".to_owned(),
            "oci://:5000/x:v1".to_owned(),
            "oci://host:/x:v1".to_owned(),
            "oci://host:70000/x:v1".to_owned(),
            "oci://host:0/x:v1".to_owned(),
            "oci://host:+5/x:v1".to_owned(),
            "oci://[::1/x:v1".to_owned(),
            "oci://[::g]:5000/x:v1".to_owned(),
            "oci://[::1]5000/x:v1".to_owned(),
            "oci://::1/x:v1".to_owned(),
            "oci://-host/x:v1".to_owned(),
            "oci://a..b/x:v1".to_owned(),
            "oci://1.2.3/x:v1".to_owned(),
            "oci://256.1.1.1/x:v1".to_owned(),
            "oci://h\u{f6}st/x:v1".to_owned(),
            "oci://host/x-:v1".to_owned(),
            "oci://host/x___y:v1".to_owned(),
            "oci://host/x._y:v1".to_owned(),
            "oci://host/x//y:v1".to_owned(),
            format!("oci://host/{}:v1", "a".repeat(256)),
            "s3://bucket".to_owned(),
            "s3://buc ket/x".to_owned(),
            "s3://buc\nket/x".to_owned(),
            "s3://[/x".to_owned(),
            "s3://../x".to_owned(),
            "s3://bucket/../../x".to_owned(),
            "file://relative/x".to_owned(),
            format!("s3://bucket/x@sha256:{id}"),
        ] {
            assert!(text.parse::<Reference>().is_err(), "{text}");
        }
        let error = "oci://user:hunter2@host/x:v1".parse::<Reference>().unwrap_err();
        assert!(!error.to_string().contains("hunter2"), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
}
