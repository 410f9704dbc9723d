//! Tensor-parallel slices: which bytes of the image each rank of a degree needs.
//!
//! A rank takes its share by ranges computed from the manifest, so that one bundle serves every degree that its shapes
//! allow. Matrices whose outputs are divided (q, k, v, gate, up) are cut along N: a run of tiles in each tile row, per
//! part. Matrices that read a divided input (o, down) are cut along K: whole tile rows. The rest is replicated: every
//! rank has all of it. The scheme is the one of Shoeybi et al., Megatron-LM, 2019.

use serde::Serialize;

use crate::geometry::Geometry;
use crate::manifest::{Placement, Tensor};
use crate::reader::Bundle;

mod rules;
mod runs;

pub use rules::{Heads, Section, SliceError, Split};
pub use runs::{PlaneRuns, Run};

/// The shares of all ranks.
#[derive(Clone, Debug, Serialize)]
pub struct SlicePlan {
    /// One entry per rank.
    pub ranks: Vec<RankSlice>,
    /// Bytes of the planes of the image.
    pub image_bytes: u64,
    /// Names of the tensors that every rank has in full, with the bytes of each.
    pub replicated: Vec<(String, u64)>,
}

/// The share of one rank.
#[derive(Clone, Debug, Serialize)]
pub struct RankSlice {
    /// Rank, from 0.
    pub rank: u64,
    /// Bytes of all its ranges.
    pub bytes: u64,
    /// Its share of each tensor of the image, in the order of the manifest.
    pub tensors: Vec<TensorSlice>,
}

/// One rank's share of one tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorSlice {
    /// Name of the tensor.
    pub name: String,
    /// Axis along which it is cut.
    pub split: Split,
    /// The logical rows or columns of each part.
    pub sections: Vec<Section>,
    /// Byte ranges per plane, for expert 0 where there are experts; the others follow at the tensor's stride.
    pub planes: Vec<PlaneRuns>,
    /// Experts, 1 for a tensor without.
    pub experts: u64,
    /// Bytes of all ranges, all experts together.
    pub bytes: u64,
}

impl SlicePlan {
    /// Plans a degree.
    ///
    /// # Errors
    /// [`SliceError`] with the numbers, if tiles, groups, blocks or heads do not allow the degree.
    pub fn new(bundle: &Bundle, degree: u64) -> Result<Self, SliceError> {
        if degree == 0 {
            return Err(SliceError::Degree);
        }
        let model = &bundle.manifest().model;
        let heads = Heads::of(&model.config);
        let mut ranks: Vec<_> = (0..degree).map(|rank| RankSlice { rank, bytes: 0, tensors: Vec::new() }).collect();
        let mut plan = Self { ranks: Vec::new(), image_bytes: 0, replicated: Vec::new() };
        for (tensor, geometry) in bundle.tensors().filter(|(t, _)| t.placement == Placement::Image) {
            let whole = tensor.planes.iter().map(|p| p.size).sum::<u64>() * tensor.expert_count();
            plan.image_bytes += whole;
            let split = rules::split(tensor, geometry, degree);
            if split == Split::Replicated {
                plan.replicated.push((tensor.name.clone(), whole));
            }
            for rank in &mut ranks {
                let slice = share(tensor, geometry, &model.architecture, split, &heads, degree, rank.rank)?;
                rank.bytes += slice.bytes;
                rank.tensors.push(slice);
            }
        }
        plan.ranks = ranks;
        Ok(plan)
    }

    /// Bytes that ranks have beyond the image: replicated tensors, KV heads and scales, counted once less than stored.
    pub fn extra_bytes(&self) -> u64 {
        self.ranks.iter().map(|r| r.bytes).sum::<u64>().saturating_sub(self.image_bytes)
    }
}

fn share(
    tensor: &Tensor,
    geometry: &Geometry,
    architecture: &str,
    split: Split,
    heads: &Heads,
    degree: u64,
    rank: u64,
) -> Result<TensorSlice, SliceError> {
    let sections = rules::sections(tensor, architecture, split, heads, degree, rank)?;
    let planes = runs::planes(tensor, geometry, split, &sections, degree)?;
    let one: u64 = planes.iter().flat_map(|p| &p.runs).map(|r| r.len * r.count).sum();
    let experts = tensor.expert_count();
    Ok(TensorSlice { name: tensor.name.clone(), split, sections, planes, experts, bytes: one * experts })
}

#[cfg(test)]
mod tests;
