//! The files beside the weights.

use std::io::Write;
use std::path::{Path, PathBuf};

use vt_bundle::BundleError;
use vt_bundle::hash::Digest;
use vt_bundle::manifest::{Asset, AssetRole};
use vt_bundle::writer::write_asset;

use super::recipe::Built;
use crate::source::Checkpoint;

/// Compression level of the restore assets. One thread and a pinned library version make the bytes reproducible.
const ZSTD_LEVEL: i32 = 9;

/// Name of an asset that came with the checkpoint, relative to the bundle.
pub fn file_of(name: &str) -> String {
    format!("assets/{name}")
}

fn role_of(name: &str) -> AssetRole {
    match name {
        "tokenizer.json" => AssetRole::Tokenizer,
        "tokenizer_config.json" => AssetRole::TokenizerConfig,
        "chat_template.jinja" => AssetRole::ChatTemplate,
        "generation_config.json" => AssetRole::GenerationConfig,
        _ => AssetRole::Other,
    }
}

/// A bound for the bytes of all assets: what came with the checkpoint, and everything of the source that is not in a
/// tensor, twice for good measure against incompressible bytes.
pub fn bound(checkpoint: &Checkpoint) -> u64 {
    let own: u64 = checkpoint.assets.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let files: u64 = checkpoint.files.iter().map(|f| f.size).sum();
    let tensors: u64 = checkpoint.tensors.iter().map(|t| t.len).sum();
    own + 2 * files.saturating_sub(tensors) + 4096 * checkpoint.tensors.len() as u64 + files / 4096 + (1 << 16)
}

/// Writes every asset and describes them, in order of their role and name.
///
/// # Errors
/// [`BundleError::Io`].
pub fn write(
    dir: &Path,
    checkpoint: &Checkpoint,
    leaves: &[u8],
    record_hashes: &[Digest],
    built: Built,
) -> Result<Vec<Asset>, BundleError> {
    let mut assets = Vec::new();
    for (name, bytes) in &checkpoint.assets {
        assets.push(write_asset(dir, role_of(name), &file_of(name), bytes)?);
    }
    assets.push(write_asset(dir, AssetRole::Leaves, "assets/leaves.bin", leaves)?);
    if !record_hashes.is_empty() {
        assets.push(write_asset(
            dir,
            AssetRole::ExpertHashes,
            "assets/expert-hashes.bin",
            record_hashes.as_flattened(),
        )?);
    }
    let compressed = |file: &str, fill: &mut dyn FnMut(&mut dyn Write) -> std::io::Result<()>| {
        let finish = || -> std::io::Result<Vec<u8>> {
            let mut encoder = zstd::Encoder::new(Vec::new(), ZSTD_LEVEL)?;
            fill(&mut encoder)?;
            encoder.finish()
        };
        let mut finish = finish;
        finish().map_err(|source| BundleError::Io { path: PathBuf::from(file), source })
    };
    let file = "assets/restore.json.zst";
    let recipe = compressed(file, &mut |out| Ok(serde_json::to_writer(out, &built.recipe)?))?;
    assets.push(write_asset(dir, AssetRole::RestoreRecipe, file, &recipe)?);
    if !built.data.is_empty() {
        let file = "assets/restore.bin.zst";
        let data = compressed(file, &mut |out| {
            for (index, from, len) in &built.data {
                out.write_all(&checkpoint.files[*index].bytes()[*from as usize..(from + len) as usize])?;
            }
            Ok(())
        })?;
        assets.push(write_asset(dir, AssetRole::RestoreData, file, &data)?);
    }
    assets.sort_by(|a, b| (a.role, &a.file).cmp(&(b.role, &b.file)));
    Ok(assets)
}
