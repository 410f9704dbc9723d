//! Integer weights: ModelOpt INT4, I8, compressed-tensors `pack-quantized`, GPTQ, AWQ.
//!
//! Layouts: compressed-tensors 0.20 `pack_quantized.py` (codes offset by half the range, lowest bits first, zero points
//! packed along N); AutoGPTQ `qlinear` (zero points stored minus one unless `checkpoint_format` is `gptq_v2`); AutoAWQ
//! `gemm` (fields of a word in the order 0, 2, 4, 6, 1, 3, 5, 7).

use super::detect::{FLOATS, expect_dtype, matrix, missing, shape_error, skeleton, weight_shape};
use super::{IntScales, QuantConfig, ResolveError, ResolvedWeight, SourceEncoding, Table};
use crate::source::PlainDtype as D;

const FLOAT_NAMES: &str = "F32, BF16 or F16";

/// ModelOpt INT4 (AWQ): U8 `[N/2, K]` packed along N, float scales `[N, K/group]`.
pub(super) fn int4_modelopt(
    table: &Table<'_>,
    index: usize,
    module: &str,
    scale: usize,
) -> Result<ResolvedWeight, ResolveError> {
    let [byte_rows, k] = matrix(table, index, "two axes, packed rows and columns")?;
    let n = byte_rows.saturating_mul(2);
    let mut w = skeleton(table, index, module, SourceEncoding::Int4ModelOpt { group: k }, [n, k], scale);
    let group = groups_of(table, scale, n, k);
    let Some(group) = group else {
        return Err(shape_error(table, scale, &w, format!("[{n}, {k} / group size]")));
    };
    w.encoding = SourceEncoding::Int4ModelOpt { group };
    Ok(w)
}

/// I8 `[N, K]` with one scale, one per row, or one per group of a row.
pub(super) fn int8(table: &mut Table<'_>, index: usize, module: &str) -> Result<ResolvedWeight, ResolveError> {
    let [n, k] = matrix(table, index, "two axes, rows and columns")?;
    let scale_name = format!("{module}.weight_scale");
    let Some(scale) = table.take(&scale_name) else { return Err(missing(table, index, scale_name)) };
    expect_dtype(table, scale, &FLOATS, FLOAT_NAMES)?;
    let zeros = table.take(&format!("{module}.weight_zero_point"));
    let encoding = SourceEncoding::Int8 { scales: IntScales::Tensor, zero_points: zeros.is_some() };
    let mut w = skeleton(table, index, module, encoding, [n, k], scale);
    let scales = match table.tensor(scale).shape[..] {
        [] | [1] | [1, 1] => IntScales::Tensor,
        [rows] if rows == n => IntScales::Group(k),
        _ => match groups_of(table, scale, n, k) {
            Some(group) => IntScales::Group(group),
            None => {
                let expected = format!("one scale, {n} (one per row), or [{n}, {k} / group size]");
                return Err(shape_error(table, scale, &w, expected));
            }
        },
    };
    w.encoding = SourceEncoding::Int8 { scales, zero_points: zeros.is_some() };
    w.zeros = zeros;
    if let Some(zeros) = zeros {
        expect_dtype(table, zeros, &[D::I8], "I8")?;
        if scales == IntScales::Tensor {
            return Err(shape_error(table, zeros, &w, "no zero points beside one scale for the tensor".into()));
        }
        if table.tensor(zeros).shape != table.tensor(scale).shape {
            let expected = format!("{:?}, as the scales,", table.tensor(scale).shape);
            return Err(shape_error(table, zeros, &w, expected));
        }
    }
    Ok(w)
}

/// compressed-tensors `pack-quantized`.
pub(super) fn packed(table: &mut Table<'_>, index: usize, module: &str) -> Result<ResolvedWeight, ResolveError> {
    let [n, words] = matrix(table, index, "two axes, rows and packed columns")?;
    let shape_name = format!("{module}.weight_shape");
    let Some(stored) = table.take(&shape_name) else { return Err(missing(table, index, shape_name)) };
    let [stored_n, k] = stored_shape(table, stored)?;
    let scale_name = format!("{module}.weight_scale");
    let Some(scale) = table.take(&scale_name) else { return Err(missing(table, index, scale_name)) };
    expect_dtype(table, scale, &FLOATS, FLOAT_NAMES)?;
    let zeros = table.take(&format!("{module}.weight_zero_point"));
    let mut bits = None;
    for candidate in [4u32, 8] {
        if stored_n == n && words.checked_mul(u64::from(32 / candidate)) == Some(k) {
            bits = Some(candidate);
        }
    }
    let Some(bits) = bits else {
        return Err(weight_shape(
            table,
            index,
            "the rows of weight_shape, and its columns in whole words of eight 4-bit or four 8-bit codes",
        ));
    };
    let encoding = SourceEncoding::Packed { bits, group: k, zero_points: zeros.is_some() };
    let mut w = skeleton(table, index, module, encoding, [n, k], scale);
    let Some(group) = groups_of(table, scale, n, k) else {
        return Err(shape_error(table, scale, &w, format!("[{n}, 1], or [{n}, {k} / group size]")));
    };
    w.encoding = SourceEncoding::Packed { bits, group, zero_points: zeros.is_some() };
    w.zeros = zeros;
    if let Some(zeros) = zeros {
        expect_dtype(table, zeros, &[D::I32], "I32, packed")?;
        let per_word = u64::from(32 / bits);
        if !n.is_multiple_of(per_word) || table.tensor(zeros).shape != [n / per_word, k / group] {
            return Err(shape_error(table, zeros, &w, format!("[{n} / {per_word}, {}]", k / group)));
        }
    }
    let name = format!("{module}.weight_g_idx");
    w.g_idx = table.take(&name);
    check_order(table, &w, group)?;
    Ok(w)
}

