//! Mixtures of experts on the device: routing, the order of rows by expert, and the sums back; launches of
//! `cuda/moe/route.cu` and `cuda/moe/router.cu`. Nothing returns to the host.
//!
//! A pair is a token and one of its experts, `t * top_k + j`. Rows of the experts' products are the pairs sorted by expert,
//! and within an expert by token.

use super::error::require;
use super::gemm::DeviceMatrix;
use super::module::{Function, Module, arguments};
use super::{CudaContext, CudaError, CudaStream};
use crate::FloatType;
use std::sync::Arc;

/// Threads of a block of the row-wise kernels.
const THREADS: u32 = 128;
/// Threads of a block of the sort.
const SORT_THREADS: u32 = 1024;
/// Most tokens that one thread block routes and sorts.
const FEW_TOKENS: usize = 64;
/// Extent of a grid in y, at most.
const MAX_GRID_Y: u32 = 65_535;
/// Threads of a block that computes scores; the experts of it, and its tokens, where it also routes them.
const ROUTER_THREADS: u32 = 512;
const ROUTER_EXPERTS: u32 = 16;
const ROUTER_TOKENS: u32 = 8;
/// Most experts of a layer.
pub const MAX_EXPERTS: usize = 512;
/// Most experts of a token.
pub const MAX_TOP_K: usize = 32;

/// Sizes of a layer's routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    /// T.
    pub tokens: usize,
    /// E, up to [`MAX_EXPERTS`].
    pub experts: usize,
    /// Experts of a token, up to [`MAX_TOP_K`].
    pub top_k: usize,
    /// Whether a token's weights are divided by their sum.
    pub normalise: bool,
}

/// What routing writes: addresses of u32 and f32 arrays in device memory.
#[derive(Clone, Copy, Debug)]
pub struct RoutingTables {
    /// u32 `[T, top_k]`: experts of each token, in order of their indices.
    pub experts: u64,
    /// f32 `[T, top_k]`: their weights.
    pub weights: u64,
    /// u32 `[E + 1]`: rows of expert `e` are `offsets[e] .. offsets[e + 1]`.
    pub offsets: u64,
    /// u32 `[T * top_k]`: the pair of each row.
    pub pairs: u64,
    /// u32 `[T * top_k]`: the row of each pair.
    pub rows: u64,
    /// u32 `[64]`, counters of [`MoeKernels::router`]: zero before the first launch, and after each.
    pub done: u64,
}

impl RoutingTables {
    /// Bytes of all tables, each at a multiple of 256; `None` on overflow.
    pub fn bytes(tokens: usize, experts: usize, top_k: usize) -> Option<u64> {
        Self::sizes(tokens, experts, top_k)?.iter().try_fold(0u64, |sum, size| sum.checked_add(*size))
    }

    /// The tables in memory of [`RoutingTables::bytes`] at `address`, a multiple of 256; `None` on overflow.
    pub fn at(address: u64, tokens: usize, experts: usize, top_k: usize) -> Option<Self> {
        let mut next = address;
        let mut places = [0; 6];
        for (place, size) in places.iter_mut().zip(Self::sizes(tokens, experts, top_k)?) {
            *place = next;
            next = next.checked_add(size)?;
        }
        let [done, experts, weights, offsets, pairs, rows] = places;
        Some(Self { experts, weights, offsets, pairs, rows, done })
    }

    fn sizes(tokens: usize, experts: usize, top_k: usize) -> Option<[u64; 6]> {
        let bytes = |entries: usize| u64::try_from(entries).ok()?.checked_mul(4)?.checked_next_multiple_of(256);
        let pairs = bytes(tokens.checked_mul(top_k)?)?;
        // The counters first: they stay where they are, whatever T.
        Some([bytes(64)?, pairs, pairs, bytes(experts.checked_add(1)?)?, pairs, pairs])
    }
}

