//! Stores in OCI form: registries and layouts on disk.

mod fetch;
mod layout;
mod login;
pub(crate) mod model_pack;
mod registry;
#[cfg(test)]
mod tests;
mod upload;

use layout::Layout;
use model_pack::{Annotations, Descriptor, ImageManifest, MANIFEST_TYPE};
use registry::Registry;

use crate::contents::{Contents, Entry};
use crate::error::StoreError;
use crate::progress::Meter;
use crate::reference::{Pin, Reference, is_digest, is_tag};
use crate::retry::{Retry, persistently};
use crate::source::Source;
use crate::store::{Listed, Remote, State, Stored};
use crate::stream::{self, ByteStream};

/// `artifactType` of a signature and media type of its layer.
const SIGNATURE_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// The empty configuration of an artifact (OCI image specification, "Guidance for an Empty Descriptor").
const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
const EMPTY: &[u8] = b"{}";
/// Largest signature that is read.
const MAX_SIGNATURE: u64 = 16 << 20;

/// A registry's repository or a layout.
#[derive(Debug)]
pub(crate) enum Oci {
    Registry(Box<Registry>),
    Layout(Layout),
}

impl Oci {
    pub(crate) fn registry(host: &str, repository: &str, plain_http: bool) -> Result<Self, StoreError> {
        Ok(Self::Registry(Box::new(Registry::new(host, repository, plain_http)?)))
    }

    pub(crate) fn layout(dir: &std::path::Path) -> Self {
        Self::Layout(Layout::new(dir))
    }

    /// Makes ready to write: logs in, or makes the folder.
    pub(crate) async fn prepare(&self, meter: &Meter) -> Result<(), StoreError> {
        match self {
            Self::Registry(registry) => persistently(meter, || registry.login(true)).await,
            Self::Layout(layout) => layout.prepare(),
        }
    }

    async fn manifest(&self, tag: &str) -> Result<Option<(Vec<u8>, String)>, StoreError> {
        match self {
            Self::Registry(registry) => registry.manifest(tag).await,
            Self::Layout(layout) => layout.manifest(tag),
        }
    }

    /// Finds a bundle and reads its manifest; every digest on the way is checked, and the pin.
    pub(crate) async fn resolve(&self, reference: &Reference, meter: &Meter) -> Result<Remote, StoreError> {
        let place = reference.to_string();
        let tag = match (&reference.pin, self) {
            (Some(Pin::Sha256(hex)), _) => format!("sha256:{hex}"),
            (_, Self::Layout(layout)) if reference.tag.is_none() => {
                layout.unnamed()?.unwrap_or_else(|| reference.tag_or_default().to_owned())
            }
            _ => reference.tag_or_default().to_owned(),
        };
        if let Self::Registry(registry) = self {
            persistently(meter, || registry.login(false)).await?;
        }
        let found = persistently(meter, || self.manifest(&tag)).await?;
        let (bytes, digest) = found.ok_or_else(|| {
            let known = if tag.starts_with("sha256:") { format!("no manifest {tag}") } else { format!("no tag {tag}") };
            StoreError::NotFound {
                place: place.clone(),
                what: format!("{known}; `vt-bundle list` shows what there is"),
            }
        })?;
        if let Some(Pin::Sha256(hex)) = &reference.pin
            && digest != format!("sha256:{hex}")
        {
            return Err(StoreError::Pin { place, found: digest, expected: format!("sha256:{hex}") });
        }
        let image = model_pack::read(&place, &bytes)?;
        let contents = self.contents(&place, &image, meter).await?;
        if let Some(Pin::Blake3(hex)) = &reference.pin
            && contents.id != *hex
        {
            let (found, expected) = (format!("blake3:{}", contents.id), format!("blake3:{hex}"));
            return Err(StoreError::Pin { place, found, expected });
        }
        Ok(Remote { contents, manifest: Some(Descriptor::new(MANIFEST_TYPE, &bytes)) })
    }

