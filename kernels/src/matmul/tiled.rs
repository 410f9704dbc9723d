//! Products with matrices in tile order.

use std::ops::Range;

use vt_bundle::tile::{CodePlane, TILE_K, TILE_N};

use crate::context::{Context, Isa};
use crate::fragment::{FRAGMENT_ROW, PANEL_COLUMN};
use crate::matmul::Activations;
use crate::pool::ColumnBlock;
use crate::quantise::Quantised;
use crate::recipe::{Codes, Recipe, STRIP_K, StripPlace};
use crate::simd::{self, Acc, ActivationRows, CodePanel, DIRECT_M, FloatPanel, Scales, Strip, TILE_QUADS};
use crate::weight::{StripScratch, TiledWeight};

/// Rows of activations that share one pass over a tile column: their accumulators (16 KiB) stay in the L1 cache.
const BLOCK_M: usize = 64;
/// Rows up to which reading the matrix takes longer than computing.
const FEW_M: usize = 8;
/// Tile columns that are walked together for few rows. Their tiles are neighbours in memory, 4 KiB of 4-bit codes;
/// a column by itself would touch 512 bytes here and there, often in the same few sets of a cache.
const TOGETHER: usize = 8;
/// Strips of a single column between asking for codes and using them.
const STRIPS_AHEAD: usize = 2;

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
    let (isa, stride) = (cx.isa(), weight.matrix.padded_n() as usize);
    let row_unit = m.div_ceil(m.div_ceil(BLOCK_M));
    let Some(recipe) = &weight.recipe else {
        cx.pool().blocks(out, stride, row_unit, TILE_N, |_, block| by_definition(isa, weight, x, block));
        return;
    };
    let input = match recipe.codes {
        Codes::Integer { .. } if activations == Activations::Int8 => {
            quantised.load(cx, x, m, weight.matrix.k as usize);
            Input::Integer(quantised.view())
        }
        _ => Input::Float(x),
    };
    let nibbles = matches!(weight.matrix.spec.codes, [CodePlane { bits: 4, shift: 0, .. }]);
    if let (1..=DIRECT_M, true, Input::Integer(x)) = (m, nibbles && simd::has_direct(isa), input) {
        cx.pool().columns(out, stride, TILE_N, |block| {
            Pass::new(isa, weight, recipe, input, block.columns(), TOGETHER).run_direct(x, block);
        });
    } else if m <= FEW_M {
        cx.pool().columns(out, stride, TILE_N, |block| {
            let mut acc = [Acc([0.0; TILE_N]); TOGETHER * FEW_M];
            Pass::new(isa, weight, recipe, input, block.columns(), TOGETHER).run::<TOGETHER>(block, &mut acc);
        });
    } else {
        cx.pool().blocks(out, stride, row_unit, TILE_N, |_, block| {
            let mut acc = [Acc([0.0; TILE_N]); BLOCK_M];
            Pass::new(isa, weight, recipe, input, block.columns(), 1).run::<1>(block, &mut acc);
        });
    }
}

/// One thread's walk over some tile columns, all of K, by the fast path.
struct Pass<'p, 'w> {
    isa: Isa,
    weight: &'p TiledWeight<'w>,
    recipe: &'p Recipe,
    input: Input<'p>,
    /// Tile columns.
    columns: Range<usize>,
    /// Columns of a group.
    together: usize,
    tiles_k: usize,
}

impl<'p, 'w> Pass<'p, 'w> {
    fn new(
        isa: Isa,
        weight: &'p TiledWeight<'w>,
        recipe: &'p Recipe,
        input: Input<'p>,
        columns: Range<usize>,
        together: usize,
    ) -> Self {
        let columns = columns.start / TILE_N..columns.end / TILE_N;
        Self { isa, weight, recipe, input, columns, together, tiles_k: weight.matrix.tiles_k() as usize }
    }

    fn strips(&self) -> usize {
        self.tiles_k.div_ceil(2)
    }

