//! Experts of a layer on the device: where their matrices lie, and what stands beside their products.
//!
//! One launch is for a *run*: experts one after the other whose matrices are stored alike, a fixed distance apart. Where a
//! layer's experts are stacked, they are one run. Where some are stored otherwise than others, there are several, and a
//! launch for each.
//!
//! Axes: E experts, N out-features, K in-features.

use super::constants::Constant;
use super::network::{Builder, DeviceProjection};
use crate::load::LoadError;
use crate::model::graph::{
    Experts, GatedMlp, LowRankRef, MatrixRef, MatrixStorage, Projection, ProjectionOutput, VectorRef,
};
use std::ops::Range;
use vt_bundle::Bundle;
use vt_bundle::tile::TILE_N;
use vt_kernels::cuda::gemm::DeviceMatrix;
use vt_kernels::cuda::moe_rows::ExpertVector;

/// The experts of a layer.
#[derive(Debug)]
pub(super) struct DeviceExperts {
    pub router: DeviceProjection,
    /// Column of the first expert's score.
    pub scores_at: usize,
    pub gate_up: ExpertProjection,
    pub down: ExpertProjection,
}

/// A projection of every expert.
#[derive(Debug)]
pub(super) struct ExpertProjection {
    /// All experts, in order.
    pub runs: Vec<ExpertRun>,
    pub k: usize,
    pub columns: ExpertColumns,
}

/// Where the outputs of a projection of experts begin: at multiples of a tile, as in a fused matrix, so that products of all
/// kinds can be written side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExpertColumns {
    pub starts: Vec<usize>,
    pub stride: usize,
}

/// Experts whose matrices lie a fixed distance apart.
#[derive(Debug)]
pub(super) struct ExpertRun {
    pub experts: Range<u32>,
    pub products: Vec<ExpertProduct>,
}

/// One matrix of each expert of a run.
#[derive(Debug)]
pub(super) struct ExpertProduct {
    pub matrix: StackedMatrix,
    /// Table of vectors `[K]` that multiply the inputs.
    pub input_scales: Option<Constant>,
    /// Columns of the product, padding included.
    pub stride: usize,
    pub place: ProductPlace,
}

/// Where a product's columns go.
#[derive(Debug)]
pub(super) enum ProductPlace {
    /// To the output, from this column on.
    Direct(usize),
    /// Apart, and from there into their places.
    Apart(Vec<ExpertOutput>),
}

/// Columns of a product that is computed apart.
#[derive(Debug)]
pub(super) struct ExpertOutput {
    pub product_column: usize,
    pub column: usize,
    pub rows: usize,
    /// Table of one number each, that multiplies the columns.
    pub factors: Option<Constant>,
    /// Table of vectors `[rows]` that are added.
    pub biases: Option<Constant>,
    pub low_rank: Option<ExpertLowRank>,
}

/// `y += up (down x)`.
#[derive(Debug)]
pub(super) struct ExpertLowRank {
    pub down: StackedMatrix,
    pub up: StackedMatrix,
    pub rank: usize,
}

/// A matrix of each expert of a run.
#[derive(Debug)]
pub(super) struct StackedMatrix {
    /// The first expert's.
    pub first: DeviceMatrix,
    /// Bytes from an expert's planes to the next one's.
    pub distance: u64,
}

impl DeviceExperts {
    /// The router's matrix, where its product is all there is to the scores.
    pub(super) fn plain_router(&self) -> Option<&DeviceMatrix> {
        match (self.router.products.as_slice(), &self.router.placed) {
            ([only], None) if only.input_scale.is_none() && only.bias.is_none() && self.scores_at == 0 => {
                Some(&only.matrix)
            }
            _ => None,
        }
    }

    /// Every matrix of the experts, one for each run.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &DeviceMatrix> {
        let products = [&self.gate_up, &self.down].into_iter().flat_map(|p| &p.runs).flat_map(|run| &run.products);
        products.flat_map(|product| {
            let outputs: &[ExpertOutput] = match &product.place {
                ProductPlace::Direct(_) => &[],
                ProductPlace::Apart(outputs) => outputs,
            };
            let branches = outputs.iter().filter_map(|o| o.low_rank.as_ref());
            let branches = branches.flat_map(|branch| [&branch.down.first, &branch.up.first]);
            std::iter::once(&product.matrix.first).chain(branches)
        })
    }
}

