//! `vt-bundle verify`: every byte against its hash, every padding against zero.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde_json::json;
use vt_bundle::hash::to_hex;
use vt_bundle::manifest::{AssetRole, Placement};
use vt_bundle::{Bundle, BundleError};
use vt_convert::compare;

use crate::failure::{self, Failure, Outcome};
use crate::layers;
use crate::output;
use crate::progress::Progress;
use crate::store::sign::SignatureArgs;
use crate::unlisted::unlisted;

/// Arguments of `verify`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the bundle
    bundle: PathBuf,
    /// Also decode every tensor and compare its f32 bits with the source's own formula
    #[arg(long, env = "VT_AGAINST", value_name = "SOURCE")]
    against: Option<PathBuf>,
    /// The bundle id that the bundle must have
    #[arg(long, env = "VT_EXPECT_ID", value_name = "ID")]
    expect_id: Option<String>,
    #[command(flatten)]
    signature: SignatureArgs,
    /// Print JSON
    #[arg(long, env = "VT_JSON")]
    json: bool,
    /// Threads; all cores if not given
    #[arg(long, env = "VT_THREADS", value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// No progress bar; findings are still printed
    #[arg(long, short, env = "VT_QUIET")]
    quiet: bool,
}

/// What a verification did and found.
#[derive(Default)]
struct Report {
    id: String,
    files: u64,
    bytes: u64,
    experts: u64,
    findings: Vec<String>,
    unlisted: Vec<String>,
    compared: Option<u64>,
    signed_by: Option<String>,
}

/// Checks the bundle; findings go to standard error, the result to standard output.
pub fn run(args: &Args) -> Result<Outcome, Failure> {
    if let Some(threads) = args.threads {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads.into())
            .build_global()
            .map_err(|e| Failure::Other(format!("threads: {e}"), 6))?;
    }
    let bundle = match Bundle::open(&args.bundle) {
        Ok(bundle) => bundle,
        Err(e) => {
            if args.json {
                let kind = if e.exit_code() == 4 { "corrupt" } else { "invalid" };
                output::json(&json!({ "result": kind, "findings": [e.to_string()] }))?;
            }
            return Err(e.into());
        }
    };
    let mut report = Report { id: bundle.id().to_owned(), ..Report::default() };
    if let Some(expected) = &args.expect_id
        && !expected.eq_ignore_ascii_case(bundle.id())
    {
        let (path, found) = (args.bundle.clone(), bundle.id().to_owned());
        report.findings.push(BundleError::Id { path, found, expected: expected.clone() }.to_string());
    }
    check(&bundle, args.quiet, &mut report)?;
    report.unlisted = unlisted(&bundle).map_err(|source| BundleError::Io { path: args.bundle.clone(), source })?;
    if let Some(source) = &args.against
        && report.findings.is_empty()
    {
        compare(&bundle, source, args.quiet, &mut report)?;
    }
    match args.signature.check(&args.bundle, args.quiet) {
        Ok(key) => report.signed_by = key,
        // Damage to a file has been found above, and its signature fails for that reason too.
        Err(Failure::Store(e)) if e.exit_code() == 4 => report.findings.push(e.to_string()),
        Err(e) => return Err(e),
    }
    print(args, &report)?;
    Ok(if report.findings.is_empty() { Outcome::Clean } else { Outcome::Corrupt })
}

/// Adds an integrity error to the findings; other errors end the verification.
fn record(findings: &mut Vec<String>, result: Result<(), BundleError>) -> Result<bool, Failure> {
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.exit_code() == 4 => {
            findings.push(e.to_string());
            Ok(false)
        }
        Err(e) => Err(e.into()),
    }
}

fn check(bundle: &Bundle, quiet: bool, report: &mut Report) -> Result<(), Failure> {
    let m = bundle.manifest();
    let assets: u64 = m.assets.iter().map(|a| a.size).sum();
    report.bytes = assets + m.image.size + m.cold.size;
    report.files = 2 + (m.assets.len() + m.image.segments.len() + m.cold.segments.len()) as u64;
    let progress = Progress::new("verifying", report.bytes, quiet);
    for asset in &m.assets {
        let path = bundle.dir().join(&asset.file);
        record(&mut report.findings, hash_file(&path, &asset.blake3, &progress))?;
    }
    let mut whole = true;
    match bundle.leaves() {
        Ok(leaves) => {
            for placement in [Placement::Image, Placement::Cold] {
                let result = bundle.verify_files(placement, &leaves, &|n| progress.add(n));
                whole &= record(&mut report.findings, result)?;
            }
        }
        Err(e) if e.exit_code() == 4 => {
            // Without a table of leaves the files can still be checked as wholes.
            report.findings.push(e.to_string());
            for segment in m.image.segments.iter().chain(&m.cold.segments) {
                let path = bundle.dir().join(&segment.file);
                whole &= record(&mut report.findings, hash_file(&path, &segment.blake3, &progress))?;
            }
        }
        Err(e) => return Err(e.into()),
    }
    if whole {
        for placement in [Placement::Image, Placement::Cold] {
            let space = bundle.map(placement)?;
            record(&mut report.findings, bundle.verify_padding(placement, space.bytes()))?;
            experts(bundle, placement, space.bytes(), report)?;
        }
    }
    // One fault can be seen twice, as an asset and by its use.
    let mut seen = std::collections::HashSet::new();
    report.findings.retain(|f| seen.insert(f.clone()));
    Ok(())
}

