//! Opening and checking a bundle.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::error::BundleError;
use crate::geometry::{Geometry, GeometryError};
use crate::hash::{Digest, LEAF_BYTES, SEGMENT_BYTES, leaf_count, leaf_digest, segment_digest, to_hex};
use crate::layout::PlaneKind;
use crate::manifest::{Asset, AssetRole, FORMAT, FORMAT_VERSION, Image, Manifest, Placement, Tensor, file_name};
use crate::mmap::ContiguousMap;
use crate::unpack::TiledView;

/// Largest manifest that is read: some 200 bytes per tensor leave room for a million tensors.
pub const MAX_MANIFEST_BYTES: u64 = 512 << 20;

/// An opened bundle: its manifest is parsed, canonical, of a known version and consistent, its id matches, and every
/// file has the size that the manifest says. Contents are checked by the `verify_*` methods.
#[derive(Debug)]
pub struct Bundle {
    dir: PathBuf,
    id: String,
    manifest: Manifest,
    geometry: Vec<Geometry>,
    by_name: HashMap<String, usize>,
}

impl Bundle {
    /// Opens a bundle and checks its manifest.
    ///
    /// # Errors
    /// [`BundleError`]; nothing outside the manifest's own files is touched.
    pub fn open(dir: &Path) -> Result<Self, BundleError> {
        let path = dir.join(file_name::MANIFEST);
        let bytes = read_bounded(&path, MAX_MANIFEST_BYTES)?;
        let id = to_hex(blake3::hash(&bytes).as_bytes());
        let id_path = dir.join(file_name::ID);
        let stored = read_bounded(&id_path, 1024)?;
        if stored != format!("{id}\n").as_bytes() {
            let expected = String::from_utf8_lossy(&stored).trim_end().to_owned();
            return Err(BundleError::Hash { path, found: id, expected });
        }
        let manifest = parse(&path, &bytes)?;
        check_files(dir, &path, &manifest)?;
        let mut geometry = Vec::with_capacity(manifest.tensors.len());
        let mut by_name = HashMap::with_capacity(manifest.tensors.len());
        for (i, tensor) in manifest.tensors.iter().enumerate() {
            let space = match tensor.placement {
                Placement::Image => manifest.image.size,
                Placement::Cold => manifest.cold.size,
            };
            let name = || tensor.name.clone();
            geometry.push(tensor.geometry(space).map_err(|e| match e {
                GeometryError::Layout(source) => BundleError::Layout { path: path.clone(), tensor: name(), source },
                GeometryError::Invalid(reason) => BundleError::Tensor { path: path.clone(), tensor: name(), reason },
            })?);
            if by_name.insert(tensor.name.clone(), i).is_some() {
                return Err(BundleError::Tensor { path, tensor: name(), reason: "listed twice".into() });
            }
        }
        let bundle = Self { dir: dir.to_owned(), id, manifest, geometry, by_name };
        for placement in [Placement::Image, Placement::Cold] {
            bundle.check_overlaps(placement)?;
        }
        Ok(bundle)
    }

    /// The bundle's folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The bundle id: BLAKE3 of the manifest, 64 hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// A tensor and its geometry, by name.
    pub fn tensor(&self, name: &str) -> Option<(&Tensor, &Geometry)> {
        self.by_name.get(name).map(|&i| (&self.manifest.tensors[i], &self.geometry[i]))
    }

    /// Index in the manifest of the tensor of that name.
    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// A tensor and its geometry, by its index in the manifest.
    ///
    /// # Panics
    /// Where there is no such tensor.
    pub fn tensor_at(&self, index: usize) -> (&Tensor, &Geometry) {
        (&self.manifest.tensors[index], &self.geometry[index])
    }

    /// All tensors with their geometry, in the order of the manifest.
    pub fn tensors(&self) -> impl Iterator<Item = (&Tensor, &Geometry)> {
        self.manifest.tensors.iter().zip(&self.geometry)
    }

    /// The image or the cold segments.
    pub fn space(&self, placement: Placement) -> &Image {
        match placement {
            Placement::Image => &self.manifest.image,
            Placement::Cold => &self.manifest.cold,
        }
    }

