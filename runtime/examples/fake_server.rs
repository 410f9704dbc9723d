//! A server over the stand-in model, to develop clients and their tests without a bundle.
//!
//! `cargo run -p vt-run --features test-support --example fake_server -- [PORT] [STEP_MS] [LOAD_MS]`

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use vt_run::metrics::Metrics;
use vt_run::server::{Endpoint, ServerConfig, serve};
use vt_run::test_support::{FakeModel, Script, fake_served};

#[tokio::main]
async fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| arguments.next().and_then(|argument| argument.parse().ok()).unwrap_or(default);
    let port = number(8000);
    let step = Duration::from_millis(number(1));
    let load = Duration::from_millis(number(0));
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();

    let metrics = Arc::new(Metrics::new("vt"));
    let config = ServerConfig {
        endpoint: Endpoint::Tcp { host: "127.0.0.1".to_owned(), port: u16::try_from(port).unwrap_or(8000) },
        drain_timeout: Duration::from_secs(5),
        ..ServerConfig::default()
    };
    let engine_metrics = Arc::clone(&metrics);
    let served = serve(
        config,
        metrics,
        move |progress| {
            progress.set_phase("upload");
            progress.set_total(10);
            for _ in 0..10 {
                std::thread::sleep(load / 10);
                progress.add_done(1);
            }
            let model = FakeModel::new(Script::Letters, 1024, 512).with_batch(128, 16).with_step_delay(step);
            fake_served(model, 256, engine_metrics)
        },
        |address| eprintln!("ready on {address}"),
    );
    match served.await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
