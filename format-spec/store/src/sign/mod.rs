//! Signatures by the OpenSSF Model Signing specification, with keys.
//!
//! A signature is a Sigstore bundle (JSON, v0.3) around a DSSE envelope around an in-toto statement that lists every file of
//! the model with its SHA-256 (<https://github.com/ossf/model-signing-spec>). It is what `model_signing sign key` writes
//! and `model_signing verify key` reads; keys are ECDSA over P-256 or P-384 in PEM, as `openssl` makes them. There is no
//! entry in a transparency log.

mod der;
mod envelope;
mod keys;
mod statement;

pub use envelope::{sign, stated_manifest, verify};
pub use keys::{SigningKey, VerifyingKey};
pub use statement::Statement;

#[cfg(test)]
mod tests;
