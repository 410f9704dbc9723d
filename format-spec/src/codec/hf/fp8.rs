//! FP8: E4M3 codes with scales per tensor, per output channel or per two-dimensional block.
//!
//! Inputs: weight F8_E4M3 `[N, K]` (or `[K, N]` for stacked experts of ModelOpt on Llama 4), scales of one element, `[N]`, or
//! `[ceil(N / block N), ceil(K / block K)]`, the last block of each axis cut short. Every writer multiplies, DeepSeek's
//! `weight_scale_inv` too. Sources: ModelOpt 0.47 `fp8_tensor.py`, compressed-tensors 0.20, DeepSeek-V3 `kernel.py`.

use crate::codec::{Band, CodeRows, Codec, MatrixShape};
use crate::encoding::{EncodingSpec, MatrixRow, ScalePlane, ScaleType, Span};
use crate::float8::{E4M3, e8m0};
use crate::tile::CodePlane;

const WEIGHT: usize = 0;
const CODES: &[CodePlane] = &[CodePlane { name: "q8", bits: 8, shift: 0 }];

/// A plane of scales and the formula `w = e4m3(code) * scale`, rounded once to f32.
macro_rules! spec {
    ($name:ident, $decode:literal, $dtype:ident, $span:ident, $get:expr) => {
        #[doc = concat!("`w = e4m3(code) * scale`; manifest name `", $decode, "`.")]
        pub static $name: EncodingSpec = EncodingSpec {
            decode: $decode,
            encoding: "e4m3",
            codes: CODES,
            scales: &[ScalePlane { name: "scales", dtype: ScaleType::$dtype, span: Span::$span }],
            min_compute_capability: 80,
            decode_row: |row, out| decode(row, out, Span::$span, $get),
        };
    };
}

spec!(TENSOR_F32, "fp8.tensor.f32@1", F32, Part, |r, i| r.f32(0, i));
spec!(TENSOR_BF16, "fp8.tensor.bf16@1", Bf16, Part, |r, i| r.bf16(0, i));
spec!(TENSOR_F16, "fp8.tensor.f16@1", F16, Part, |r, i| r.f16(0, i));
spec!(CHANNEL_F32, "fp8.channel.f32@1", F32, Channel, |r, i| r.f32(0, i));
spec!(CHANNEL_BF16, "fp8.channel.bf16@1", Bf16, Channel, |r, i| r.bf16(0, i));
spec!(CHANNEL_F16, "fp8.channel.f16@1", F16, Channel, |r, i| r.f16(0, i));
spec!(BLOCK_F32, "fp8.block.f32@1", F32, Block, |r, i| r.f32(0, i));
spec!(BLOCK_BF16, "fp8.block.bf16@1", Bf16, Block, |r, i| r.bf16(0, i));
spec!(BLOCK_F16, "fp8.block.f16@1", F16, Block, |r, i| r.f16(0, i));
spec!(BLOCK_E8M0, "fp8.block.e8m0@1", E8M0, Block, |r, i| e8m0(r.u8(0, i)));

fn decode(row: &MatrixRow<'_>, out: &mut [f32], span: Span, scale: impl Fn(&MatrixRow<'_>, usize) -> f32) {
    let width = if span == Span::Block { row.block[1] } else { out.len().max(1) };
    for (b, (codes, values)) in row.codes.chunks(width).zip(out.chunks_mut(width)).enumerate() {
        let scale = scale(row, b);
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = E4M3[code as usize] * scale;
        }
    }
}

/// Codec of FP8 weights with one kind of scales.
pub struct Fp8 {
    name: &'static str,
    spec: &'static EncodingSpec,
    /// The weight is `[K, N]`.
    transposed: bool,
}

impl Fp8 {
    const fn new(spec: &'static EncodingSpec) -> Self {
        // The storage is told by the formula alone: codes by rows, scales in natural order.
        Fp8 { name: spec.decode, spec, transposed: false }
    }

    fn span(&self) -> Span {
        self.spec.scales[0].span
    }

    fn scale_bytes(&self) -> usize {
        self.spec.scales[0].dtype.bytes()
    }
}

