//! From a bundle on disk to resident weights.
//!
//! [`LoadedBundle`] is the only owner of a model's weights. A [`Device`] says where an image becomes resident and gives
//! an arena that the bundle owns; tensors are views into it, offsets with the bundle's lifetime. There is no other owner,
//! no table keyed by an address and no static, so that two bundles of one process cannot see each other.

mod assets;
mod cpu;
mod device;
mod error;
mod loaded;
mod memory;
mod plan;

pub use assets::Assets;
pub use cpu::CpuDevice;
pub use device::{Device, HostArena, Verify};
pub use error::LoadError;
pub use loaded::{LoadedBundle, TensorView};
pub use memory::available_memory;
pub use plan::{MemoryCategory, MemoryPlan, MemoryRequest};
