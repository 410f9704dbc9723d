//! Attention over the paged cache on the device: launches of `cuda/attention/`.
//!
//! Two kernels share a step. [`Attention::decode`] takes sequences with one token each, divides a long context over the
//! device, and may be captured: lengths and block tables are read when it runs. [`Attention::prefill`] takes runs of tokens.
//! A token's result depends on its sequence alone, bit for bit: neither on the rest of the batch nor, in prefill, on where
//! the prompt was cut. The two kernels round differently, so whoever wants a prompt's bits not to depend on how it was cut
//! gives all of its tokens to prefill, a last chunk of one token too.

mod hopper;

use self::hopper::Hopper;
use super::error::require;
use super::kv_cache::{CudaKvCache, CudaKvType, KvScales};
use super::module::{Function, Module, arguments};
use super::{CudaContext, CudaError, CudaStream};
use crate::attention::AttentionShape;
use crate::kv_cache::KvShape;
use std::ffi::CString;
use std::sync::Arc;

/// Threads of a block of both kernels.
const THREADS: u32 = 128;
/// Warps of a block.
const WARPS: u32 = THREADS / 32;
/// Head sizes that decode is compiled for, with the thread blocks that a multiprocessor holds for groups of up to 8 and of
/// up to 16 query heads; others are padded up.
const DECODE_DIMS: [(u32, [u32; 2]); 3] = [(64, [4, 3]), (128, [3, 2]), (256, [2, 1])];
/// Head sizes that prefill is compiled for, with the rows of a tile.
const PREFILL_DIMS: [(u32, u32); 4] = [(32, 128), (64, 128), (128, 128), (256, 64)];
/// Most sequences of a decode launch: their chunks are counted in shared memory.
pub const MAX_DECODE_SEQUENCES: usize = 4096;
/// Chunks of a context that is not longer than 32 of the longest chunk; as in `cuda/attention/decode.cuh`.
const FEW_CHUNKS: usize = 32;
/// Positions of the shortest chunk.
const SHORTEST_CHUNK: usize = 128;
/// Most sequences whose chunks the kernel for Hopper merges itself.
const FEW_SEQUENCES: usize = 4;
/// Positions of the longest chunk.
const LONGEST_CHUNK: usize = 1024;

/// The sequences of a launch, in memory of the device, so that a captured launch serves every step.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBatch {
    /// Address of bf16 rows with the queries; a multiple of 16.
    pub x: u64,
    /// Elements from row to row of `x`; a multiple of 8, as is the next.
    pub stride: usize,
    /// Column of the queries `[H, D]`.
    pub queries_at: usize,
    /// Address of the result, bf16 `[T, H * D]`; a multiple of 16.
    pub out: u64,
    /// Elements from row to row of `out`; a multiple of 8.
    pub out_stride: usize,
    /// B.
    pub sequences: usize,
    /// Address of u32: for decode `[B]`, the row of each sequence's token; for prefill `[B + 1]`, where the rows of sequence
    /// `i` are `starts[i] .. starts[i + 1]`.
    pub starts: u64,
    /// Address of u32 `[B]`: positions of each sequence in the cache, those of this step included. In decode 0 is a place
    /// that no sequence takes: nothing is written for it.
    pub lengths: u64,
    /// Address of u32 `[B, table_stride]`: the blocks of each sequence, in order of position.
    pub block_tables: u64,
    /// Entries from sequence to sequence of `block_tables`.
    pub table_stride: usize,
}

/// What decode does itself where rows hold heads as they were projected: norms and rotations, and the way of each sequence's
/// own key and value into the cache.
#[derive(Clone, Copy, Debug)]
pub struct ProjectedHeads {
    /// First columns of keys and values `[H_kv, D]` in the rows, multiples of 8.
    pub keys_at: usize,
    /// Of the values.
    pub values_at: usize,
    /// Addresses of the norms' weights of queries and keys, f32 `[D]`; no norms where `None`.
    pub norms: Option<(u64, u64)>,
    /// Added to the mean square.
    pub eps: f32,
    /// Address of pairs of f32 `[T, D / 2]`, as for [`super::norm::HeadRows`]; a multiple of 16.
    pub angles: u64,
}

