//! Sampling on the device: launches of `cuda/sampling/sample.cu`.
//!
//! The semantics are those of the engine's sampler: raw log-probabilities first, then the grammar, the bias and the
//! penalties, then temperature, min-p, top-k, top-p and the draw, which depends on the request's seed and the position
//! alone. Weights are summed in fixed point, exactly and in any order, so that a row's token does not depend on the batch;
//! it differs from the host's only where the draw falls within 1e-9 of the border between two tokens.
//!
//! Axes: R rows of logits, V tokens.

use super::error::require;
use super::module::{Function, Module, arguments};
use super::{CudaContext, CudaError, CudaStream};
use std::sync::Arc;

/// Threads of a block of every kernel here.
const THREADS: u32 = 1024;
/// Ids that a block of [`THREADS`] reads at once.
const IDS_AT_ONCE: usize = 8192;
/// Most slices of a row.
const MAX_SLICES: usize = 64;
/// Bytes of a row's buckets: a count of 4 and a sum of 8 bytes each.
const BUCKET_BYTES: u64 = 2048 * 12;
/// Most tokens of a vocabulary: their weights, each up to 2^44, must add up in 64 bits.
pub const MAX_VOCABULARY: usize = 1 << 19;
/// Most alternatives with log-probabilities.
pub const MAX_TOP: usize = 20;

/// How the token of a row is chosen, as the kernels read it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingRow {
    /// Start of the request's random numbers.
    pub seed: u64,
    /// Tokens of the output so far.
    pub position: u64,
    /// Address of u32 `[ceil(V / 32)]`: bit `i` of word `i / 32` allows token `i`; 0 allows all.
    pub mask: u64,
    /// Address of [`SamplingEntry`]s, one a token at most.
    pub entries: u64,
    /// How many there are.
    pub entry_count: u32,
    /// Divides the logits; 0 takes the most likely token, of equals the one with the lowest id.
    pub temperature: f32,
    /// Keeps the `k` most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the smallest set of most likely tokens whose probability reaches `p`; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this likely relative to the most likely; 0 keeps all.
    pub min_p: f32,
    /// Positive logits of tokens in the prompt or the output are divided by it, negative ones multiplied.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it is in the output.
    pub frequency_penalty: f32,
    /// Alternatives wanted with log-probabilities, up to [`MAX_TOP`]; `None`: no log-probabilities.
    pub logprobs: Option<u32>,
}

impl SamplingRow {
    /// Bytes of a row in device memory, which starts at a multiple of 8.
    pub const BYTES: usize = 72;

    /// The most likely token, nothing else.
    pub const fn greedy() -> Self {
        Self {
            seed: 0,
            position: 0,
            mask: 0,
            entries: 0,
            entry_count: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logprobs: None,
        }
    }

    /// As the kernels read it.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let longs = [self.seed, self.position, self.mask, self.entries];
        for (to, value) in bytes.chunks_exact_mut(8).zip(longs) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        let floats = [
            self.temperature,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        ];
        let words = floats.map(f32::to_bits).into_iter().chain([
            self.top_k,
            self.entry_count,
            self.logprobs.map_or(u32::MAX, |n| n.min(MAX_TOP as u32)),
        ]);
        for (to, value) in bytes[32..].chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

/// A token whose logit bias or penalties change. The kernels keep the logit in it meanwhile, and put it back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingEntry {
    /// The token; one beyond the vocabulary is passed over.
    pub token: u32,
    /// Added to its logit.
    pub bias: f32,
    /// How often it is in the output, below 2^31.
    pub output_count: u32,
    /// Whether it is in the prompt; wanted for the repetition penalty only.
    pub in_prompt: bool,
}

impl SamplingEntry {
    /// Bytes of an entry in device memory, which starts at a multiple of 4.
    pub const BYTES: usize = 16;

    /// As the kernels read it.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let count = self.output_count & (u32::MAX >> 1) | u32::from(self.in_prompt) << 31;
        for (to, value) in bytes.chunks_exact_mut(4).zip([self.token, self.bias.to_bits(), count]) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

/// What was chosen for a row.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingResult {
    /// The token; `None` where one of the logits is not a number, the largest is not finite or all tokens are excluded.
    pub token: Option<u32>,
    /// Where log-probabilities were asked for, the token's, from the raw logits, and the most likely alternatives; `None`
    /// where the raw logits have no softmax.
    pub logprobs: Option<(f32, Vec<(u32, f32)>)>,
}

impl SamplingResult {
    /// Bytes of a result in memory, which starts at a multiple of 8.
    pub const BYTES: usize = 24 + 8 * MAX_TOP;

