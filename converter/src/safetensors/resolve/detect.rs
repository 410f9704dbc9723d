//! The encoding of one weight, from stored types and shapes.

use super::{Fp8Scales, QuantConfig, ResolveError, ResolvedWeight, SourceEncoding, Stack, SvdBranch, Table, integer};
use crate::source::PlainDtype as D;

/// Names under which the scale of an FP8 weight is stored. All of them multiply, `weight_scale_inv` too.
const FP8_SCALES: [&str; 4] = [".weight_scale", ".weight_scale_inv", ".scale", ".scale_weight"];

/// Element types that scales may have where they are floats.
pub(super) const FLOATS: [D; 3] = [D::F32, D::Bf16, D::F16];

/// Codes per E8M0 scale in the microscaling formats.
const MX_GROUP: u64 = 32;

/// The quantised weight whose codes are in that tensor; `None` if the tensor is nothing of the kind.
pub(super) fn quantised(
    table: &mut Table<'_>,
    config: &QuantConfig,
    index: usize,
) -> Result<Option<ResolvedWeight>, ResolveError> {
    let (name, dtype) = (table.tensor(index).name.as_str(), table.dtype(index));
    let weight = if let Some(module) = name.strip_suffix(".weight_packed") {
        if dtype == D::I32 { integer::packed(table, index, module)? } else { fp4(table, index, module, true)? }
    } else if let Some(module) = name.strip_suffix(".qweight") {
        integer::gptq_or_awq(table, config, index, module)?
    } else if let Some(module) = name.strip_suffix("_blocks")
        && dtype == D::U8
        && let Some(scale) = table.find(&format!("{module}_scales"))
    {
        mxfp4_blocks(table, index, module, scale)?
    } else if let Some(module) = name.strip_suffix(".weight") {
        match dtype {
            D::U8 if table.tensor(index).shape.len() == 3 => stacked(table, config, index, module, ".weight_scale")?,
            D::U8 => fp4(table, index, module, false)?,
            D::I8 => integer::int8(table, index, module)?,
            D::F8E4M3 if table.tensor(index).shape.len() == 3 => {
                let separator = if table.find(&format!("{module}.weight_scale_inv")).is_some() {
                    ".weight_scale_inv"
                } else {
                    ".weight_scale"
                };
                stacked(table, config, index, module, separator)?
            }
            D::F8E4M3 => fp8(table, config, index, module)?,
            D::F8E5M2 | D::F8E8M0 => return Err(dtype_error(table, index, "F8_E4M3")),
            _ => return Ok(None),
        }
    } else if matches!(dtype, D::U8 | D::F8E4M3)
        && let Some(suffix) = ["_weight_scale", "_scale_inv", "_weight_scale_inv"]
            .into_iter()
            .find(|s| table.find(&format!("{name}{s}")).is_some())
    {
        stacked(table, config, index, name, suffix)?
    } else if matches!(dtype, D::F8E4M3 | D::F8E5M2) && !is_scale_name(name) {
        return Err(missing(table, index, format!("{name}_weight_scale")));
    } else {
        return Ok(None);
    };
    table.used[index] = true;
    Ok(Some(companions(table, weight)?))
}

fn is_scale_name(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or_default();
    last.contains("scale") || last.contains("quantizer")
}

/// A weight of two axes with its codes and nothing else yet.
pub(super) fn skeleton(
    table: &Table<'_>,
    index: usize,
    module: &str,
    encoding: SourceEncoding,
    shape: [u64; 2],
    scale: usize,
) -> ResolvedWeight {
    ResolvedWeight {
        // Stacked experts have no `.weight` in their names (Llama 4, gpt-oss).
        name: if table.tensor(index).name.contains(&format!("{module}.")) {
            format!("{module}.weight")
        } else {
            module.to_owned()
        },
        module: module.to_owned(),
        encoding,
        shape,
        stack: None,
        weight: index,
        scale,
        global: None,
        zeros: None,
        g_idx: None,
        pre_quant_scale: None,
        input_scale: None,
        svd: None,
        bias: None,
        all_zero: false,
    }
}

