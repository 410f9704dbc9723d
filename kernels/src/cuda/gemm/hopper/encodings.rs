//! Which matrices the kernels read, and how.

use vt_bundle::encoding::{ScalePlane, ScaleType, Span};
use vt_bundle::layout::TiledMatrix;

/// What scales a row of results: a plane with an element per part or per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowScale {
    /// Index of the plane among [`TiledMatrix::planes`].
    pub plane: usize,
    /// Number of the element type in `kernel.cuh`.
    pub dtype: u32,
    /// One element a part instead of one a row.
    pub of_part: bool,
    /// Results are divided by it.
    pub divides: bool,
}

/// How a matrix is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// Index among [`ENCODINGS`].
    pub encoding: usize,
    /// Index of the plane of scales within K, if there is one.
    pub scales: Option<usize>,
    pub row_scale: Option<RowScale>,
}

/// An encoding as the kernels know it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Encoding {
    /// In the kernels' names.
    pub name: &'static str,
    /// Bits of a code.
    pub bits: u32,
    /// Rows of the plane of scales within a step, and bytes of one of its elements.
    pub scale_rows: u32,
    pub scale_bytes: u32,
}

const fn encoding(name: &'static str, bits: u32, scale_rows: u32, scale_bytes: u32) -> Encoding {
    Encoding { name, bits, scale_rows, scale_bytes }
}

/// As instantiated in `floats.cu` and `integers.cu`.
pub(super) const ENCODINGS: &[Encoding] = &[
    encoding("nvfp4", 4, 4, 1),
    encoding("mxfp4", 4, 2, 1),
    encoding("mxfp4_ggml", 4, 2, 1),
    encoding("fp8", 8, 0, 0),
    encoding("int4_f16_g32", 4, 2, 2),
    encoding("int4_bf16_g32", 4, 2, 2),
    encoding("int4_f16_g64", 4, 1, 2),
    encoding("int4_bf16_g64", 4, 1, 2),
    encoding("int8_f16_g32", 8, 2, 2),
    encoding("int8_bf16_g32", 8, 2, 2),
    encoding("int8_f16_g64", 8, 1, 2),
    encoding("int8_bf16_g64", 8, 1, 2),
];

/// Parts of a fused matrix, at most; as `kMaxParts`.
pub(super) const MAX_PARTS: usize = 8;
/// Columns of a step along K.
pub(super) const STEP: u64 = 64;

impl Reading {
    /// How the kernels read `matrix`; `None` where they do not.
    pub(super) fn of(matrix: &TiledMatrix) -> Option<Self> {
        if !matrix.k.is_multiple_of(STEP) || matrix.parts.len() > MAX_PARTS {
            return None;
        }
        let spec = matrix.spec;
        let plane = |span: fn(&Span) -> bool| spec.scales.iter().position(|plane| span(&plane.span));
        let grouped = plane(|span| *span == Span::Group);
        let of_rows = plane(|span| matches!(span, Span::Part | Span::Channel));
        let named = |name: &str| ENCODINGS.iter().position(|other| other.name == name);
        let family = spec.decode.split_once('@')?.0;
        let (name, divides) = match family {
            // compressed-tensors allows other groups.
            "nvfp4.modelopt" if matrix.group_size == 16 => ("nvfp4".to_owned(), false),
            "nvfp4.compressed-tensors" if matrix.group_size == 16 => ("nvfp4".to_owned(), true),
            "mxfp4" if matrix.group_size == 32 => ("mxfp4".to_owned(), false),
            "mxfp4.ggml" if matrix.group_size == 32 => ("mxfp4_ggml".to_owned(), false),
            "q4_0.ggml" => (grouped_integers("int4", matrix, grouped)?, false),
            "q8_0.ggml" => (grouped_integers("int8", matrix, grouped)?, false),
            other => match other.rsplit_once('.')?.0 {
                "fp8.tensor" | "fp8.channel" => ("fp8".to_owned(), false),
                "int4.symmetric" => (grouped_integers("int4", matrix, grouped)?, false),
                "int8.symmetric" => (grouped_integers("int8", matrix, grouped)?, false),
                _ => return None,
            },
        };
        let planes = |i: usize| spec.codes.len() + i;
        let row_scale = match of_rows {
            Some(i) => Some(RowScale {
                plane: planes(i),
                dtype: row_scale_type(&spec.scales[i])?,
                of_part: spec.scales[i].span == Span::Part,
                divides,
            }),
            None => None,
        };
        Some(Self { encoding: named(&name)?, scales: grouped.map(planes), row_scale })
    }
}

/// Name of the kernels for integers with a scale a group: by the type of the scales, and by whether a step has several groups.
fn grouped_integers(base: &str, matrix: &TiledMatrix, scales: Option<usize>) -> Option<String> {
    let dtype = match matrix.spec.scales[scales?].dtype {
        ScaleType::F16 => "f16",
        ScaleType::Bf16 => "bf16",
        _ => return None,
    };
    match matrix.group_size {
        32 => Some(format!("{base}_{dtype}_g32")),
        group if group > 0 && group.is_multiple_of(STEP) => Some(format!("{base}_{dtype}_g64")),
        _ => None,
    }
}

/// Numbers of `kRowScaleF32` and its neighbours.
fn row_scale_type(plane: &ScalePlane) -> Option<u32> {
    match plane.dtype {
        ScaleType::F32 => Some(1),
        ScaleType::Bf16 => Some(2),
        ScaleType::F16 => Some(3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vt_bundle::encoding;

    fn matrix(decode: &str, k: u64, group: u64) -> TiledMatrix {
        TiledMatrix::new(encoding::find(decode).unwrap(), k, &[100, 64], group, [0, 0]).unwrap()
    }

    #[test]
    fn matrices_are_read_by_their_own_kernels() {
        let nvfp4 = Reading::of(&matrix("nvfp4.compressed-tensors@1", 128, 16)).unwrap();
        assert_eq!(ENCODINGS[nvfp4.encoding].name, "nvfp4");
        assert_eq!(nvfp4.scales, Some(1));
        assert_eq!(nvfp4.row_scale, Some(RowScale { plane: 2, dtype: 1, of_part: true, divides: true }));
        let fp8 = Reading::of(&matrix("fp8.channel.bf16@1", 128, 0)).unwrap();
        assert_eq!((ENCODINGS[fp8.encoding].name, fp8.scales), ("fp8", None));
        assert_eq!(fp8.row_scale, Some(RowScale { plane: 1, dtype: 2, of_part: false, divides: false }));
        let int4 = Reading::of(&matrix("int4.symmetric.bf16@1", 256, 128)).unwrap();
        assert_eq!(ENCODINGS[int4.encoding].name, "int4_bf16_g64");
        let reading = Reading::of(&matrix("q8_0.ggml@1", 128, 32)).unwrap();
        assert_eq!(ENCODINGS[reading.encoding].name, "int8_f16_g32");
        let spec = encoding::find("q8_0.ggml@1").unwrap();
        assert_eq!(spec.scales[0].dtype.bytes() as u32, ENCODINGS[reading.encoding].scale_bytes);
    }

    #[test]
    fn other_matrices_are_left_to_other_kernels() {
        // Groups of 32; K of half a step; an encoding with two planes of codes.
        assert_eq!(Reading::of(&matrix("nvfp4.compressed-tensors@1", 128, 32)), None);
        assert_eq!(Reading::of(&matrix("nvfp4.modelopt@1", 96, 16)), None);
        assert_eq!(Reading::of(&matrix("q5_0.ggml@1", 128, 32)), None);
    }
}
