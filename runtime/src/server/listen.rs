//! Sockets: bind before anything is loaded, serve until told to stop.

use super::state::AppState;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;

/// Time that a client has for the head of its first request, or for its next one: as long as nginx waits.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// Bytes of a request's head, at most, and of a connection's buffers.
const MAX_HEADER_BYTES: usize = 64 << 10;
/// Connections that the system completes before they are accepted; it caps this at `net.core.somaxconn`. Of those beyond, it drops
/// the packets, and their clients try again only after 1, 3 and 7 seconds.
const BACKLOG: u32 = 16 << 10;
/// Pause after a connection that could not be accepted.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(50);

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// Host and port; port 0 takes a free one.
    Tcp {
        /// Name or address.
        host: String,
        /// Port.
        port: u16,
    },
    /// A unix socket at a path where nothing is, or a socket that nobody listens on.
    Unix(PathBuf),
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp { host, port } => write!(formatter, "{host}:{port}"),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

/// A bound socket.
#[derive(Debug)]
pub enum Bound {
    /// TCP.
    Tcp(TcpListener, SocketAddr),
    /// Unix; the file is removed at the end, however the server ends.
    Unix(UnixListener, SocketFile),
}

/// The file of a unix socket. Dropping it removes the file, unless another server's is there by now.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    fn new(path: PathBuf) -> Self {
        Self { identity: identity(&path), path }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

impl Bound {
    /// Binds.
    ///
    /// # Errors
    /// The operating system's.
    pub async fn bind(endpoint: &Endpoint) -> io::Result<Self> {
        match endpoint {
            Endpoint::Tcp { host, port } => {
                let listener = listen(host, *port).await?;
                let address = listener.local_addr()?;
                Ok(Self::Tcp(listener, address))
            }
            Endpoint::Unix(path) => {
                if is_stale_socket(path).await {
                    std::fs::remove_file(path)?;
                }
                Ok(Self::Unix(UnixListener::bind(path)?, SocketFile::new(path.clone())))
            }
        }
    }

    /// The address for people and clients.
    pub fn address(&self) -> String {
        match self {
            Self::Tcp(_, address) => format!("http://{address}"),
            Self::Unix(_, file) => format!("unix:{}", file.path.display()),
        }
    }

    /// Serves until `stop` becomes true and all connections have ended.
    pub async fn serve(self, app: Router, stop: watch::Receiver<bool>) {
        match self {
            Self::Tcp(listener, _) => serve_all(&listener, app, stop).await,
            Self::Unix(listener, _file) => serve_all(&listener, app, stop).await,
        }
    }
}

/// Listens on the first address of the host that can be had.
async fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut failure = io::Error::new(io::ErrorKind::AddrNotAvailable, "the name has no address");
    for address in tokio::net::lookup_host((host, port)).await? {
        let bound = (|| {
            let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            // A server that was just stopped leaves connections behind that the system still remembers.
            socket.set_reuseaddr(true)?;
            socket.bind(address)?;
            socket.listen(BACKLOG)
        })();
        match bound {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// A bound socket of any kind.
trait Listener: Sync {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Waits for the next connection.
    fn next(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<TcpStream> {
        let (stream, _) = self.accept().await?;
        // Small pieces of a stream must not wait for each other.
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<UnixStream> {
        Ok(self.accept().await?.0)
    }
}

/// Serves the connections of a listener until `stop` becomes true, then waits for those that are open.
async fn serve_all(listener: &impl Listener, app: Router, mut stop: watch::Receiver<bool>) {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT).max_buf_size(MAX_HEADER_BYTES);
    let open = GracefulShutdown::new();
    loop {
        let stream = tokio::select! {
            stream = listener.next() => stream,
            // A sender that is gone means the same as true.
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                tracing::debug!(%error, "a connection was not accepted");
                // A client that gave up again costs nothing; a lack of file descriptors lasts.
                if !matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) {
                    tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                }
                continue;
            }
        };
        let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app.clone()));
        let connection = open.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection broke off");
            }
        });
    }
    open.shutdown().await;
}

/// Whether a server that was killed left its socket behind.
async fn is_stale_socket(path: &PathBuf) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    is_socket && UnixStream::connect(path).await.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Raises the limit of open files to what the system allows: 1,024, the usual default, is less than a
/// burst of clients.
pub fn raise_open_files_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// Waits for SIGINT or SIGTERM.
///
/// # Errors
/// The operating system's, where signals cannot be awaited.
pub async fn termination() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

/// Takes no new work, lets what runs end, and aborts what is left when the drain time is over or
/// `impatience` comes.
pub async fn drain(state: &Arc<AppState>, impatience: impl Future<Output = ()>) {
    state.start_draining();
    let Some(served) = state.loaded() else {
        return;
    };
    let engine = &served.engine;
    tracing::info!(requests = engine.in_flight(), "draining");
    tokio::select! {
        () = engine.drained() => return,
        () = tokio::time::sleep(state.config.drain_timeout) => {}
        () = impatience => {}
    }
    tracing::warn!(requests = engine.in_flight(), "aborting what still runs");
    engine.abort();
    // The engine answers before its next step; one that hangs in a step must not hold up the end.
    let patience = tokio::time::sleep(Duration::from_secs(5));
    tokio::select! {
        () = engine.drained() => {}
        () = patience => tracing::error!("the engine does not answer"),
    }
}
