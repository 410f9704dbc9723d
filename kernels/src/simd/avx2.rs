//! Inner loops for AVX2, FMA and F16C.

use std::ops::Range;

use vt_bundle::tile::TILE_N;

use super::{
    Acc, ActivationRows, CodePanel, DirectAcc, FloatPanel, ROWS_M, ROWS_N, Scales, Strip, TILE_QUADS, portable,
};
use crate::weight::RowsWeight;

super::elementwise::attention_instances!(true, #[target_feature(enable = "avx2,fma,f16c")]);
super::elementwise::instances!(true, #[target_feature(enable = "avx2,fma,f16c")]);

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack_q4(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    portable::unpack_q4(tile, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack_q8(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    portable::unpack_q8(tile, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unpack_bits(bits: u32, shift: u32, tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    portable::unpack_bits(bits, shift, tile, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn apply_table(table: &[u8; 16], panel: &mut CodePanel) {
    portable::apply_table(table, panel)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn grouped_f16(bytes: &[u8], out: &mut [f32; TILE_N]) {
    portable::grouped_f16(bytes, out)
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
    portable::expand_integer(panel, scales, out)
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
    portable::dot_integer(panel, scales, strip, x, rows, acc)
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
    portable::dot_rows(weight, columns, x, rows)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn widen_f16(bits: &[u16], out: &mut [f32]) {
    portable::widen_f16(bits, out)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn dot_direct(
    tiles: [&[u8]; 2],
    table: Option<&[u8; 16]>,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    row: usize,
    acc: &mut DirectAcc,
) {
    portable::dot_direct(tiles, table, scales, strip, x, row, acc)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn gather_direct(direct: &DirectAcc) -> Acc {
    portable::gather_direct(direct)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn narrow_f16(values: &[f32], out: &mut [u16]) {
    portable::narrow_f16(values, out)
}
