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
}
