//! Launches recorded once and replayed: CUDA graphs.

use super::error::Named;
use super::{CudaContext, CudaError, CudaStream};
use cudarc::driver::{result, sys};
use std::sync::Arc;

/// A recorded sequence of launches and copies, ready to be replayed. What it names stays as it was recorded: addresses, grids
/// and numbers; only what device memory holds may differ from replay to replay.
#[derive(Debug)]
pub struct CudaGraph {
    context: Arc<CudaContext>,
    executable: sys::CUgraphExec,
    nodes: usize,
}

// SAFETY: a graph may be launched from any thread; exclusive access for launches is the caller's stream order, and the driver
// locks inside.
unsafe impl Send for CudaGraph {}

impl CudaGraph {
    /// Records what `submit` submits to `stream`, which does not run it. Work that cannot be recorded (allocations,
    /// synchronisation) fails.
    ///
    /// # Errors
    /// The error of `submit`, or [`CudaError::Call`]; the stream can be used again in any case.
    pub fn record<E: From<CudaError>>(stream: &CudaStream, submit: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        stream.context().bind()?;
        // Thread-local: what other threads do with the device meanwhile (loading, hashing) is not forbidden.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive and not being captured, as captures end in this function.
        unsafe { result::stream::begin_capture(stream.stream, mode) }.named("cuStreamBeginCapture")?;
        let submitted = submit();
        // SAFETY: the capture was begun above on this stream.
        let graph = unsafe { result::stream::end_capture(stream.stream) }.named("cuStreamEndCapture");
        let graph = graph.map(Recorded);
        submitted?;
        let graph = graph?;
        let mut nodes = 0;
        // SAFETY: the graph is alive; without an array the call only counts.
        unsafe { sys::cuGraphGetNodes(graph.0, std::ptr::null_mut(), &mut nodes) }.result().named("cuGraphGetNodes")?;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph is alive.
        let executable = unsafe { result::graph::instantiate(graph.0, flags) }.named("cuGraphInstantiate")?;
        let recorded = Self { context: Arc::clone(stream.context()), executable, nodes };
        // Moves what the device needs there now, instead of at the first replay.
        // SAFETY: both are alive.
        unsafe { result::graph::upload(executable, stream.stream) }.named("cuGraphUpload")?;
        Ok(recorded)
    }

    /// Submits everything recorded.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn replay(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.context.bind()?;
        // SAFETY: both are alive; the memory that the graph names is its owner's promise.
        unsafe { result::graph::launch(self.executable, stream.stream) }.named("cuGraphLaunch")
    }

    /// Launches and copies in it.
    pub fn nodes(&self) -> usize {
        self.nodes
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `record`; the driver keeps what a replay under way still needs.
            let _ = unsafe { result::graph::exec_destroy(self.executable) };
        }
    }
}

/// A graph that is not executable.
struct Recorded(sys::CUgraph);

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: made by the capture; executables do not depend on it.
        let _ = unsafe { result::graph::destroy(self.0) };
    }
}