/// As in the sources; the scores of a layer.
#[repr(C)]
#[derive(Clone, Copy)]
struct Scores {
    log2_scale: f32,
    cap: f32,
    scale_over_cap: f32,
}

impl Scores {
    fn new(shape: &AttentionShape, key_scale: f32) -> Self {
        let (scale, log2_e) = (shape.scale * key_scale, std::f32::consts::LOG2_E);
        match shape.soft_cap {
            Some(cap) => Self { log2_scale: log2_e, cap, scale_over_cap: scale / cap },
            None => Self { log2_scale: scale * log2_e, cap: 0.0, scale_over_cap: 0.0 },
        }
    }
}

/// As in `cuda/attention/decode.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Decode {
    x: u64,
    out: u64,
    cache: u64,
    rows: u64,
    lengths: u64,
    block_tables: u64,
    firsts: u64,
    partial: u64,
    stats: u64,
    stride: u32,
    queries_at: u32,
    out_stride: u32,
    sequences: u32,
    table_stride: u32,
    kv_heads: u32,
    group: u32,
    dim: u32,
    window: u32,
    scores: Scores,
    value_scale: f32,
    cache_row: u32,
    apart: u32,
    angles: u64,
    q_norm: u64,
    k_norm: u64,
    eps: f32,
    keys_at: u32,
    values_at: u32,
    store_key_scale: f32,
    store_value_scale: f32,
    group_stride: u32,
}

/// As in `cuda/attention/prefill.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Prefill {
    x: u64,
    out: u64,
    cache: u64,
    starts: u64,
    lengths: u64,
    block_tables: u64,
    stride: u32,
    queries_at: u32,
    out_stride: u32,
    sequences: u32,
    table_stride: u32,
    kv_heads: u32,
    group: u32,
    dim: u32,
    cache_row: u32,
    window: u32,
    scores: Scores,
    value_scale: f32,
}

/// Room that [`Attention::decode`] needs for partial results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeWorkspace {
    sequences: usize,
    max_context: usize,
    first_bytes: u64,
    stat_bytes: u64,
    bytes: u64,
}

impl DecodeWorkspace {
    /// For up to `sequences` sequences of up to `max_context` positions and `heads` query heads; `None` on overflow.
    pub fn new(sequences: usize, max_context: usize, heads: usize, cache: &KvShape) -> Option<Self> {
        let first_bytes = sequences.checked_add(1)?.checked_mul(4)?.checked_next_multiple_of(256)? as u64;
        // A window may begin within a chunk, which makes one more.
        let chunks = max_context.div_ceil(LONGEST_CHUNK).max(FEW_CHUNKS).checked_add(1)?;
        let records = sequences.checked_mul(chunks)?.checked_mul(heads)?;
        let stat_bytes = records.checked_mul(8)?.checked_next_multiple_of(256)? as u64;
        let bytes = records.checked_mul(cache.head_dim)?.checked_mul(4)?;
        let bytes = first_bytes.checked_add(stat_bytes)?.checked_add(bytes as u64)?;
        Some(Self { sequences, max_context, first_bytes, stat_bytes, bytes })
    }

