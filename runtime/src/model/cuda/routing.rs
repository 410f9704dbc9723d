//! Reading back which experts a step took.

use super::super::config::MoeConfig;
use super::super::routing::{LayerRouting, StepRouting};
use super::CudaModel;
use super::network::DeviceFeedForward;
use super::step::{StepShape, sequence_rows};
use crate::engine::model::{ModelError, SequenceStep};
use vt_kernels::cuda::CudaError;
use vt_kernels::cuda::moe::RoutingTables;

impl CudaModel {
    /// Scores and choices of the last step's routing, whose batch it was; `None` where they are not kept
    /// ([`keep_routing`](super::CudaModelOptions::keep_routing)).
    ///
    /// # Errors
    /// [`ModelError::Device`] where the device fails.
    pub fn routing(&self, batch: &[SequenceStep<'_>]) -> Result<Option<StepRouting>, ModelError> {
        let Some(moe) = self.config.moe.as_ref().filter(|_| self.options.keep_routing) else { return Ok(None) };
        let read = self.read_routing(batch, moe);
        read.map(Some).map_err(|e| ModelError::Device { operation: "reading a routing", reason: e.to_string() })
    }

    fn read_routing(&self, batch: &[SequenceStep<'_>], moe: &MoeConfig) -> Result<StepRouting, CudaError> {
        let (experts, top_k) = (moe.num_experts, moe.top_k);
        let own = StepShape::of(batch, self.options.deterministic);
        let tokens = self.recorded(&own, batch.len()).unwrap_or(own).tokens;
        let firsts = sequence_rows(batch, self.options.deterministic);
        let rows = || batch.iter().zip(&firsts).flat_map(|(step, first)| *first..first + step.tokens.len());
        let read = |address: u64, words: usize| -> Result<Vec<u32>, CudaError> {
            let mut bytes = vec![0; 4 * words];
            self.workspace.read(address - self.workspace.address(), &mut bytes)?;
            Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
        };
        let mut routing = StepRouting::default();
        for (index, layer) in self.network.layers.iter().enumerate() {
            let mut own = LayerRouting::default();
            if let DeviceFeedForward::Experts(layer) = &layer.feed_forward {
                let (scores, tables) = self.layout.routing(index);
                let tables = RoutingTables::at(self.workspace.address() + tables, tokens, experts, top_k);
                let tables = tables
                    .ok_or_else(|| CudaError::Unsupported { op: "expert routing", what: format!("{tokens} tokens") })?;
                let (stride, at) = (layer.router.stride, layer.scores_at);
                let scores = read(self.workspace.address() + scores, tokens * stride)?;
                let chosen = read(tables.experts, tokens * top_k)?;
                let scores_of = |row: usize| scores[row * stride + at..][..experts].iter().map(|s| f32::from_bits(*s));
                own = LayerRouting {
                    experts,
                    top_k,
                    scores: rows().flat_map(scores_of).collect(),
                    chosen: rows().flat_map(|row| &chosen[row * top_k..][..top_k]).copied().collect(),
                };
            }
            routing.layers.push(own);
        }
        Ok(routing)
    }
}
