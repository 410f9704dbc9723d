//! What the configuration files say about quantisation: a cross-check on the tensors, never the decision.
//!
//! Two facts are taken from here because the tensors cannot tell: the block size of FP8 block scales, and whether GPTQ's
//! zero points are stored minus one. Field names: ModelOpt 0.47 (`hf_quant_config.json` and its converted form),
//! compressed-tensors 0.20, and the `fp8`, `gptq`, `awq`, `mxfp4` methods of transformers 5.

mod pattern;
mod scheme;

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::source::Checkpoint;
use pattern::PatternSet;
pub use scheme::Scheme;
use scheme::{NO_ALGORITHM, of_algorithm, of_group};

/// Rows and columns of an FP8 block where no configuration says otherwise.
const DEFAULT_BLOCK: [u64; 2] = [128, 128];

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantConfigError {
    /// A quantisation algorithm of which nothing is known.
    #[error("{file}: {layer} has quant_algo {value:?}, which is not known; known are {known}", known = scheme::known_algorithms())]
    UnknownAlgorithm {
        /// The configuration file.
        file: String,
        /// The layer, or what stands for all layers.
        layer: String,
        /// The value found.
        value: String,
    },
    /// A quantisation method of which nothing is known.
    #[error("{file}: quant_method {value:?} is not known; known are {}", METHODS.join(", "))]
    UnknownMethod {
        /// The configuration file.
        file: String,
        /// The value found.
        value: String,
    },
    /// A compressed-tensors storage format of which nothing is known.
    #[error("{file}: compressed-tensors format {value:?} is not known; known are {}", CT_FORMATS.join(", "))]
    UnknownFormat {
        /// The configuration file.
        file: String,
        /// The value found.
        value: String,
    },
    /// A value of the wrong kind.
    #[error("{file}: {key} is {found}; expected {expected}")]
    Field {
        /// The configuration file.
        file: String,
        /// Path of the key.
        key: String,
        /// What is there.
        found: String,
        /// What should be there.
        expected: &'static str,
    },
}

const METHODS: [&str; 9] =
    ["modelopt", "modelopt_fp4", "modelopt_mixed", "compressed-tensors", "fp8", "fbgemm_fp8", "gptq", "awq", "mxfp4"];

const CT_FORMATS: [&str; 10] = [
    "dense",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "fakequant",
];

/// The quantisation part of a checkpoint's configuration, both files taken together.
#[derive(Debug, Default)]
pub struct QuantConfig {
    /// File that the claims come from.
    file: String,
    /// The algorithm (ModelOpt), the format (compressed-tensors) or the method, as written.
    pub declared: Option<String>,
    /// For every module that nothing else is said about.
    default: Option<Scheme>,
    exclude: PatternSet,
    /// Module path (or a prefix of paths) and scheme; `None` says unquantised.
    layers: HashMap<String, Option<Scheme>>,
    groups: Vec<(PatternSet, Scheme)>,
    /// What is said about the KV cache (`FP8`, `NVFP4`), if anything.
    pub kv_cache: Option<String>,
    /// Rows and columns of an FP8 block, where a file says.
    pub block: Option<[u64; 2]>,
    /// U8 scales of FP8 blocks are exponents (`scale_fmt: ue8m0`).
    pub ue8m0: bool,
    /// GPTQ's zero points are stored as they are (`checkpoint_format: gptq_v2`), not minus one.
    pub gptq_v2: bool,
}

/// What the configuration says about one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Nothing that binds.
    Nothing,
    /// Listed as not quantised.
    Unquantised,
    /// Quantised so because it is listed by its own path.
    Listed(Scheme),
    /// Quantised so if it is a linear layer: a statement about the whole model.
    Default(Scheme),
}

