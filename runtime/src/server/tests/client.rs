//! The smallest HTTP client that can talk to the server: HTTP/1.0, so that a body ends with the
//! connection.

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub struct Client {
    address: String,
}

/// An answer.
pub struct Reply {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Client {
    pub fn new(address: &str) -> Self {
        Self { address: address.trim_start_matches("http://").to_owned() }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.request("GET", path, &[], &[]).await
    }

    pub async fn post(&self, path: &str, body: &[u8]) -> Reply {
        let headers = [("content-type", "application/json")];
        self.request("POST", path, &headers, body).await
    }

    pub async fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut stream = self.open(method, path, headers, body).await;
        let mut raw = Vec::new();
        // A server that refuses a body may close before it is read; what it said still counts.
        let _ = stream.read_to_end(&mut raw).await;
        Reply::parse(&raw)
    }

    /// Sends a request and leaves the answer to be read.
    pub async fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        let mut head = format!("{method} {path} HTTP/1.0\r\nhost: test\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !headers.iter().any(|(name, _)| *name == "content-length") {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let _ = stream.write_all(body).await;
        stream
    }
}

impl Reply {
    fn parse(raw: &[u8]) -> Self {
        let end = raw.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(raw[..end].to_vec()).unwrap();
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap();
        Self {
            status: status.parse().unwrap(),
            headers: lines
                .filter_map(|line| line.split_once(": "))
                .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
                .collect(),
            body: raw[end + 4..].to_vec(),
        }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers.find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// The body of a good answer.
    #[track_caller]
    pub fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The error object of a bad one, whose shape is checked.
    #[track_caller]
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        let body: Value = serde_json::from_slice(&self.body).unwrap();
        let error = body["error"].clone();
        assert!(error["message"].is_string() && error["type"].is_string());
        assert!(error.get("param").is_some() && error.get("code").is_some());
        error
    }

    /// The pieces of a stream of named events, whose names are checked.
    #[track_caller]
    pub fn named_pieces(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        let events = self.text().split("\n\n").filter(|event| !event.is_empty());
        events
            .map(|event| {
                let (name, data) = event.split_once('\n').unwrap();
                let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
                assert_eq!(name.strip_prefix("event: ").unwrap(), data["type"]);
                data
            })
            .collect()
    }

    /// The pieces of a stream, whose end is checked.
    #[track_caller]
    pub fn pieces(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        let mut data: Vec<&str> = self.text().split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.into_iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}