/// What may hang beside any quantised weight.
fn companions(table: &mut Table<'_>, mut w: ResolvedWeight) -> Result<ResolvedWeight, ResolveError> {
    let named = |suffix: &str| {
        if w.name == w.module { format!("{}_{suffix}", w.module) } else { format!("{}.{suffix}", w.module) }
    };
    let (pre, input, bias) = (named("pre_quant_scale"), named("input_scale"), named("bias"));
    if let Some(tensor) = table.take(&pre) {
        expect_dtype(table, tensor, &FLOATS, "F32, BF16 or F16")?;
        if table.tensor(tensor).shape.iter().product::<u64>() != w.shape[1] || w.stack.is_some() {
            return Err(shape_error(table, tensor, &w, format!("[{}], one factor per column", w.shape[1])));
        }
        w.pre_quant_scale = Some(tensor);
    }
    w.input_scale = table.take(&input).or_else(|| table.take(&named("input_global_scale")));
    // The bias stays a tensor of its own.
    w.bias = table.find(&bias);
    let (a, b) = (named("weight_quantizer._svdquant_lora_a"), named("weight_quantizer._svdquant_lora_b"));
    match (table.take(&a), table.take(&b)) {
        (Some(a), Some(b)) => {
            for tensor in [a, b] {
                expect_dtype(table, tensor, &FLOATS, "F32, BF16 or F16")?;
            }
            let rank = match table.tensor(a).shape[..] {
                [rank, k] if k == w.shape[1] => rank,
                _ => return Err(shape_error(table, a, &w, format!("[rank, {}]", w.shape[1]))),
            };
            if table.tensor(b).shape != [w.shape[0], rank] {
                return Err(shape_error(table, b, &w, format!("[{}, {rank}]", w.shape[0])));
            }
            w.svd = Some(SvdBranch { a, b });
        }
        (None, None) => {}
        (found, _) => return Err(missing(table, w.weight, if found.is_some() { b } else { a })),
    }
    Ok(w)
}

/// NVFP4 or MXFP4 by the type of the scales, or ModelOpt's INT4, which has float scales.
fn fp4(table: &mut Table<'_>, index: usize, module: &str, packed: bool) -> Result<ResolvedWeight, ResolveError> {
    expect_dtype(table, index, &[D::U8], "U8, two codes a byte")?;
    let [rows, bytes] = matrix(table, index, "two axes, rows and packed columns")?;
    let global_name = format!("{module}.{}", if packed { "weight_global_scale" } else { "weight_scale_2" });
    let scale_name = format!("{module}.weight_scale");
    let Some(scale) = table.take(&scale_name) else { return Err(missing(table, index, scale_name)) };
    let k = bytes.saturating_mul(2);
    let scale_dtype = table.dtype(scale);
    if !packed && FLOATS.contains(&scale_dtype) {
        // W4A8 exports keep the scale of the FP8 step beside it; it is no part of the weight.
        let w = integer::int4_modelopt(table, index, module, scale)?;
        return Ok(ResolvedWeight { global: table.take(&global_name), ..w });
    }
    let encoding = SourceEncoding::Nvfp4 { group: 16, divides: packed };
    let mut w = skeleton(table, index, module, encoding, [rows, k], scale);
    let has_global = table.find(&global_name).is_some();
    let per = |group: u64| k.is_multiple_of(group) && table.tensor(scale).shape == [rows, k / group];
    match scale_dtype {
        D::F8E8M0 | D::U8 if !has_global && per(MX_GROUP) => {
            w.encoding = SourceEncoding::Mxfp4 { blocks: false };
            return Ok(w);
        }
        D::F8E8M0 => return Err(shape_error(table, scale, &w, format!("[{rows}, {}]", k / MX_GROUP))),
        // Some exporters label the E4M3 bytes U8; the shape of NVFP4 and the second scale tell them from exponents.
        D::F8E4M3 | D::U8 => {}
        _ => return Err(dtype_error(table, scale, "F8_E4M3 (NVFP4), F8_E8M0 or U8 (MXFP4)")),
    }
    let group = match [16, 32].into_iter().find(|&g| per(g)) {
        Some(group) => group,
        None if k % 16 != 0 => return Err(weight_shape(table, index, "a number of columns that is a multiple of 16")),
        None => {
            let expected = format!("[{rows}, {}] (or [{rows}, {}])", k / 16, k / 32);
            return Err(shape_error(table, scale, &w, expected));
        }
    };
    w.encoding = SourceEncoding::Nvfp4 { group, divides: packed };
    let Some(global) = table.take(&global_name) else { return Err(missing(table, index, global_name)) };
    w.global = Some(global);
    check_global(table, &mut w, global)?;
    Ok(w)
}

