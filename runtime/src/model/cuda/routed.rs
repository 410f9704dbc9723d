//! The launches of a layer of experts: routing, products with the rows of each expert, and the sums back. Who has which rows is
//! known on the device only.
//!
//! A pair is a token and one of its experts; rows of the experts' products are pairs sorted by expert.

use super::constants::Constant;
use super::experts::{
    DeviceExperts, ExpertOutput, ExpertProduct, ExpertProjection, ExpertRun, ProductPlace, StackedMatrix,
};
use super::forward::{Pass, Target};
use super::workspace::rank_stride;
use vt_kernels::FloatType;
use vt_kernels::cuda::CudaError;
use vt_kernels::cuda::elementwise::Columns;
use vt_kernels::cuda::gemm::{ExpertFusion, ExpertGroups, GemmRequest};
use vt_kernels::cuda::moe::{ExpertRows, MoeKernels, RouterRows, Routing, RoutingTables};
use vt_kernels::cuda::moe_rows::{ExpertRowKernels, RoutedRows};

/// What the launches of one layer share.
struct Routed<'a> {
    moe: &'a MoeKernels,
    rows: &'a ExpertRowKernels,
    routing: Routing,
    tables: RoutingTables,
}

impl Routed<'_> {
    /// Rows of all experts.
    fn pairs(&self) -> usize {
        self.routing.tokens * self.routing.top_k
    }

    fn rows_of(&self, run: &ExpertRun) -> RoutedRows<'_> {
        RoutedRows { rows: self.pairs(), tables: &self.tables, experts: run.experts.clone() }
    }

    /// `settled`: see [`ExpertGroups::settled`].
    fn groups(&self, run: &ExpertRun, matrix: &StackedMatrix, settled: bool) -> ExpertGroups {
        ExpertGroups {
            count: run.experts.end - run.experts.start,
            stride: matrix.distance,
            offsets: self.tables.offsets + 4 * u64::from(run.experts.start),
            most: self.routing.tokens as u32,
            settled,
        }
    }
}

/// What a projection of experts reads: bf16 rows.
#[derive(Clone, Copy)]
enum Source {
    /// A row for each token.
    Tokens(u64),
    /// A row for each pair, which the products of only one projection read.
    Pairs(u64),
}