    /// Fetches the bundle's manifest and lists its files.
    async fn contents(&self, place: &str, image: &ImageManifest, meter: &Meter) -> Result<Contents, StoreError> {
        use vt_bundle::manifest::file_name::MANIFEST;
        let layers = model_pack::layers_by_path(image);
        let layer = layers.get(MANIFEST).ok_or_else(|| StoreError::NotABundle {
            place: place.to_owned(),
            reason: format!("no layer has the path {MANIFEST}; it is a model of another kind"),
        })?;
        let bytes = self.small_blob(place, MANIFEST, layer, vt_bundle::reader::MAX_MANIFEST_BYTES, meter).await?;
        let mut contents = Contents::read(place, bytes)?;
        if let Some(id) = image.annotations.get(model_pack::BUNDLE_ID).filter(|id| **id != contents.id) {
            let (found, expected) = (format!("blake3:{}", contents.id), format!("blake3:{id}"));
            return Err(StoreError::Digest { place: place.to_owned(), what: MANIFEST.to_owned(), found, expected });
        }
        model_pack::assign(place, image, &mut contents.entries)?;
        Ok(contents)
    }

    /// A blob that fits into memory, its digest checked.
    async fn small_blob(
        &self,
        place: &str,
        what: &str,
        blob: &Descriptor,
        limit: u64,
        meter: &Meter,
    ) -> Result<Vec<u8>, StoreError> {
        let sha256 = blob.sha256().ok_or_else(|| StoreError::NotABundle {
            place: place.to_owned(),
            reason: format!("{what} has the digest {:?}, expected sha256", blob.digest),
        })?;
        persistently(meter, || async {
            let stream = self.read_blob(sha256, 0).await?;
            let bytes = stream::collect(place, what, stream, blob.size, limit).await?;
            match stream::sha256(&bytes) {
                found if found == sha256 => Ok(bytes),
                found => Err(StoreError::Digest {
                    place: place.to_owned(),
                    what: what.to_owned(),
                    found: format!("sha256:{found}"),
                    expected: blob.digest.clone(),
                }),
            }
        })
        .await
    }

    async fn read_blob(&self, sha256: &str, offset: u64) -> Result<ByteStream, StoreError> {
        match self {
            Self::Registry(registry) => registry.read_blob(sha256, offset).await,
            Self::Layout(layout) => layout.read_blob(sha256, offset),
        }
    }

    /// The bytes of a file of a bundle that was resolved here.
    pub(crate) async fn open(&self, entry: &Entry, offset: u64) -> Result<ByteStream, StoreError> {
        match &entry.sha256 {
            Some(sha256) => self.read_blob(sha256, offset).await,
            None => Err(StoreError::NotFound { place: entry.path.clone(), what: "its SHA-256".to_owned() }),
        }
    }

    /// Whether a file is there already. Without its SHA-256 that cannot be told.
    pub(crate) async fn state(&self, entry: &Entry, meter: &Meter) -> Result<State, StoreError> {
        let Some(sha256) = &entry.sha256 else { return Ok(State::Absent) };
        match self {
            Self::Registry(registry) => persistently(meter, || registry.state(sha256, entry.size)).await,
            Self::Layout(layout) => Ok(layout.state(sha256, entry.size)),
        }
    }

    /// Stores a file and gives its SHA-256.
    pub(crate) async fn put(
        &self,
        entry: &Entry,
        source: &Source<'_>,
        replace: bool,
        meter: &Meter,
    ) -> Result<String, StoreError> {
        match self {
            Self::Registry(registry) => {
                if let (Source::Store(other, _), Some(sha256), false) = (source, &entry.sha256, replace)
                    && let Some(Self::Registry(from)) = other.oci()
                    && registry.shares_host(from)
                    && registry.mount(from, sha256, entry.size).await
                {
                    meter.set(entry.size);
                    return Ok(sha256.clone());
                }
                registry.write_blob(entry, source, meter).await
            }
            Self::Layout(layout) => {
                let mut retry = Retry::default();
                loop {
                    meter.set(0);
                    let written = async {
                        let bytes = stream::counted(source.open_checked(entry, 0).await?, meter);
                        layout.write_blob(bytes, entry.sha256.as_deref(), &entry.path).await
                    };
                    match written.await {
                        Ok(sha256) => return Ok(sha256),
                        Err(error) => retry.after(error, meter).await?,
                    }
                }
            }
        }
    }

