//! Integer products: many rows of activations with a panel, one or two with tiles as they are.

use std::arch::x86_64::*;
use std::ops::Range;

use vt_bundle::tile::{TILE_K, TILE_N};

use super::unpack::{SHIFTS_HIGH, SHIFTS_LOW, transpose_lanes};
use super::{indices, load_f32, load_quads, load_u8, quarters, quarters_mut, store_f32};
use crate::recipe::STRIP_K;
use crate::simd::{Acc, ActivationRows, CodePanel, Scales, Strip, TILE_QUADS};

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::simd) fn dot_integer(
    panel: &CodePanel,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    rows: Range<usize>,
    acc: &mut [Acc],
) {
    // What the unchecked reads below rely on.
    let end = strip.index * STRIP_K + strip.tiles * TILE_K;
    assert!(end <= x.k && rows.end * x.k <= x.codes.len() && rows.len() <= acc.len());
    assert!(rows.end * x.k <= x.sums.len() * TILE_K && rows.end * x.k <= x.scales.len() * TILE_K);
    if strip.tiles == 2 && !scales.halves {
        let segment = Segment::new(panel, scales, 0, 0, strip);
        if scales.min {
            segment.rows::<2, true>(x, rows, acc)
        } else {
            segment.rows::<2, false>(x, rows, acc)
        }
        return;
    }
    for tile in 0..strip.tiles {
        let segment = Segment::new(panel, scales, tile, if scales.halves { tile } else { 0 }, strip);
        if scales.min {
            segment.rows::<1, true>(x, rows.clone(), acc);
        } else {
            segment.rows::<1, false>(x, rows.clone(), acc);
        }
    }
}

/// One or two tiles of a panel that share the scales of the weights; activations have a scale per tile.
struct Segment<'a> {
    quads: &'a [[[u8; 4]; TILE_N]],
    d: &'a [f32; TILE_N],
    m: &'a [f32; TILE_N],
    zero: i32,
    /// First code along K.
    k0: usize,
}

impl<'a> Segment<'a> {
    fn new(panel: &'a CodePanel, scales: &'a Scales, tile: usize, at: usize, strip: Strip) -> Self {
        Self {
            quads: &panel.0[tile * TILE_QUADS..],
            d: &scales.d[at],
            m: &scales.m[at],
            zero: scales.zero,
            k0: strip.index * STRIP_K + tile * TILE_K,
        }
    }

