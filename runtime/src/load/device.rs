//! The seam between a bundle and the memory that its image becomes resident in.

use super::upload::{UploadOptions, load_image};
use super::{Accelerator, LoadError, Resident};
use serde::Serialize;
use vt_bundle::Bundle;

/// How the image is checked against the manifest before the first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// On the device, leaf by leaf, as the bytes arrive: also what happened on the bus and in device memory. On the CPU the
    /// same as `Host`.
    Device,
    /// On the host, leaf by leaf, as the bytes are read.
    Host,
    /// Not at all. Manifest, sizes and text assets are checked all the same.
    Off,
}

/// Somewhere that an image can be made resident.
pub trait Device {
    /// The memory of one image. Dropping it frees everything.
    type Arena;

    /// Name as on the command line (`cpu`, `cuda:0`).
    fn name(&self) -> String;

    /// Makes the device image of `bundle` resident, and checks it as `verify` says. `progress` is called with the
    /// bytes of each piece that has arrived, from any thread.
    ///
    /// # Errors
    /// [`LoadError::Bundle`] where the bytes cannot be read or are corrupt; [`LoadError::Device`] where the device
    /// fails.
    fn load_image(
        &self,
        bundle: &Bundle,
        verify: Verify,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Resident<Self::Arena>, LoadError>;
}

/// An accelerator and how to upload to it: the [`Device`] of images that are copied.
#[derive(Debug)]
pub struct Uploading<A> {
    /// The device.
    pub accelerator: A,
    /// Chunks, ring, readers.
    pub options: UploadOptions,
}

impl<A: Accelerator> Device for Uploading<A> {
    type Arena = A::Arena;

    fn name(&self) -> String {
        self.accelerator.name()
    }

    fn load_image(
        &self,
        bundle: &Bundle,
        verify: Verify,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Resident<A::Arena>, LoadError> {
        load_image(&self.accelerator, bundle, verify, &self.options, progress)
    }
}

/// An arena whose bytes the host can address: what CPU operators run on.
pub trait HostArena: Send + Sync {
    /// The whole image.
    fn bytes(&self) -> &[u8];
}