impl ExpertProjection {
    /// The only product of all experts, where nothing stands beside it and gate and up are its halves.
    pub(super) fn halves(&self) -> Option<(&ExpertRun, &ExpertProduct)> {
        let ([run], [0, up]) = (self.runs.as_slice(), self.columns.starts.as_slice()) else { return None };
        let [product] = run.products.as_slice() else { return None };
        let direct = matches!(product.place, ProductPlace::Direct(0)) && product.input_scales.is_none();
        (direct && product.stride == 2 * up && self.columns.stride == 2 * up).then_some((run, product))
    }
}

impl ExpertColumns {
    pub(super) fn of(projection: &Projection) -> Self {
        let mut stride = 0;
        let starts = projection.outputs.iter().map(|output| {
            let start = stride;
            stride += output.rows.next_multiple_of(TILE_N);
            start
        });
        Self { starts: starts.collect(), stride }
    }

    /// The first column of a product that is written where its outputs belong: nothing stands between, and its padding falls
    /// on no other's columns.
    pub(super) fn direct(&self, projection: &Projection, product: usize) -> Option<usize> {
        let outputs = || self.starts.iter().zip(&projection.outputs);
        let own = || outputs().filter(|(_, o)| o.product == product);
        let first = own().map(|(start, o)| start.checked_sub(o.product_column)).min()??;
        let end = first.checked_add(projection.products[product].stride)?;
        let plain = |o: &ProjectionOutput| o.scale.is_none() && o.bias.is_none() && o.low_rank.is_none();
        let placed = own().all(|(start, o)| plain(o) && *start == first + o.product_column);
        let mut others = outputs().filter(|(_, o)| o.product != product);
        let apart = others.all(|(start, o)| *start >= end || start + o.rows <= first);
        (placed && apart && end <= self.stride).then_some(first)
    }
}

impl Builder<'_> {
    pub(super) fn experts(&mut self, experts: &Experts) -> Result<DeviceExperts, LoadError> {
        let of = |projection: fn(&GatedMlp) -> &Projection| experts.experts.iter().map(projection).collect::<Vec<_>>();
        Ok(DeviceExperts {
            router: self.projection(&experts.router)?,
            scores_at: experts.router.outputs[0].column,
            gate_up: self.expert_projection(&of(|mlp| &mlp.gate_up))?,
            down: self.expert_projection(&of(|mlp| &mlp.down))?,
        })
    }

    /// `all`: the projection of every expert, at least one.
    fn expert_projection(&mut self, all: &[&Projection]) -> Result<ExpertProjection, LoadError> {
        let columns = ExpertColumns::of(all[0]);
        let runs = runs(self.bundle, all).into_iter().map(|run| self.expert_run(all, run, &columns));
        Ok(ExpertProjection { runs: runs.collect::<Result<_, _>>()?, k: all[0].k, columns })
    }

    fn expert_run(
        &mut self,
        all: &[&Projection],
        run: Range<usize>,
        columns: &ExpertColumns,
    ) -> Result<ExpertRun, LoadError> {
        let own = &all[run.clone()];
        let first = own[0];
        let mut products = Vec::with_capacity(first.products.len());
        for (index, product) in first.products.iter().enumerate() {
            let place = match columns.direct(first, index) {
                Some(column) => ProductPlace::Direct(column),
                None => {
                    let outputs = (0..first.outputs.len()).filter(|o| first.outputs[*o].product == index);
                    let outputs = outputs.map(|o| self.expert_output(all, &run, o, columns.starts[o]));
                    ProductPlace::Apart(outputs.collect::<Result<_, _>>()?)
                }
            };
            products.push(ExpertProduct {
                matrix: self.stacked(own, |p| Some(&p.products[index].matrix))?,
                input_scales: self.vectors(all, &run, |p| p.products[index].input_scale.as_ref()),
                stride: product.stride,
                place,
            });
        }
        Ok(ExpertRun { experts: run.start as u32..run.end as u32, products })
    }

    fn expert_output(
        &mut self,
        all: &[&Projection],
        run: &Range<usize>,
        index: usize,
        column: usize,
    ) -> Result<ExpertOutput, LoadError> {
        let (own, output) = (&all[run.clone()], &all[run.start].outputs[index]);
        let branch = |p: &'_ Projection| p.outputs[index].low_rank.as_ref().map(|branch| branch.down_stride);
        let low_rank = match branch(all[run.start]) {
            None => None,
            Some(rank) => Some(ExpertLowRank {
                down: self.stacked(own, |p| p.outputs[index].low_rank.as_ref().map(|branch| &branch.down))?,
                up: self.stacked(own, |p| p.outputs[index].low_rank.as_ref().map(|branch| &branch.up))?,
                rank,
            }),
        };
        Ok(ExpertOutput {
            product_column: output.product_column,
            column,
            rows: output.rows,
            factors: self.vectors(all, run, |p| p.outputs[index].scale.as_ref()),
            biases: self.vectors(all, run, |p| p.outputs[index].bias.as_ref()),
            low_rank,
        })
    }

    /// A matrix of each expert of a run.
    fn stacked(
        &self,
        run: &[&Projection],
        matrix: impl Fn(&Projection) -> Option<&MatrixRef>,
    ) -> Result<StackedMatrix, LoadError> {
        let mut matrices = run.iter().filter_map(|projection| matrix(projection));
        let (Some(first), second) = (matrices.next(), matrices.next()) else {
            return Err(self.unsupported("experts of which some lack a matrix that others have"));
        };
        let distance = second.and_then(|second| distance(self.bundle, first, second)).unwrap_or(0);
        Ok(StackedMatrix { first: self.matrix(first)?, distance })
    }

    /// A table of one vector of each expert, with entries for those of a run; `None` where none has one.
    fn vectors(
        &mut self,
        all: &[&Projection],
        run: &Range<usize>,
        vector: impl Fn(&Projection) -> Option<&VectorRef>,
    ) -> Option<Constant> {
        // Projections of other runs may have other products.
        let own = |expert: usize| if run.contains(&expert) { vector(all[expert]) } else { None };
        if (0..all.len()).all(|expert| own(expert).is_none()) {
            return None;
        }
        let placed = |v: &VectorRef| ExpertVector { address: self.image + v.offset(self.bundle), dtype: v.dtype() };
        let words = (0..all.len()).flat_map(|expert| ExpertVector::entry(own(expert).map(placed))).collect();
        Some(self.constants.words(words))
    }
}

