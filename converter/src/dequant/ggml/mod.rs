//! Decoders of ggml's tensor types, from the blocks of a file to f32.
//!
//! These are the statement of what a GGUF tensor *is*: every value in ggml's own order of operations, in f32, without fused
//! multiply-add, bit for bit. For types that a bundle tiles they share nothing with its layouts, so that comparing the two proves
//! something; types that it keeps as raw blocks have one decoder, in [`vt_bundle::codec::ggml::raw`]. Formulas: `ggml-quants.c` and `ggml-common.h` of ggml 0.25.3 (W weights per block).

mod check;
mod fp4;
mod iq4;
mod kquants;
mod legacy;

pub use check::{BadBlock, check_blocks};

use half::{bf16, f16};
use vt_bundle::codec::ggml::raw;

use crate::gguf::types::GgmlType;

/// Why bytes could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum DequantError {
    /// No decoder for the id: unknown, removed, or for activations.
    #[error("ggml type {id} has no decoder")]
    NoDecoder { id: u32 },
    /// The bytes are not whole blocks, or `out` does not have one place per weight.
    #[error("{bytes} bytes of type {name} do not decode to {values} values")]
    Length { name: &'static str, bytes: usize, values: usize },
}

/// Decodes whole blocks of the type `id` to f32.
///
/// `bytes` holds any number of blocks, `out` exactly their weights, in file order. Integers and f64 are converted to f32 with
/// the usual rounding, as ggml does.
///
/// # Errors
/// [`DequantError`] if the type has no decoder or the lengths do not agree.
pub fn dequantize(id: u32, bytes: &[u8], out: &mut [f32]) -> Result<(), DequantError> {
    let kind = GgmlType::from_id(id).ok_or(DequantError::NoDecoder { id })?;
    let (weights, size) = (kind.block_weights as usize, kind.block_bytes as usize);
    if size == 0 {
        return Err(DequantError::NoDecoder { id });
    }
    if !bytes.len().is_multiple_of(size) || bytes.len() / size * weights != out.len() {
        return Err(DequantError::Length { name: kind.name, bytes: bytes.len(), values: out.len() });
    }
    match id {
        0 => scalars(bytes, out, f32::from_le_bytes),
        1 => scalars(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        24 => scalars(bytes, out, |[b]: [u8; 1]| f32::from(b as i8)),
        25 => scalars(bytes, out, |b| f32::from(i16::from_le_bytes(b))),
        26 => scalars(bytes, out, |b| i32::from_le_bytes(b) as f32),
        27 => scalars(bytes, out, |b| i64::from_le_bytes(b) as f32),
        28 => scalars(bytes, out, |b| f64::from_le_bytes(b) as f32),
        30 => scalars(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        2 => blocks(bytes, out, legacy::q4_0),
        3 => blocks(bytes, out, legacy::q4_1),
        6 => blocks(bytes, out, legacy::q5_0),
        7 => blocks(bytes, out, legacy::q5_1),
        8 => blocks(bytes, out, legacy::q8_0),
        10 => blocks(bytes, out, kquants::q2_k),
        11 => blocks(bytes, out, kquants::q3_k),
        12 => blocks(bytes, out, kquants::q4_k),
        13 => blocks(bytes, out, kquants::q5_k),
        14 => blocks(bytes, out, kquants::q6_k),
        20 => blocks(bytes, out, iq4::iq4_nl),
        23 => blocks(bytes, out, iq4::iq4_xs),
        39 => blocks(bytes, out, fp4::mxfp4),
        40 => blocks(bytes, out, fp4::nvfp4),
        _ => match raw::by_id(id) {
            Some(format) => format.decode(bytes, out),
            None => return Err(DequantError::NoDecoder { id }),
        },
    }
    Ok(())
}

fn scalars<const B: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; B]) -> f32) {
    for (raw, y) in bytes.as_chunks::<B>().0.iter().zip(out) {
        *y = value(*raw);
    }
}

fn blocks<const B: usize, const W: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn(&[u8; B], &mut [f32; W])) {
    for (raw, y) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<W>().0) {
        decode(raw, y);
    }
}

/// The f16 at byte `at` of a block.
fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The little-endian u16 at byte `at` of a block.
fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The little-endian u32 at byte `at` of a block.
fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}
