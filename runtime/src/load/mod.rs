//! From a bundle on disk to resident weights.
//!
//! [`LoadedBundle`] is the only owner of a model's weights. A [`Device`] says where an image becomes resident and gives
//! an arena that the bundle owns; tensors are views into it, offsets with the bundle's lifetime. There is no other owner,
//! no table keyed by an address and no static, so that two bundles of one process cannot see each other.

mod accelerator;
mod assets;
pub mod bench;
mod cpu;
mod cuda;
mod device;
mod device_plan;
mod error;
#[cfg(any(test, feature = "test-support"))]
mod fake;
mod ledger;
mod loaded;
mod memory;
mod plan;
#[cfg(test)]
mod record_tests;
mod report;
#[cfg(test)]
mod shard_tests;
#[cfg(test)]
mod shared_tests;
#[cfg(test)]
mod tests;
pub mod upload;

pub use accelerator::{Accelerator, Piece};
pub use assets::Assets;
pub use cpu::CpuDevice;
pub use cuda::{CudaAccelerator, CudaArena};
pub use device::{Device, HostArena, Uploading, Verify};
pub use device_plan::DeviceMemory;
pub use error::LoadError;
#[cfg(any(test, feature = "test-support"))]
pub use fake::{FakeAccelerator, FakeArena, Faults};
pub use ledger::{Ledger, LedgerTotals};
pub use loaded::{LoadedBundle, TensorView};
pub use memory::available_memory;
pub use plan::{MemoryCategory, MemoryPlan, MemoryRequest};
pub use report::{LoadReport, Resident};