impl Pass<'_> {
    /// `norm`: of the residual stream, where `normed` does not hold it yet.
    pub(super) fn experts(
        &self,
        layer: usize,
        experts: &DeviceExperts,
        norm: Option<Constant>,
        target: Target,
    ) -> Result<(), CudaError> {
        let (Some(config), Some((moe, row_kernels))) = (&self.config.moe, &self.kernels.moe) else {
            let what = "a model without a number of experts".to_owned();
            return Err(CudaError::Unsupported { op: "experts", what });
        };
        let (tokens, hidden) = (self.shape.tokens, self.config.hidden_size);
        let (top_k, count) = (config.top_k, config.num_experts);
        let routing = Routing { tokens, experts: count, top_k, normalise: config.normalize_weights };
        let overflow = || CudaError::Unsupported { op: "expert routing", what: format!("{tokens} tokens") };
        let (scores, tables) = self.layout.routing(layer);
        let (normed, scores) = (self.at(self.layout.normed), self.at(scores));
        let tables = RoutingTables::at(self.at(tables), tokens, count, top_k).ok_or_else(overflow)?;
        let routed = Routed { moe, rows: row_kernels, routing, tables };
        let (router, stride) = (&experts.router, experts.router.stride);
        match (norm, experts.plain_router().filter(|matrix| MoeKernels::routes(matrix, hidden))) {
            (Some(norm), Some(matrix)) => {
                let rows = RouterRows {
                    x: self.at(self.layout.residual),
                    norm: self.constant(norm),
                    eps: self.config.rms_norm_eps,
                    width: hidden,
                    normed,
                    scores,
                    stride,
                };
                moe.router(self.stream, &routing, matrix, &rows, &tables)?;
            }
            _ => {
                norm.map_or(Ok(()), |norm| self.norm(norm, None, tokens))?;
                self.project(router, normed, tokens, Target::F32(scores), stride)?;
                moe.route(self.stream, &routing, scores, stride, experts.scores_at, &tables)?;
            }
        }
        let fused = self.fused_gate_up(&routed, experts, normed)?;
        if !fused {
            let (projected, columns) = (self.at(self.layout.projected), &experts.gate_up.columns);
            self.project_experts(&routed, &experts.gate_up, Source::Tokens(normed), Target::Bf16(projected), false)?;
            self.gated(routed.pairs(), columns.stride, [columns.starts[0], columns.starts[1]], experts.down.k)?;
        }
        let (inner, outputs) = (self.at(self.layout.inner), self.at(self.layout.expert_outputs));
        self.project_experts(&routed, &experts.down, Source::Pairs(inner), Target::F32(outputs), fused)?;
        let rows = |address: u64, stride: usize| ExpertRows { address, dtype: FloatType::F32, stride };
        let (from, to) = (rows(outputs, experts.down.columns.stride), rows(target.address(), hidden));
        let accumulate = matches!(target, Target::AddF32(_));
        moe.combine(self.stream, &routing, from, hidden, &routed.tables, to, accumulate)
    }

    /// `act(gate) * up` by one product that reads rows where they are, where there is such a kernel for it; says whether.
    fn fused_gate_up(&self, routed: &Routed<'_>, experts: &DeviceExperts, normed: u64) -> Result<bool, CudaError> {
        let Some((run, product)) =
            experts.gate_up.halves().filter(|_| experts.gate_up.columns.stride == 2 * experts.down.k)
        else {
            return Ok(false);
        };
        let pairs = (routed.tables.pairs, routed.routing.top_k as u32);
        let fusion = ExpertFusion { pairs: Some(pairs), gate: Some(self.gate()) };
        let inner = Target::Bf16(self.at(self.layout.inner));
        let request = self.request(normed, experts.gate_up.k, routed.pairs(), inner, experts.down.k);
        let groups = routed.groups(run, &product.matrix, false);
        let scratch = self.at(self.layout.gemm);
        self.kernels.gemm.launch_fused(self.stream, &product.matrix.first, &request, &groups, &fusion, scratch)
    }

    /// A projection of every pair's row by its expert, to rows of `target`. `settled`: the launch before this one is behind
    /// the routing, see [`ExpertGroups::settled`].
    fn project_experts(
        &self,
        routed: &Routed<'_>,
        projection: &ExpertProjection,
        source: Source,
        target: Target,
        settled: bool,
    ) -> Result<(), CudaError> {
        let k = projection.k;
        let mut products = projection.runs.iter().flat_map(|run| &run.products);
        let plain = products.any(|product| product.input_scales.is_none());
        let x = match source {
            Source::Pairs(x) => x,
            Source::Tokens(x) => {
                let gathered = self.at(self.layout.gathered);
                if plain {
                    let rows = |address: u64| ExpertRows { address, dtype: FloatType::Bf16, stride: k };
                    let (from, to) = (rows(x), rows(gathered));
                    routed.moe.gather(self.stream, &routed.routing, from, k, &routed.tables, to)?;
                }
                gathered
            }
        };
        let mut settled = settled;
        for run in &projection.runs {
            // Scaled rows take the place of those that they are made from, which nobody reads after them.
            for scaled in [false, true] {
                for product in run.products.iter().filter(|p| p.input_scales.is_some() == scaled) {
                    if let Some(scales) = product.input_scales {
                        let (from, top_k) = match source {
                            Source::Tokens(tokens) => (tokens, Some(routed.routing.top_k)),
                            Source::Pairs(pairs) => (pairs, None),
                        };
                        let [from, to] = [from, x].map(|address| Columns { address, stride: k, at: 0 });
                        let (rows, scales) = (routed.rows_of(run), Some(self.constant(scales)));
                        routed.rows.inputs(self.stream, &rows, from, top_k, scales, k, to)?;
                        settled = false;
                    }
                    self.product_of_experts(routed, run, product, (x, k), target, projection.columns.stride, settled)?;
                    settled = false;
                }
            }
        }
        Ok(())
    }

    /// One product of each expert of a run with rows of `x` that are `k` elements long.
    #[expect(clippy::too_many_arguments, reason = "a product and where it goes")]
    fn product_of_experts(
        &self,
        routed: &Routed<'_>,
        run: &ExpertRun,
        product: &ExpertProduct,
        (x, k): (u64, usize),
        target: Target,
        stride: usize,
        settled: bool,
    ) -> Result<(), CudaError> {
        let pairs = routed.pairs();
        let outputs = match &product.place {
            ProductPlace::Direct(column) => {
                let mut request = self.request(x, k, pairs, target, stride);
                request.out += target.element() * *column as u64;
                return self.multiply_experts(routed, run, &product.matrix, &request, settled);
            }
            ProductPlace::Apart(outputs) => outputs,
        };
        let result = self.at(self.layout.product);
        let request = self.request(x, k, pairs, Target::F32(result), product.stride);
        self.multiply_experts(routed, run, &product.matrix, &request, settled)?;
        for output in outputs {
            let from = Columns { address: result, stride: product.stride, at: output.product_column };
            let mut factors = output.factors.map(|factors| self.constant(factors));
            let rows = routed.rows_of(run);
            if output.low_rank.is_some() {
                if factors.is_some() {
                    let (factors, f32) = (factors.take(), FloatType::F32);
                    routed.rows.results(self.stream, &rows, from, factors, None, output.rows, from, f32)?;
                }
                self.add_low_rank(routed, run, output, (x, k), from)?;
            }
            let (biases, to) = (
                output.biases.map(|biases| self.constant(biases)),
                Columns { address: target.address(), stride, at: output.column },
            );
            let dtype = if matches!(target, Target::Bf16(_)) { FloatType::Bf16 } else { FloatType::F32 };
            routed.rows.results(self.stream, &rows, from, factors, biases, output.rows, to, dtype)?;
        }
        Ok(())
    }

    /// Adds a low-rank branch of `x` to columns of f32 rows.
    fn add_low_rank(
        &self,
        routed: &Routed<'_>,
        run: &ExpertRun,
        output: &ExpertOutput,
        (x, k): (u64, usize),
        to: Columns,
    ) -> Result<(), CudaError> {
        let Some(branch) = &output.low_rank else { return Ok(()) };
        let (pairs, narrow, stride) = (routed.pairs(), self.at(self.layout.low_rank), rank_stride(branch.rank));
        let down = self.request(x, k, pairs, Target::Bf16(narrow), stride);
        self.multiply_experts(routed, run, &branch.down, &down, false)?;
        let sum = Target::AddF32(to.address + 4 * to.at as u64);
        let up = self.request(narrow, stride, pairs, sum, to.stride);
        self.multiply_experts(routed, run, &branch.up, &up, false)
    }

    fn multiply_experts(
        &self,
        routed: &Routed<'_>,
        run: &ExpertRun,
        matrix: &StackedMatrix,
        request: &GemmRequest,
        settled: bool,
    ) -> Result<(), CudaError> {
        let (groups, scratch) = (routed.groups(run, matrix, settled), self.at(self.layout.gemm));
        self.kernels.gemm.launch_grouped(self.stream, &matrix.first, request, &groups, scratch)
    }
}
