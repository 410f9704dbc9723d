//! Bundles as CNCF ModelPack artifacts: an OCI image manifest with one raw layer per file.
//!
//! The form is that of <https://github.com/modelpack/model-spec> (`docs/spec.md`, `docs/config.md`): `artifactType`, media types and
//! the annotation of a layer's path. Everything in it follows from the bundle, so that the same bundle gives the same
//! manifest, and its digest names the bundle in a registry as the bundle id does elsewhere.

use std::collections::HashMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use vt_bundle::manifest::FORMAT_VERSION;

use crate::contents::{Contents, Entry, Kind};
use crate::error::StoreError;
use crate::reference::is_digest;

/// Media type of the manifest.
pub(crate) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of an index.
pub(crate) const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
/// `artifactType` of a model.
pub(crate) const MODEL_TYPE: &str = "application/vnd.cncf.model.manifest.v1+json";
/// Media type of a model's configuration.
const CONFIG_TYPE: &str = "application/vnd.cncf.model.config.v1+json";
const WEIGHT_LAYER: &str = "application/vnd.cncf.model.weight.v1.raw";
const CONFIG_LAYER: &str = "application/vnd.cncf.model.weight.config.v1.raw";
const DOC_LAYER: &str = "application/vnd.cncf.model.doc.v1.raw";
const FILEPATH: &str = "org.cncf.model.filepath";
const TITLE: &str = "org.opencontainers.image.title";
/// Annotation with the bundle id.
pub(crate) const BUNDLE_ID: &str = "vt.bundle.id";
const BUNDLE_FORMAT_VERSION: &str = "vt.bundle.format-version";

/// Largest OCI manifest and index that is read; registries accept 4 MiB.
pub(crate) const MAX_MANIFEST: u64 = 4 << 20;

/// A reference to a blob or manifest by digest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    pub media_type: String,
    pub digest: String,
    pub size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    #[serde(default, deserialize_with = "or_none", skip_serializing_if = "Annotations::is_empty")]
    pub annotations: Annotations,
    /// What others keep there (`platform`, `urls`, ...), for an index that is written back.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

/// Annotations, in a fixed order.
pub(crate) type Annotations = std::collections::BTreeMap<String, String>;

/// `null` for what is not there: programs in Go write it for empty lists and maps.
fn or_none<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(input: D) -> Result<T, D::Error> {
    Option::deserialize(input).map(Option::unwrap_or_default)
}

impl Descriptor {
    pub(crate) fn new(media_type: &str, bytes: &[u8]) -> Self {
        let digest = format!("sha256:{}", crate::stream::sha256(bytes));
        let size = bytes.len() as u64;
        let (media_type, annotations) = (media_type.to_owned(), Annotations::new());
        Self { media_type, digest, size, artifact_type: None, annotations, others: Map::new() }
    }

    /// The 64 digits of a SHA-256 digest.
    pub(crate) fn sha256(&self) -> Option<&str> {
        self.digest.strip_prefix("sha256:").filter(|hex| is_digest(hex))
    }
}

/// An image manifest, as far as artifacts need it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageManifest {
    pub schema_version: u32,
    #[serde(default)]
    pub media_type: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    #[serde(default, deserialize_with = "or_none", skip_serializing_if = "Annotations::is_empty")]
    pub annotations: Annotations,
}

/// An image index, as far as artifacts need it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ImageIndex {
    pub schema_version: u32,
    #[serde(default = "index_type")]
    pub media_type: String,
    #[serde(default, deserialize_with = "or_none")]
    pub manifests: Vec<Descriptor>,
    /// What others keep there (`annotations`, ...), for an index that is written back.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

fn index_type() -> String {
    INDEX_TYPE.to_owned()
}

impl Default for ImageIndex {
    fn default() -> Self {
        Self { schema_version: 2, media_type: index_type(), manifests: Vec::new(), others: Map::new() }
    }
}

