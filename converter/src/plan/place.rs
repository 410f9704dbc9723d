//! Offsets: every plane at a multiple of 256 bytes, every expert record at a multiple of 4096.

use vt_bundle::layout::{PLANE_ALIGN, RECORD_ALIGN};
use vt_bundle::manifest::{Experts, Placement, Plane};
use vt_bundle::tile::round_up;

use super::experts::Unit;
use super::{Plan, PlanError, PlannedTensor, RecordSpan};

impl Unit {
    fn tensors(&self) -> &[PlannedTensor] {
        match self {
            Unit::One(tensor) => std::slice::from_ref(tensor),
            Unit::Experts(tensors) => tensors,
        }
    }
}

/// A name as a sort key in which numbers count as numbers: layer 10 follows layer 9.
fn natural_key(name: &str) -> Vec<(String, u64)> {
    let mut key = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, tail) = rest.split_at(digits);
        let end = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        // Numbers beyond 64 bits sort last; the text before still tells them apart from others.
        key.push((text.to_owned(), tail[..end].parse().unwrap_or(u64::MAX)));
        rest = &tail[end..];
    }
    key
}

/// Gives every unit its place.
pub(super) fn place(mut units: Vec<Unit>) -> Result<Plan, PlanError> {
    // The order of use: the embedding, the layers, what follows them.
    let first = |name: &str| !name.contains("embed_tokens");
    units.sort_by_cached_key(|u| {
        let tensor = &u.tensors()[0].tensor;
        (tensor.placement, first(&tensor.name), natural_key(&tensor.name), tensor.name.clone())
    });
    let mut plan =
        Plan { tensors: Vec::new(), image_bytes: 0, cold_bytes: 0, records: Vec::new(), warnings: Vec::new() };
    for unit in units {
        let placement = unit.tensors()[0].tensor.placement;
        let start = plan.space_bytes(placement);
        let name = unit.tensors()[0].tensor.name.clone();
        let end = match unit {
            Unit::One(mut planned) => {
                let end = place_planes(&mut planned, start);
                plan.tensors.push(*planned);
                end
            }
            Unit::Experts(tensors) => place_records(&mut plan, tensors, start),
        };
        let end = end.and_then(|e| round_up(e, PLANE_ALIGN)).ok_or(PlanError::TooLarge { tensor: name })?;
        match placement {
            Placement::Image => plan.image_bytes = end,
            Placement::Cold => plan.cold_bytes = end,
        }
    }
    Ok(plan)
}

/// Places a tensor's planes from `start` on; returns the end, `None` on overflow.
fn place_planes(planned: &mut PlannedTensor, start: u64) -> Option<u64> {
    let mut at = start;
    for (name, dtype, size) in planned.geometry.planes(&planned.tensor.layout) {
        let offset = round_up(at, PLANE_ALIGN)?;
        at = offset.checked_add(size)?;
        planned.tensor.planes.push(Plane { name, dtype, offset, size });
    }
    Some(at)
}

fn place_records(plan: &mut Plan, tensors: Vec<PlannedTensor>, start: u64) -> Option<u64> {
    let record_offset = round_up(start, RECORD_ALIGN)?;
    let mut placed = Vec::with_capacity(tensors.len());
    let mut end = record_offset;
    for mut planned in tensors {
        end = place_planes(&mut planned, end)?;
        placed.push(planned);
    }
    let record_size = end.checked_sub(record_offset)?;
    let stride = round_up(record_size, RECORD_ALIGN)?;
    let count = placed.first()?.sources.len() as u64;
    let placement = placed.first()?.tensor.placement;
    let experts = Experts {
        count,
        record_offset,
        record_size,
        stride: Some(stride),
        offsets: None,
        record_hashes: plan.records.len() as u64,
    };
    for mut planned in placed {
        planned.tensor.experts = Some(experts.clone());
        plan.tensors.push(planned);
    }
    for expert in 0..count {
        let offset = record_offset.checked_add(expert.checked_mul(stride)?)?;
        plan.records.push(RecordSpan { placement, offset, size: record_size });
    }
    record_offset.checked_add(count.checked_mul(stride)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_sort_as_numbers() {
        let mut names = ["m.layers.10.a", "m.layers.9.b", "m.layers.9.a", "m.norm", "lm_head"];
        names.sort_by_key(|n| natural_key(n));
        assert_eq!(names, ["lm_head", "m.layers.9.a", "m.layers.9.b", "m.layers.10.a", "m.norm"]);
    }
}
