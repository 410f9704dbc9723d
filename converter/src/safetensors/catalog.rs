//! From the roles of tensors to the catalog that the planner works on, and the decoder that goes with it.

use std::collections::HashMap;
use std::ops::Range;

use serde_json::Value;
use vt_bundle::codec::{self, Codec, MatrixShape};
use vt_bundle::manifest::{KvCache, KvScales, LowRank};

use super::resolve::{Fp8Scales, IntScales, Resolution, ResolvedWeight, SourceEncoding as Encoding};
use crate::catalog::{Catalog, Entry, Slice, SourceDecoder, Storage};
use crate::dequant::hf::{dequantize_rows, plain_to_f32};
use crate::source::{Checkpoint, PlainDtype, SourceDtype};

/// Path components below which nothing belongs to the text model: vision and audio towers, multi-token prediction.
const COLD: [&str; 12] = [
    "visual",
    "vision_tower",
    "vision_model",
    "vision_embed_tokens",
    "multi_modal_projector",
    "embed_vision",
    "audio_tower",
    "audio_model",
    "embed_audio",
    "image_newline",
    "mtp",
    "mtp_block",
];

/// Describes every tensor of an opened checkpoint. Stacks of experts are cut into one entry per expert.
pub fn catalog(checkpoint: &Checkpoint, resolution: &Resolution) -> Catalog {
    let cold = Cold::new(checkpoint);
    let mut entries = Vec::new();
    for w in &resolution.weights {
        for expert in 0..w.experts() {
            let mut entry = tiled(checkpoint, w, expert);
            entry.cold = cold.holds(&entry.name);
            entries.push(entry);
        }
        let beside = w.pre_quant_scale.into_iter().chain(w.svd.iter().flat_map(|s| [s.a, s.b]));
        entries.extend(beside.filter_map(|tensor| rows(checkpoint, tensor, &cold)));
    }
    entries.extend(resolution.plain.iter().filter_map(|&tensor| rows(checkpoint, tensor, &cold)));
    Catalog {
        entries,
        architecture: checkpoint.config.get("model_type").and_then(Value::as_str).unwrap_or_default().into(),
        conventions: Vec::new(),
        kv_cache: kv_cache(resolution),
        declared: resolution.declared.clone(),
        warnings: Vec::new(),
    }
}

/// Name of the entry of a weight, or of one expert of a stack.
fn entry_name(w: &ResolvedWeight, expert: u64) -> String {
    match (w.stack, w.module.rsplit_once('.')) {
        (Some(_), Some((path, last))) => format!("{path}.{expert}.{last}.weight"),
        (Some(_), None) => format!("{}.{expert}.weight", w.module),
        (None, _) => w.name.clone(),
    }
}

/// Decoder of safetensors weights, by the names of the catalog's entries.
#[derive(Debug)]
pub struct HfDecoder {
    weights: Vec<ResolvedWeight>,
    /// Entry name to weight and expert.
    by_name: HashMap<String, (usize, u64)>,
}

impl HfDecoder {
    /// A decoder of the weights of a resolved checkpoint.
    pub fn new(resolution: Resolution) -> Self {
        let weights = resolution.weights;
        let named =
            |(i, w): (usize, &ResolvedWeight)| (0..w.experts()).map(|e| (entry_name(w, e), (i, e))).collect::<Vec<_>>();
        let by_name = weights.iter().enumerate().flat_map(named).collect();
        HfDecoder { weights, by_name }
    }
}

impl SourceDecoder for HfDecoder {
    fn decode_rows(&self, checkpoint: &Checkpoint, entry: &Entry, rows: Range<u64>, out: &mut [f32]) {
        if let Some(&(weight, expert)) = self.by_name.get(&entry.name) {
            let w = &self.weights[weight];
            let first = expert * w.shape[0];
            dequantize_rows(checkpoint, w, first + rows.start..first + rows.end, out);
        } else if let Storage::Rows { data, .. } = &entry.storage {
            let columns = out.len() as u64 / (rows.end - rows.start).max(1);
            // Integers have no values of this kind; they are compared as bytes.
            let _ = plain_to_f32(checkpoint, &checkpoint.tensors[data.tensor], rows.start * columns, out);
        }
    }
}

