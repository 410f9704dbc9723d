//! As much of PEM and DER as key files need.

use base64::Engine;

/// Tags of DER.
pub(super) mod tag {
    pub const INTEGER: u8 = 0x02;
    pub const BIT_STRING: u8 = 0x03;
    pub const OCTET_STRING: u8 = 0x04;
    pub const OBJECT_ID: u8 = 0x06;
    pub const SEQUENCE: u8 = 0x30;
    pub const CONTEXT_0: u8 = 0xA0;
    pub const CONTEXT_1: u8 = 0xA1;
}

/// The label and the bytes of the first PEM block whose label `wanted` accepts.
pub(super) fn pem(text: &str, wanted: impl Fn(&str) -> bool) -> Option<(String, Vec<u8>)> {
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("-----BEGIN ") {
        let (label, body) = after.split_once("-----")?;
        let (encoded, after) = body.split_once("-----END ")?;
        if wanted(label) {
            let encoded: String = encoded.split_whitespace().collect();
            return Some((label.to_owned(), base64::engine::general_purpose::STANDARD.decode(encoded).ok()?));
        }
        rest = after;
    }
    None
}

/// A PEM block with lines of 64 characters.
pub(super) fn to_pem(label: &str, bytes: &[u8]) -> String {
    let encoded = base64::engine::general_purpose::STANDARD.encode(bytes);
    let mut text = format!("-----BEGIN {label}-----\n");
    let mut rest = encoded.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_at(rest.len().min(64));
        text.push_str(line);
        text.push('\n');
        rest = after;
    }
    text + &format!("-----END {label}-----\n")
}

/// The content of the element at the front, which must have that tag, and what follows it.
pub(super) fn element(bytes: &[u8], expected: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    if found != expected {
        return None;
    }
    let (&first, mut rest) = rest.split_first()?;
    let len = match first {
        0..=0x7F => usize::from(first),
        // Two bytes of length are more than a key has.
        0x81 | 0x82 => {
            let (len, after) = rest.split_at_checked(usize::from(first & 0x7F))?;
            rest = after;
            len.iter().fold(0, |sum, b| sum << 8 | usize::from(*b))
        }
        _ => return None,
    };
    rest.split_at_checked(len)
}

/// An element around content of less than 64 KiB.
pub(super) fn wrapped(tag: u8, content: &[u8]) -> Vec<u8> {
    let len = content.len();
    let mut out = vec![tag];
    match len {
        0..=0x7F => out.push(len as u8),
        0x80..=0xFF => out.extend([0x81, len as u8]),
        _ => out.extend([0x82, (len >> 8) as u8, len as u8]),
    }
    out.extend_from_slice(content);
    out
}
