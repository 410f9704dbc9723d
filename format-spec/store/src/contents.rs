//! The files of a bundle, as a store sees them: names, sizes and digests.

use std::path::Path;

use vt_bundle::manifest::{AssetRole, file_name};
use vt_bundle::reader::{is_safe_name, parse};
use vt_bundle::{BundleError, Manifest};

use crate::error::StoreError;
use crate::reference::is_digest;

/// What a file is, for the media types of OCI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Weights and what belongs to them.
    Weights,
    /// Configuration: manifest, tokenizer, templates.
    Config,
    /// For people: licences, model cards.
    Doc,
}

/// One file of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name within the bundle, `/` separated, safe to join to a folder.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// BLAKE3, 64 hexadecimal digits.
    pub blake3: String,
    /// SHA-256, 64 hexadecimal digits, where it is known.
    pub sha256: Option<String>,
    /// What it is.
    pub kind: Kind,
}

/// A bundle's manifest and the list of its files.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The bundle id.
    pub id: String,
    /// The manifest.
    pub manifest: Manifest,
    /// Its bytes, whose BLAKE3 is the id.
    pub manifest_bytes: Vec<u8>,
    /// Every file: the manifest, `bundle.id`, the assets, the segments.
    pub entries: Vec<Entry>,
}

impl Contents {
    /// Reads a manifest. `place` is what errors call it.
    ///
    /// # Errors
    /// [`StoreError::Bundle`] where it is no manifest, or names a file that leaves the bundle, is listed twice or has
    /// no proper digest.
    pub fn read(place: &str, manifest_bytes: Vec<u8>) -> Result<Self, StoreError> {
        let path = Path::new(place).join(file_name::MANIFEST);
        let manifest = parse(&path, &manifest_bytes)?;
        let id = blake3::hash(&manifest_bytes).to_hex().to_string();
        let id_file = format!("{id}\n");
        let mut entries = vec![
            Entry {
                path: file_name::MANIFEST.to_owned(),
                size: manifest_bytes.len() as u64,
                blake3: id.clone(),
                sha256: None,
                kind: Kind::Config,
            },
            Entry {
                path: file_name::ID.to_owned(),
                size: id_file.len() as u64,
                blake3: blake3::hash(id_file.as_bytes()).to_hex().to_string(),
                sha256: None,
                kind: Kind::Config,
            },
        ];
        for asset in &manifest.assets {
            entries.push(Entry {
                path: asset.file.clone(),
                size: asset.size,
                blake3: asset.blake3.clone(),
                sha256: None,
                kind: asset_kind(asset.role, &asset.file),
            });
        }
        for segment in manifest.image.segments.iter().chain(&manifest.cold.segments) {
            entries.push(Entry {
                path: segment.file.clone(),
                size: segment.size,
                blake3: segment.blake3.clone(),
                sha256: None,
                kind: Kind::Weights,
            });
        }
        let mut seen = std::collections::HashSet::new();
        for entry in &entries {
            let reason = if !is_safe_name(&entry.path) {
                "leaves the bundle"
            } else if !seen.insert(&entry.path) {
                "is listed twice"
            } else if !is_digest(&entry.blake3) {
                "has a BLAKE3 that is none"
            } else {
                continue;
            };
            let reason = format!("file name {:?} {reason}", entry.path);
            return Err(BundleError::Inconsistent { path, reason }.into());
        }
        Ok(Self { id, manifest, manifest_bytes, entries })
    }

    /// Bytes of all files.
    pub fn total_bytes(&self) -> u64 {
        self.entries.iter().map(|e| e.size).sum()
    }

    /// The contents of `bundle.id`.
    pub fn id_file(&self) -> Vec<u8> {
        format!("{}\n", self.id).into_bytes()
    }

    /// The contents of a file that follows from the manifest alone: the manifest itself and `bundle.id`.
    pub(crate) fn derived(&self, path: &str) -> Option<Vec<u8>> {
        match path {
            file_name::MANIFEST => Some(self.manifest_bytes.clone()),
            file_name::ID => Some(self.id_file()),
            _ => None,
        }
    }
}

fn asset_kind(role: AssetRole, file: &str) -> Kind {
    match role {
        AssetRole::Leaves | AssetRole::ExpertHashes | AssetRole::RestoreRecipe | AssetRole::RestoreData => {
            Kind::Weights
        }
        AssetRole::Other if is_doc(file) => Kind::Doc,
        _ => Kind::Config,
    }
}

/// Whether a file is for people, by its name.
fn is_doc(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file).to_ascii_lowercase();
    name.ends_with(".md")
        || ["license", "licence", "notice", "readme", "use_policy"].iter().any(|stem| name.starts_with(stem))
}
