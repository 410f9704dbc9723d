//! Tables that list a fatbin's kernels with their numbers, so that shapes are written down once, beside the kernels.

use crate::cuda::module::{Function, Module};
use crate::cuda::{CudaContext, CudaError};
use std::ffi::{CStr, CString};
use std::sync::{Arc, OnceLock};

/// Bytes of a kernel's name in an entry, filled up with zeros; numbers of 32 bits follow.
const NAME_BYTES: usize = 40;

/// A kernel that is looked up at first use: there are many, and a model uses few.
#[derive(Debug)]
pub(super) struct ListedKernel {
    module: Arc<Module>,
    name: String,
    function: OnceLock<Function>,
}

impl ListedKernel {
    /// What the table calls it.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The kernel, loaded with room for `shared_bytes` of shared memory where it has not been.
    ///
    /// # Errors
    /// [`CudaError`] where the fatbin has none of that name.
    pub(super) fn function(&self, shared_bytes: u32) -> Result<&Function, CudaError> {
        if let Some(function) = self.function.get() {
            return Ok(function);
        }
        let name = CString::new(self.name.as_str()).unwrap_or_default();
        let function = self.module.function(&name, shared_bytes)?;
        Ok(self.function.get_or_init(|| function))
    }
}

/// The kernels that the constant `table` of the fatbin `source` lists, each with its `NUMBERS` numbers.
///
/// # Errors
/// [`CudaError`] where the build lacks the fatbin, or the fatbin the table.
pub(super) fn kernels<const NUMBERS: usize>(
    context: &Arc<CudaContext>,
    source: &'static str,
    table: &CStr,
) -> Result<Vec<(ListedKernel, [u32; NUMBERS])>, CudaError> {
    let module = Module::load(context, source)?;
    let entries = module.constant(table)?;
    let listed = entries.chunks_exact(NAME_BYTES + 4 * NUMBERS).map(|entry| {
        let (name, numbers) = entry.split_at(NAME_BYTES);
        let name = String::from_utf8_lossy(name).trim_end_matches('\0').to_owned();
        let number = |i: usize| u32::from_le_bytes([0, 1, 2, 3].map(|b| numbers[4 * i + b]));
        (ListedKernel { module: Arc::clone(&module), name, function: OnceLock::new() }, std::array::from_fn(number))
    });
    Ok(listed.collect())
}