    /// Maps a whole address space contiguously. Nothing is read ahead.
    ///
    /// # Errors
    /// [`BundleError::Io`].
    pub fn map(&self, placement: Placement) -> Result<ContiguousMap, BundleError> {
        let mut files = Vec::new();
        for segment in &self.space(placement).segments {
            files.push((open(&self.dir.join(&segment.file))?, segment.size));
        }
        ContiguousMap::new(&files).map_err(|source| BundleError::Io { path: self.dir.clone(), source })
    }

    /// Reads an asset and checks its hash.
    ///
    /// # Errors
    /// [`BundleError::Io`], [`BundleError::Size`] or [`BundleError::Hash`].
    pub fn read_asset(&self, asset: &Asset) -> Result<Vec<u8>, BundleError> {
        let path = self.dir.join(&asset.file);
        let mut bytes = Vec::new();
        let file = open(&path)?;
        file.take(asset.size.saturating_add(1))
            .read_to_end(&mut bytes)
            .map_err(|source| BundleError::Io { path: path.clone(), source })?;
        if bytes.len() as u64 != asset.size {
            return Err(BundleError::Size { path, found: bytes.len() as u64, expected: asset.size });
        }
        let found = to_hex(blake3::hash(&bytes).as_bytes());
        if found != asset.blake3 {
            return Err(BundleError::Hash { path, found, expected: asset.blake3.clone() });
        }
        Ok(bytes)
    }

    /// The leaf tables of the image and of the cold segments, checked against the segments' hashes.
    ///
    /// # Errors
    /// As [`Bundle::read_asset`]; [`BundleError::Inconsistent`] if the table has another length than the segments need.
    pub fn leaves(&self) -> Result<Leaves, BundleError> {
        let path = self.dir.join(file_name::MANIFEST);
        let Some(asset) = self.manifest.asset(AssetRole::Leaves) else {
            return Err(BundleError::Inconsistent { path, reason: "no asset has the role leaves".into() });
        };
        let bytes = self.read_asset(asset)?;
        let (table, rest) = bytes.as_chunks::<32>();
        let count = |image: &Image| image.segments.iter().map(|s| leaf_count(s.size)).sum::<u64>();
        let (hot, cold) = (count(&self.manifest.image), count(&self.manifest.cold));
        if !rest.is_empty() || table.len() as u64 != hot + cold {
            let reason = format!("{} has {} leaves, the segments have {}", asset.file, table.len(), hot + cold);
            return Err(BundleError::Inconsistent { path, reason });
        }
        let leaves = Leaves { image: table[..hot as usize].to_vec(), cold: table[hot as usize..].to_vec() };
        for placement in [Placement::Image, Placement::Cold] {
            let mut at = 0;
            for segment in &self.space(placement).segments {
                let of_segment = &leaves.of(placement)[at..at + leaf_count(segment.size) as usize];
                at += of_segment.len();
                let found = segment_digest(of_segment).map(|d| to_hex(&d)).unwrap_or_default();
                if found != segment.blake3 {
                    let path = self.dir.join(&asset.file);
                    return Err(BundleError::Hash { path, found, expected: segment.blake3.clone() });
                }
            }
        }
        Ok(leaves)
    }

    /// The hashes of expert records, by the index that [`Experts::record_hashes`](crate::manifest::Experts) starts from; none
    /// where no tensor has experts.
    ///
    /// # Errors
    /// As [`Bundle::read_asset`]; [`BundleError::Inconsistent`] if the table is too short for a tensor.
    pub fn expert_hashes(&self) -> Result<Vec<Digest>, BundleError> {
        let asset = self.manifest.asset(AssetRole::ExpertHashes);
        let bytes = asset.map(|asset| self.read_asset(asset)).transpose()?.unwrap_or_default();
        let (hashes, rest) = bytes.as_chunks::<32>();
        let experts = self.manifest.tensors.iter().filter_map(|t| t.experts.as_ref());
        let needed = experts.map(|e| e.record_hashes.saturating_add(e.count)).max().unwrap_or(0);
        if !rest.is_empty() || (hashes.len() as u64) < needed {
            let path = self.dir.join(asset.map_or(file_name::MANIFEST, |asset| &asset.file));
            let reason = format!("{} bytes of hashes of expert records, {needed} records have one each", bytes.len());
            return Err(BundleError::Inconsistent { path, reason });
        }
        Ok(hashes.to_vec())
    }

