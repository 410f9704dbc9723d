//! Inner loops for AVX2, FMA and F16C.
//!
//! Loops over registers are indexed: a closure given to an iterator is called from code that is compiled without the
//! instruction set, and would pass them in memory.

#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use vt_bundle::tile::{TILE_K, TILE_N};

use super::{Acc, ActivationRows, CodePanel, FloatPanel, ROWS_M, ROWS_N, Scales, Strip, TILE_QUADS, portable};
use crate::recipe::STRIP_K;
use crate::weight::{FloatType, RowsWeight};

super::elementwise::attention_instances!(true, #[target_feature(enable = "avx2,fma,f16c")]);
super::elementwise::instances!(true, #[target_feature(enable = "avx2,fma,f16c")]);

/// Elements of a ymm register of 32-bit lanes.
const LANES: usize = 8;

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_quads(quads: &[[u8; 4]; LANES]) -> __m256i {
    // SAFETY: 32 readable bytes.
    unsafe { _mm256_loadu_si256(quads.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_f32(values: &[f32; LANES]) -> __m256 {
    // SAFETY: 8 readable floats.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store_f32(values: &mut [f32; LANES], value: __m256) {
    // SAFETY: 8 writable floats.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr(), value) }
}

/// Four quads, a 128-bit lane, to positions `at .. at + 4`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store_four(row: &mut [[u8; 4]; TILE_N], at: usize, value: __m128i) {
    let to = &mut row[at..at + 4];
    // SAFETY: 16 writable bytes.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), value) }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack_q4(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    let (low, high) = (_mm256_set1_epi32(0x000F_000F), _mm256_set1_epi32(0x0F00_0F00));
    for (i, words) in tile.as_chunks::<32>().0.iter().enumerate() {
        // Two lanes of the tile, quads q and q + 1 of columns 16 j + t.
        let (t, q) = (i / 2, 2 * (i % 2));
        // SAFETY: 32 readable bytes.
        let w = unsafe { _mm256_loadu_si256(words.as_ptr().cast()) };
        let a = _mm256_or_si256(_mm256_and_si256(w, low), _mm256_and_si256(_mm256_slli_epi32::<4>(w), high));
        let b = _mm256_or_si256(
            _mm256_and_si256(_mm256_srli_epi32::<8>(w), low),
            _mm256_and_si256(_mm256_srli_epi32::<4>(w), high),
        );
        store_four(&mut out[q], 4 * t, _mm256_castsi256_si128(a));
        store_four(&mut out[q + 1], 4 * t, _mm256_extracti128_si256::<1>(a));
        store_four(&mut out[q], 32 + 4 * t, _mm256_castsi256_si128(b));
        store_four(&mut out[q + 1], 32 + 4 * t, _mm256_extracti128_si256::<1>(b));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack_q8(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (lane, words) in tile.as_chunks::<32>().0.iter().enumerate() {
        let (t, q) = (lane / 4, lane % 4);
        // SAFETY: 32 readable bytes.
        let w = unsafe { _mm256_loadu_si256(words.as_ptr().cast()) };
        let w = _mm256_permutevar8x32_epi32(w, order);
        store_four(&mut out[q], 4 * t, _mm256_castsi256_si128(w));
        store_four(&mut out[q], 32 + 4 * t, _mm256_extracti128_si256::<1>(w));
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack_bits(bits: u32, shift: u32, tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    portable::unpack_bits(bits, shift, tile, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn apply_table(table: &[u8; 16], panel: &mut CodePanel) {
    // SAFETY: 16 readable bytes.
    let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    for quads in panel.0.as_flattened_mut().as_chunks_mut::<LANES>().0 {
        let codes = _mm256_shuffle_epi8(table, load_quads(quads));
        // SAFETY: 32 writable bytes.
        unsafe { _mm256_storeu_si256(quads.as_mut_ptr().cast(), codes) };
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn grouped_f16(bytes: &[u8], out: &mut [f32; TILE_N]) {
    // Positions 8 t + 2 j + h: even ones are h = 0.
    let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    let (low, high) = out.split_at_mut(TILE_N / 2);
    let halves = low.as_chunks_mut::<4>().0.iter_mut().zip(high.as_chunks_mut::<4>().0);
    for (bytes, (low, high)) in bytes.as_chunks::<16>().0.iter().zip(halves) {
        // SAFETY: 16 readable bytes.
        let values = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
        let values = _mm256_permutevar8x32_ps(values, order);
        // SAFETY: 4 writable floats each.
        unsafe {
            _mm_storeu_ps(low.as_mut_ptr(), _mm256_castps256_ps128(values));
            _mm_storeu_ps(high.as_mut_ptr(), _mm256_extractf128_ps::<1>(values));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn grouped_bytes(bytes: &[u8], out: &mut [u8; TILE_N]) {
    portable::grouped_bytes(bytes, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn grouped_e4m3(bytes: &[u8], factor: f32, out: &mut [f32; TILE_N]) {
    portable::grouped_e4m3(bytes, factor, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn expand_integer(panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    let (zero, byte) = (_mm256_set1_epi32(scales.zero), _mm256_set1_epi32(255));
    for (q, quads) in panel.0.iter().enumerate() {
        let half = if scales.halves { q / TILE_QUADS } else { 0 };
        for (c, quads) in quads.as_chunks::<LANES>().0.iter().enumerate() {
            let d = load_f32(&scales.d[half].as_chunks::<LANES>().0[c]);
            let m = load_f32(&scales.m[half].as_chunks::<LANES>().0[c]);
            let m = if scales.min { m } else { _mm256_setzero_ps() };
            let mut codes = load_quads(quads);
            for out in &mut out.0[4 * q..4 * q + 4] {
                let code = _mm256_sub_epi32(_mm256_and_si256(codes, byte), zero);
                let value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), d, m);
                store_f32(&mut out.as_chunks_mut::<LANES>().0[c], value);
                codes = _mm256_srli_epi32::<8>(codes);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn expand_e4m3(panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    portable::expand_e4m3(panel, scales, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_integer(
    panel: &CodePanel,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    rows: Range<usize>,
    acc: &mut [Acc],
) {
    let (mut row, mut left) = (rows.start, &mut acc[..rows.len()]);
    while !left.is_empty() {
        let size = left.len().min(2);
        let (group, rest) = std::mem::take(&mut left).split_at_mut(size);
        match size {
            2 => dot_rows_integer::<2>(panel, scales, strip, x, row, group),
            _ => dot_rows_integer::<1>(panel, scales, strip, x, row, group),
        }
        (row, left) = (row + size, rest);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot_rows_integer<const R: usize>(
    panel: &CodePanel,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    row: usize,
    acc: &mut [Acc],
) {
    // The multiply-add of bytes saturates at 16 bits, which codes from 128 on would reach: all are lowered by 128 and
    // multiplied as magnitudes, with their sign given to the activations.
    let (lower, ones) = (_mm256_set1_epi8(-128), _mm256_set1_epi16(1));
    let zero = scales.zero - 128;
    let start = row * x.k + strip.index * STRIP_K;
    // Sixteen columns at a time.
    for block in 0..TILE_N / (2 * LANES) {
        for tile in 0..strip.tiles {
            let at = if scales.halves { tile } else { 0 };
            let mut dots = [[_mm256_setzero_si256(); 2]; R];
            for r in 0..R {
                dots[r] = [_mm256_set1_epi32(-zero * x.sums[(start + r * x.k) / TILE_K + tile]); 2];
            }
            for q in 0..TILE_QUADS {
                let quads = panel.0[tile * TILE_QUADS + q].as_chunks::<LANES>().0;
                for c in 0..2 {
                    let w = _mm256_xor_si256(load_quads(&quads[2 * block + c]), lower);
                    let magnitude = _mm256_abs_epi8(w);
                    for r in 0..R {
                        let from = start + r * x.k + tile * TILE_K + 4 * q;
                        let a = _mm256_set1_epi32(i32::from_le_bytes([
                            x.codes[from].cast_unsigned(),
                            x.codes[from + 1].cast_unsigned(),
                            x.codes[from + 2].cast_unsigned(),
                            x.codes[from + 3].cast_unsigned(),
                        ]));
                        let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(a, w));
                        dots[r][c] = _mm256_add_epi32(dots[r][c], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            for r in 0..R {
                let place = (start + r * x.k) / TILE_K + tile;
                let factor = x.scales[place];
                let (scale, sum) = (_mm256_set1_ps(factor), _mm256_set1_ps(x.sums[place] as f32 * factor));
                for c in 0..2 {
                    let at_column = 2 * block + c;
                    let acc = &mut acc[r].0.as_chunks_mut::<LANES>().0[at_column];
                    let d = _mm256_mul_ps(load_f32(&scales.d[at].as_chunks::<LANES>().0[at_column]), scale);
                    let mut value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][c]), d, load_f32(acc));
                    if scales.min {
                        let m = load_f32(&scales.m[at].as_chunks::<LANES>().0[at_column]);
                        value = _mm256_fmadd_ps(m, sum, value);
                    }
                    store_f32(acc, value);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_direct(
    tiles: [&[u8]; 2],
    table: Option<&[u8; 16]>,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    acc: &mut [Acc],
) {
    portable::dot_direct(tiles, table, scales, strip, x, acc)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn store(acc: &Acc, out: &mut [f32; TILE_N]) {
    portable::store(acc, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantise_row(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
    portable::quantise_row(x, codes, scales, sums)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_rows(
    weight: &RowsWeight<'_>,
    columns: Range<usize>,
    x: &[f32],
    rows: Range<usize>,
) -> [[f32; ROWS_N]; ROWS_M] {
    let mut dots = [[0.0; ROWS_N]; ROWS_M];
    for n in columns.clone() {
        let data = weight.row(n);
        let mut sums = [_mm256_setzero_ps(); ROWS_M];
        let wide = weight.k / LANES * LANES;
        for at in (0..wide).step_by(LANES) {
            let w = widen(weight.dtype, data, at);
            for r in 0..rows.len() {
                let from = (rows.start + r) * weight.k + at;
                if let Some(x) = x[from..].first_chunk::<LANES>() {
                    sums[r] = _mm256_fmadd_ps(load_f32(x), w, sums[r]);
                }
            }
        }
        for r in 0..rows.len() {
            let mut lanes = [0.0; LANES];
            store_f32(&mut lanes, sums[r]);
            let mut dot: f32 = lanes.iter().sum();
            for k in wide..weight.k {
                dot += x[(rows.start + r) * weight.k + k] * weight.dtype.get(data, k);
            }
            dots[r][n - columns.start] = dot;
        }
    }
    dots
}

/// Eight elements from `at` on as f32.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn widen(dtype: FloatType, data: &[u8], at: usize) -> __m256 {
    let bytes = &data[at * dtype.bytes()..(at + LANES) * dtype.bytes()];
    match dtype {
        // SAFETY: 32 readable bytes.
        FloatType::F32 => unsafe { _mm256_loadu_ps(bytes.as_ptr().cast()) },
        // SAFETY: 16 readable bytes.
        FloatType::F16 => _mm256_cvtph_ps(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }),
        FloatType::Bf16 => {
            // SAFETY: 16 readable bytes.
            let bits = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen_f16(bits: &[u16], out: &mut [f32]) {
    let (chunks, rest) = bits.as_chunks::<LANES>();
    let (wide, tail) = out.as_chunks_mut::<LANES>();
    for (bits, out) in chunks.iter().zip(wide) {
        // SAFETY: 16 readable bytes.
        store_f32(out, _mm256_cvtph_ps(unsafe { _mm_loadu_si128(bits.as_ptr().cast()) }));
    }
    portable::widen_f16(rest, tail);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen_e4m3(codes: &[u8], factor: f32, out: &mut [f32]) {
    portable::widen_e4m3(codes, factor, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn narrow_f16(values: &[f32], out: &mut [u16]) {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let (wide, tail) = out.as_chunks_mut::<LANES>();
    for (values, out) in chunks.iter().zip(wide) {
        let bits = _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(load_f32(values));
        // SAFETY: 16 writable bytes.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), bits) };
    }
    portable::narrow_f16(rest, tail);
}
