//! Checking one expert's record where it is resident, for experts that come and go one at a time.

use crate::load::{Accelerator, LoadError};
use vt_bundle::hash::{Digest, segment_digest, to_hex};
use vt_bundle::{Bundle, BundleError};

/// Compares the record of `expert` in a resident image with its own hash, on the device. `tensor` is the index in the manifest
/// of any tensor of the record; `hashes` are [`Bundle::expert_hashes`].
///
/// # Errors
/// [`BundleError::Record`] where it is corrupt.
///
/// # Panics
/// Where the tensor has no such expert, or `hashes` are of another bundle.
pub fn verify_expert<A: Accelerator>(
    accelerator: &A,
    bundle: &Bundle,
    hashes: &[Digest],
    memory: &A::Memory,
    tensor: usize,
    expert: u64,
) -> Result<(), LoadError> {
    let (tensor, _) = bundle.tensor_at(tensor);
    let experts = tensor.experts.as_ref().filter(|experts| expert < experts.count);
    let Some(experts) = experts else { panic!("{} has no expert {expert}", tensor.name) };
    let hash = accelerator.hash_message(memory, experts.record_start(expert), experts.record_size)?;
    let found = segment_digest(&accelerator.hashed(hash)?);
    let expected = hashes[(experts.record_hashes + expert) as usize];
    if found == Some(expected) {
        return Ok(());
    }
    let found = found.as_ref().map_or_else(|| "of nothing".to_owned(), to_hex);
    let (path, tensor) = (bundle.dir().to_owned(), tensor.name.clone());
    Err(BundleError::Record { path, tensor, expert, found, expected: to_hex(&expected) }.into())
}
