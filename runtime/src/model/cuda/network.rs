//! The model graph with its matrices as addresses in the arena and its vectors among the constants.
//!
//! Axes: N out-features, K in-features.

use super::constants::{Constant, Constants};
use super::experts::DeviceExperts;
use crate::load::LoadError;
use crate::model::config::ModelConfig;
use crate::model::graph::{
    FeedForward, GatedMlp, Graph, Layer, MatrixRef, MatrixStorage, Projection, ProjectionOutput, VectorRef,
};
use std::sync::Arc;
use vt_bundle::Bundle;
use vt_bundle::layout::TiledMatrix;
use vt_kernels::cuda::gemm::{DeviceMatrix, DevicePlane};
use vt_kernels::rope::{RopeScaling, inverse_frequencies};

/// The whole network on the device.
#[derive(Debug)]
pub(super) struct Network {
    pub embedding: DeviceMatrix,
    pub layers: Vec<DeviceLayer>,
    pub norm: Constant,
    pub head: DeviceProjection,
    pub ropes: Vec<DeviceRope>,
}

impl Network {
    /// Every matrix of a product.
    pub(super) fn matrices(&self) -> impl Iterator<Item = &DeviceMatrix> {
        let experts = self.layers.iter().filter_map(|layer| match &layer.feed_forward {
            DeviceFeedForward::Dense(_) => None,
            DeviceFeedForward::Experts(experts) => Some(experts.matrices()),
        });
        let layers = self.layers.iter().flat_map(DeviceLayer::projections).chain([&self.head]);
        let others = layers.flat_map(|projection| {
            let branches = projection.placed.iter().flatten().filter_map(|o| o.low_rank.as_ref());
            let branches = branches.flat_map(|branch| [&branch.down, &branch.up]);
            projection.products.iter().map(|p| &p.matrix).chain(branches)
        });
        others.chain(experts.flatten())
    }
}

impl DeviceLayer {
    /// All but those of experts.
    fn projections(&self) -> impl Iterator<Item = &DeviceProjection> {
        let feed_forward = match &self.feed_forward {
            DeviceFeedForward::Dense(mlp) => [Some(&mlp.gate_up), Some(&mlp.down)],
            DeviceFeedForward::Experts(experts) => [Some(&experts.router), None],
        };
        [&self.qkv, &self.output].into_iter().chain(feed_forward.into_iter().flatten())
    }
}

/// Frequencies of one rotary embedding.
#[derive(Debug)]
pub(super) struct DeviceRope {
    /// f32 `[half]`.
    pub frequencies: Constant,
    /// Amplitude of cosines and sines.
    pub factor: f32,
    pub half: usize,
}

#[derive(Debug)]
pub(super) struct DeviceLayer {
    pub input_norm: Constant,
    pub qkv: DeviceProjection,
    /// First columns of queries, keys and values.
    pub heads_at: [usize; 3],
    pub head_norms: Option<(Constant, Constant)>,
    pub output: DeviceProjection,
    pub post_attention_norm: Option<Constant>,
    pub feed_forward_norm: Constant,
    pub feed_forward: DeviceFeedForward,
    pub post_feed_forward_norm: Option<Constant>,
}

#[derive(Debug)]
pub(super) enum DeviceFeedForward {
    Dense(DeviceMlp),
    Experts(DeviceExperts),
}

#[derive(Debug)]
pub(super) struct DeviceMlp {
    pub gate_up: DeviceProjection,
    /// First columns of gate and up.
    pub columns: [usize; 2],
    pub down: DeviceProjection,
}

/// Several logical projections of one input; see [`Projection`].
#[derive(Debug)]
pub(super) struct DeviceProjection {
    pub products: Vec<DeviceProduct>,
    /// Where products are not the output: what goes where.
    pub placed: Option<Vec<PlacedOutput>>,
    pub k: usize,
    /// Columns of the output.
    pub stride: usize,
}

#[derive(Debug)]
pub(super) struct DeviceProduct {
    pub matrix: DeviceMatrix,
    /// Multiplies the input, `[K]`.
    pub input_scale: Option<Constant>,
    /// Columns of the product, padding included.
    pub stride: usize,
    /// First column in the output where the product is written there.
    pub column: usize,
    /// `[stride]`, of products that are the output.
    pub bias: Option<Constant>,
}

