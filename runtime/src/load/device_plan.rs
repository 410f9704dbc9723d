//! The memory plan of a device with memory of its own.

use super::plan::block_bytes;
use super::{LoadError, MemoryCategory, MemoryPlan, MemoryRequest};
use crate::engine::model::BLOCK_LEN;
use crate::model::ModelConfig;
use crate::stats::human_bytes;

/// What a CUDA context and its kernels hold before anything is allocated: 0.5 GiB measured on an H200 with driver 580.
const CONTEXT_BYTES: u64 = 576 << 20;

/// Times what all sequences can fill that the cache is at most, where its size is not given.
const PREFIX_SHARE: usize = 4;

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
    /// Plans a run on a device, from sizes alone: weights and a workspace of `workspace` bytes, then what is left for keys and
    /// values.
    ///
    /// # Errors
    /// [`LoadError::DoesNotFit`] with the numbers and the flag to change.
    pub fn for_device(
        config: &ModelConfig,
        image_bytes: u64,
        workspace: u64,
        request: &MemoryRequest,
        device: &DeviceMemory,
    ) -> Result<Self, LoadError> {
        let budget = (device.total as f64 * device.utilization.clamp(0.0, 1.0)) as u64;
        let block = block_bytes(config, request.kv_element_bytes);
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
            // More than all sequences can fill serves the prefixes of later ones; the blocks of a small model that fit a
            // large device would take longer to count than to use.
            None => per_sequence.saturating_mul(request.max_num_seqs).saturating_mul(PREFIX_SHARE).min(affordable),
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use vt_bundle::manifest::Model;

    const GIB: u64 = 1 << 30;
    const WORKSPACE: u64 = 300 << 20;

    /// Llama 3.1 8B.
    fn config() -> ModelConfig {
        let config = json!({
            "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128_256, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072, "tie_word_embeddings": false, "rope_theta": 500_000.0
        });
        let model = Model { architecture: "llama".to_owned(), config, conventions: Vec::new() };
        ModelConfig::from_manifest(&model).unwrap()
    }

    fn request() -> MemoryRequest {
        MemoryRequest {
            max_model_len: None,
            max_num_seqs: 16,
            max_batch_tokens: 512,
            kv_element_bytes: 2,
            kv_cache_bytes: None,
            available: None,
        }
    }

    fn device(total: u64) -> DeviceMemory {
        DeviceMemory { name: "cuda:0".to_owned(), total, utilization: 0.9 }
    }

    fn bytes(plan: &MemoryPlan, name: &str) -> u64 {
        plan.categories.iter().find(|c| c.name == name).unwrap().bytes
    }

    fn refusal(result: Result<MemoryPlan, LoadError>) -> (u64, u64, String) {
        match result {
            Err(LoadError::DoesNotFit { needed, available, advice }) => (needed, available, advice),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn categories_add_up_and_stay_within_the_share() {
        let plan = MemoryPlan::for_device(&config(), 5 * GIB, WORKSPACE, &request(), &device(80 * GIB)).unwrap();
        assert_eq!(bytes(&plan, "weights"), 5 * GIB);
        assert_eq!(plan.total, plan.categories.iter().map(|c| c.bytes).sum::<u64>());
        assert_eq!(plan.available, Some((80.0 * 0.9 * GIB as f64) as u64));
        assert!(plan.fits && plan.total <= plan.available.unwrap());
        assert_eq!(plan.kv_tokens, plan.kv_blocks * BLOCK_LEN);
        // 32 layers x (keys, values) x 8 heads x 128 elements x 2 bytes of every token.
        assert_eq!(bytes(&plan, "kv-cache"), plan.kv_tokens as u64 * 32 * 2 * 8 * 128 * 2);
        assert!(plan.kv_tokens >= plan.max_model_len);
        assert_eq!(plan.device, "cuda:0");
    }

    #[test]
    fn a_cache_of_short_sequences_is_bounded() {
        let request = MemoryRequest { max_model_len: Some(1000), max_num_seqs: 3, ..request() };
        let plan = MemoryPlan::for_device(&config(), 5 * GIB, WORKSPACE, &request, &device(80 * GIB)).unwrap();
        assert_eq!(plan.max_model_len, 1000);
        assert_eq!(plan.kv_blocks, PREFIX_SHARE * 3 * 1000usize.div_ceil(BLOCK_LEN));
    }

    #[test]
    fn the_cache_takes_what_weights_leave() {
        let sizes = [5 * GIB, 15 * GIB];
        let [small, large] = sizes
            .map(|image| MemoryPlan::for_device(&config(), image, WORKSPACE, &request(), &device(24 * GIB)).unwrap());
        let per_block = bytes(&small, "kv-cache") / small.kv_blocks as u64;
        let fewer = (small.kv_blocks - large.kv_blocks) as u64 * per_block;
        assert!(fewer.abs_diff(10 * GIB) <= per_block, "{fewer}");
        assert!(large.max_model_len < 131_072 && large.notes.iter().any(|n| n.contains("cut")), "{:?}", large.notes);
    }

    #[test]
    fn refusals_say_which_flag_to_change() {
        // The weights alone are too large for the share, but not for the device.
        let (needed, available, advice) =
            refusal(MemoryPlan::for_device(&config(), 22 * GIB, WORKSPACE, &request(), &device(24 * GIB)));
        assert!(needed > 22 * GIB && available < 22 * GIB);
        assert!(advice.contains("--gpu-memory-utilization to 0.9"), "{advice}");
        // Not even the whole device is enough.
        let (.., advice) =
            refusal(MemoryPlan::for_device(&config(), 30 * GIB, WORKSPACE, &request(), &device(24 * GIB)));
        assert!(advice.contains("larger device"), "{advice}");
        // A cache that was asked for.
        let asked = MemoryRequest { kv_cache_bytes: Some(20 * GIB), ..request() };
        let (.., advice) = refusal(MemoryPlan::for_device(&config(), 10 * GIB, WORKSPACE, &asked, &device(24 * GIB)));
        assert!(advice.contains("--kv-cache-memory-bytes"), "{advice}");
        // One sequence of the length that was asked for.
        let asked = MemoryRequest { max_model_len: Some(131_072), ..request() };
        let (.., advice) = refusal(MemoryPlan::for_device(&config(), 15 * GIB, WORKSPACE, &asked, &device(24 * GIB)));
        assert!(advice.contains("--max-model-len"), "{advice}");
    }

    #[test]
    fn absurd_sizes_are_refused_without_overflow() {
        for image in [u64::MAX, u64::MAX - GIB] {
            let (needed, ..) =
                refusal(MemoryPlan::for_device(&config(), image, WORKSPACE, &request(), &device(24 * GIB)));
            assert!(needed >= image);
        }
        let (.., advice) = refusal(MemoryPlan::for_device(&config(), 0, WORKSPACE, &request(), &device(0)));
        assert!(!advice.is_empty());
    }
}
