//! The paged key/value cache: storage only. Which block belongs to which sequence is the engine's business.
//!
//! Per layer and key/value head, a block holds 16 positions: keys as `[D][16]`, so that one vector holds the same
//! element of sixteen keys and scores need no sums across lanes; values as `[16][D]`.

use crate::context::Context;
use crate::simd;

/// Positions in a block.
pub const BLOCK_LEN: usize = 16;

/// Stored type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// Exact; for [`Activations::F32`](crate::Activations::F32).
    F32,
    /// Half the memory and traffic, relative error 2^-11.
    F16,
    /// A quarter, relative error 2^-4: E4M3 of the value over the layer's [`KvScales`], saturating.
    E4m3,
}

impl KvType {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 => 2,
            KvType::E4m3 => 1,
        }
    }
}

/// What stored E4M3 values of a layer are multiplied by when they are read; a checkpoint's `k_scale` and `v_scale`. Not used
/// by caches of other types.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScales {
    /// Of keys.
    pub key: f32,
    /// Of values.
    pub value: f32,
}

impl Default for KvScales {
    fn default() -> Self {
        Self { key: 1.0, value: 1.0 }
    }
}

/// Sizes of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers that have a cache.
    pub layers: usize,
    /// Key/value heads of each.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Blocks of [`BLOCK_LEN`] positions.
    pub blocks: usize,
}

impl KvShape {
    /// Elements of one block of one head of one layer, keys or values.
    fn block_elements(&self) -> usize {
        BLOCK_LEN * self.head_dim
    }

    /// Bytes of a cache of this shape; `None` on overflow.
    pub fn bytes(&self, dtype: KvType) -> Option<usize> {
        let size = dtype.bytes();
        self.layers
            .checked_mul(self.kv_heads)?
            .checked_mul(self.blocks)?
            .checked_mul(self.head_dim)?
            .checked_mul(BLOCK_LEN * 2 * size)
    }
}

/// One sequence of a step: where its tokens go and where its context lies.
#[derive(Clone, Copy, Debug)]
pub struct SequenceSlots<'a> {
    /// Position of its first token of this step.
    pub start_pos: usize,
    /// Its tokens in this step.
    pub tokens: usize,
    /// Its blocks in order of position, enough for `start_pos + tokens`.
    pub block_table: &'a [u32],
}

/// Elements of one kind, `[layer][kv_head][block][16 * D]`.
#[derive(Debug)]
enum Storage {
    F32(Vec<f32>),
    F16(Vec<u16>),
    E4m3(Vec<u8>),
}

/// Keys and values of all layers.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    /// Per layer.
    scales: Vec<KvScales>,
    keys: Storage,
    values: Storage,
}

/// One block of one head, keys or values, as stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Block<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
    /// With what it is multiplied by.
    E4m3(&'a [u8], f32),
}

impl KvCache {
    /// An empty cache. Pages that no position has been written to take no memory on systems that map them lazily.
    ///
    /// `None` where the size overflows.
    pub fn new(shape: KvShape, dtype: KvType) -> Option<Self> {
        shape.bytes(dtype)?;
        let elements = shape.layers * shape.kv_heads * shape.blocks * shape.block_elements();
        let storage = || match dtype {
            KvType::F32 => Storage::F32(vec![0.0; elements]),
            KvType::F16 => Storage::F16(vec![0; elements]),
            KvType::E4m3 => Storage::E4m3(vec![0; elements]),
        };
        Some(Self { shape, scales: vec![KvScales::default(); shape.layers], keys: storage(), values: storage() })
    }

    /// With these scales of the layers, instead of ones.
    ///
    /// # Panics
    /// Where there are not as many as layers.
    pub fn with_scales(mut self, scales: Vec<KvScales>) -> Self {
        assert_eq!(scales.len(), self.shape.layers, "scales of layers");
        self.scales = scales;
        self
    }