    /// Checks mapped bytes of an address space against its leaves, in parallel on the current rayon pool.
    ///
    /// `progress` is called with the bytes of each leaf that has been checked.
    ///
    /// # Errors
    /// [`BundleError::Leaf`] for the first corrupt leaf in order.
    pub fn verify_mapped(
        &self,
        placement: Placement,
        bytes: &[u8],
        leaves: &Leaves,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), BundleError> {
        self.verify_leaves(placement, leaves, |at, len, check| {
            check(&bytes[at as usize..(at + len) as usize])?;
            progress(len);
            Ok(())
        })
    }

    /// Checks the files of an address space against its leaves, reading each leaf once into a buffer of its own.
    ///
    /// # Errors
    /// [`BundleError::Io`], or [`BundleError::Leaf`] for the first corrupt leaf in order.
    pub fn verify_files(
        &self,
        placement: Placement,
        leaves: &Leaves,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), BundleError> {
        let mut files = Vec::new();
        for segment in &self.space(placement).segments {
            let path = self.dir.join(&segment.file);
            files.push((open(&path)?, path));
        }
        self.verify_leaves(placement, leaves, |at, len, check| {
            let (file, path) = &files[(at / SEGMENT_BYTES) as usize];
            let mut buffer = vec![0; len as usize];
            file.read_exact_at(&mut buffer, at % SEGMENT_BYTES)
                .map_err(|source| BundleError::Io { path: path.clone(), source })?;
            check(&buffer)?;
            progress(len);
            Ok(())
        })
    }

    fn verify_leaves(
        &self,
        placement: Placement,
        leaves: &Leaves,
        read: impl Fn(u64, u64, &dyn Fn(&[u8]) -> Result<(), BundleError>) -> Result<(), BundleError> + Sync,
    ) -> Result<(), BundleError> {
        let mut work = Vec::with_capacity(leaves.of(placement).len());
        for (s, segment) in self.space(placement).segments.iter().enumerate() {
            work.extend((0..leaf_count(segment.size)).map(|leaf| (s, leaf)));
        }
        let first = work.par_iter().zip(leaves.of(placement)).map(|(&(s, leaf), expected)| {
            let segment = &self.space(placement).segments[s];
            let start = leaf * LEAF_BYTES;
            let len = LEAF_BYTES.min(segment.size - start);
            let at = s as u64 * SEGMENT_BYTES + start;
            read(at, len, &|bytes: &[u8]| {
                let found = leaf_digest(bytes, start, segment.size);
                if found == *expected {
                    return Ok(());
                }
                Err(self.leaf_error(placement, at / LEAF_BYTES, &found, expected))
            })
        });
        match first.find_first(Result::is_err) {
            Some(error) => error,
            None => Ok(()),
        }
    }

    /// Bytes of the segment that holds a leaf, given by its index in the address space.
    ///
    /// # Panics
    /// Where there is no such leaf.
    pub fn segment_bytes(&self, placement: Placement, leaf: u64) -> u64 {
        self.space(placement).segments[(leaf / (SEGMENT_BYTES / LEAF_BYTES)) as usize].size
    }

    /// The error for a leaf, given by its index in the address space, whose value is not the expected one.
    ///
    /// # Panics
    /// Where there is no such leaf.
    pub fn leaf_error(&self, placement: Placement, leaf: u64, found: &Digest, expected: &Digest) -> BundleError {
        let at = leaf * LEAF_BYTES;
        let segment = &self.space(placement).segments[(at / SEGMENT_BYTES) as usize];
        let start = at % SEGMENT_BYTES;
        let end = segment.size.min(start + LEAF_BYTES);
        BundleError::Leaf {
            path: self.dir.join(&segment.file),
            leaf: start / LEAF_BYTES,
            start,
            end,
            found: to_hex(found),
            expected: to_hex(expected),
            tensors: self.tensors_in(placement, at..at + (end - start)),
        }
    }

    /// Names of the tensors with a byte in a range of an address space, with the expert where there are experts.
    pub fn tensors_in(&self, placement: Placement, range: std::ops::Range<u64>) -> Vec<String> {
        let mut names = Vec::new();
        for tensor in self.manifest.tensors.iter().filter(|t| t.placement == placement) {
            for expert in 0..tensor.expert_count() {
                let touches = tensor.planes.iter().any(|p| {
                    let at = tensor.plane_offset(p, expert);
                    at < range.end && range.start < at + p.size
                });
                if touches {
                    let of = tensor.experts.as_ref().map(|_| format!(" (expert {expert})"));
                    names.push(format!("{}{}", tensor.name, of.unwrap_or_default()));
                }
            }
        }
        names
    }

