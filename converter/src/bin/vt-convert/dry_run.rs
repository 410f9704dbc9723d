//! `--dry-run`: the plan as text or JSON.

use std::fmt::Write;

use vt_convert::convert::{Prepared, assets_bound};

/// The plan of a conversion.
pub fn render(prepared: &Prepared, json: bool) -> String {
    let plan = &prepared.plan;
    let bound = assets_bound(&prepared.checkpoint);
    if json {
        let tensors: Vec<_> = plan.tensors.iter().map(|p| &p.tensor).collect();
        let value = serde_json::json!({
            "architecture": prepared.catalog.architecture,
            "image_bytes": plan.image_bytes,
            "cold_bytes": plan.cold_bytes,
            "assets_bytes_bound": bound,
            "quantization": plan.quantization(prepared.catalog.declared.clone()),
            "tensors": tensors,
            "warnings": prepared.warnings,
        });
        return format!("{value:#}\n");
    }
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{:>14} {:>14}  {:<28} {:<14} tensor", "offset", "bytes", "decode", "shape");
    for tensor in plan.tensors.iter().map(|p| &p.tensor) {
        let offset = tensor.planes.first().map_or(0, |p| p.offset);
        let bytes: u64 = tensor.planes.iter().map(|p| p.size).sum();
        let shape = format!("{:?}", tensor.shape);
        let experts = tensor.experts.as_ref().map(|e| format!(" x {} experts", e.count)).unwrap_or_default();
        let _ = writeln!(text, "{offset:>14} {bytes:>14}  {:<28} {shape:<14} {}{experts}", tensor.decode, tensor.name);
    }
    let _ = writeln!(
        text,
        "image {} bytes, cold segments {} bytes, assets at most {bound} bytes",
        plan.image_bytes, plan.cold_bytes
    );
    for warning in &prepared.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}