    /// Bytes, of memory at a multiple of 256 that is zero before the first use.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The kernels, for one stored type and head size.
#[derive(Debug)]
pub struct Attention {
    dtype: CudaKvType,
    kv_heads: u32,
    dim: u32,
    heads: u32,
    decode: Function,
    merge: Function,
    decode_shared: u32,
    /// Thread blocks of decode that the device holds at once.
    decode_blocks: u32,
    hopper: Option<Hopper>,
    prefill: Function,
    prefill_rows: u32,
    prefill_shared: u32,
}

/// Query heads that one column of a product holds.
const MAX_GROUP_OF_COLUMNS: u32 = 8;
/// Query heads of one key/value head that a launch of decode takes; larger groups are launches one after the other.
const MAX_GROUP_OF_LAUNCH: u32 = 16;
/// Largest number of query heads for one key/value head: a tile of prefill has a row for each.
const MAX_GROUP: usize = 64;

/// Whether there are kernels for `heads` query heads over `kv_heads` key/value heads of `dim` elements, on any device: known
/// before anything is loaded.
///
/// # Errors
/// [`CudaError::Unsupported`] where the query heads are no multiple of the key/value heads, more than 64 share one, or a
/// head has more than 256 elements or no multiple of 8.
pub fn check_heads(heads: usize, kv_heads: usize, dim: usize) -> Result<(), CudaError> {
    let op = "attention";
    let divides = kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads);
    require(divides, op, || format!("{heads} query heads over {kv_heads} key/value heads"))?;
    let group = heads / kv_heads;
    require(group <= MAX_GROUP, op, || format!("{group} query heads for each key/value head (at most {MAX_GROUP})"))?;
    require(heads <= 65_535, op, || format!("{heads} query heads"))?;
    let aligned = dim > 0 && dim <= 256 && dim.is_multiple_of(8);
    require(aligned, op, || format!("heads of {dim} elements (a multiple of 8, at most 256)"))
}

/// Query heads of one key/value head that each launch of decode takes, but for the last one, which takes what is left.
fn heads_of_launch(group: u32) -> u32 {
    group.div_ceil(group.div_ceil(MAX_GROUP_OF_LAUNCH))
}

