//! Rates of the link, of the disk, of the hash kernel and of whole loads, measured in one run so that they compare.

use super::upload::{IoMode, Source, Timeline, UploadOptions, load_image, verify_resident};
use super::{Accelerator, LoadError, Piece, Verify};
use crate::stats::human_bytes;
use rustix::fs::Advice;
use serde::Serialize;
use std::collections::VecDeque;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use vt_bundle::Bundle;
use vt_bundle::manifest::Placement;

/// Bytes of one copy when the link alone is measured: large enough that the start of a copy does not count.
const LINK_BUFFER: usize = 64 << 20;
/// Bytes that are copied then.
const LINK_BYTES: u64 = 8 << 30;

/// Rates in bytes a second.
#[derive(Clone, Debug, Serialize)]
pub struct LoadBench {
    /// Device.
    pub device: String,
    /// Bytes of the image.
    pub image_bytes: u64,
    /// Hashing of the resident image and nothing else.
    pub hash_rate: Option<f64>,
    /// Settings, in the order given.
    pub settings: Vec<BenchedSetting>,
}

/// Loads with one setting.
#[derive(Clone, Debug, Serialize)]
pub struct BenchedSetting {
    /// The setting.
    pub options: UploadOptions,
    /// Its loads.
    pub loads: Vec<BenchedLoad>,
}

