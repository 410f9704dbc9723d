//! `vt-run` as a server: what it refuses to start with, and what must not stop it.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vt_tests::fixtures;
use vt_tests::process::{command, run};

fn bundle(root: &Path) -> PathBuf {
    fixtures::make_tiny(root, &["bf16"]);
    let bundle = root.join("bundle");
    run("vt-convert", &[&root.join("bf16"), &bundle]).ok();
    bundle
}

#[test]
fn settings_that_cannot_be_meant_are_refused() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle(root.path());
    let bundle = bundle.to_str().expect("temporary paths are text");
    let keys = root.path().join("keys");
    std::fs::write(&keys, "# none\n\n").expect("keys");
    let keys = keys.to_str().expect("temporary paths are text");
    for (flag, value, says) in [
        // Whoever sends an empty header would be let in.
        ("--api-key", "", "is empty"),
        ("--api-key", " key", "spaces"),
        ("--api-key-file", keys, "no keys"),
        ("--allowed-origins", "https://example.org/", "web origin"),
        ("--metrics-prefix", "a b", "digits"),
        ("--max-queue", "0", "at least 1"),
    ] {
        let ran = run("vt-run", &["--bundle", bundle, "--device", "cpu", "--port", "0", flag, value]);
        assert_eq!(ran.code, Some(2), "{flag} {value:?}: {ran:?}");
        assert!(ran.err.contains(says), "{flag} {value:?}: {ran:?}");
    }
}

#[test]
fn a_log_that_cannot_be_written_stops_nobody() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle(root.path());
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = free.local_addr().expect("address").port();
    drop(free);
    let full = || OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let arguments = ["--bundle", bundle.to_str().expect("text"), "--device", "cpu", "--port", &port.to_string()];
    let mut server = command("vt-run", &arguments);
    let mut server = server.stdout(full()).stderr(full()).spawn().expect("vt-run");
    let begun = Instant::now();
    let answer = loop {
        if let Ok(answer) = complete(port)
            && answer.starts_with("HTTP/1.1 200")
        {
            break answer;
        }
        assert!(server.try_wait().expect("status").is_none(), "vt-run ended");
        assert!(begun.elapsed() < Duration::from_secs(60), "no answer");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(answer.contains("\"choices\""), "{answer}");
    let pid = server.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
    assert!(server.wait().expect("end").success());
    // Nor does an error that nobody can read change its exit code.
    let mut failing = command("vt-run", &["--bundle", "/nonexistent"]);
    assert_eq!(failing.stderr(full()).status().expect("vt-run").code(), Some(3));
}

/// Asks for a completion, with a field that the server warns of.
fn complete(port: u16) -> std::io::Result<String> {
    let body = "{\"prompt\": \"a\", \"max_tokens\": 1, \"nonsense\": 1}";
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