/// Compares the BLAKE3 of a file with the manifest's, reading it in pieces.
fn hash_file(path: &Path, expected: &str, progress: &Progress) -> Result<(), BundleError> {
    let io = |source| BundleError::Io { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(io)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer).map_err(io)?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
        progress.add(n as u64);
    }
    let found = hasher.finalize().to_hex().to_string();
    if found == expected {
        return Ok(());
    }
    Err(BundleError::Hash { path: path.to_owned(), found, expected: expected.to_owned() })
}

/// Compares every expert record with its own hash.
fn experts(bundle: &Bundle, placement: Placement, space: &[u8], report: &mut Report) -> Result<(), Failure> {
    let Some(asset) = bundle.manifest().asset(AssetRole::ExpertHashes) else {
        return Ok(());
    };
    let path = bundle.dir().join(&asset.file);
    let bytes = match bundle.read_asset(asset) {
        Ok(bytes) => bytes,
        // Reported with the assets.
        Err(e) if e.exit_code() == 4 => return Ok(()),
        Err(e) => return Err(e.into()),
    };
    let (hashes, _) = bytes.as_chunks::<32>();
    let mut last = None;
    for tensor in bundle.manifest().tensors.iter().filter(|t| t.placement == placement) {
        let Some(experts) = &tensor.experts else { continue };
        // The tensors of one layer share their records.
        if last.replace(experts) == Some(experts) {
            continue;
        }
        for expert in 0..experts.count {
            let start = experts.record_start(expert) as usize;
            let record = &space[start..start + experts.record_size as usize];
            let found = *blake3::hash(record).as_bytes();
            let expected = experts.record_hashes.checked_add(expert).and_then(|i| hashes.get(i as usize));
            if expected != Some(&found) {
                let expected = expected.map_or_else(|| "no entry".to_owned(), to_hex);
                let found = to_hex(&found);
                report.findings.push(format!(
                    "{}: the record of expert {expert} of {} has BLAKE3 {found}, the table has {expected}",
                    path.display(),
                    tensor.name
                ));
            }
            report.experts += 1;
        }
    }
    Ok(())
}

/// Decodes every tensor on both sides.
fn compare(bundle: &Bundle, source: &Path, quiet: bool, report: &mut Report) -> Result<(), Failure> {
    let planes = bundle.manifest().tensors.iter().map(layers::plane_bytes).sum();
    let progress = Progress::new("comparing", planes, quiet);
    match compare::against(bundle, source, &|n| progress.add(n)) {
        Ok(values) => report.compared = Some(values),
        Err(e) if e.exit_code() == 4 => report.findings.push(e.to_string()),
        Err(e) => return Err(Failure::Other(e.to_string(), e.exit_code())),
    }
    Ok(())
}

fn print(args: &Args, report: &Report) -> Result<(), Failure> {
    let clean = report.findings.is_empty();
    if args.json {
        return Ok(output::json(&json!({
            "result": if clean { "ok" } else { "corrupt" },
            "id": report.id,
            "files": report.files,
            "bytes": report.bytes,
            "experts": report.experts,
            "compared_values": report.compared,
            "signed_by": report.signed_by,
            "findings": report.findings,
            "unlisted": report.unlisted,
        }))?);
    }
    for name in &report.unlisted {
        failure::say(&format!("warning: {name}: in the folder, but no part of the bundle; no hash covers it"));
    }
    report.findings.iter().for_each(|finding| failure::say(finding));
    let mut out = output::stdout();
    let (files, size) = (report.files, output::bytes(report.bytes));
    if clean {
        writeln!(out, "ok: {files} files, {size}, every hash and every padding")?;
        if report.experts > 0 {
            writeln!(out, "ok: {} expert records", report.experts)?;
        }
        if let (Some(values), Some(source)) = (report.compared, &args.against) {
            writeln!(out, "ok: {} values have the bits of {}", output::count(values), source.display())?;
        }
        if let Some(key) = &report.signed_by {
            writeln!(out, "ok: every file is signed, by the key {key}")?;
        }
        writeln!(out, "{}", report.id)?;
    } else {
        writeln!(out, "corrupt: {} finding(s) in {files} files, {size}", report.findings.len())?;
    }
    Ok(out.flush()?)
}
