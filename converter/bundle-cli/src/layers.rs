//! Tensors in groups: what repeats over the layers of a model becomes one line.

use std::collections::{BTreeSet, HashMap};

use vt_bundle::manifest::{Layout, Placement, Tensor};

/// Tensors that are alike apart from the numbers in their names.
#[derive(Clone, Debug)]
pub struct Group {
    /// Their name with `*` for each number.
    pub pattern: String,
    /// The first number of each, in order.
    pub indices: BTreeSet<u64>,
    /// How many there are.
    pub tensors: u64,
    /// Shape of one (of one expert).
    pub shape: Vec<u64>,
    /// Experts in one, if it has any.
    pub experts: Option<u64>,
    /// Layout for people.
    pub layout: String,
    /// The `decode` name.
    pub decode: String,
    /// Address space.
    pub placement: Placement,
    /// Logical elements of all.
    pub elements: u64,
    /// Bytes of the planes of all.
    pub bytes: u64,
}

/// Logical elements of a tensor, all experts together.
pub fn elements(tensor: &Tensor) -> u64 {
    tensor.elements().unwrap_or(0).saturating_mul(tensor.expert_count())
}

/// Bytes of a tensor's planes, all experts together.
pub fn plane_bytes(tensor: &Tensor) -> u64 {
    tensor.planes.iter().map(|p| p.size).sum::<u64>().saturating_mul(tensor.expert_count())
}

/// Stored bits per logical element.
pub fn bits_per_weight(bytes: u64, elements: u64) -> f64 {
    if elements == 0 { 0.0 } else { bytes as f64 * 8.0 / elements as f64 }
}

/// A layout for people: `marlin-16x64@1 e2m1 g16`.
pub fn layout(layout: &Layout) -> String {
    match layout {
        Layout::RowMajor { dtype } => format!("row-major@1 {dtype}"),
        Layout::GgmlRaw { ggml_type, .. } => format!("ggml-raw@1 {ggml_type}"),
        Layout::Marlin { encoding, group_size, block, .. } => {
            let mut text = format!("marlin-16x64@1 {encoding}");
            if let Some(group) = group_size {
                text.push_str(&format!(" g{group}"));
            }
            if let Some([rows, columns]) = block {
                text.push_str(&format!(" b{rows}x{columns}"));
            }
            text
        }
    }
}

/// Groups tensors; groups come in the order in which the model runs them: embedding, layers, head.
pub fn groups(tensors: &[Tensor]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut by_key: HashMap<String, usize> = HashMap::new();
    for tensor in tensors {
        let (pattern, index) = pattern(&tensor.name);
        let experts = tensor.experts.as_ref().map(|e| e.count);
        let layout = layout(&tensor.layout);
        let key = format!("{pattern} {:?} {experts:?} {layout} {} {:?}", tensor.shape, tensor.decode, tensor.placement);
        let at = *by_key.entry(key).or_insert_with(|| {
            groups.push(Group {
                pattern,
                indices: BTreeSet::new(),
                tensors: 0,
                shape: tensor.shape.clone(),
                experts,
                layout,
                decode: tensor.decode.clone(),
                placement: tensor.placement,
                elements: 0,
                bytes: 0,
            });
            groups.len() - 1
        });
        let group = &mut groups[at];
        group.indices.extend(index);
        group.tensors += 1;
        group.elements += elements(tensor);
        group.bytes += plane_bytes(tensor);
    }
    groups
        .sort_by_key(|g| (g.placement, !g.pattern.contains("embed"), g.indices.is_empty(), g.indices.first().copied()));
    groups
}

/// A name with `*` for each number between dots, and the first of these numbers.
pub fn pattern(name: &str) -> (String, Option<u64>) {
    let mut first = None;
    let components = name.split('.').map(|component| match component.parse::<u64>() {
        Ok(n) => {
            first.get_or_insert(n);
            "*"
        }
        Err(_) => component,
    });
    let pattern = components.collect::<Vec<_>>().join(".");
    (pattern, first)
}

/// Numbers as ranges: `0-3,5`.
pub fn ranges(numbers: &BTreeSet<u64>) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => runs.push((n, n)),
        }
    }
    let text = |&(a, b): &(u64, u64)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    runs.iter().map(text).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ranges() {
        assert_eq!(pattern("model.layers.12.mlp.experts.3.up"), ("model.layers.*.mlp.experts.*.up".into(), Some(12)));
        assert_eq!(pattern("lm_head.weight"), ("lm_head.weight".into(), None));
        assert_eq!(ranges(&BTreeSet::from([0, 1, 2, 3, 5, 8, 9])), "0-3,5,8-9");
        assert_eq!(ranges(&BTreeSet::new()), "");
    }
}