    /// Sizes.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    fn block_range(&self, layer: usize, head: usize, block: usize) -> std::ops::Range<usize> {
        let shape = &self.shape;
        assert!(layer < shape.layers && head < shape.kv_heads && block < shape.blocks, "block {block} of {shape:?}");
        let at = ((layer * shape.kv_heads + head) * shape.blocks + block) * shape.block_elements();
        at..at + shape.block_elements()
    }

    /// Keys `[D][16]` of a block.
    pub(crate) fn key_block(&self, layer: usize, head: usize, block: usize) -> Block<'_> {
        let range = self.block_range(layer, head, block);
        match &self.keys {
            Storage::F32(v) => Block::F32(&v[range]),
            Storage::F16(v) => Block::F16(&v[range]),
            Storage::E4m3(v) => Block::E4m3(&v[range], self.scales[layer].key),
        }
    }

    /// Values `[16][D]` of a block.
    pub(crate) fn value_block(&self, layer: usize, head: usize, block: usize) -> Block<'_> {
        let range = self.block_range(layer, head, block);
        match &self.values {
            Storage::F32(v) => Block::F32(&v[range]),
            Storage::F16(v) => Block::F16(&v[range]),
            Storage::E4m3(v) => Block::E4m3(&v[range], self.scales[layer].value),
        }
    }

    /// Copies a block of every layer to another (a shared prefix that one sequence is about to extend).
    ///
    /// # Panics
    /// Where a block is beyond the cache.
    pub fn copy_block(&mut self, from: usize, to: usize) {
        for layer in 0..self.shape.layers {
            for head in 0..self.shape.kv_heads {
                let source = self.block_range(layer, head, from);
                let target = self.block_range(layer, head, to).start;
                for storage in [&mut self.keys, &mut self.values] {
                    match storage {
                        Storage::F32(v) => v.copy_within(source.clone(), target),
                        Storage::F16(v) => v.copy_within(source.clone(), target),
                        Storage::E4m3(v) => v.copy_within(source.clone(), target),
                    }
                }
            }
        }
    }

    /// Writes keys and values of the tokens of a step, in the order of `sequences`. Row `t` of `x` `[T, stride]` holds
    /// the keys `[kv_heads, D]` at `keys_at` and the values at `values_at`.
    ///
    /// # Panics
    /// Where rows are too short or too few, or a block table does not cover its sequence.
    #[allow(clippy::too_many_arguments)]
    pub fn write(
        &mut self,
        cx: &Context,
        layer: usize,
        sequences: &[SequenceSlots<'_>],
        x: &[f32],
        stride: usize,
        keys_at: usize,
        values_at: usize,
    ) {
        let shape = self.shape;
        let width = shape.kv_heads * shape.head_dim;
        let tokens: usize = sequences.iter().map(|s| s.tokens).sum();
        assert!(keys_at.max(values_at) + width <= stride && x.len() >= tokens * stride, "{tokens} rows of {stride}");
        assert!(layer < shape.layers, "layer {layer} of {}", shape.layers);
        let per_head = shape.blocks * shape.block_elements();
        let range = layer * shape.kv_heads * per_head..(layer + 1) * shape.kv_heads * per_head;
        let job = Job { shape, sequences, x, stride };
        match (&mut self.keys, &mut self.values) {
            (Storage::F32(k), Storage::F32(v)) => {
                let copy = |from: &[f32], to: &mut [f32]| to.copy_from_slice(from);
                job.run(cx, &mut k[range.clone()], &mut v[range], [keys_at, values_at], [&copy, &copy]);
            }
            (Storage::F16(k), Storage::F16(v)) => {
                let narrow = |from: &[f32], to: &mut [u16]| simd::narrow_f16(cx.isa(), from, to);
                job.run(cx, &mut k[range.clone()], &mut v[range], [keys_at, values_at], [&narrow, &narrow]);
            }
            (Storage::E4m3(k), Storage::E4m3(v)) => {
                let KvScales { key, value } = self.scales[layer];
                let narrow = |scale: f32| {
                    let inverse = 1.0 / scale;
                    move |from: &[f32], to: &mut [u8]| {
                        from.iter().zip(to).for_each(|(from, to)| *to = e4m3_of(from * inverse));
                    }
                };
                let (keys, values) = (narrow(key), narrow(value));
                job.run(cx, &mut k[range.clone()], &mut v[range], [keys_at, values_at], [&keys, &values]);
            }
            _ => unreachable!("keys and values are made with one type"),
        }
    }
}

/// Brings floats into the form of the cache.
type Store<'a, T> = dyn Fn(&[f32], &mut [T]) + Sync + 'a;