/// An entry of plain elements; `None` for an empty tensor, of which there is nothing to store.
fn rows(checkpoint: &Checkpoint, tensor: usize, cold: &Cold) -> Option<Entry> {
    let t = &checkpoint.tensors[tensor];
    let SourceDtype::Plain(dtype) = t.dtype else { return None };
    if t.len == 0 {
        return None;
    }
    let data = Slice { tensor, offset: 0, len: t.len };
    let storage = Storage::Rows { dtype: dtype.manifest_name(), shape: t.shape.clone(), data };
    let mut entry = Entry::new(t.name.clone(), t.name.clone(), storage);
    // Integers are no weights of a text model; they are position tables and counters.
    let is_float = matches!(dtype, PlainDtype::F16 | PlainDtype::Bf16 | PlainDtype::F32 | PlainDtype::F64);
    entry.cold = !is_float || cold.holds(&t.name);
    Some(entry)
}

/// An entry of one quantised matrix: a weight, or one expert of a stack.
fn tiled(checkpoint: &Checkpoint, w: &ResolvedWeight, expert: u64) -> Entry {
    let slice = |tensor: usize| {
        let t = &checkpoint.tensors[tensor];
        let part = w.expert_data(checkpoint, tensor, expert).len() as u64;
        // A scalar that all experts share is one slice for all of them.
        Slice { tensor, offset: if part == t.len { 0 } else { expert * part }, len: part }
    };
    let [n, k] = w.shape;
    let (group_size, block) = match w.encoding {
        Encoding::Nvfp4 { group, .. }
        | Encoding::Int4ModelOpt { group }
        | Encoding::Packed { group, .. }
        | Encoding::Gptq { group, .. }
        | Encoding::Awq { group, .. }
        | Encoding::Int8 { scales: IntScales::Group(group), .. } => (group, [0, 0]),
        Encoding::Mxfp4 { .. } | Encoding::Mxfp8 => (32, [0, 0]),
        Encoding::Fp8 { scales: Fp8Scales::Block(block) } => (0, block),
        Encoding::Fp8 { .. } | Encoding::Int8 { scales: IntScales::Tensor, .. } => (0, [0, 0]),
    };
    let is_nvfp4 = matches!(w.encoding, Encoding::Nvfp4 { .. });
    let inputs =
        [w.weight, w.scale].into_iter().chain(w.global.filter(|_| is_nvfp4)).chain(w.zeros).map(slice).collect();
    let storage = Storage::Tiled {
        codec: codec_of(checkpoint, w),
        shape: MatrixShape {
            n: n as usize,
            k: k as usize,
            group_size: group_size as usize,
            block: block.map(|b| b as usize),
        },
        inputs,
        all_zero: w.all_zero,
    };
    let mut entry = Entry::new(entry_name(w, expert), checkpoint.tensors[w.weight].name.clone(), storage);
    let value = |tensor: usize| {
        let t = &checkpoint.tensors[tensor];
        let len = t.shape.iter().product::<u64>();
        let mut out = [0.0];
        plain_to_f32(checkpoint, t, if len == w.experts() { expert } else { 0 }, &mut out)?;
        (len == 1 || len == w.experts()).then_some(out[0])
    };
    let is_tensor_scale = matches!(
        w.encoding,
        Encoding::Fp8 { scales: Fp8Scales::Tensor } | Encoding::Int8 { scales: IntScales::Tensor, .. }
    );
    entry.scale = w.global.filter(|_| is_nvfp4).or(is_tensor_scale.then_some(w.scale)).and_then(value);
    entry.input_scale = w.input_scale.and_then(value);
    entry.pre_quant_scale = w.pre_quant_scale.map(|p| checkpoint.tensors[p].name.clone());
    entry.low_rank =
        w.svd.map(|s| LowRank { down: checkpoint.tensors[s.a].name.clone(), up: checkpoint.tensors[s.b].name.clone() });
    entry
}

