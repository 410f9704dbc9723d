//! The vt bundle: weights in the order GPU kernels read, content-hashed and reversible.
//!
//! A bundle is a directory: `manifest.json` (its BLAKE3 is the bundle id), weight segments that together are the device
//! image, and assets. `SPEC.md` beside this crate is normative; this crate is its implementation.
//!
//! - [`tile`], [`encoding`], [`layout`]: the order and the size of every plane, defined once;
//! - [`codec`], [`pack`]: source bytes to planes and back, pure functions;
//! - [`manifest`], [`hash`], [`reader`], [`writer`]: the directory and its proofs.

pub mod codec;
pub mod encoding;
pub mod float8;
pub mod layout;
pub mod mmap;
pub mod pack;
pub mod row_order;
pub mod tile;
pub mod unpack;
