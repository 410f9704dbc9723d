//! Which experts the tokens of a step took, to compare devices by.
//!
//! Two devices that round differently choose different experts where two are almost equally likely, and from there on compute
//! different things. So their logits are comparable only where one computes with the choice of the other: a device tells its
//! choice ([`super::CudaModel::routing`]), and the CPU computes with it and tells what it would have chosen itself
//! ([`super::CpuModel::forward_routed`]).
//!
//! Axes: T tokens of a step in the order of its batch, E experts.

/// The routing of every layer of a step; of layers without experts it is empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepRouting {
    /// In order.
    pub layers: Vec<LayerRouting>,
}

/// The routing of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerRouting {
    /// E; 0 in a layer without experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// `[T, E]`: what the router says of each expert, before the softmax.
    pub scores: Vec<f32>,
    /// `[T, top_k]`: the experts of each token.
    pub chosen: Vec<u32>,
}

impl LayerRouting {
    /// Scores of a token.
    ///
    /// # Panics
    /// Where the step had fewer tokens.
    pub fn scores_of(&self, token: usize) -> &[f32] {
        &self.scores[token * self.experts..][..self.experts]
    }

    /// Experts of a token.
    ///
    /// # Panics
    /// Where the step had fewer tokens.
    pub fn chosen_of(&self, token: usize) -> &[u32] {
        &self.chosen[token * self.top_k..][..self.top_k]
    }
}

impl StepRouting {
    /// Appends the first `tokens` tokens of a later step, which has the same layers.
    pub fn extend(&mut self, later: &StepRouting, tokens: usize) {
        if self.layers.is_empty() {
            let empty = |layer: &LayerRouting| LayerRouting { scores: Vec::new(), chosen: Vec::new(), ..*layer };
            self.layers = later.layers.iter().map(empty).collect();
        }
        for (layer, later) in self.layers.iter_mut().zip(&later.layers) {
            layer.scores.extend_from_slice(&later.scores[..tokens * later.experts]);
            layer.chosen.extend_from_slice(&later.chosen[..tokens * later.top_k]);
        }
    }
}

/// What one layer of a step computes with, and what it tells.
pub(super) struct RoutingTap<'a> {
    /// The choice to compute with, where it is not the model's own.
    pub given: Option<&'a LayerRouting>,
    /// The model's own scores and choice.
    pub own: LayerRouting,
}

impl RoutingTap<'_> {
    /// Notes a token's scores.
    pub(super) fn scores(&mut self, scores: &[f32]) {
        self.own.experts = scores.len();
        self.own.scores.extend_from_slice(scores);
    }

    /// Notes the experts of the next token, and replaces them by those that are given.
    pub(super) fn chosen(&mut self, experts: &mut [u32]) {
        let token = self.own.chosen.len() / experts.len().max(1);
        self.own.top_k = experts.len();
        self.own.chosen.extend_from_slice(experts);
        if let Some(given) = self.given {
            experts.copy_from_slice(given.chosen_of(token));
        }
    }
}
