//! Mixtures of experts: routing, and each expert once for all of its tokens.

use super::config::{Activation, MoeConfig};
use super::graph::{Experts, GatedMlp};
use super::project::{Compute, FineRows, ProjectionScratch};
use super::routing::RoutingTap;
use super::workspace::ExpertBuffers;
use crate::load::HostArena;
use vt_kernels::activation::{Gate, gated};
use vt_kernels::softmax::softmax;

/// What a feed-forward network reads.
#[derive(Clone, Copy)]
pub(super) struct MlpInput<'a> {
    /// `[T, hidden]`.
    pub x: &'a [f32],
    /// Rows whose activations are pairs.
    pub fine: FineRows<'a>,
}

/// Buffers that experts share with the other blocks.
pub(super) struct MlpBuffers<'a> {
    pub projected: &'a mut [f32],
    pub inner: &'a mut [f32],
    pub vector: &'a mut [f32],
    pub scratch: &'a mut ProjectionScratch,
}

impl<A: HostArena> Compute<'_, A> {
    /// `out [T, hidden] = down (act(gate x) * up x)`.
    pub(super) fn gated_mlp(
        &self,
        mlp: &GatedMlp,
        activation: Activation,
        input: MlpInput<'_>,
        buffers: &mut MlpBuffers<'_>,
        out: &mut [f32],
    ) {
        let MlpInput { x, fine } = input;
        let tokens = x.len() / mlp.gate_up.k;
        let projected = &mut buffers.projected[..tokens * mlp.gate_up.stride];
        self.project(&mlp.gate_up, x, fine, buffers.scratch, buffers.vector, projected);
        self.round(projected);
        let inner = &mut buffers.inner[..tokens * mlp.down.k];
        let gate = match activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
        };
        let [gate_at, up_at] = [0, 1].map(|i| mlp.gate_up.outputs[i].column);
        gated(self.cx, gate, projected, mlp.gate_up.stride, gate_at, up_at, mlp.down.k, inner);
        self.round(inner);
        self.project(&mlp.down, inner, fine, buffers.scratch, buffers.vector, out);
    }

    /// `out [T, hidden]`: the weighted sum of each token's experts, whose choice `tap` sees and may replace. The sum is in order
    /// of the experts' indices, so that a token's result does not depend on the rest of the batch.
    #[expect(clippy::too_many_arguments, reason = "a layer, what goes in and what comes out")]
    pub(super) fn experts(
        &self,
        moe: &MoeConfig,
        experts: &Experts,
        activation: Activation,
        input: MlpInput<'_>,
        buffers: (&mut ExpertBuffers, &mut MlpBuffers<'_>),
        mut tap: Option<&mut RoutingTap<'_>>,
        out: &mut [f32],
    ) {
        let MlpInput { x, fine } = input;
        let (own, buffers) = buffers;
        let hidden = experts.router.k;
        let tokens = x.len() / hidden;
        let stride = experts.router.stride;
        let scores = &mut own.scores[..tokens * stride];
        self.project(&experts.router, x, fine, buffers.scratch, buffers.vector, scores);
        own.choices.clear();
        for row in scores.chunks_exact_mut(stride) {
            let scores = &mut row[experts.router.outputs[0].column..][..moe.num_experts];
            if let Some(tap) = &mut tap {
                tap.scores(scores);
            }
            softmax(self.cx, scores);
            let start = own.choices.len();
            choose(scores, moe, &mut own.choices);
            let choices = &mut own.choices[start..];
            if let Some(tap) = &mut tap {
                let mut experts: Vec<u32> = choices.iter().map(|(expert, _)| *expert).collect();
                tap.chosen(&mut experts);
                let taken = experts.into_iter().map(|expert| (expert, scores[expert as usize]));
                choices.iter_mut().zip(taken).for_each(|(choice, taken)| *choice = taken);
            }
            if moe.normalize_weights {
                normalise(choices);
            }
        }
        out.fill(0.0);
        for (index, mlp) in experts.experts.iter().enumerate() {
            own.tokens.clear();
            for (token, choices) in own.choices.chunks_exact(moe.top_k).enumerate() {
                let chosen = choices.iter().filter(|(e, _)| *e as usize == index);
                own.tokens.extend(chosen.map(|&(_, weight)| (token as u32, weight)));
            }
            let count = own.tokens.len();
            if count == 0 {
                continue;
            }
            own.wanted.clear();
            let wanted = own.tokens.iter().enumerate().filter(|(_, (t, _))| fine.wanted.binary_search(t).is_ok());
            own.wanted.extend(wanted.map(|(row, _)| row as u32));
            let rows = FineRows { all: &fine.all[..count], wanted: &own.wanted };
            let gathered = &mut own.input[..count * hidden];
            for (&(token, _), row) in own.tokens.iter().zip(gathered.chunks_exact_mut(hidden)) {
                row.copy_from_slice(&x[token as usize * hidden..][..hidden]);
            }
            let output = &mut own.output[..count * mlp.down.stride];
            self.gated_mlp(mlp, activation, MlpInput { x: gathered, fine: rows }, buffers, output);
            for (&(token, weight), row) in own.tokens.iter().zip(output.chunks_exact(mlp.down.stride)) {
                let sum = &mut out[token as usize * hidden..][..hidden];
                sum.iter_mut().zip(row).for_each(|(s, v)| *s += weight * v);
            }
        }
    }
}

/// Appends the `top_k` most likely experts of one token, the first of equals first.
fn choose(scores: &[f32], moe: &MoeConfig, choices: &mut Vec<(u32, f32)>) {
    let start = choices.len();
    for _ in 0..moe.top_k {
        let taken = &choices[start..];
        let rest = scores.iter().enumerate().filter(|(e, _)| taken.iter().all(|(t, _)| *t as usize != *e));
        // A row of NaN has no largest element; any expert gives NaN then, which the caller reports.
        let best = rest.fold(None, |best: Option<(usize, f32)>, (e, &s)| match best {
            Some((_, score)) if s <= score || s.is_nan() => best,
            _ => Some((e, s)),
        });
        choices.extend(best.map(|(e, s)| (e as u32, s)));
    }
}

/// Divides a token's weights by their sum.
fn normalise(choices: &mut [(u32, f32)]) {
    let sum: f32 = choices.iter().map(|(_, w)| w).sum();
    choices.iter_mut().for_each(|(_, w)| *w /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::ModelConfig;
    use serde_json::json;
    use vt_bundle::manifest::Model;

    fn moe() -> MoeConfig {
        let config = json!({
            "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 8, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": true
        });
        let model = Model { architecture: "qwen3_moe".to_owned(), config, conventions: Vec::new() };
        ModelConfig::from_manifest(&model).unwrap().moe.unwrap()
    }

    #[test]
    fn the_likeliest_experts_are_chosen() {
        let mut choices = Vec::new();
        choose(&[0.1, 0.4, 0.1, 0.4], &moe(), &mut choices);
        choose(&[0.6, 0.0, 0.2, 0.2], &moe(), &mut choices);
        normalise(&mut choices[2..]);
        assert_eq!(choices, [(1, 0.4), (3, 0.4), (0, 0.75), (2, 0.25)]);
        choices.clear();
        choose(&[f32::NAN; 4], &moe(), &mut choices);
        assert_eq!(choices.len(), 2);
    }
}
