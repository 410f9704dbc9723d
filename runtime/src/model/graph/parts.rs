//! Finding projections in a bundle, whatever has been fused with what.
//!
//! Axes: N out-features, K in-features, T tokens.

use super::GraphError;
use super::weights::{MatrixRef, VectorRef, storage_error};
use std::collections::HashMap;
use vt_bundle::Bundle;
use vt_bundle::geometry::Geometry;
use vt_bundle::manifest::{Part, Placement, Tensor};

/// Stands for an expert's index in the part names of stacked experts.
const EXPERT: &str = "{expert}";

/// Several logical projections of one input, such as query, key and value.
#[derive(Debug)]
pub struct Projection {
    /// The products to compute; one where everything is fused.
    pub products: Vec<Product>,
    /// The logical projections, in the order in which they were asked for.
    pub outputs: Vec<ProjectionOutput>,
    /// In-features.
    pub k: usize,
    /// Distance between rows of the output: that of the only product, or the sum of the logical rows.
    pub stride: usize,
    /// The only product is the output; otherwise columns are copied from products to the output.
    pub direct: bool,
    /// Where activations are quantised, those of every row are the sum of two 8-bit numbers; otherwise only those of rows
    /// whose logits are wanted.
    pub paired: bool,
}

/// One matrix product.
#[derive(Debug)]
pub struct Product {
    /// The matrix.
    pub matrix: MatrixRef,
    /// Multiplies the input, `[K]`.
    pub input_scale: Option<VectorRef>,
    /// Columns of the result, padding included.
    pub stride: usize,
}

/// Where a logical projection comes from, and where its columns are.
#[derive(Debug)]
pub struct ProjectionOutput {
    /// Index into [`Projection::products`].
    pub product: usize,
    /// First column in the product.
    pub product_column: usize,
    /// First column in the rows of the output.
    pub column: usize,
    /// Columns: rows of the logical matrix.
    pub rows: usize,
    /// One number that multiplies the columns (`.scale` tensors of GGUF files).
    pub scale: Option<VectorRef>,
    /// Added to the columns.
    pub bias: Option<VectorRef>,
    /// Branch beside the quantised matrix.
    pub low_rank: Option<LowRankRef>,
}

/// A low-rank branch: `y += up (down (x * input_scale))`.
#[derive(Debug)]
pub struct LowRankRef {
    /// `[rank, K]`.
    pub down: MatrixRef,
    /// `[N, rank]`.
    pub up: MatrixRef,
    /// Columns of a product with `down`.
    pub down_stride: usize,
    /// Columns of a product with `up`.
    pub up_stride: usize,
}

/// How the columns of an output lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spacing {
    /// As the product has them, padding included.
    Padded,
    /// One after the other.
    Dense,
}

/// Where a part was found.
#[derive(Clone, Copy)]
struct Found<'a> {
    index: usize,
    expert: u64,
    tensor: &'a Tensor,
    geometry: &'a Geometry,
    part: &'a Part,
}

/// Looks parts up by name and remembers which tensors have been used.
pub(super) struct Resolver<'a> {
    architecture: &'a str,
    bundle: &'a Bundle,
    parts: HashMap<&'a str, (usize, usize)>,
    used: Vec<bool>,
}

impl<'a> Resolver<'a> {
    pub(super) fn new(architecture: &'a str, bundle: &'a Bundle) -> Self {
        let tensors = &bundle.manifest().tensors;
        let image = tensors.iter().enumerate().filter(|(_, t)| t.placement == Placement::Image);
        let parts =
            image.flat_map(|(i, t)| t.parts.iter().enumerate().map(move |(p, part)| (part.name.as_str(), (i, p))));
        Self { architecture, bundle, parts: parts.collect(), used: vec![false; tensors.len()] }
    }

