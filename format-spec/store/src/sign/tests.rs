//! Signing and verifying without files; agreement with other programs is tested end to end.

use super::*;
use crate::contents::{Contents, Entry, Kind};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};

/// An EC key in SEC 1 form, made for this test by `openssl ecparam -name prime256v1 -genkey -noout`, and its public half.
const SEC1: &str = "-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIIZ3yWhp9rcx5T7/qThNXA1KWNqgILx4Z+YtPJ6oBl0voAoGCCqGSM49
AwEHoUQDQgAEFtLQIvHfXpBlcJ5xvuFM2ddMGHMUdxEOXzjt90SnxZVIuhDoLTLu
eVnKhDXMvSHm1jM7tB714QYJ75DYkYrYXA==
-----END EC PRIVATE KEY-----
";
const PUBLIC: &str = "-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEFtLQIvHfXpBlcJ5xvuFM2ddMGHMU
dxEOXzjt90SnxZVIuhDoLTLueVnKhDXMvSHm1jM7tB714QYJ75DYkYrYXA==
-----END PUBLIC KEY-----
";

fn contents(files: &[(&str, u8)]) -> Contents {
    let manifest = serde_json::json!({
        "format": "vt-bundle", "format_version": 1, "model": { "architecture": "x", "config": {} },
        "quantization": { "decodes": [] }, "source": { "kind": "gguf", "files": [] },
        "image": { "size": 0, "segments": [] }, "tensors": [], "assets": []
    });
    let entries = files.iter().map(|(path, digit)| Entry {
        path: (*path).to_owned(),
        size: 1,
        blake3: format!("{digit:x}").repeat(64),
        sha256: Some(format!("{digit:x}").repeat(64)),
        kind: Kind::Config,
    });
    Contents {
        id: "0".repeat(64),
        manifest: serde_json::from_value(manifest).unwrap(),
        manifest_bytes: Vec::new(),
        entries: entries.collect(),
    }
}

fn keys() -> (SigningKey, VerifyingKey) {
    let dir = tempfile::tempdir().unwrap();
    let (private, public) = (dir.path().join("key.pem"), dir.path().join("public.pem"));
    std::fs::write(&private, SEC1).unwrap();
    std::fs::write(&public, PUBLIC).unwrap();
    (SigningKey::read(&private).unwrap(), VerifyingKey::read(&public).unwrap())
}

#[test]
fn what_was_signed_verifies_and_nothing_else() {
    let (private, public) = keys();
    assert_eq!(private.hint(), public.hint());
    let files = [("manifest.json", 1), ("b/c", 2), ("a", 3)];
    let statement = Statement::new("model", &contents(&files)).unwrap();
    let signature = sign(&statement, &private).unwrap();
    assert_eq!(verify("x", &signature, &public, &statement).unwrap(), 3);
    assert_eq!(stated_manifest("x", &signature).unwrap(), "1".repeat(64));
    for other in [
        &[("manifest.json", 1), ("b/c", 2)][..],
        &[("manifest.json", 1), ("b/c", 2), ("a", 4)],
        &[("manifest.json", 1), ("b/c", 2), ("a", 3), ("d", 4)],
    ] {
        let other = Statement::new("model", &contents(other)).unwrap();
        let error = verify("x", &signature, &public, &other).unwrap_err();
        assert_eq!(error.exit_code(), 4, "{error}");
    }
    // A name is no content: a renamed bundle keeps its signature.
    let renamed = Statement::new("other", &contents(&files)).unwrap();
    assert!(verify("x", &signature, &public, &renamed).is_ok());
    for at in (0..signature.len()).step_by(7) {
        let mut changed = signature.clone();
        changed[at] ^= 1;
        // Some bytes say nothing (`keyid`, an unknown member's name); whatever is accepted must still be the same files.
        if let Ok(files) = verify("x", &changed, &public, &statement) {
            assert_eq!(files, 3);
        }
    }
}

#[test]
fn another_key_is_refused() {
    let (_, public) = keys();
    let dir = tempfile::tempdir().unwrap();
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new()).unwrap();
    let path = dir.path().join("other.pem");
    std::fs::write(&path, super::der::to_pem("PRIVATE KEY", pkcs8.as_ref())).unwrap();
    let other = SigningKey::read(&path).unwrap();
    let statement = Statement::new("model", &contents(&[("manifest.json", 1)])).unwrap();
    let signature = sign(&statement, &other).unwrap();
    assert!(verify("x", &signature, &public, &statement).unwrap_err().to_string().contains("by the key"));
    // Nor does it help to claim the right key.
    let text = String::from_utf8(signature).unwrap().replace(&other.hint(), &public.hint());
    let error = verify("x", text.as_bytes(), &public, &statement).unwrap_err();
    assert!(error.to_string().contains("not by this key"), "{error}");
}

#[test]
fn wrong_key_files_are_named_and_not_quoted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key.pem");
    for text in [
        "hunter2",
        "-----BEGIN PRIVATE KEY-----\naHVudGVyMg==\n-----END PRIVATE KEY-----\n",
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\naHVudGVyMg==\n-----END ENCRYPTED PRIVATE KEY-----\n",
        "-----BEGIN EC PRIVATE KEY-----\nMIL//w==\n-----END EC PRIVATE KEY-----\n",
        "-----BEGIN PUBLIC KEY-----\nMAA=\n-----END PUBLIC KEY-----\n",
    ] {
        std::fs::write(&path, text).unwrap();
        let private = SigningKey::read(&path).unwrap_err();
        let public = VerifyingKey::read(&path).unwrap_err();
        for error in [private, public] {
            assert_eq!(error.exit_code(), 3);
            assert!(!error.to_string().contains("hunter2") && !error.to_string().contains("aHVudGVy"), "{error}");
        }
    }
}