    /// Rows of activations in groups whose sums fit in the registers.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    #[inline]
    fn rows<const TILES: usize, const MIN: bool>(&self, x: &ActivationRows<'_>, rows: Range<usize>, acc: &mut [Acc]) {
        let (mut row, mut left) = (rows.start, &mut acc[..rows.len()]);
        while !left.is_empty() {
            let size = match left.len() {
                6.. => 6,
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
            let (group, rest) = std::mem::take(&mut left).split_at_mut(size);
            match size {
                6 => self.group::<6, TILES, MIN>(x, row, group),
                4 => self.group::<4, TILES, MIN>(x, row, group),
                2 => self.group::<2, TILES, MIN>(x, row, group),
                _ => self.group::<1, TILES, MIN>(x, row, group),
            }
            (row, left) = (row + size, rest);
        }
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
    #[inline]
    fn group<const R: usize, const TILES: usize, const MIN: bool>(
        &self,
        x: &ActivationRows<'_>,
        row: usize,
        acc: &mut [Acc],
    ) {
        let start = row * x.k + self.k0;
        // SAFETY: `dot_integer` has checked that all rows have sums and scales up to the end of the strip; the pointers
        // are to the elements of this segment in the first row.
        let (codes, sums, scales) = unsafe {
            (x.codes.as_ptr().add(start), x.sums.as_ptr().add(start / TILE_K), x.scales.as_ptr().add(start / TILE_K))
        };
        let (d, m) = (quarters(self.d), quarters(self.m));
        // Half of the columns at a time: their sums, as integers and as floats, and the weights fit in the registers.
        for half in 0..2 {
            let mut values = [[_mm512_setzero_ps(); 2]; R];
            for tile in 0..TILES {
                let mut dots = [[_mm512_setzero_si512(); 2]; R];
                for r in 0..R {
                    // SAFETY: row + r is one of the rows checked.
                    let sum = unsafe { *sums.add(r * (x.k / TILE_K) + tile) };
                    dots[r] = [_mm512_set1_epi32(-self.zero * sum); 2];
                }
                for q in 0..TILE_QUADS {
                    let quads = quarters(&self.quads[tile * TILE_QUADS + q]);
                    let weights = [load_quads(&quads[2 * half]), load_quads(&quads[2 * half + 1])];
                    let at = tile * TILE_K + 4 * q;
                    for r in 0..R {
                        // SAFETY: as above; four codes of this row, at any alignment.
                        let a = _mm512_set1_epi32(unsafe { codes.add(r * x.k + at).cast::<i32>().read_unaligned() });
                        for c in 0..2 {
                            dots[r][c] = _mm512_dpbusd_epi32(dots[r][c], weights[c], a);
                        }
                    }
                }
                for r in 0..R {
                    // SAFETY: as above.
                    let scale = _mm512_set1_ps(unsafe { *scales.add(r * (x.k / TILE_K) + tile) });
                    for c in 0..2 {
                        values[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][c]), scale, values[r][c]);
                    }
                }
            }
            for r in 0..R {
                let acc = quarters_mut(&mut acc[r].0);
                let mut term = 0.0;
                for tile in 0..TILES {
                    let at = r * (x.k / TILE_K) + tile;
                    // SAFETY: as above.
                    term += unsafe { *sums.add(at) as f32 * *scales.add(at) };
                }
                for c in 0..2 {
                    let at = 2 * half + c;
                    let mut value = _mm512_fmadd_ps(values[r][c], load_f32(&d[at]), load_f32(&acc[at]));
                    if MIN {
                        value = _mm512_fmadd_ps(load_f32(&m[at]), _mm512_set1_ps(term), value);
                    }
                    store_f32(&mut acc[at], value);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::simd) fn dot_direct(
    tiles: [&[u8]; 2],
    table: Option<&[u8; 16]>,
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    acc: &mut [Acc],
) {
    match (table, acc) {
        (None, [one]) => direct_rows::<false, 1>(tiles, &[0; 16], scales, strip, x, std::array::from_mut(one)),
        (Some(table), [one]) => direct_rows::<true, 1>(tiles, table, scales, strip, x, std::array::from_mut(one)),
        (None, acc) => {
            if let Some(acc) = acc.first_chunk_mut() {
                direct_rows::<false, 2>(tiles, &[0; 16], scales, strip, x, acc);
            }
        }
        (Some(table), acc) => {
            if let Some(acc) = acc.first_chunk_mut() {
                direct_rows::<true, 2>(tiles, table, scales, strip, x, acc);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn direct_rows<const TABLE: bool, const R: usize>(
    tiles: [&[u8]; 2],
    table: &[u8; 16],
    scales: &Scales,
    strip: Strip,
    x: &ActivationRows<'_>,
    acc: &mut [Acc; R],
) {
    let start = strip.index * STRIP_K;
    if strip.tiles == 2 && !scales.halves {
        direct_tiles::<TABLE, 2, R>(tiles, table, scales, 0, x, start, acc);
    } else {
        for tile in 0..strip.tiles {
            let at = if scales.halves { tile } else { 0 };
            direct_tiles::<TABLE, 1, R>([tiles[tile]; 2], table, scales, at, x, start + tile * TILE_K, acc);
        }
    }
}

/// The first `TILES` tiles, which share scale `at` of the weights; `start` is the first of their activations in a row.
/// The same operations in the same order as [`Segment::group`], so that a row's result does not depend on how many
/// others there are.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn direct_tiles<const TABLE: bool, const TILES: usize, const R: usize>(
    tiles: [&[u8]; 2],
    table: &[u8; 16],
    scales: &Scales,
    at: usize,
    x: &ActivationRows<'_>,
    start: usize,
    acc: &mut [Acc; R],
) {
    let mask = _mm512_set1_epi8(15);
    // SAFETY: 16 readable bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    let mut terms = [0.0; R];
    let mut activations = [[[_mm512_setzero_si512(); TILE_QUADS]; TILES]; R];
    // What the zero point takes off.
    let mut starts = [[_mm512_setzero_si512(); TILES]; R];
    let mut factors = [[_mm512_setzero_ps(); TILES]; R];
    for r in 0..R {
        for i in 0..TILES {
            let from = r * x.k + start + i * TILE_K;
            let quads = x.codes[from..from + TILE_K].as_chunks::<4>().0;
            for q in 0..TILE_QUADS {
                activations[r][i][q] = _mm512_set1_epi32(i32::from_le_bytes(quads[q].map(i8::cast_unsigned)));
            }
            let (sum, factor) = (x.sums[from / TILE_K], x.scales[from / TILE_K]);
            starts[r][i] = _mm512_set1_epi32(-scales.zero * sum);
            factors[r][i] = _mm512_set1_ps(factor);
            terms[r] += sum as f32 * factor;
        }
    }
    let words = [tiles[0].as_chunks::<64>().0, tiles[1].as_chunks::<64>().0];
    let (d, m) = (quarters(&scales.d[at]), quarters(&scales.m[at]));
    for (h, shifts) in [&SHIFTS_LOW, &SHIFTS_HIGH].into_iter().enumerate() {
        let shifts = indices(shifts);
        for half in 0..2 {
            let mut values = [_mm512_setzero_ps(); R];
            for i in 0..TILES {
                let mut codes = [_mm512_setzero_si512(); TILE_QUADS];
                for t in 0..4 {
                    let word = load_u8(&words[i][4 * half + t]);
                    codes[t] = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, word), mask);
                    if TABLE {
                        codes[t] = _mm512_shuffle_epi8(table, codes[t]);
                    }
                }
                let quads = transpose_lanes(codes);
                for r in 0..R {
                    let mut dots = starts[r][i];
                    for q in 0..TILE_QUADS {
                        dots = _mm512_dpbusd_epi32(dots, quads[q], activations[r][i][q]);
                    }
                    values[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), factors[r][i], values[r]);
                }
            }
            let column = 2 * h + half;
            for r in 0..R {
                let acc = &mut quarters_mut(&mut acc[r].0)[column];
                let mut value = _mm512_fmadd_ps(values[r], load_f32(&d[column]), load_f32(acc));
                if scales.min {
                    value = _mm512_fmadd_ps(load_f32(&m[column]), _mm512_set1_ps(terms[r]), value);
                }
                store_f32(acc, value);
            }
        }
    }
}