impl QuantConfig {
    /// Reads `hf_quant_config.json` and the `quantization_config` of `config.json` (or of its `text_config`).
    ///
    /// # Errors
    /// [`QuantConfigError`]: an algorithm, method or format that is not known, or a field of the wrong kind.
    pub fn of(checkpoint: &Checkpoint, warnings: &mut Vec<String>) -> Result<Self, QuantConfigError> {
        let mut own = QuantConfig { file: "hf_quant_config.json".into(), ..Self::default() };
        let mut converted = QuantConfig { file: "config.json".into(), ..Self::default() };
        if let Some(q) = checkpoint.quant_config.as_ref().and_then(|v| v.get("quantization")).and_then(Value::as_object)
        {
            own.read_modelopt(q)?;
        }
        let in_config = [&checkpoint.config, &checkpoint.config["text_config"]]
            .into_iter()
            .find_map(|c| c.get("quantization_config").and_then(Value::as_object));
        let old_file = |name: &str| -> Option<Map<String, Value>> {
            let file = checkpoint.files.iter().find(|f| f.name == name)?;
            serde_json::from_slice(file.bytes()).ok()
        };
        if let Some(q) = in_config {
            converted.read_method(q)?;
        } else if let Some(q) = old_file("quantize_config.json") {
            converted.file = "quantize_config.json".into();
            converted.read_gptq(&q);
        } else if let Some(q) = old_file("quant_config.json") {
            converted.file = "quant_config.json".into();
            converted.read_gptq(&q);
        }
        if let (Some(a), Some(b)) = (own.default, converted.default)
            && !a.agrees(b)
        {
            warnings.push(format!("{} says {a}, {} says {b}; the tensors decide", own.file, converted.file));
        }
        Ok(own.or(converted))
    }

    /// Fills what `self` leaves open from `other`.
    fn or(mut self, other: Self) -> Self {
        let silent = self.default.is_none() && self.layers.is_empty() && self.groups.is_empty();
        if silent {
            self.file = other.file;
            self.default = other.default;
            self.layers = other.layers;
            self.groups = other.groups;
        }
        self.exclude.merge(other.exclude);
        self.declared = self.declared.or(other.declared);
        self.kv_cache = self.kv_cache.or(other.kv_cache);
        self.block = self.block.or(other.block);
        self.ue8m0 |= other.ue8m0;
        self.gptq_v2 |= other.gptq_v2;
        self
    }

    /// What is said about the module at that path.
    pub fn claim(&self, module: &str) -> Claim {
        // A fused list of experts is one key that stands for every module below it: the longest prefix counts.
        let mut path = Some(module);
        while let Some(prefix) = path {
            if let Some(scheme) = self.layers.get(prefix) {
                return scheme.map_or(Claim::Unquantised, Claim::Listed);
            }
            path = prefix.rsplit_once('.').map(|(parent, _)| parent);
        }
        if self.exclude.matches(module) {
            return Claim::Unquantised;
        }
        if let Some((_, scheme)) = self.groups.iter().find(|(targets, _)| targets.matches(module)) {
            return Claim::Listed(*scheme);
        }
        self.default.map_or(Claim::Nothing, Claim::Default)
    }

    /// The file that the claims come from.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Rows and columns of an FP8 block.
    pub fn block(&self) -> [u64; 2] {
        self.block.unwrap_or(DEFAULT_BLOCK)
    }

    fn read_method(&mut self, q: &Map<String, Value>) -> Result<(), QuantConfigError> {
        let method = q.get("quant_method").and_then(Value::as_str);
        for key in ["ignore", "modules_to_not_convert", "ignored_layers"] {
            self.exclude.extend(strings(q.get(key)));
        }
        self.ue8m0 = q.get("scale_fmt").and_then(Value::as_str).is_some_and(|s| s.eq_ignore_ascii_case("ue8m0"));
        self.block = self.read_block(q, "weight_block_size")?;
        self.declared = ["quant_algo", "format", "quant_method"]
            .iter()
            .find_map(|key| q.get(*key).and_then(Value::as_str))
            .map(str::to_owned);
        match method {
            Some("compressed-tensors") => self.read_compressed_tensors(q),
            Some("gptq" | "awq") => {
                self.read_gptq(q);
                Ok(())
            }
            Some("fp8" | "fbgemm_fp8") => {
                self.default = Some(if self.block.is_some() { Scheme::Fp8Block } else { Scheme::Fp8 });
                Ok(())
            }
            Some("mxfp4") => {
                self.default = Some(Scheme::Mxfp4);
                Ok(())
            }
            Some("modelopt" | "modelopt_fp4" | "modelopt_mixed") | None => match q.get("quantization") {
                // Early exports nest ModelOpt's own form.
                Some(Value::Object(nested)) => self.read_modelopt(nested),
                _ => self.read_modelopt(q),
            },
            Some(value) => Err(QuantConfigError::UnknownMethod { file: self.file.clone(), value: value.into() }),
        }
    }

