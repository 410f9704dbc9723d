//! Values that no valid checkpoint has, found in the planes as they are packed; and the one kind that has a canonical
//! form: NVFP4 blocks whose scale is NaN and whose codes are all zero, as older exporters wrote them.

use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;
use vt_bundle::encoding::{ScaleType, Span};
use vt_bundle::layout::{PlaneKind, TiledMatrix};
use vt_bundle::pack::PartSource;
use vt_bundle::restore::Patch;
use vt_bundle::tile::{TILE_K, TILE_N};

use crate::catalog::{Entry, Slice, Storage};
use crate::dequant::ggml::check_blocks;
use crate::plan::Plan;
use crate::source::Checkpoint;

/// A stored value that no valid checkpoint has.
#[derive(Debug, thiserror::Error)]
#[error(
    "{file}: tensor {tensor}: {found} at row {row}, column {column} of its scales or blocks; expected {expected}. \
     The checkpoint is damaged or was exported wrongly: export or download it again"
)]
pub struct ValueError {
    /// Source file.
    pub file: String,
    /// Source tensor.
    pub tensor: String,
    /// What is there.
    pub found: String,
    /// What may be there.
    pub expected: &'static str,
    /// Row of the matrix, in the order of the source.
    pub row: u64,
    /// Scale element along K, or code.
    pub column: u64,
}

fn error(
    checkpoint: &Checkpoint,
    part: &Slice,
    at: (u64, u64),
    found: impl Into<String>,
    expected: &'static str,
) -> ValueError {
    let tensor = &checkpoint.tensors[part.tensor];
    ValueError {
        file: checkpoint.files[tensor.file].name.clone(),
        tensor: tensor.name.clone(),
        found: found.into(),
        expected,
        row: at.0,
        column: at.1,
    }
}

const E4M3_NAN: u8 = 0x7F;
const E4M3_MINUS_ZERO: u8 = 0x80;
const E8M0_NAN: u8 = 0xFF;

/// What the checks have found so far.
#[derive(Debug, Default)]
pub struct Checks {
    /// Some value was put in its canonical form.
    canonical: AtomicBool,
}

impl Checks {
    /// Whether some value was put in its canonical form.
    pub fn any_canonical(&self) -> bool {
        self.canonical.load(Ordering::Relaxed)
    }
}

/// Checks a packed range of a plane, `start .. start + bytes.len()`, and puts the canonical form where there is one.
///
/// # Errors
/// [`ValueError`] naming the tensor and the place.
pub fn plane(
    matrix: &TiledMatrix,
    from: &From<'_>,
    kind: PlaneKind,
    start: u64,
    bytes: &mut [u8],
) -> Result<(), ValueError> {
    match kind {
        PlaneKind::Code(i) => {
            let nan = |b: u8| b & E4M3_NAN == E4M3_NAN;
            if matrix.spec.encoding == "e4m3"
                && matrix.spec.codes[i].bits == 8
                && any(bytes, nan)
                && let Some(at) = bytes.iter().position(|b| nan(*b))
            {
                let tile = (start + at as u64) / matrix.spec.codes[i].tile_bytes() as u64;
                let part = matrix.part_of(tile % matrix.tiles_n() * TILE_N as u64);
                return Err(nan_code(from, part));
            }
            Ok(())
        }
        PlaneKind::Scale(i) => scales(matrix, from, i, start, bytes),
    }
}

/// Whether any byte is bad. Looks at whole blocks without leaving early, which the compiler turns into vector code.
fn any(bytes: &[u8], bad: impl Fn(u8) -> bool) -> bool {
    const BLOCK: usize = 1024;
    bytes.chunks(BLOCK).any(|block| block.iter().fold(false, |found, &b| found | bad(b)))
}

/// Where the bytes of a plane come from.
pub struct From<'a> {
    /// Parts of the matrix with their source bytes.
    pub parts: &'a [PartSource<'a>],
    /// Their entries.
    pub entries: &'a [Entry],
    /// The source.
    pub checkpoint: &'a Checkpoint,
    /// Receives what is found.
    pub checks: &'a Checks,
}

