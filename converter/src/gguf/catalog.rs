//! From the tensors of a GGUF model to the catalog that the planner works on.

use vt_bundle::codec::{MatrixShape, ggml};
use vt_bundle::row_order::RowOrder;

use super::error::{GgufError, printable};
use super::names::{MappedName, RopeRows};
use super::{Architecture, GgufMetadata};
use crate::catalog::{Catalog, Entry, Slice, Storage};
use crate::source::{Checkpoint, PlainDtype, SourceDtype, SourceTensor};

/// Describes every tensor of an opened model. Stacks of experts are cut into one entry per expert.
///
/// # Errors
/// [`GgufError::TensorShape`] where a tensor does not have the rows or experts that the metadata say.
pub fn catalog(checkpoint: &Checkpoint, metadata: &GgufMetadata) -> Result<Catalog, GgufError> {
    let mut catalog = Catalog {
        architecture: checkpoint.config["model_type"].as_str().unwrap_or_default().into(),
        conventions: conventions(checkpoint, metadata),
        warnings: Vec::new(),
        ..Catalog::default()
    };
    for (index, (tensor, mapped)) in checkpoint.tensors.iter().zip(&metadata.names).enumerate() {
        let file = || checkpoint.files[tensor.file].path.display().to_string();
        check_shape(tensor, mapped, metadata, file)?;
        if mapped.name.ends_with(".input_scale") {
            // Its value is with its matrix; its bytes go to the restore data.
            continue;
        }
        if mapped.expert_stack {
            // Gate rows, then up rows: two matrices, as where the file holds them apart.
            let names = match mapped.name.split_once("gate_up_proj") {
                Some((head, tail)) => vec![format!("{head}gate_proj{tail}"), format!("{head}up_proj{tail}")],
                None => vec![mapped.name.clone()],
            };
            let mut shape = tensor.shape[1..].to_vec();
            shape[0] /= names.len() as u64;
            let experts = tensor.shape[0];
            let len = tensor.len / experts / names.len() as u64;
            let pieces = (0..experts).flat_map(|expert| names.iter().map(move |name| (expert, name)));
            for (piece, (expert, name)) in pieces.enumerate() {
                let name = name.replace("{}", &expert.to_string());
                let data = Slice { tensor: index, offset: piece as u64 * len, len };
                catalog.entries.push(entry(checkpoint, tensor, mapped, name, &shape, data, expert));
            }
        } else {
            // Scales of experts stay one vector beside the stack.
            let name = mapped.name.replace(".{}", "");
            let data = Slice { tensor: index, offset: 0, len: tensor.len };
            catalog.entries.push(entry(checkpoint, tensor, mapped, name, &tensor.shape, data, 0));
        }
    }
    Ok(catalog)
}

fn entry(
    checkpoint: &Checkpoint,
    tensor: &SourceTensor,
    mapped: &MappedName,
    name: String,
    shape: &[u64],
    data: Slice,
    expert: u64,
) -> Entry {
    let mut entry = Entry::new(name, tensor.name.clone(), storage(tensor.dtype, shape, data));
    entry.row_order = mapped.row_order;
    entry.cold = mapped.cold;
    if let Some(stem) = tensor.name.strip_suffix(".weight") {
        entry.scale = scalar(checkpoint, &format!("{stem}.scale"), expert);
        entry.input_scale = scalar(checkpoint, &format!("{stem}.input_scale"), expert);
    }
    entry
}

/// One value of an F32 tensor: the expert's, or the only one.
fn scalar(checkpoint: &Checkpoint, name: &str, expert: u64) -> Option<f32> {
    let tensor = checkpoint.tensor(name).filter(|t| t.dtype == SourceDtype::Plain(PlainDtype::F32))?;
    let words = checkpoint.data(tensor).as_chunks::<4>().0;
    let place = if words.len() == 1 { 0 } else { usize::try_from(expert).ok()? };
    words.get(place).map(|w| f32::from_le_bytes(*w))
}

