//! Why the tensors of a checkpoint make no model.

use crate::safetensors::quant_config::QuantConfigError;

/// Why a tensor's role cannot be found, or contradicts another's.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] QuantConfigError),
    /// A tensor that a quantised weight needs is not there.
    #[error(
        "{file}: {weight} is {dtype} of shape {shape:?}, but {missing} is missing; without it the weight has no value: download or export the checkpoint again"
    )]
    Missing {
        /// File of the weight.
        file: String,
        /// The weight.
        weight: String,
        /// Its stored type.
        dtype: &'static str,
        /// Its stored shape.
        shape: Vec<u64>,
        /// Full name of what is missing, with alternatives.
        missing: String,
    },
    /// Two tensors claim to be the scale of one weight.
    #[error("{file}: {weight} has two scales, {first} and {second}; expected exactly one")]
    TwoScales {
        /// File of the weight.
        file: String,
        /// The weight.
        weight: String,
        /// One scale.
        first: String,
        /// The other.
        second: String,
    },
    /// A tensor's shape does not fit its weight.
    #[error(
        "{file}: {tensor} has shape {found:?}; expected {expected} for {weight} of {rows} rows and {columns} columns"
    )]
    Shape {
        /// File of the tensor.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<u64>,
        /// What would fit.
        expected: String,
        /// The weight it belongs to.
        weight: String,
        /// N of the weight.
        rows: u64,
        /// K of the weight.
        columns: u64,
    },
    /// A weight's own shape is impossible for its type.
    #[error("{file}: {tensor} is {dtype} of shape {found:?}; expected {expected}")]
    WeightShape {
        /// File of the tensor.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its stored type.
        dtype: &'static str,
        /// Its shape.
        found: Vec<u64>,
        /// What would be possible.
        expected: &'static str,
    },
    /// A tensor has a type that does not fit its role.
    #[error("{file}: {tensor} is {found}; expected {expected}")]
    Dtype {
        /// File of the tensor.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: &'static str,
        /// What would fit.
        expected: &'static str,
    },
    /// A scale that stands for a whole tensor is not a positive number.
    #[error(
        "{file}: {tensor} is {value}; expected a finite number above 0 (0 stands for an all-zero weight only where every {nan} is NaN)"
    )]
    Global {
        /// File of the tensor.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its value.
        value: f32,
        /// What would have to be NaN.
        nan: &'static str,
    },
    /// GPTQ with columns in the order of activations.
    #[error(
        "{file}: {tensor} reorders the columns (act-order, desc_act): column {column} is in group {found}, expected {expected}; kernels read whole groups in order, so such a checkpoint cannot be carried exactly: use one made with desc_act=false"
    )]
    ActOrder {
        /// File of the tensor.
        file: String,
        /// The tensor.
        tensor: String,
        /// First column that is out of order.
        column: u64,
        /// Its group.
        found: i64,
        /// The group by its position.
        expected: u64,
    },
    /// Two sets of tensors make one weight.
    #[error("{weight} is stored twice, as {first} and as {second}; remove one")]
    Twice {
        /// The weight.
        weight: String,
        /// One stored tensor.
        first: String,
        /// The other.
        second: String,
    },
    /// The output projection is missing and nothing says that it is tied.
    #[error("lm_head.weight is missing, and tie_word_embeddings in config.json {}; download the missing tensor, or, if the head really is the embedding, say so with --tie-word-embeddings",
        if *stated { "is false" } else { "is not given (false for this model type)" })]
    HeadMissing {
        /// The configuration has the flag.
        stated: bool,
    },
    /// The output projection does not have the model's width.
    #[error("{file}: {tensor} has {found} columns; expected hidden_size = {hidden_size}")]
    HeadWidth {
        /// File of the tensor.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its K.
        found: u64,
        /// What config.json says.
        hidden_size: u64,
    },
}
