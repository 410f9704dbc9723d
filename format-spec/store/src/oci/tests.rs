//! Uploads over a line that breaks, to a registry that says how far they got.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::registry::Registry;
use crate::contents::{Entry, Kind};
use crate::error::StoreError;
use crate::progress::{Meter, Progress, Silent};
use crate::source::Source;
use crate::stream::sha256;

/// What the registry has seen.
#[derive(Debug, Default)]
struct Seen {
    sessions: usize,
    requests: usize,
    received: Vec<u8>,
    closed_with: Option<String>,
}

/// A registry with one upload at a time, which breaks off after `cut` bytes of every request that sends a blob.
fn registry(cut: usize) -> (u16, Arc<Mutex<Seen>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let seen = Arc::new(Mutex::new(Seen::default()));
    let shared = seen.clone();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            answer(connection.unwrap(), cut, &shared);
        }
    });
    (port, seen)
}

/// Answers the one request of a connection.
fn answer(mut stream: TcpStream, cut: usize, seen: &Mutex<Seen>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
            break;
        }
        lines.push(line);
    }
    let Some((method, rest)) = lines.first().and_then(|line| line.split_once(' ')) else { return };
    let length =
        lines.iter().find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length: ")?.trim().parse().ok());
    let length: usize = length.unwrap_or(0);
    let mut seen = seen.lock().unwrap();
    let location = "Location: /v2/x/blobs/uploads/session?_state=hunter2";
    let reply = match method {
        "POST" => {
            seen.sessions += 1;
            seen.received.clear();
            format!("202 Accepted\r\n{location}")
        }
        "PATCH" => {
            seen.requests += 1;
            let mut body = vec![0; length.min(cut)];
            reader.read_exact(&mut body).unwrap();
            seen.received.extend(body);
            if length > cut {
                return;
            }
            format!("202 Accepted\r\n{location}")
        }
        "GET" if rest.contains("/uploads/") => {
            format!("204 No Content\r\n{location}\r\nRange: 0-{}", seen.received.len().saturating_sub(1))
        }
        "PUT" => {
            seen.closed_with = rest.split("digest=").nth(1).and_then(|d| d.split([' ', '&']).next()).map(str::to_owned);
            "201 Created\r\nLocation: /v2/x/blobs/y".to_owned()
        }
        _ => "200 OK".to_owned(),
    };
    let reply = format!("HTTP/1.1 {reply}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    // A client that has gone wants no answer.
    let _ = stream.write_all(reply.as_bytes());
}

fn upload(port: u16, bytes: &[u8], known: bool) -> Result<String, StoreError> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let progress: Arc<dyn Progress> = Arc::new(Silent);
    let registry = Registry::new(&format!("127.0.0.1:{port}"), "x", false)?;
    let entry = Entry {
        path: "blob".to_owned(),
        size: bytes.len() as u64,
        blake3: String::new(),
        sha256: known.then(|| sha256(bytes)),
        kind: Kind::Weights,
    };
    runtime.block_on(registry.write_blob(&entry, &Source::Bytes(bytes), &Meter::new(&progress)))
}

#[test]
fn an_upload_goes_on_where_it_broke_off() {
    let bytes: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
    let (port, seen) = registry(700_000);
    assert_eq!(upload(port, &bytes, true).unwrap(), sha256(&bytes));
    let seen = seen.lock().unwrap();
    assert!(seen.received == bytes, "every byte arrived once and in order");
    assert_eq!((seen.sessions, seen.requests), (1, bytes.len().div_ceil(700_000)));
    assert_eq!(seen.closed_with.as_ref().map(|d| d.replace("%3A", ":")), Some(format!("sha256:{}", sha256(&bytes))));
}

#[test]
fn an_upload_whose_digest_is_not_known_begins_anew() {
    let bytes = vec![7; 100_000];
    let (port, seen) = registry(200_000);
    assert_eq!(upload(port, &bytes, false).unwrap(), sha256(&bytes));
    assert_eq!(seen.lock().unwrap().sessions, 1);
    // A line over which it can never come ends in an error that shows no part of an address behind the question mark.
    let (port, seen) = registry(50_000);
    let error = upload(port, &bytes, false).unwrap_err();
    assert_eq!(error.exit_code(), 6);
    assert!(!error.to_string().contains("hunter2"), "{error}");
    assert!(seen.lock().unwrap().sessions > 1);
}

