//! Rebuilding the source files from a bundle, byte for byte.
//!
//! The converter records, for every source file, where each run of its bytes can be taken from: planes of a tensor,
//! an asset, zeros, or the restore data (headers, tensors that the runtime does not use, padding that is not zero).
//! Bytes that the bundle holds in canonical form (NaN scales of all-zero blocks) come back through patches.

use std::io::{Read, Write};
use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::codec::{self, MatrixShape};
use crate::error::BundleError;
use crate::geometry::Geometry;
use crate::manifest::{AssetRole, Placement, Tensor};
use crate::outside;
use crate::pack::PartFormat;
use crate::reader::{Bundle, plane_bytes, tiled_view};

/// How to rebuild every source file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// In the order of [`crate::manifest::Source::files`].
    pub files: Vec<FileRecipe>,
}

/// How to rebuild one file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileRecipe {
    /// Relative name.
    pub name: String,
    /// Runs of bytes, in order.
    pub pieces: Vec<Piece>,
    /// Bytes to replace afterwards, in order of their offset.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<Patch>,
}

/// A run of bytes of a source file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "from", rename_all = "kebab-case")]
pub enum Piece {
    /// The next bytes of the restore data.
    Data {
        /// Bytes.
        len: u64,
    },
    /// Zeros.
    Zero {
        /// Bytes.
        len: u64,
    },
    /// A whole asset of the bundle.
    Asset {
        /// Its file name in the bundle.
        file: String,
        /// Bytes.
        len: u64,
    },
    /// The rows of one part of a row-major or raw tensor.
    Rows {
        /// Tensor name.
        tensor: String,
        /// Part index.
        part: usize,
        /// Expert.
        #[serde(default, skip_serializing_if = "is_zero")]
        expert: u64,
        /// Bytes.
        len: u64,
    },
    /// One input of a codec, joined from the planes of one part.
    Input {
        /// Tensor name.
        tensor: String,
        /// Part index.
        part: usize,
        /// Expert.
        #[serde(default, skip_serializing_if = "is_zero")]
        expert: u64,
        /// Codec name.
        codec: String,
        /// Input index of the codec.
        input: usize,
        /// Bytes.
        len: u64,
    },
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl Piece {
    /// Bytes of the run.
    pub fn len(&self) -> u64 {
        match self {
            Piece::Data { len }
            | Piece::Zero { len }
            | Piece::Asset { len, .. }
            | Piece::Rows { len, .. }
            | Piece::Input { len, .. } => *len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Bytes that replace what the pieces give.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Patch {
    /// First byte within the file.
    pub offset: u64,
    /// The bytes, hexadecimal.
    pub bytes: String,
}

/// Reads the recipe of a bundle.
///
/// # Errors
/// [`BundleError`] of the asset, or [`BundleError::Recipe`] where it is absent or cannot be parsed.
pub fn recipe(bundle: &Bundle) -> Result<Recipe, BundleError> {
    let fault = |reason: String| BundleError::Recipe { path: bundle.dir().to_owned(), reason };
    let asset = bundle
        .manifest()
        .asset(AssetRole::RestoreRecipe)
        .ok_or_else(|| fault("no asset has the role restore-recipe".into()))?;
    let bytes = bundle.read_asset(asset)?;
    let decoder = zstd::Decoder::new(&bytes[..]).map_err(|e| fault(e.to_string()))?;
    serde_json::from_reader(std::io::BufReader::new(decoder)).map_err(|e| fault(e.to_string()))
}

/// Refuses a folder for the source files where one of them would come to lie inside the bundle.
///
/// # Errors
/// [`BundleError::OutputInside`].
pub fn refuse_inside(bundle: &Bundle, dir: &Path) -> Result<(), BundleError> {
    outside::refuse_inside(dir, bundle.dir())?;
    bundle.manifest().source.files.iter().try_for_each(|f| outside::refuse_inside(&dir.join(&f.name), bundle.dir()))
}

/// Rebuilds every source file of a bundle into `dir`, which must exist, and checks each against its BLAKE3.
///
/// Each file appears under its name when it is complete and has the right hash. `progress` is called with the bytes
/// written.
///
/// # Errors
/// [`BundleError`] of the bundle, [`BundleError::OutputInside`] and [`BundleError::Io`] of the output, [`BundleError::Hash`]
/// where a rebuilt file differs.
pub fn restore(bundle: &Bundle, dir: &Path, progress: &(dyn Fn(u64) + Sync)) -> Result<(), BundleError> {
    refuse_inside(bundle, dir)?;
    let recipe = recipe(bundle)?;
    let fault = |reason: String| BundleError::Recipe { path: bundle.dir().to_owned(), reason };
    let image = bundle.map(Placement::Image)?;
    let cold = bundle.map(Placement::Cold)?;
    let data = match bundle.manifest().asset(AssetRole::RestoreData) {
        Some(asset) => bundle.read_asset(asset)?,
        None => Vec::new(),
    };
    let mut data: Box<dyn Read> = if data.is_empty() {
        Box::new(std::io::empty())
    } else {
        Box::new(zstd::Decoder::new(std::io::Cursor::new(data)).map_err(|e| fault(e.to_string()))?)
    };
    if recipe.files.len() != bundle.manifest().source.files.len() {
        return Err(fault("it lists other files than the manifest".into()));
    }
    for (file, expected) in recipe.files.iter().zip(&bundle.manifest().source.files) {
        if file.name != expected.name {
            return Err(fault(format!("it has {} where the manifest has {}", file.name, expected.name)));
        }
        let len = file.pieces.iter().try_fold(0u64, |sum, p| sum.checked_add(p.len()));
        if len != Some(expected.size) {
            return Err(fault(format!("{}: {len:?} bytes, the manifest says {}", file.name, expected.size)));
        }
        let path = dir.join(&file.name);
        let temporary = dir.join(format!("{}.vt-partial", file.name));
        let io = |source| BundleError::Io { path: temporary.clone(), source };
        if let Some(parent) = temporary.parent() {
            std::fs::create_dir_all(parent).map_err(io)?;
        }
        let written = (|| {
            let target = std::fs::File::create(&temporary).map_err(io)?;
            let mut out = Patched::new(target, &file.patches).map_err(fault)?;
            let sources = Sources { bundle, image: image.bytes(), cold: cold.bytes() };
            for piece in &file.pieces {
                sources.write(piece, &mut data, &mut |bytes| {
                    out.write(bytes).map_err(io)?;
                    progress(bytes.len() as u64);
                    Ok(())
                })?;
            }
            let found = out.finish().map_err(io)?;
            if found != expected.blake3 {
                return Err(BundleError::Hash { path: path.clone(), found, expected: expected.blake3.clone() });
            }
            std::fs::rename(&temporary, &path).map_err(|source| BundleError::Io { path: path.clone(), source })
        })();
        if written.is_err() {
            // The error at hand matters more than whether the leftover can be removed.
            let _ = std::fs::remove_file(&temporary);
        }
        written?;
    }
    Ok(())
}

/// Output that applies patches by position and hashes what it writes.
struct Patched {
    out: std::fs::File,
    hasher: blake3::Hasher,
    position: u64,
    patches: std::collections::VecDeque<(u64, Vec<u8>)>,
}

impl Patched {
    fn new(out: std::fs::File, patches: &[Patch]) -> Result<Self, String> {
        let decode = |p: &Patch| {
            let digits = p.bytes.as_bytes();
            let nibble = |d: u8| (d as char).to_digit(16).map(|v| v as u8);
            let bytes: Option<Vec<u8>> =
                digits.chunks(2).map(|d| Some(nibble(d[0])? << 4 | nibble(*d.get(1)?)?)).collect();
            bytes.map(|b| (p.offset, b)).ok_or_else(|| format!("patch at {} is not hexadecimal", p.offset))
        };
        let patches = patches.iter().map(decode).collect::<Result<_, _>>()?;
        Ok(Self { out, hasher: blake3::Hasher::new(), position: 0, patches })
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let end = self.position + bytes.len() as u64;
        let mut patched = None;
        while let Some((offset, replacement)) = self.patches.front() {
            if *offset >= end {
                break;
            }
            let copy: &mut Vec<u8> = patched.get_or_insert_with(|| bytes.to_vec());
            let skip = self.position.saturating_sub(*offset) as usize;
            let at = offset.saturating_sub(self.position) as usize;
            let rest = replacement.get(skip..).unwrap_or(&[]);
            let len = rest.len().min(copy.len() - at);
            copy[at..at + len].copy_from_slice(&rest[..len]);
            if len < rest.len() {
                break; // it goes on in the next run of bytes
            }
            self.patches.pop_front();
        }
        let bytes = patched.as_deref().unwrap_or(bytes);
        self.hasher.update(bytes);
        self.out.write_all(bytes)?;
        self.position = end;
        Ok(())
    }

    fn finish(self) -> std::io::Result<String> {
        self.out.sync_all()?;
        Ok(self.hasher.finalize().to_hex().to_string())
    }
}

/// Bytes joined per step, about; bounds the memory of a restore together with the number of threads.
const STEP_BYTES: usize = 4 << 20;

struct Sources<'a> {
    bundle: &'a Bundle,
    image: &'a [u8],
    cold: &'a [u8],
}

impl Sources<'_> {
    fn write(
        &self,
        piece: &Piece,
        data: &mut dyn Read,
        out: &mut dyn FnMut(&[u8]) -> Result<(), BundleError>,
    ) -> Result<(), BundleError> {
        match piece {
            Piece::Data { len } => {
                let mut left = *len;
                let mut buffer = vec![0u8; STEP_BYTES.min(left as usize)];
                while left > 0 {
                    let now = buffer.len().min(left as usize);
                    data.read_exact(&mut buffer[..now])
                        .map_err(|e| self.fault(format!("the restore data ends early: {e}")))?;
                    out(&buffer[..now])?;
                    left -= now as u64;
                }
                Ok(())
            }
            Piece::Zero { len } => {
                let zeros = vec![0u8; STEP_BYTES.min(*len as usize)];
                let mut left = *len;
                while left > 0 {
                    let now = zeros.len().min(left as usize);
                    out(&zeros[..now])?;
                    left -= now as u64;
                }
                Ok(())
            }
            Piece::Asset { file, len } => {
                let asset = self.bundle.manifest().assets.iter().find(|a| a.file == *file && a.size == *len);
                let asset = asset.ok_or_else(|| self.fault(format!("asset {file} of {len} bytes is not listed")))?;
                out(&self.bundle.read_asset(asset)?)
            }
            Piece::Rows { tensor, part, expert, len } => self.rows(tensor, *part, *expert, *len, out),
            Piece::Input { tensor, part, expert, codec, input, len } => {
                self.input(tensor, *part, *expert, codec, *input, *len, out)
            }
        }
    }

    fn fault(&self, reason: String) -> BundleError {
        BundleError::Recipe { path: self.bundle.dir().to_owned(), reason }
    }

    fn find(&self, name: &str, part: usize, expert: u64) -> Result<(&Tensor, &Geometry, &[u8]), BundleError> {
        let found = self.bundle.tensor(name).filter(|(t, _)| part < t.parts.len() && expert < t.expert_count());
        let (tensor, geometry) = found.ok_or_else(|| self.fault(format!("{name} part {part} does not exist")))?;
        let space = match tensor.placement {
            Placement::Image => self.image,
            Placement::Cold => self.cold,
        };
        Ok((tensor, geometry, space))
    }

    fn rows(
        &self,
        name: &str,
        part: usize,
        expert: u64,
        len: u64,
        out: &mut dyn FnMut(&[u8]) -> Result<(), BundleError>,
    ) -> Result<(), BundleError> {
        let (tensor, geometry, space) = self.find(name, part, expert)?;
        let Geometry::Rows { row_bytes, .. } = geometry else {
            return Err(self.fault(format!("{name} is not stored in rows")));
        };
        let p = &tensor.parts[part];
        if p.rows * row_bytes != len {
            return Err(self.fault(format!("{name} part {part} has {} bytes, not {len}", p.rows * row_bytes)));
        }
        let start = (p.row_start * row_bytes) as usize;
        let bytes = &plane_bytes(tensor, 0, expert, space)[start..start + len as usize];
        if p.row_order == crate::row_order::RowOrder::Same {
            return bytes.chunks(STEP_BYTES).try_for_each(out);
        }
        let row_bytes = *row_bytes as usize;
        let per_step = (STEP_BYTES / row_bytes.max(1)).max(1);
        let mut buffer = Vec::with_capacity(per_step * row_bytes);
        for first in (0..p.rows as usize).step_by(per_step) {
            buffer.clear();
            for row in first..(first + per_step).min(p.rows as usize) {
                let at = p.row_order.bundle_row(row) * row_bytes;
                buffer.extend_from_slice(&bytes[at..at + row_bytes]);
            }
            out(&buffer)?;
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // the fields of one `Piece::Input`
    fn input(
        &self,
        name: &str,
        part: usize,
        expert: u64,
        codec: &str,
        input: usize,
        len: u64,
        out: &mut dyn FnMut(&[u8]) -> Result<(), BundleError>,
    ) -> Result<(), BundleError> {
        let (tensor, geometry, space) = self.find(name, part, expert)?;
        let found = codec::find(codec).filter(|c| input < c.inputs());
        let codec = found.ok_or_else(|| self.fault(format!("codec {codec:?} is unknown to this version")))?;
        let Some(view) = tiled_view(tensor, geometry, expert, space) else {
            return Err(self.fault(format!("{name} is not tiled")));
        };
        let p = &tensor.parts[part];
        let shape = MatrixShape {
            n: p.rows as usize,
            k: view.matrix.k as usize,
            group_size: view.matrix.group_size as usize,
            block: view.matrix.block.map(|b| b as usize),
        };
        let same_planes =
            codec.spec().codes == view.matrix.spec.codes && codec.spec().scales == view.matrix.spec.scales;
        if !same_planes || codec.input_bytes(&shape, input) != Some(len) {
            return Err(self.fault(format!("{name} part {part} does not give {len} bytes of {}", codec.name())));
        }
        let format = PartFormat { codec, shape, row_order: p.row_order };
        let unit_rows = codec.unit_rows(&shape, input);
        let units = unit_rows.map_or(1, |rows| shape.n.div_ceil(rows));
        let unit_bytes = len as usize / units;
        let per_band = match unit_rows {
            // A band of about 64 rows visits each tile once.
            Some(rows) => 64usize.div_ceil(rows),
            None => 1,
        };
        let bands: Vec<_> = (0..units).step_by(per_band).map(|u| u..(u + per_band).min(units)).collect();
        for step in bands.chunks((STEP_BYTES / (per_band * unit_bytes).max(1)).max(1)) {
            let joined: Vec<Vec<u8>> = step
                .par_iter()
                .map(|units| {
                    let mut bytes = vec![0; units.len() * unit_bytes];
                    view.join(part, &format, input, units.clone(), &mut bytes);
                    bytes
                })
                .collect();
            joined.iter().try_for_each(|bytes| out(bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_cross_the_runs_of_a_file() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let path = dir.path().join("f");
        let patches = [Patch { offset: 1, bytes: "aabbccdd".into() }, Patch { offset: 6, bytes: "EE".into() }];
        let mut out = Patched::new(std::fs::File::create(&path).expect("created"), &patches).expect("valid");
        for run in [&[0u8; 3][..], &[1; 1], &[2; 4]] {
            out.write(run).expect("written");
        }
        let digest = out.finish().expect("synced");
        let bytes = std::fs::read(&path).expect("read");
        assert_eq!(bytes, [0, 0xAA, 0xBB, 0xCC, 0xDD, 2, 0xEE, 2]);
        assert_eq!(digest, blake3::hash(&bytes).to_hex().to_string());
        let bad = [Patch { offset: 0, bytes: "x".into() }];
        assert!(Patched::new(std::fs::File::create(&path).expect("created"), &bad).is_err());
    }
}