/// Columns that are computed apart and put into their place.
#[derive(Debug)]
pub(super) struct PlacedOutput {
    pub product: usize,
    pub product_column: usize,
    pub column: usize,
    pub rows: usize,
    pub scale: Option<Constant>,
    pub bias: Option<Constant>,
    pub low_rank: Option<LowRank>,
}

/// `y += up (down x)`.
#[derive(Debug)]
pub(super) struct LowRank {
    pub down: DeviceMatrix,
    pub up: DeviceMatrix,
    pub rank: usize,
}

/// Whether products are written where the output wants them: no factor or branch stands between, and no padding of a product
/// falls on columns of another.
pub(super) fn is_direct(projection: &Projection) -> bool {
    let plain = |o: &ProjectionOutput| o.scale.is_none() && o.low_rank.is_none();
    if !projection.outputs.iter().all(plain) {
        return false;
    }
    projection.direct
        || projection.products.iter().enumerate().all(|(index, product)| {
            let own = || projection.outputs.iter().filter(|o| o.product == index);
            let first = first_column(projection, index);
            own().map(|o| o.rows).sum::<usize>() == product.stride
                && own().all(|o| first.is_some_and(|first| o.column == first + o.product_column))
        })
}

/// Column of the output where a product's first column is.
fn first_column(projection: &Projection, product: usize) -> Option<usize> {
    let own = projection.outputs.iter().filter(|o| o.product == product);
    own.map(|o| o.column.checked_sub(o.product_column)).min()?
}

/// Builds the network: a place of every matrix in the image at `image`, and the constants that are wanted.
pub(super) struct Builder<'a> {
    config: &'a ModelConfig,
    pub(super) bundle: &'a Bundle,
    pub(super) image: u64,
    pub(super) constants: Constants,
}

impl<'a> Builder<'a> {
    pub(super) fn new(config: &'a ModelConfig, bundle: &'a Bundle, image: u64) -> Self {
        Self { config, bundle, image, constants: Constants::default() }
    }

    /// `divisors` of rotary frequencies, where the bundle has a vector of them.
    pub(super) fn build(
        mut self,
        graph: &Graph,
        divisors: Option<Vec<f32>>,
    ) -> Result<(Network, Constants), LoadError> {
        let embedding = self.matrix(&graph.embedding)?;
        let layers = graph.layers.iter().map(|layer| self.layer(layer)).collect::<Result<_, _>>()?;
        let norm = self.norm(&graph.norm);
        let head = self.projection(&graph.head)?;
        let mut frequencies: Vec<_> = self.config.ropes.iter().map(|rope| rope.frequencies()).collect();
        if let (Some(divisors), Some(first), Some(rope)) =
            (divisors, frequencies.first_mut(), self.config.ropes.first())
        {
            let scaling = RopeScaling::Divisors { divisors, attention_factor: f64::from(first.1) };
            *first = inverse_frequencies(rope.theta, rope.rotary_dim, &scaling);
        }
        let ropes = frequencies.into_iter().map(|(values, factor)| {
            let half = values.len();
            DeviceRope { frequencies: self.constants.host(values), factor, half }
        });
        let ropes = ropes.collect();
        Ok((Network { embedding, layers, norm, head, ropes }, self.constants))
    }

    fn norm(&mut self, vector: &VectorRef) -> Constant {
        self.constants.vector(vector, self.config.norm_offset)
    }

    fn layer(&mut self, layer: &Layer) -> Result<DeviceLayer, LoadError> {
        let attention = &layer.attention;
        let head_norms = match (&attention.q_norm, &attention.k_norm) {
            (Some(q), Some(k)) => Some((self.norm(q), self.norm(k))),
            _ => None,
        };
        Ok(DeviceLayer {
            input_norm: self.norm(&layer.input_norm),
            qkv: self.projection(&attention.qkv)?,
            heads_at: [0, 1, 2].map(|i| attention.qkv.outputs[i].column),
            head_norms,
            output: self.projection(&attention.output)?,
            post_attention_norm: layer.post_attention_norm.as_ref().map(|n| self.norm(n)),
            feed_forward_norm: self.norm(&layer.feed_forward_norm),
            feed_forward: match &layer.feed_forward {
                FeedForward::Dense(mlp) => DeviceFeedForward::Dense(self.mlp(mlp)?),
                FeedForward::Experts(experts) => DeviceFeedForward::Experts(self.experts(experts)?),
            },
            post_feed_forward_norm: layer.post_feed_forward_norm.as_ref().map(|n| self.norm(n)),
        })
    }

