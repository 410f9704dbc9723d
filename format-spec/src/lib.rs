//! The vt bundle format.
