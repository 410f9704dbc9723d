//! The driver, its devices, and the context that everything on one device belongs to.

use super::error::Named;
use super::{CudaError, FATBINS, MIN_DRIVER};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use cudarc::driver::{DriverError, result};
use std::sync::Arc;

/// What a device says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// Product name.
    pub name: String,
    /// Compute capability, major * 10 + minor.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Device and host share one memory (Jetson, GB10).
    pub integrated: bool,
    /// The device reads the host's pageable memory through the host's own page tables (GH200, GB10).
    pub host_page_tables: bool,
}

impl DeviceAttributes {
    /// Whether the device addresses host memory as fast as its own, so that an image need not be copied. A card behind PCIe
    /// may also read pageable memory, by migrating pages; that is a copy and does not count.
    pub fn host_addressable(&self) -> bool {
        self.integrated || self.host_page_tables
    }
}

/// Memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that can be allocated now.
    pub free: u64,
    /// All.
    pub total: u64,
}

/// Loads and initialises the driver; 10 or 100 milliseconds the first time, nothing afterwards.
fn start_driver() -> Result<(), CudaError> {
    // SAFETY: looks for the library by name and closes it again; the initialisers of libcuda are those of any CUDA program.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    new_enough(driver_version()?)?;
    result::init().named("cuInit")
}

/// Refuses a driver that lacks functions used here, by its version.
fn new_enough(found: i32) -> Result<(), CudaError> {
    match found < MIN_DRIVER {
        true => Err(CudaError::DriverTooOld { found, needed: MIN_DRIVER }),
        false => Ok(()),
    }
}

/// Version of the driver: 12080 is CUDA 12.8.
///
/// # Errors
/// [`CudaError::NoDriver`].
pub fn driver_version() -> Result<i32, CudaError> {
    // SAFETY: as in `start_driver`.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the library is there, and the function may be called before cuInit; it writes one int.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().named("cuDriverGetVersion")?;
    Ok(version)
}

/// Number of devices that this process may use. Does not make a context.
///
/// # Errors
/// [`CudaError`] where there is no usable driver.
pub fn device_count() -> Result<u32, CudaError> {
    start_driver()?;
    match result::device::get_count() {
        Ok(count) => Ok(u32::try_from(count).unwrap_or(0)),
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Err(error) => Err(error).named("cuDeviceGetCount"),
    }
}

fn device(index: u32) -> Result<sys::CUdevice, CudaError> {
    let count = match device_count() {
        // The driver says it in its own way when the machine has none at all.
        Err(CudaError::Call { name, .. }) if name == "CUDA_ERROR_NO_DEVICE" => 0,
        other => other?,
    };
    match i32::try_from(index) {
        Ok(ordinal) if index < count => result::device::get(ordinal).named("cuDeviceGet"),
        _ => Err(CudaError::NoDevice { index, count }),
    }
}

/// Bytes of memory of a device. Does not make a context.
///
/// # Errors
/// [`CudaError`] where there is no such device.
pub fn device_memory(index: u32) -> Result<u64, CudaError> {
    let device = device(index)?;
    // SAFETY: `device` came from cuDeviceGet.
    Ok(unsafe { result::device::total_mem(device) }.named("cuDeviceTotalMem")? as u64)
}

/// The primary context of a device, and what is compiled for it.
///
/// Every value of this module that lives on the device holds an `Arc` of one, so that it is released last.
#[derive(Debug)]
pub struct CudaContext {
    index: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    attributes: DeviceAttributes,
}

// SAFETY: a context may be made current on any thread, and on several at once; the driver locks inside.
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

impl CudaContext {
    /// Opens a device. Takes some 0.3 s, most of it in the driver.
    ///
    /// # Errors
    /// [`CudaError`]: no kernels, no driver, too old a driver, no such device.
    pub fn new(index: u32) -> Result<Arc<Self>, CudaError> {
        if FATBINS.is_empty() {
            return Err(CudaError::NotBuilt);
        }
        let device = device(index)?;
        let attributes = attributes(device)?;
        // SAFETY: `device` came from cuDeviceGet; released in `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }.named("cuDevicePrimaryCtxRetain")?;
        Ok(Arc::new(Self { index, device, context, attributes }))
    }

    /// Index of the device.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// What the device says of itself.
    pub fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    /// Free and total memory.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn memory(&self) -> Result<MemoryInfo, CudaError> {
        self.bind()?;
        let (free, total) = result::mem_get_info().named("cuMemGetInfo")?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    /// Bytes of shared memory that a block may use where it asks for them.
    pub(super) fn shared_bytes_per_block(&self) -> Result<u32, CudaError> {
        let attribute = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        // SAFETY: `device` came from cuDeviceGet.
        let bytes = unsafe { result::device::get_attribute(self.device, attribute) }.named("cuDeviceGetAttribute")?;
        Ok(u32::try_from(bytes).unwrap_or(0))
    }

    /// Makes the context current on this thread; a compare inside the driver where it already is.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained until `drop`.
        unsafe { result::ctx::set_current(self.context) }.named("cuCtxSetCurrent")
    }

    /// Loads the module of that name for this device.
    pub(super) fn load_module(&self, name: &'static str) -> Result<sys::CUmodule, CudaError> {
        let (_, image) = FATBINS.iter().find(|(n, _)| *n == name).ok_or(CudaError::NotBuilt)?;
        self.bind()?;
        // SAFETY: a complete fatbin that nvcc wrote; the driver copies what it needs.
        match unsafe { result::module::load_data(image.as_ptr().cast()) } {
            Ok(module) => Ok(module),
            Err(DriverError(
                CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
                | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
                | CUresult::CUDA_ERROR_INVALID_PTX,
            )) => {
                let (device, capability) = (self.attributes.name.clone(), self.attributes.capability);
                Err(CudaError::NoKernelImage { device, capability })
            }
            Err(error) => Err(error).named("cuModuleLoadData"),
        }
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        // SAFETY: balances the retain of `new`; everything in the context held an `Arc` of `self` and is gone.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

fn attributes(device: sys::CUdevice) -> Result<DeviceAttributes, CudaError> {
    let get = |attribute| {
        // SAFETY: `device` came from cuDeviceGet.
        unsafe { result::device::get_attribute(device, attribute) }.named("cuDeviceGetAttribute")
    };
    let number = |attribute| get(attribute).map(|v| u32::try_from(v).unwrap_or(0));
    Ok(DeviceAttributes {
        name: result::device::get_name(device).named("cuDeviceGetName")?,
        capability: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        integrated: get(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        host_page_tables: get(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)? != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_driver_is_refused_with_both_versions() {
        for found in [11_080, 12_070, MIN_DRIVER - 1, 0] {
            let error = new_enough(found).expect_err("older than the oldest");
            let text = error.to_string();
            let offered = format!("offers CUDA {}.{}, at least 12.8 is needed", found / 1000, found % 1000 / 10);
            assert!(text.contains(&offered) && text.contains("update the driver"), "{text}");
        }
        for found in [MIN_DRIVER, 13_000] {
            assert!(new_enough(found).is_ok());
        }
    }

    #[test]
    fn shared_memory_counts_and_migration_does_not() {
        let card = DeviceAttributes {
            name: "card".to_owned(),
            capability: 90,
            multiprocessors: 132,
            integrated: false,
            host_page_tables: false,
        };
        assert!(!card.host_addressable());
        assert!(DeviceAttributes { integrated: true, ..card.clone() }.host_addressable());
        assert!(DeviceAttributes { host_page_tables: true, ..card }.host_addressable());
    }
}
