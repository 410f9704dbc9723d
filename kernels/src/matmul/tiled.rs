//! Products with matrices in tile order.

use vt_bundle::tile::{TILE_K, TILE_N};

use crate::context::{Context, Isa};
use crate::fragment::{FRAGMENT_ROW, PANEL_COLUMN};
use crate::matmul::Activations;
use crate::pool::ColumnBlock;
use crate::quantise::Quantised;
use crate::recipe::{Codes, Recipe, STRIP_K, StripPlace};
use crate::simd::{self, Acc, ActivationRows, CodePanel, FloatPanel, Scales, Strip, TILE_QUADS};
use crate::weight::{StripScratch, TiledWeight};

/// Rows of activations that share one pass over a tile column: their accumulators (16 KiB) stay in the L1 cache.
const BLOCK_M: usize = 64;

/// The activations of one product.
#[derive(Clone, Copy)]
enum Input<'a> {
    Float(&'a [f32]),
    Integer(ActivationRows<'a>),
}

pub(super) fn matmul(
    cx: &Context,
    weight: &TiledWeight<'_>,
    x: &[f32],
    m: usize,
    activations: Activations,
    quantised: &mut Quantised,
    out: &mut [f32],
) {
    let integer = matches!(weight.recipe, Some(Recipe { codes: Codes::Integer { .. }, .. }));
    let input = if integer && activations == Activations::Int8 {
        quantised.load(cx, x, m, weight.matrix.k as usize);
        Input::Integer(quantised.view())
    } else {
        Input::Float(x)
    };
    let stride = weight.matrix.padded_n() as usize;
    let row_unit = m.div_ceil(m.div_ceil(BLOCK_M));
    cx.pool().blocks(out, stride, row_unit, TILE_N, |_, block| match &weight.recipe {
        Some(recipe) => by_recipe(cx.isa(), weight, recipe, input, block),
        None => by_definition(cx.isa(), weight, x, block),
    });
}

/// One tile column for some rows, unpacked by the fast path.
fn by_recipe(isa: Isa, weight: &TiledWeight<'_>, recipe: &Recipe, input: Input<'_>, block: &mut ColumnBlock<'_>) {
    let (rows, tile_n) = (block.rows(), block.columns().start / TILE_N);
    let (k, tiles_k) = (weight.matrix.k as usize, weight.matrix.tiles_k() as usize);
    let mut acc = [Acc([0.0; TILE_N]); BLOCK_M];
    let acc = &mut acc[..rows.len()];
    let (zero, table) = match recipe.codes {
        Codes::Integer { table, zero } => (zero, table),
        Codes::E4m3 => (0, None),
    };
    let mut scales = Scales::new(recipe.halves, recipe.min, zero);
    let mut panel = CodePanel::new();
    let mut floats = FloatPanel::new();
    for index in 0..tiles_k.div_ceil(2) {
        let (k0, strip) = (index * STRIP_K, Strip { index, tiles: (tiles_k - 2 * index).min(2) });
        for tile in 0..strip.tiles {
            let half = &mut panel.0.as_chunks_mut::<TILE_QUADS>().0[tile];
            for (plane, spec) in weight.matrix.spec.codes.iter().enumerate() {
                simd::unpack_tile(isa, spec.bits, spec.shift, weight.tile(plane, 2 * index + tile, tile_n), half);
            }
        }
        if let Some(table) = table {
            simd::apply_table(isa, table, &mut panel);
        }
        if k0.is_multiple_of(recipe.reach) {
            (recipe.scales)(StripPlace { weight, isa, tile_n, k0 }, &mut scales);
        }
        match input {
            Input::Integer(x) => simd::dot_integer(isa, &panel, &scales, strip, &x, rows.clone(), acc),
            Input::Float(x) => {
                match recipe.codes {
                    Codes::Integer { .. } => simd::expand_integer(isa, &panel, &scales, &mut floats),
                    Codes::E4m3 => simd::expand_e4m3(isa, &panel, &scales, &mut floats),
                }
                simd::dot_float(isa, &floats, (k - k0).min(STRIP_K), &x[rows.start * k + k0..], k, acc);
            }
        }
    }
    store(isa, acc, block);
}

/// One tile column for some rows, decoded by the encoding's own formula.
fn by_definition(isa: Isa, weight: &TiledWeight<'_>, x: &[f32], block: &mut ColumnBlock<'_>) {
    let (rows, first_column) = (block.rows(), block.columns().start);
    let k = weight.matrix.k as usize;
    let unit = weight.strip_unit();
    let mut acc = [Acc([0.0; TILE_N]); BLOCK_M];
    let acc = &mut acc[..rows.len()];
    let mut panels = vec![FloatPanel::new(); unit.div_ceil(STRIP_K)];
    let mut column = vec![0.0f32; unit];
    let mut scratch = StripScratch::default();
    for k0 in (0..k).step_by(unit) {
        let len = unit.min(k - k0);
        for (p, c) in PANEL_COLUMN.into_iter().enumerate() {
            let column = &mut column[..len];
            weight.decode_strip(weight.readable_row(first_column + c), k0, &mut scratch, column);
            for (i, panel) in column.chunks(STRIP_K).zip(&mut panels) {
                for (weights, at) in
                    panel.0.iter_mut().zip((0..2).flat_map(|half| FRAGMENT_ROW.map(|r| half * TILE_K + r)))
                {
                    weights[p] = i.get(at).copied().unwrap_or(0.0);
                }
            }
        }
        for (i, panel) in panels.iter().enumerate().take(len.div_ceil(STRIP_K)) {
            let at = k0 + i * STRIP_K;
            simd::dot_float(
                isa,
                panel,
                (k - at).min(STRIP_K).min(len - i * STRIP_K),
                &x[rows.start * k + at..],
                k,
                acc,
            );
        }
    }
    store(isa, acc, block);
}

fn store(isa: Isa, acc: &[Acc], block: &mut ColumnBlock<'_>) {
    let columns = block.columns();
    for (row, acc) in block.rows().zip(acc) {
        if let Some(out) = block.row(row, columns.clone()).first_chunk_mut::<TILE_N>() {
            simd::store(isa, acc, out);
        }
    }
}