/// The nearest E4M3, ties to even; what is too large becomes the largest, 448, NaN stays NaN.
fn e4m3_of(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    if value.is_nan() {
        return sign | 0x7F;
    }
    let magnitude = value.abs().min(448.0);
    // Below the smallest normal, 2^-6, codes count steps of 2^-9.
    if magnitude < 0.015_625 {
        return sign | (magnitude * 512.0).round_ties_even() as u8;
    }
    let bits = magnitude.to_bits();
    // Three bits of the mantissa are left; the exponent's bias falls from 127 to 7.
    let rounded = (bits + 0x7_FFFF + (bits >> 20 & 1)) >> 20;
    sign | (rounded - (120 << 3)) as u8
}

/// The rows of one step, on their way into the cache.
struct Job<'a> {
    shape: KvShape,
    sequences: &'a [SequenceSlots<'a>],
    x: &'a [f32],
    stride: usize,
}

impl Job<'_> {
    /// `keys` and `values` are those of one layer.
    fn run<T: Send>(
        &self,
        cx: &Context,
        keys: &mut [T],
        values: &mut [T],
        [keys_at, values_at]: [usize; 2],
        store: [&Store<'_, T>; 2],
    ) {
        let (dim, per_head) = (self.shape.head_dim, self.shape.blocks * self.shape.block_elements());
        if per_head == 0 {
            return;
        }
        let heads = keys.chunks_mut(per_head).zip(values.chunks_mut(per_head)).enumerate();
        let one = |head: usize, keys: &mut [T], values: &mut [T]| {
            self.head([keys_at + head * dim, values_at + head * dim], keys, values, store);
        };
        if self.x.len() < 1 << 14 {
            heads.for_each(|(head, (keys, values))| one(head, keys, values));
        } else {
            let mut heads: Vec<_> = heads.collect();
            cx.pool().each(&mut heads, |_, (head, (keys, values))| one(*head, keys, values));
        }
    }

    fn head<T>(
        &self,
        [key_at, value_at]: [usize; 2],
        keys: &mut [T],
        values: &mut [T],
        [store_key, store_value]: [&Store<'_, T>; 2],
    ) {
        let (dim, elements) = (self.shape.head_dim, self.shape.block_elements());
        let mut first_row = 0;
        for sequence in self.sequences {
            let mut t = 0;
            while t < sequence.tokens {
                let position = sequence.start_pos + t;
                let slot = position % BLOCK_LEN;
                let run = (BLOCK_LEN - slot).min(sequence.tokens - t);
                let at = sequence.block_table[position / BLOCK_LEN] as usize * elements;
                let rows = &self.x[(first_row + t) * self.stride..];
                let keys = &mut keys[at..at + elements];
                for (d, slots) in keys.chunks_exact_mut(BLOCK_LEN).enumerate() {
                    let mut column = [0.0f32; BLOCK_LEN];
                    for (key, row) in column.iter_mut().zip(rows.chunks(self.stride)).take(run) {
                        *key = row[key_at + d];
                    }
                    store_key(&column[..run], &mut slots[slot..slot + run]);
                }
                let values = &mut values[at + slot * dim..at + (slot + run) * dim];
                for (value, row) in values.chunks_exact_mut(dim).zip(rows.chunks(self.stride)) {
                    store_value(&row[value_at..value_at + dim], value);
                }
                t += run;
            }
            first_row += sequence.tokens;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vt_bundle::float8::E4M3;

    #[test]
    fn e4m3_is_the_nearest() {
        for (code, value) in E4M3.iter().enumerate().filter(|(_, value)| !value.is_nan()) {
            assert_eq!(e4m3_of(*value), code as u8);
        }
        let positive = &E4M3[..0x7F];
        for (code, pair) in positive.windows(2).enumerate() {
            let middle = (pair[0] + pair[1]) / 2.0;
            let even = (code + code % 2) as u8;
            assert_eq!(e4m3_of(middle), even, "{middle}");
            assert_eq!(e4m3_of(-middle.next_down()), 0x80 | code as u8);
            assert_eq!(e4m3_of(middle.next_up()), code as u8 + 1);
        }
        assert_eq!((e4m3_of(1e9), e4m3_of(f32::NEG_INFINITY), e4m3_of(f32::NAN)), (0x7E, 0xFE, 0x7F));
    }
}
