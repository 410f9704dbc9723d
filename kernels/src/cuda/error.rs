//! What the driver can answer.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

/// Failure of a device or of its driver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The build found no compiler.
    #[error("this vt-run was built without CUDA kernels; build it with nvcc (VT_NVCC names one), or use --device cpu")]
    NotBuilt,
    /// libcuda cannot be loaded.
    #[error("no NVIDIA driver: libcuda.so.1 cannot be loaded; install the driver, or use --device cpu")]
    NoDriver,
    /// The driver is older than the functions used here.
    #[error(
        "the NVIDIA driver offers CUDA {}.{}, at least {}.{} is needed; update the driver, or use --device cpu",
        found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10
    )]
    DriverTooOld {
        /// As the driver counts: 12080 is 12.8.
        found: i32,
        /// The least.
        needed: i32,
    },
    /// There is no device of that index.
    #[error("there is no device cuda:{index}, this process sees {count}; see nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// As given.
        index: u32,
        /// Devices that there are.
        count: u32,
    },
    /// The build has no machine code for the device.
    #[error(
        "{device} has compute capability {}.{}, this vt-run has no kernels for it; build it with VT_CUDA_ARCHS=all",
        capability / 10, capability % 10
    )]
    NoKernelImage {
        /// Name of the device.
        device: String,
        /// Major * 10 + minor.
        capability: u32,
    },
    /// Device or pinned memory is exhausted.
    #[error("{what}: {bytes} bytes could not be allocated")]
    OutOfMemory {
        /// What for.
        what: &'static str,
        /// How much.
        bytes: u64,
    },
    /// A launch that no kernel takes: a shape, a stride or an alignment.
    #[error("{op}: the CUDA kernels do not take {what}")]
    Unsupported {
        /// The operator.
        op: &'static str,
        /// What was asked for.
        what: String,
    },
    /// The memory is a mapped file.
    #[error("{what}: the memory is a file that is mapped read-only")]
    ReadOnly {
        /// What was tried.
        what: &'static str,
    },
    /// Anything else that the driver says.
    #[error("{call}: {name}: {text}")]
    Call {
        /// The function.
        call: &'static str,
        /// The driver's name of the error.
        name: String,
        /// The driver's words.
        text: String,
    },
    /// A copy or a launch does not fit the memory that it names.
    #[error("{what}: bytes {start} to {end} of an allocation of {bytes}")]
    OutOfRange {
        /// What was tried.
        what: &'static str,
        /// First byte.
        start: u64,
        /// End.
        end: u64,
        /// Bytes that there are.
        bytes: u64,
    },
}

/// Names the call that failed.
pub(super) trait Named<T> {
    fn named(self, call: &'static str) -> Result<T, CudaError>;
}

impl<T> Named<T> for Result<T, DriverError> {
    fn named(self, call: &'static str) -> Result<T, CudaError> {
        self.map_err(|error| {
            let text = |found: Result<&std::ffi::CStr, DriverError>| {
                found.map_or_else(|_| "unknown".to_owned(), |s| s.to_string_lossy().into_owned())
            };
            CudaError::Call { call, name: text(error.error_name()), text: text(error.error_string()) }
        })
    }
}

/// Tells exhausted memory from other failures.
pub(super) fn of_allocation(error: DriverError, call: &'static str, what: &'static str, bytes: u64) -> CudaError {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::OutOfMemory { what, bytes },
        _ => match Err::<(), _>(error).named(call) {
            Err(named) => named,
            Ok(()) => CudaError::OutOfMemory { what, bytes },
        },
    }
}

/// Checks that `start .. start + len` lies within `bytes`.
pub(super) fn check_range(what: &'static str, start: u64, len: u64, bytes: u64) -> Result<(), CudaError> {
    match start.checked_add(len) {
        Some(end) if end <= bytes => Ok(()),
        end => Err(CudaError::OutOfRange { what, start, end: end.unwrap_or(u64::MAX), bytes }),
    }
}

/// Refuses a launch unless `condition` holds; `what` says what was asked for.
pub(super) fn require(condition: bool, op: &'static str, what: impl FnOnce() -> String) -> Result<(), CudaError> {
    if condition { Ok(()) } else { Err(CudaError::Unsupported { op, what: what() }) }
}
