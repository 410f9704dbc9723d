//! The server over real sockets, with the stand-in model.

mod adapters;
mod api;
mod client;
mod lifecycle;
mod tools;

use super::*;
use crate::engine::CacheSalt;
use crate::test_support::fake_model::Counters;
use crate::test_support::{FakeModel, Script, fake_served, fake_text};
use crate::text::BundleText;
use client::{Client, Reply};
use serde_json::{Value, json};

/// A server that runs until it is dropped.
struct Rig {
    client: Client,
    state: Arc<AppState>,
    counters: Arc<Counters>,
    _stop: watch::Sender<bool>,
}

fn letters() -> FakeModel {
    FakeModel::new(Script::Letters, 256, 128)
}

/// A model that answers every chat with `text`.
fn replying(text: &str) -> FakeModel {
    FakeModel::new(Script::Reply(text.bytes().map(u32::from).collect()), 256, 128)
}

async fn rig(model: FakeModel) -> Rig {
    rig_with(model, 64, ServerConfig::default()).await
}

async fn rig_with(model: FakeModel, max_queue: usize, config: ServerConfig) -> Rig {
    rig_with_text(model, max_queue, config, fake_text()).await
}

async fn rig_with_text(model: FakeModel, max_queue: usize, config: ServerConfig, text: BundleText) -> Rig {
    let config = ServerConfig { endpoint: Endpoint::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, ..config };
    let bound = Bound::bind(&config.endpoint).await.unwrap();
    let address = bound.address();
    let counters = model.counters();
    let metrics = Arc::new(Metrics::new("vt"));
    let state = Arc::new(AppState::new(config, Arc::clone(&metrics)).unwrap());
    let served = fake_served(model, max_queue, metrics).unwrap();
    state.set_served(Served { text: Arc::new(text), ..served });
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(bound.serve(router(&state).unwrap(), stopped));
    Rig { client: Client::new(&address), state, counters, _stop: stop }
}

impl Rig {
    async fn post(&self, path: &str, body: Value) -> Reply {
        self.client.post(path, body.to_string().as_bytes()).await
    }

    async fn chat(&self, extra: Value) -> Reply {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "temperature": 0});
        merge(&mut body, extra);
        self.post("/v1/chat/completions", body).await
    }

    async fn complete(&self, extra: Value) -> Reply {
        let mut body = json!({"prompt": "abc", "temperature": 0, "max_tokens": 8});
        merge(&mut body, extra);
        self.post("/v1/completions", body).await
    }

    /// Waits until no request is under way and all blocks are free.
    async fn settle(&self) {
        let engine = &self.state.loaded().unwrap().engine;
        tokio::time::timeout(Duration::from_secs(5), engine.drained()).await.unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(2);
        while self.state.metrics.kv_cache_usage_perc.get() != 0.0 {
            assert!(std::time::Instant::now() < deadline, "blocks were lost");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

fn merge(body: &mut Value, extra: Value) {
    if let (Some(body), Value::Object(extra)) = (body.as_object_mut(), extra) {
        body.extend(extra);
    }
}
