//! The memory plan of a device with memory of its own.

use super::plan::block_bytes;
use super::{LoadError, MemoryCategory, MemoryPlan, MemoryRequest};
use crate::engine::model::BLOCK_LEN;
use crate::model::{ModelConfig, workspace_bytes};
use crate::stats::human_bytes;

/// What a CUDA context and its kernels hold before anything is allocated: 0.5 GiB measured on an H200 with driver 580.
const CONTEXT_BYTES: u64 = 576 << 20;

/// A device as far as planning goes.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceMemory {
    /// Name as on the command line.
    pub name: String,
    /// All its memory, in bytes.
    pub total: u64,
    /// Share of it that may be used.
    pub utilization: f64,
}

impl MemoryPlan {
    /// Plans a run on a device, from sizes alone: weights, then what is left for keys and values.
    ///
    /// # Errors
    /// [`LoadError::DoesNotFit`] with the numbers and the flag to change.
    pub fn for_device(
        config: &ModelConfig,
        image_bytes: u64,
        request: &MemoryRequest,
        device: &DeviceMemory,
    ) -> Result<Self, LoadError> {
        let budget = (device.total as f64 * device.utilization.clamp(0.0, 1.0)) as u64;
        let block = block_bytes(config, request.kv_type);
        let workspace = workspace_bytes(config, request.max_batch_tokens, request.max_batch_tokens);
        let fixed = image_bytes.saturating_add(workspace).saturating_add(CONTEXT_BYTES);
        let refuse = |needed: u64, advice: String| {
            let of = format!("{} of the {} of {}", human_bytes(budget), human_bytes(device.total), device.name);
            Err(LoadError::DoesNotFit { needed, available: budget, advice: format!("{of} may be used; {advice}") })
        };
        if fixed > budget {
            let raised = (fixed as f64 / device.total.max(1) as f64 * 100.0).ceil() / 100.0;
            let advice = match raised <= 1.0 {
                true => format!("raise --gpu-memory-utilization to {raised:.2} or more"),
                false => "a larger device is needed, or several".to_owned(),
            };
            let (weights, rest) = (human_bytes(image_bytes), human_bytes(workspace + CONTEXT_BYTES));
            return refuse(fixed, format!("the weights have {weights}, workspace and context {rest}: {advice}"));
        }
        let left = budget - fixed;
        let affordable =
            usize::try_from(request.kv_cache_bytes.unwrap_or(left).min(left) / block).unwrap_or(usize::MAX);
        let max_model_len = match request.max_model_len {
            Some(len) => len.min(config.max_positions),
            None => config.max_positions.min(affordable.saturating_mul(BLOCK_LEN)),
        };
        let mut notes = Vec::new();
        if request.max_model_len.is_some_and(|len| len > config.max_positions) {
            notes.push(format!("--max-model-len is cut to the {} positions of the model", config.max_positions));
        } else if max_model_len < config.max_positions && request.max_model_len.is_none() {
            notes.push(format!("sequences are cut to {max_model_len} of {} tokens", config.max_positions));
        }
        let per_sequence = max_model_len.div_ceil(BLOCK_LEN);
        if let Some(asked) = request.kv_cache_bytes.filter(|&asked| asked > left) {
            let advice = "lower --kv-cache-memory-bytes or raise --gpu-memory-utilization".to_owned();
            return refuse(fixed.saturating_add(asked), advice);
        }
        if affordable < per_sequence || max_model_len == 0 {
            let needed = fixed.saturating_add(block.saturating_mul(per_sequence.max(1) as u64));
            let advice = "lower --max-model-len, or raise --kv-cache-memory-bytes or --gpu-memory-utilization";
            return refuse(needed, format!("one sequence of {max_model_len} tokens must fit; {advice}"));
        }
        let blocks = match request.kv_cache_bytes {
            Some(_) => affordable,
            None => per_sequence.saturating_mul(request.max_num_seqs).min(affordable),
        };
        let category = |name, bytes| MemoryCategory { name, bytes, file_backed: false };
        let categories = vec![
            category("weights", image_bytes),
            category("kv-cache", block.saturating_mul(blocks as u64)),
            category("workspace", workspace),
            category("context", CONTEXT_BYTES),
        ];
        Ok(Self {
            device: device.name.clone(),
            total: categories.iter().fold(0, |sum, c| sum.saturating_add(c.bytes)),
            categories,
            available: Some(budget),
            fits: true,
            max_model_len,
            max_num_seqs: request.max_num_seqs,
            kv_blocks: blocks,
            kv_tokens: blocks.saturating_mul(BLOCK_LEN),
            notes,
        })
    }
}