    /// Stores bytes that are no file of a bundle.
    async fn put_small(&self, what: &str, bytes: &[u8], meter: &Meter) -> Result<(), StoreError> {
        let entry = Entry {
            path: what.to_owned(),
            size: bytes.len() as u64,
            blake3: String::new(),
            sha256: Some(stream::sha256(bytes)),
            kind: crate::contents::Kind::Config,
        };
        let mut state = self.state(&entry, meter).await?;
        if state == State::Present {
            // It is small enough to be looked at each time.
            let blob = Descriptor::new("", bytes);
            match self.small_blob(what, what, &blob, entry.size, meter).await {
                Ok(_) => return Ok(()),
                Err(StoreError::Digest { .. } | StoreError::Size { .. }) => state = State::Damaged,
                Err(error) => return Err(error),
            }
        }
        self.put(&entry, &Source::Bytes(bytes), state == State::Damaged, meter).await.map(|_| ())
    }

    /// Makes a bundle whose files are all there known under a tag; gives the digest of its manifest. Where the manifest is
    /// there, its configuration is looked at only if `verify` says so.
    pub(crate) async fn publish(
        &self,
        reference: &Reference,
        contents: &Contents,
        verify: bool,
        meter: &Meter,
    ) -> Result<String, StoreError> {
        let (manifest, config) = model_pack::build(contents, &reference.name())?;
        let descriptor = Descriptor::new(MANIFEST_TYPE, &manifest);
        let tag = reference.tag_or_default();
        let present = match persistently(meter, || self.manifest(tag)).await {
            // What is damaged is written anew.
            Err(StoreError::Digest { .. } | StoreError::Size { .. }) => None,
            other => other?,
        };
        if !verify && present.is_some_and(|(_, digest)| digest == descriptor.digest) {
            return Ok(descriptor.digest);
        }
        self.put_small("configuration", &config, meter).await?;
        let digest = descriptor.digest.clone();
        match self {
            Self::Registry(registry) => {
                persistently(meter, || registry.put_manifest(tag, manifest.clone(), MANIFEST_TYPE)).await?;
            }
            Self::Layout(layout) => {
                let mut described = descriptor;
                described.artifact_type = Some(model_pack::MODEL_TYPE.to_owned());
                layout.put_manifest(Some(tag), &manifest, described)?;
            }
        }
        Ok(digest)
    }

    /// The tags of bundles.
    pub(crate) async fn list(&self, reference: &Reference, meter: &Meter) -> Result<Vec<Listed>, StoreError> {
        let tags = match self {
            Self::Registry(registry) => {
                persistently(meter, || registry.login(false)).await?;
                persistently(meter, || registry.tags()).await?
            }
            Self::Layout(layout) => layout.manifests()?.into_iter().filter_map(|(tag, _)| tag).collect(),
        };
        let mut listed = Vec::new();
        // What is no tag names nothing that could be fetched.
        for tag in tags.into_iter().filter(|tag| is_tag(tag)) {
            let Some((bytes, digest)) = persistently(meter, || self.manifest(&tag)).await? else { continue };
            // Other artifacts and indexes of referrers share the repository.
            let Ok(image) = model_pack::read(&reference.to_string(), &bytes) else { continue };
            let id = image.annotations.get(model_pack::BUNDLE_ID).filter(|id| is_digest(id));
            let Some(id) = id else { continue };
            let bytes = image.layers.iter().fold(0, |sum: u64, l| sum.saturating_add(l.size));
            listed.push(Listed { name: reference.name(), tag, id: id.clone(), bytes, digest: Some(digest) });
        }
        Ok(listed)
    }