    /// The step of the walk with that number: groups of columns, in each all strips, in each the group's columns.
    fn step(&self, number: usize) -> Option<(usize, usize)> {
        let group = number / (self.together * self.strips());
        let first = self.columns.start + group * self.together;
        let width = self.together.min(self.columns.end.checked_sub(first).filter(|left| *left > 0)?);
        let within = number - group * self.together * self.strips();
        // Beyond the last, narrower group there is nothing.
        (within / width < self.strips()).then_some((within / width, first + within % width))
    }

    /// Asks for the codes and scales of a step: they are too far apart in memory for the hardware to foresee.
    fn fetch(&self, number: usize) {
        let Some((strip, tile_n)) = self.step(number) else { return };
        let spec = self.weight.matrix.spec;
        for plane in 0..spec.codes.len() {
            for tile_k in 2 * strip..(2 * strip + 2).min(self.tiles_k) {
                simd::prefetch(self.isa, self.weight.tile(plane, tile_k, tile_n));
            }
        }
        let halves = if self.recipe.halves { 2 } else { 1 };
        for plane in 0..spec.scales.len() {
            for half in 0..halves {
                if let Some(row) = self.weight.scale_row(plane, strip * STRIP_K + half * TILE_K, tile_n) {
                    simd::prefetch(self.isa, row);
                }
            }
        }
    }

    /// Computes the rows of `block`. `acc` has room for the rows times `G`, the columns of a group.
    fn run<const G: usize>(&self, block: &mut ColumnBlock<'_>, acc: &mut [Acc]) {
        let rows = block.rows();
        let (scales, table) = self.scales();
        let mut scales = [scales; G];
        let mut panel = CodePanel::new();
        let mut floats = None;
        let ahead = G.max(STRIPS_AHEAD);
        (0..ahead).for_each(|number| self.fetch(number));
        let mut number = 0;
        for first in self.columns.clone().step_by(G) {
            let group = first..(first + G).min(self.columns.end);
            let acc = &mut acc[..group.len() * rows.len()];
            acc.fill(Acc([0.0; TILE_N]));
            for index in 0..self.strips() {
                let strip = Strip { index, tiles: (self.tiles_k - 2 * index).min(2) };
                let columns = group.clone().zip(acc.chunks_exact_mut(rows.len())).zip(&mut scales);
                for ((tile_n, acc), scales) in columns {
                    self.fetch(number + ahead);
                    number += 1;
                    self.unpack(strip, tile_n, table, &mut panel);
                    self.scale(index, tile_n, scales);
                    self.multiply(strip, &panel, scales, &mut floats, rows.clone(), acc);
                }
            }
            for (tile_n, acc) in group.zip(acc.chunks_exact(rows.len())) {
                store(self.isa, acc, tile_n, block);
            }
        }
    }

    /// [`Pass::run`] for one or two rows of activations and codes of one 4-bit plane.
    fn run_direct(&self, x: ActivationRows<'_>, block: &mut ColumnBlock<'_>) {
        let (scales, table) = self.scales();
        let mut scales = [scales; TOGETHER];
        let m = block.rows().len();
        let mut acc = [Acc([0.0; TILE_N]); TOGETHER * DIRECT_M];
        (0..TOGETHER).for_each(|number| self.fetch(number));
        let mut number = 0;
        for first in self.columns.clone().step_by(TOGETHER) {
            let group = first..(first + TOGETHER).min(self.columns.end);
            acc[..m * group.len()].fill(Acc([0.0; TILE_N]));
            for index in 0..self.strips() {
                let strip = Strip { index, tiles: (self.tiles_k - 2 * index).min(2) };
                for ((tile_n, acc), scales) in group.clone().zip(acc.chunks_exact_mut(m)).zip(&mut scales) {
                    self.fetch(number + TOGETHER);
                    number += 1;
                    self.scale(index, tile_n, scales);
                    // An odd number of tiles: the second is not used.
                    let second = 2 * index + strip.tiles - 1;
                    let tiles = [2 * index, second].map(|tile_k| self.weight.tile(0, tile_k, tile_n));
                    simd::dot_direct(self.isa, tiles, table, scales, strip, &x, acc);
                }
            }
            for (tile_n, acc) in group.zip(acc.chunks_exact(m)) {
                store(self.isa, acc, tile_n, block);
            }
        }
    }

