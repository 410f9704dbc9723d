//! Stores of vt bundles: OCI registries and layouts, object stores, a local cache, signatures.
//!
//! - [`Reference`]: what names a bundle in a store, and pins it;
//! - [`Client`]: push, pull, copy, list, sign;
//! - [`Cache`]: bundles that were fetched, shared between processes;
//! - [`sign`]: signatures by the OpenSSF Model Signing specification.
//!
//! Everything streams: no file is in memory as a whole but the manifest. What comes from a store is believed only when its
//! BLAKE3 is the one in the bundle's manifest, whose own BLAKE3 is the bundle id. The functions block; the asynchronous work
//! behind them runs on threads that a [`Client`] owns.

#![forbid(unsafe_code)]

mod cache;
mod client;
mod contents;
mod credentials;
mod download;
mod environment;
mod error;
mod hashing;
mod objects;
mod oci;
mod progress;
mod pull;
mod reference;
mod retry;
pub mod sign;
mod source;
mod staging;
mod store;
mod stream;
mod upload;

pub use cache::{Cache, CacheEntry, CachedBundle, Pruned};
pub use client::{Client, Listing, Options, Signatures};
pub use contents::{Contents, Entry, Kind};
pub use error::StoreError;
pub use progress::{Progress, Silent};
pub use pull::Pulled;
pub use reference::{DEFAULT_TAG, Location, Pin, Reference, is_reference};
pub use store::Listed;
pub use upload::Pushed;
