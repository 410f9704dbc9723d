//! `vt-run bench`.

use super::load::Opened;
use super::{Failure, print, to_json};
use crate::bench::{self, Extent, HttpTarget, Load, LocalTarget, Report, Summary};
use crate::cli::{Bench, Cli};
use crate::metrics::Metrics;
use crate::server::raise_open_files_limit;
use crate::stats::Startup;
use anyhow::anyhow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Measures and prints.
///
/// # Errors
/// [`Failure`] with the exit code; 1 where requests failed that should not have.
pub fn bench(args: &Bench, startup: Startup) -> Result<(), Failure> {
    let report = match &args.url {
        Some(url) => remote(args, url)?,
        None => local(args, startup)?,
    };
    print(&if args.json { to_json(&report)? } else { report.table() })?;
    if report.has_errors() {
        return Err(Failure::new(1, anyhow!("not every request went as it should")));
    }
    Ok(())
}

/// Start of the random numbers of one load: no two loads of a command ask the same, or the later would find its prompts cached.
fn seed_of(args: &Bench, concurrency: u16) -> u64 {
    args.seed.wrapping_add(u64::from(concurrency) << 32)
}

fn load_of(args: &Bench, concurrency: u16) -> Load {
    let seed = seed_of(args, concurrency);
    let concurrency = usize::from(concurrency);
    let requests = args.requests.unwrap_or(4 * concurrency as u32);
    Load {
        concurrency,
        extent: args.seconds.map_or(Extent::Requests(requests), |s| Extent::Time(Duration::from_secs(s.into()))),
        input_lengths: args.input_len.clone(),
        output_lengths: args.output_len.clone(),
        disconnect_fraction: args.disconnect_fraction.unwrap_or(0.0),
        malformed_fraction: args.malformed_fraction.unwrap_or(0.0),
        seed,
    }
}

fn remote(args: &Bench, url: &str) -> Result<Report, Failure> {
    raise_open_files_limit();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(6, e))?;
    runtime.block_on(async {
        let target = HttpTarget::new(url, args.model.as_deref(), args.api_key.as_deref()).await;
        let target = Arc::new(target.map_err(|e| Failure::new(2, e))?);
        let mut loads = Vec::new();
        for &concurrency in &args.concurrency {
            loads.push(bench::run(&target, &load_of(args, concurrency)).await);
        }
        let left_over = target.left_over().await;
        Ok(Report { target: format!("{url}, {}", target.model()), loads, left_over })
    })
}

fn local(args: &Bench, mut startup: Startup) -> Result<Report, Failure> {
    let bundle = args.bundle.clone().ok_or_else(|| Failure::new(2, anyhow!("--bundle or --url is needed")))?;
    let mut memory = args.memory.clone();
    let most = args.concurrency.iter().copied().max().unwrap_or(1);
    memory.max_num_seqs = Some(memory.max_num_seqs.map_or(most, |given| given.max(most)));
    let name = bundle.display().to_string();
    let cli = Cli::for_bundle(bundle, args.device.clone(), memory).map_err(|e| Failure::new(2, e))?;
    let ready = Opened::open(&cli, &mut startup)?.into_model(&mut startup, &|_| ())?;
    let text = ready.text(&cli, false)?;
    let metrics = Arc::new(Metrics::new("vt"));
    let engine = ready.into_engine(&cli, text.as_ref(), Arc::clone(&metrics))?;
    let target = Arc::new(LocalTarget::new(engine, metrics));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(6, e))?;
    let longest = |lengths: &[u32]| lengths.iter().copied().max().unwrap_or(1);
    runtime.block_on(async {
        // The first steps touch memory for the first time.
        let warm_up = Load { extent: Extent::Requests(1), seed: !args.seed, ..load_of(args, 1) };
        bench::run(&target, &warm_up).await;
        let mut loads: Vec<Summary> = Vec::new();
        for &concurrency in &args.concurrency {
            let load = load_of(args, concurrency);
            let mut summary = bench::run(&target, &load).await;
            let (input, output) = (longest(&args.input_len), longest(&args.output_len));
            target
                .phases(load.concurrency, input, output, seed_of(args, concurrency).wrapping_add(2), &mut summary)
                .await;
            loads.push(summary);
        }
        Ok(Report { target: name, loads, left_over: BTreeMap::new() })
    })
}
