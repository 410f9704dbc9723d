//! `vt-bundle inspect`: what a bundle holds, for people and as JSON.

use std::io::{self, Write};
use std::path::PathBuf;

use serde_json::{Value, json};
use vt_bundle::Bundle;
use vt_bundle::manifest::{Manifest, Placement, Tensor};

use crate::failure::{Failure, Outcome};
use crate::layers::{self, Group};
use crate::output;
use crate::table::{Align, Table};

/// Arguments of `inspect`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the bundle
    bundle: PathBuf,
    /// Print JSON
    #[arg(long, env = "VT_JSON")]
    json: bool,
    /// List every tensor instead of groups of like ones
    #[arg(long, env = "VT_TENSORS")]
    tensors: bool,
}

/// Prints the summary. Hashes of the weights are not checked; `verify` does that.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    let bundle = Bundle::open(&args.bundle)?;
    if args.json {
        output::json(&as_json(&bundle, args.tensors))?;
    } else {
        let mut out = output::stdout();
        summary(&bundle, &mut out)?;
        if args.tensors {
            tensor_table(&bundle.manifest().tensors, &mut out)?;
        } else {
            group_table(&layers::groups(&bundle.manifest().tensors), &mut out)?;
        }
        file_tables(bundle.manifest(), &mut out)?;
        out.flush()?;
    }
    Ok(Outcome::Clean)
}

/// Totals over tensors: elements and plane bytes.
fn totals<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> (u64, u64) {
    tensors.fold((0, 0), |(e, b), t| (e + layers::elements(t), b + layers::plane_bytes(t)))
}

fn as_json(bundle: &Bundle, all: bool) -> Value {
    let m = bundle.manifest();
    let (elements, bytes) = totals(m.tensors.iter());
    let groups: Vec<Value> = layers::groups(&m.tensors).iter().map(group_json).collect();
    let mut value = json!({
        "id": bundle.id(),
        "format": m.format,
        "format_version": m.format_version,
        "model": m.model,
        "parameters": elements,
        "weight_bytes": bytes,
        "bits_per_weight": layers::bits_per_weight(bytes, elements),
        "quantization": m.quantization,
        "kv_cache": m.kv_cache,
        "source": m.source,
        "image": m.image,
        "cold": m.cold,
        "assets": m.assets,
        "groups": groups,
    });
    if all {
        value["tensors"] = json!(m.tensors);
    }
    value
}

fn group_json(group: &Group) -> Value {
    json!({
        "pattern": group.pattern,
        "indices": group.indices,
        "tensors": group.tensors,
        "shape": group.shape,
        "experts": group.experts,
        "layout": group.layout,
        "decode": group.decode,
        "placement": group.placement,
        "elements": group.elements,
        "bytes": group.bytes,
        "bits_per_weight": layers::bits_per_weight(group.bytes, group.elements),
    })
}

fn summary(bundle: &Bundle, out: &mut impl Write) -> io::Result<()> {
    let m = bundle.manifest();
    let (elements, bytes) = totals(m.tensors.iter());
    writeln!(out, "bundle   {}  ({} {})", bundle.dir().display(), m.format, m.format_version)?;
    writeln!(out, "id       {}", bundle.id())?;
    let mut model = format!("{}, {} parameters", m.model.architecture, output::count(elements));
    for (key, label) in [
        ("num_hidden_layers", "layers"),
        ("hidden_size", "hidden"),
        ("num_attention_heads", "heads"),
        ("num_key_value_heads", "KV heads"),
        ("vocab_size", "vocabulary"),
        ("max_position_embeddings", "positions"),
    ] {
        if let Some(n) = config_number(&m.model.config, key) {
            model.push_str(&format!(", {label} {}", output::count(n)));
        }
    }
    writeln!(out, "model    {model}")?;
    if !m.model.conventions.is_empty() {
        writeln!(out, "         conventions: {}", m.model.conventions.join(", "))?;
    }
    writeln!(
        out,
        "weights  {}, {:.3} bits per weight{}",
        output::bytes(bytes),
        layers::bits_per_weight(bytes, elements),
        m.quantization.declared.as_ref().map(|d| format!(", the source says {d}")).unwrap_or_default()
    )?;
    for (label, space) in [("image", &m.image), ("cold", &m.cold)] {
        if !space.is_empty() {
            let segments = space.segments.len();
            let plural = if segments == 1 { "" } else { "s" };
            writeln!(out, "{label:<8} {} in {segments} segment{plural}", output::bytes(space.size))?;
        }
    }
    if let Some(kv) = &m.kv_cache {
        writeln!(out, "KV cache {}, scales for {} layers", kv.dtype, kv.layers.len())?;
    }
    writeln!(out)?;
    let mut table = Table::new(&[
        ("decode", Align::Left),
        ("tensors", Align::Right),
        ("elements", Align::Right),
        ("bytes", Align::Right),
        ("bits/weight", Align::Right),
    ]);
    for d in &m.quantization.decodes {
        table.row(vec![
            d.decode.clone(),
            d.tensors.to_string(),
            output::count(d.elements),
            output::bytes(d.bytes),
            format!("{:.3}", layers::bits_per_weight(d.bytes, d.elements)),
        ]);
    }
    table.write(out)?;
    writeln!(out)
}