fn fp8(
    table: &mut Table<'_>,
    config: &QuantConfig,
    index: usize,
    module: &str,
) -> Result<ResolvedWeight, ResolveError> {
    let [n, k] = matrix(table, index, "two axes, rows and columns")?;
    let mut found = FP8_SCALES.iter().filter_map(|s| table.find(&format!("{module}{s}")));
    let Some(scale) = found.next() else {
        return Err(missing(table, index, format!("its scale {module}.weight_scale (or weight_scale_inv)")));
    };
    if let Some(second) = found.next() {
        return Err(ResolveError::TwoScales {
            file: table.file(index),
            weight: table.tensor(index).name.clone(),
            first: table.tensor(scale).name.clone(),
            second: table.tensor(second).name.clone(),
        });
    }
    table.used[scale] = true;
    let encoding = SourceEncoding::Fp8 { scales: Fp8Scales::Tensor };
    let mut w = skeleton(table, index, module, encoding, [n, k], scale);
    let shape = table.tensor(scale).shape.as_slice();
    let block = config.block();
    let grid = [n.div_ceil(block[0]), k.div_ceil(block[1])];
    let fits_grid = shape == grid || shape == [grid[0], 1, grid[1], 1];
    let grid_text = format!("[{}, {}] for blocks of {} x {}", grid[0], grid[1], block[0], block[1]);
    match table.dtype(scale) {
        D::F8E8M0 | D::U8 if k.is_multiple_of(MX_GROUP) && shape == [n, k / MX_GROUP] => {
            w.encoding = SourceEncoding::Mxfp8;
            return Ok(w);
        }
        D::U8 if !config.ue8m0 => {
            return Err(dtype_error(
                table,
                scale,
                "F32, BF16, F16 or F8_E8M0 (U8 exponents only with scale_fmt ue8m0 in the configuration)",
            ));
        }
        D::F8E8M0 | D::U8 => {
            if !fits_grid {
                let expected = format!("[{n}, {}], or {grid_text}", k.div_ceil(MX_GROUP));
                return Err(shape_error(table, scale, &w, expected));
            }
            w.encoding = SourceEncoding::Fp8 { scales: Fp8Scales::Block(block) };
            return Ok(w);
        }
        dtype if FLOATS.contains(&dtype) => {}
        _ => return Err(dtype_error(table, scale, "F32, BF16, F16 or F8_E8M0")),
    }
    let says_blocks = shape.len() == 4 || config.block.is_some() || table.tensor(scale).name.ends_with("_inv");
    let scales = if fits_grid && says_blocks {
        Fp8Scales::Block(block)
    } else if matches!(shape, [] | [1] | [1, 1]) {
        Fp8Scales::Tensor
    } else if shape == [n] || shape == [n, 1] {
        Fp8Scales::Channel
    } else if fits_grid {
        Fp8Scales::Block(block)
    } else {
        let expected = format!("one scale, {n} (one per row), or {grid_text}");
        return Err(shape_error(table, scale, &w, expected));
    };
    w.encoding = SourceEncoding::Fp8 { scales };
    if scales == Fp8Scales::Tensor {
        check_global(table, &mut w, scale)?;
    }
    Ok(w)
}

/// gpt-oss: `X_blocks` U8 `[E, N, K/32, 16]` and `X_scales` U8 `[E, N, K/32]`.
fn mxfp4_blocks(
    table: &mut Table<'_>,
    index: usize,
    module: &str,
    scale: usize,
) -> Result<ResolvedWeight, ResolveError> {
    let shape = table.tensor(index).shape.as_slice();
    let [experts, n, groups, 16] = *shape else {
        return Err(weight_shape(table, index, "[experts, rows, columns / 32, 16]"));
    };
    if shape.contains(&0) {
        return Err(weight_shape(table, index, "no empty axis"));
    }
    expect_dtype(table, scale, &[D::U8, D::F8E8M0], "U8 or F8_E8M0")?;
    table.used[scale] = true;
    let encoding = SourceEncoding::Mxfp4 { blocks: true };
    let mut w = skeleton(table, index, module, encoding, [n, groups.saturating_mul(MX_GROUP)], scale);
    w.name = module.to_owned();
    w.stack = Some(Stack { experts, transposed: false, transposed_name: true });
    if table.tensor(scale).shape != [experts, n, groups] {
        return Err(shape_error(table, scale, &w, format!("[{experts}, {n}, {groups}]")));
    }
    Ok(w)
}

