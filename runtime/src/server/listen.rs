//! Sockets: bind before anything is loaded, serve until told to stop.

use super::state::AppState;
use axum::Router;
use axum::serve::ListenerExt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;

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
    /// Unix; the file is removed at the end.
    Unix(UnixListener, PathBuf),
}

impl Bound {
    /// Binds.
    ///
    /// # Errors
    /// The operating system's.
    pub async fn bind(endpoint: &Endpoint) -> io::Result<Self> {
        match endpoint {
            Endpoint::Tcp { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port)).await?;
                let address = listener.local_addr()?;
                Ok(Self::Tcp(listener, address))
            }
            Endpoint::Unix(path) => {
                if is_stale_socket(path).await {
                    std::fs::remove_file(path)?;
                }
                Ok(Self::Unix(UnixListener::bind(path)?, path.clone()))
            }
        }
    }

    /// The address for people and clients.
    pub fn address(&self) -> String {
        match self {
            Self::Tcp(_, address) => format!("http://{address}"),
            Self::Unix(_, path) => format!("unix:{}", path.display()),
        }
    }

    /// Serves until `stop` becomes true and all connections have ended.
    ///
    /// # Errors
    /// The operating system's.
    pub async fn serve(self, app: Router, stop: watch::Receiver<bool>) -> io::Result<()> {
        let stopped = async move {
            let mut stop = stop;
            // A sender that is gone means the same as true.
            let _ = stop.wait_for(|stop| *stop).await;
        };
        match self {
            Self::Tcp(listener, _) => {
                let listener = listener.tap_io(|stream| {
                    // Small pieces of a stream must not wait for each other.
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "TCP_NODELAY");
                    }
                });
                axum::serve(listener, app).with_graceful_shutdown(stopped).await
            }
            Self::Unix(listener, path) => {
                let result = axum::serve(listener, app).with_graceful_shutdown(stopped).await;
                // It may have been replaced or removed meanwhile.
                let _ = std::fs::remove_file(path);
                result
            }
        }
    }
}

/// Whether a server that was killed left its socket behind.
async fn is_stale_socket(path: &PathBuf) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
    is_socket
        && tokio::net::UnixStream::connect(path)
            .await
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
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
    let patience = tokio::time::sleep(std::time::Duration::from_secs(5));
    tokio::select! {
        () = engine.drained() => {}
        () = patience => tracing::error!("the engine does not answer"),
    }
}
