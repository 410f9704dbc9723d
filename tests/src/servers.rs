//! Servers for the tests of stores: a real registry, an S3 server, and a line that breaks.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::fixtures::repository;
use crate::process::Numbers;

/// How long a server may take to answer for the first time.
const STARTUP: Duration = Duration::from_secs(60);

/// Whether a program can be run.
pub fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// A port that nobody listens on.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.local_addr().expect("it has an address").port()
}

fn wait_for(port: u16, what: &str) {
    let began = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(began.elapsed() < STARTUP, "{what} does not answer");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// User of a registry that wants to know who asks.
pub const USER: &str = "alice";
/// Password of that user.
pub const PASSWORD: &str = "hunter2secret";
/// The same in the form that `docker-registry` reads: bcrypt.
const PASSWORD_HASH: &str = "$2b$05$hAAPNUVafq91t7SgguQg3.LMAtFuhE6KvE6tDOxt.DDQjeZIb.moK";

/// `docker-registry` with a folder of its own; ends with the value.
#[derive(Debug)]
pub struct Registry {
    child: Child,
    /// Its port on 127.0.0.1.
    pub port: u16,
    dir: PathBuf,
}

impl Registry {
    /// Starts a registry in a folder; says so where the program is not installed. With `closed` it lets in only [`USER`].
    ///
    /// # Panics
    /// If it does not come up.
    pub fn start(dir: &Path, closed: bool) -> Option<Self> {
        if !is_installed("docker-registry") {
            eprintln!("SKIPPED: docker-registry is not installed (Debian package docker-registry)");
            return None;
        }
        std::fs::create_dir_all(dir).expect("folder made");
        let port = free_port();
        let users = dir.join("users");
        std::fs::write(&users, format!("{USER}:{PASSWORD_HASH}\n")).expect("written");
        let auth = format!("auth: {{htpasswd: {{realm: tests, path: {}}}}}\n", users.display());
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '127.0.0.1:{port}', secret: tests}}\n{}",
            dir.join("data").display(),
            if closed { auth.as_str() } else { "" }
        );
        let file = dir.join("config.yml");
        std::fs::write(&file, config).expect("written");
        let log = |name: &str| std::fs::File::create(dir.join(name)).expect("made");
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(log("access.log"))
            .stderr(log("error.log"))
            .spawn()
            .expect("started");
        let registry = Self { child, port, dir: dir.to_owned() };
        wait_for(port, "docker-registry");
        Some(registry)
    }

    /// A reference to a repository of it.
    pub fn reference(&self, name: &str) -> String {
        format!("oci://127.0.0.1:{}/{name}", self.port)
    }

    /// Requests so far of which the line in the log contains all these parts.
    ///
    /// # Panics
    /// If the log cannot be read.
    pub fn requests(&self, parts: &[&str]) -> usize {
        let log = std::fs::read_to_string(self.dir.join("access.log")).expect("log read");
        log.lines().filter(|line| parts.iter().all(|part| line.contains(part))).count()
    }

    /// Blobs that were uploaded so far.
    pub fn uploads(&self) -> usize {
        self.requests(&["\"PUT /v2/", "/blobs/uploads/", " 201 "])
    }

    /// The file in which it keeps a blob.
    pub fn blob(&self, sha256: &str) -> PathBuf {
        self.dir.join("data/docker/registry/v2/blobs/sha256").join(&sha256[..2]).join(sha256).join("data")
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The S3 server of `moto`, with one bucket; ends with the value.
#[derive(Debug)]
pub struct S3 {
    child: Child,
    port: u16,
}

impl S3 {
    /// Starts it with a bucket `models`; says so where `moto` is not installed. It is looked for with the Python that
    /// `VT_TEST_PYTHON` names, or `.build/venv`, which `./test.sh` fills.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn start(dir: &Path) -> Option<Self> {
        let python = std::env::var_os("VT_TEST_PYTHON").map(PathBuf::from);
        let python = python.unwrap_or_else(|| repository().join(".build/venv/bin/python"));
        let there = Command::new(&python).args(["-c", "import moto.server"]).stderr(Stdio::null()).status();
        if !there.is_ok_and(|status| status.success()) {
            eprintln!("SKIPPED: {} has no moto[server]; ./test.sh installs it", python.display());
            return None;
        }
        let port = free_port();
        let log = std::fs::File::create(dir.join("s3.log")).expect("made");
        let child = Command::new(&python)
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("started");
        let server = Self { child, port };
        wait_for(port, "moto");
        let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connected");
        let request = "PUT /models HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        Some(server)
    }

    /// The environment that leads a client to it.
    pub fn environment(&self) -> [(&'static str, String); 4] {
        [
            ("AWS_ACCESS_KEY_ID", USER.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", PASSWORD.to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{}", self.port)),
        ]
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line to a server that breaks off after every so many bytes.
#[derive(Debug)]
pub struct BreakingLine {
    /// Its port on 127.0.0.1.
    pub port: u16,
    stop: Arc<AtomicBool>,
    broken: Arc<AtomicU64>,
}

impl BreakingLine {
    /// A line to a port of this machine; each connection is cut after at most `most` bytes, at random, in either
    /// direction.
    ///
    /// # Panics
    /// If no port is free.
    pub fn to(port: u16, most: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let own = listener.local_addr().expect("it has an address").port();
        let (stop, broken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let line = Self { port: own, stop: stop.clone(), broken: broken.clone() };
        std::thread::spawn(move || {
            let mut numbers = Numbers(5);
            for client in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(("127.0.0.1", port))) else { continue };
                let left = Arc::new(AtomicU64::new(most / 4 + numbers.below(most - most / 4)));
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { continue };
                    let (left, broken) = (left.clone(), broken.clone());
                    std::thread::spawn(move || forward(from, to, &left, &broken));
                }
            }
        });
        line
    }

    /// Connections that were cut so far.
    pub fn broken(&self) -> u64 {
        self.broken.load(Ordering::Relaxed)
    }
}

impl Drop for BreakingLine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, left: &AtomicU64, broken: &AtomicU64) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 {
            break;
        }
        let before = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |l| Some(l.saturating_sub(n as u64)));
        let before = before.unwrap_or_default();
        let part = n.min(before as usize);
        if to.write_all(&buffer[..part]).is_err() {
            break;
        }
        if part < n {
            if before > 0 {
                broken.fetch_add(1, Ordering::Relaxed);
            }
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