/// Experts in one tensor of three axes, NVFP4 or FP8, with K fastest or (ModelOpt on Llama 4 and gpt-oss) N fastest.
fn stacked(
    table: &mut Table<'_>,
    config: &QuantConfig,
    index: usize,
    module: &str,
    scale_suffix: &str,
) -> Result<ResolvedWeight, ResolveError> {
    let [experts, a, b] = table.tensor(index).shape[..] else {
        return Err(weight_shape(table, index, "three axes, experts first"));
    };
    if experts == 0 || a == 0 || b == 0 {
        return Err(weight_shape(table, index, "no empty axis"));
    }
    let scale_name = format!("{module}{scale_suffix}");
    let Some(scale) = table.take(&scale_name) else { return Err(missing(table, index, scale_name)) };
    let scale_shape = table.tensor(scale).shape.as_slice();
    // `M.weight` stacks as layers do, rows before columns; names without `.weight` are parameters of their own.
    let own_name = !scale_suffix.starts_with('.');
    let stack = |transposed| Some(Stack { experts, transposed, transposed_name: own_name && transposed });
    if table.dtype(index) == D::F8E4M3 {
        expect_dtype(table, scale, &FLOATS, "F32, BF16 or F16")?;
        let per_tensor =
            scale_shape.is_empty() || matches!(scale_shape, [x] | [x, 1] | [x, 1, 1] if *x == 1 || *x == experts);
        let transposed = own_name && scale_suffix == "_weight_scale";
        let shape = if transposed { [b, a] } else { [a, b] };
        let encoding = SourceEncoding::Fp8 { scales: Fp8Scales::Tensor };
        let mut w = skeleton(table, index, module, encoding, shape, scale);
        w.stack = stack(transposed);
        let block = config.block();
        let grid = [experts, shape[0].div_ceil(block[0]), shape[1].div_ceil(block[1])];
        if !transposed && scale_shape == grid {
            w.encoding = SourceEncoding::Fp8 { scales: Fp8Scales::Block(block) };
        } else if per_tensor {
            check_global(table, &mut w, scale)?;
        } else {
            return Err(shape_error(table, scale, &w, format!("one scale, {experts} (one per expert), or {grid:?}")));
        }
        return Ok(w);
    }
    expect_dtype(table, scale, &[D::F8E4M3], "F8_E4M3")?;
    let layout = |transposed: bool| {
        let [n, bytes] = if transposed { [b, a] } else { [a, b] };
        [16, 32].into_iter().find_map(|group| {
            let k = bytes.checked_mul(2).filter(|k| k.is_multiple_of(group))?;
            let expected = if transposed { [experts, k / group, n] } else { [experts, n, k / group] };
            (scale_shape == expected).then_some((group, [n, k], transposed))
        })
    };
    let Some((group, shape, transposed)) = layout(own_name).or_else(|| layout(!own_name)) else {
        let encoding = SourceEncoding::Nvfp4 { group: 16, divides: false };
        let w = skeleton(table, index, module, encoding, [a, b.saturating_mul(2)], scale);
        let expected = format!("[{experts}, {a}, {}] or [{experts}, {}, {b}]", b / 8, a / 8);
        return Err(shape_error(table, scale, &w, expected));
    };
    let mut w = skeleton(table, index, module, SourceEncoding::Nvfp4 { group, divides: false }, shape, scale);
    w.stack = stack(transposed);
    let global_name = format!("{scale_name}_2");
    let Some(global) = table.take(&global_name) else { return Err(missing(table, index, global_name)) };
    w.global = Some(global);
    check_global(table, &mut w, global)?;
    Ok(w)
}

