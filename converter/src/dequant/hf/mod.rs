//! Weights of safetensors checkpoints to f32, each format in its own order of operations.
//!
//! Axes: N out-features (rows), K in-features, G groups along K, E experts. The formulas, every operation rounded to f32:
//!
//! | format | value |
//! |---|---|
//! | NVFP4, ModelOpt | `e2m1(q) * (e4m3(s) * global)` |
//! | NVFP4, compressed-tensors | `e2m1(q) * (e4m3(s) / global)` |
//! | MXFP4, MXFP8 | `e2m1(q) * 2^(s-127)`, `e4m3(q) * 2^(s-127)` |
//! | FP8 | `e4m3(q) * s`, s per tensor, row or block |
//! | INT4 ModelOpt, INT8, compressed-tensors | `(q - z) * s` |
//! | GPTQ | `s * (q - (z + 1))`; without the 1 in its second form |
//! | AWQ | `(q - z) * s` |
//!
//! Sources: ModelOpt 0.47 `nvfp4_tensor.py`, `fp8_tensor.py`; compressed-tensors 0.20 `forward.py`; transformers 5
//! `mxfp4.py`; AutoGPTQ and AutoAWQ `dequantize`. Two rules of the project come on top: a weight that ModelOpt wrote as all
//! zero is zero, and a block whose NVFP4 scale is NaN is zero (only allowed where its codes are).

mod float8;
mod integer;

use std::ops::Range;

use float8::{E2M1, E4M3, e8m0};

use crate::safetensors::SourceEncoding as Encoding;
use crate::safetensors::resolve::{Fp8Scales, ResolvedWeight};
use crate::source::{Checkpoint, PlainDtype, SourceDtype, SourceTensor};

/// Decodes rows of a quantised weight into `out`, row-major `[rows, K]`.
///
/// Rows of stacked experts are counted through: row `e * N + n`. `pre_quant_scale` is not folded in; see
/// [`fold_columns`].
///
/// # Panics
/// If `rows` reaches past the weight or `out` has another length.
pub fn dequantize_rows(checkpoint: &Checkpoint, w: &ResolvedWeight, rows: Range<u64>, out: &mut [f32]) {
    let [n, k] = w.shape;
    assert!(rows.end <= n * w.experts(), "rows {rows:?} of {} in {}", n * w.experts(), w.name);
    assert_eq!(out.len() as u64, (rows.end - rows.start) * k, "output of rows {rows:?} of {}", w.name);
    if w.all_zero {
        out.fill(0.0);
        return;
    }
    let mut expert = None;
    for (row, values) in rows.zip(out.chunks_exact_mut(k as usize)) {
        let matrix = match expert {
            Some((e, ref matrix)) if e == row / n => matrix,
            _ => &expert.insert((row / n, Matrix::new(checkpoint, w, row / n))).1,
        };
        matrix.row((row % n) as usize, values);
    }
}

/// Multiplies the columns of decoded rows by `pre_quant_scale` (`[K]`): `y = W (x * p)` is `(W p) x`.
///
/// # Panics
/// If `values` is not whole rows.
pub fn fold_columns(checkpoint: &Checkpoint, pre_quant_scale: &SourceTensor, values: &mut [f32]) {
    let factors = Floats::new(checkpoint, pre_quant_scale);
    assert!(values.len().is_multiple_of(factors.len().max(1)), "whole rows of {}", pre_quant_scale.name);
    for row in values.chunks_exact_mut(factors.len().max(1)) {
        for (i, value) in row.iter_mut().enumerate() {
            *value *= factors.get(i);
        }
    }
}

/// Converts elements of a plain float tensor, from element `first` on; `None` if the tensor does not hold floats or
/// is too short.
pub fn plain_to_f32(checkpoint: &Checkpoint, tensor: &SourceTensor, first: u64, out: &mut [f32]) -> Option<()> {
    let SourceDtype::Plain(dtype) = tensor.dtype else { return None };
    let size = dtype.size() as usize;
    let start = usize::try_from(first).ok()?.checked_mul(size)?;
    let data = checkpoint.data(tensor).get(start..)?.get(..out.len().checked_mul(size)?)?;
    match dtype {
        PlainDtype::F32 => {
            for (value, b) in out.iter_mut().zip(data.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*b);
            }
        }
        PlainDtype::F16 => {
            for (value, b) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                *value = half::f16::from_le_bytes(*b).to_f32();
            }
        }
        PlainDtype::Bf16 => {
            for (value, b) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                *value = half::bf16::from_le_bytes(*b).to_f32();
            }
        }
        PlainDtype::F64 => {
            for (value, b) in out.iter_mut().zip(data.as_chunks::<8>().0) {
                *value = f64::from_le_bytes(*b) as f32;
            }
        }
        _ => return None,
    }
    Some(())
}

/// A tensor of floats, read element by element.
#[derive(Clone, Copy)]
struct Floats<'a> {
    data: &'a [u8],
    dtype: PlainDtype,
}

impl<'a> Floats<'a> {
    fn new(checkpoint: &'a Checkpoint, tensor: &SourceTensor) -> Self {
        Self::of(checkpoint.data(tensor), tensor)
    }

