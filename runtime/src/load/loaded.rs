//! The owner of resident weights, and views into it.

use super::{Assets, Device, HostArena, LoadError, LoadReport, Resident, Verify};
use vt_bundle::geometry::Geometry;
use vt_bundle::manifest::Tensor;
use vt_bundle::{Bundle, Manifest};

/// A bundle whose image is resident in an arena of type `A`, and checked.
#[derive(Debug)]
pub struct LoadedBundle<A> {
    bundle: Bundle,
    assets: Assets,
    arena: A,
    report: LoadReport,
}

impl<A> LoadedBundle<A> {
    /// Reads and checks the assets of an opened bundle, and makes its image resident on `device`.
    ///
    /// # Errors
    /// [`LoadError`]; whatever had been allocated is freed.
    pub fn load<D: Device<Arena = A>>(
        bundle: Bundle,
        device: &D,
        verify: Verify,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Self, LoadError> {
        let assets = Assets::read(&bundle)?;
        let Resident { arena, report } = device.load_image(&bundle, verify, progress)?;
        Ok(Self { bundle, assets, arena, report })
    }

    /// The bundle id.
    pub fn id(&self) -> &str {
        self.bundle.id()
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        self.bundle.manifest()
    }

    /// The bundle on disk.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// Tokenizer, template and the like, as read and checked at load.
    pub fn assets(&self) -> &Assets {
        &self.assets
    }

    /// The arena.
    pub fn arena(&self) -> &A {
        &self.arena
    }

    /// How the image was loaded.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// A view of the tensor at an index of the manifest.
    ///
    /// # Panics
    /// Where the index is beyond the manifest's tensors.
    pub fn tensor_at(&self, index: usize) -> TensorView<'_, A> {
        let (tensor, geometry) = self.bundle.tensor_at(index);
        TensorView { tensor, geometry, arena: &self.arena }
    }
}

/// One tensor of a loaded bundle.
#[derive(Debug)]
pub struct TensorView<'a, A> {
    /// Its description.
    pub tensor: &'a Tensor,
    /// Its checked geometry.
    pub geometry: &'a Geometry,
    arena: &'a A,
}

impl<'a, A: HostArena> TensorView<'a, A> {
    /// The bytes of a plane, for one expert (0 where there are none).
    ///
    /// # Panics
    /// Where the plane or the expert does not exist. Offsets were checked against the image when the bundle was opened.
    pub fn plane(&self, index: usize, expert: u64) -> &'a [u8] {
        vt_bundle::reader::plane_bytes(self.tensor, index, expert, self.arena.bytes())
    }
}