    /// Stores a signature as a referrer of a bundle's manifest.
    pub(crate) async fn attach(
        &self,
        subject: &Descriptor,
        signature: &[u8],
        meter: &Meter,
    ) -> Result<String, StoreError> {
        self.put_small("empty configuration", EMPTY, meter).await?;
        self.put_small("signature", signature, meter).await?;
        let image = ImageManifest {
            schema_version: 2,
            media_type: MANIFEST_TYPE.to_owned(),
            artifact_type: Some(SIGNATURE_TYPE.to_owned()),
            config: Descriptor::new(EMPTY_TYPE, EMPTY),
            layers: vec![Descriptor::new(SIGNATURE_TYPE, signature)],
            subject: Some(Descriptor { artifact_type: None, annotations: Annotations::new(), ..subject.clone() }),
            annotations: Annotations::new(),
        };
        let bytes = model_pack::to_bytes(&image, "signature")?;
        let mut referrer = Descriptor::new(MANIFEST_TYPE, &bytes);
        referrer.artifact_type = Some(SIGNATURE_TYPE.to_owned());
        let digest = referrer.digest.clone();
        match self {
            Self::Registry(registry) => {
                persistently(meter, || registry.put_manifest(&digest, bytes.clone(), MANIFEST_TYPE)).await?;
                persistently(meter, || registry.note_referrer(&subject.digest, referrer.clone())).await?;
            }
            Self::Layout(layout) => layout.put_manifest(None, &bytes, referrer)?,
        }
        Ok(digest)
    }

    /// The signatures of a bundle's manifest. One that cannot be read hides no other.
    pub(crate) async fn signatures(
        &self,
        place: &str,
        subject: &Descriptor,
        meter: &Meter,
    ) -> Result<Stored, StoreError> {
        let referrers = match self {
            Self::Registry(registry) => {
                persistently(meter, || registry.referrers(&subject.digest, SIGNATURE_TYPE)).await?
            }
            Self::Layout(layout) => {
                let untagged = layout.manifests()?.into_iter().map(|(_, descriptor)| descriptor);
                untagged.filter(|d| d.artifact_type.as_deref() == Some(SIGNATURE_TYPE)).collect()
            }
        };
        let mut stored = Stored::default();
        for referrer in referrers {
            let image = match self.referrer(&referrer, meter).await {
                Ok(image) => image,
                Err(error) => {
                    stored.unreadable.push(error);
                    continue;
                }
            };
            if image.subject.as_ref().is_none_or(|s| s.digest != subject.digest) {
                continue;
            }
            for layer in image.layers.iter().filter(|l| l.media_type == SIGNATURE_TYPE) {
                let name = format!("signature {}", layer.digest);
                match self.small_blob(place, &name, layer, MAX_SIGNATURE, meter).await {
                    Ok(bytes) => stored.signatures.push((name, bytes)),
                    Err(error) => stored.unreadable.push(error),
                }
            }
        }
        Ok(stored)
    }

    /// The manifest of a signature.
    async fn referrer(&self, referrer: &Descriptor, meter: &Meter) -> Result<ImageManifest, StoreError> {
        let place = format!("signature {}", referrer.digest);
        let found = persistently(meter, || self.manifest(&referrer.digest)).await?;
        let what = "manifest".to_owned();
        let (bytes, found) = found.ok_or_else(|| StoreError::NotFound { place: place.clone(), what: what.clone() })?;
        if found != referrer.digest {
            return Err(StoreError::Digest { place, what, found, expected: referrer.digest.clone() });
        }
        serde_json::from_slice(&bytes)
            .map_err(|e| StoreError::NotABundle { place, reason: format!("its manifest is no image manifest: {e}") })
    }
}
