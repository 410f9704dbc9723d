//! Products with few rows: which kernel reads an encoding, and how a product is divided among blocks.
//!
//! The kernels' shapes come from a table in each fatbin (`SmallKernel` of `cuda/gemm/small_kernels.cuh`), so that they are
//! written down once.

use super::params::{Plan, Request, Tiled, scale_shifts};
use super::table::{self, ListedKernel};
use crate::cuda::module::arguments;
use crate::cuda::{CudaContext, CudaError, CudaStream};
use std::collections::HashMap;
use std::sync::Arc;
use vt_bundle::encoding::{ScaleType, Span};
use vt_bundle::layout::TiledMatrix;

/// Fatbins that have a table of kernels.
const SOURCES: [&str; 3] = ["gemm/small_float", "gemm/small_integer", "gemm/small_ggml"];
/// Codes along K of a unit.
pub(super) const UNIT_K: u32 = 32;
/// Rows of the kernels that make activations where they are asked to: `MAKES_INPUTS` in `cuda/gemm/small.cuh`.
const MAKING_ROWS: u32 = 8;
/// Rows that one kernel takes in any case where results must not depend on their number.
const DETERMINISTIC_ROWS: u32 = 16;

/// A kernel for one encoding and one shape of block.
#[derive(Debug)]
struct Kernel {
    listed: ListedKernel,
    /// Rows and columns of a block, its threads, its bytes of shared memory besides the activations.
    rows: u32,
    columns: u32,
    threads: u32,
    fixed_bytes: u32,
}

/// All kernels of this family for a device.
#[derive(Debug)]
pub(super) struct SmallKernels {
    /// By the kernels' name for their encoding.
    kernels: HashMap<String, Vec<Kernel>>,
    multiprocessors: u32,
    /// Shared memory that a block may use.
    shared_bytes: u32,
}

/// How a kernel reads an encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// The kernels' name for the encoding.
    pub(super) name: String,
    pub(super) factor: u32,
    pub(super) factor_plane: u32,
    pub(super) zero_add: u32,
}

/// What a launch needs.
#[derive(Debug)]
pub(super) struct Chosen<'a> {
    kernel: &'a Kernel,
    plan: Plan,
    shared_bytes: u32,
}

impl SmallKernels {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let mut kernels: HashMap<String, Vec<Kernel>> = HashMap::new();
        for source in SOURCES {
            for (listed, numbers) in table::kernels(context, source, c"vt_gemm_small_kernels")? {
                // `vt_gemm_` encoding `_` rows `_` shape.
                let rest = listed.name().strip_prefix("vt_gemm_");
                let encoding = rest.and_then(|rest| rest.rsplitn(3, '_').nth(2)).unwrap_or("").to_owned();
                let [rows, columns, threads, fixed_bytes] = numbers;
                kernels.entry(encoding).or_default().push(Kernel { listed, rows, columns, threads, fixed_bytes });
            }
        }
        let multiprocessors = context.attributes().multiprocessors;
        Ok(Self { kernels, multiprocessors, shared_bytes: context.shared_bytes_per_block()? })
    }

    /// The kernel and the division for `m` rows, or `None` where no kernel of this family has room for the matrix.
    pub(super) fn choose(&self, reading: &Reading, tiled: &Tiled, m: u32, deterministic: bool) -> Option<Chosen<'_>> {
        let kernels = self.kernels.get(&reading.name)?;
        let usable = || kernels.iter().filter(|kernel| self.x_capacity(kernel, kernel.rows) > 0);
        let seen = if deterministic { DETERMINISTIC_ROWS } else { m };
        let most = usable().map(|kernel| kernel.rows).max()?;
        let rows = usable().map(|kernel| kernel.rows).filter(|rows| *rows >= seen.min(most)).min()?;
        // Few blocks per group of columns keep the adding up short, many columns at once keep the reading fast.
        let wide_enough = |kernel: &&Kernel| 5 * tiled.n.div_ceil(kernel.columns) >= 3 * self.multiprocessors;
        let fitting = || usable().filter(|kernel| kernel.rows == rows);
        let widest = fitting().filter(wide_enough).max_by_key(|kernel| kernel.columns);
        let kernel = widest.or_else(|| fitting().min_by_key(|kernel| kernel.columns))?;
        self.plan(kernel, reading, tiled, m)
    }

    /// Units of activations of `rows` rows that fit into a block's shared memory.
    fn x_capacity(&self, kernel: &Kernel, rows: u32) -> u32 {
        let row_bytes = self.shared_bytes.saturating_sub(kernel.fixed_bytes) / rows.max(1);
        // Rows are 16 bytes longer, against bank conflicts.
        row_bytes.saturating_sub(16) / (2 * UNIT_K)
    }

    fn plan<'a>(&self, kernel: &'a Kernel, reading: &Reading, tiled: &Tiled, m: u32) -> Option<Chosen<'a>> {
        let units = tiled.k / UNIT_K;
        let groups = tiled.n.div_ceil(kernel.columns);
        let all = u64::from(units) * u64::from(groups);
        // Positions among the units are 32-bit numbers.
        u32::try_from(all).ok()?;
        let blocks = u64::from(self.multiprocessors).min(all) as u32;
        let rows = m.min(kernel.rows);
        let capacity = self.x_capacity(kernel, rows);
        let own = all.div_ceil(u64::from(blocks)) as u32;
        let (x_units, x_whole) = match () {
            () if own > units && units <= capacity => (units, 1),
            () => (own.min(capacity), 0),
        };
        let plan = Plan {
            workspace: 0,
            units,
            groups,
            blocks,
            x_units,
            x_whole,
            shifts: scale_shifts(tiled, UNIT_K),
            factor: reading.factor,
            factor_plane: reading.factor_plane,
            zero_add: reading.zero_add,
        };
        let shared_bytes = kernel.fixed_bytes + rows * (2 * UNIT_K * x_units + 16);
        Some(Chosen { kernel, plan, shared_bytes })
    }

    /// Bytes of workspace for any product of up to `max_m` rows.
    pub(super) fn workspace_bytes(&self, reading: &Reading, tiled: &Tiled, max_m: u32) -> u64 {
        let kernels = self.kernels.get(&reading.name).into_iter().flatten();
        let rows = kernels.map(|kernel| kernel.rows).filter(|rows| *rows <= max_m).chain([max_m]);
        let mut bytes = 0;
        for (m, deterministic) in rows.flat_map(|m| [(m, false), (m, true)]) {
            if let Some(chosen) = self.choose(reading, tiled, m, deterministic) {
                bytes = bytes.max(chosen.workspace_bytes());
                // So that a launch that is being recorded finds its kernel loaded.
                let _ = chosen.kernel.listed.function(self.shared_bytes);
            }
        }
        bytes
    }

    /// Starts the product, as many rows at a time as the kernel takes.
    pub(super) fn launch(
        &self,
        stream: &CudaStream,
        chosen: &Chosen<'_>,
        tiled: &Tiled,
        request: &Request,
        workspace: u64,
    ) -> Result<(), CudaError> {
        let Chosen { kernel, plan, shared_bytes } = chosen;
        let function = kernel.listed.function(self.shared_bytes)?;
        let plan = Plan { workspace, ..*plan };
        let block = [kernel.threads, 1, 1];
        for step in 0..request.m.div_ceil(kernel.rows) {
            let first = step * kernel.rows;
            let size = if request.out_bf16 == 1 { 2 } else { 4 };
            let part = Request {
                x: request.x + u64::from(first) * u64::from(request.x_stride) * 2,
                out: request.out + u64::from(first) * u64::from(request.out_stride) * size,
                m: (request.m - first).min(kernel.rows),
                ..*request
            };
            let grid = [plan.blocks, 1, 1];
            // SAFETY: arguments are the kernel's; the request is checked against the matrix, the plan covers it, the workspace
            // is as large as `workspace_bytes` says, and the caller keeps all of it allocated. Before it waits for earlier
            // work the kernel only reads weights.
            unsafe { function.launch_early(stream, grid, block, *shared_bytes, &mut arguments![*tiled, part, plan]) }?;
        }
        Ok(())
    }
}

