//! Codes out of tiles, into panels.

use std::arch::x86_64::*;

use vt_bundle::tile::TILE_N;

use super::{indices, load_quads, load_u8, quarters_mut, store_quads};
use crate::simd::TILE_QUADS;

/// Transposes a 4 x 4 matrix of 128-bit lanes.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
pub(super) fn transpose_lanes([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    let (ab_low, cd_low) = (_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0x44>(c, d));
    let (ab_high, cd_high) = (_mm512_shuffle_i64x2::<0xEE>(a, b), _mm512_shuffle_i64x2::<0xEE>(c, d));
    [
        _mm512_shuffle_i64x2::<0x88>(ab_low, cd_low),
        _mm512_shuffle_i64x2::<0xDD>(ab_low, cd_low),
        _mm512_shuffle_i64x2::<0x88>(ab_high, cd_high),
        _mm512_shuffle_i64x2::<0xDD>(ab_high, cd_high),
    ]
}

/// First bits of the bytes `[2q, 2q + 8, 2q + 1, 2q + 9]` of column `16 j + t`, or of column + 8 where `high`, in the
/// 8-byte pieces of a 4-bit tile.
const fn nibble_shifts(high: bool) -> [u8; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        let within = [0, 4, 16, 20][i % 4] + if high { 8 } else { 0 };
        table[i] = (within + 32 * (i / 4 % 2)) as u8;
        i += 1;
    }
    table
}

pub(super) const SHIFTS_LOW: [u8; 64] = nibble_shifts(false);
pub(super) const SHIFTS_HIGH: [u8; 64] = nibble_shifts(true);

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::simd) fn unpack_q4(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    let words = tile.as_chunks::<64>().0;
    let mask = _mm512_set1_epi8(15);
    // Register t holds lanes 4t .. 4t + 3: one 128-bit lane per quad, in it j = 0 .. 3.
    for (h, shifts) in [indices(&SHIFTS_LOW), indices(&SHIFTS_HIGH)].into_iter().enumerate() {
        for half in 0..2 {
            let codes =
                |i: usize| _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, load_u8(&words[4 * half + i])), mask);
            let quads = transpose_lanes([codes(0), codes(1), codes(2), codes(3)]);
            for (out, quad) in out.iter_mut().zip(quads) {
                store_quads(&mut quarters_mut(out)[2 * h + half], quad);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::simd) fn unpack_q8(tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    let words = tile.as_chunks::<64>().0;
    // Register 2t + q / 2 holds quads q and q + 1 of column t + 8 jj, jj = 2 j + h; two of them make
    // [h 0: t, t + 1; h 1: t, t + 1] of one quad.
    let even = _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 1, 3, 5, 7, 17, 19, 21, 23);
    let odd = _mm512_add_epi32(even, _mm512_set1_epi32(8));
    for (q, out) in out.iter_mut().enumerate() {
        let pick = if q % 2 == 0 { even } else { odd };
        let pair = |t: usize| {
            let (a, b) = (load_u8(&words[2 * t + q / 2]), load_u8(&words[2 * t + 2 + q / 2]));
            _mm512_permutex2var_epi32(a, pick, b)
        };
        let out = quarters_mut(out);
        for half in 0..2 {
            let (a, b) = (pair(4 * half), pair(4 * half + 2));
            store_quads(&mut out[half], _mm512_shuffle_i64x2::<0x44>(a, b));
            store_quads(&mut out[2 + half], _mm512_shuffle_i64x2::<0xEE>(a, b));
        }
    }
}

/// For quad `q` and four neighbouring `t`: which bytes of a 1- or 2-bit tile hold the codes of the 16 positions, one byte
/// per code. `lane_bytes` is the size of a lane's word.
const fn bit_sources(q: usize, lane_bytes: usize) -> [u8; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        let (t, j, e) = (i / 16, i / 4 % 4, i % 4);
        // A word has `lane_bytes / 4` bytes per j; the odd rows of a column are in the upper half of its fields.
        let per_j = lane_bytes / 4;
        table[i] = ((4 * t + q) * lane_bytes + per_j * j + e / 2 * (per_j - 1)) as u8;
        i += 1;
    }
    table
}

const SOURCES_1: [[u8; 64]; TILE_QUADS] = [bit_sources(0, 4), bit_sources(1, 4), bit_sources(2, 4), bit_sources(3, 4)];
const SOURCES_2: [[u8; 64]; TILE_QUADS] = [bit_sources(0, 8), bit_sources(1, 8), bit_sources(2, 8), bit_sources(3, 8)];

/// The bit of each code within its byte of a 1-bit tile: fields 0, 1, 4, 5 of the column, 2, 3, 6, 7 of column + 8.
const fn single_bits(h: usize) -> [u8; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = 1 << ([0, 1, 4, 5][i % 4] + 2 * h);
        i += 1;
    }
    table
}

/// First bits of the codes within each 8 bytes gathered from a 2-bit tile.
const fn pair_shifts(h: usize) -> [u8; 64] {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = (8 * (i % 8) + 4 * h + 2 * (i % 2)) as u8;
        i += 1;
    }
    table
}

const SINGLE_BITS: [[u8; 64]; 2] = [single_bits(0), single_bits(1)];
const PAIR_SHIFTS: [[u8; 64]; 2] = [pair_shifts(0), pair_shifts(1)];

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")]
pub(in crate::simd) fn unpack_bits(bits: u32, shift: u32, tile: &[u8], out: &mut [[[u8; 4]; TILE_N]; TILE_QUADS]) {
    if bits > 2 {
        return crate::simd::portable::unpack_bits(bits, shift, tile, out);
    }
    let parts = tile.as_chunks::<64>().0;
    let place = _mm_cvtsi32_si128(shift as i32);
    for (q, out) in out.iter_mut().enumerate() {
        let out = quarters_mut(out);
        for half in 0..2 {
            let gathered = match bits {
                1 => _mm512_permutexvar_epi8(indices(&SOURCES_1[q]), load_u8(&parts[half])),
                _ => {
                    let (a, b) = (load_u8(&parts[2 * half]), load_u8(&parts[2 * half + 1]));
                    _mm512_permutex2var_epi8(a, indices(&SOURCES_2[q]), b)
                }
            };
            for h in 0..2 {
                let codes = match bits {
                    1 => {
                        let set = _mm512_test_epi8_mask(gathered, indices(&SINGLE_BITS[h]));
                        _mm512_maskz_set1_epi8(set, 1)
                    }
                    _ => {
                        let codes = _mm512_multishift_epi64_epi8(indices(&PAIR_SHIFTS[h]), gathered);
                        _mm512_and_si512(codes, _mm512_set1_epi8(3))
                    }
                };
                // No code leaves its byte: the highest bit of a plane is below bit 8.
                let codes = _mm512_sll_epi16(codes, place);
                let out = &mut out[2 * h + half];
                let before = if shift == 0 { _mm512_setzero_si512() } else { load_quads(out) };
                store_quads(out, _mm512_or_si512(before, codes));
            }
        }
    }
}