/// The two numbers of `weight_shape`.
fn stored_shape(table: &Table<'_>, index: usize) -> Result<[u64; 2], ResolveError> {
    expect_dtype(table, index, &[D::I64, D::I32], "I64 or I32")?;
    let values = integers(table, index);
    match values[..] {
        [n, k] if n > 0 && k > 0 => Ok([n as u64, k as u64]),
        _ => Err(weight_shape(table, index, "two positive sizes, rows and columns")),
    }
}

/// GPTQ or AWQ: which one is told by the axis along which words are packed.
pub(super) fn gptq_or_awq(
    table: &mut Table<'_>,
    config: &QuantConfig,
    index: usize,
    module: &str,
) -> Result<ResolvedWeight, ResolveError> {
    expect_dtype(table, index, &[D::I32], "I32, packed")?;
    let [rows, columns] = matrix(table, index, "two axes")?;
    let (scale_name, zeros_name) = (format!("{module}.scales"), format!("{module}.qzeros"));
    let Some(scale) = table.take(&scale_name) else { return Err(missing(table, index, scale_name)) };
    let Some(zeros) = table.take(&zeros_name) else { return Err(missing(table, index, zeros_name)) };
    expect_dtype(table, scale, &FLOATS, FLOAT_NAMES)?;
    expect_dtype(table, zeros, &[D::I32], "I32, packed")?;
    let [groups, n] = matrix(table, scale, "two axes, groups and columns")?;
    let [zero_groups, zero_words] = matrix(table, zeros, "two axes, groups and packed columns")?;
    let bits = [4u32, 8].into_iter().find(|bits| zero_words.checked_mul(u64::from(32 / bits)) == Some(n));
    let g_idx = table.take(&format!("{module}.g_idx"));

    let placeholder = SourceEncoding::Awq { bits: 4, group: 1 };
    let mut w = skeleton(table, index, module, placeholder, [n, rows], scale);
    let Some(bits) = bits.filter(|_| zero_groups == groups) else {
        return Err(shape_error(
            table,
            zeros,
            &w,
            format!("[{groups}, {n} / 8] (4 bits) or [{groups}, {n} / 4] (8 bits)"),
        ));
    };
    let per_word = u64::from(32 / bits);
    let (gptq, k) = if columns == n {
        (true, rows.saturating_mul(per_word))
    } else if columns == zero_words {
        (false, rows)
    } else {
        return Err(weight_shape(
            table,
            index,
            "as many columns as scales has (GPTQ), or as many words as qzeros has (AWQ)",
        ));
    };
    w.shape = [n, k];
    if !k.is_multiple_of(groups) {
        return Err(shape_error(table, scale, &w, format!("a number of groups that divides {k}, then {n},")));
    }
    let group = k / groups;
    w.encoding = if gptq {
        SourceEncoding::Gptq { bits, group, zero_minus_one: !config.gptq_v2 }
    } else {
        SourceEncoding::Awq { bits, group }
    };
    w.zeros = Some(zeros);
    w.g_idx = g_idx;
    check_order(table, &w, group)?;
    Ok(w)
}

/// A list of groups must say what the position of every column says already (or nothing: -1 throughout).
fn check_order(table: &Table<'_>, w: &ResolvedWeight, group: u64) -> Result<(), ResolveError> {
    let Some(g_idx) = w.g_idx else { return Ok(()) };
    expect_dtype(table, g_idx, &[D::I32, D::I64], "I32")?;
    if table.tensor(g_idx).shape != [w.shape[1]] {
        return Err(shape_error(table, g_idx, w, format!("[{}], the group of every column,", w.shape[1])));
    }
    let values = integers(table, g_idx);
    if values.iter().all(|&v| v == -1) {
        return Ok(());
    }
    for (column, &found) in values.iter().enumerate() {
        let expected = column as u64 / group;
        if found != expected as i64 {
            return Err(ResolveError::ActOrder {
                file: table.file(g_idx),
                tensor: table.tensor(g_idx).name.clone(),
                column: column as u64,
                found,
                expected,
            });
        }
    }
    Ok(())
}

fn integers(table: &Table<'_>, index: usize) -> Vec<i64> {
    let data = table.checkpoint.data(table.tensor(index));
    match table.dtype(index) {
        D::I32 => data.as_chunks::<4>().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect(),
        _ => data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
    }
}

/// Codes per scale for scales `[N, G]` whose G divides K.
fn groups_of(table: &Table<'_>, scale: usize, n: u64, k: u64) -> Option<u64> {
    match table.tensor(scale).shape[..] {
        [rows, groups] if rows == n && groups > 0 && k.is_multiple_of(groups) => Some(k / groups),
        _ => None,
    }
}
