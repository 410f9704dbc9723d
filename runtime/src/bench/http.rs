//! A server over HTTP/1.1, as its clients see it.

use super::sse::{Piece, Pieces};
use super::{Conduct, End, Numbers, Request, Sample, Target, Watch};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER};
use hyper::{Method, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// Longest wait for any one request.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Bodies that no server may accept.
const MALFORMED: [&[u8]; 5] =
    [b"{\"prompt\": ", b"\xff\xfe\x00", b"[]", b"{\"prompt\": 5, \"max_tokens\": -1}", b"{\"temperature\": \"hot\"}"];

/// Words of prompts: short and common, about a token each.
const WORDS: [&str; 16] = [
    "sea", "sky", "tree", "stone", "bird", "river", "light", "house", "road", "wind", "hand", "door", "fish", "rain",
    "book", "salt",
];

/// Metrics that must be zero when nothing is left to do, without their prefix.
const IDLE: [&str; 3] = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"];

/// Seconds that a server's device has worked.
const DEVICE: &str = "device_busy_seconds_total";

/// Why a server cannot be measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UrlError {
    /// Not an address that this client can use.
    #[error("`{0}` is not an address such as http://127.0.0.1:8000 (without TLS)")]
    Address(String),
    /// A key that cannot be a header.
    #[error("the API key holds characters that a header cannot carry")]
    Key,
    /// The server did not say what it serves.
    #[error("{url}: /v1/models: {reason}")]
    Models {
        /// The server.
        url: String,
        /// What it answered.
        reason: String,
    },
}

/// A server.
#[derive(Debug)]
pub struct HttpTarget {
    authority: String,
    host: String,
    port: u16,
    /// Before `/v1`, without a slash at its end.
    path: String,
    model: Value,
    authorization: Option<HeaderValue>,
}

/// The connection of one client, kept from request to request.
#[derive(Debug, Default)]
pub struct Connection(Option<Open>);

#[derive(Debug)]
struct Open {
    sender: SendRequest<Full<Bytes>>,
    driver: JoinHandle<()>,
}

impl Drop for Open {
    fn drop(&mut self) {
        // Closes the socket now, whatever is still under way.
        self.driver.abort();
    }
}

