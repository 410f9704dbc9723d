//! ggml block types.

use super::Codec;
use crate::encoding::EncodingSpec;

/// Encodings of this family.
pub(crate) const SPECS: &[&EncodingSpec] = &[];

/// Codecs of this family.
pub const CODECS: &[&dyn Codec] = &[];
