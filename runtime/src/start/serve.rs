//! The server around a model that loads while the socket already answers.

use super::load::Opened;
use super::{Failure, report};
use crate::cli::{Cli, ReasoningParserArg};
use crate::metrics::{LoadPhase, Metrics};
use crate::server::auth::Keys;
use crate::server::{Endpoint, LoadProgress, ServeError, Served, ServerConfig, serve as serve_http};
use crate::stats::{Startup, StartupReport};
use std::sync::Arc;
use std::time::Duration;

/// Serves until it is told to stop.
pub(super) fn serve(cli: &Cli, startup: Startup) -> Result<(), Failure> {
    let config = config(cli)?;
    let metrics = Arc::new(Metrics::new(&cli.server.metrics_prefix));
    // Requests are tokenised on worker threads of the server's own; these only move bytes.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(6, e))?;
    let (loader_cli, loader_metrics) = (cli.clone(), Arc::clone(&metrics));
    let loader = move |progress: Arc<LoadProgress>| load(&loader_cli, startup, &progress, loader_metrics);
    let served = runtime.block_on(serve_http(config, metrics, loader, |address| {
        tracing::info!("listening on {address}");
    }));
    // A worker that still renders a prompt must not hold up the end of the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served.map_err(|error| match error {
        ServeError::Load(failure) => failure,
        error @ ServeError::Origin(_) => Failure::new(2, anyhow::anyhow!(error.to_string())),
        error => Failure::new(6, anyhow::anyhow!(error.to_string())),
    })
}

fn config(cli: &Cli) -> Result<ServerConfig, Failure> {
    let args = &cli.server;
    let mut api_keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Failure::new(6, anyhow::Error::new(e).context(path.display().to_string())))?;
        let keys = Keys::parse_file(&text);
        if keys.is_empty() {
            let error = anyhow::anyhow!("{}: no keys; every request would be let in", path.display());
            return Err(Failure::new(2, error));
        }
        api_keys.extend(keys);
    }
    if let Some(fault) = api_keys.iter().find_map(|key| Keys::fault(key)) {
        return Err(Failure::new(2, anyhow::anyhow!("an API key {fault}; no request could bring it")));
    }
    Ok(ServerConfig {
        endpoint: match &args.uds {
            Some(path) => Endpoint::Unix(path.clone()),
            None => Endpoint::Tcp { host: args.host.clone(), port: args.port },
        },
        served_model_names: args.served_model_name.clone(),
        any_model_name: args.any_model_name,
        api_keys,
        reasoning: args.reasoning_parser == ReasoningParserArg::Auto,
        allowed_origins: args.allowed_origins.clone(),
        drain_timeout: Duration::from_secs(u64::from(args.shutdown_timeout)),
        ..ServerConfig::default()
    })
}

fn load(cli: &Cli, mut startup: Startup, progress: &LoadProgress, metrics: Arc<Metrics>) -> Result<Served, Failure> {
    progress.set_phase("open");
    let opened = Opened::open(cli, &mut startup)?;
    for line in opened.plan().table().lines() {
        tracing::info!("{line}");
    }
    progress.set_total(opened.image_bytes());
    progress.set_phase("verify");
    let ready = opened.into_model(&mut startup, &|bytes| progress.add_done(bytes))?;
    progress.set_phase("text");
    let text = startup.phase("text", |_| ready.text(cli, true))?;
    let Some(text) = text else {
        return Err(Failure::new(3, anyhow::anyhow!("the bundle has no tokenizer")));
    };
    let card = ready.card(cli);
    let engine = startup.phase("engine", |_| ready.into_engine(cli, Some(&text), Arc::clone(&metrics)))?;
    let summary = startup.report();
    record(&metrics, &summary);
    if let Some(form) = cli.stats {
        report(&summary, form, false)?;
    }
    Ok(Served { engine, text: Arc::new(text), card })
}

/// Start-up times for the metrics, whose phases are coarser.
fn record(metrics: &Metrics, summary: &StartupReport) {
    let phases = [
        (LoadPhase::Open, &["open", "plan"][..]),
        (LoadPhase::Verify, &["verify"]),
        (LoadPhase::Upload, &["map"]),
        (LoadPhase::Warmup, &["model", "text", "engine"]),
    ];
    for (phase, names) in phases {
        let seconds = summary.phases.iter().filter(|p| names.contains(&p.name)).map(|p| p.seconds).sum();
        metrics.set_load_time(phase, Duration::try_from_secs_f64(seconds).unwrap_or_default());
    }
    metrics.load_bytes.inc_by(summary.phases.iter().filter_map(|p| p.bytes).sum());
}