/// The runs of a projection's experts, in order.
fn runs(bundle: &Bundle, all: &[&Projection]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    // Of the last run, where it has two experts or more.
    let mut distances: Option<Vec<u64>> = None;
    for expert in 0..all.len() {
        if let Some(run) = runs.last_mut()
            && alike(bundle, all[run.start], all[expert])
            && let Some(own) = distances_of(bundle, all[expert - 1], all[expert])
            && distances.as_ref().is_none_or(|distances| *distances == own)
        {
            run.end = expert + 1;
            distances = Some(own);
        } else {
            runs.push(expert..expert + 1);
            distances = None;
        }
    }
    runs
}

/// Distances of all matrices of one expert from those of another, which is stored alike.
fn distances_of(bundle: &Bundle, from: &Projection, to: &Projection) -> Option<Vec<u64>> {
    matrices(from).zip(matrices(to)).map(|(from, to)| distance(bundle, from, to)).collect()
}

/// Every matrix of a projection, low-rank branches included.
fn matrices(projection: &Projection) -> impl Iterator<Item = &MatrixRef> {
    let branches = projection.outputs.iter().filter_map(|o| o.low_rank.as_ref());
    projection.products.iter().map(|p| &p.matrix).chain(branches.flat_map(|branch| [&branch.down, &branch.up]))
}

/// Bytes from the planes of one matrix to those of another behind it, if that is one number that kernels can step by.
fn distance(bundle: &Bundle, from: &MatrixRef, to: &MatrixRef) -> Option<u64> {
    let (from, to) = (from.plane_offsets(bundle), to.plane_offsets(bundle));
    let step = to.first()?.checked_sub(*from.first()?)?;
    let same = from.len() == to.len() && from.iter().zip(&to).all(|(f, t)| f.checked_add(step) == Some(*t));
    (same && step > 0 && step.is_multiple_of(16)).then_some(step)
}