/// A number of the configuration, also where the text model has a section of its own.
fn config_number(config: &Value, key: &str) -> Option<u64> {
    config.get(key).or_else(|| config.get("text_config")?.get(key)).and_then(Value::as_u64)
}

fn experts(count: Option<u64>) -> String {
    count.map_or_else(String::new, |n| n.to_string())
}

fn group_table(groups: &[Group], out: &mut impl Write) -> io::Result<()> {
    let mut table = Table::new(&[
        ("layers", Align::Left),
        ("tensor", Align::Left),
        ("shape", Align::Left),
        ("experts", Align::Right),
        ("layout", Align::Left),
        ("decode", Align::Left),
        ("bits/weight", Align::Right),
        ("bytes", Align::Right),
        ("space", Align::Left),
    ]);
    for g in groups {
        table.row(vec![
            if g.indices.is_empty() { "-".into() } else { layers::ranges(&g.indices) },
            g.pattern.clone(),
            output::shape(&g.shape),
            experts(g.experts),
            g.layout.clone(),
            g.decode.clone(),
            format!("{:.3}", layers::bits_per_weight(g.bytes, g.elements)),
            output::bytes(g.bytes),
            space(g.placement).into(),
        ]);
    }
    table.write(out)?;
    writeln!(out)
}

fn tensor_table(tensors: &[Tensor], out: &mut impl Write) -> io::Result<()> {
    let mut table = Table::new(&[
        ("tensor", Align::Left),
        ("shape", Align::Left),
        ("experts", Align::Right),
        ("layout", Align::Left),
        ("decode", Align::Left),
        ("space", Align::Left),
        ("offset", Align::Right),
        ("bytes", Align::Right),
        ("parts", Align::Left),
    ]);
    for t in tensors {
        let parts = t.parts.iter().map(|p| format!("{} ({})", p.source, p.rows));
        table.row(vec![
            t.name.clone(),
            output::shape(&t.shape),
            experts(t.experts.as_ref().map(|e| e.count)),
            layers::layout(&t.layout),
            t.decode.clone(),
            space(t.placement).into(),
            t.planes.first().map_or_else(String::new, |p| p.offset.to_string()),
            layers::plane_bytes(t).to_string(),
            parts.collect::<Vec<_>>().join(", "),
        ]);
    }
    table.write(out)?;
    writeln!(out)
}

fn space(placement: Placement) -> &'static str {
    match placement {
        Placement::Image => "image",
        Placement::Cold => "cold",
    }
}

fn file_tables(m: &Manifest, out: &mut impl Write) -> io::Result<()> {
    let columns = |what| [(what, Align::Left), ("bytes", Align::Right), ("BLAKE3", Align::Left)];
    let source_heading: &'static str = if m.source.kind == "gguf" { "source (gguf)" } else { "source (safetensors)" };
    let mut table = Table::new(&columns(source_heading));
    for f in &m.source.files {
        table.row(vec![f.name.clone(), f.size.to_string(), f.blake3.clone()]);
    }
    table.write(out)?;
    writeln!(out)?;
    let mut table = Table::new(&columns("segment"));
    for s in m.image.segments.iter().chain(&m.cold.segments) {
        table.row(vec![s.file.clone(), s.size.to_string(), s.blake3.clone()]);
    }
    table.write(out)?;
    writeln!(out)?;
    let mut table =
        Table::new(&[("asset", Align::Left), ("role", Align::Left), ("bytes", Align::Right), ("BLAKE3", Align::Left)]);
    for a in &m.assets {
        let role = serde_json::to_value(a.role).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
        table.row(vec![a.file.clone(), role, a.size.to_string(), a.blake3.clone()]);
    }
    table.write(out)
}
