//! Products of few rows with the experts of a layer: which kernel, and how the work is divided on the device.
//!
//! The kernels' shapes come from a table in each fatbin (`ExpertKernel` of `cuda/gemm/experts.cuh`).

use super::params::{Plan, Request, Tiled, scale_shifts};
use super::small::{Reading, UNIT_K};
use super::table::{self, ListedKernel};
use super::{ExpertFusion, ExpertGroups};
use crate::activation::Gate;
use crate::cuda::module::arguments;
use crate::cuda::{CudaContext, CudaError, CudaStream};
use std::collections::HashMap;
use std::sync::Arc;

/// Fatbins that have a table of kernels.
const SOURCES: [&str; 3] = ["gemm/experts_float", "gemm/experts_integer", "gemm/experts_ggml"];
/// Columns and threads of a block.
const COLUMNS: u32 = 128;
const THREADS: u32 = 256;
/// Columns of a tile of the weights.
const TILE_COLUMNS: u32 = 64;
/// Experts, at most: what 256 threads put into order.
const MAX_EXPERTS: u32 = 512;
/// Units of activations in shared memory, at least, where all of K has no room: one for each warp that takes turns.
const FEWEST_UNITS: u32 = 4;
/// Shared memory of a block that the device keeps for itself, and that the kernels' own variables take.
const RESERVED_BYTES: u32 = 1024;
const STATIC_BYTES: u32 = 256;
/// Rows of a tile where results must not depend on their number.
const DETERMINISTIC_ROWS: u32 = 16;

/// A kernel for one encoding and one number of rows.
#[derive(Debug)]
struct Kernel {
    listed: ListedKernel,
    rows: u32,
    blocks: u32,
    fixed_bytes: u32,
}

/// `struct ExpertPlan` of `cuda/gemm/experts.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ExpertPlan {
    plan: Plan,
    pairs: u64,
    top_k: u32,
    experts: u32,
    gate: u32,
    whole: u32,
    settled: u32,
}

/// All kernels of this family for a device.
#[derive(Debug)]
pub(super) struct ExpertKernels {
    /// By the kernels' name for their encoding.
    kernels: HashMap<String, Vec<Kernel>>,
    multiprocessors: u32,
    /// Shared memory that a block may use.
    shared_bytes: u32,
}

/// What a launch needs.
#[derive(Debug)]
pub(super) struct Chosen<'a> {
    kernel: &'a Kernel,
    plan: ExpertPlan,
    shared_bytes: u32,
}