    /// Ranges of an address space that no plane covers, in order: padding, which must be zero.
    pub fn gaps(&self, placement: Placement) -> Vec<std::ops::Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = 0;
        for (range, _) in self.plane_ranges(placement) {
            if range.start > at {
                gaps.push(at..range.start);
            }
            at = at.max(range.end);
        }
        let size = self.space(placement).size;
        if at < size {
            gaps.push(at..size);
        }
        gaps
    }

    /// Checks that everything outside the logical tensors is zero: gaps between planes, and padding to the tile.
    ///
    /// # Errors
    /// [`BundleError::Padding`] naming the first place.
    pub fn verify_padding(&self, placement: Placement, bytes: &[u8]) -> Result<(), BundleError> {
        let fault = |place: String| BundleError::Padding { path: self.dir.clone(), place };
        for gap in self.gaps(placement) {
            if bytes[gap.start as usize..gap.end as usize].iter().any(|&b| b != 0) {
                return Err(fault(format!("bytes {} to {} of the image", gap.start, gap.end)));
            }
        }
        let tiled: Vec<_> = self
            .tensors()
            .filter(|(t, _)| t.placement == placement)
            .filter_map(|(t, g)| match g {
                Geometry::Tiled(_) => Some((t, g)),
                Geometry::Rows { .. } => None,
            })
            .flat_map(|(t, g)| (0..t.expert_count()).map(move |e| (t, g, e)))
            .collect();
        let broken = tiled.par_iter().find_first(|(tensor, geometry, expert)| {
            tiled_view(tensor, geometry, *expert, bytes).is_some_and(|view| !view.padding_is_zero())
        });
        match broken {
            Some((tensor, _, _)) => Err(fault(tensor.name.clone())),
            None => Ok(()),
        }
    }

    fn plane_ranges(&self, placement: Placement) -> Vec<(std::ops::Range<u64>, &str)> {
        let mut ranges = Vec::new();
        for tensor in self.manifest.tensors.iter().filter(|t| t.placement == placement) {
            for expert in 0..tensor.expert_count() {
                for plane in tensor.planes.iter().filter(|p| p.size > 0) {
                    let at = tensor.plane_offset(plane, expert);
                    ranges.push((at..at + plane.size, tensor.name.as_str()));
                }
            }
        }
        ranges.sort_by_key(|(range, _)| range.start);
        ranges
    }

    fn check_overlaps(&self, placement: Placement) -> Result<(), BundleError> {
        for pair in self.plane_ranges(placement).windows(2) {
            if pair[0].0.end > pair[1].0.start {
                let reason = format!("a plane at {:?} overlaps {} at {:?}", pair[1].0, pair[0].1, pair[0].0);
                let path = self.dir.join(file_name::MANIFEST);
                return Err(BundleError::Tensor { path, tensor: pair[1].1.to_owned(), reason });
            }
        }
        Ok(())
    }
}

/// A view of a tiled tensor's planes within the bytes of its address space; `None` for row-major tensors.
pub fn tiled_view<'a>(tensor: &Tensor, geometry: &'a Geometry, expert: u64, space: &'a [u8]) -> Option<TiledView<'a>> {
    let Geometry::Tiled(matrix) = geometry else { return None };
    let code_planes = matrix.spec.codes.len();
    TiledView::new(matrix, |kind| {
        let index = match kind {
            PlaneKind::Code(i) => i,
            PlaneKind::Scale(i) => code_planes + i,
        };
        plane_bytes(tensor, index, expert, space)
    })
}

/// The bytes of a tensor's `index`-th plane within its address space.
pub fn plane_bytes<'a>(tensor: &Tensor, index: usize, expert: u64, space: &'a [u8]) -> &'a [u8] {
    let plane = &tensor.planes[index];
    let at = tensor.plane_offset(plane, expert) as usize;
    &space[at..at + plane.size as usize]
}

/// The leaf tables of a bundle.
#[derive(Debug, Clone)]
pub struct Leaves {
    /// Leaves of the image's segments, in order.
    pub image: Vec<Digest>,
    /// Leaves of the cold segments, in order.
    pub cold: Vec<Digest>,
}

