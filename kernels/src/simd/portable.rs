//! Inner loops in plain Rust.

use std::ops::Range;

use half::f16;
use vt_bundle::float8::E4M3;
use vt_bundle::tile::{ScaleOrder, TILE_K, TILE_N};

use super::{Acc, ActivationRows, CodePanel, FloatPanel, ROWS_M, ROWS_N, Scales, Strip, TILE_QUADS};
use crate::fragment::{FRAGMENT_ROW, PANEL_COLUMN};
use crate::quantise::{ACTIVATION_BLOCK, scale_of};
use crate::recipe::STRIP_K;
use crate::weight::RowsWeight;

super::elementwise::attention_instances!(false,);
super::elementwise::instances!(false,);

pub(super) fn unpack_q4(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    for (lane, words) in tile.chunks_exact(16).enumerate() {
        let (t, q) = (lane / 4, lane % 4);
        for (j, word) in words.chunks_exact(4).enumerate() {
            for h in 0..2 {
                // Nibbles of a word: rows 2q, 2q + 8 of the column, then of column + 8; then the odd rows.
                out[q][32 * h + 4 * t + j] = [word[h] & 15, word[h] >> 4, word[2 + h] & 15, word[2 + h] >> 4];
            }
        }
    }
}

pub(super) fn unpack_q8(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    for (lane, words) in tile.chunks_exact(32).enumerate() {
        let (t, q) = (lane / 4, lane % 4);
        for (i, word) in words.chunks_exact(4).enumerate() {
            let (j, h) = (i / 2, i % 2);
            out[q][32 * h + 4 * t + j] = [word[0], word[1], word[2], word[3]];
        }
    }
}

/// Planes of 1, 2 or 4 bits that hold the high bits of a code, and low planes of 2 bits.
#[inline(always)]
pub(super) fn unpack_bits(bits: u32, shift: u32, tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    let (mask, bits) = ((1u32 << bits) - 1, bits as usize);
    for (q, positions) in out.iter_mut().enumerate() {
        for (p, quad) in positions.iter_mut().enumerate() {
            let (h, t, j) = (p / 32, p / 4 % 8, p % 4);
            // The fields of one word take `bits` bytes.
            let at = (4 * (4 * t + q) + j) * bits;
            let word = tile[at..at + bits].iter().rev().fold(0u32, |word, &byte| word << 8 | u32::from(byte));
            for (i, code) in quad.iter_mut().enumerate() {
                let field = i % 2 + 2 * h + 4 * (i / 2);
                let value = ((word >> (field * bits) & mask) << shift) as u8;
                *code = if shift == 0 { value } else { *code | value };
            }
        }
    }
}

pub(super) fn apply_table(table: &[u8; 16], panel: &mut CodePanel) {
    for code in panel.0.as_flattened_mut().as_flattened_mut() {
        *code = table[usize::from(*code & 15)];
    }
}

pub(super) fn grouped_f16(bytes: &[u8], out: &mut [f32; TILE_N]) {
    for (value, c) in out.iter_mut().zip(PANEL_COLUMN) {
        let at = 2 * ScaleOrder::Grouped.position(c);
        *value = f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
    }
}

#[inline(always)]
pub(super) fn grouped_bytes(bytes: &[u8], out: &mut [u8; TILE_N]) {
    for (value, c) in out.iter_mut().zip(PANEL_COLUMN) {
        *value = bytes[ScaleOrder::GroupedInterleaved.position(c)];
    }
}

pub(super) fn grouped_e4m3(bytes: &[u8], factor: f32, out: &mut [f32; TILE_N]) {
    for (value, c) in out.iter_mut().zip(PANEL_COLUMN) {
        *value = E4M3[usize::from(bytes[ScaleOrder::GroupedInterleaved.position(c)])] * factor;
    }
}

pub(super) fn expand_integer(panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    for (k, weights) in out.0.iter_mut().enumerate() {
        let half = if scales.halves { k / TILE_K } else { 0 };
        for (p, w) in weights.iter_mut().enumerate() {
            *w = scales.d[half][p] * (i32::from(panel.0[k / 4][p][k % 4]) - scales.zero) as f32;
        }
        if scales.min {
            weights.iter_mut().zip(&scales.m[half]).for_each(|(w, m)| *w += m);
        }
    }
}

#[inline(always)]
pub(super) fn expand_e4m3(panel: &CodePanel, scales: &Scales, out: &mut FloatPanel) {
    for (k, weights) in out.0.iter_mut().enumerate() {
        let half = if scales.halves { k / TILE_K } else { 0 };
        for (p, w) in weights.iter_mut().enumerate() {
            *w = scales.d[half][p] * E4M3[usize::from(panel.0[k / 4][p][k % 4])];
        }
    }
}