/// The codec of a resolved weight: one name per storage format and type of scales.
fn codec_of(checkpoint: &Checkpoint, w: &ResolvedWeight) -> &'static dyn Codec {
    let scales = match checkpoint.tensors[w.scale].dtype {
        SourceDtype::Plain(PlainDtype::Bf16) => "bf16",
        SourceDtype::Plain(PlainDtype::F16) => "f16",
        SourceDtype::Plain(PlainDtype::U8 | PlainDtype::F8E8M0) => "e8m0",
        _ => "f32",
    };
    let transposed = w.stack.is_some_and(|s| s.transposed);
    let name = match w.encoding {
        Encoding::Nvfp4 { divides: true, .. } => "nvfp4.compressed-tensors@1".into(),
        Encoding::Nvfp4 { .. } if transposed => "nvfp4.modelopt.transposed@1".into(),
        Encoding::Nvfp4 { .. } => "nvfp4.modelopt@1".into(),
        Encoding::Mxfp4 { .. } => "mxfp4@1".into(),
        Encoding::Mxfp8 => "mxfp8@1".into(),
        Encoding::Fp8 { scales: Fp8Scales::Tensor } if transposed => format!("fp8.tensor.{scales}.transposed@1"),
        Encoding::Fp8 { scales: Fp8Scales::Tensor } => format!("fp8.tensor.{scales}@1"),
        Encoding::Fp8 { scales: Fp8Scales::Channel } => format!("fp8.channel.{scales}@1"),
        Encoding::Fp8 { scales: Fp8Scales::Block(_) } => format!("fp8.block.{scales}@1"),
        Encoding::Int4ModelOpt { .. } => format!("int4.modelopt.{scales}@1"),
        Encoding::Int8 { scales: IntScales::Tensor, .. } => format!("int8.tensor.{scales}@1"),
        Encoding::Int8 { zero_points: true, .. } => format!("int8.zeros.{scales}@1"),
        Encoding::Int8 { .. } => format!("int8.{scales}@1"),
        Encoding::Packed { bits, zero_points: true, .. } => format!("int{bits}.packed.zeros.{scales}@1"),
        Encoding::Packed { bits, .. } => format!("int{bits}.packed.{scales}@1"),
        Encoding::Gptq { bits, zero_minus_one: true, .. } => format!("int{bits}.gptq.{scales}@1"),
        Encoding::Gptq { bits, .. } => format!("int{bits}.gptq-v2.{scales}@1"),
        Encoding::Awq { bits, .. } => format!("int{bits}.awq.{scales}@1"),
    };
    codec::find(&name).expect("the resolver lets only combinations through that have a codec")
}

/// KV-cache scales by layer; attention modules outside a numbered layer have no place in the manifest.
fn kv_cache(resolution: &Resolution) -> Option<KvCache> {
    let mut layers: Vec<KvScales> = resolution
        .kv_scales
        .iter()
        .filter_map(|s| {
            let layer = layer_of(&s.module)?;
            Some(KvScales { layer, k_scale: s.k.map(|(_, v)| v), v_scale: s.v.map(|(_, v)| v) })
        })
        .collect();
    layers.sort_by_key(|s| s.layer);
    let declared = resolution.kv_cache.as_deref();
    if layers.is_empty() && declared.is_none() {
        return None;
    }
    Some(KvCache { dtype: declared.unwrap_or("FP8").to_ascii_lowercase(), layers })
}

/// The number after `layers` in a path.
fn layer_of(path: &str) -> Option<u64> {
    let mut components = path.split('.');
    components.find(|c| *c == "layers")?;
    components.next()?.parse().ok()
}

/// What goes to the cold segments.
struct Cold {
    /// Layers of the text model; a checkpoint with more holds prediction heads behind them.
    layers: u64,
}

impl Cold {
    fn new(checkpoint: &Checkpoint) -> Self {
        let config = &checkpoint.config;
        let layers = [config, &config["text_config"]].iter().find_map(|c| c.get("num_hidden_layers")?.as_u64());
        Cold { layers: layers.unwrap_or(u64::MAX) }
    }

    fn holds(&self, name: &str) -> bool {
        name.split('.').any(|component| COLD.contains(&component))
            || (name.starts_with("model.layers.") && layer_of(name).is_some_and(|layer| layer >= self.layers))
    }
}
