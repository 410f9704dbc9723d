//! Inner loops for AVX-512 F, BW, DQ, VL, VBMI and VNNI.
//!
//! Loops over registers are indexed: a closure given to an iterator or to `array::map` is called from code that is
//! compiled without the instruction set, and would pass them in memory.

#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use vt_bundle::tile::{ScaleOrder, TILE_K, TILE_N};

use super::{Acc, CodePanel, FloatPanel, ROWS_M, ROWS_N, Scales, TILE_QUADS};
use crate::fragment::{FRAGMENT_ROW, PANEL_COLUMN};
use crate::quantise::{ACTIVATION_BLOCK, scale_of};
use crate::weight::{FloatType, RowsWeight};

mod attention;
mod integer;
mod unpack;

pub(super) use attention::{scores, weighted_values};
pub(super) use integer::{dot_direct, dot_integer};
pub(super) use unpack::{unpack_bits, unpack_q4, unpack_q8};

super::elementwise::instances!(true, #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]);

/// Elements of a zmm register of 32-bit lanes.
const LANES: usize = 16;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_u8(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: 64 readable bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_quads(quads: &[[u8; 4]; LANES]) -> __m512i {
    // SAFETY: 64 readable bytes.
    unsafe { _mm512_loadu_si512(quads.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn store_quads(quads: &mut [[u8; 4]; LANES], value: __m512i) {
    // SAFETY: 64 writable bytes.
    unsafe { _mm512_storeu_si512(quads.as_mut_ptr().cast(), value) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_f32(values: &[f32; LANES]) -> __m512 {
    // SAFETY: 16 readable floats.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn store_f32(values: &mut [f32; LANES], value: __m512) {
    // SAFETY: 16 writable floats.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr(), value) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_f16(bytes: &[u8; 32]) -> __m512 {
    // SAFETY: 32 readable bytes.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) })
}

/// The bytes of a table of 64 as a register.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn indices(table: &[u8; 64]) -> __m512i {
    load_u8(table)
}

/// The four registers of one row of a panel.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn quarters<T>(row: &[T; TILE_N]) -> &[[T; LANES]; 4] {
    // SAFETY: an array of 64 is laid out as four arrays of 16.
    unsafe { &*std::ptr::from_ref(row).cast() }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn quarters_mut<T>(row: &mut [T; TILE_N]) -> &mut [[T; LANES]; 4] {
    // SAFETY: an array of 64 is laid out as four arrays of 16.
    unsafe { &mut *std::ptr::from_mut(row).cast() }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn apply_table(table: &[u8; 16], panel: &mut CodePanel) {
    // SAFETY: 16 readable bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    for row in &mut panel.0 {
        for quads in quarters_mut(row) {
            let codes = load_quads(quads);
            store_quads(quads, _mm512_shuffle_epi8(table, codes));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn grouped_f16(bytes: &[u8], out: &mut [f32; TILE_N]) {
    let bytes = bytes.as_chunks::<32>().0;
    let out = quarters_mut(out);
    // Positions 8 t + 2 j + h: even ones are h = 0.
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for half in 0..2 {
        let (a, b) = (load_f16(&bytes[2 * half]), load_f16(&bytes[2 * half + 1]));
        store_f32(&mut out[half], _mm512_permutex2var_ps(a, even, b));
        store_f32(&mut out[2 + half], _mm512_permutex2var_ps(a, odd, b));
    }
}

/// Where the byte of each panel position lies in a row of 8-bit scales.
const BYTE_POSITION: [u8; TILE_N] = {
    let mut table = [0; TILE_N];
    let mut p = 0;
    while p < TILE_N {
        table[p] = ScaleOrder::GroupedInterleaved.position(PANEL_COLUMN[p]) as u8;
        p += 1;
    }
    table
};

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn grouped(bytes: &[u8]) -> __m512i {
    match bytes.first_chunk::<TILE_N>() {
        Some(bytes) => _mm512_permutexvar_epi8(indices(&BYTE_POSITION), load_u8(bytes)),
        None => _mm512_setzero_si512(),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn grouped_bytes(bytes: &[u8], out: &mut [u8; TILE_N]) {
    // SAFETY: 64 writable bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), grouped(bytes)) }
}

/// E4M3 in 16-bit lanes to f16 of 2^-8 times the value: the exponents' biases are 7 and 15, so that the bits fit as they
/// are, subnormals too.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn e4m3_to_f16(codes: __m512i) -> __m512i {
    let magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7F));
    let sign = _mm512_slli_epi16::<8>(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)));
    let bits = _mm512_or_si512(_mm512_slli_epi16::<7>(magnitude), sign);
    let nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F));
    _mm512_mask_mov_epi16(bits, nan, _mm512_set1_epi16(0x7E00))
}

/// What [`e4m3_to_f16`] leaves to multiply with.
const E4M3_FACTOR: f32 = 256.0;

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn grouped_e4m3(bytes: &[u8], factor: f32, out: &mut [f32; TILE_N]) {
    let codes = grouped(bytes);
    let factor = _mm512_set1_ps(factor * E4M3_FACTOR);
    let low = e4m3_to_f16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(codes)));
    let high = e4m3_to_f16(_mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64::<1>(codes)));
    let out = quarters_mut(out);
    for (i, codes) in [low, high].into_iter().enumerate() {
        let (a, b) = (_mm512_castsi512_si256(codes), _mm512_extracti64x4_epi64::<1>(codes));
        store_f32(&mut out[2 * i], _mm512_mul_ps(_mm512_cvtph_ps(a), factor));
        store_f32(&mut out[2 * i + 1], _mm512_mul_ps(_mm512_cvtph_ps(b), factor));
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn expand_integer(panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    let (zero, byte) = (_mm512_set1_epi32(scales.zero), _mm512_set1_epi32(255));
    for (q, quads) in panel.0.iter().enumerate() {
        let half = if scales.halves { q / TILE_QUADS } else { 0 };
        for (c, quads) in quarters(quads).iter().enumerate() {
            let d = load_f32(&quarters(&scales.d[half])[c]);
            let m = if scales.min { load_f32(&quarters(&scales.m[half])[c]) } else { _mm512_setzero_ps() };
            let mut codes = load_quads(quads);
            for out in &mut out.0[4 * q..4 * q + 4] {
                let code = _mm512_sub_epi32(_mm512_and_si512(codes, byte), zero);
                store_f32(&mut quarters_mut(out)[c], _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), d, m));
                codes = _mm512_srli_epi32::<8>(codes);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn expand_e4m3(panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    let byte = _mm512_set1_epi16(255);
    for (q, quads) in panel.0.iter().enumerate() {
        let half = if scales.halves { q / TILE_QUADS } else { 0 };
        for (c, quads) in quarters(quads).iter().enumerate() {
            let d = _mm512_mul_ps(load_f32(&quarters(&scales.d[half])[c]), _mm512_set1_ps(E4M3_FACTOR));
            let codes = load_quads(quads);
            // Bytes 0 and 2 of every four in 16-bit lanes, then bytes 1 and 3.
            let even = e4m3_to_f16(_mm512_and_si512(codes, byte));
            let odd = e4m3_to_f16(_mm512_srli_epi16::<8>(codes));
            let parts = [even, odd, _mm512_srli_epi32::<16>(even), _mm512_srli_epi32::<16>(odd)];
            for (out, part) in out.0[4 * q..4 * q + 4].iter_mut().zip(parts) {
                let values = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(part));
                store_f32(&mut quarters_mut(out)[c], _mm512_mul_ps(values, d));
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn store(acc: &Acc, out: &mut [f32; TILE_N]) {
    let acc = quarters(&acc.0);
    let acc = [load_f32(&acc[0]), load_f32(&acc[1]), load_f32(&acc[2]), load_f32(&acc[3])];
    let out = quarters_mut(out);
    // Column 16 j + 8 h + t is at 4 t + j of register 2 h + t / 4: eight t of j, then eight of j + 1.
    let first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    for pair in 0..2 {
        let pick = _mm512_add_epi32(first, _mm512_set1_epi32(2 * pair));
        let low = _mm512_permutex2var_ps(acc[0], pick, acc[1]);
        let high = _mm512_permutex2var_ps(acc[2], pick, acc[3]);
        store_f32(&mut out[2 * pair as usize], _mm512_shuffle_f32x4::<0x44>(low, high));
        store_f32(&mut out[2 * pair as usize + 1], _mm512_shuffle_f32x4::<0xEE>(low, high));
    }
}

/// [`FRAGMENT_ROW`] for a byte shuffle.
const FRAGMENT_BYTES: [u8; TILE_K] = {
    let mut table = [0; TILE_K];
    let mut i = 0;
    while i < TILE_K {
        table[i] = FRAGMENT_ROW[i] as u8;
        i += 1;
    }
    table
};

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn quantise_row(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
    // SAFETY: 16 readable bytes.
    let order = unsafe { _mm_loadu_si128(FRAGMENT_BYTES.as_ptr().cast()) };
    let codes = codes.as_chunks_mut::<ACTIVATION_BLOCK>().0;
    for (block, ((codes, scale), sum)) in codes.iter_mut().zip(scales).zip(sums).enumerate() {
        let values = load_up_to(x, block * ACTIVATION_BLOCK);
        // As integers, so that a NaN is the largest of all.
        let bits = _mm512_castps_si512(_mm512_abs_ps(values));
        let (d, inverse) = scale_of(f32::from_bits(_mm512_reduce_max_epu32(bits)));
        *scale = d;
        let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(inverse)));
        let bytes = _mm512_cvtsepi32_epi8(rounded);
        // SAFETY: 16 writable bytes.
        unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm_shuffle_epi8(bytes, order)) };
        // Sums of bytes raised by 128, in two halves.
        let raised = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
        *sum = _mm_cvtsi128_si32(raised) + _mm_extract_epi32::<2>(raised) - 128 * ACTIVATION_BLOCK as i32;
    }
}

/// Sixteen floats from `at` on, zeros beyond the end.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn load_up_to(x: &[f32], at: usize) -> __m512 {
    let rest = x.get(at..).unwrap_or(&[]);
    match rest.first_chunk::<LANES>() {
        Some(values) => load_f32(values),
        // SAFETY: only the lanes of existing elements are read.
        None => unsafe { _mm512_maskz_loadu_ps(mask_of(rest.len()), rest.as_ptr()) },
    }
}

/// The first `len` lanes; `len` is below 16.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn mask_of(len: usize) -> __mmask16 {
    ((1u32 << len) - 1) as __mmask16
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn dot_rows(
    weight: &RowsWeight<'_>,
    columns: Range<usize>,
    x: &[f32],
    rows: Range<usize>,
) -> [[f32; ROWS_N]; ROWS_M] {
    let mut dots = [[0.0; ROWS_N]; ROWS_M];
    match rows.len() {
        1 => dot_rows_of::<1>(weight, columns, x, rows.start, &mut dots),
        2 => dot_rows_of::<2>(weight, columns, x, rows.start, &mut dots),
        3 => dot_rows_of::<3>(weight, columns, x, rows.start, &mut dots),
        _ => dot_rows_of::<4>(weight, columns, x, rows.start, &mut dots),
    }
    dots
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn dot_rows_of<const R: usize>(
    weight: &RowsWeight<'_>,
    columns: Range<usize>,
    x: &[f32],
    row: usize,
    dots: &mut [[f32; ROWS_N]; ROWS_M],
) {
    let k = weight.k;
    // Where fewer rows of weights are left, the last is read again and its products ignored.
    let data: [&[u8]; ROWS_N] = std::array::from_fn(|n| weight.row((columns.start + n).min(columns.end - 1)));
    let x: [&[f32]; R] = std::array::from_fn(|r| &x[(row + r) * k..(row + r + 1) * k]);
    let mut sums = [[_mm512_setzero_ps(); ROWS_N]; R];
    for at in (0..k).step_by(LANES) {
        let mut weights = [_mm512_setzero_ps(); ROWS_N];
        for n in 0..ROWS_N {
            weights[n] = widen_up_to(weight.dtype, data[n], at);
        }
        for r in 0..R {
            let x = load_up_to(x[r], at);
            for n in 0..ROWS_N {
                sums[r][n] = _mm512_fmadd_ps(x, weights[n], sums[r][n]);
            }
        }
    }
    for r in 0..R {
        for n in 0..ROWS_N {
            dots[r][n] = _mm512_reduce_add_ps(sums[r][n]);
        }
    }
}

/// Sixteen elements from `at` on as f32, zeros beyond the end.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn widen_up_to(dtype: FloatType, data: &[u8], at: usize) -> __m512 {
    let rest = &data[at * dtype.bytes()..];
    match dtype {
        FloatType::F32 => {
            let mask = mask_of_up_to_16(rest.len() / 4);
            // SAFETY: only the lanes of existing elements are read.
            unsafe { _mm512_maskz_loadu_ps(mask, rest.as_ptr().cast()) }
        }
        FloatType::F16 => {
            let mask = mask_of_up_to_16(rest.len() / 2);
            // SAFETY: only the lanes of existing elements are read.
            _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, rest.as_ptr().cast()) })
        }
        FloatType::Bf16 => {
            let mask = mask_of_up_to_16(rest.len() / 2);
            // SAFETY: only the lanes of existing elements are read.
            let bits = unsafe { _mm256_maskz_loadu_epi16(mask, rest.as_ptr().cast()) };
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn mask_of_up_to_16(len: usize) -> __mmask16 {
    if len >= LANES { __mmask16::MAX } else { mask_of(len) }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn widen_f16(bits: &[u16], out: &mut [f32]) {
    let (chunks, rest) = bits.as_chunks::<LANES>();
    let (wide, tail) = out.as_chunks_mut::<LANES>();
    for (bits, out) in chunks.iter().zip(wide) {
        // SAFETY: 32 readable bytes.
        store_f32(out, _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) }));
    }
    super::portable::widen_f16(rest, tail);
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn widen_e4m3(codes: &[u8], factor: f32, out: &mut [f32]) {
    let (chunks, rest) = codes.as_chunks::<{ 2 * LANES }>();
    let (wide, tail) = out.as_chunks_mut::<{ 2 * LANES }>();
    let scale = _mm512_set1_ps(factor * E4M3_FACTOR);
    for (codes, out) in chunks.iter().zip(wide) {
        // SAFETY: 32 readable bytes.
        let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
        let halves = e4m3_to_f16(_mm512_cvtepu8_epi16(codes));
        let (low, high) = (_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64::<1>(halves));
        let out = out.as_chunks_mut::<LANES>().0;
        store_f32(&mut out[0], _mm512_mul_ps(_mm512_cvtph_ps(low), scale));
        store_f32(&mut out[1], _mm512_mul_ps(_mm512_cvtph_ps(high), scale));
    }
    super::portable::widen_e4m3(rest, factor, tail);
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn narrow_f16(values: &[f32], out: &mut [u16]) {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let (wide, tail) = out.as_chunks_mut::<LANES>();
    for (values, out) in chunks.iter().zip(wide) {
        let bits = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(load_f32(values));
        // SAFETY: 32 writable bytes.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bits) };
    }
    super::portable::narrow_f16(rest, tail);
}