impl Attention {
    /// Loads the kernels for layers of `heads` query heads over a cache, and over others of its shape and type (where the
    /// kernels that every device has serve).
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] as [`check_heads`]; [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there are
    /// no kernels for the device.
    pub fn new(context: &Arc<CudaContext>, heads: usize, cache: &CudaKvCache) -> Result<Self, CudaError> {
        let hopper = Hopper::new(context, cache)?;
        Self::with(context, heads, cache, hopper)
    }

    /// The same without the kernels that only some devices have, for comparisons.
    ///
    /// # Errors
    /// As [`Attention::new`].
    pub fn portable(context: &Arc<CudaContext>, heads: usize, cache: &CudaKvCache) -> Result<Self, CudaError> {
        Self::with(context, heads, cache, None)
    }

    fn with(
        context: &Arc<CudaContext>,
        heads: usize,
        cache: &CudaKvCache,
        hopper: Option<Hopper>,
    ) -> Result<Self, CudaError> {
        let op = "attention";
        let KvShape { kv_heads, head_dim: dim, .. } = *cache.shape();
        check_heads(heads, kv_heads, dim)?;
        let group = (heads / kv_heads) as u32;
        let dim = dim as u32;
        let padded = |dims: u32| dim <= dims;
        let decode_dim = DECODE_DIMS.iter().find(|(dims, _)| padded(*dims));
        let prefill_dim = PREFILL_DIMS.iter().find(|(dims, _)| padded(*dims));
        let (Some((decode_dim, blocks)), Some((prefill_dim, rows))) = (decode_dim, prefill_dim) else {
            return Err(CudaError::Unsupported { op, what: format!("heads of {dim} elements") });
        };
        let columns = if heads_of_launch(group) <= MAX_GROUP_OF_COLUMNS { 1 } else { 2 };
        let name = |text: String| CString::new(text).map_err(|_| CudaError::NotBuilt);
        let type_name = cache.dtype().name();

        // Twice the sums, maximum and weight of each warp and head; then the chunks of each sequence.
        let sums = 2 * WARPS * 8 * columns * (decode_dim + 6) * 4;
        let decode_name = name(format!("vt_decode_{type_name}_{decode_dim}_{columns}"))?;
        let most = sums + 4 * (MAX_DECODE_SEQUENCES as u32 + 1);
        let module = Module::load(context, "attention/decode")?;
        let (decode, merge) = (module.function(&decode_name, most)?, module.function(c"vt_decode_merge", 0)?);
        // Queries, a tile of keys and one of values, in rows padded by 16 bytes; E4M3 passes through a buffer.
        let staging = if cache.dtype() == CudaKvType::E4m3 { 64 * prefill_dim } else { 0 };
        let prefill_shared = (rows + 64 + 64) * (prefill_dim * 2 + 16) + staging;
        let prefill_name = name(format!("vt_prefill_{type_name}_{prefill_dim}"))?;
        let prefill = Module::load(context, "attention/prefill")?.function(&prefill_name, prefill_shared)?;
        Ok(Self {
            dtype: cache.dtype(),
            kv_heads: kv_heads as u32,
            dim,
            heads: heads as u32,
            decode,
            merge,
            decode_shared: sums,
            hopper,
            decode_blocks: context.attributes().multiprocessors * blocks[columns as usize - 1],
            prefill,
            prefill_rows: *rows,
            prefill_shared,
        })
    }

    /// Whether [`Attention::decode`] takes heads as they were projected, of which `half` pairs of elements are rotated.
    pub fn takes_projected(&self, cache: &CudaKvCache, half: usize) -> bool {
        let group = self.heads / self.kv_heads;
        2 * half == self.dim as usize && self.hopper_for(cache).is_some_and(|kernels| kernels.has_decode(group))
    }

    /// Attention of one token of each sequence. `workspace_at` is the address of `workspace`'s bytes, which one stream
    /// uses at a time; no length may exceed the workspace's context. One launch, or two, the second for what long contexts
    /// were cut into; as many again for each further 16 query heads of a key/value head.
    ///
    /// With `projected`, where [`Attention::takes_projected`] says so, the heads of the rows are normed and rotated on the
    /// way, and keys and values written into the cache. What the cache holds of earlier positions, the lengths and the
    /// tables must then be in memory before the kernel launched before this one begins: they are read without waiting for
    /// it.
    ///
    /// # Errors
    /// [`CudaError`].
    #[expect(clippy::too_many_arguments, reason = "a launch: each is an argument of the kernel")]
    pub fn decode(
        &self,
        stream: &CudaStream,
        shape: &AttentionShape,
        cache: &CudaKvCache,
        layer: usize,
        scales: KvScales,
        batch: &AttentionBatch,
        projected: Option<&ProjectedHeads>,
        workspace: &DecodeWorkspace,
        workspace_at: u64,
    ) -> Result<(), CudaError> {
        let op = "decode attention";
        self.check(op, shape, cache, batch)?;
        let sequences = batch.sequences;
        let fits = sequences <= workspace.sequences && sequences <= MAX_DECODE_SEQUENCES;
        require(fits, op, || format!("{sequences} sequences in a workspace of {}", workspace.sequences))?;
        let width = self.kv_heads as usize * self.dim as usize;
        let takes = |p: &ProjectedHeads| {
            let columns = [p.keys_at, p.values_at];
            let inside = columns.iter().all(|at| at.is_multiple_of(8) && at + width <= batch.stride);
            inside && p.angles.is_multiple_of(16) && self.takes_projected(cache, self.dim as usize / 2)
        };
        require(projected.is_none_or(takes), op, || format!("{projected:?} in rows of {}", batch.stride))?;
        let (q_norm, k_norm) = projected.and_then(|p| p.norms).unwrap_or((0, 0));
        let group = self.heads / self.kv_heads;
        let whole = Decode {
            x: batch.x,
            out: batch.out,
            cache: cache.layer(layer)?,
            rows: batch.starts,
            lengths: batch.lengths,
            block_tables: batch.block_tables,
            firsts: workspace_at,
            partial: workspace_at + workspace.first_bytes + workspace.stat_bytes,
            stats: workspace_at + workspace.first_bytes,
            stride: batch.stride as u32,
            queries_at: batch.queries_at as u32,
            out_stride: batch.out_stride as u32,
            sequences: sequences as u32,
            table_stride: batch.table_stride as u32,
            kv_heads: self.kv_heads,
            group,
            dim: self.dim,
            window: window(shape),
            scores: Scores::new(shape, self.key_scale(scales)),
            value_scale: self.value_scale(scales),
            cache_row: 0,
            apart: u32::from(sequences > FEW_SEQUENCES),
            angles: projected.map_or(0, |p| p.angles),
            q_norm,
            k_norm,
            eps: projected.map_or(0.0, |p| p.eps),
            keys_at: projected.map_or(0, |p| p.keys_at) as u32,
            values_at: projected.map_or(0, |p| p.values_at) as u32,
            store_key_scale: scales.key,
            store_value_scale: scales.value,
            group_stride: group,
        };
        let part = heads_of_launch(group);
        for first in (0..group).step_by(part as usize) {
            let column = first * self.dim;
            let parameters = Decode {
                out: batch.out + 2 * u64::from(column),
                queries_at: whole.queries_at + column,
                group: part.min(group - first),
                ..whole
            };
            self.decode_part(stream, layer, cache, parameters, workspace)?;
        }
        Ok(())
    }

    /// Decode of the query heads that `parameters` name.
    fn decode_part(
        &self,
        stream: &CudaStream,
        layer: usize,
        cache: &CudaKvCache,
        parameters: Decode,
        workspace: &DecodeWorkspace,
    ) -> Result<(), CudaError> {
        let sequences = parameters.sequences as usize;
        let chunks = workspace.max_context.div_ceil(LONGEST_CHUNK).max(FEW_CHUNKS) + 1;
        let units = (sequences * chunks).saturating_mul(self.kv_heads as usize);
        let special = self.hopper_for(cache).filter(|kernels| kernels.has_decode(parameters.group_stride));
        let special = special.and_then(|kernels| kernels.decode(stream, layer, units, parameters));
        match special {
            Some(launched) if sequences <= FEW_SEQUENCES => return launched,
            Some(launched) => launched?,
            None => {
                let blocks = units.min(self.decode_blocks as usize) as u32;
                let shared = self.decode_shared + 4 * (parameters.sequences + 1);
                // SAFETY: `Decode` is the kernel's parameter; what its addresses name is as large as the batch and the
                // workspace say, and the caller keeps it.
                unsafe {
                    let arguments = &mut arguments![parameters];
                    self.decode.launch_early(stream, [blocks, 1, 1], [THREADS, 1, 1], shared, arguments)?;
                }
            }
        }
        if workspace.max_context <= SHORTEST_CHUNK {
            return Ok(());
        }
        let blocks = (parameters.sequences * self.kv_heads * parameters.group).div_ceil(WARPS);
        // SAFETY: as above.
        unsafe { self.merge.launch_early(stream, [blocks, 1, 1], [THREADS, 1, 1], 0, &mut arguments![parameters]) }
    }

    /// Attention of runs of tokens, `tokens` in all (more is allowed, and costs empty thread blocks).
    ///
    /// # Errors
    /// [`CudaError`].
    #[expect(clippy::too_many_arguments, reason = "a launch: each is an argument of the kernel")]
    pub fn prefill(
        &self,
        stream: &CudaStream,
        shape: &AttentionShape,
        cache: &CudaKvCache,
        layer: usize,
        scales: KvScales,
        batch: &AttentionBatch,
        tokens: usize,
    ) -> Result<(), CudaError> {
        let op = "prefill attention";
        self.check(op, shape, cache, batch)?;
        let group = self.heads / self.kv_heads;
        let hopper = self.hopper_for(cache).filter(|kernels| kernels.has_prefill());
        let tokens_per_tile = (if hopper.is_some() { hopper::ROWS } else { self.prefill_rows } / group) as usize;
        // Every sequence may end with a tile that is not full.
        let tiles = (tokens / tokens_per_tile).saturating_add(batch.sequences);
        require(tiles <= 65_535, op, || format!("{tokens} tokens of {} sequences", batch.sequences))?;
        let parameters = Prefill {
            x: batch.x,
            out: batch.out,
            cache: cache.layer(layer)?,
            starts: batch.starts,
            lengths: batch.lengths,
            block_tables: batch.block_tables,
            stride: batch.stride as u32,
            queries_at: batch.queries_at as u32,
            out_stride: batch.out_stride as u32,
            sequences: batch.sequences as u32,
            table_stride: batch.table_stride as u32,
            kv_heads: self.kv_heads,
            group,
            dim: self.dim,
            cache_row: 0,
            window: window(shape),
            scores: Scores::new(shape, self.key_scale(scales)),
            value_scale: self.value_scale(scales),
        };
        let tiles = if batch.sequences == 0 { 0 } else { tiles as u32 };
        if let Some(launched) =
            hopper.and_then(|kernels| kernels.prefill(stream, layer, self.kv_heads, tiles, parameters))
        {
            return launched;
        }
        let grid = [self.kv_heads, tiles, 1];
        // SAFETY: as in `decode`.
        unsafe {
            self.prefill.launch_early(stream, grid, [THREADS, 1, 1], self.prefill_shared, &mut arguments![parameters])
        }
    }

    /// The kernels of sm_90a, which know one cache.
    fn hopper_for(&self, cache: &CudaKvCache) -> Option<&Hopper> {
        self.hopper.as_ref().filter(|kernels| kernels.is_for(cache))
    }

    fn key_scale(&self, scales: KvScales) -> f32 {
        if self.dtype == CudaKvType::E4m3 { scales.key } else { 1.0 }
    }

    fn value_scale(&self, scales: KvScales) -> f32 {
        if self.dtype == CudaKvType::E4m3 { scales.value } else { 1.0 }
    }

    fn check(
        &self,
        op: &'static str,
        shape: &AttentionShape,
        cache: &CudaKvCache,
        batch: &AttentionBatch,
    ) -> Result<(), CudaError> {
        let KvShape { kv_heads, head_dim, .. } = *cache.shape();
        let same = shape.heads == self.heads as usize && cache.dtype() == self.dtype;
        let same = same && (kv_heads as u32, head_dim as u32) == (self.kv_heads, self.dim);
        require(same, op, || format!("{shape:?} over {:?} of {:?}", cache.dtype(), cache.shape()))?;
        let width = shape.heads * head_dim;
        let fits = batch.queries_at.checked_add(width).is_some_and(|end| end <= batch.stride);
        let fits = fits && width <= batch.out_stride && batch.stride.max(batch.out_stride) <= u32::MAX as usize;
        require(fits, op, || format!("{width} columns in rows of {} and {}", batch.stride, batch.out_stride))?;
        let aligned = (batch.x | batch.out).is_multiple_of(16);
        let aligned = aligned && (batch.stride | batch.queries_at | batch.out_stride).is_multiple_of(8);
        require(aligned, op, || format!("rows that are not aligned to 16 bytes: {batch:?}"))?;
        let counts = batch.sequences.max(batch.table_stride);
        require(counts <= i32::MAX as usize, op, || format!("{} sequences", batch.sequences))
    }
}

/// 0 where there is none, as the kernels want it.
fn window(shape: &AttentionShape) -> u32 {
    // A window longer than any sequence is none.
    shape.window.map_or(0, |window| u32::try_from(window.max(1)).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_heads_are_known_before_there_is_a_device() {
        for (heads, kv_heads, dim) in [(32, 1, 128), (64, 1, 256), (34, 2, 64), (4, 4, 8)] {
            check_heads(heads, kv_heads, dim).unwrap();
            let (group, part) = ((heads / kv_heads) as u32, heads_of_launch((heads / kv_heads) as u32));
            assert!(part <= MAX_GROUP_OF_LAUNCH && group.div_ceil(part) == group.div_ceil(MAX_GROUP_OF_LAUNCH));
        }
        for (heads, kv_heads, dim) in [(65, 1, 128), (6, 4, 128), (4, 0, 128), (0, 1, 128), (8, 8, 264), (8, 8, 12)] {
            assert!(check_heads(heads, kv_heads, dim).is_err(), "{heads} over {kv_heads} of {dim}");
        }
    }
}
