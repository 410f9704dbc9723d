//! The vt bundle: weights in the order GPU kernels read, content-hashed and reversible.
//!
//! A bundle is a directory: `manifest.json` (its BLAKE3 is the bundle id), weight segments that together are the device
//! image, and assets. `SPEC.md` beside this crate is normative; this crate is its implementation.
//!
//! - [`tile`], [`encoding`], [`layout`]: the order and the size of every plane, defined once;
//! - [`codec`], [`pack`]: source bytes to planes and back, pure functions;
//! - [`manifest`], [`hash`], [`reader`], [`writer`], [`restore`]: the directory, its proofs, and the way back.

pub mod codec;
pub mod encoding;
pub mod error;
#[cfg(feature = "flags")]
pub mod flags;
pub mod float8;
pub mod geometry;
pub mod hash;
pub mod layout;
pub mod manifest;
pub mod mmap;
pub mod outside;
pub mod pack;
pub mod printable;
pub mod reader;
pub mod restore;
pub mod row_order;
pub mod slice;
pub mod tile;
pub mod unpack;
pub mod writer;

pub use error::BundleError;
pub use geometry::Geometry;
pub use manifest::Manifest;
pub use reader::Bundle;