#[test]
fn answers_without_an_end_are_not_read() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut stream = connection.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let first = lines.next().unwrap_or_default();
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            let head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(head);
            // Until the client goes away, but for the question whether this is a registry.
            while !first.starts_with("GET /v2/ ") && stream.write_all(&[b' '; 65536]).is_ok() {}
        }
    });
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let registry = Registry::new(&format!("127.0.0.1:{port}"), "x", false).unwrap();
    let refused = |error: StoreError| assert!(error.to_string().contains("at most"), "{error}");
    refused(runtime.block_on(registry.manifest("v1")).unwrap_err());
    refused(runtime.block_on(registry.tags()).unwrap_err());
    refused(runtime.block_on(registry.referrers(&format!("sha256:{}", "a".repeat(64)), "x")).unwrap_err());
}

/// A registry that names a server of tokens, itself; `token` is what that one answers. Gives the requests that it sees.
fn guarded(token: &'static [u8], endless: bool) -> (Registry, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let shared = seen.clone();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut stream = connection.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let first = lines.first().cloned().unwrap_or_default();
            let with_token = lines.iter().any(|line| line.eq_ignore_ascii_case("authorization: Bearer tiger"));
            shared.lock().unwrap().push(first.clone());
            let (status, more, body) = if first.starts_with("GET /token") {
                ("200 OK", "", token)
            } else if with_token {
                ("200 OK", "", &b"{}"[..])
            } else {
                let challenge = "WWW-Authenticate: Basic realm=\"x\", Bearer realm=\"/token\",service=\"s p\"\r\n";
                ("401 Unauthorized", challenge, &b""[..])
            };
            let _ = write!(stream, "HTTP/1.1 {status}\r\n{more}Connection: close\r\n\r\n");
            let _ = stream.write_all(body);
            while endless && first.starts_with("GET /token") && stream.write_all(&[b' '; 65536]).is_ok() {}
        }
    });
    let _ = rustls::crypto::ring::default_provider().install_default();
    (Registry::new(&format!("127.0.0.1:{port}"), "team/x", false).unwrap(), seen)
}

#[test]
fn tokens_are_asked_for_where_the_registry_says() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for answer in [&br#"{"token":"tiger"}"#[..], br#"{"access_token":"tiger","token":null,"expires_in":300}"#] {
        let (registry, seen) = guarded(answer, false);
        let (bytes, _) = runtime.block_on(registry.manifest("v1")).unwrap().unwrap();
        assert_eq!(bytes, b"{}");
        runtime.block_on(registry.put_manifest("v1", b"{}".to_vec(), "x/y")).unwrap();
        let seen = seen.lock().unwrap();
        let asked: Vec<&String> = seen.iter().filter(|line| line.starts_with("GET /token")).collect();
        assert_eq!(asked.len(), 2, "{seen:?}");
        assert!(asked[0].contains("scope=repository%3Ateam%2Fx%3Apull&service=s+p "), "{seen:?}");
        assert!(asked[1].contains("scope=repository%3Ateam%2Fx%3Apull%2Cpush&"), "{seen:?}");
    }
    for answer in [&b"hunter2"[..], b"{}", br#"{"token":""}"#] {
        let (registry, _) = guarded(answer, false);
        let error = runtime.block_on(registry.manifest("v1")).unwrap_err();
        let text = error.to_string();
        assert!(error.exit_code() == 6 && text.contains("no token") && !text.contains("hunter2"), "{text}");
    }
}

#[test]
fn a_token_without_an_end_is_not_read() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (registry, _) = guarded(b"", true);
    let error = runtime.block_on(registry.login(false)).unwrap_err();
    assert!(error.to_string().contains("at most"), "{error}");
}
