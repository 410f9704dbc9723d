//! `vt-bundle slice-plan`: what each rank of a tensor-parallel degree reads.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::PathBuf;

use vt_bundle::Bundle;
use vt_bundle::slice::{RankSlice, SlicePlan, Split, TensorSlice};

use crate::failure::{Failure, Outcome};
use crate::layers;
use crate::output;
use crate::table::{Align, Table};

/// Arguments of `slice-plan`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the bundle
    bundle: PathBuf,
    /// Tensor-parallel degree: how many ranks share the model
    #[arg(long, env = "VT_TP", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    tp: u64,
    /// List the byte ranges of this rank
    #[arg(long, env = "VT_RANK", value_name = "R")]
    rank: Option<u64>,
    /// Print JSON, with every range of every rank
    #[arg(long, env = "VT_JSON")]
    json: bool,
}

/// Prints the plan; a degree that the shapes do not allow is a usage error, with the numbers.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    let bundle = Bundle::open(&args.bundle)?;
    if let Some(rank) = args.rank.filter(|&r| r >= args.tp) {
        return Err(Failure::Other(format!("--rank {rank}: ranks go from 0 to {}", args.tp - 1), 2));
    }
    let mut plan = SlicePlan::new(&bundle, args.tp)
        .map_err(|e| Failure::Other(format!("{}: {e}; use another --tp", args.bundle.display()), 2))?;
    if args.json {
        let (extra, image) = (plan.extra_bytes(), plan.image_bytes);
        if let Some(rank) = args.rank {
            plan.ranks.retain(|r| r.rank == rank);
        }
        let value = serde_json::json!({
            "id": bundle.id(),
            "tp": args.tp,
            "image_bytes": image,
            "extra_bytes": extra,
            "replicated": plan.replicated,
            "ranks": plan.ranks,
        });
        output::json(&value)?;
        return Ok(Outcome::Clean);
    }
    let mut out = output::stdout();
    summary(&plan, &mut out)?;
    let chosen = &plan.ranks[args.rank.unwrap_or(0) as usize];
    if args.rank.is_some() {
        ranges(chosen, &mut out)?;
    } else {
        shares(chosen, &mut out)?;
    }
    out.flush()?;
    Ok(Outcome::Clean)
}

fn summary(plan: &SlicePlan, out: &mut impl Write) -> io::Result<()> {
    let mut table = Table::new(&[("rank", Align::Right), ("bytes", Align::Right), ("", Align::Right)]);
    for rank in &plan.ranks {
        table.row(vec![rank.rank.to_string(), rank.bytes.to_string(), output::bytes(rank.bytes)]);
    }
    table.write(out)?;
    let replicated: u64 = plan.replicated.iter().map(|(_, bytes)| bytes).sum();
    writeln!(
        out,
        "\nplanes of the image {}; every rank has {} tensors in full, {}; the ranks together have {} more than the image\n",
        output::bytes(plan.image_bytes),
        plan.replicated.len(),
        output::bytes(replicated),
        output::bytes(plan.extra_bytes())
    )
}

fn axis(split: Split) -> &'static str {
    match split {
        Split::Replicated => "all",
        Split::Rows => "rows",
        Split::Columns => "columns",
    }
}

/// The first rank's sections of a tensor: `288 + 96 + 96`, or `512 of each` where a tensor is cut along K.
fn extents(slice: &TensorSlice) -> String {
    if slice.split == Split::Columns {
        return slice.sections.first().map_or_else(String::new, |s| s.len.to_string());
    }
    slice.sections.iter().map(|s| s.len.to_string()).collect::<Vec<_>>().join(" + ")
}

/// One line per group of like tensors.
fn shares(rank: &RankSlice, out: &mut impl Write) -> io::Result<()> {
    let mut groups: Vec<(String, BTreeSet<u64>, &TensorSlice, u64)> = Vec::new();
    for slice in &rank.tensors {
        let (pattern, index) = layers::pattern(&slice.name);
        let same = groups
            .iter_mut()
            .find(|(p, _, first, _)| *p == pattern && first.split == slice.split && extents(first) == extents(slice));
        match same {
            Some((_, indices, _, bytes)) => {
                indices.extend(index);
                *bytes += slice.bytes;
            }
            None => groups.push((pattern, index.into_iter().collect(), slice, slice.bytes)),
        }
    }
    let mut table = Table::new(&[
        ("layers", Align::Left),
        ("tensor", Align::Left),
        ("cut along", Align::Left),
        ("per rank", Align::Left),
        ("experts", Align::Right),
        ("bytes per rank", Align::Right),
    ]);
    for (pattern, indices, first, bytes) in groups {
        table.row(vec![
            if indices.is_empty() { "-".into() } else { layers::ranges(&indices) },
            pattern,
            axis(first.split).into(),
            extents(first),
            if first.experts > 1 { first.experts.to_string() } else { String::new() },
            output::bytes(bytes),
        ]);
    }
    table.write(out)
}

/// Every range of one rank.
fn ranges(rank: &RankSlice, out: &mut impl Write) -> io::Result<()> {
    let mut table = Table::new(&[
        ("tensor", Align::Left),
        ("plane", Align::Left),
        ("offset", Align::Right),
        ("bytes", Align::Right),
        ("times", Align::Right),
        ("stride", Align::Right),
        ("experts", Align::Right),
    ]);
    for slice in &rank.tensors {
        for plane in &slice.planes {
            for run in &plane.runs {
                table.row(vec![
                    slice.name.clone(),
                    plane.plane.clone(),
                    run.offset.to_string(),
                    run.len.to_string(),
                    run.count.to_string(),
                    run.stride.to_string(),
                    if slice.experts > 1 { slice.experts.to_string() } else { String::new() },
                ]);
            }
        }
    }
    table.write(out)
}
