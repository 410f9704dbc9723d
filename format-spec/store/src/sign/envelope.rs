//! The Sigstore bundle and the DSSE envelope in it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::json;
use vt_bundle::manifest::file_name;

use super::keys::{SigningKey, VerifyingKey};
use super::statement::Statement;
use crate::error::StoreError;

/// Media type of a Sigstore bundle.
const BUNDLE_TYPE: &str = "application/vnd.dev.sigstore.bundle.v0.3+json";
/// Type of what an envelope holds.
const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SigstoreBundle {
    media_type: String,
    verification_material: Material,
    dsse_envelope: Envelope,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Material {
    #[serde(default)]
    public_key: PublicKey,
}

#[derive(Deserialize, Default)]
struct PublicKey {
    hint: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    payload: String,
    payload_type: String,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Deserialize)]
struct EnvelopeSignature {
    sig: String,
}

/// The pre-authentication encoding of DSSE v1: what is signed.
fn pae(payload: &[u8]) -> Vec<u8> {
    let mut out = format!("DSSEv1 {} {PAYLOAD_TYPE} {} ", PAYLOAD_TYPE.len(), payload.len()).into_bytes();
    out.extend_from_slice(payload);
    out
}

/// Signs a statement; gives a Sigstore bundle in JSON.
///
/// # Errors
/// [`StoreError::Signature`] where the system has no random numbers.
pub fn sign(statement: &Statement, key: &SigningKey) -> Result<Vec<u8>, StoreError> {
    let wrong = |e: serde_json::Error| StoreError::Signature { place: "statement".to_owned(), reason: e.to_string() };
    let payload = serde_json::to_vec(statement).map_err(wrong)?;
    let signature = key.sign(&pae(&payload))?;
    let bundle = json!({
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": { "publicKey": { "hint": key.hint() }, "tlogEntries": [] },
        "dsseEnvelope": {
            "payload": STANDARD.encode(&payload),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{ "sig": STANDARD.encode(signature), "keyid": "" }],
        },
    });
    serde_json::to_vec(&bundle).map_err(wrong)
}

fn open(place: &str, signature: &[u8]) -> Result<(SigstoreBundle, Vec<u8>), StoreError> {
    let wrong = |reason: String| StoreError::Signature { place: place.to_owned(), reason };
    let bundle: SigstoreBundle = serde_json::from_slice(signature)
        .map_err(|e| wrong(format!("it is no Sigstore bundle with a DSSE envelope: {e}")))?;
    if bundle.media_type != BUNDLE_TYPE || bundle.dsse_envelope.payload_type != PAYLOAD_TYPE {
        let (media, payload) = (&bundle.media_type, &bundle.dsse_envelope.payload_type);
        return Err(wrong(format!("it is a {media:?} of {payload:?}, expected {BUNDLE_TYPE:?} of {PAYLOAD_TYPE:?}")));
    }
    let payload =
        STANDARD.decode(&bundle.dsse_envelope.payload).map_err(|_| wrong("its payload is not base64".to_owned()))?;
    Ok((bundle, payload))
}

/// Checks that a signature is by a key and that what it states is `expected`; gives the number of files.
///
/// # Errors
/// [`StoreError::Signature`] that says which of the two does not hold, and where.
pub fn verify(place: &str, signature: &[u8], key: &VerifyingKey, expected: &Statement) -> Result<usize, StoreError> {
    let wrong = |reason: String| StoreError::Signature { place: place.to_owned(), reason };
    let (bundle, payload) = open(place, signature)?;
    // The hint only makes for a better message; what counts is the signature.
    let hint = bundle.verification_material.public_key.hint.filter(|hint| !hint.is_empty());
    if let Some(hint) = hint.filter(|hint| *hint != key.hint()) {
        return Err(wrong(format!("it is by the key {hint}, expected {}", key.hint())));
    }
    let message = pae(&payload);
    let [signed] = bundle.dsse_envelope.signatures.as_slice() else {
        return Err(wrong(format!("it has {} signatures, expected one", bundle.dsse_envelope.signatures.len())));
    };
    if !STANDARD.decode(&signed.sig).is_ok_and(|sig| key.verifies(&message, &sig)) {
        return Err(wrong("it is not by this key, or was changed".to_owned()));
    }
    let stated: Statement =
        serde_json::from_slice(&payload).map_err(|e| wrong(format!("it states something else than files: {e}")))?;
    expected.matches(&stated).map_err(wrong)
}

/// The SHA-256 that a signature states for `manifest.json`. Whether the signature holds is not looked at.
///
/// # Errors
/// [`StoreError::Signature`] where it states none.
pub fn stated_manifest(place: &str, signature: &[u8]) -> Result<String, StoreError> {
    let wrong = |reason: &str| StoreError::Signature { place: place.to_owned(), reason: reason.to_owned() };
    let (_, payload) = open(place, signature)?;
    let stated: Statement =
        serde_json::from_slice(&payload).map_err(|_| wrong("it states something else than files"))?;
    match stated.digest_of(file_name::MANIFEST) {
        Some(("sha256", digest)) => Ok(digest.to_owned()),
        _ => Err(wrong("it states no sha256 of manifest.json: it is of no vt bundle")),
    }
}
