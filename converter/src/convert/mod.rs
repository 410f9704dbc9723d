//! From a checkpoint to a bundle: plan, pack window by window, hash, describe, rename.
//!
//! All work happens in one locked folder beside the output, `OUTPUT.partial`. It is removed on an error, kept on a kill
//! or an interrupt, and resumed or replaced by the next run. The output appears by a rename, complete, or not at all.

mod assets;
mod check;
mod flush;
mod journal;
mod load;
mod ordered;
mod output;
mod recipe;
mod records;
mod sources;
mod window;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use vt_bundle::BundleError;
use vt_bundle::manifest::{FORMAT, FORMAT_VERSION, Image, Manifest, Model, Placement, Source, SourceFile};
use vt_bundle::writer::{SegmentWriter, write_manifest};

use crate::catalog::{Catalog, SourceDecoder};
use crate::compare;
use crate::open::{self, Choices, OpenError, Opened};
use crate::plan::{Plan, PlanError};
use crate::source::{Checkpoint, SourceKind};

pub use assets::bound as assets_bound;
pub use check::ValueError;
pub(crate) use ordered::in_order;
pub use output::OutputError;

/// What to convert and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Checkpoint: a folder, a `.safetensors` or a `.gguf` file.
    pub input: PathBuf,
    /// Bundle to make.
    pub output: PathBuf,
    /// Worker threads; 0 for one per core.
    pub threads: usize,
    /// Bound on anonymous memory in bytes.
    pub max_memory: u64,
    /// Replace an existing bundle.
    pub overwrite: bool,
    /// Continue from what an interrupted run left.
    pub resume: bool,
    /// Decode everything again and compare it with the source.
    pub verify: bool,
    /// How the input is understood.
    pub choices: Choices,
}

/// What was made.
#[derive(Debug, serde::Serialize)]
pub struct Report {
    /// The bundle id.
    pub id: String,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of the device image.
    pub image_bytes: u64,
    /// Bytes of the cold segments.
    pub cold_bytes: u64,
    /// Bytes of the source files.
    pub source_bytes: u64,
    /// Bytes of the source files hashed by an earlier, interrupted run.
    pub resumed_source_bytes: u64,
    /// Windows packed by an earlier, interrupted run.
    pub resumed_windows: u64,
    /// Values compared, if verification was asked for.
    pub verified_values: Option<u64>,
    /// Notes for the user.
    pub warnings: Vec<String>,
}

/// Where a conversion is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Hashing the source files.
    Hash,
    /// Packing the weights.
    Pack,
    /// Comparing the bundle with the source.
    Verify,
}

/// Receives progress; called from several threads.
pub trait Progress: Sync {
    /// A stage begins, with the bytes that it will go through.
    fn begin(&self, stage: Stage, bytes: u64);
    /// Some bytes of the current stage are done.
    fn advance(&self, bytes: u64);
    /// A note for the user.
    fn warn(&self, text: &str);
}