/// Number of codecs.
pub(super) const COUNT: usize = 13;

/// All codecs: tensor, channel and block scales in each element type.
pub static CODECS: [Fp8; COUNT] = [
    Fp8::new(&TENSOR_F32),
    Fp8::new(&TENSOR_BF16),
    Fp8::new(&TENSOR_F16),
    Fp8::new(&CHANNEL_F32),
    Fp8::new(&CHANNEL_BF16),
    Fp8::new(&CHANNEL_F16),
    Fp8::new(&BLOCK_F32),
    Fp8::new(&BLOCK_BF16),
    Fp8::new(&BLOCK_F16),
    Fp8::new(&BLOCK_E8M0),
    Fp8 { name: "fp8.tensor.f32.transposed@1", spec: &TENSOR_F32, transposed: true },
    Fp8 { name: "fp8.tensor.bf16.transposed@1", spec: &TENSOR_BF16, transposed: true },
    Fp8 { name: "fp8.tensor.f16.transposed@1", spec: &TENSOR_F16, transposed: true },
];

impl Codec for Fp8 {
    fn name(&self) -> &'static str {
        self.name
    }

    fn spec(&self) -> &'static EncodingSpec {
        self.spec
    }

    fn inputs(&self) -> usize {
        2
    }

    fn input_bytes(&self, shape: &MatrixShape, input: usize) -> Option<u64> {
        let (n, k) = (shape.n as u64, shape.k as u64);
        if input == WEIGHT {
            return n.checked_mul(k);
        }
        let elements = match self.span() {
            Span::Channel => n,
            Span::Block => n.div_ceil(shape.block[0] as u64).checked_mul(k.div_ceil(shape.block[1] as u64))?,
            _ => 1,
        };
        elements.checked_mul(self.scale_bytes() as u64)
    }

    fn codes16(&self, shape: &MatrixShape, inputs: &[&[u8]], row: usize, k0: usize, out: &mut [u8; 16]) {
        let width = (shape.k - k0).min(16);
        out[width..].fill(0);
        if self.transposed {
            for (i, code) in out[..width].iter_mut().enumerate() {
                *code = inputs[WEIGHT][(k0 + i) * shape.n + row];
            }
            return;
        }
        out[..width].copy_from_slice(&inputs[WEIGHT][row * shape.k + k0..][..width]);
    }

    fn scale(&self, shape: &MatrixShape, inputs: &[&[u8]], _: usize, row: usize, column: usize, out: &mut [u8]) {
        let index = match self.span() {
            Span::Channel => row,
            Span::Block => row / shape.block[0] * shape.k.div_ceil(shape.block[1]) + column,
            _ => 0,
        };
        out.copy_from_slice(&inputs[1][index * out.len()..][..out.len()]);
    }

    fn code_rows<'a>(&self, shape: &MatrixShape, inputs: &[&'a [u8]]) -> Option<CodeRows<'a>> {
        (!self.transposed && shape.k.is_multiple_of(16)).then_some(CodeRows::Bytes(inputs[WEIGHT]))
    }

    fn unit_rows(&self, shape: &MatrixShape, input: usize) -> Option<usize> {
        match (input, self.span()) {
            (WEIGHT, _) => (!self.transposed).then_some(1),
            (_, Span::Channel) => Some(1),
            (_, Span::Block) => Some(shape.block[0]),
            _ => None,
        }
    }

    fn join(&self, shape: &MatrixShape, input: usize, band: &Band, out: &mut [u8]) {
        match (input, self.span()) {
            (WEIGHT, _) if self.transposed => super::transpose(&band.codes, band.rows, shape.k, out),
            (WEIGHT, _) => out.copy_from_slice(&band.codes),
            (_, Span::Channel) => out.copy_from_slice(&band.scales[0]),
            (_, Span::Block) => {
                let width = band.row_scales(0, 0).len().max(1);
                for (block, to) in out.chunks_exact_mut(width).enumerate() {
                    to.copy_from_slice(band.row_scales(0, block * shape.block[0]));
                }
            }
            _ => out.copy_from_slice(band.row_scales(0, 0)),
        }
    }
}
