//! The model as a graph of references into a bundle: which tensor, which rows of it, for every place in the network.
//!
//! Resolved once, when the bundle is loaded, against the configuration's shapes. Nothing is missing later, nothing that
//! the bundle holds is left unused in silence, and a forward pass only follows indices.

mod block;
mod parts;
mod weights;

pub use block::{Attention, Experts, FeedForward, GatedMlp, Layer};
pub use parts::{LowRankRef, Product, Projection, ProjectionOutput};
pub use weights::{MatrixRef, MatrixStorage, VectorRef};

use super::config::ModelConfig;
use parts::{Resolver, Spacing};
use vt_bundle::Bundle;

/// Why a bundle does not hold what its architecture needs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// A tensor is not there.
    #[error("tensor {name}: missing from the bundle, {architecture} needs it")]
    Missing {
        /// Name of the tensor, or of the part of a fused one.
        name: String,
        /// The architecture.
        architecture: String,
    },
    /// A tensor has another shape than the configuration gives it.
    #[error("tensor {name}: shape {found:?}, the configuration gives {expected:?}")]
    Shape {
        /// Name of the tensor or part.
        name: String,
        /// Its shape.
        found: Vec<u64>,
        /// Shape by the configuration.
        expected: Vec<u64>,
    },
    /// A tensor is stored in a way that no operator reads.
    #[error("tensor {name}: {found}, this version computes with {expected}")]
    Storage {
        /// Name of the tensor.
        name: String,
        /// Its layout and decode.
        found: String,
        /// What can be computed with.
        expected: &'static str,
    },
    /// Tensors of the image belong to nothing that the forward pass computes: its result would be wrong.
    #[error(
        "{count} tensors of the bundle have no place in {architecture}, {first} among them; \
         this version would compute something else than the model means"
    )]
    Unused {
        /// How many.
        count: usize,
        /// One of them.
        first: String,
        /// The architecture.
        architecture: String,
    },
}

/// The whole network.
#[derive(Debug)]
pub struct Graph {
    /// Rows of the embedding, `[V, hidden]`.
    pub embedding: MatrixRef,
    /// Layers in order.
    pub layers: Vec<Layer>,
    /// The last norm, `[hidden]`.
    pub norm: VectorRef,
    /// The head, `[V, hidden]`; the embedding where the two are tied.
    pub head: Projection,
    /// Divisors of the rotary frequencies that came as a tensor (`rope_freqs` of GGUF files), `[rotary_dim / 2]`.
    pub rope_divisors: Option<VectorRef>,
}

impl Graph {
    /// Finds every tensor that the configuration speaks of.
    ///
    /// # Errors
    /// [`GraphError`] naming the tensor, what was found and what was expected.
    pub fn resolve(config: &ModelConfig, bundle: &Bundle) -> Result<Self, GraphError> {
        let mut resolver = Resolver::new(&config.architecture, bundle);
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let embedding = resolver.whole_matrix("model.embed_tokens.weight", vocab, hidden)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (index, layer) in config.layers.iter().enumerate() {
            layers.push(block::layer(&mut resolver, config, index, layer)?);
        }
        let norm = resolver.vector("model.norm.weight", hidden)?;
        let head_name = match resolver.has("lm_head.weight") || !config.tie_word_embeddings {
            true => "lm_head",
            false => "model.embed_tokens",
        };
        let head = resolver.projection(&[(head_name.to_owned(), vocab)], hidden, false, Spacing::Padded)?;
        let rope_divisors = match resolver.has("rope_freqs.weight") {
            true => Some(resolver.vector("rope_freqs.weight", config.ropes[0].rotary_dim / 2)?),
            false => None,
        };
        resolver.nothing_unused()?;
        Ok(Self { embedding, layers, norm, head, rope_divisors })
    }
}