/// The first NaN code of a part, looked up in the source.
fn nan_code(from: &From<'_>, part: usize) -> ValueError {
    let (part, entry) = (&from.parts[part], &from.entries[part]);
    let shape = part.format.shape;
    let mut codes = [0; TILE_K];
    let mut place = (0, 0);
    'search: for row in 0..shape.n {
        for k0 in (0..shape.k).step_by(TILE_K) {
            part.format.codec.codes16(&shape, &part.inputs, row, k0, &mut codes);
            if let Some(c) = codes.iter().position(|b| b & E4M3_NAN == E4M3_NAN) {
                place = (row as u64, (k0 + c) as u64);
                break 'search;
            }
        }
    }
    error(from.checkpoint, input_of(entry, 0), place, "an E4M3 weight that is NaN", "finite weights")
}

/// The source range that holds a plane: see [`vt_bundle::codec::Codec`] for the order of the inputs.
fn input_of(entry: &Entry, input: usize) -> &Slice {
    match &entry.storage {
        Storage::Rows { data, .. } | Storage::Raw { data, .. } => data,
        Storage::Tiled { inputs, .. } => inputs.get(input).unwrap_or(&inputs[0]),
    }
}

/// What is wrong with a scale element, if anything.
fn fault(dtype: ScaleType, element: &[u8]) -> Option<(String, &'static str)> {
    let float = |v: f32| (!v.is_finite()).then(|| (format!("the scale {v}"), "finite scales"));
    match dtype {
        ScaleType::E4M3 => match element[0] {
            b if b & E4M3_NAN == E4M3_NAN => Some((format!("the scale byte {b:#04x} (NaN)"), "scales of 0 to 448")),
            b if b > E4M3_MINUS_ZERO => Some((format!("the negative scale byte {b:#04x}"), "scales of 0 to 448")),
            _ => None,
        },
        ScaleType::E8M0 if element[0] == E8M0_NAN => {
            Some(("the scale byte 0xff (NaN)".into(), "scale bytes below 255"))
        }
        ScaleType::E8M0 | ScaleType::U8 | ScaleType::I8 => None,
        ScaleType::F16 => float(half::f16::from_le_bytes([element[0], element[1]]).to_f32()),
        ScaleType::Bf16 => float(half::bf16::from_le_bytes([element[0], element[1]]).to_f32()),
        ScaleType::F32 => float(f32::from_le_bytes([element[0], element[1], element[2], element[3]])),
    }
}

fn scales(matrix: &TiledMatrix, from: &From<'_>, index: usize, start: u64, bytes: &mut [u8]) -> Result<(), ValueError> {
    let plane = &matrix.spec.scales[index];
    let size = plane.dtype.bytes();
    let suspect = match plane.dtype {
        ScaleType::E4M3 => any(bytes, |b| b >= E4M3_NAN && b != E4M3_MINUS_ZERO),
        ScaleType::E8M0 => any(bytes, |b| b == E8M0_NAN),
        ScaleType::U8 | ScaleType::I8 => false,
        ScaleType::F16 | ScaleType::Bf16 | ScaleType::F32 => true,
    };
    if !suspect {
        return Ok(());
    }
    for (i, element) in bytes.chunks_exact_mut(size).enumerate() {
        let Some((found, expected)) = fault(plane.dtype, element) else { continue };
        let i = start / size as u64 + i as u64;
        let (row, column) = matrix.scale_place(plane, i);
        let at = matrix.part_of(row);
        let (part, entry) = (&from.parts[at], &from.entries[at]);
        let within = (row - matrix.parts[at].start) as usize;
        let source_row = part.format.row_order.source_row(within);
        let nan = plane.dtype == ScaleType::E4M3 && plane.span == Span::Group && element[0] & E4M3_NAN == E4M3_NAN;
        if nan && codes_are_zero(part, source_row, column as usize) {
            element[0] = 0;
            from.checks.canonical.store(true, Ordering::Relaxed);
            continue;
        }
        return Err(error(from.checkpoint, input_of(entry, 1 + index), (source_row as u64, column), found, expected));
    }
    Ok(())
}