    fn mlp(&mut self, mlp: &GatedMlp) -> Result<DeviceMlp, LoadError> {
        Ok(DeviceMlp {
            gate_up: self.projection(&mlp.gate_up)?,
            columns: [0, 1].map(|i| mlp.gate_up.outputs[i].column),
            down: self.projection(&mlp.down)?,
        })
    }

    pub(super) fn unsupported(&self, what: &str) -> LoadError {
        LoadError::Device {
            device: "cuda".to_owned(),
            reason: format!(
                "{}: this version has no CUDA kernels for {what}; use --device cpu",
                self.bundle.dir().display()
            ),
        }
    }

    pub(super) fn projection(&mut self, projection: &Projection) -> Result<DeviceProjection, LoadError> {
        let direct = is_direct(projection);
        let mut products = Vec::with_capacity(projection.products.len());
        for (index, product) in projection.products.iter().enumerate() {
            let biases: Vec<(usize, &VectorRef)> = projection
                .outputs
                .iter()
                .filter(|o| direct && o.product == index)
                .filter_map(|o| Some((o.product_column, o.bias.as_ref()?)))
                .collect();
            products.push(DeviceProduct {
                matrix: self.matrix(&product.matrix)?,
                input_scale: product.input_scale.as_ref().map(|scale| self.constants.vector(scale, 0.0)),
                stride: product.stride,
                column: first_column(projection, index).unwrap_or(0),
                bias: (!biases.is_empty()).then(|| self.constants.columns(product.stride, &biases)),
            });
        }
        let placed = match direct {
            true => None,
            false => Some(projection.outputs.iter().map(|o| self.placed(o)).collect::<Result<_, _>>()?),
        };
        Ok(DeviceProjection { products, placed, k: projection.k, stride: projection.stride })
    }

    fn placed(&mut self, output: &ProjectionOutput) -> Result<PlacedOutput, LoadError> {
        let low_rank = match &output.low_rank {
            None => None,
            Some(branch) => Some(LowRank {
                down: self.matrix(&branch.down)?,
                up: self.matrix(&branch.up)?,
                rank: branch.down_stride,
            }),
        };
        Ok(PlacedOutput {
            product: output.product,
            product_column: output.product_column,
            column: output.column,
            rows: output.rows,
            scale: output.scale.as_ref().map(|s| self.constants.vector(s, 0.0)),
            bias: output.bias.as_ref().map(|b| self.constants.vector(b, 0.0)),
            low_rank,
        })
    }

    pub(super) fn matrix(&self, matrix: &MatrixRef) -> Result<DeviceMatrix, LoadError> {
        let plane = |offset: u64, bytes: u64| DevicePlane { address: self.image + offset, bytes };
        let planes: Vec<DevicePlane> = matrix
            .plane_offsets(self.bundle)
            .into_iter()
            .zip(&self.bundle.tensor_at(matrix.place().0).0.planes)
            .map(|(offset, described)| plane(offset, described.size))
            .collect();
        let made = match matrix.storage(self.bundle) {
            MatrixStorage::Tiled(geometry) => DeviceMatrix::tiled(&Arc::<TiledMatrix>::new(geometry.clone()), &planes),
            MatrixStorage::Rows { dtype, n, k } => DeviceMatrix::rows(dtype, n, k, planes[0]),
            MatrixStorage::Raw { format, n, k } => DeviceMatrix::raw(format, n, k, planes[0]),
        };
        made.map_err(|error| {
            let name = &self.bundle.tensor_at(matrix.place().0).0.name;
            LoadError::Device { device: "cuda".to_owned(), reason: format!("tensor {name}: {error}") }
        })
    }
}
