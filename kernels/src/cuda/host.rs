//! Memory of the host that a device reads in place, for devices that share it: nothing is copied.

use super::error::of_allocation;
use super::{CudaContext, CudaError};
use cudarc::driver::sys;
use std::sync::Arc;
use vt_bundle::mmap::{ContiguousMap, HugePages};

/// Host memory that holds an image.
#[derive(Debug)]
pub enum HostPlace {
    /// Pages of the files themselves, read-only.
    Mapped(ContiguousMap),
    /// Memory of the process's own.
    Own(HugePages),
}

impl HostPlace {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            HostPlace::Mapped(map) => map.bytes(),
            HostPlace::Own(memory) => memory.bytes(),
        }
    }
}

/// Host memory that the device addresses.
#[derive(Debug)]
pub(super) struct SharedPlace {
    /// Where the device addresses it through page locking rather than through the host's page tables.
    registered: Option<Arc<CudaContext>>,
    place: HostPlace,
}

impl SharedPlace {
    /// Lets the device address `place`, and gives the address. A device that walks the host's page tables needs nothing for
    /// it; for any other the pages are locked.
    pub(super) fn new(context: &Arc<CudaContext>, place: HostPlace) -> Result<(Self, u64), CudaError> {
        context.bind()?;
        let start = place.bytes().as_ptr();
        let mut shared = Self { registered: None, place };
        if context.attributes().host_page_tables {
            return Ok((shared, start as u64));
        }
        let bytes = shared.place.bytes().len();
        let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        if matches!(shared.place, HostPlace::Mapped(_)) {
            flags |= sys::CU_MEMHOSTREGISTER_READ_ONLY;
        }
        let failed = |error| of_allocation(error, "cuMemHostRegister", "page-locked host memory", bytes as u64);
        // SAFETY: the range is mapped, owned by `shared`, and unlocked again before it is unmapped; a mapping that cannot be
        // written is registered as read-only, so that the device cannot write it either.
        unsafe { sys::cuMemHostRegister_v2(start.cast_mut().cast(), bytes, flags) }.result().map_err(failed)?;
        shared.registered = Some(Arc::clone(context));
        let mut address = 0;
        // SAFETY: the call writes one address, of memory that has just been locked and mapped for the device.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, start.cast_mut().cast(), 0) }
            .result()
            .map_err(failed)?;
        Ok((shared, address))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.place.bytes()
    }

    pub(super) fn is_writable(&self) -> bool {
        matches!(self.place, HostPlace::Own(_))
    }
}

impl Drop for SharedPlace {
    fn drop(&mut self) {
        if let Some(context) = &self.registered
            && context.bind().is_ok()
        {
            // SAFETY: registered in `new`; the owner has waited for the device.
            let _ = unsafe { sys::cuMemHostUnregister(self.place.bytes().as_ptr().cast_mut().cast()) };
        }
    }
}