    fn read_modelopt(&mut self, q: &Map<String, Value>) -> Result<(), QuantConfigError> {
        self.exclude.extend(strings(q.get("exclude_modules")));
        self.kv_cache = match (q.get("kv_cache_quant_algo"), q.get("kv_cache_scheme")) {
            (Some(Value::String(algo)), _) | (_, Some(Value::String(algo))) => Some(algo.clone()),
            (_, Some(Value::Object(_))) => Some("FP8".into()),
            _ => None,
        };
        if let Some(algo) = self.string(q, "quant_algo")? {
            self.declared = Some(algo.clone());
            self.default = self.algorithm(&algo, "the model as a whole")?;
        }
        match q.get("quantized_layers") {
            None | Some(Value::Null) => {}
            Some(Value::Object(layers)) => {
                for (layer, settings) in layers {
                    let scheme = match settings.get("quant_algo") {
                        None | Some(Value::Null) => None,
                        Some(Value::String(algo)) => self.algorithm(algo, layer)?,
                        Some(other) => return Err(self.field(&format!("{layer}.quant_algo"), other, "a string")),
                    };
                    self.layers.insert(layer.clone(), scheme);
                }
            }
            Some(other) => return Err(self.field("quantized_layers", other, "an object")),
        }
        Ok(())
    }

    fn read_compressed_tensors(&mut self, q: &Map<String, Value>) -> Result<(), QuantConfigError> {
        let known = |format: &str| CT_FORMATS.contains(&format);
        let format = self.string(q, "format")?;
        if let Some(value) = format.filter(|f| !known(f)) {
            return Err(QuantConfigError::UnknownFormat { file: self.file.clone(), value });
        }
        if q.get("kv_cache_scheme").is_some_and(Value::is_object) {
            self.kv_cache = Some("FP8".into());
        }
        // The keys of the groups are free text; only what they hold counts.
        for group in q.get("config_groups").and_then(Value::as_object).into_iter().flat_map(Map::values) {
            if let Some(value) = group.get("format").and_then(Value::as_str).filter(|f| !known(f)) {
                return Err(QuantConfigError::UnknownFormat { file: self.file.clone(), value: value.into() });
            }
            let Some(weights) = group.get("weights").and_then(Value::as_object) else { continue };
            self.block = self.block.or(self.read_block(weights, "block_structure")?);
            let Some(scheme) = of_group(weights) else { continue };
            // A class name stands for every layer of the class; paths and expressions have dots or a prefix.
            if strings(group.get("targets")).any(|t| !t.contains('.') && !t.starts_with("re:")) {
                self.default = Some(scheme);
            }
            let mut targets = PatternSet::default();
            targets.extend(strings(group.get("targets")));
            self.groups.push((targets, scheme));
        }
        Ok(())
    }

    fn read_gptq(&mut self, q: &Map<String, Value>) {
        let bits = q.get("bits").or_else(|| q.get("w_bit")).and_then(Value::as_u64);
        self.default = match bits {
            Some(4) => Some(Scheme::Int4),
            Some(8) => Some(Scheme::Int8),
            _ => None,
        };
        self.gptq_v2 = q.get("checkpoint_format").and_then(Value::as_str) == Some("gptq_v2");
    }

    fn read_block(&self, q: &Map<String, Value>, key: &str) -> Result<Option<[u64; 2]>, QuantConfigError> {
        let value = match q.get(key) {
            None | Some(Value::Null) => return Ok(None),
            Some(value) => value,
        };
        let sizes: Vec<u64> = value.as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
        match sizes[..] {
            [n, k] if (1..=1 << 20).contains(&n) && (1..=1 << 20).contains(&k) => Ok(Some([n, k])),
            _ => Err(self.field(key, value, "two sizes, rows and columns")),
        }
    }

    fn string(&self, q: &Map<String, Value>, key: &str) -> Result<Option<String>, QuantConfigError> {
        match q.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(s)) => Ok(Some(s.clone())),
            Some(other) => Err(self.field(key, other, "a string")),
        }
    }

    fn algorithm(&self, algo: &str, layer: &str) -> Result<Option<Scheme>, QuantConfigError> {
        if NO_ALGORITHM.iter().any(|n| n.eq_ignore_ascii_case(algo)) {
            return Ok(None);
        }
        of_algorithm(algo).map(Some).ok_or_else(|| QuantConfigError::UnknownAlgorithm {
            file: self.file.clone(),
            layer: layer.into(),
            value: algo.into(),
        })
    }

    fn field(&self, key: &str, found: &Value, expected: &'static str) -> QuantConfigError {
        // Hostile values may be large; the start is enough to find them.
        let found = found.to_string().chars().take(80).collect();
        QuantConfigError::Field { file: self.file.clone(), key: key.into(), found, expected }
    }
}

fn strings(list: Option<&Value>) -> impl Iterator<Item = &str> {
    list.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}
