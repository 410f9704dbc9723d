//! What kernels are given by value: mirrors of `cuda/gemm/{request,tiled,raw,small}.cuh` and of `cuda/gemm/generic.cu`.

use crate::weight::{FloatType, MAX_CODE_PLANES, WeightError};
use vt_bundle::codec::ggml::raw::RawFormat;
use vt_bundle::encoding::{EncodingSpec, MAX_SCALE_PLANES, ScaleType, Span};
use vt_bundle::layout::TiledMatrix;

/// Parts of a fused matrix, at most.
pub(super) const MAX_PARTS: usize = 16;

/// Values of [`Request::input`]: `enum Input` of `cuda/gemm/request.cuh`.
pub(super) const INPUT_NORMED: u32 = 1;
pub(super) const INPUT_GATED: u32 = 2;
pub(super) const INPUT_WEIGHTED: u32 = 3;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Request {
    pub x: u64,
    pub out: u64,
    pub bias: u64,
    pub offsets: u64,
    pub expert_stride: u64,
    pub m: u32,
    pub x_stride: u32,
    pub out_stride: u32,
    pub n: u32,
    pub out_bf16: u32,
    pub accumulate: u32,
    pub input: u32,
    pub eps: f32,
    pub weight: u64,
    pub gate: u32,
    pub up_at: u32,
    pub next: u64,
    pub squares: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CodePlane {
    pub data: u64,
    pub bits: u32,
    pub shift: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScalePlane {
    pub data: u64,
    pub dtype: u32,
    pub span: u32,
    pub reach: u32,
    pub columns: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    pub start: u32,
    pub rows: u32,
    pub blocks_above: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tiled {
    pub codes: [CodePlane; MAX_CODE_PLANES],
    pub scales: [ScalePlane; MAX_SCALE_PLANES],
    pub parts: [Part; MAX_PARTS],
    pub code_planes: u32,
    pub part_count: u32,
    pub formula: u32,
    pub zero: u32,
    pub n: u32,
    pub k: u32,
    pub block_rows: u32,
    pub step: u32,
}

/// How a product with few rows is divided; `struct Plan` of `cuda/gemm/small.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub workspace: u64,
    pub units: u32,
    pub groups: u32,
    pub blocks: u32,
    pub x_units: u32,
    pub x_whole: u32,
    pub shifts: [u32; MAX_SCALE_PLANES],
    pub factor: u32,
    pub factor_plane: u32,
    pub zero_add: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub data: u64,
    pub dtype: u32,
    pub n: u32,
    pub k: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Raw {
    pub blocks: u64,
    pub grid: u64,
    pub format: u32,
    pub weights: u32,
    pub bytes: u32,
    pub n: u32,
    pub k: u32,
}

/// Formulas of the encodings, in the order of `enum Formula`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Formula {
    E2m1TimesE4m3TimesGlobal,
    E2m1TimesE4m3OverGlobal,
    E2m1TimesScale,
    E4m3TimesScale,
    Integer,
    IntegerZeros,
    ScaleAndMin,
    Q2K,
    Q3K,
    Q4K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
    Mxfp4Ggml,
    Nvfp4Ggml,
}

impl Formula {
    /// The formula of a decode and the whole number in it: what is subtracted from codes, or added to zero points.
    pub(super) fn find(spec: &EncodingSpec) -> Option<(Self, u32)> {
        Some(match spec.decode {
            "nvfp4.modelopt@1" => (Self::E2m1TimesE4m3TimesGlobal, 0),
            "nvfp4.compressed-tensors@1" => (Self::E2m1TimesE4m3OverGlobal, 0),
            "mxfp4@1" => (Self::E2m1TimesScale, 0),
            "mxfp8@1" => (Self::E4m3TimesScale, 0),
            "q4_0.ggml@1" => (Self::Integer, 8),
            "q5_0.ggml@1" => (Self::Integer, 16),
            "q8_0.ggml@1" => (Self::Integer, 128),
            "q4_1.ggml@1" | "q5_1.ggml@1" => (Self::ScaleAndMin, 0),
            "q2_k.ggml@1" => (Self::Q2K, 0),
            "q3_k.ggml@1" => (Self::Q3K, 0),
            "q4_k.ggml@1" | "q5_k.ggml@1" => (Self::Q4K, 0),
            "q6_k.ggml@1" => (Self::Q6K, 0),
            "iq4_nl.ggml@1" => (Self::Iq4Nl, 0),
            "iq4_xs.ggml@1" => (Self::Iq4Xs, 0),
            "mxfp4.ggml@1" => (Self::Mxfp4Ggml, 0),
            "nvfp4.ggml@1" => (Self::Nvfp4Ggml, 0),
            // The rest end in the type of their scales.
            other => match other.strip_suffix("@1")?.rsplit_once('.')?.0 {
                "fp8.tensor" | "fp8.channel" | "fp8.block" => (Self::E4m3TimesScale, 0),
                "int4.symmetric" => (Self::Integer, 8),
                "int8.symmetric" | "int8.symmetric.tensor" => (Self::Integer, 128),
                "int4.zeros" | "int8.zeros" => (Self::IntegerZeros, 0),
                "int4.zeros-minus-one" | "int8.zeros-minus-one" => (Self::IntegerZeros, 1),
                _ => return None,
            },
        })
    }
}

/// Numbers of `enum ScaleType`.
fn scale_type(dtype: ScaleType) -> u32 {
    match dtype {
        ScaleType::E4M3 => 0,
        ScaleType::E8M0 => 1,
        ScaleType::U8 => 2,
        ScaleType::I8 => 3,
        ScaleType::F16 => 4,
        ScaleType::Bf16 => 5,
        ScaleType::F32 => 6,
    }
}

/// The number of `enum ScaleType` for elements of a row-major matrix.
pub(super) fn float_type(dtype: FloatType) -> u32 {
    scale_type(match dtype {
        FloatType::F32 => ScaleType::F32,
        FloatType::F16 => ScaleType::F16,
        FloatType::Bf16 => ScaleType::Bf16,
    })
}

/// The inverse of [`float_type`].
pub(super) fn float_type_of(number: u32) -> Option<FloatType> {
    [FloatType::F32, FloatType::F16, FloatType::Bf16].into_iter().find(|dtype| float_type(*dtype) == number)
}

/// The number of `enum RawFormat`.
pub(super) fn raw_format(format: &RawFormat) -> Option<u32> {
    let names = ["iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "q1_0", "q2_0"];
    names.iter().position(|name| *name == format.name).map(|number| number as u32)
}

/// log2 of units of `unit_k` along K per row of each scale plane.
pub(super) fn scale_shifts(tiled: &Tiled, unit_k: u32) -> [u32; MAX_SCALE_PLANES] {
    // One row for all of K where the group is as long.
    tiled.scales.map(|plane| if plane.reach >= tiled.k { 31 } else { (plane.reach / unit_k).max(1).trailing_zeros() })
}

impl Tiled {
    /// The matrix with planes at `addresses`, in the order of [`TiledMatrix::planes`].
    pub(super) fn new(matrix: &TiledMatrix, addresses: &[u64]) -> Result<Self, WeightError> {
        let (spec, decode) = (matrix.spec, matrix.spec.decode);
        let (formula, zero) = Formula::find(spec).ok_or(WeightError::NoKernel { decode })?;
        if spec.codes.len() > MAX_CODE_PLANES {
            return Err(WeightError::CodePlanes { decode, found: spec.codes.len() });
        }
        if matrix.parts.len() > MAX_PARTS {
            return Err(WeightError::Parts { decode, found: matrix.parts.len(), most: MAX_PARTS });
        }
        // Axes are at most 2^31.
        let mut this = Self {
            code_planes: spec.codes.len() as u32,
            part_count: matrix.parts.len() as u32,
            formula: formula as u32,
            zero,
            n: matrix.padded_n() as u32,
            k: matrix.k as u32,
            block_rows: matrix.block[0] as u32,
            ..Self::default()
        };
        let (codes, scales) = addresses.split_at(spec.codes.len());
        for ((to, plane), &data) in this.codes.iter_mut().zip(spec.codes).zip(codes) {
            *to = CodePlane { data, bits: plane.bits, shift: plane.shift };
        }
        let mut step = 0u64;
        for ((to, plane), &data) in this.scales.iter_mut().zip(spec.scales).zip(scales) {
            let (span, reach) = match plane.span {
                Span::Group => (0, matrix.group_size),
                Span::Super(reach) => (0, u64::from(reach)),
                Span::Channel => (1, 0),
                Span::Part => (2, 0),
                Span::Block => (3, matrix.block[1]),
            };
            step = greatest_common_divisor(step, reach);
            let columns = matrix.scale_columns(plane) as u32;
            *to = ScalePlane { data, dtype: scale_type(plane.dtype), span, reach: reach as u32, columns };
        }
        this.step = if step == 0 { u32::MAX } else { step as u32 };
        let has_blocks = spec.scales.iter().any(|plane| plane.span == Span::Block);
        let mut blocks_above = 0;
        for (to, part) in this.parts.iter_mut().zip(&matrix.parts) {
            *to = Part { start: part.start as u32, rows: part.rows as u32, blocks_above };
            blocks_above += if has_blocks { matrix.block_rows(part) as u32 } else { 0 };
        }
        Ok(this)
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vt_bundle::codec::ggml::raw;
    use vt_bundle::encoding;

    #[test]
    fn every_encoding_has_a_formula() {
        for spec in encoding::all() {
            assert!(Formula::find(spec).is_some(), "{}", spec.decode);
        }
        for format in raw::FORMATS {
            assert!(raw_format(format).is_some(), "{}", format.name);
        }
    }

    #[test]
    fn sizes_are_those_of_the_headers() {
        assert_eq!((size_of::<Request>(), size_of::<Tiled>(), size_of::<Plan>()), (104, 368, 56));
        assert_eq!((size_of::<Rows>(), size_of::<Raw>()), (24, 40));
    }
}