    /// Whether a tensor or part has that name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.parts.contains_key(name)
    }

    /// Finds a part by its own name, or, where it names an expert, among the stacked ones.
    fn find(&self, name: &str) -> Option<Found<'a>> {
        let (at, expert) = match self.parts.get(name) {
            Some(at) => (*at, 0),
            None => {
                let (path, rest) = name.split_once(".experts.")?;
                let (index, tail) = rest.split_once('.')?;
                let expert = index.parse().ok()?;
                let at = *self.parts.get(format!("{path}.experts.{EXPERT}.{tail}").as_str())?;
                (at, expert)
            }
        };
        let (tensor, geometry) = self.bundle.tensor_at(at.0);
        let part = &tensor.parts[at.1];
        (expert < tensor.expert_count()).then_some(Found { index: at.0, expert, tensor, geometry, part })
    }

    fn need(&mut self, name: &str) -> Result<Found<'a>, GraphError> {
        let Some(found) = self.find(name) else {
            return Err(GraphError::Missing { name: name.to_owned(), architecture: self.architecture.to_owned() });
        };
        self.used[found.index] = true;
        Ok(found)
    }

    /// A part that must be `[rows, k]`.
    fn need_matrix(&mut self, name: &str, rows: usize, k: usize) -> Result<Found<'a>, GraphError> {
        let found = self.need(name)?;
        let own_k = if found.tensor.shape.len() == 2 { found.tensor.shape[1] } else { 0 };
        if (found.part.rows, own_k) != (rows as u64, k as u64) {
            let expected = vec![rows as u64, k as u64];
            return Err(GraphError::Shape { name: name.to_owned(), found: vec![found.part.rows, own_k], expected });
        }
        Ok(found)
    }

    /// A matrix that is alone in its tensor.
    pub(super) fn whole_matrix(&mut self, name: &str, rows: usize, k: usize) -> Result<MatrixRef, GraphError> {
        let found = self.need_matrix(name, rows, k)?;
        if found.tensor.parts.len() != 1 {
            let all = found.tensor.shape.clone();
            return Err(GraphError::Shape { name: name.to_owned(), found: all, expected: vec![rows as u64, k as u64] });
        }
        MatrixRef::new(found.index, found.expert, found.tensor, found.geometry)
    }

    /// A vector, or the part of a fused one (biases).
    pub(super) fn vector(&mut self, name: &str, len: usize) -> Result<VectorRef, GraphError> {
        let found = self.need(name)?;
        if found.tensor.shape.len() != 1 || found.part.rows != len as u64 {
            let shape = found.tensor.shape.clone();
            return Err(GraphError::Shape { name: name.to_owned(), found: shape, expected: vec![len as u64] });
        }
        VectorRef::new(found.index, found.expert, found.tensor, found.part.row_start as usize, len)
    }

    /// Projections of one input of width `k`: `modules` gives each one's path without `.weight`, and its rows.
    ///
    /// Parts that lie in one tensor and take the same input scale are one product. `spacing` says whether rows of the
    /// output may hold padding between and after the logical columns.
    pub(super) fn projection(
        &mut self,
        modules: &[(String, usize)],
        k: usize,
        bias: bool,
        spacing: Spacing,
    ) -> Result<Projection, GraphError> {
        let mut products: Vec<Product> = Vec::new();
        let mut outputs = Vec::with_capacity(modules.len());
        let mut column = 0;
        for (module, rows) in modules {
            let found = self.need_matrix(&format!("{module}.weight"), *rows, k)?;
            let matrix = MatrixRef::new(found.index, found.expert, found.tensor, found.geometry)?;
            let input_scale = match &found.part.pre_quant_scale {
                Some(name) => Some(self.vector(&of_expert(name, found.expert), k)?),
                None => None,
            };
            let low_rank = match &found.part.low_rank {
                Some(branch) => {
                    let (down, up) = (of_expert(&branch.down, found.expert), of_expert(&branch.up, found.expert));
                    Some(self.low_rank(&down, &up, *rows, k)?)
                }
                None => None,
            };
            let bias = bias.then(|| self.vector(&format!("{module}.bias"), *rows)).transpose()?;
            let scale = self.factor(module)?;
            let same = |p: &Product| p.matrix == matrix && p.input_scale == input_scale;
            let product = products.iter().position(same).unwrap_or(products.len());
            if product == products.len() {
                let stride = match found.geometry {
                    Geometry::Tiled(matrix) => matrix.padded_n(),
                    Geometry::Rows { rows, .. } => *rows,
                };
                products.push(Product { matrix, input_scale, stride: stride as usize });
            }
            let product_column = found.part.row_start as usize;
            outputs.push(ProjectionOutput { product, product_column, column, rows: *rows, scale, bias, low_rank });
            column += rows;
        }
        let mut stride = column;
        let mut direct = false;
        if let [only] = products.as_slice()
            && (spacing == Spacing::Padded || only.stride == column)
        {
            // The product is the output: its columns are where the tensor has its parts.
            (stride, direct) = (only.stride, true);
            outputs.iter_mut().for_each(|o| o.column = o.product_column);
        }
        Ok(Projection { products, outputs, k, stride, direct, paired: false })
    }

    /// The number that multiplies a projection's columns, where there is one: a tensor beside the matrix, or an element of the
    /// vector beside a stack of experts, of gate and up together where the file stacks them so.
    fn factor(&mut self, module: &str) -> Result<Option<VectorRef>, GraphError> {
        let own = format!("{module}.scale");
        if self.has(&own) {
            return self.vector(&own, 1).map(Some);
        }
        let Some((path, rest)) = module.split_once(".experts.") else { return Ok(None) };
        let Some((Ok(expert), tail)) = rest.split_once('.').map(|(index, tail)| (index.parse::<usize>(), tail)) else {
            return Ok(None);
        };
        let both = matches!(tail, "gate_proj" | "up_proj").then_some("gate_up_proj");
        let names = [Some(tail), both].into_iter().flatten().map(|tail| format!("{path}.experts.{tail}.scale"));
        let Some(name) = names.into_iter().find(|name| self.has(name)) else { return Ok(None) };
        let found = self.need(&name)?;
        let count = found.part.rows;
        if found.tensor.shape.len() > 1 || (count != 1 && expert as u64 >= count) {
            let shape = found.tensor.shape.clone();
            return Err(GraphError::Shape { name, found: shape, expected: vec![expert as u64 + 1] });
        }
        let element = if count == 1 { 0 } else { expert };
        let first = found.part.row_start as usize + element;
        VectorRef::new(found.index, found.expert, found.tensor, first, 1).map(Some)
    }

    fn low_rank(&mut self, down: &str, up: &str, rows: usize, k: usize) -> Result<LowRankRef, GraphError> {
        let rank = self.need(down)?.part.rows as usize;
        // Branches are stored as floats: a tiled one would need its padded rank as the other's K.
        let branch = |this: &mut Self, name: &str, rows: usize, k: usize| {
            let found = this.need_matrix(name, rows, k)?;
            match found.geometry {
                Geometry::Rows { .. } => this.whole_matrix(name, rows, k),
                Geometry::Tiled(_) => Err(storage_error(found.tensor, "low-rank branches of row-major floats")),
            }
        };
        let (down, up) = (branch(self, down, rank, k)?, branch(self, up, rows, rank)?);
        Ok(LowRankRef { down, up, down_stride: rank, up_stride: rows })
    }

    /// Refuses a bundle with tensors in the image that nothing has asked for.
    pub(super) fn nothing_unused(&self) -> Result<(), GraphError> {
        let tensors = self.bundle.manifest().tensors.iter().zip(&self.used);
        let mut unused = tensors.filter(|(t, used)| t.placement == Placement::Image && !**used).map(|(t, _)| t);
        match unused.next() {
            None => Ok(()),
            Some(first) => Err(GraphError::Unused {
                count: 1 + unused.count(),
                first: first.name.clone(),
                architecture: self.architecture.to_owned(),
            }),
        }
    }
}

/// A name of stacked experts for one of them.
fn of_expert(name: &str, expert: u64) -> String {
    name.replace(EXPERT, &expert.to_string())
}