/// Why a conversion failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The input cannot be opened or is invalid.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The input cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A stored value is one that no valid checkpoint has.
    #[error(transparent)]
    Value(#[from] ValueError),
    /// The output cannot be made.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// Writing or checking the bundle failed.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// Reading a source file failed.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The bundle decodes to other values than the source: a defect of this program.
    #[error(transparent)]
    Differs(#[from] compare::CompareError),
    /// The user asked to stop.
    #[error("interrupted; {} is kept, run the same command again to continue from it", partial.display())]
    Interrupted {
        /// The folder with the work done so far.
        partial: PathBuf,
    },
    /// The worker threads could not be started.
    #[error("cannot start {threads} worker threads: {reason}")]
    Threads {
        /// How many.
        threads: usize,
        /// Why.
        reason: String,
    },
}

impl ConvertError {
    /// The exit code that a program should end with.
    pub fn exit_code(&self) -> u8 {
        match self {
            ConvertError::Open(e) => e.exit_code(),
            ConvertError::Plan(_) | ConvertError::Value(_) => 3,
            ConvertError::Output(e) => e.exit_code(),
            ConvertError::Bundle(e) => e.exit_code(),
            ConvertError::Read { .. } | ConvertError::Threads { .. } => 6,
            ConvertError::Differs(_) => 4,
            ConvertError::Interrupted { .. } => 130,
        }
    }
}

/// An opened checkpoint and its plan: everything that is known before the first weight byte is read.
pub struct Prepared {
    /// Decoder of the source's own formats.
    pub decoder: Box<dyn SourceDecoder>,
    /// The source.
    pub checkpoint: Checkpoint,
    /// The plan.
    pub plan: Plan,
    /// What the catalog says beside its entries, which the plan has taken.
    pub catalog: Catalog,
    /// Notes for the user.
    pub warnings: Vec<String>,
}

/// Opens a checkpoint and plans its bundle.
///
/// # Errors
/// [`ConvertError::Open`] or [`ConvertError::Plan`].
pub fn prepare(input: &Path, choices: Choices) -> Result<Prepared, ConvertError> {
    let Opened { checkpoint, mut catalog, decoder } = open::open(input, choices)?;
    let entries = std::mem::take(&mut catalog.entries);
    let plan = Plan::new(Catalog { entries, ..catalog.clone() })?;
    let mut warnings = checkpoint.warnings.clone();
    warnings.extend(catalog.warnings.iter().cloned());
    warnings.extend(plan.warnings.iter().cloned());
    Ok(Prepared { decoder, checkpoint, plan, catalog, warnings })
}

/// Converts a checkpoint.
///
/// `interrupt` is polled between windows; once it is set, the work done so far is kept and
/// [`ConvertError::Interrupted`] is returned.
///
/// # Errors
/// [`ConvertError`]. Except for an interrupt, nothing is left at or beside the output.
pub fn convert(options: &Options, progress: &dyn Progress, interrupt: &AtomicBool) -> Result<Report, ConvertError> {
    output::refuse_overlap(&options.input, &options.output)?;
    let prepared = prepare(&options.input, options.choices)?;
    prepared.warnings.iter().for_each(|w| progress.warn(w));
    let threads = if options.threads == 0 {
        std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
    } else {
        options.threads
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|e| ConvertError::Threads { threads, reason: e.to_string() })?;
    let partial = output::Partial::claim(&options.output, options.overwrite)?;
    let result = pool.install(|| run(options, prepared, &partial, progress, interrupt));
    match result {
        Ok(report) => {
            partial.publish(options.overwrite)?;
            if let Some(values) = report.verified_values {
                output::write_receipt(&options.output, &report.id, values)?;
            }
            Ok(report)
        }
        Err(e) => {
            if !matches!(e, ConvertError::Interrupted { .. }) {
                partial.discard();
            }
            Err(e)
        }
    }
}

fn run(
    options: &Options,
    prepared: Prepared,
    partial: &output::Partial,
    progress: &dyn Progress,
    interrupt: &AtomicBool,
) -> Result<Report, ConvertError> {
    let Prepared { decoder, checkpoint, plan, catalog, mut warnings } = prepared;
    let dir = partial.dir();
    let stop = || interrupt.load(Ordering::Relaxed);
    let interrupted = || ConvertError::Interrupted { partial: dir.to_owned() };
    partial.require_space(plan.image_bytes + plan.cold_bytes + assets::bound(&checkpoint))?;

    let key = journal::key(&checkpoint, &plan);
    let (journal, done) = journal::Journal::open(dir, key, options.resume)?;

    let workers = window::workers(options.max_memory);
    let source_bytes = checkpoint.files.iter().map(|f| f.size).sum();
    progress.begin(Stage::Hash, source_bytes);
    let hasher = sources::Hasher { checkpoint: &checkpoint, journal: &journal, finished: &done.sources, workers };
    let (hashes, resumed_source_bytes) = hasher.hash(progress, &stop)?.ok_or_else(interrupted)?;

    progress.begin(Stage::Pack, plan.image_bytes + plan.cold_bytes);
    let records = records::RecordHashes::new(&plan);
    let checks = check::Checks::default();
    let packer = window::Packer {
        plan: &plan,
        checkpoint: &checkpoint,
        journal: &journal,
        finished: &done.windows,
        records: &records,
        checks: &checks,
        workers,
    };
    let mut spaces = Vec::new();
    let mut resumed_windows = 0;
    for placement in [Placement::Image, Placement::Cold] {
        let segments = SegmentWriter::create(dir, placement, plan.space_bytes(placement))?;
        let packed = packer.pack(placement, &segments, progress, &stop)?;
        let (leaves, resumed) = packed.ok_or_else(interrupted)?;
        resumed_windows += resumed;
        spaces.push((segments, leaves));
    }
    let record_hashes = records.finish().expect("every window has been packed, so every record is complete");
    // Windows of an earlier run are not checked again: what was found in them is found in the source.
    let canonical = if checks.any_canonical() || resumed_windows > 0 {
        check::canonicalised(&plan, &checkpoint)
    } else {
        check::Canonicalised::default()
    };
    warnings.extend(canonical.warnings.iter().cloned());
    canonical.warnings.iter().for_each(|w| progress.warn(w));

    let leaves: Vec<u8> = spaces.iter().flat_map(|(_, leaves)| leaves.iter().flatten().copied()).collect();
    let recipe = recipe::build(&plan, &checkpoint, &canonical.patches);
    let assets = assets::write(dir, &checkpoint, &leaves, &record_hashes, recipe)?;
    let mut images = Vec::new();
    for ((segments, leaves), placement) in spaces.into_iter().zip([Placement::Image, Placement::Cold]) {
        images.push(Image { size: plan.space_bytes(placement), segments: segments.finish(&leaves)? });
    }
    let cold = images.pop().unwrap_or_default();
    let image = images.pop().unwrap_or_default();
    let manifest = Manifest {
        format: FORMAT.to_owned(),
        format_version: FORMAT_VERSION,
        model: Model {
            architecture: catalog.architecture.clone(),
            config: checkpoint.config.clone(),
            conventions: catalog.conventions.clone(),
        },
        quantization: plan.quantization(catalog.declared.clone()),
        source: Source {
            kind: match checkpoint.kind {
                SourceKind::Safetensors => "safetensors",
                SourceKind::Gguf => "gguf",
            }
            .to_owned(),
            files: checkpoint
                .files
                .iter()
                .zip(&hashes)
                .map(|(f, hash)| SourceFile {
                    name: f.name.clone(),
                    size: f.size,
                    blake3: vt_bundle::hash::to_hex(hash),
                })
                .collect(),
        },
        image,
        cold,
        tensors: plan.tensors.iter().map(|p| p.tensor.clone()).collect(),
        kv_cache: catalog.kv_cache.clone(),
        assets,
    };
    let id = write_manifest(dir, &manifest)?;
    let mut verified_values = None;
    if options.verify {
        let bundle = vt_bundle::Bundle::open(dir)?;
        let bytes = plan.tensors.iter().map(|p| p.tensor.planes.iter().map(|s| s.size).sum::<u64>()).sum();
        progress.begin(Stage::Verify, bytes);
        let entries = plan.tensors.iter().flat_map(|p| p.sources.iter().flatten());
        let advance = |bytes| progress.advance(bytes);
        let compared = compare::with_entries(&bundle, entries, &checkpoint, decoder.as_ref(), &advance, &stop)?;
        verified_values = Some(compared.ok_or_else(interrupted)?);
    }
    journal.remove()?;
    Ok(Report {
        id,
        tensors: plan.tensors.len(),
        image_bytes: plan.image_bytes,
        cold_bytes: plan.cold_bytes,
        source_bytes,
        resumed_source_bytes,
        resumed_windows,
        verified_values,
        warnings,
    })
}
