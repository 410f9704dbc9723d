//! From entries to output units: fused matrices, and one record per expert where a layer has experts.

use std::collections::BTreeMap;

use super::fuse::{Fusion, compatible, same_storage, split_module};
use super::{PlanError, PlannedTensor, describe};
use crate::catalog::{Entry, Storage};
use vt_bundle::Geometry;

/// What is placed as one piece of the image.
pub(super) enum Unit {
    /// A tensor.
    One(Box<PlannedTensor>),
    /// The tensors of a layer's experts: one record per expert holds all their planes.
    Experts(Vec<PlannedTensor>),
}

/// Placeholder for the expert's index in the names of an expert tensor's parts.
const EXPERT: &str = "{expert}";

/// `a.experts.7.b` as (`a.experts`, 7, `b`).
fn split_expert(name: &str) -> Option<(&str, u64, &str)> {
    let at = name.find(".experts.")?;
    let (path, rest) = name.split_at(at + ".experts".len());
    let (index, tail) = rest.strip_prefix('.')?.split_once('.')?;
    Some((path, index.parse().ok()?, tail))
}

/// Groups entries into units, fused where the parts allow it, in no particular order.
pub(super) fn collect(entries: Vec<Entry>, fusions: &[Fusion]) -> Result<Vec<Unit>, PlanError> {
    let mut plain = Vec::new();
    let mut layers: BTreeMap<String, BTreeMap<u64, Vec<Entry>>> = BTreeMap::new();
    for entry in entries {
        match split_expert(&entry.name).filter(|_| !fusions.is_empty()) {
            Some((path, index, _)) => {
                layers.entry(path.to_owned()).or_default().entry(index).or_default().push(entry);
            }
            None => plain.push(entry),
        }
    }
    let mut units = Vec::new();
    for (path, experts) in layers {
        match expert_tensors(&path, &experts, fusions)? {
            Some(tensors) => units.push(Unit::Experts(tensors)),
            // Experts that differ from one another stay tensors of their own.
            None => plain.extend(experts.into_values().flatten()),
        }
    }
    for (name, parts) in fuse(plain, fusions) {
        let (tensor, geometry) = describe(name, &parts)?;
        units.push(Unit::One(Box::new(PlannedTensor { tensor, geometry, sources: vec![parts] })));
    }
    Ok(units)
}

/// Fuses siblings; every entry is in exactly one result.
fn fuse(entries: Vec<Entry>, fusions: &[Fusion]) -> Vec<(String, Vec<Entry>)> {
    let mut by_name: BTreeMap<String, Entry> = entries.into_iter().map(|e| (e.name.clone(), e)).collect();
    let mut fused = Vec::new();
    for fusion in fusions {
        let lead = fusion.parts[0];
        let prefixes: Vec<String> = by_name
            .keys()
            .filter_map(|name| split_module(name).filter(|(_, module)| *module == lead))
            .map(|(prefix, _)| prefix.to_owned())
            .collect();
        for prefix in prefixes {
            let names: Vec<String> = fusion.parts.iter().map(|p| format!("{prefix}.{p}.weight")).collect();
            let found: Vec<&Entry> = names.iter().filter_map(|n| by_name.get(n)).collect();
            if found.len() == names.len() && compatible(&found) {
                let parts = names.iter().filter_map(|n| by_name.remove(n)).collect();
                fused.push((format!("{prefix}.{}.weight", fusion.fused), parts));
            }
        }
    }
    fused.extend(by_name.into_iter().map(|(name, entry)| (name, vec![entry])));
    fused
}

/// The tensors of a layer's experts, if all experts are alike: the same tensors in the same storage and shape.
fn expert_tensors(
    path: &str,
    experts: &BTreeMap<u64, Vec<Entry>>,
    fusions: &[Fusion],
) -> Result<Option<Vec<PlannedTensor>>, PlanError> {
    let whole = experts.keys().copied().eq(0..experts.len() as u64);
    let grouped: Vec<Vec<(String, Vec<Entry>)>> = experts
        .iter()
        .map(|(index, entries)| {
            let strip = format!("{path}.{index}.");
            let mut tensors = fuse(entries.clone(), fusions);
            for (name, _) in &mut tensors {
                *name = name.strip_prefix(&strip).unwrap_or(name).to_owned();
            }
            tensors.sort_by(|a, b| a.0.cmp(&b.0));
            tensors
        })
        .collect();
    let alike = |a: &[(String, Vec<Entry>)], b: &[(String, Vec<Entry>)]| {
        a.len() == b.len()
            && a.iter().zip(b).all(|(a, b)| {
                a.0 == b.0
                    && a.1.len() == b.1.len()
                    && a.1.iter().zip(&b.1).all(|(p, q)| p.cold == q.cold && same_shape(&p.storage, &q.storage))
            })
    };
    if !whole || !grouped.iter().all(|g| alike(&grouped[0], g)) {
        return Ok(None);
    }
    let mut tensors = Vec::new();
    for (t, (tail, parts)) in grouped[0].iter().enumerate() {
        let (mut tensor, geometry) = describe(format!("{path}.{tail}"), parts)?;
        if let Geometry::Rows { rows, row_bytes } = &geometry
            && *rows * *row_bytes == 0
        {
            return Ok(None);
        }
        for part in &mut tensor.parts {
            part.name = generic(path, &part.name);
            part.source = generic(path, &part.source);
            part.scale = None;
            part.input_scale = None;
            part.pre_quant_scale = part.pre_quant_scale.as_deref().map(|n| generic(path, n));
            if let Some(branch) = &mut part.low_rank {
                branch.down = generic(path, &branch.down);
                branch.up = generic(path, &branch.up);
            }
        }
        let sources = grouped.iter().map(|g| g[t].1.clone()).collect();
        tensors.push(PlannedTensor { tensor, geometry, sources });
    }
    Ok(Some(tensors))
}

/// A name of expert 0 with the index replaced by the placeholder; other names (stacked tensors) stay.
fn generic(path: &str, name: &str) -> String {
    match name.strip_prefix(path).and_then(|rest| rest.strip_prefix(".0.")) {
        Some(tail) => format!("{path}.{EXPERT}.{tail}"),
        None => name.to_owned(),
    }
}

fn same_shape(a: &Storage, b: &Storage) -> bool {
    match (a, b) {
        (Storage::Rows { dtype: d, shape: s, .. }, Storage::Rows { dtype: e, shape: t, .. }) => d == e && s == t,
        (Storage::Tiled { shape: s, .. }, Storage::Tiled { shape: t, .. }) => s == t && same_storage(a, b),
        (Storage::Raw { shape: s, id, .. }, Storage::Raw { shape: t, id: other, .. }) => s == t && id == other,
        _ => false,
    }
}