/// Checks the scale (or scales, one per expert) that stands for a whole tensor, and finds ModelOpt's all-zero weights.
fn check_global(table: &Table<'_>, w: &mut ResolvedWeight, tensor: usize) -> Result<(), ResolveError> {
    let t = table.tensor(tensor);
    let count: u64 = t.shape.iter().product();
    let nvfp4 = w.global == Some(tensor);
    if nvfp4 {
        expect_dtype(table, tensor, &[D::F32], "F32")?;
    }
    if count != 1 && !(w.stack.is_some() && count == w.experts()) {
        let expected = match w.stack {
            Some(stack) => format!("one scale, or {}, one per expert,", stack.experts),
            None => "exactly one scale".into(),
        };
        return Err(shape_error(table, tensor, w, expected));
    }
    let dtype = table.dtype(tensor);
    let mut zeros = 0;
    for bytes in table.checkpoint.data(t).chunks_exact(dtype.size() as usize) {
        let value = float(dtype, bytes);
        if value == 0.0 {
            zeros += 1;
        } else if !(value.is_finite() && value > 0.0) {
            return Err(global_error(table, tensor, value, nvfp4));
        }
    }
    if zeros > 0 {
        // NaN block scales (NVFP4) or NaN codes (FP8) throughout are how ModelOpt writes an all-zero weight.
        let witness = table.checkpoint.data(table.tensor(if nvfp4 { w.scale } else { w.weight }));
        let all_nan = witness.iter().all(|byte| byte & 0x7F == 0x7F);
        if zeros < count || !all_nan {
            return Err(global_error(table, tensor, 0.0, nvfp4));
        }
        w.all_zero = true;
    }
    Ok(())
}

fn global_error(table: &Table<'_>, tensor: usize, value: f32, nvfp4: bool) -> ResolveError {
    ResolveError::Global {
        file: table.file(tensor),
        tensor: table.tensor(tensor).name.clone(),
        value,
        nan: if nvfp4 { "block scale" } else { "code" },
    }
}

/// The one value of a float tensor.
pub(super) fn scalar(table: &Table<'_>, index: usize) -> Result<f32, ResolveError> {
    expect_dtype(table, index, &FLOATS, "F32, BF16 or F16")?;
    let t = table.tensor(index);
    if t.shape.iter().product::<u64>() != 1 {
        return Err(ResolveError::WeightShape {
            file: table.file(index),
            tensor: t.name.clone(),
            dtype: table.dtype(index).name(),
            found: t.shape.clone(),
            expected: "one value",
        });
    }
    Ok(float(table.dtype(index), table.checkpoint.data(t)))
}

/// An element of a float tensor, by its bytes.
fn float(dtype: D, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (D::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (D::Bf16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
        (D::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    }
}

/// Rows and columns of a tensor of two axes, neither empty.
pub(super) fn matrix(table: &Table<'_>, index: usize, expected: &'static str) -> Result<[u64; 2], ResolveError> {
    match table.tensor(index).shape[..] {
        [0, _] | [_, 0] => Err(weight_shape(table, index, "no empty axis")),
        [rows, columns] => Ok([rows, columns]),
        _ => Err(weight_shape(table, index, expected)),
    }
}

pub(super) fn expect_dtype(
    table: &Table<'_>,
    index: usize,
    any: &[D],
    expected: &'static str,
) -> Result<(), ResolveError> {
    if any.contains(&table.dtype(index)) { Ok(()) } else { Err(dtype_error(table, index, expected)) }
}

pub(super) fn missing(table: &Table<'_>, weight: usize, missing: String) -> ResolveError {
    let t = table.tensor(weight);
    ResolveError::Missing {
        file: table.file(weight),
        weight: t.name.clone(),
        dtype: table.dtype(weight).name(),
        shape: t.shape.clone(),
        missing,
    }
}

pub(super) fn shape_error(table: &Table<'_>, tensor: usize, w: &ResolvedWeight, expected: String) -> ResolveError {
    let t = table.tensor(tensor);
    ResolveError::Shape {
        file: table.file(tensor),
        tensor: t.name.clone(),
        found: t.shape.clone(),
        expected,
        weight: table.tensor(w.weight).name.clone(),
        rows: w.shape[0],
        columns: w.shape[1],
    }
}

pub(super) fn weight_shape(table: &Table<'_>, index: usize, expected: &'static str) -> ResolveError {
    let t = table.tensor(index);
    ResolveError::WeightShape {
        file: table.file(index),
        tensor: t.name.clone(),
        dtype: table.dtype(index).name(),
        found: t.shape.clone(),
        expected,
    }
}

fn dtype_error(table: &Table<'_>, index: usize, expected: &'static str) -> ResolveError {
    ResolveError::Dtype {
        file: table.file(index),
        tensor: table.tensor(index).name.clone(),
        found: table.dtype(index).name(),
        expected,
    }
}
