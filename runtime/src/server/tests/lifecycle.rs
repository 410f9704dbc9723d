//! Starting, being left, being overloaded, stopping, and who may ask.

use super::*;
use std::sync::atomic::Ordering;
use tokio::io::AsyncReadExt;

fn slow() -> FakeModel {
    letters().with_step_delay(Duration::from_millis(3))
}

fn endless() -> Value {
    json!({"prompt": "x", "max_tokens": 200, "ignore_eos": true})
}

#[tokio::test]
async fn c78_disconnects_cancel_streams_and_whole_answers() {
    let rig = rig(slow()).await;
    for stream in [true, false] {
        let mut body = endless();
        body["stream"] = json!(stream);
        let before = rig.counters.steps.load(Ordering::SeqCst);
        let mut connection = rig.client.open("POST", "/v1/completions", &[], body.to_string().as_bytes()).await;
        if stream {
            let mut byte = [0u8; 400];
            let read = connection.read(&mut byte).await.unwrap();
            assert!(read > 0);
        } else {
            while rig.counters.steps.load(Ordering::SeqCst) < before + 3 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        drop(connection);
        rig.settle().await;
        let steps = rig.counters.steps.load(Ordering::SeqCst) - before;
        assert!(steps < 60, "{steps} steps for stream={stream}");
    }
    assert_eq!(rig.state.metrics.cancelled.get(), 2);
    rig.complete(json!({})).await.json();
}

#[tokio::test]
async fn a_burst_beyond_the_queue_is_told_to_wait() {
    let rig = rig_with(slow().with_batch(64, 2), 4, ServerConfig::default()).await;
    let body = json!({"prompt": "x", "max_tokens": 5, "ignore_eos": true}).to_string();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..60 {
        let (body, address) = (body.clone(), rig.client.address().to_owned());
        tasks.spawn(async move { Client::new(&address).post("/v1/completions", body.as_bytes()).await });
    }
    let (mut good, mut refused) = (0, 0);
    while let Some(reply) = tasks.join_next().await {
        let reply = reply.unwrap();
        if reply.status == 200 {
            good += 1;
        } else {
            assert_eq!(reply.error(429)["code"], "queue_full");
            let seconds: u64 = reply.header("retry-after").unwrap().parse().unwrap();
            assert!((1..=60).contains(&seconds));
            refused += 1;
        }
    }
    assert!(good >= 4 && refused > 0, "{good} good, {refused} refused");
    rig.settle().await;
}

#[tokio::test]
async fn a_refusal_reaches_a_client_that_sends_much() {
    let config = ServerConfig { max_body_bytes: 4 << 20, ..ServerConfig::default() };
    let full = rig_with(letters(), 0, config.clone()).await;
    let locked = rig_with(letters(), 8, ServerConfig { api_keys: vec!["k".to_owned()], ..config }).await;
    let (large, too_large) = (vec![b' '; 3 << 20], vec![b' '; 9 << 20]);
    // Answers are lost by chance only, so that one of each would not tell.
    for _ in 0..8 {
        for (rig, body, status) in [(&full, &large, 429), (&locked, &large, 401), (&full, &too_large, 429)] {
            rig.client.post("/v1/completions", body).await.error(status);
        }
        full.client.post("/tokenize", &too_large).await.error(413);
    }
    assert!(full.client.get("/metrics").await.text().contains("vt:request_refusal_time_seconds_count 16"));
    // One that first asks whether to send is told at once, and sends nothing.
    let asking = [("expect", "100-continue"), ("content-length", "3000000")];
    let asked = full.client.request("POST", "/v1/completions", &asking, &[]);
    tokio::time::timeout(Duration::from_secs(2), asked).await.unwrap().error(429);
}

#[tokio::test]
async fn bodies_that_stop_or_are_packed_are_refused() {
    let config = ServerConfig { body_timeout: Duration::from_millis(50), ..ServerConfig::default() };
    let rig = rig_with(letters(), 8, config).await;
    let stops = rig.client.request("POST", "/v1/completions", &[("content-length", "500")], b"{\"prompt\": ");
    tokio::time::timeout(Duration::from_secs(5), stops).await.unwrap().error(408);
    let packed = [("content-encoding", "gzip")];
    let error = rig.client.request("POST", "/v1/completions", &packed, b"\x1f\x8b\x08").await.error(415);
    assert!(error["message"].as_str().unwrap().contains("gzip"));
    let plain = [("content-encoding", "identity")];
    let body = json!({"prompt": "abc", "max_tokens": 1}).to_string();
    rig.client.request("POST", "/v1/completions", &plain, body.as_bytes()).await.json();
}

#[tokio::test]
async fn keys_protect_everything_but_health() {
    let config = ServerConfig { api_keys: vec!["secret".to_owned()], ..ServerConfig::default() };
    let rig = rig_with(letters(), 8, config).await;
    assert_eq!(rig.client.get("/health").await.status, 200);
    for path in ["/ready", "/metrics", "/v1/models", "/nothing"] {
        let reply = rig.client.get(path).await;
        assert_eq!(reply.error(401)["code"], "invalid_api_key");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    }
    rig.complete(json!({})).await.error(401);
    let wrong = [("authorization", "Bearer wrong")];
    rig.client.request("GET", "/v1/models", &wrong, &[]).await.error(401);
    let right = [("authorization", "Bearer secret")];
    rig.client.request("GET", "/v1/models", &right, &[]).await.json();
}

#[tokio::test]
async fn requests_have_ids() {
    let rig = rig(letters()).await;
    let ours = rig.client.get("/health").await;
    assert!(ours.header("x-request-id").unwrap().starts_with("req-"));
    let theirs = rig.client.request("GET", "/health", &[("x-request-id", "mine-1")], &[]).await;
    assert_eq!(theirs.header("x-request-id"), Some("mine-1"));
}

#[tokio::test]
async fn origins_are_allowed_by_flag_only() {
    let asking = [
        ("origin", "https://a.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    let header = "access-control-allow-origin";
    let closed = rig(letters()).await;
    let reply = closed.client.request("GET", "/health", &asking, &[]).await;
    assert_eq!(reply.header(header), None);
    for (origins, expected) in [
        (vec!["*"], Some("*")),
        (vec!["https://a.example"], Some("https://a.example")),
        (vec!["https://b.example"], None),
    ] {
        let config = ServerConfig {
            allowed_origins: origins.into_iter().map(str::to_owned).collect(),
            api_keys: vec!["secret".to_owned()],
            ..ServerConfig::default()
        };
        let rig = rig_with(letters(), 8, config).await;
        // A preflight carries no key.
        let reply = rig.client.request("OPTIONS", "/v1/completions", &asking, &[]).await;
        assert_eq!((reply.status, reply.header(header)), (200, expected));
        // A key is a header that the wildcard does not stand for.
        assert_eq!(reply.header("access-control-allow-headers"), Some("authorization,content-type"));
    }
}

#[tokio::test]
async fn readiness_follows_loading_and_draining() {
    let state = Arc::new(AppState::new(ServerConfig::default(), Arc::new(Metrics::new("vt"))).unwrap());
    let endpoint = Endpoint::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
    let bound = Bound::bind(&endpoint).await.unwrap();
    let client = Client::new(&bound.address());
    let (_stop, stopped) = watch::channel(false);
    tokio::spawn(bound.serve(router(&state).unwrap(), stopped));

    state.progress.set_phase("upload");
    state.progress.set_total(100);
    state.progress.add_done(40);
    assert_eq!(client.get("/health").await.status, 200);
    let loading = client.get("/ready").await;
    assert_eq!(loading.status, 503);
    let body: Value = serde_json::from_slice(&loading.body).unwrap();
    assert_eq!(body, json!({"status": "loading", "phase": "upload", "bytes_done": 40, "bytes_total": 100}));
    assert_eq!(client.post("/v1/completions", b"{}").await.error(503)["code"], "loading");
    assert_eq!(client.get("/v1/models").await.error(503)["code"], "loading");
    assert_eq!(client.get("/metrics").await.status, 200);

    let served = fake_served(letters(), 8, Arc::clone(&state.metrics)).unwrap();
    state.set_served(served);
    assert_eq!(client.get("/ready").await.json()["status"], "ready");
    assert!(client.get("/metrics").await.text().contains("vt:bundle_info{digest=\"fa4e"));

    state.start_draining();
    assert_eq!(client.get("/ready").await.status, 503);
    assert_eq!(client.get("/health").await.status, 200);
    assert_eq!(client.post("/v1/completions", b"{}").await.error(503)["code"], "shutting_down");
}

#[tokio::test]
async fn draining_lets_short_answers_end_and_aborts_long_ones() {
    let config = ServerConfig { drain_timeout: Duration::from_millis(150), ..ServerConfig::default() };
    let rig = rig_with(slow(), 8, config).await;
    let mut body = endless();
    body["stream"] = json!(true);
    let long = rig.post("/v1/completions", body.clone());
    body["max_tokens"] = json!(5);
    let short = rig.post("/v1/completions", body);
    let stop = async {
        while rig.counters.steps.load(Ordering::SeqCst) < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        listen::drain(&rig.state, std::future::pending()).await;
    };
    let (long, short, ()) = tokio::join!(long, short, stop);
    let reason = |reply: &Reply| reply.pieces().last().unwrap()["choices"][0]["finish_reason"].clone();
    assert_eq!(reason(&short), "length");
    assert_eq!(reason(&long), "abort");
}

#[tokio::test]
async fn a_lost_device_is_an_error_and_unhealthy() {
    let rig = rig(letters().failing_at(3)).await;
    let error = rig.complete(json!({"ignore_eos": true})).await.error(500);
    assert!(error["message"].as_str().unwrap().contains("lost"));
    assert_eq!(rig.client.get("/health").await.status, 503);
    assert_eq!(rig.client.get("/ready").await.status, 503);
    assert_eq!(rig.complete(json!({})).await.error(503)["code"], "engine_stopped");
}

#[tokio::test]
async fn failures_within_a_stream_are_told() {
    let rig = rig(letters().failing_at(4)).await;
    let pieces = rig.complete(json!({"stream": true, "ignore_eos": true})).await.pieces();
    assert!(pieces.last().unwrap()["error"]["message"].is_string());
}

#[tokio::test]
async fn unix_sockets_are_bound_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vt.sock");
    let endpoint = Endpoint::Unix(path.clone());
    // A server that was killed leaves its file; the next one takes it over.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let bound = Bound::bind(&endpoint).await.unwrap();
    assert!(Bound::bind(&endpoint).await.is_err());
    let (stop, stopped) = watch::channel(false);
    let serving = tokio::spawn(bound.serve(Router::new(), stopped));
    stop.send(true).unwrap();
    serving.await.unwrap();
    assert!(!path.exists());

    // A server that never gets to serve leaves nothing, and none removes the socket of the one after it.
    drop(Bound::bind(&endpoint).await.unwrap());
    assert!(!path.exists());
    let first = Bound::bind(&endpoint).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    let second = Bound::bind(&endpoint).await.unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
}

#[tokio::test]
async fn bodies_have_a_bounded_share_of_memory() {
    let config = ServerConfig { max_bodies_bytes: 64 << 10, ..ServerConfig::default() };
    let rig = rig_with(letters(), 8, config).await;
    let large = json!({"prompt": "a".repeat(100 << 10)});
    for _ in 0..3 {
        for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
            assert_eq!(rig.post(path, large.clone()).await.error(429)["code"], "queue_full", "{path}");
        }
        // What was taken for a body goes back with its answer.
        for _ in 0..4 {
            let fits = json!({"prompt": "a".repeat(40 << 10)});
            assert!(rig.post("/tokenize", fits).await.json()["count"].is_u64());
        }
        rig.complete(json!({})).await.json();
    }
    assert_eq!(rig.state.bodies.available_permits(), 64);
}

#[tokio::test]
async fn origins_are_those_that_browsers_send() {
    let config = |origin: &str| ServerConfig { allowed_origins: vec![origin.to_owned()], ..ServerConfig::default() };
    let metrics = || Arc::new(Metrics::new("vt"));
    for good in ["*", "null", "https://example.org", "http://localhost:3000", "http://[::1]:8080", "app://x"] {
        let state = Arc::new(AppState::new(config(good), metrics()).unwrap());
        assert!(router(&state).is_ok(), "{good}");
    }
    for bad in ["", "a b", "example.org", "https://example.org/", "https://Example.org", "https://u@example.org", "//x"]
    {
        let state = Arc::new(AppState::new(config(bad), metrics()).unwrap());
        assert_eq!(router(&state).err().as_deref(), Some(bad));
    }
}

#[tokio::test]
async fn salts_differ_between_keys() {
    assert_ne!(CacheSalt::from_secret(b"a"), CacheSalt::default());
}

#[tokio::test]
async fn a_loader_that_fails_ends_the_server() {
    let config =
        ServerConfig { endpoint: Endpoint::Tcp { host: "127.0.0.1".to_owned(), port: 0 }, ..ServerConfig::default() };
    let metrics = Arc::new(Metrics::new("vt"));
    let result = serve(config, metrics, |_| Err::<Served, _>("no such bundle"), |_| {}).await;
    assert!(matches!(result, Err(ServeError::Load("no such bundle"))));
}