/// Whether two experts' projections are the same products of matrices stored alike, with the same things beside them.
fn alike(bundle: &Bundle, a: &Projection, b: &Projection) -> bool {
    let stored = |a: &MatrixRef, b: &MatrixRef| stored_alike(&a.storage(bundle), &b.storage(bundle));
    let branch = |a: &Option<LowRankRef>, b: &Option<LowRankRef>| match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => stored(&a.down, &b.down) && stored(&a.up, &b.up),
        _ => false,
    };
    let outputs = |a: &ProjectionOutput, b: &ProjectionOutput| {
        (a.product, a.product_column, a.rows) == (b.product, b.product_column, b.rows)
            && a.scale.is_some() == b.scale.is_some()
            && a.bias.is_some() == b.bias.is_some()
            && branch(&a.low_rank, &b.low_rank)
    };
    a.products.len() == b.products.len()
        && a.outputs.len() == b.outputs.len()
        && a.products.iter().zip(&b.products).all(|(a, b)| {
            stored(&a.matrix, &b.matrix) && a.stride == b.stride && a.input_scale.is_some() == b.input_scale.is_some()
        })
        && a.outputs.iter().zip(&b.outputs).all(|(a, b)| outputs(a, b))
}

fn stored_alike(a: &MatrixStorage<'_>, b: &MatrixStorage<'_>) -> bool {
    match (a, b) {
        (MatrixStorage::Tiled(a), MatrixStorage::Tiled(b)) => {
            a.spec.decode == b.spec.decode
                && (a.k, a.group_size, a.block) == (b.k, b.group_size, b.block)
                && a.parts == b.parts
        }
        (MatrixStorage::Rows { dtype: d, n, k }, MatrixStorage::Rows { dtype: e, n: m, k: l }) => {
            (d, n, k) == (e, m, l)
        }
        (MatrixStorage::Raw { format: f, n, k }, MatrixStorage::Raw { format: g, n: m, k: l }) => {
            (f.name, n, k) == (g.name, m, l)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::cuda::network::DeviceFeedForward;
    use crate::model::graph::Graph;
    use crate::model::tests::Weights;
    use crate::model::{ModelConfig, StepLimits, cuda_workspace_bytes};

    #[test]
    fn experts_that_differ_are_several_runs() {
        let dir = tempfile::tempdir().unwrap();
        Weights::routed(3).write(dir.path(), "mixtral");
        let bundle = Bundle::open(dir.path()).unwrap();
        let config = ModelConfig::from_manifest(&bundle.manifest().model).unwrap();
        let graph = Graph::resolve(&config, &bundle).unwrap();
        let (network, _) = Builder::new(&config, &bundle, 1 << 20).build(&graph, None).unwrap();
        let layers: Vec<_> = network
            .layers
            .iter()
            .map(|layer| match &layer.feed_forward {
                DeviceFeedForward::Experts(experts) => experts,
                DeviceFeedForward::Dense(_) => panic!("a layer without experts"),
            })
            .collect();
        let runs = |projection: &ExpertProjection| {
            projection.runs.iter().map(|r| (r.experts.start, r.experts.end)).collect::<Vec<_>>()
        };
        for projection in [&layers[0].gate_up, &layers[0].down] {
            assert_eq!(runs(projection), [(0, 4)]);
            // Both matrices of an expert lie between: 80 rows of 24 and 24 rows of 40, at multiples of 256 bytes.
            assert_eq!(projection.runs[0].products[0].matrix.distance, 7680 + 3840);
        }
        for projection in [&layers[1].gate_up, &layers[1].down] {
            assert_eq!(runs(projection), [(0, 2), (2, 3), (3, 4)]);
        }
        let gate_up = &layers[1].gate_up;
        assert_eq!(gate_up.columns, ExpertColumns { starts: vec![0, 64], stride: 128 });
        // Fused rows of 40 and 40 have no padding between; alone, each is written where it belongs.
        assert!(
            matches!(&gate_up.runs[0].products[..], [ExpertProduct { place: ProductPlace::Apart(o), .. }] if o.len() == 2)
        );
        let column = |product: &ExpertProduct| match product.place {
            ProductPlace::Direct(column) => Some(column),
            ProductPlace::Apart(_) => None,
        };
        assert_eq!(gate_up.runs[1].products.iter().map(column).collect::<Vec<_>>(), [Some(0), Some(64)]);
        let down = &layers[1].down;
        assert_eq!(column(&down.runs[0].products[0]), Some(0));
        let ProductPlace::Apart(outputs) = &down.runs[1].products[0].place else { panic!("a factor stands between") };
        assert!(outputs[0].factors.is_some() && outputs[0].biases.is_none());

        let limits = StepLimits { tokens: 64, sequences: 4, context: 64 };
        let (few, many) = (limits, StepLimits { tokens: 128, ..limits });
        let bytes = |limits| cuda_workspace_bytes(&config, &bundle, &limits).unwrap().unwrap();
        assert!(bytes(few) < bytes(many));
    }
}
