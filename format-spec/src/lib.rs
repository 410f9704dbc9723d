//! The vt bundle format.

pub mod mmap;
