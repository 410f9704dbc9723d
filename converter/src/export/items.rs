//! The tensors of an export: their names, types and shapes, in the order of the file.

use std::collections::{HashMap, HashSet};

use vt_bundle::Bundle;
use vt_bundle::geometry::dtype_bytes;
use vt_bundle::manifest::{Layout, Part, Tensor};

use super::ExportError;

/// One tensor of the exported file.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// Name in the file.
    pub name: String,
    /// Name of the bundle tensor.
    pub tensor: String,
    /// Index of the part.
    pub part: usize,
    /// Expert, 0 where there are none.
    pub expert: u64,
    /// Type in safetensors spelling.
    pub dtype: String,
    /// Shape of the part.
    pub shape: Vec<u64>,
    /// Bytes in the file.
    pub bytes: u64,
    /// Name, in the file's terms, of the `[K]` scale that is multiplied into the columns.
    pub pre_quant_scale: Option<String>,
}

/// The tensors of a bundle, one per part and expert.
#[derive(Debug, Default)]
pub(super) struct Items {
    /// Those of the file. Wide types come first and names are in order within a type, so that every tensor is aligned
    /// to its element.
    pub written: Vec<Item>,
    /// Scales that disappear into their weights, by name.
    pub folded: HashMap<String, Item>,
}

impl Items {
    /// The item of that name, whether it is written or folded.
    pub(super) fn find(&self, name: &str) -> Option<&Item> {
        self.folded.get(name).or_else(|| self.written.iter().find(|i| i.name == name))
    }
}

/// Collects the tensors of an export.
pub(super) fn collect(bundle: &Bundle) -> Result<Items, ExportError> {
    let folded_names = folded_scales(bundle);
    let mut items = Vec::new();
    let mut folded = HashMap::new();
    for tensor in &bundle.manifest().tensors {
        for (index, part) in tensor.parts.iter().enumerate() {
            for expert in 0..tensor.expert_count() {
                let name = expert_name(tensor, &part.name, expert);
                let item = item(tensor, part, index, expert, name);
                if folded_names.contains(&item.name) {
                    folded.insert(item.name.clone(), item);
                } else {
                    items.push(item);
                }
            }
        }
    }
    let mut by_name: HashMap<&str, &Item> = HashMap::new();
    for item in &items {
        if let Some(first) = by_name.insert(&item.name, item) {
            return Err(ExportError::Duplicate {
                path: bundle.dir().to_owned(),
                name: item.name.clone(),
                first: first.tensor.clone(),
                second: item.tensor.clone(),
            });
        }
    }
    items.sort_by(|a, b| (element_bytes(b), &a.name).cmp(&(element_bytes(a), &b.name)));
    Ok(Items { written: items, folded })
}

/// Names of the scales that disappear into their weights. A scale that a low-rank branch needs stays: the branch reads
/// the scaled input, `y += up (down (x * pre_quant_scale))`.
fn folded_scales(bundle: &Bundle) -> HashSet<String> {
    let mut folded = HashSet::new();
    let mut kept = HashSet::new();
    for tensor in &bundle.manifest().tensors {
        for part in &tensor.parts {
            if let Some(scale) = &part.pre_quant_scale {
                for expert in 0..tensor.expert_count() {
                    let name = expert_name(tensor, scale, expert);
                    if part.low_rank.is_some() {
                        kept.insert(name)
                    } else {
                        folded.insert(name)
                    };
                }
            }
        }
    }
    folded.retain(|name| !kept.contains(name));
    folded
}

fn item(tensor: &Tensor, part: &Part, index: usize, expert: u64, name: String) -> Item {
    let mut shape = tensor.shape.clone();
    if let Some(rows) = shape.first_mut() {
        *rows = part.rows;
    }
    let (dtype, element) = match &tensor.layout {
        // f64 would lose bits as f32.
        Layout::RowMajor { dtype } if !is_exact_in_f32(dtype) => {
            (dtype.to_uppercase(), dtype_bytes(dtype).unwrap_or(1))
        }
        _ => ("F32".to_owned(), 4),
    };
    let bytes = shape.iter().product::<u64>() * element;
    let pre_quant_scale = part.pre_quant_scale.as_ref().map(|scale| expert_name(tensor, scale, expert));
    Item { name, tensor: tensor.name.clone(), part: index, expert, dtype, shape, bytes, pre_quant_scale }
}

/// Whether a plain type is floating point and every value of it is an f32.
fn is_exact_in_f32(dtype: &str) -> bool {
    matches!(dtype, "f32" | "f16" | "bf16" | "f8_e4m3" | "f8_e5m2" | "f8_e8m0")
}

fn element_bytes(item: &Item) -> u64 {
    dtype_bytes(&item.dtype.to_lowercase()).unwrap_or(1)
}

/// Stands for the expert's index in the names of an expert tensor's parts.
const EXPERT: &str = "{expert}";

/// The name of one expert's tensor.
fn expert_name(tensor: &Tensor, name: &str, expert: u64) -> String {
    match &tensor.experts {
        None => name.to_owned(),
        Some(_) if name.contains(EXPERT) => name.replace(EXPERT, &expert.to_string()),
        Some(_) => format!("{name}.{expert}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vt_bundle::manifest::{Experts, Placement, ScaleExactness};

    #[test]
    fn experts_get_their_index() {
        let mut tensor = Tensor {
            name: "t".into(),
            placement: Placement::Image,
            shape: vec![1],
            layout: Layout::RowMajor { dtype: "bf16".into() },
            decode: "plain.bf16@1".into(),
            scales: ScaleExactness::Exact,
            planes: vec![],
            parts: vec![],
            experts: None,
            min_compute_capability: None,
        };
        assert_eq!(expert_name(&tensor, "a.experts.{expert}.up.weight", 7), "a.experts.{expert}.up.weight");
        tensor.experts = Some(Experts {
            count: 8,
            record_offset: 0,
            record_size: 0,
            stride: Some(4096),
            offsets: None,
            record_hashes: 0,
        });
        assert_eq!(expert_name(&tensor, "a.experts.{expert}.up.weight", 7), "a.experts.7.up.weight");
        assert_eq!(expert_name(&tensor, "a.up.weight", 7), "a.up.weight.7");
    }
}
