//! What a run will hold in memory, before anything is allocated.

use super::LoadError;
use crate::engine::model::BLOCK_LEN;
use crate::model::{ModelConfig, workspace_bytes};
use crate::stats::human_bytes;
use serde::Serialize;

/// Largest key/value cache that is made without being asked for, as in vLLM's CPU backend.
const DEFAULT_KV_BYTES: u64 = 4 << 30;
/// Heap and stacks of a process that does nothing yet: tokenizer, threads, server.
const PROCESS_BYTES: u64 = 64 << 20;

/// What the user asked for, as far as it decides on memory.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRequest {
    /// Longest sequence; the model's own limit, or what fits, where `None`.
    pub max_model_len: Option<usize>,
    /// Sequences at once.
    pub max_num_seqs: usize,
    /// Tokens of one step.
    pub max_batch_tokens: usize,
    /// Bytes of a stored element of a key or value.
    pub kv_element_bytes: u64,
    /// Size of the key/value cache; enough for all sequences, or what fits, where `None`.
    pub kv_cache_bytes: Option<u64>,
    /// Bytes that may be used; see [`super::available_memory`].
    pub available: Option<u64>,
}

/// One use of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryCategory {
    /// `weights`, `kv-cache`, `workspace`, `process`.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
    /// The pages are those of files, and the kernel may drop and read them again.
    pub file_backed: bool,
}

/// Memory by category, and the limits that follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Device of the plan.
    pub device: String,
    /// Uses.
    pub categories: Vec<MemoryCategory>,
    /// Sum of all.
    pub total: u64,
    /// What may be used, where the system says.
    pub available: Option<u64>,
    /// Everything fits.
    pub fits: bool,
    /// Longest sequence, in tokens.
    pub max_model_len: usize,
    /// Sequences at once.
    pub max_num_seqs: usize,
    /// Blocks of the key/value cache.
    pub kv_blocks: usize,
    /// Tokens that the key/value cache holds.
    pub kv_tokens: usize,
    /// What to know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl MemoryPlan {
    /// Plans a run on the CPU, from sizes alone.
    ///
    /// # Errors
    /// [`LoadError::DoesNotFit`] where the cache that was asked for is too small for one sequence, or the whole does not
    /// fit, with the flag to change.
    pub fn for_cpu(config: &ModelConfig, image_bytes: u64, request: &MemoryRequest) -> Result<Self, LoadError> {
        let block = block_bytes(config, request.kv_element_bytes);
        let workspace = workspace_bytes(config, request.max_batch_tokens, request.max_batch_tokens);
        let fixed = workspace.saturating_add(PROCESS_BYTES);
        // Weights are file-backed, but a run that evicts them reads them from disk for every token.
        let free = request.available.map(|a| a.saturating_sub(image_bytes.saturating_add(fixed)));
        let budget = match request.kv_cache_bytes {
            Some(bytes) => bytes,
            None => free.unwrap_or(u64::MAX).min(DEFAULT_KV_BYTES),
        };
        let mut notes = Vec::new();
        let affordable = usize::try_from(budget / block).unwrap_or(usize::MAX);
        let max_model_len = match request.max_model_len {
            Some(len) => len.min(config.max_positions),
            None => config.max_positions.min(affordable.saturating_mul(BLOCK_LEN)),
        };
        if request.max_model_len.is_some_and(|len| len > config.max_positions) {
            notes.push(format!("--max-model-len is cut to the {} positions of the model", config.max_positions));
        } else if max_model_len < config.max_positions && request.max_model_len.is_none() {
            let (of, cache) = (config.max_positions, human_bytes(budget));
            notes.push(format!("sequences are cut to {max_model_len} of {of} tokens, as the cache has {cache}"));
        }
        let per_sequence = max_model_len.div_ceil(BLOCK_LEN);
        if affordable < per_sequence || max_model_len == 0 {
            let advice = match request.kv_cache_bytes {
                Some(_) => "raise --kv-cache-memory-bytes or lower --max-model-len",
                None => "lower --max-model-len, or use a machine or a container with more memory",
            };
            let needed = block.saturating_mul(per_sequence.max(1) as u64);
            let advice = format!("the key/value cache must hold one sequence of {max_model_len} tokens; {advice}");
            return Err(LoadError::DoesNotFit { needed, available: budget, advice });
        }
        let wanted = match request.kv_cache_bytes {
            Some(_) => affordable,
            None => per_sequence.saturating_mul(request.max_num_seqs).min(affordable),
        };
        let categories = vec![
            MemoryCategory { name: "weights", bytes: image_bytes, file_backed: true },
            MemoryCategory { name: "kv-cache", bytes: block.saturating_mul(wanted as u64), file_backed: false },
            MemoryCategory { name: "workspace", bytes: workspace, file_backed: false },
            MemoryCategory { name: "process", bytes: PROCESS_BYTES, file_backed: false },
        ];
        let sum = |list: &mut dyn Iterator<Item = u64>| list.fold(0u64, u64::saturating_add);
        let total = sum(&mut categories.iter().map(|c| c.bytes));
        let anonymous = sum(&mut categories.iter().filter(|c| !c.file_backed).map(|c| c.bytes));
        if let Some(available) = request.available {
            if anonymous > available {
                let advice = "lower --max-model-len, --max-num-seqs or --kv-cache-memory-bytes".to_owned();
                return Err(LoadError::DoesNotFit { needed: anonymous, available, advice });
            }
            if total > available {
                notes.push("the weights do not stay in memory: tokens wait for the disk".to_owned());
            }
        }
        Ok(Self {
            device: "cpu".to_owned(),
            fits: request.available.is_none_or(|a| total <= a),
            categories,
            total,
            available: request.available,
            max_model_len,
            max_num_seqs: request.max_num_seqs,
            kv_blocks: wanted,
            kv_tokens: wanted.saturating_mul(BLOCK_LEN),
            notes,
        })
    }

    /// A table that a person reads.
    pub fn table(&self) -> String {
        let mut text = format!("memory plan for {}\n", self.device);
        for c in &self.categories {
            let kind = if c.file_backed { "file-backed" } else { "" };
            text.push_str(&format!("  {:<10} {:>12}  {kind}\n", c.name, human_bytes(c.bytes)));
        }
        text.push_str(&format!("  {:<10} {:>12}\n", "total", human_bytes(self.total)));
        let available = self.available.map_or_else(|| "unknown".to_owned(), human_bytes);
        let verdict = if self.fits { "fits" } else { "does not fit" };
        text.push_str(&format!("  {:<10} {available:>12}  {verdict}\n", "available"));
        text.push_str(&format!(
            "{} tokens of key/value cache, {} sequences of at most {} tokens\n",
            self.kv_tokens, self.max_num_seqs, self.max_model_len
        ));
        for note in &self.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        text
    }
}

/// Bytes of one block of the cache, all layers together; at least 1.
pub(super) fn block_bytes(config: &ModelConfig, element_bytes: u64) -> u64 {
    let sizes = [config.layers.len(), config.num_kv_heads, config.head_dim, 2 * BLOCK_LEN].map(|n| n as u64);
    sizes.iter().fold(element_bytes, |product, size| product.saturating_mul(*size)).max(1)
}