pub(super) fn dot_integer(
    panel: &CodePanel,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    rows: Range<usize>,
    acc: &mut [Acc],
) {
    for (row, acc) in rows.zip(acc) {
        for tile in 0..strip.tiles {
            let start = row * x.k + strip.index * STRIP_K + tile * TILE_K;
            let (scale, sum) = (x.scales[start / TILE_K], x.sums[start / TILE_K]);
            let at = if scales.halves { tile } else { 0 };
            let mut dots = [-scales.zero * sum; TILE_N];
            let codes = x.codes[start..start + TILE_K].as_chunks::<4>().0;
            for (a, quad) in codes.iter().zip(&panel.0[tile * TILE_QUADS..]) {
                for (dot, w) in dots.iter_mut().zip(quad) {
                    *dot += (0..4).map(|i| i32::from(w[i]) * i32::from(a[i])).sum::<i32>();
                }
            }
            for (p, value) in acc.0.iter_mut().enumerate() {
                *value += dots[p] as f32 * (scales.d[at][p] * scale);
            }
            if scales.min {
                let sum = sum as f32 * scale;
                acc.0.iter_mut().zip(&scales.m[at]).for_each(|(value, m)| *value += m * sum);
            }
        }
    }
}

pub(super) fn dot_direct(
    tiles: [&[u8]; 2],
    table: Option<&[u8; 16]>,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    acc: &mut [Acc],
) {
    let mut panel = CodePanel::new();
    for (tile, half) in tiles.iter().zip(panel.0.as_chunks_mut::<TILE_QUADS>().0).take(strip.tiles) {
        unpack_q4(tile, half);
    }
    if let Some(table) = table {
        apply_table(table, &mut panel);
    }
    dot_integer(&panel, scales, strip, x, 0..acc.len(), acc);
}

#[inline(always)]
pub(super) fn store(acc: &Acc, out: &mut [f32; TILE_N]) {
    for (value, c) in acc.0.iter().zip(PANEL_COLUMN) {
        out[c] = *value;
    }
}

#[inline(always)]
pub(super) fn quantise_row(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i32]) {
    let codes = codes.as_chunks_mut::<ACTIVATION_BLOCK>().0;
    for (block, ((codes, scale), sum)) in codes.iter_mut().zip(scales).zip(sums).enumerate() {
        let at = (block * ACTIVATION_BLOCK).min(x.len());
        let values = &x[at..(at + ACTIVATION_BLOCK).min(x.len())];
        let (d, inverse) = scale_of(absmax(values));
        *scale = d;
        *sum = 0;
        for (code, row) in codes.iter_mut().zip(FRAGMENT_ROW) {
            let value = values.get(row).copied().unwrap_or(0.0);
            // Within +-127 by construction of the scale; NaN becomes 0, its block's scale is NaN.
            *code = (value * inverse).round_ties_even() as i8;
            *sum += i32::from(*code);
        }
    }
}

/// The largest magnitude; NaN where there is one, since its bits are above those of infinity.
#[inline(always)]
fn absmax(values: &[f32]) -> f32 {
    f32::from_bits(values.iter().fold(0u32, |max, v| max.max(v.abs().to_bits())))
}

pub(super) fn dot_rows(
    weight: &RowsWeight<'_>,
    columns: Range<usize>,
    x: &[f32],
    rows: Range<usize>,
) -> [[f32; ROWS_N]; ROWS_M] {
    let mut dots = [[0.0; ROWS_N]; ROWS_M];
    for (row, dots) in rows.zip(&mut dots) {
        let x = &x[row * weight.k..(row + 1) * weight.k];
        for (n, dot) in columns.clone().zip(dots) {
            let data = weight.row(n);
            // Sixteen sums, as a vector unit would keep: more exact than one, and quicker.
            let mut sums = [0.0f32; 16];
            for (i, a) in x.iter().enumerate() {
                sums[i % 16] += a * weight.dtype.get(data, i);
            }
            *dot = sums.iter().sum();
        }
    }
    dots
}

pub(super) fn widen_f16(bits: &[u16], out: &mut [f32]) {
    for (value, bits) in out.iter_mut().zip(bits) {
        *value = f16::from_bits(*bits).to_f32();
    }
}

pub(super) fn widen_e4m3(codes: &[u8], factor: f32, out: &mut [f32]) {
    for (value, code) in out.iter_mut().zip(codes) {
        *value = E4M3[usize::from(*code)] * factor;
    }
}

pub(super) fn narrow_f16(values: &[f32], out: &mut [u16]) {
    for (bits, value) in out.iter_mut().zip(values) {
        *bits = f16::from_f32(*value).to_bits();
    }
}
