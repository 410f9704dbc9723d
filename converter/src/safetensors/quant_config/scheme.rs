//! Schemes as configurations name them, coarser than encodings: enough to see whether two statements agree.

use std::fmt;

use serde_json::{Map, Value};

use crate::safetensors::SourceEncoding;
use crate::safetensors::resolve::Fp8Scales;

/// A family of encodings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// E2M1 codes with E4M3 block scales.
    Nvfp4,
    /// E2M1 codes with E8M0 block scales.
    Mxfp4,
    /// E4M3 codes with E8M0 block scales.
    Mxfp8,
    /// E4M3 codes, scales not specified.
    Fp8,
    /// E4M3 codes, one scale per tensor.
    Fp8Tensor,
    /// E4M3 codes, one scale per output channel.
    Fp8Channel,
    /// E4M3 codes, one scale per two-dimensional block.
    Fp8Block,
    /// 4-bit integers.
    Int4,
    /// 8-bit integers.
    Int8,
}

impl Scheme {
    /// The scheme of an encoding.
    pub fn of(encoding: &SourceEncoding) -> Self {
        match encoding {
            SourceEncoding::Nvfp4 { .. } => Scheme::Nvfp4,
            SourceEncoding::Mxfp4 { .. } => Scheme::Mxfp4,
            SourceEncoding::Mxfp8 => Scheme::Mxfp8,
            SourceEncoding::Fp8 { scales: Fp8Scales::Tensor } => Scheme::Fp8Tensor,
            SourceEncoding::Fp8 { scales: Fp8Scales::Channel } => Scheme::Fp8Channel,
            SourceEncoding::Fp8 { scales: Fp8Scales::Block(_) } => Scheme::Fp8Block,
            SourceEncoding::Int4ModelOpt { .. } => Scheme::Int4,
            SourceEncoding::Int8 { .. } => Scheme::Int8,
            SourceEncoding::Packed { bits, .. }
            | SourceEncoding::Gptq { bits, .. }
            | SourceEncoding::Awq { bits, .. } => {
                if *bits == 4 {
                    Scheme::Int4
                } else {
                    Scheme::Int8
                }
            }
        }
    }

    /// Whether two statements can both be true.
    pub fn agrees(self, other: Scheme) -> bool {
        let is_fp8 = |s| matches!(s, Scheme::Fp8 | Scheme::Fp8Tensor | Scheme::Fp8Channel | Scheme::Fp8Block);
        self == other || (self == Scheme::Fp8 && is_fp8(other)) || (other == Scheme::Fp8 && is_fp8(self))
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scheme::Nvfp4 => "NVFP4",
            Scheme::Mxfp4 => "MXFP4",
            Scheme::Mxfp8 => "MXFP8",
            Scheme::Fp8 => "FP8",
            Scheme::Fp8Tensor => "FP8 per tensor",
            Scheme::Fp8Channel => "FP8 per channel",
            Scheme::Fp8Block => "FP8 per block",
            Scheme::Int4 => "INT4",
            Scheme::Int8 => "INT8",
        })
    }
}

/// Algorithm names that say nothing about a layer: no quantisation, or a list of layers that follows.
pub(super) const NO_ALGORITHM: [&str; 3] = ["MIXED_PRECISION", "NONE", "NO_QUANT"];

/// ModelOpt's `quant_algo` names, compared without regard to case (the exporter writes some in lower case).
const ALGORITHMS: [(&str, Scheme); 23] = [
    ("NVFP4", Scheme::Nvfp4),
    ("NVFP4_AWQ", Scheme::Nvfp4),
    ("NVFP4_SVD", Scheme::Nvfp4),
    ("W4A16_NVFP4", Scheme::Nvfp4),
    ("W4A8_NVFP4_FP8", Scheme::Nvfp4),
    ("FP8", Scheme::Fp8),
    ("FP8_PER_CHANNEL_PER_TOKEN", Scheme::Fp8Channel),
    ("FP8_PB_WO", Scheme::Fp8Block),
    ("FP8_PB_REAL", Scheme::Fp8Block),
    ("FP8_BLOCK_SCALES", Scheme::Fp8Block),
    ("MXFP8", Scheme::Mxfp8),
    ("MXFP4", Scheme::Mxfp4),
    ("W4A8_MXFP4_FP8", Scheme::Mxfp4),
    ("W4A16_MXFP4", Scheme::Mxfp4),
    ("W4A16_AWQ", Scheme::Int4),
    ("W4A8_AWQ", Scheme::Int4),
    ("W4A16", Scheme::Int4),
    ("INT4_AWQ", Scheme::Int4),
    ("W4A16_GPTQ", Scheme::Int4),
    ("W8A16", Scheme::Int8),
    ("W8A16_GPTQ", Scheme::Int8),
    ("W8A8_SQ_PER_CHANNEL", Scheme::Int8),
    ("W8A8_SQ_PER_TENSOR_PLUGIN", Scheme::Int8),
];

pub(super) fn of_algorithm(name: &str) -> Option<Scheme> {
    ALGORITHMS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, scheme)| *scheme)
}

pub(super) fn known_algorithms() -> String {
    let names: Vec<&str> = ALGORITHMS.iter().map(|(name, _)| *name).chain(NO_ALGORITHM).collect();
    names.join(", ")
}

/// The scheme of a compressed-tensors group by its `weights` arguments.
pub(super) fn of_group(weights: &Map<String, Value>) -> Option<Scheme> {
    let bits = weights.get("num_bits").and_then(Value::as_u64)?;
    let text = |key: &str| weights.get(key).and_then(Value::as_str).unwrap_or("");
    let group = weights.get("group_size").and_then(Value::as_u64);
    Some(match (text("type"), bits, text("strategy")) {
        ("float", 4, _) if group == Some(32) => Scheme::Mxfp4,
        ("float", 4, _) => Scheme::Nvfp4,
        ("float", 8, "tensor") => Scheme::Fp8Tensor,
        ("float", 8, "channel") => Scheme::Fp8Channel,
        ("float", 8, "block") => Scheme::Fp8Block,
        ("float", 8, "group") if group == Some(32) => Scheme::Mxfp8,
        ("float", 8, _) => Scheme::Fp8,
        ("int", 4, _) => Scheme::Int4,
        ("int", 8, _) => Scheme::Int8,
        _ => return None,
    })
}
