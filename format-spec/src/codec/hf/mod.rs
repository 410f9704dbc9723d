//! Formats of safetensors checkpoints: ModelOpt, compressed-tensors, FP8 in DeepSeek's form, and relatives.

use super::Codec;
use crate::encoding::EncodingSpec;

pub mod nvfp4;

/// Encodings of this family.
pub(crate) const SPECS: &[&EncodingSpec] = &[&nvfp4::MODELOPT_SPEC, &nvfp4::COMPRESSED_TENSORS_SPEC];

/// Codecs of this family.
pub const CODECS: &[&dyn Codec] = &[&nvfp4::MODELOPT, &nvfp4::COMPRESSED_TENSORS];
