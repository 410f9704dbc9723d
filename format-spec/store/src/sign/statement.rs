//! The in-toto statement: which files, with which digests.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::contents::Contents;
use crate::error::StoreError;
use crate::reference::is_digest;
use crate::stream::hex;

pub(super) const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
pub(super) const PREDICATE_TYPE: &str = "https://model_signing/signature/v1.0";

/// An in-toto statement with the predicate of model signing 1.0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Statement {
    #[serde(rename = "_type")]
    pub(super) kind: String,
    pub(super) subject: Vec<Subject>,
    pub(super) predicate_type: String,
    pub(super) predicate: Predicate,
    /// BLAKE3 of the files, for signatures whose digests are of that kind; no part of the statement.
    #[serde(skip)]
    blake3: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Subject {
    pub name: String,
    pub digest: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Predicate {
    pub serialization: Serialization,
    pub resources: Vec<Resource>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Serialization {
    pub method: String,
    pub hash_type: String,
    #[serde(default)]
    pub allow_symlinks: bool,
    #[serde(default)]
    pub ignore_paths: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Resource {
    pub name: String,
    pub digest: String,
    pub algorithm: String,
}

impl Statement {
    /// The statement of a bundle, every file of which knows its SHA-256. `name` is what the model is called.
    ///
    /// # Errors
    /// [`StoreError::Signature`] where one does not.
    pub fn new(name: &str, contents: &Contents) -> Result<Self, StoreError> {
        let mut files = BTreeMap::new();
        for entry in &contents.entries {
            let sha256 = entry.sha256.clone().ok_or_else(|| StoreError::Signature {
                place: name.to_owned(),
                reason: format!("the SHA-256 of {} is not known", entry.path),
            })?;
            files.insert(entry.path.clone(), sha256);
        }
        // The specification orders by name.
        let resources: Vec<Resource> =
            files.into_iter().map(|(name, digest)| Resource { name, digest, algorithm: "sha256".to_owned() }).collect();
        let root = root_digest(&resources).unwrap_or_default();
        Ok(Self {
            kind: STATEMENT_TYPE.to_owned(),
            subject: vec![Subject { name: name.to_owned(), digest: [("sha256".to_owned(), root)].into() }],
            predicate_type: PREDICATE_TYPE.to_owned(),
            predicate: Predicate {
                serialization: Serialization {
                    method: "files".to_owned(),
                    hash_type: "sha256".to_owned(),
                    allow_symlinks: false,
                    ignore_paths: Vec::new(),
                },
                resources,
            },
            blake3: contents.entries.iter().map(|e| (e.path.clone(), e.blake3.clone())).collect(),
        })
    }

    /// Sees that a signed statement is of the files that this one lists, no more and no less; why not, otherwise.
    pub(super) fn matches(&self, signed: &Self) -> Result<usize, String> {
        if signed.kind != STATEMENT_TYPE || signed.predicate_type != PREDICATE_TYPE {
            let (kind, predicate) = (&signed.kind, &signed.predicate_type);
            return Err(format!("it states {kind} {predicate}, expected {STATEMENT_TYPE} {PREDICATE_TYPE}"));
        }
        if signed.predicate.serialization.method != "files" {
            let method = &signed.predicate.serialization.method;
            return Err(format!("its files are hashed by the method {method:?}, this program knows \"files\""));
        }
        let root = root_digest(&signed.predicate.resources);
        match signed.subject.as_slice() {
            [subject] if root.is_some() && subject.digest.get("sha256") == root.as_ref() => {}
            _ => return Err("its root digest is not that of its files".to_owned()),
        }
        let mut ours: BTreeMap<&str, &str> =
            self.predicate.resources.iter().map(|r| (r.name.as_str(), r.digest.as_str())).collect();
        for resource in &signed.predicate.resources {
            let name = &resource.name;
            let sha256 = ours
                .remove(name.as_str())
                .ok_or_else(|| format!("it is of a file {name}, which the bundle has not"))?;
            let found = match resource.algorithm.as_str() {
                "sha256" => sha256,
                "blake3" => self.blake3.get(name).map_or("", String::as_str),
                other => return Err(format!("the digest of {name} is {other}, this program knows sha256 and blake3")),
            };
            if resource.digest != found {
                return Err(format!("{name} has {} {found}, signed is {}", resource.algorithm, resource.digest));
            }
        }
        match ours.keys().next() {
            Some(name) => Err(format!("the bundle has a file {name}, which was not signed")),
            None => Ok(signed.predicate.resources.len()),
        }
    }

    /// Digest and algorithm of a file.
    pub(super) fn digest_of(&self, name: &str) -> Option<(&str, &str)> {
        let resource = self.predicate.resources.iter().find(|r| r.name == name)?;
        Some((resource.algorithm.as_str(), resource.digest.as_str()))
    }
}

/// SHA-256 of the digests in their order; `None` where one is none.
fn root_digest(resources: &[Resource]) -> Option<String> {
    let mut hasher = Sha256::new();
    for resource in resources {
        if !is_digest(&resource.digest) {
            return None;
        }
        for pair in resource.digest.as_bytes().as_chunks::<2>().0 {
            hasher.update([u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?]);
        }
    }
    Some(hex(&hasher.finalize()))
}
