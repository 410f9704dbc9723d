//! CUDA: the driver, memory, streams, and launches of the kernels that the build embedded.
//!
//! Everything here is owned: a [`DeviceMemory`] keeps its [`CudaContext`] alive, a copy under way keeps its source and its
//! target, and dropping the last owner frees. There are no statics and no default stream; any thread may call anything.
//!
//! The driver library is loaded when [`CudaContext::new`] is first called, so that a binary with this module also starts on
//! machines without one. Kernels come from [`FATBINS`], which is empty when no nvcc was found at build time.

pub mod attention;
mod context;
pub mod elementwise;
mod error;
pub mod gemm;
mod graph;
mod host;
pub mod kv_cache;
mod leaves;
pub mod measure;
mod memory;
// Every family of kernels but the hash uses it.
mod module;
pub mod moe;
pub mod moe_rows;
pub mod norm;
pub mod sampling;
mod stopwatch;
mod stream;
mod transfer;

pub use context::{CudaContext, DeviceAttributes, MemoryInfo, device_count, device_memory, driver_version};
pub use error::CudaError;
pub use graph::CudaGraph;
pub use host::HostPlace;
pub use leaves::{LeafHasher, LeafRange, PendingLeaves};
pub use memory::{DeviceMemory, StagingBuffer, StagingPart};
pub use stopwatch::Stopwatch;
pub use stream::{CudaStream, PendingUpload, UploadRange};
pub use transfer::{Inbox, Outbox};

/// Compiled kernels by the name of their source, as the build script found a compiler.
pub const FATBINS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// Whether this build has kernels.
pub const fn built() -> bool {
    !FATBINS.is_empty()
}

/// The oldest driver that runs this build's kernels and offers every function used: CUDA 12.8, as the driver counts.
pub const MIN_DRIVER: i32 = 12_080;