fn codes_are_zero(part: &PartSource<'_>, row: usize, group: usize) -> bool {
    let shape = part.format.shape;
    let mut codes = [0; TILE_K];
    (group * shape.group_size..(group + 1) * shape.group_size).step_by(TILE_K).all(|k0| {
        part.format.codec.codes16(&shape, &part.inputs, row, k0, &mut codes);
        codes == [0; TILE_K]
    })
}

/// Checks the raw ggml blocks that begin in the range `start .. start + len` of a tensor's plane.
///
/// # Errors
/// [`ValueError`] naming the tensor and the place.
pub fn rows(
    entries: &[Entry],
    checkpoint: &Checkpoint,
    start: u64,
    len: u64,
    row_bytes: u64,
) -> Result<(), ValueError> {
    let mut at = 0;
    for entry in entries {
        let Storage::Raw { id, shape, data, .. } = &entry.storage else { return Ok(()) };
        let rows = shape.first().copied().unwrap_or(1);
        let part = at..at + rows * row_bytes;
        at = part.end;
        let (from, to) = (start.max(part.start), (start + len).min(part.end));
        if from >= to {
            continue;
        }
        // Whole rows: a row that straddles two windows is looked at twice, which costs less than cutting blocks.
        let touched = (from - part.start) / row_bytes..(to - part.start).div_ceil(row_bytes);
        let blocks = checkpoint.slice(data);
        for row in touched {
            let source_row = entry.row_order.source_row(row as usize) as u64;
            let bytes = &blocks[(source_row * row_bytes) as usize..((source_row + 1) * row_bytes) as usize];
            if let Err(bad) = check_blocks(*id, bytes) {
                let found = format!("a block whose {} is not finite", bad.field);
                return Err(error(checkpoint, data, (source_row, bad.block), found, "finite scales"));
            }
        }
    }
    Ok(())
}

/// Source bytes that the planes hold in canonical form.
#[derive(Debug, Default)]
pub struct Canonicalised {
    /// Per source file, the bytes to put back on a restore.
    pub patches: Vec<Vec<Patch>>,
    /// One note, if there are any.
    pub warnings: Vec<String>,
}

/// Finds the NaN scales of all-zero blocks in the source, in order of their place.
pub fn canonicalised(plan: &Plan, checkpoint: &Checkpoint) -> Canonicalised {
    let entries: Vec<&Entry> = plan.tensors.iter().flat_map(|p| p.sources.iter().flatten()).collect();
    let mut found: Vec<(usize, u64, u8)> = entries
        .par_iter()
        .flat_map_iter(|entry| {
            let Storage::Tiled { codec, inputs, all_zero: false, .. } = &entry.storage else { return Vec::new() };
            let planes = codec.spec().scales.iter().enumerate();
            planes
                .filter(|(_, p)| p.dtype == ScaleType::E4M3 && p.span == Span::Group)
                .filter_map(|(i, _)| inputs.get(1 + i))
                .flat_map(|part| {
                    let tensor = &checkpoint.tensors[part.tensor];
                    let nan = |b: u8| b & E4M3_NAN == E4M3_NAN;
                    let bytes = checkpoint.slice(part);
                    let mut found = Vec::new();
                    if any(bytes, nan) {
                        let places = bytes.iter().zip(tensor.offset + part.offset..);
                        found.extend(places.filter(|(b, _)| nan(**b)).map(|(b, at)| (tensor.file, at, *b)));
                    }
                    checkpoint.give_back(part);
                    found
                })
                .collect::<Vec<_>>()
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    let mut result = Canonicalised { patches: vec![Vec::new(); checkpoint.files.len()], warnings: Vec::new() };
    if !found.is_empty() {
        result.warnings.push(format!(
            "{} NaN block scales over blocks of zeros were stored as 0; a restore puts the original bytes back",
            found.len()
        ));
    }
    for (file, offset, byte) in found {
        let patches = &mut result.patches[file];
        match patches.last_mut().filter(|p: &&mut Patch| p.offset + p.bytes.len() as u64 / 2 == offset) {
            Some(run) => run.bytes.push_str(&format!("{byte:02x}")),
            None => patches.push(Patch { offset, bytes: format!("{byte:02x}") }),
        }
    }
    result
}
