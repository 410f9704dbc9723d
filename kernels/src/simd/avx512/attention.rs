//! The two products of attention.

use std::arch::x86_64::*;

use super::{LANES, load_f32, store_f32};
use crate::kv_cache::BLOCK_LEN;
use crate::simd::SCORE_CHAINS;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::simd) fn scores(q: &[f32], keys: &[f32], head_dim: usize, out: &mut [f32], stride: usize) {
    let keys = &keys.as_chunks::<BLOCK_LEN>().0[..head_dim];
    let (mut q, mut out) = (q, out);
    loop {
        let rows = match q.len() / head_dim {
            12.. => scores_of::<12>(q, keys, out, stride),
            8.. => scores_of::<8>(q, keys, out, stride),
            4.. => scores_of::<4>(q, keys, out, stride),
            3 => scores_of::<3>(q, keys, out, stride),
            2 => scores_of::<2>(q, keys, out, stride),
            1 => scores_of::<1>(q, keys, out, stride),
            _ => return,
        };
        q = &q[rows * head_dim..];
        out = std::mem::take(&mut out).get_mut(rows * stride..).unwrap_or(&mut []);
    }
}

/// The first `R` rows, [`SCORE_CHAINS`] chains of sums each.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn scores_of<const R: usize>(q: &[f32], keys: &[[f32; BLOCK_LEN]], out: &mut [f32], stride: usize) -> usize {
    const C: usize = SCORE_CHAINS;
    let dim = keys.len();
    let q = &q[..R * dim];
    let mut sums = [[_mm512_setzero_ps(); C]; R];
    let (chunks, rest) = keys.as_chunks::<C>();
    for (i, keys) in chunks.iter().enumerate() {
        for c in 0..C {
            let key = load_f32(&keys[c]);
            for r in 0..R {
                // SAFETY: C * i + c is below `dim`, and `q` has R rows of `dim`.
                let q = unsafe { *q.get_unchecked(r * dim + C * i + c) };
                sums[r][c] = _mm512_fmadd_ps(_mm512_set1_ps(q), key, sums[r][c]);
            }
        }
    }
    for (i, key) in rest.iter().enumerate() {
        let key = load_f32(key);
        for r in 0..R {
            sums[r][0] = _mm512_fmadd_ps(_mm512_set1_ps(q[r * dim + C * chunks.len() + i]), key, sums[r][0]);
        }
    }
    for r in 0..R {
        for c in 1..C {
            sums[r][0] = _mm512_add_ps(sums[r][0], sums[r][c]);
        }
        if let Some(out) = out[r * stride..].first_chunk_mut::<LANES>() {
            store_f32(out, sums[r][0]);
        }
    }
    R
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::simd) fn weighted_values(
    weights: &[f32],
    stride: usize,
    values: &[f32],
    head_dim: usize,
    out: &mut [f32],
) {
    let (mut weights, mut out) = (weights, out);
    loop {
        let rows = match out.len() / head_dim {
            4.. => values_of::<4>(weights, stride, values, head_dim, out),
            3 => values_of::<3>(weights, stride, values, head_dim, out),
            2 => values_of::<2>(weights, stride, values, head_dim, out),
            1 => values_of::<1>(weights, stride, values, head_dim, out),
            _ => return,
        };
        out = &mut std::mem::take(&mut out)[rows * head_dim..];
        weights = weights.get(rows * stride..).unwrap_or(&[]);
    }
}

/// The first `R` rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn values_of<const R: usize>(
    weights: &[f32],
    stride: usize,
    values: &[f32],
    head_dim: usize,
    out: &mut [f32],
) -> usize {
    let mut at = 0;
    while at + 4 * LANES <= head_dim {
        columns_of::<R, 4>(weights, stride, values, head_dim, at, 4 * LANES, out);
        at += 4 * LANES;
    }
    while at < head_dim {
        let width = LANES.min(head_dim - at);
        columns_of::<R, 1>(weights, stride, values, head_dim, at, width, out);
        at += width;
    }
    R
}

/// Columns `at .. at + width` in `W` registers, of which only the last may be partly used.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn columns_of<const R: usize, const W: usize>(
    weights: &[f32],
    stride: usize,
    values: &[f32],
    head_dim: usize,
    at: usize,
    width: usize,
    out: &mut [f32],
) {
    let slots = values.len() / head_dim;
    assert!(at + width <= head_dim && (R - 1) * stride + slots <= weights.len() && R * head_dim <= out.len());
    let mask = |w: usize| -> __mmask16 {
        let lanes = (width - w * LANES).min(LANES);
        (((1u32 << lanes) - 1) & 0xFFFF) as __mmask16
    };
    let mut sums = [[_mm512_setzero_ps(); W]; R];
    for r in 0..R {
        for w in 0..W {
            // SAFETY: the masked lanes are in row r of `out`, by the assertion above.
            sums[r][w] = unsafe { _mm512_maskz_loadu_ps(mask(w), out.as_ptr().add(r * head_dim + at + w * LANES)) };
        }
    }
    for slot in 0..slots {
        let mut row = [_mm512_setzero_ps(); W];
        for w in 0..W {
            let from = slot * head_dim + at + w * LANES;
            // SAFETY: the masked lanes are in row `slot` of `values`, by the assertion above.
            row[w] = unsafe { _mm512_maskz_loadu_ps(mask(w), values.as_ptr().add(from)) };
        }
        for r in 0..R {
            // SAFETY: within `weights`, by the assertion above.
            let weight = _mm512_set1_ps(unsafe { *weights.get_unchecked(r * stride + slot) });
            for w in 0..W {
                sums[r][w] = _mm512_fmadd_ps(weight, row[w], sums[r][w]);
            }
        }
    }
    for r in 0..R {
        for w in 0..W {
            // SAFETY: as for the loads.
            unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr().add(r * head_dim + at + w * LANES), mask(w), sums[r][w]) };
        }
    }
}