fn storage(dtype: SourceDtype, shape: &[u64], data: Slice) -> Storage {
    let id = match dtype {
        SourceDtype::Plain(plain) => {
            return Storage::Rows { dtype: plain.manifest_name(), shape: shape.to_vec(), data };
        }
        SourceDtype::Ggml(id) => id,
    };
    // The parser lets whole blocks through only; a scalar has no blocks.
    let k = shape.last().copied().unwrap_or(1);
    let n: u64 = shape[..shape.len().saturating_sub(1)].iter().product();
    if let Some(codec) = ggml::tiled(id) {
        let shape = MatrixShape { n: n as usize, k: k as usize, group_size: codec.group_size, block: [0, 0] };
        return Storage::Tiled { codec, shape, inputs: vec![data], all_zero: false };
    }
    let (name, row_bytes) = match ggml::raw::by_id(id) {
        Some(raw) => (raw.name, k / raw.weights as u64 * raw.bytes as u64),
        // Every block type of the table is tiled or raw; a test holds the tables together.
        None => ("unknown", data.len / n.max(1)),
    };
    Storage::Raw { id, name, shape: vec![n, k], row_bytes, data }
}

/// Rows, columns and experts as the metadata say, where the order of rows or the cut depends on them.
fn check_shape(
    tensor: &SourceTensor,
    mapped: &MappedName,
    metadata: &GgufMetadata,
    file: impl Fn() -> String,
) -> Result<(), GgufError> {
    let facts = &metadata.facts;
    let wrong = |expected: String| GgufError::TensorShape {
        file: file(),
        tensor: printable(tensor.name.as_bytes()),
        found: tensor.shape.clone(),
        expected,
    };
    let rows = tensor.shape.first().copied().unwrap_or(1);
    if let (RowOrder::RopeInterleaved { head_dim }, Some(layer)) = (mapped.row_order, mapped.layer) {
        let heads = if tensor.name.contains(".attn_q.") { &facts.heads } else { &facts.kv_heads };
        let heads = heads.get(layer as usize).copied().unwrap_or(0);
        if !mapped.row_order.fits(rows) || heads.checked_mul(u64::from(head_dim)) != Some(rows) {
            return Err(wrong(format!("{heads} heads of {head_dim} rows (an even number) in the first axis")));
        }
    }
    if mapped.expert_stack && (tensor.shape.len() < 2 || rows != facts.experts) {
        return Err(wrong(format!("{} experts in the first axis", facts.experts)));
    }
    if mapped.expert_stack && mapped.name.contains("gate_up_proj") && !tensor.shape[1].is_multiple_of(2) {
        return Err(wrong("an even number of rows per expert: gate, then up".into()));
    }
    if tensor.name == "token_embd.weight" && tensor.shape.last() != Some(&facts.hidden) {
        return Err(wrong(format!("{} columns (embedding_length)", facts.hidden)));
    }
    Ok(())
}

/// In what the stored values differ from the Hugging Face checkpoint.
fn conventions(checkpoint: &Checkpoint, metadata: &GgufMetadata) -> Vec<String> {
    let Architecture { name, rope, norm_plus_one, .. } = *metadata.architecture;
    let has = |end: &str| checkpoint.tensors.iter().any(|t| t.name.ends_with(end));
    let mut list = Vec::new();
    if norm_plus_one {
        // Qwen's linear_attn.norm excepted.
        list.push("norm-stores-1-plus-w");
    }
    if rope == RopeRows::Interleaved {
        list.push("rope-interleaved");
    }
    if has(".ssm_a") {
        list.push("ssm-a-stores-minus-exp");
    }
    if matches!(name, "qwen35" | "qwen35moe") {
        list.push("v-heads-tiled");
    }
    if has(".scale") {
        list.push("scale-multiplies-output");
    }
    list.into_iter().map(String::from).collect()
}
