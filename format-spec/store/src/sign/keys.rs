//! Key files: ECDSA keys in PEM.

use std::fmt;
use std::path::Path;

use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1, ECDSA_P384_SHA384_ASN1_SIGNING,
    EcdsaKeyPair, KeyPair, UnparsedPublicKey,
};

use super::der::{element, pem, tag, to_pem, wrapped};
use crate::error::StoreError;
use crate::stream::sha256;

/// Object identifier id-ecPublicKey (RFC 5480).
const EC_PUBLIC_KEY: &[u8] = &[0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x02, 0x01];
/// Largest key file.
const MAX_KEY_FILE: u64 = 64 << 10;

/// A curve that the specification allows and this program knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Curve {
    P256,
    P384,
}

impl Curve {
    /// Its object identifier (RFC 5480, section 2.1.1.1).
    fn id(self) -> &'static [u8] {
        match self {
            Self::P256 => &[0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x03, 0x01, 0x07],
            Self::P384 => &[0x2B, 0x81, 0x04, 0x00, 0x22],
        }
    }

    fn of_id(id: &[u8]) -> Option<Self> {
        [Self::P256, Self::P384].into_iter().find(|curve| curve.id() == id)
    }

    /// SubjectPublicKeyInfo of a point (RFC 5480, section 2).
    fn public_info(self, point: &[u8]) -> Vec<u8> {
        let ids = [wrapped(tag::OBJECT_ID, EC_PUBLIC_KEY), wrapped(tag::OBJECT_ID, self.id())].concat();
        // A bit string begins with the number of unused bits.
        let bits = [&[0], point].concat();
        wrapped(tag::SEQUENCE, &[wrapped(tag::SEQUENCE, &ids), wrapped(tag::BIT_STRING, &bits)].concat())
    }
}

/// What a signature names a key by: SHA-256 of the public key's PEM.
fn hint(curve: Curve, point: &[u8]) -> String {
    sha256(to_pem("PUBLIC KEY", &curve.public_info(point)).as_bytes())
}

/// A private key.
pub struct SigningKey {
    pair: EcdsaKeyPair,
    curve: Curve,
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningKey").field("curve", &self.curve).finish_non_exhaustive()
    }
}

impl SigningKey {
    /// Reads a private key: PEM, PKCS #8 or SEC 1, not encrypted.
    ///
    /// # Errors
    /// [`StoreError::Key`], which quotes nothing of the file.
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let text = read_text(path)?;
        let wrong = |reason: &str| StoreError::Key { path: path.to_owned(), reason: reason.to_owned() };
        let (label, der) = pem(&text, |label| label.ends_with("PRIVATE KEY")).ok_or_else(|| {
            wrong("no private key in PEM; `openssl ecparam -name prime256v1 -genkey -noout -out key.pem` makes one")
        })?;
        let random = SystemRandom::new();
        let algorithms =
            [(Curve::P256, &ECDSA_P256_SHA256_ASN1_SIGNING), (Curve::P384, &ECDSA_P384_SHA384_ASN1_SIGNING)];
        let pair = match label.as_str() {
            "PRIVATE KEY" => algorithms
                .into_iter()
                .find_map(|(curve, alg)| Some((curve, EcdsaKeyPair::from_pkcs8(alg, &der, &random).ok()?))),
            "EC PRIVATE KEY" => sec1(&der).and_then(|(curve, secret, point)| {
                let (_, alg) = algorithms.into_iter().find(|(c, _)| *c == curve)?;
                Some((curve, EcdsaKeyPair::from_private_key_and_public_key(alg, secret, point, &random).ok()?))
            }),
            _ => {
                return Err(wrong("the key is encrypted; decrypt it first: `openssl pkey -in key.pem -out plain.pem`"));
            }
        };
        let (curve, pair) = pair.ok_or_else(|| wrong("not an ECDSA key over P-256 or P-384 with its public key"))?;
        Ok(Self { pair, curve })
    }

    /// The name that a signature gives the key.
    pub fn hint(&self) -> String {
        hint(self.curve, self.pair.public_key().as_ref())
    }

    /// Signs; ASN.1 form.
    pub(super) fn sign(&self, message: &[u8]) -> Result<Vec<u8>, StoreError> {
        let signed = self.pair.sign(&SystemRandom::new(), message);
        signed.map(|s| s.as_ref().to_vec()).map_err(|_| StoreError::Signature {
            place: "this process".to_owned(),
            reason: "the system gave no random numbers".to_owned(),
        })
    }
}