impl Leaves {
    /// The table of one address space.
    pub fn of(&self, placement: Placement) -> &[Digest] {
        match placement {
            Placement::Image => &self.image,
            Placement::Cold => &self.cold,
        }
    }
}

fn open(path: &Path) -> Result<File, BundleError> {
    // Opening a pipe without a writer would wait for ever.
    if std::fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
        return Err(BundleError::Io { path: path.to_owned(), source });
    }
    File::open(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => BundleError::Missing { path: path.to_owned() },
        _ => BundleError::Io { path: path.to_owned(), source },
    })
}

fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, BundleError> {
    let io = |source| BundleError::Io { path: path.to_owned(), source };
    let file = open(path)?;
    let len = file.metadata().map_err(io)?.len();
    if len > limit {
        return Err(BundleError::Size { path: path.to_owned(), found: len, expected: limit });
    }
    let mut bytes = Vec::with_capacity(len as usize);
    file.take(limit).read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes)
}

/// Reads the bytes of a manifest that is perhaps not in a folder yet; `path` is what errors call it.
///
/// # Errors
/// [`BundleError::Manifest`], [`BundleError::Version`] or [`BundleError::NotCanonical`]. Names of files and the geometry of
/// tensors are checked by [`Bundle::open`].
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Manifest, BundleError> {
    #[derive(serde::Deserialize)]
    struct Head {
        format: String,
        format_version: u32,
    }
    let manifest_error = |e: serde_json::Error| BundleError::Manifest { path: path.to_owned(), reason: e.to_string() };
    // The version comes first, so that a newer structure is named as such.
    let head: Head = serde_json::from_slice(bytes).map_err(manifest_error)?;
    if head.format != FORMAT || head.format_version != FORMAT_VERSION {
        let (format, version) = (head.format, head.format_version);
        return Err(BundleError::Version { path: path.to_owned(), format, version });
    }
    let manifest: Manifest = serde_json::from_slice(bytes).map_err(manifest_error)?;
    if manifest.canonical_bytes().map_err(manifest_error)? != bytes {
        return Err(BundleError::NotCanonical { path: path.to_owned() });
    }
    Ok(manifest)
}

/// Whether a file name of the manifest stays inside the bundle: plain components, separated by `/`.
pub fn is_safe_name(name: &str) -> bool {
    !name.is_empty()
        && name.split('/').all(|c| !c.is_empty() && c != "." && c != ".." && !c.contains(['\\', '\0']))
        && Path::new(name).is_relative()
}

fn check_files(dir: &Path, path: &Path, manifest: &Manifest) -> Result<(), BundleError> {
    let inconsistent = |reason: String| Err(BundleError::Inconsistent { path: path.to_owned(), reason });
    let segments = manifest.image.segments.iter().chain(&manifest.cold.segments);
    let files: Vec<(&str, u64)> = segments
        .map(|s| (s.file.as_str(), s.size))
        .chain(manifest.assets.iter().map(|a| (a.file.as_str(), a.size)))
        .collect();
    for image in [&manifest.image, &manifest.cold] {
        let total = image.segments.iter().try_fold(0u64, |sum, s| sum.checked_add(s.size));
        if total != Some(image.size) {
            return inconsistent(format!("the segments have {total:?} bytes, the image {}", image.size));
        }
        if let Some((last, before)) = image.segments.split_last() {
            let odd = before.iter().find(|s| s.size != SEGMENT_BYTES);
            let odd = odd.or(Some(last).filter(|s| s.size == 0 || s.size > SEGMENT_BYTES));
            if let Some(s) = odd {
                return inconsistent(format!("segment {} has {} bytes, segments have {SEGMENT_BYTES}", s.file, s.size));
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    for (name, size) in files {
        if !is_safe_name(name) || !seen.insert(name) {
            return inconsistent(format!("file name {name:?} leaves the bundle or is listed twice"));
        }
        let file = dir.join(name);
        let found = match std::fs::metadata(&file) {
            Ok(meta) => meta.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(BundleError::Missing { path: file }),
            Err(source) => return Err(BundleError::Io { path: file, source }),
        };
        if found != size {
            return Err(BundleError::Size { path: file, found, expected: size });
        }
    }
    for source in &manifest.source.files {
        if !is_safe_name(&source.name) {
            return inconsistent(format!("source file name {:?} leaves its folder", source.name));
        }
    }
    Ok(())
}