/// The manifest and the configuration of a bundle; every entry must know its SHA-256. `name` is the bundle's name.
pub(crate) fn build(contents: &Contents, name: &str) -> Result<(Vec<u8>, Vec<u8>), StoreError> {
    let mut layers = Vec::with_capacity(contents.entries.len());
    for entry in &contents.entries {
        let sha256 = entry.sha256.as_ref().ok_or_else(|| StoreError::NotABundle {
            place: name.to_owned(),
            reason: format!("{} has no SHA-256 although it was stored", entry.path),
        })?;
        layers.push(Descriptor {
            media_type: layer_type(entry.kind).to_owned(),
            digest: format!("sha256:{sha256}"),
            size: entry.size,
            artifact_type: None,
            others: Map::new(),
            annotations: [(FILEPATH, &entry.path), (TITLE, &entry.path)]
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value.clone()))
                .collect(),
        });
    }
    let manifest = &contents.manifest;
    let decodes: Vec<&str> = manifest.quantization.decodes.iter().map(|d| d.decode.as_str()).collect();
    let config = json!({
        "descriptor": { "name": name, "family": manifest.model.architecture },
        "modelfs": { "type": "layers", "diffIds": layers.iter().map(|l| l.digest.clone()).collect::<Vec<_>>() },
        "config": { "architecture": "transformer", "format": "vt-bundle", "quantization": decodes.join(",") },
    });
    let config = config.to_string().into_bytes();
    let annotations = [(BUNDLE_ID, contents.id.clone()), (BUNDLE_FORMAT_VERSION, FORMAT_VERSION.to_string())];
    let image = ImageManifest {
        schema_version: 2,
        media_type: MANIFEST_TYPE.to_owned(),
        artifact_type: Some(MODEL_TYPE.to_owned()),
        config: Descriptor::new(CONFIG_TYPE, &config),
        layers,
        subject: None,
        annotations: annotations.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
    };
    Ok((to_bytes(&image, name)?, config))
}

/// JSON of a structure of this module.
pub(crate) fn to_bytes(value: &impl Serialize, place: &str) -> Result<Vec<u8>, StoreError> {
    let wrong = |e: serde_json::Error| StoreError::NotABundle { place: place.to_owned(), reason: e.to_string() };
    serde_json::to_vec(value).map_err(wrong)
}

fn layer_type(kind: Kind) -> &'static str {
    match kind {
        Kind::Weights => WEIGHT_LAYER,
        Kind::Config => CONFIG_LAYER,
        Kind::Doc => DOC_LAYER,
    }
}

/// Reads a manifest and sees that it is a model's.
pub(crate) fn read(place: &str, bytes: &[u8]) -> Result<ImageManifest, StoreError> {
    let wrong = |reason: String| StoreError::NotABundle { place: place.to_owned(), reason };
    let value: Value = serde_json::from_slice(bytes).map_err(|e| wrong(format!("its manifest is not JSON: {e}")))?;
    let image: ImageManifest =
        serde_json::from_value(value).map_err(|e| wrong(format!("its manifest is no image manifest: {e}")))?;
    match image.artifact_type.as_deref().unwrap_or(&image.config.media_type) {
        MODEL_TYPE | CONFIG_TYPE => Ok(image),
        other => Err(wrong(format!("it holds {other}, expected {MODEL_TYPE}"))),
    }
}

/// The layers of a manifest by file path; a path is compared with the bundle's list and never used by itself.
pub(crate) fn layers_by_path(image: &ImageManifest) -> HashMap<&str, &Descriptor> {
    let path = |layer: &Descriptor| layer.annotations.contains_key(FILEPATH) || layer.annotations.contains_key(TITLE);
    let named = image.layers.iter().filter(|layer| path(layer));
    named
        .filter_map(|layer| {
            Some((layer.annotations.get(FILEPATH).or_else(|| layer.annotations.get(TITLE))?.as_str(), layer))
        })
        .collect()
}

/// Gives every entry the SHA-256 of its layer.
pub(crate) fn assign(place: &str, image: &ImageManifest, entries: &mut [Entry]) -> Result<(), StoreError> {
    let layers = layers_by_path(image);
    for entry in entries {
        let wrong = |reason: String| StoreError::NotABundle { place: place.to_owned(), reason };
        let layer = layers
            .get(entry.path.as_str())
            .ok_or_else(|| wrong(format!("no layer has the path {}, which the bundle's manifest lists", entry.path)))?;
        if layer.size != entry.size {
            let (found, expected) = (layer.size, entry.size);
            return Err(StoreError::Size { place: place.to_owned(), what: entry.path.clone(), found, expected });
        }
        let sha256 = layer.sha256().ok_or_else(|| wrong(format!("layer {} has no sha256 digest", entry.path)))?;
        entry.sha256 = Some(sha256.to_owned());
    }
    Ok(())
}
