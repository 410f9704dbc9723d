//! What a launch may ask for.

use super::params::Request;
use super::{DeviceMatrix, ExpertFusion, ExpertGroups, GemmRequest, OutType};
use crate::cuda::CudaError;
use crate::cuda::error::require;

/// Experts of one launch, at most: the extent of a grid.
const MAX_EXPERTS: u32 = 65_535;

/// The request as kernels are given it.
pub(super) fn check(
    matrix: &DeviceMatrix,
    request: &GemmRequest,
    groups: Option<(&ExpertGroups, &ExpertFusion)>,
) -> Result<Request, CudaError> {
    let (n, k) = (matrix.padded_n(), matrix.k());
    let ok = |condition, what: &dyn Fn() -> String| require(condition, "gemm", what);
    ok(request.x_stride >= k, &|| format!("rows of activations {} apart, K is {k}", request.x_stride))?;
    let columns = if groups.is_some_and(|(_, fusion)| fusion.gate.is_some()) { n / 2 } else { n };
    ok(request.out_stride >= columns, &|| {
        format!("rows of a result {} apart, N with its padding is {columns}", request.out_stride)
    })?;
    ok(!request.accumulate || request.out_type == OutType::F32, &|| "an accumulated result in bf16".to_owned())?;
    let out_align = if request.out_type == OutType::F32 { 4 } else { 2 };
    let aligned = request.x.is_multiple_of(2)
        && request.out.is_multiple_of(out_align)
        && request.bias.is_none_or(|bias| bias.is_multiple_of(4));
    ok(aligned, &|| format!("activations at {:#x} and a result at {:#x}", request.x, request.out))?;
    let groups = groups.map(|(groups, _)| groups);
    if let Some(groups) = groups {
        ok(request.bias.is_none(), &|| "a bias of experts".to_owned())?;
        let fits = groups.count <= MAX_EXPERTS && groups.stride.is_multiple_of(16) && groups.offsets.is_multiple_of(4);
        ok(fits, &|| {
            format!("{} experts {} bytes apart, offsets at {:#x}", groups.count, groups.stride, groups.offsets)
        })?;
    }
    Ok(Request {
        x: request.x,
        out: request.out,
        bias: request.bias.unwrap_or(0),
        offsets: groups.map_or(0, |groups| groups.offsets),
        expert_stride: groups.map_or(0, |groups| groups.stride),
        m: request.m,
        x_stride: request.x_stride,
        out_stride: request.out_stride,
        n,
        out_bf16: u32::from(request.out_type == OutType::Bf16),
        accumulate: u32::from(request.accumulate),
        ..Request::default()
    })
}