/// One load.
#[derive(Clone, Debug, Serialize)]
pub struct BenchedLoad {
    /// How the bytes were read.
    pub io: &'static str,
    /// Everything of the load but the context and the memory that a start touches while it waits for it, seconds.
    pub seconds: f64,
    /// Moments of the upload; its end is when the last value had been compared.
    pub timeline: Option<Timeline>,
    /// Bytes a second of the upload.
    pub rate: f64,
    /// Copies from page-locked memory and nothing else, right before the load and right after it.
    pub link_rates: [f64; 2],
    /// Reads past the page cache and nothing else, the same way: before and after a cold load, once before any other; none
    /// where they were left out or the file system does not do them.
    pub direct_rates: Vec<f64>,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct BenchPlan {
    /// Settings to load with.
    pub settings: Vec<UploadOptions>,
    /// Loads to make with each.
    pub repeat: u32,
    /// Drop the files from the page cache before every load.
    pub cold: bool,
    /// Measure the disk alone too.
    pub direct: bool,
}

/// Measures.
///
/// # Errors
/// [`LoadError`] of any load.
pub fn run<A: Accelerator<Memory = M, Arena = M>, M: Send + Sync>(
    accelerator: &A,
    bundle: &Bundle,
    verify: Verify,
    plan: &BenchPlan,
) -> Result<LoadBench, LoadError> {
    let image_bytes = bundle.space(Placement::Image).size;
    let mut settings = Vec::new();
    let mut hash_rate: Option<f64> = None;
    let disk = |options: &UploadOptions| {
        if !plan.direct {
            return Ok(None);
        }
        if plan.cold {
            // Also so that the disk has nothing to write meanwhile.
            drop_cache(bundle);
        }
        direct_rate(accelerator, bundle, options)
    };
    for options in plan.settings.iter().map(|options| options.checked()) {
        let mut loads = Vec::new();
        let mut link_before = link_rate(accelerator)?;
        let mut disk_before = disk(&options)?;
        for _ in 0..plan.repeat {
            if plan.cold {
                drop_cache(bundle);
            }
            accelerator.stock(options.touched(image_bytes));
            let start = Instant::now();
            let resident = load_image(accelerator, bundle, verify, &options, &|_| ())?;
            let seconds = start.elapsed().as_secs_f64();
            if verify == Verify::Device && hash_rate.is_none() {
                let leaves = bundle.leaves()?.image;
                // The first launch is not measured: it may wait for the driver.
                verify_resident(accelerator, bundle, &leaves, &resident.arena)?;
                let start = Instant::now();
                verify_resident(accelerator, bundle, &leaves, &resident.arena)?;
                hash_rate = Some(image_bytes as f64 / start.elapsed().as_secs_f64());
            }
            let (io, timeline) = (resident.report.io, resident.report.timeline);
            let rate = resident.report.upload_rate().unwrap_or(0.0);
            drop(resident);
            let link_after = link_rate(accelerator)?;
            let mut direct_rates: Vec<f64> = disk_before.into_iter().collect();
            if plan.cold {
                disk_before = disk(&options)?;
                direct_rates.extend(disk_before);
            }
            let link_rates = [link_before, link_after];
            link_before = link_after;
            loads.push(BenchedLoad { io, seconds, timeline, rate, link_rates, direct_rates });
        }
        settings.push(BenchedSetting { options, loads });
    }
    Ok(LoadBench { device: accelerator.name(), image_bytes, hash_rate, settings })
}

/// Copies alternate between two buffers, so that one is always under way. Timed from an idle link to the end of the last copy.
fn link_rate<A: Accelerator>(accelerator: &A) -> Result<f64, LoadError> {
    let whole = |i: u64| Piece { from: 0, len: LINK_BUFFER, to: i * LINK_BUFFER as u64 };
    let memory = accelerator.allocate(2 * LINK_BUFFER as u64)?;
    let mut buffers = VecDeque::new();
    for i in 0..2 {
        let mut buffer = accelerator.buffer(LINK_BUFFER, true)?;
        buffer.as_mut().fill(i + 1);
        buffers.push_back(buffer);
    }
    let rounds = LINK_BYTES / 3 / LINK_BUFFER as u64;
    let mut best = 0f64;
    for _ in 0..3 {
        let start = Instant::now();
        let mut copies = VecDeque::new();
        for i in 0..rounds {
            let buffer = match buffers.pop_front() {
                Some(buffer) => buffer,
                None => match copies.pop_front() {
                    Some(copy) => accelerator.wait(copy)?,
                    None => break,
                },
            };
            copies.push_back(accelerator.copy(buffer, &[whole(i % 2)], &memory)?);
        }
        for copy in copies {
            buffers.push_back(accelerator.wait(copy)?);
        }
        best = best.max((rounds * LINK_BUFFER as u64) as f64 / start.elapsed().as_secs_f64());
    }
    drop(accelerator.seal(memory)?);
    Ok(best)
}

/// Reads the image as a load does, with as many readers and in the same order, and drops it.
fn direct_rate<A: Accelerator>(
    accelerator: &A,
    bundle: &Bundle,
    options: &UploadOptions,
) -> Result<Option<f64>, LoadError> {
    let source = Source::open(bundle, IoMode::Direct, false)?;
    if source.mode() != IoMode::Direct {
        return Ok(None);
    }
    let next = AtomicU64::new(0);
    let part = options.part_bytes;
    let buffers = (0..options.readers).map(|_| accelerator.buffer(part as usize, true));
    let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
    let start = Instant::now();
    std::thread::scope(|scope| {
        let readers: Vec<_> = buffers
            .into_iter()
            .map(|mut buffer| {
                let (next, source) = (&next, &source);
                scope.spawn(move || {
                    loop {
                        let offset = next.fetch_add(part, Ordering::Relaxed);
                        if offset >= source.len() {
                            return Ok::<(), vt_bundle::BundleError>(());
                        }
                        let len = part.min(source.len() - offset);
                        source.read(offset, len as usize, buffer.as_mut())?;
                    }
                })
            })
            .collect();
        readers.into_iter().try_for_each(|reader| match reader.join() {
            Ok(result) => result.map_err(LoadError::from),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(Some(source.len() as f64 / start.elapsed().as_secs_f64()))
}

/// Asks the kernel to forget the image's pages. Pages that are mapped elsewhere stay.
fn drop_cache(bundle: &Bundle) {
    for segment in &bundle.space(Placement::Image).segments {
        if let Ok(file) = File::open(bundle.dir().join(&segment.file)) {
            // Pages that have not been written out stay; where that fails they do.
            let _ = rustix::fs::fdatasync(&file);
            let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        }
    }
}

impl BenchedLoad {
    /// Share of the link's rate: of the better one of both measurements.
    pub fn link_share(&self) -> f64 {
        self.rate / self.link_rates[0].max(self.link_rates[1])
    }

    /// Share of the disk's rate: of the mean, as a disk differs from minute to minute by more than a load.
    pub fn disk_share(&self) -> Option<f64> {
        let mean = self.direct_rates.iter().sum::<f64>() / self.direct_rates.len() as f64;
        (!self.direct_rates.is_empty()).then_some(self.rate / mean)
    }
}

impl LoadBench {
    /// A table that a person reads.
    pub fn table(&self) -> String {
        let gb = |rate: &f64| format!("{:.2}", rate / 1e9);
        let mut text = format!("{}: image of {}; rates in GB/s\n", self.device, human_bytes(self.image_bytes));
        if let Some(rate) = &self.hash_rate {
            text.push_str(&format!("  hash kernel only {}\n", gb(rate)));
        }
        for BenchedSetting { options, loads } in &self.settings {
            let io = loads.first().map_or(options.io.name(), |load| load.io);
            let [chunk, part] = [options.chunk_bytes, options.part_bytes].map(|bytes| bytes >> 20);
            let (depth, readers) = (options.depth, options.readers);
            text.push_str(&format!(
                "  {io:<6} {chunk:>3} MiB x {depth:<3} in parts of {part} MiB, {readers:>3} readers\n"
            ));
            for load in loads {
                let [before, after] = load.link_rates.each_ref().map(gb);
                text.push_str(&format!(
                    "    {:.3} s, {}, {:.3} of the link ({before} before, {after} after)",
                    load.seconds,
                    gb(&load.rate),
                    load.link_share()
                ));
                if let Some(share) = load.disk_share() {
                    let rates: Vec<String> = load.direct_rates.iter().map(gb).collect();
                    text.push_str(&format!(", {share:.3} of the disk (O_DIRECT {})", rates.join(" and ")));
                }
                if let Some(t) = load.timeline {
                    let [first, read, arrived] = [t.first_copy, t.read, t.arrived].map(|seconds| seconds * 1e3);
                    let of_readers = 100.0 / (t.read * options.readers as f64);
                    let (reading, waiting) = (t.reading * of_readers, t.waiting * of_readers);
                    text.push_str(&format!(
                        "; first copy {first:.1} ms, all read {read:.1}, all there {arrived:.1}; \
                         readers read {reading:.0} % and wait {waiting:.0} %"
                    ));
                }
                text.push('\n');
            }
        }
        text
    }
}
