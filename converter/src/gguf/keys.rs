//! Typed access to the metadata of a model, and the handful of facts that names, configuration and row order share.

use super::error::{GgufError, printable};
use super::value::{Metadata, Value};

/// Most layers of a model: llama.cpp's own limit is 512.
const MAX_LAYERS: u64 = 1 << 12;
/// Largest size of an axis, a count of heads or of experts.
const MAX_SIZE: u64 = 1 << 31;

/// The metadata of one model; keys of the architecture are asked for without their prefix.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'m, 'a> {
    pub(crate) file: &'m str,
    pub(crate) arch: &'m str,
    pub(crate) metadata: &'m Metadata<'a>,
}

impl<'m, 'a> Keys<'m, 'a> {
    /// `<arch>.<key>`.
    pub(crate) fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    pub(crate) fn wrong(&self, key: &str, value: &Value<'_>, expected: &str) -> GgufError {
        GgufError::KeyValue {
            file: self.file.into(),
            key: printable(key.as_bytes()),
            found: value.describe(),
            expected: expected.into(),
        }
    }

    /// A key by its whole name, converted; `None` where it is absent.
    pub(crate) fn any<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| self.wrong(key, value, expected))
    }

    /// An integer of the architecture below 2^31.
    pub(crate) fn size(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.any(&self.full(key), "an integer from 0 to 2147483647", |v| v.as_u64().filter(|v| *v < MAX_SIZE))
    }

    /// An integer of the architecture that must be there, from 1 to `most`.
    pub(crate) fn required_size(&self, key: &str, most: u64, why: &'static str) -> Result<u64, GgufError> {
        let full = self.full(key);
        match self.metadata.get(&full) {
            None => Err(GgufError::MissingKey { file: self.file.into(), key: printable(full.as_bytes()), why }),
            Some(value) => value
                .as_u64()
                .filter(|v| (1..=most).contains(v))
                .ok_or_else(|| self.wrong(&full, value, &format!("an integer from 1 to {most}"))),
        }
    }

    /// A finite float of the architecture.
    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        self.any(&self.full(key), "a finite number", |v| v.as_f64().filter(|v| v.is_finite()))
    }

    /// A boolean of the architecture.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.any(&self.full(key), "a boolean", Value::as_bool)
    }

    /// A string of the architecture.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, GgufError> {
        self.any(&self.full(key), "a UTF-8 string", Value::as_str)
    }

    /// A size that is one for all layers, or an array with one for each of `layers`.
    pub(crate) fn per_layer(&self, key: &str, layers: u64) -> Result<Option<Vec<u64>>, GgufError> {
        let expected = format!("an integer from 0 to 2147483647, or an array of them for {layers} layers");
        self.any(&self.full(key), &expected, |value| {
            if let Some(one) = value.as_u64().filter(|v| *v < MAX_SIZE) {
                return Some(vec![one; layers as usize]);
            }
            let Value::Array(array) = value else { return None };
            let all: Vec<u64> =
                array.integers()?.map(|v| u64::try_from(v).ok().filter(|v| *v < MAX_SIZE)).collect::<Option<_>>()?;
            (all.len() as u64 >= layers).then(|| all[..layers as usize].to_vec())
        })
    }

    /// An array of integers by its whole key.
    pub(crate) fn integers(&self, key: &str) -> Result<Option<Vec<i128>>, GgufError> {
        self.any(key, "an array of integers", |v| match v {
            Value::Array(array) => Some(array.integers()?.collect()),
            _ => None,
        })
    }
}

/// The dimensions that the names, the row order and the configuration share.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// `general.architecture`.
    pub architecture: String,
    /// Blocks in the file, those for multi-token prediction included.
    pub blocks: u64,
    /// Blocks at the end that belong to multi-token prediction.
    pub nextn: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Query heads of each block.
    pub heads: Vec<u64>,
    /// Key-value heads of each block.
    pub kv_heads: Vec<u64>,
    /// Size of a query or key head.
    pub head_dim: u64,
    /// Size of a value head.
    pub value_dim: u64,
    /// Experts, 0 for a dense model.
    pub experts: u64,
}

impl ModelFacts {
    /// Reads them.
    pub(crate) fn read(keys: &Keys<'_, '_>) -> Result<Self, GgufError> {
        let why = "the number of layers is needed to name the tensors";
        let blocks = keys.required_size("block_count", MAX_LAYERS, why)?;
        let hidden =
            keys.required_size("embedding_length", MAX_SIZE, "the width of the model is needed to check its tensors")?;
        let needed = "the number of heads is needed for the order of rows in attention";
        let heads = keys.per_layer("attention.head_count", blocks)?.ok_or_else(|| GgufError::MissingKey {
            file: keys.file.into(),
            key: keys.full("attention.head_count"),
            why: needed,
        })?;
        let kv_heads = keys.per_layer("attention.head_count_kv", blocks)?.unwrap_or_else(|| heads.clone());
        let most = heads.iter().copied().max().unwrap_or(0);
        let head_dim = match keys.size("attention.key_length")?.filter(|d| *d > 0) {
            Some(dim) => dim,
            None if most > 0 => hidden / most,
            None => 0,
        };
        let nextn = keys.size("nextn_predict_layers")?.unwrap_or(0).min(blocks - 1);
        Ok(Self {
            architecture: keys.arch.into(),
            blocks,
            nextn,
            hidden,
            heads,
            kv_heads,
            head_dim,
            value_dim: keys.size("attention.value_length")?.filter(|d| *d > 0).unwrap_or(head_dim),
            experts: keys.size("expert_count")?.unwrap_or(0),
        })
    }
}