impl Chosen<'_> {
    pub(super) fn makes_inputs(&self) -> bool {
        self.kernel.rows == MAKING_ROWS
    }

    fn workspace_bytes(&self) -> u64 {
        u64::from(self.plan.blocks) * u64::from(self.kernel.rows) * u64::from(self.kernel.columns) * 4
    }
}

impl Reading {
    /// How the kernels read a matrix, where they do: K in whole units, groups of 16 or a power of two of units.
    pub(super) fn find(matrix: &TiledMatrix) -> Option<Self> {
        if !matrix.k.is_multiple_of(u64::from(UNIT_K)) {
            return None;
        }
        let group = matrix.group_size;
        let units = group.is_multiple_of(u64::from(UNIT_K)) && (group / u64::from(UNIT_K)).is_power_of_two();
        let in_units = units || (group >= matrix.k && group > 0);
        let new = |name: &str| Some(Self { name: name.to_owned(), factor: 0, factor_plane: 0, zero_add: 0 });
        let when = |condition: bool, name: &str| if condition { new(name) } else { None };
        let spec = matrix.spec;
        match spec.decode {
            "nvfp4.modelopt@1" => when(group == 16, "nvfp4").map(|r| Self { factor: 1, factor_plane: 1, ..r }),
            "nvfp4.compressed-tensors@1" => {
                when(group == 16, "nvfp4").map(|r| Self { factor: 2, factor_plane: 1, ..r })
            }
            "mxfp4@1" => when(in_units, "mxfp4"),
            "mxfp8@1" => when(in_units, "mxfp8"),
            "q4_0.ggml@1" => new("u4_f16"),
            "q8_0.ggml@1" => new("u8_f16"),
            other => {
                if let Some(name) = other.strip_suffix(".ggml@1") {
                    // `mxfp4` and `nvfp4` are also names of other encodings.
                    return new(&if spec.encoding == "e2m1" { format!("{name}_ggml") } else { name.to_owned() });
                }
                let float = match spec.scales.first()?.dtype {
                    ScaleType::F16 => "f16",
                    ScaleType::Bf16 => "bf16",
                    ScaleType::F32 => "f32",
                    _ => return None,
                };
                let bits = spec.codes.first()?.bits;
                match (other.strip_suffix("@1")?.rsplit_once('.')?.0, spec.scales.first()?.span) {
                    ("fp8.tensor", _) => new("fp8").map(|r| Self { factor: 1, ..r }),
                    ("fp8.channel", _) => new("fp8").map(|r| Self { factor: 3, ..r }),
                    ("int8.symmetric.tensor", _) => new("u8_tensor").map(|r| Self { factor: 1, ..r }),
                    ("int4.symmetric" | "int8.symmetric", Span::Group) => when(in_units, &format!("u{bits}_{float}")),
                    ("int4.zeros" | "int8.zeros", _) if float != "f32" => {
                        when(in_units, &format!("u{bits}_{float}_zeros"))
                    }
                    ("int4.zeros-minus-one" | "int8.zeros-minus-one", _) if float != "f32" => {
                        when(in_units, &format!("u{bits}_{float}_zeros")).map(|r| Self { zero_add: 1, ..r })
                    }
                    _ => None,
                }
            }
        }
    }
}
