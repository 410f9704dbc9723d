//! Loaded modules and launches of their kernels.

use super::error::Named;
use super::{CudaContext, CudaError, CudaStream};
use cudarc::driver::{result, sys};
use std::ffi::{CStr, c_void};
use std::sync::Arc;

/// Pointers to the arguments of a launch, in the kernel's order; each is a place whose type is the kernel's.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {
        [$((&raw const $value).cast_mut().cast::<std::ffi::c_void>()),*]
    };
}
pub(super) use arguments;

/// The first compute capability whose kernels can start before the ones before them end.
const EARLY_CAPABILITY: u32 = 90;

/// A fatbin of this build, loaded into a context.
#[derive(Debug)]
pub(super) struct Module {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
}

// SAFETY: modules and functions may be used from any thread; the driver locks inside.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads the fatbin of that source.
    ///
    /// # Errors
    /// [`CudaError::NotBuilt`] or [`CudaError::NoKernelImage`] where there is none for the device.
    pub(super) fn load(context: &Arc<CudaContext>, name: &'static str) -> Result<Arc<Self>, CudaError> {
        let module = context.load_module(name)?;
        Ok(Arc::new(Self { context: Arc::clone(context), module }))
    }

    /// A kernel of the module that may use up to `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// [`CudaError::Call`] where there is none of that name, or the device has less shared memory.
    pub(super) fn function(self: &Arc<Self>, name: &CStr, shared_bytes: u32) -> Result<Function, CudaError> {
        self.context.bind()?;
        // SAFETY: the module is loaded and of this context.
        let function = unsafe { result::module::get_function(self.module, name.to_owned()) };
        let function = function.named("cuModuleGetFunction")?;
        // Up to 48 KiB need no leave.
        if shared_bytes > 48 << 10 {
            let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of this context.
            unsafe { result::function::set_function_attribute(function, limit, shared_bytes as i32) }
                .named("cuFuncSetAttribute")?;
        }
        Ok(Function { module: Arc::clone(self), function })
    }
}

impl Module {
    /// The bytes of a constant of the module.
    ///
    /// # Errors
    /// [`CudaError::Call`] where there is none of that name.
    pub(super) fn constant(&self, name: &CStr) -> Result<Vec<u8>, CudaError> {
        self.context.bind()?;
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: the module is loaded; the call writes the two numbers.
        unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, self.module, name.as_ptr()) }
            .result()
            .named("cuModuleGetGlobal")?;
        let mut data = vec![0u8; bytes];
        // SAFETY: the driver gave the place and the size of the constant.
        unsafe { result::memcpy_dtoh_sync(&mut data, address) }.named("cuMemcpyDtoH")?;
        Ok(data)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind().is_ok() && result::ctx::synchronize().is_ok() {
            // SAFETY: loaded in `load`; nothing of it is running.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// A kernel.
#[derive(Clone, Debug)]
pub(super) struct Function {
    module: Arc<Module>,
    function: sys::CUfunction,
}

// SAFETY: as for `Module`.
unsafe impl Send for Function {}
// SAFETY: as for `Module`.
unsafe impl Sync for Function {}

impl Function {
    /// Starts the kernel; `grid` and `block` as in CUDA, x first. A grid of nothing starts nothing.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// `arguments` are the kernel's, in its order and of its types; memory that it reads and writes is as large as it
    /// expects and stays allocated until the stream has passed the launch.
    pub(super) unsafe fn launch(
        &self,
        stream: &CudaStream,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        self.module.context.bind()?;
        // SAFETY: the caller's promise.
        unsafe {
            result::launch_kernel(self.function, grid.into(), block.into(), shared_bytes, stream.stream, arguments)
        }
        .named("cuLaunchKernel")
    }

    /// As [`Function::launch`], but the kernel may be put on the device while the one before it in the stream still runs,
    /// where the device can do that: its start is hidden. It begins with `wait_for_previous()` of `common/order.cuh`, and
    /// does before nothing that depends on earlier work.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// As for [`Function::launch`], and the kernel waits as said.
    pub(super) unsafe fn launch_early(
        &self,
        stream: &CudaStream,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        if self.module.context.attributes().capability < EARLY_CAPABILITY {
            // SAFETY: the caller's promise.
            return unsafe { self.launch(stream, grid, block, shared_bytes, arguments) };
        }
        if grid.contains(&0) {
            return Ok(());
        }
        self.module.context.bind()?;
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block[0],
            blockDimY: block[1],
            blockDimZ: block[2],
            sharedMemBytes: shared_bytes,
            hStream: stream.stream,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        // SAFETY: the caller's promise; the configuration and its attribute are read during the call.
        unsafe { sys::cuLaunchKernelEx(&raw const config, self.function, arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .named("cuLaunchKernelEx")
    }
}