    /// Scales that are still to be filled in, and the table of codes.
    fn scales(&self) -> (Scales, Option<&'static [u8; 16]>) {
        let (zero, table) = match self.recipe.codes {
            Codes::Integer { table, zero } => (zero, table),
            Codes::E4m3 => (0, None),
        };
        (Scales::new(self.recipe.halves, self.recipe.min, zero), table)
    }

    /// Fills in the scales of a strip where they are not those of the strip before.
    fn scale(&self, index: usize, tile_n: usize, scales: &mut Scales) {
        let k0 = index * STRIP_K;
        if k0.is_multiple_of(self.recipe.reach) {
            (self.recipe.scales)(StripPlace { weight: self.weight, isa: self.isa, tile_n, k0 }, scales);
        }
    }

    fn unpack(&self, strip: Strip, tile_n: usize, table: Option<&[u8; 16]>, panel: &mut CodePanel) {
        for (tile, half) in panel.0.as_chunks_mut::<TILE_QUADS>().0.iter_mut().enumerate().take(strip.tiles) {
            for (plane, spec) in self.weight.matrix.spec.codes.iter().enumerate() {
                let tile = self.weight.tile(plane, 2 * strip.index + tile, tile_n);
                simd::unpack_tile(self.isa, spec.bits, spec.shift, tile, half);
            }
        }
        if let Some(table) = table {
            simd::apply_table(self.isa, table, panel);
        }
    }

    fn multiply(
        &self,
        strip: Strip,
        panel: &CodePanel,
        scales: &Scales,
        floats: &mut Option<FloatPanel>,
        rows: Range<usize>,
        acc: &mut [Acc],
    ) {
        match self.input {
            Input::Integer(x) => simd::dot_integer(self.isa, panel, scales, strip, &x, rows, acc),
            Input::Float(x) => {
                let floats = floats.get_or_insert_with(FloatPanel::new);
                match self.recipe.codes {
                    Codes::Integer { .. } => simd::expand_integer(self.isa, panel, scales, floats),
                    Codes::E4m3 => simd::expand_e4m3(self.isa, panel, scales, floats),
                }
                let (k, k0) = (self.weight.matrix.k as usize, strip.index * STRIP_K);
                simd::dot_float(self.isa, floats, (k - k0).min(STRIP_K), &x[rows.start * k + k0..], k, acc);
            }
        }
    }
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
            for (codes, panel) in column.chunks(STRIP_K).zip(&mut panels) {
                let order = (0..2).flat_map(|half| FRAGMENT_ROW.map(|row| half * TILE_K + row));
                for (weights, at) in panel.0.iter_mut().zip(order) {
                    weights[p] = codes.get(at).copied().unwrap_or(0.0);
                }
            }
        }
        for (i, panel) in panels.iter().enumerate().take(len.div_ceil(STRIP_K)) {
            let at = i * STRIP_K;
            simd::dot_float(isa, panel, (len - at).min(STRIP_K), &x[rows.start * k + k0 + at..], k, acc);
        }
    }
    store(isa, acc, first_column / TILE_N, block);
}

fn store(isa: Isa, acc: &[Acc], tile_n: usize, block: &mut ColumnBlock<'_>) {
    let columns = tile_n * TILE_N..(tile_n + 1) * TILE_N;
    for (row, acc) in block.rows().zip(acc) {
        if let Some(out) = block.row(row, columns.clone()).first_chunk_mut::<TILE_N>() {
            simd::store(isa, acc, out);
        }
    }
}
