//! What a registry answers in a few bytes: manifests, tags, referrers. No answer is read past a bound, whatever its
//! server says of its length.

use std::collections::BTreeSet;

use reqwest::header::ACCEPT;
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde::Deserialize;

use crate::error::StoreError;
use crate::oci::model_pack::{Descriptor, INDEX_TYPE, ImageIndex, MANIFEST_TYPE, MAX_MANIFEST};
use crate::oci::registry::{READ_TIMEOUT, Registry};

/// Pages of tags that are read at most.
const MAX_TAG_PAGES: usize = 1000;

/// A page of tags.
#[derive(Deserialize)]
struct Tags {
    tags: Option<Vec<String>>,
}

impl Registry {
    /// The manifest of a tag or digest, with its digest; `None` where there is none.
    pub(crate) async fn manifest(&self, tag: &str) -> Result<Option<(Vec<u8>, String)>, StoreError> {
        let bytes = self.small(&["manifests", tag], &[], "manifest").await?;
        Ok(bytes.map(|bytes| {
            let digest = format!("sha256:{}", crate::stream::sha256(&bytes));
            (bytes, digest)
        }))
    }

    /// All tags.
    pub(crate) async fn tags(&self) -> Result<Vec<String>, StoreError> {
        let mut tags = BTreeSet::new();
        let mut last: Option<String> = None;
        for _ in 0..MAX_TAG_PAGES {
            let query: Vec<_> = last.iter().map(|last| ("last", last.as_str())).collect();
            let page = self.small(&["tags", "list"], &query, "tags").await?;
            let page = page.ok_or_else(|| StoreError::NotFound {
                place: self.place.clone(),
                what: "no such repository".to_owned(),
            })?;
            let page: Tags = self.parsed("tags", &page)?;
            let page = page.tags.unwrap_or_default();
            last = page.last().cloned();
            // A registry that knows no pages says the same again.
            if page.into_iter().filter(|tag| tags.insert(tag.clone())).count() == 0 {
                break;
            }
        }
        Ok(tags.into_iter().collect())
    }

    /// The manifests of a type that refer to a manifest; where there is no referrers API, those of the tag that stands for
    /// it (OCI distribution specification, "Referrers Tag Schema").
    pub(crate) async fn referrers(&self, digest: &str, artifact_type: &str) -> Result<Vec<Descriptor>, StoreError> {
        let bytes = match self.small(&["referrers", digest], &[("artifactType", artifact_type)], "referrers").await? {
            Some(bytes) => Some(bytes),
            None => self.manifest(&digest.replace(':', "-")).await?.map(|(bytes, _)| bytes),
        };
        let index: ImageIndex = match bytes {
            Some(bytes) => self.parsed("referrers", &bytes)?,
            None => ImageIndex::default(),
        };
        Ok(index.manifests.into_iter().filter(|d| d.artifact_type.as_deref() == Some(artifact_type)).collect())
    }

    fn parsed<T: for<'a> Deserialize<'a>>(&self, what: &str, bytes: &[u8]) -> Result<T, StoreError> {
        serde_json::from_slice(bytes).map_err(|e| StoreError::Transfer {
            place: self.place.clone(),
            what: what.to_owned(),
            reason: format!("the registry's answer cannot be read: {e}"),
            transient: false,
        })
    }

    /// Something small below the repository; `None` where it is not there.
    async fn small(&self, path: &[&str], query: &[(&str, &str)], what: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let mut url = self.url(path, what)?;
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let accept = format!("{MANIFEST_TYPE}, {INDEX_TYPE}");
        let more = |request: RequestBuilder| request.header(ACCEPT, &accept).timeout(READ_TIMEOUT);
        let response = self.authorized(Method::GET, &url, more, what).await?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(None),
            _ => self.successful(response, what).await.map(Some),
        }
    }

    /// A body of at most [`MAX_MANIFEST`] bytes.
    pub(super) async fn bounded(&self, mut response: Response, what: &str) -> Result<Vec<u8>, StoreError> {
        let too_large = |found| StoreError::Unsupported {
            place: self.place.clone(),
            reason: format!("{what}: the registry answers with {found} bytes or more, at most {MAX_MANIFEST} are read"),
        };
        if let Some(found) = response.content_length().filter(|len| *len > MAX_MANIFEST) {
            return Err(too_large(found));
        }
        let mut bytes = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(|e| self.request_error(what, e))? {
            let found = bytes.len() as u64 + piece.len() as u64;
            if found > MAX_MANIFEST {
                return Err(too_large(found));
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }
}
