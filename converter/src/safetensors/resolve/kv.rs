//! Scales of a quantised KV cache, under the names that exporters have used.

use std::collections::BTreeMap;

use super::detect::scalar;
use super::{ResolveError, Table};
use crate::safetensors::quant_config::QuantConfig;

/// The KV-cache scales of one attention module. `cached = value / scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct KvScale {
    /// Path of the attention module (`model.layers.0.self_attn`).
    pub module: String,
    /// Scale of the keys: tensor and value.
    pub k: Option<(usize, f32)>,
    /// Scale of the values; the same tensor as the keys' where one serves both.
    pub v: Option<(usize, f32)>,
}

/// Suffixes of scale tensors, and whether they serve keys, values.
const NAMES: [(&str, bool, bool); 11] = [
    (".k_proj.k_scale", true, false),
    (".v_proj.v_scale", false, true),
    (".k_proj.output_scale", true, false),
    (".v_proj.output_scale", false, true),
    (".attn.k_scale", true, false),
    (".attn.v_scale", false, true),
    (".k_scale", true, false),
    (".v_scale", false, true),
    (".attn.kv_scale", true, true),
    (".kv_cache.scaling_factor", true, true),
    (".kv_scale", true, true),
];

/// Collects the scales; a cache announced without scales earns a warning.
pub(super) fn collect(
    table: &mut Table<'_>,
    config: &QuantConfig,
    warnings: &mut Vec<String>,
) -> Result<Vec<KvScale>, ResolveError> {
    let mut modules: BTreeMap<String, KvScale> = BTreeMap::new();
    for index in 0..table.checkpoint.tensors.len() {
        if table.used[index] {
            continue;
        }
        let name = &table.checkpoint.tensors[index].name;
        let Some((module, (_, for_k, for_v))) = NAMES.iter().find_map(|n| Some((name.strip_suffix(n.0)?, n))) else {
            continue;
        };
        let value = scalar(table, index)?;
        if !(value.is_finite() && value > 0.0) {
            return Err(ResolveError::Global { file: table.file(index), tensor: name.clone(), value, nan: "value" });
        }
        let entry =
            modules.entry(module.to_owned()).or_insert_with(|| KvScale { module: module.to_owned(), k: None, v: None });
        for (slot, wanted) in [(&mut entry.k, *for_k), (&mut entry.v, *for_v)] {
            // Where one scale is there under two names, the second stays a tensor of its own.
            if wanted && slot.is_none() {
                *slot = Some((index, value));
                table.used[index] = true;
            }
        }
    }
    if let (Some(algo), true) = (&config.kv_cache, modules.is_empty()) {
        warnings.push(format!(
            "{} announces a KV cache in {algo}, but no scale for it is stored; 1.0 is used where such a cache is asked for",
            config.file()
        ));
    }
    Ok(modules.into_values().collect())
}