impl ExpertKernels {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let mut kernels: HashMap<String, Vec<Kernel>> = HashMap::new();
        for source in SOURCES {
            for (listed, numbers) in table::kernels(context, source, c"vt_expert_kernels")? {
                // `vt_experts_` encoding `_` rows.
                let rest = listed.name().strip_prefix("vt_experts_");
                let encoding = rest.and_then(|rest| Some(rest.rsplit_once('_')?.0)).unwrap_or("").to_owned();
                let [rows, blocks, fixed_bytes] = numbers;
                kernels.entry(encoding).or_default().push(Kernel { listed, rows, blocks, fixed_bytes });
            }
        }
        let multiprocessors = context.attributes().multiprocessors;
        Ok(Self { kernels, multiprocessors, shared_bytes: context.shared_bytes_per_block()? })
    }

    /// The kernel and the division for `m` rows of all experts together, or `None` where this family has none for the matrix.
    pub(super) fn choose(
        &self,
        reading: &Reading,
        tiled: &Tiled,
        m: u32,
        groups: &ExpertGroups,
        fusion: &ExpertFusion,
        deterministic: bool,
    ) -> Option<Chosen<'_>> {
        let kernels = self.kernels.get(&reading.name)?;
        let half = tiled.n / 2;
        if groups.count > MAX_EXPERTS || (fusion.gate.is_some() && !half.is_multiple_of(TILE_COLUMNS)) {
            return None;
        }
        // Somewhat more rows than an expert has on average: where one has more still, its weights are read again.
        let average = m.div_ceil(groups.count.max(1));
        let seen = if deterministic { DETERMINISTIC_ROWS } else { (2 * average).min(groups.most) };
        let most = kernels.iter().map(|kernel| kernel.rows).max()?;
        let kernel = kernels.iter().filter(|k| k.rows >= seen.min(most)).min_by_key(|k| k.rows)?;
        let units = tiled.k / UNIT_K;
        let column_groups = if fusion.gate.is_some() { half / TILE_COLUMNS } else { tiled.n.div_ceil(COLUMNS) };
        // Positions on the line of all units are 32-bit numbers.
        let tiles = u64::from(m / kernel.rows) + u64::from(groups.count.min(m));
        u32::try_from(tiles * u64::from(column_groups) * u64::from(units)).ok()?;
        let rows = kernel.rows.min(groups.most.max(1));
        let tables = 8 * (groups.count + 1) + 16;
        let own = |x_units: u32| kernel.fixed_bytes + tables + rows * (2 * UNIT_K * x_units + 16);
        let shared = (self.shared_bytes + RESERVED_BYTES) / kernel.blocks - RESERVED_BYTES - STATIC_BYTES;
        let alone = self.shared_bytes - STATIC_BYTES;
        let room = |bytes: u32| bytes.saturating_sub(own(0)) / (rows * 2 * UNIT_K);
        let (blocks, x_units) = match () {
            () if own(units) <= shared => (kernel.blocks, units),
            () if own(units) <= alone => (1, units),
            () if room(shared) >= FEWEST_UNITS => (kernel.blocks, room(shared)),
            () if room(alone) >= FEWEST_UNITS => (1, room(alone)),
            () => return None,
        };
        let plan = Plan {
            workspace: 0,
            units,
            groups: column_groups,
            blocks: blocks * self.multiprocessors,
            x_units,
            x_whole: u32::from(x_units == units),
            shifts: scale_shifts(tiled, UNIT_K),
            factor: reading.factor,
            factor_plane: reading.factor_plane,
            zero_add: reading.zero_add,
        };
        let plan = ExpertPlan {
            plan,
            pairs: fusion.pairs.map_or(0, |(pairs, _)| pairs),
            top_k: fusion.pairs.map_or(1, |(_, top_k)| top_k),
            experts: groups.count,
            gate: match fusion.gate {
                None => 0,
                Some(Gate::Silu) => 1,
                Some(Gate::GeluTanh) => 2,
            },
            whole: u32::from(deterministic),
            settled: u32::from(groups.settled),
        };
        Some(Chosen { kernel, plan, shared_bytes: own(x_units) })
    }

    /// Bytes of workspace for any product with a matrix read in that way; also loads the kernels, so that launches may be
    /// recorded.
    pub(super) fn workspace_bytes(&self, reading: &Reading) -> Result<u64, CudaError> {
        let mut bytes = 0;
        for kernel in self.kernels.get(&reading.name).into_iter().flatten() {
            kernel.listed.function(self.shared_bytes - STATIC_BYTES)?;
            let blocks = u64::from(kernel.blocks * self.multiprocessors);
            bytes = bytes.max(blocks * u64::from(kernel.rows * COLUMNS) * 4);
        }
        Ok(bytes)
    }

    /// Starts the product.
    pub(super) fn launch(
        &self,
        stream: &CudaStream,
        chosen: &Chosen<'_>,
        tiled: &Tiled,
        request: &Request,
        workspace: u64,
    ) -> Result<(), CudaError> {
        let Chosen { kernel, plan, shared_bytes } = chosen;
        let function = kernel.listed.function(self.shared_bytes - STATIC_BYTES)?;
        let plan = ExpertPlan { plan: Plan { workspace, ..plan.plan }, ..*plan };
        let grid = [if request.m == 0 { 0 } else { plan.plan.blocks }, 1, 1];
        // SAFETY: arguments are the kernel's; the request is checked against the matrix, the plan covers it, the workspace is
        // as large as `workspace_bytes` says, and the caller keeps all of it allocated. Before it waits for earlier work the
        // kernel reads weights, and offsets where the caller says that they are settled.
        unsafe {
            let block = [THREADS, 1, 1];
            function.launch_early(stream, grid, block, *shared_bytes, &mut arguments![*tiled, *request, plan])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_header() {
        assert_eq!(size_of::<ExpertPlan>(), 88);
    }
}