impl HttpTarget {
    /// The server at `url`. Without a `model` the first that it lists is asked.
    ///
    /// # Errors
    /// [`UrlError`].
    pub async fn new(url: &str, model: Option<&str>, key: Option<&str>) -> Result<Self, UrlError> {
        let wrong = || UrlError::Address(url.to_owned());
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let (Some("http"), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(wrong()) };
        let authorization = match key.map(|key| HeaderValue::from_str(&format!("Bearer {key}"))) {
            None => None,
            Some(Ok(mut value)) => {
                value.set_sensitive(true);
                Some(value)
            }
            Some(Err(_)) => return Err(UrlError::Key),
        };
        let mut target = Self {
            authority: authority.to_string(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(80),
            path: uri.path().trim_end_matches('/').trim_end_matches("/v1").to_owned(),
            model: model.map_or(Value::Null, Value::from),
            authorization,
        };
        if target.model.is_null() {
            let failed = |reason: String| UrlError::Models { url: url.to_owned(), reason };
            let (status, body) = target.get("/v1/models").await.map_err(failed)?;
            let list: Value = serde_json::from_slice(&body).unwrap_or_default();
            match list["data"][0]["id"].as_str() {
                Some(id) => target.model = Value::from(id),
                None => return Err(failed(format!("{status}, no model"))),
            }
        }
        Ok(target)
    }

    /// The name of the model that is asked.
    pub fn model(&self) -> &str {
        self.model.as_str().unwrap_or_default()
    }

    /// What the server says that it still has to do, by its metrics, once it is idle or has had some seconds for it;
    /// nothing where it has no such metrics.
    pub async fn left_over(&self) -> BTreeMap<String, f64> {
        let mut left = BTreeMap::new();
        for _ in 0..50 {
            let Ok((StatusCode::OK, body)) = self.get("/metrics").await else { return left };
            left = metrics(&String::from_utf8_lossy(&body), &IDLE);
            if left.values().all(|value| *value == 0.0) {
                return left;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        left
    }

    async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), String> {
        let mut connection = Connection::default();
        let work = async {
            let response = self.send(&mut connection, Method::GET, path, Bytes::new()).await?;
            let status = response.status();
            let body = response.into_body().collect().await.map_err(|error| error.to_string())?;
            Ok((status, body.to_bytes()))
        };
        tokio::time::timeout(TIMEOUT, work).await.unwrap_or_else(|_| Err("timeout".to_owned()))
    }

    async fn connect(&self) -> Result<Open, String> {
        let failed = |error: &dyn std::fmt::Display| format!("connect: {error}");
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(|e| failed(&e))?;
        stream.set_nodelay(true).map_err(|e| failed(&e))?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| failed(&e))?;
        // An error of the connection is also one of the request that is under way.
        let driver = tokio::spawn(async move { drop(connection.await) });
        Ok(Open { sender, driver })
    }

    async fn send(
        &self,
        connection: &mut Connection,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, String> {
        let kept = match connection.0.take() {
            Some(mut open) => open.sender.ready().await.is_ok().then_some(open),
            None => None,
        };
        let mut open = match kept {
            Some(open) => open,
            None => self.connect().await?,
        };
        let mut request = hyper::Request::builder().method(method).uri(format!("{}{path}", self.path));
        request = request.header(HOST, &self.authority).header(CONTENT_TYPE, "application/json");
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        let request = request.body(Full::new(body)).map_err(|error| format!("request: {error}"))?;
        let response = open.sender.send_request(request).await.map_err(|error| format!("send: {error}"))?;
        connection.0 = Some(open);
        Ok(response)
    }

    fn body(&self, request: &Request) -> Bytes {
        let mut numbers = Numbers(request.seed);
        if request.conduct == Conduct::Malformed {
            return Bytes::from_static(MALFORMED[numbers.below(MALFORMED.len())]);
        }
        let words: Vec<&str> = (0..request.input).map(|_| WORDS[numbers.below(WORDS.len())]).collect();
        let body = json!({
            "model": self.model,
            "prompt": words.join(" "),
            "max_tokens": request.output,
            "temperature": if numbers.below(2) == 0 { 0.0 } else { 1.0 },
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        body.to_string().into()
    }

    async fn converse(&self, connection: &mut Connection, request: &Request, watch: &mut Watch) -> (End, u64, u64) {
        let (mut input, mut output) = (0, 0);
        let body = self.body(request);
        let response = match self.send(connection, Method::POST, "/v1/completions", body).await {
            Ok(response) => response,
            Err(reason) => return (End::Failed(reason), input, output),
        };
        let status = response.status();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let mut body = response.into_body();
        if status != StatusCode::OK {
            // Read to its end, so that the connection can be used again.
            let _ = body.collect().await;
            let end = match status {
                StatusCode::BAD_REQUEST if request.conduct == Conduct::Malformed => End::Refused,
                StatusCode::TOO_MANY_REQUESTS => End::ToldToWait(retry_after),
                status => End::Failed(format!("status {}", status.as_u16())),
            };
            return (end, input, output);
        }
        if request.conduct == Conduct::Malformed {
            return (End::Failed("malformed request accepted".to_owned()), input, output);
        }
        let (mut pieces, mut found, mut texts) = (Pieces::default(), Vec::new(), 0);
        loop {
            let frame = match body.frame().await {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return (End::Failed(format!("stream: {error}")), input, output),
                None => return (End::Failed("stream without end".to_owned()), input, output),
            };
            let Some(data) = frame.data_ref() else { continue };
            pieces.push(data, &mut found);
            for piece in found.drain(..) {
                match piece {
                    Piece::Text => {
                        watch.piece();
                        texts += 1;
                        if request.conduct == Conduct::Leaves(texts) {
                            return (End::Left, input, output);
                        }
                    }
                    Piece::Usage(prompt, completion) => (input, output) = (prompt, completion),
                    Piece::Error(name) => return (End::Failed(format!("stream error {name}")), input, output),
                    Piece::Done => {
                        // The last chunk, which is empty; then the connection is free again.
                        while let Some(Ok(_)) = body.frame().await {}
                        return (End::Finished, input, output);
                    }
                }
            }
        }
    }
}

impl Target for HttpTarget {
    type Session = Connection;

    async fn device_seconds(&self) -> Option<f64> {
        let Ok((StatusCode::OK, body)) = self.get("/metrics").await else { return None };
        metrics(&String::from_utf8_lossy(&body), &[DEVICE]).remove(DEVICE)
    }

    async fn request(&self, connection: &mut Connection, request: Request) -> Sample {
        let mut watch = Watch::start();
        let work = self.converse(connection, &request, &mut watch);
        let outcome = tokio::time::timeout(TIMEOUT, work).await;
        let (end, input, output) = outcome.unwrap_or_else(|_| (End::Failed("timeout".to_owned()), 0, 0));
        if !matches!(end, End::Finished | End::Refused | End::ToldToWait(_)) {
            connection.0 = None;
        }
        watch.end(end, input, output)
    }
}

/// The values of these in a page of metrics, whatever their prefix.
fn metrics(page: &str, names: &[&str]) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, value)) = line.rsplit_once(' ') else { continue };
        let name = name.split('{').next().unwrap_or(name);
        let short = name.rsplit(':').next().unwrap_or(name);
        if let (true, Ok(value)) = (names.contains(&short), value.parse::<f64>()) {
            *found.entry(short.to_owned()).or_default() += value;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_any_prefix_are_read() {
        let page = "# TYPE x gauge\nvt:num_requests_running 2\nvllm:num_requests_waiting{model_name=\"m\"} 1.0\n\
                    vt:kv_cache_usage_perc 0.25\nvt:prompt_tokens_total 9\n";
        let found = metrics(page, &IDLE);
        assert_eq!(found.len(), 3);
        assert_eq!(metrics("vt:device_busy_seconds_total 1.5\n", &[DEVICE])[DEVICE], 1.5);
        assert_eq!((found["num_requests_running"], found["kv_cache_usage_perc"]), (2.0, 0.25));
    }

    #[tokio::test]
    async fn addresses_are_checked() {
        for wrong in ["", "127.0.0.1:8000", "https://example.org", "unix:/x"] {
            assert!(matches!(HttpTarget::new(wrong, Some("m"), None).await, Err(UrlError::Address(_))), "{wrong}");
        }
        assert!(matches!(HttpTarget::new("http://h", Some("m"), Some("a\nb")).await, Err(UrlError::Key)));
        let target = HttpTarget::new("http://[::1]:9/base/v1/", Some("m"), None).await.unwrap();
        assert_eq!((target.host.as_str(), target.port, target.path.as_str()), ("::1", 9, "/base"));
        let gone = HttpTarget::new("http://127.0.0.1:1", None, None).await.unwrap_err();
        assert!(gone.to_string().contains("connect"), "{gone}");
    }
}