/// Rows of one type in device memory.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRows {
    /// Address, a multiple of 16.
    pub address: u64,
    /// f32 or bf16.
    pub dtype: FloatType,
    /// Elements from row to row, a multiple of 8.
    pub stride: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Route {
    logits: u64,
    experts: u64,
    weights: u64,
    stride: u32,
    at: u32,
    tokens: u32,
    count: u32,
    top_k: u32,
    normalise: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Sort {
    experts: u64,
    offsets: u64,
    pairs: u64,
    rows: u64,
    count: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RouteAndSort {
    route: Route,
    sort: Sort,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Router {
    x: u64,
    norm: u64,
    weight: u64,
    normed: u64,
    done: u64,
    route: Route,
    sort: Sort,
    width: u32,
    eps: f32,
}

/// What the router of a layer reads and writes beside the tables: arguments of [`MoeKernels::router`].
#[derive(Clone, Copy, Debug)]
pub struct RouterRows {
    /// f32 `[T, width]`, the residual stream.
    pub x: u64,
    /// f32 `[width]`, weights of the norm before the router.
    pub norm: u64,
    /// Added to the mean square.
    pub eps: f32,
    /// K, a multiple of 8.
    pub width: usize,
    /// bf16 `[T, width]`: the norm of `x`, which is written.
    pub normed: u64,
    /// f32 rows of scores `stride` elements apart, which are written.
    pub scores: u64,
    /// Elements from row to row.
    pub stride: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Gather {
    x: u64,
    pairs: u64,
    out: u64,
    stride: u32,
    out_stride: u32,
    width: u32,
    top_k: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Combine {
    y: u64,
    rows: u64,
    weights: u64,
    out: u64,
    stride: u32,
    out_stride: u32,
    width: u32,
    top_k: u32,
    accumulate: u32,
}

/// The kernels.
#[derive(Debug)]
pub struct MoeKernels {
    route: Function,
    route_few: Function,
    sort: Function,
    /// For few tokens and for many, by [`FloatType`].
    routers: [[Function; 2]; 3],
    gather: Function,
    combine_f32: Function,
    combine_bf16: Function,
}

impl MoeKernels {
    /// Loads them.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there are none for the device.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let module = Module::load(context, "moe/route")?;
        let router = Module::load(context, "moe/router")?;
        let routers = |few, many| Ok::<_, CudaError>([router.function(few, 0)?, router.function(many, 0)?]);
        Ok(Self {
            routers: [
                routers(c"vt_moe_router_few_f32", c"vt_moe_router_many_f32")?,
                routers(c"vt_moe_router_few_f16", c"vt_moe_router_many_f16")?,
                routers(c"vt_moe_router_few_bf16", c"vt_moe_router_many_bf16")?,
            ],
            route: module.function(c"vt_moe_route", 0)?,
            route_few: module.function(c"vt_moe_route_few", 0)?,
            sort: module.function(c"vt_moe_sort", 0)?,
            gather: module.function(c"vt_moe_gather", 0)?,
            combine_f32: module.function(c"vt_moe_combine_f32", 0)?,
            combine_bf16: module.function(c"vt_moe_combine_bf16", 0)?,
        })
    }

    /// Fills all `tables` from the router's logits, f32 rows `stride` elements apart with the experts from column `at`:
    /// softmax over all experts, then the most likely ones, of equals the lower index. One
    /// launch for up to 64 tokens, otherwise two.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn route(
        &self,
        stream: &CudaStream,
        routing: &Routing,
        logits: u64,
        stride: usize,
        at: usize,
        tables: &RoutingTables,
    ) -> Result<(), CudaError> {
        let (route, sort) = parts(routing, logits, stride, at, tables)?;
        let Routing { tokens, experts, .. } = *routing;
        if tokens <= FEW_TOKENS {
            let parameters = RouteAndSort { route, sort };
            let grid = [u32::from(tokens > 0), 1, 1];
            // SAFETY: `RouteAndSort` is the kernel's parameter; the addresses name what `RoutingTables` and `logits` say,
            // which the caller keeps.
            return unsafe {
                self.route_few.launch_early(stream, grid, [SORT_THREADS, 1, 1], 0, &mut arguments![parameters])
            };
        }
        let blocks = (tokens as u32).div_ceil(THREADS / 32);
        // SAFETY: `Route` and `Sort` are the kernels' parameters; as above.
        unsafe {
            self.route.launch_early(stream, [blocks, 1, 1], [THREADS, 1, 1], 0, &mut arguments![route])?;
            self.sort.launch_early(stream, [experts as u32, 1, 1], [SORT_THREADS, 1, 1], 0, &mut arguments![sort])
        }
    }

    /// The norm before the router, its scores, and all `tables` as [`MoeKernels::route`] fills them. `matrix` holds the experts'
    /// rows. Scores are products of f32 activations, and do not depend on how many tokens there are. One launch for up to 64
    /// tokens, otherwise three.
    ///
    /// # Errors
    /// [`CudaError`]; [`CudaError::Unsupported`] where [`MoeKernels::routes`] says no.
    pub fn router(
        &self,
        stream: &CudaStream,
        routing: &Routing,
        matrix: &DeviceMatrix,
        rows: &RouterRows,
        tables: &RoutingTables,
    ) -> Result<(), CudaError> {
        let op = "expert routing";
        let unsupported = || CudaError::Unsupported { op, what: format!("{rows:?} by {matrix:?}") };
        let (dtype, weight) =
            matrix.float_rows().filter(|_| Self::routes(matrix, rows.width)).ok_or_else(unsupported)?;
        let aligned = [rows.x, rows.norm, rows.normed].iter().all(|address| address.is_multiple_of(16));
        require(aligned && routing.experts <= matrix.padded_n() as usize, op, || format!("{rows:?}"))?;
        let (route, sort) = parts(routing, rows.scores, rows.stride, 0, tables)?;
        let (few, of_exact) = (routing.tokens <= FEW_TOKENS, dtype == FloatType::Bf16);
        let parameters = Router {
            x: rows.x,
            norm: rows.norm,
            weight,
            normed: rows.normed,
            done: tables.done,
            route,
            sort,
            width: rows.width as u32,
            eps: rows.eps,
        };
        let (experts, tokens) = match () {
            () if few => (ROUTER_EXPERTS, ROUTER_TOKENS),
            () if of_exact => (2 * ROUTER_EXPERTS, 4 * ROUTER_TOKENS),
            () => (2 * ROUTER_EXPERTS, 2 * ROUTER_TOKENS),
        };
        let tiles = (routing.tokens as u32).div_ceil(tokens);
        require(tiles <= MAX_GRID_Y, op, || format!("{} tokens", routing.tokens))?;
        let grid = [route.count.div_ceil(experts), tiles, 1];
        let index = match dtype {
            FloatType::F32 => 0,
            FloatType::F16 => 1,
            FloatType::Bf16 => 2,
        };
        let function = &self.routers[index][usize::from(!few)];
        // SAFETY: `Router` is the kernel's parameter; the addresses name what `RouterRows` and `RoutingTables` say, which the
        // caller keeps.
        unsafe { function.launch_early(stream, grid, [ROUTER_THREADS, 1, 1], 0, &mut arguments![parameters])? };
        if few { Ok(()) } else { self.route(stream, routing, rows.scores, rows.stride, 0, tables) }
    }

    /// Whether [`MoeKernels::router`] reads the matrix: rows of floats, of `width` elements.
    pub fn routes(matrix: &DeviceMatrix, width: usize) -> bool {
        matrix.float_rows().is_some() && width.is_multiple_of(8) && matrix.k() as usize == width
    }

    /// `out` bf16 `[T * top_k, width]`: row `r` is the row of `x` bf16 `[T, width]` whose pair is `tables.pairs[r]`.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn gather(
        &self,
        stream: &CudaStream,
        routing: &Routing,
        x: ExpertRows,
        width: usize,
        tables: &RoutingTables,
        out: ExpertRows,
    ) -> Result<(), CudaError> {
        let op = "expert rows";
        let bf16 = (x.dtype, out.dtype) == (FloatType::Bf16, FloatType::Bf16);
        require(bf16, op, || format!("{:?} to {:?}", x.dtype, out.dtype))?;
        check_rows(op, x, width)?;
        check_rows(op, out, width)?;
        let count = pairs(op, routing)?;
        let parameters = Gather {
            x: x.address,
            pairs: tables.pairs,
            out: out.address,
            stride: x.stride as u32,
            out_stride: out.stride as u32,
            width: width as u32,
            top_k: routing.top_k as u32,
        };
        let grid = [count, (width as u32).div_ceil(THREADS * 8), 1];
        // SAFETY: `Gather` is the kernel's parameter; as in `route`.
        unsafe { self.gather.launch_early(stream, grid, [THREADS, 1, 1], 0, &mut arguments![parameters]) }
    }

    /// `out` f32 `[T, width]`: the weighted sum of each token's rows of `y`, in order of the experts' indices; added to what
    /// is there where `accumulate`.
    ///
    /// # Errors
    /// [`CudaError`].
    #[expect(clippy::too_many_arguments, reason = "a launch: each is an argument of the kernel")]
    pub fn combine(
        &self,
        stream: &CudaStream,
        routing: &Routing,
        y: ExpertRows,
        width: usize,
        tables: &RoutingTables,
        out: ExpertRows,
        accumulate: bool,
    ) -> Result<(), CudaError> {
        let op = "sum of experts";
        require(out.dtype == FloatType::F32, op, || format!("sums in {:?}", out.dtype))?;
        check_rows(op, y, width)?;
        check_rows(op, out, width)?;
        pairs(op, routing)?;
        let function = match y.dtype {
            FloatType::F32 => &self.combine_f32,
            FloatType::Bf16 => &self.combine_bf16,
            FloatType::F16 => return Err(CudaError::Unsupported { op, what: "rows of f16".to_owned() }),
        };
        let parameters = Combine {
            y: y.address,
            rows: tables.rows,
            weights: tables.weights,
            out: out.address,
            stride: y.stride as u32,
            out_stride: out.stride as u32,
            width: width as u32,
            top_k: routing.top_k as u32,
            accumulate: u32::from(accumulate),
        };
        let grid = [routing.tokens as u32, (width as u32).div_ceil(THREADS * 4), 1];
        // SAFETY: `Combine` is the kernel's parameter; as in `route`.
        unsafe { function.launch_early(stream, grid, [THREADS, 1, 1], 0, &mut arguments![parameters]) }
    }
}

/// What the kernels are given of a routing, checked.
fn parts(
    routing: &Routing,
    logits: u64,
    stride: usize,
    at: usize,
    tables: &RoutingTables,
) -> Result<(Route, Sort), CudaError> {
    let op = "expert routing";
    let Routing { tokens, experts, top_k, normalise } = *routing;
    let fits = experts <= MAX_EXPERTS && top_k > 0 && top_k <= MAX_TOP_K.min(experts);
    require(fits, op, || format!("{top_k} of {experts} experts"))?;
    let columns = at.checked_add(experts).is_some_and(|end| end <= stride && u32::try_from(stride).is_ok());
    require(columns, op, || format!("{experts} columns at {at} of {stride}"))?;
    require(tokens <= 1 << 24, op, || format!("{tokens} tokens"))?;
    let count = (tokens * top_k) as u32;
    let route = Route {
        logits,
        experts: tables.experts,
        weights: tables.weights,
        stride: stride as u32,
        at: at as u32,
        tokens: tokens as u32,
        count: experts as u32,
        top_k: top_k as u32,
        normalise: u32::from(normalise),
    };
    let sort = Sort { experts: tables.experts, offsets: tables.offsets, pairs: tables.pairs, rows: tables.rows, count };
    Ok((route, sort))
}

/// Pairs of a launch, as the x side of a grid.
fn pairs(op: &'static str, routing: &Routing) -> Result<u32, CudaError> {
    let count = routing.tokens.checked_mul(routing.top_k).and_then(|n| i32::try_from(n).ok());
    count.map(|n| n as u32).ok_or_else(|| CudaError::Unsupported { op, what: format!("{routing:?}") })
}

fn check_rows(op: &'static str, rows: ExpertRows, width: usize) -> Result<(), CudaError> {
    let aligned = rows.address.is_multiple_of(16) && rows.stride.is_multiple_of(8) && width.is_multiple_of(8);
    let fits = aligned && width <= rows.stride && i32::try_from(rows.stride).is_ok();
    require(fits, op, || format!("{width} columns of {rows:?}"))
}