/// Curve, secret and public point of an ECPrivateKey (RFC 5915).
fn sec1(der: &[u8]) -> Option<(Curve, &[u8], &[u8])> {
    let (body, _) = element(der, tag::SEQUENCE)?;
    let (_, rest) = element(body, tag::INTEGER)?;
    let (secret, rest) = element(rest, tag::OCTET_STRING)?;
    let (parameters, rest) = element(rest, tag::CONTEXT_0)?;
    let (id, _) = element(parameters, tag::OBJECT_ID)?;
    let (public, _) = element(rest, tag::CONTEXT_1)?;
    let (bits, _) = element(public, tag::BIT_STRING)?;
    Some((Curve::of_id(id)?, secret, bits.split_first()?.1))
}

/// A public key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyingKey {
    curve: Curve,
    point: Vec<u8>,
}

impl VerifyingKey {
    /// Reads a public key: PEM, `BEGIN PUBLIC KEY`.
    ///
    /// # Errors
    /// [`StoreError::Key`].
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let text = read_text(path)?;
        let wrong = |reason: &str| StoreError::Key { path: path.to_owned(), reason: reason.to_owned() };
        let (_, der) = pem(&text, |label| label == "PUBLIC KEY").ok_or_else(|| {
            wrong("no public key in PEM; `openssl pkey -in key.pem -pubout -out public.pem` makes one of a private key")
        })?;
        Self::of_info(&der).ok_or_else(|| wrong("not an ECDSA key over P-256 or P-384"))
    }

    fn of_info(der: &[u8]) -> Option<Self> {
        let (body, _) = element(der, tag::SEQUENCE)?;
        let (ids, rest) = element(body, tag::SEQUENCE)?;
        let (kind, ids) = element(ids, tag::OBJECT_ID)?;
        let (curve, _) = element(ids, tag::OBJECT_ID)?;
        let (bits, _) = element(rest, tag::BIT_STRING)?;
        let point = bits.strip_prefix(&[0])?;
        (kind == EC_PUBLIC_KEY).then_some(())?;
        Some(Self { curve: Curve::of_id(curve)?, point: point.to_vec() })
    }

    /// The name that a signature gives the key.
    pub fn hint(&self) -> String {
        hint(self.curve, &self.point)
    }

    /// Whether a signature in ASN.1 form is of a message by this key.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let algorithm = match self.curve {
            Curve::P256 => &ECDSA_P256_SHA256_ASN1,
            Curve::P384 => &ECDSA_P384_SHA384_ASN1,
        };
        UnparsedPublicKey::new(algorithm, &self.point).verify(message, signature).is_ok()
    }
}

fn read_text(path: &Path) -> Result<String, StoreError> {
    let len = path.metadata().map_err(StoreError::io(path))?.len();
    if len > MAX_KEY_FILE {
        return Err(StoreError::Key { path: path.to_owned(), reason: format!("{len} bytes are no key") });
    }
    let bytes = std::fs::read(path).map_err(StoreError::io(path))?;
    String::from_utf8(bytes).map_err(|_| StoreError::Key { path: path.to_owned(), reason: "not PEM text".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ECPrivateKey with those parts.
    fn private(secret: &[u8], curve: &[u8], point: &[u8]) -> Vec<u8> {
        let parameters = wrapped(tag::CONTEXT_0, &wrapped(tag::OBJECT_ID, curve));
        let public = wrapped(tag::CONTEXT_1, &wrapped(tag::BIT_STRING, &[&[0], point].concat()));
        let parts = [wrapped(tag::INTEGER, &[1]), wrapped(tag::OCTET_STRING, secret), parameters, public];
        wrapped(tag::SEQUENCE, &parts.concat())
    }

    #[test]
    fn structures_are_read_as_they_are_written() {
        let point = [4; 97];
        for curve in [Curve::P256, Curve::P384] {
            let key = VerifyingKey::of_info(&curve.public_info(&point)).unwrap();
            assert_eq!((key.curve, key.point.as_slice()), (curve, &point[..]));
            assert_eq!(sec1(&private(&[7; 48], curve.id(), &point)), Some((curve, &[7; 48][..], &point[..])));
        }
        assert_eq!(sec1(&private(&[7; 32], &[0x2B, 0x81, 0x04, 0x00, 0x0A], &point)), None, "a curve of another kind");
    }

    #[test]
    fn damaged_structures_are_refused_or_read_but_never_overrun() {
        let point = [4; 65];
        for whole in [Curve::P256.public_info(&point), private(&[7; 32], Curve::P256.id(), &point)] {
            for len in 0..whole.len() {
                assert!(VerifyingKey::of_info(&whole[..len]).is_none() && sec1(&whole[..len]).is_none());
            }
            for at in 0..whole.len() {
                for value in [0, 1, 0x7F, 0x80, 0x81, 0x82, 0x84, 0xFF] {
                    let mut changed = whole.clone();
                    changed[at] = value;
                    let parts = (VerifyingKey::of_info(&changed), sec1(&changed));
                    assert!(parts.0.is_none_or(|key| key.point.len() <= whole.len()));
                    assert!(parts.1.is_none_or(|(_, secret, point)| secret.len() + point.len() <= whole.len()));
                }
            }
        }
    }
}
