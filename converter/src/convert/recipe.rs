//! The restore recipe: for every run of source bytes, where the bundle has it.

use vt_bundle::restore::{FileRecipe, Patch, Piece, Recipe};

use crate::catalog::{Entry, Slice, Storage};
use crate::plan::Plan;
use crate::source::Checkpoint;

use super::assets::file_of;

/// A recipe and the source ranges that its `data` pieces take, in order: (file, first byte, bytes).
pub struct Built {
    /// The recipe.
    pub recipe: Recipe,
    /// Ranges for the restore data.
    pub data: Vec<(usize, u64, u64)>,
}

/// Builds the recipe of a plan.
pub fn build(plan: &Plan, checkpoint: &Checkpoint, patches: &[Vec<Patch>]) -> Built {
    let mut covered: Vec<Vec<(u64, Piece)>> = vec![Vec::new(); checkpoint.files.len()];
    for planned in &plan.tensors {
        for (expert, parts) in planned.sources.iter().enumerate() {
            for (part, entry) in parts.iter().enumerate() {
                for (slice, piece) in pieces_of(&planned.tensor.name, part, expert as u64, entry) {
                    let tensor = &checkpoint.tensors[slice.tensor];
                    covered[tensor.file].push((tensor.offset + slice.offset, piece));
                }
            }
        }
    }
    let mut built = Built { recipe: Recipe::default(), data: Vec::new() };
    for (index, file) in checkpoint.files.iter().enumerate() {
        let mut runs = std::mem::take(&mut covered[index]);
        // Where entries share bytes (one scale for all experts), the first one restores them.
        runs.sort_by_key(|(offset, _)| *offset);
        let mut pieces = Vec::new();
        let whole = checkpoint.assets.iter().find(|(name, bytes)| {
            runs.is_empty() && *name == file.name && bytes.as_slice() == file.bytes() && !bytes.is_empty()
        });
        if let Some((name, bytes)) = whole {
            pieces.push(Piece::Asset { file: file_of(name), len: bytes.len() as u64 });
        } else {
            let mut at = 0;
            for (offset, piece) in runs {
                if offset < at || piece.is_empty() {
                    continue;
                }
                built.fill(&mut pieces, checkpoint, index, at, offset);
                at = offset + piece.len();
                pieces.push(piece);
            }
            built.fill(&mut pieces, checkpoint, index, at, file.size);
        }
        let patches = patches.get(index).cloned().unwrap_or_default();
        built.recipe.files.push(FileRecipe { name: file.name.clone(), pieces, patches });
    }
    built
}

impl Built {
    /// Covers bytes that no entry has: zeros as such, the rest from the restore data.
    fn fill(&mut self, pieces: &mut Vec<Piece>, checkpoint: &Checkpoint, file: usize, from: u64, to: u64) {
        if from >= to {
            return;
        }
        let bytes = &checkpoint.files[file].bytes()[from as usize..to as usize];
        if bytes.iter().all(|&b| b == 0) {
            pieces.push(Piece::Zero { len: to - from });
        } else {
            pieces.push(Piece::Data { len: to - from });
            self.data.push((file, from, to - from));
        }
    }
}

/// The source ranges of an entry and the pieces that rebuild them.
fn pieces_of(tensor: &str, part: usize, expert: u64, entry: &Entry) -> Vec<(Slice, Piece)> {
    match &entry.storage {
        Storage::Rows { data, .. } | Storage::Raw { data, .. } => {
            vec![(*data, Piece::Rows { tensor: tensor.to_owned(), part, expert, len: data.len })]
        }
        // Its planes are clean zeros; the source's bytes go to the restore data.
        Storage::Tiled { all_zero: true, .. } => Vec::new(),
        Storage::Tiled { codec, inputs, .. } => inputs
            .iter()
            .enumerate()
            .map(|(input, slice)| {
                let piece = Piece::Input {
                    tensor: tensor.to_owned(),
                    part,
                    expert,
                    codec: codec.name().to_owned(),
                    input,
                    len: slice.len,
                };
                (*slice, piece)
            })
            .collect(),
    }
}