    /// As the kernels wrote it; `None` where there are too few bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |index: usize| {
            let bytes = bytes.get(8 + 4 * index..12 + 4 * index)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?))
        };
        let (token, status, logprob) = (word(0)?, word(1)?, f32::from_bits(word(2)?));
        let count = (word(3)? as usize).min(MAX_TOP);
        let top = (0..count).map(|i| Some((word(4 + i)?, f32::from_bits(word(4 + MAX_TOP + i)?))));
        let top = top.collect::<Option<Vec<_>>>()?;
        Some(Self { token: (status & 1 == 0).then_some(token), logprobs: (status & 2 == 0).then_some((logprob, top)) })
    }
}

/// Addresses of a launch. All but `host_results` are device memory.
#[derive(Clone, Copy, Debug)]
pub struct SamplingRequest {
    /// f32 `[R, stride]`; as it was when the launch is over.
    pub logits: u64,
    /// Elements from row to row.
    pub stride: usize,
    /// V, up to [`MAX_VOCABULARY`].
    pub vocabulary: usize,
    /// R.
    pub rows: usize,
    /// `[R]` of [`SamplingRow::to_bytes`].
    pub parameters: u64,
    /// `[R]` of [`SamplingResult::BYTES`].
    pub results: u64,
    /// The same in page-locked host memory, as the device addresses it, where the results are wanted there too.
    pub host_results: Option<u64>,
    /// u32 `[R]`: the tokens once more, for the next step; 0 where there is none.
    pub tokens: u64,
    /// [`Sampling::workspace_bytes`], at a multiple of 8.
    pub workspace: u64,
}

/// As in `cuda/sampling/sample.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Sample {
    logits: u64,
    rows: u64,
    results: u64,
    host_results: u64,
    tokens: u64,
    best: u64,
    buckets: u64,
    stride: u32,
    size: u32,
    slices: u32,
}

/// The kernels.
#[derive(Debug)]
pub struct Sampling {
    prepare: Function,
    best: Function,
    buckets: Function,
    choose: Function,
    multiprocessors: usize,
}

impl Sampling {
    /// Loads them.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there are none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let module = Module::load(context, "sampling/sample")?;
        Ok(Self {
            prepare: module.function(c"vt_sample_prepare", 0)?,
            best: module.function(c"vt_sample_best", 0)?,
            buckets: module.function(c"vt_sample_buckets", 0)?,
            choose: module.function(c"vt_sample_choose", 0)?,
            multiprocessors: context.attributes().multiprocessors as usize,
        })
    }

    /// Bytes of workspace for up to `rows` rows.
    pub fn workspace_bytes(rows: usize) -> u64 {
        (rows as u64).saturating_mul(8 * MAX_SLICES as u64 + BUCKET_BYTES)
    }

    /// Chooses a token for every row. Four launches, which may be captured: everything that differs from step to step is
    /// in the rows' parameters.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn sample(&self, stream: &CudaStream, request: &SamplingRequest) -> Result<(), CudaError> {
        let op = "sampling";
        let SamplingRequest { vocabulary, rows, stride, .. } = *request;
        let fits =
            vocabulary > 0 && vocabulary <= MAX_VOCABULARY && vocabulary <= stride && stride <= i32::MAX as usize;
        require(fits, op, || format!("{vocabulary} tokens in rows of {stride}"))?;
        require(rows <= 65_535, op, || format!("{rows} rows"))?;
        let aligned = (request.parameters | request.results | request.workspace).is_multiple_of(8);
        require(aligned, op, || format!("addresses that are no multiples of 8: {request:?}"))?;
        // Two blocks of 1024 threads fit a multiprocessor.
        let wanted = (2 * self.multiprocessors).div_ceil(rows.max(1));
        let slices = wanted.clamp(1, MAX_SLICES.min(vocabulary.div_ceil(IDS_AT_ONCE))) as u32;
        let parameters = Sample {
            logits: request.logits,
            rows: request.parameters,
            results: request.results,
            host_results: request.host_results.unwrap_or(0),
            tokens: request.tokens,
            best: request.workspace,
            buckets: request.workspace + rows as u64 * 8 * MAX_SLICES as u64,
            stride: stride as u32,
            size: vocabulary as u32,
            slices,
        };
        let (rows, block) = (rows as u32, [THREADS, 1, 1]);
        // SAFETY: `Sample` is the parameter of all four; what the addresses name is as large as the request says, and the
        // caller keeps it.
        unsafe {
            self.prepare.launch_early(stream, [rows, 1, 1], block, 0, &mut arguments![parameters])?;
            self.best.launch_early(stream, [slices, rows, 1], block, 0, &mut arguments![parameters])?;
            self.buckets.launch_early(stream, [slices, rows, 1], block, 0, &mut arguments![parameters])?;
            self.choose.launch_early(stream, [rows, 1, 1], block, 0, &mut arguments![parameters])
        }
    }
}