    fn of(data: &'a [u8], tensor: &SourceTensor) -> Self {
        let dtype = match tensor.dtype {
            SourceDtype::Plain(dtype) => dtype,
            SourceDtype::Ggml(_) => PlainDtype::U8,
        };
        Floats { data, dtype }
    }

    fn len(&self) -> usize {
        self.data.len() / self.dtype.size() as usize
    }

    fn get(&self, i: usize) -> f32 {
        let at = |width: usize| &self.data[i * width..(i + 1) * width];
        match self.dtype {
            PlainDtype::F32 => f32::from_le_bytes(at(4).try_into().unwrap_or_default()),
            PlainDtype::F16 => half::f16::from_le_bytes(at(2).try_into().unwrap_or_default()).to_f32(),
            PlainDtype::Bf16 => half::bf16::from_le_bytes(at(2).try_into().unwrap_or_default()).to_f32(),
            // Exponents; the resolver lets no other type through as a scale.
            _ => e8m0(self.data[i]),
        }
    }
}

/// One matrix: a weight, or one expert of a stack.
struct Matrix<'a> {
    encoding: Encoding,
    n: usize,
    k: usize,
    transposed: bool,
    codes: &'a [u8],
    scales: &'a [u8],
    float_scales: Floats<'a>,
    global: f32,
    zeros: &'a [u8],
}

impl<'a> Matrix<'a> {
    fn new(checkpoint: &'a Checkpoint, w: &ResolvedWeight, expert: u64) -> Self {
        let scales = w.expert_data(checkpoint, w.scale, expert);
        let is_nvfp4 = matches!(w.encoding, Encoding::Nvfp4 { .. });
        let global = w
            .global
            .filter(|_| is_nvfp4)
            .map_or(1.0, |g| Floats::of(w.expert_data(checkpoint, g, expert), &checkpoint.tensors[g]).get(0));
        Matrix {
            encoding: w.encoding,
            n: w.shape[0] as usize,
            k: w.shape[1] as usize,
            transposed: w.stack.is_some_and(|s| s.transposed),
            codes: w.expert_data(checkpoint, w.weight, expert),
            scales,
            float_scales: Floats::of(scales, &checkpoint.tensors[w.scale]),
            global,
            zeros: w.zeros.map_or(&[], |z| w.expert_data(checkpoint, z, expert)),
        }
    }

    fn row(&self, n: usize, out: &mut [f32]) {
        let k = self.k;
        match self.encoding {
            Encoding::Nvfp4 { group, divides } => {
                let global = self.global;
                let scale = |code: u8| match E4M3[code as usize] {
                    s if s.is_nan() => 0.0,
                    s if divides => s / global,
                    s => s * global,
                };
                self.fp4(n, group as usize, scale, out);
            }
            Encoding::Mxfp4 { .. } => self.fp4(n, 32, e8m0, out),
            Encoding::Mxfp8 => {
                let scales = &self.scales[n * (k / 32)..][..k / 32];
                for ((codes, values), &s) in self.codes[n * k..].chunks(32).zip(out.chunks_mut(32)).zip(scales) {
                    fp8(codes, e8m0(s), values);
                }
            }
            Encoding::Fp8 { scales } => {
                if self.transposed {
                    let scale = self.float_scales.get(0);
                    for (i, value) in out.iter_mut().enumerate() {
                        *value = E4M3[self.codes[i * self.n + n] as usize] * scale;
                    }
                    return;
                }
                let codes = &self.codes[n * k..][..k];
                match scales {
                    Fp8Scales::Tensor => fp8(codes, self.float_scales.get(0), out),
                    Fp8Scales::Channel => fp8(codes, self.float_scales.get(n), out),
                    Fp8Scales::Block([rows, columns]) => {
                        let (rows, columns) = (rows as usize, columns as usize);
                        let first = n / rows * k.div_ceil(columns);
                        for (b, (codes, values)) in codes.chunks(columns).zip(out.chunks_mut(columns)).enumerate() {
                            fp8(codes, self.float_scales.get(first + b), values);
                        }
                    }
                }
            }
            _ => self.integers(n, out),
        }
    }

    /// E2M1 codes, two a byte along K, element 2j in the low nibble, with one scale byte per group.
    fn fp4(&self, n: usize, group: usize, scale: impl Fn(u8) -> f32, out: &mut [f32]) {
        if self.transposed {
            for (k, value) in out.iter_mut().enumerate() {
                let byte = self.codes[k / 2 * self.n + n];
                let code = if k % 2 == 0 { byte & 15 } else { byte >> 4 };
                *value = E2M1[code as usize] * scale(self.scales[k / group * self.n + n]);
            }
            return;
        }
        let codes = &self.codes[n * (self.k / 2)..][..self.k / 2];
        let scales = &self.scales[n * (self.k / group)..][..self.k / group];
        for ((bytes, values), &s) in codes.chunks(group / 2).zip(out.chunks_mut(group)).zip(scales) {
            let s = scale(s);
            for (&byte, pair) in bytes.iter().zip(values.chunks_exact_mut(2)) {
                pair[0] = E2M1[(byte & 15) as usize] * s;
                pair[1] = E2M1[(byte >> 4) as usize] * s;
            }
        }
    }
}

fn fp8(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (value, &code) in out.iter_mut().zip(codes) {
        *value = E4M3[code as usize] * scale;
    }
}

#[cfg(test)]
mod tests;
