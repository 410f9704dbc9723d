//! The forward pass on CUDA against the CPU's, over every bundle in the folder that `VT_TEST_BUNDLES` names, on a device
//! (`VT_TEST_CUDA=1`). `VT_TEST_ONLY` keeps those whose name contains it.
//!
//! The CPU computes with f32 activations, CUDA with bf16 ones where they enter a product; how far that may move logits is
//! measured ([`compare`]). Where the two largest logits are further apart than that changes, both choose the same. Stored
//! texts and mistakes made on purpose are of the CPU alone, and need no device.

#![allow(clippy::unwrap_used)]

mod choices;
mod compare;
mod mistakes;
mod models;
mod routing;
mod stored;
mod text;

use choices::check_choices;
use compare::{Compared, Followed, Noise, choice, difference};
use models::{Sequences, changed_cpu, config, cpu, cuda, ids};
use std::path::{Path, PathBuf};
use text::{Stored, check_against_cpu, check_batches};
use vt_bundle::Bundle;
use vt_kernels::cuda::kv_cache::CudaKvType;
use vt_run::engine::model::Model;
use vt_run::model::{ConfigError, CudaModel, Rounding, StepRouting};

/// Sequences of the largest batch.
const SEQUENCES: usize = 32;
/// Tokens of the prompt that is followed, and of what is generated after it.
const PROMPT: usize = 37;
const GENERATED: usize = 24;

/// Whether this runs under a checker (`VT_TEST_SMALL=1`), which makes each launch a thousand times slower.
fn small() -> bool {
    std::env::var_os("VT_TEST_SMALL").is_some_and(|v| v == "1")
}

/// Whether there is a device to test.
fn on_a_device() -> bool {
    let asked = std::env::var_os("VT_TEST_CUDA").is_some_and(|v| v == "1");
    if !asked {
        eprintln!("SKIPPED: VT_TEST_CUDA=1 runs this on a device");
    }
    asked
}

fn bundles() -> Vec<PathBuf> {
    let Some(folder) = std::env::var_os("VT_TEST_BUNDLES") else {
        eprintln!("SKIPPED: VT_TEST_BUNDLES names a folder of bundles");
        return Vec::new();
    };
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries.filter(|path| path.join("manifest.json").is_file()).collect();
    found.sort();
    if let Some(only) = std::env::var_os("VT_TEST_ONLY") {
        found.retain(|path| path.to_string_lossy().contains(&*only.to_string_lossy()));
    }
    assert!(!found.is_empty(), "VT_TEST_BUNDLES has no bundles");
    found
}

/// Logits of the CPU for a prompt and what it generates greedily after it.
fn reference(model: &mut dyn Model) -> (Vec<u32>, Vec<Vec<f32>>) {
    let vocabulary = model.info().vocab_size;
    let mut sequences = Sequences::new(vec![ids(0, PROMPT, vocabulary)], 1, vocabulary);
    let mut rows = sequences.step(model, &[(0, 0, PROMPT)], true);
    for position in PROMPT..PROMPT + GENERATED {
        let (token, _) = choice(&rows[position - 1]);
        sequences.ids[0].push(token);
        rows.extend(sequences.step(model, &[(0, position, 1)], true));
    }
    (sequences.ids.remove(0), rows)
}

/// To bf16, and to three grids between its values and twice its values.
fn roundings() -> impl Iterator<Item = Rounding> {
    (0..4u8).map(|i| Rounding::new((f32::from(i) / 4.0).exp2()))
}

/// What rounding alone makes of the logits of a text, whose f32 logits are `expected`.
fn noise(path: &Path, text: &[u32], expected: &[Vec<f32>]) -> Noise {
    Noise::new(expected, roundings().map(|rounding| rows(&mut changed_cpu(path, Some(rounding), &|_| ()), text)))
}

/// Logits of every position of a text, as one prompt.
fn rows(model: &mut dyn Model, text: &[u32]) -> Vec<Vec<f32>> {
    Sequences::new(vec![text.to_vec()], 1, model.info().vocab_size).step(model, &[(0, 0, text.len())], true)
}

/// Every position of `text` on CUDA, the prompt in pieces of the given lengths and the rest token by token.
fn follow(model: &mut CudaModel, text: &[u32], pieces: &[usize]) -> Followed {
    let vocabulary = model.info().vocab_size;
    let mut sequences = Sequences::new(vec![text.to_vec()], SEQUENCES, vocabulary);
    let (mut rows, mut routing, mut start) = (Vec::new(), StepRouting::default(), 0);
    for &count in pieces {
        rows.extend(sequences.step_routed(model, &[(0, start, count)], &mut routing));
        start += count;
    }
    for position in start..text.len() {
        rows.extend(sequences.step_routed(model, &[(0, position, 1)], &mut routing));
    }
    Followed { rows, routing }
}

/// The same among 31 others of other lengths, whose prompts are computed in the same steps.
fn follow_among_others(model: &mut CudaModel, text: &[u32]) -> Followed {
    let vocabulary = model.info().vocab_size;
    let mut all = vec![text.to_vec()];
    all.extend((1..SEQUENCES).map(|s| ids(s, text.len(), vocabulary)));
    let mut sequences = Sequences::new(all, SEQUENCES, vocabulary);
    let mut routing = StepRouting::default();
    let first: Vec<_> = (0..SEQUENCES).map(|s| (s, 0, if s == 0 { PROMPT } else { 1 + s % 17 })).collect();
    let mut rows = sequences.step_routed(model, &first, &mut routing);
    for i in 0..text.len() - PROMPT {
        let step: Vec<_> = first.iter().map(|&(s, _, count)| (s, count + i, 1)).collect();
        rows.extend(sequences.step_routed(model, &step, &mut routing));
    }
    Followed { rows, routing }
}

fn check(path: &Path) {
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    match config(&Bundle::open(path).unwrap()) {
        Ok(_) => {}
        Err(error @ ConfigError::Architecture { .. }) => {
            eprintln!("NOT RUN: {name}: {error}");
            return;
        }
        Err(error) => panic!("{name}: {error}"),
    }
    let stored = Stored::of(path);
    let mut on_cpu = cpu(path);
    let (text, own) = reference(&mut on_cpu);
    let rounded = roundings().map(|rounding| changed_cpu(path, Some(rounding), &|_| ())).collect();
    let mut compared = Compared::new(text, own, on_cpu, rounded);
    let text = compared.text.clone();

    let mut model = cuda(path, CudaKvType::Bf16, false, true);
    let whole = follow(&mut model, &text, &[PROMPT]);
    let mut measured = compared.check(&format!("{name} whole prompt, recorded generation"), &whole);
    let again = follow(&mut model, &text, &[PROMPT]);
    assert_eq!(difference(&whole.rows, &again.rows), 0.0, "{name}: a replay gives the same bits");
    let pieces = follow(&mut model, &text, &[1, 16, 3, PROMPT - 20]);
    measured = measured.max(compared.check(&format!("{name} prompt in pieces"), &pieces));
    let among = follow_among_others(&mut model, &text);
    measured = measured.max(compared.check(&format!("{name} among others"), &among));
    check_against_cpu(&name, stored.as_ref(), &mut compared.cpu, &mut model, measured);
    stored::check_on_device(path, &name, &mut compared.cpu, &mut compared.rounded);
    check_batches(&name, stored.as_ref(), &mut model, false);
    check_choices(&name, &mut model);
    let free = |model: &CudaModel| model.loaded().arena().memory().context().memory().unwrap().free;
    let before = free(&model);
    let replayed = follow_among_others(&mut model, &text);
    assert_eq!(difference(&among.rows, &replayed.rows), 0.0, "{name}: the same batch gives the same bits");
    // A checker allocates on its own account.
    if !small() {
        assert_eq!(free(&model), before, "{name}: steps that have been seen allocate nothing on the device");
    }
    drop(model);

    let mut eager = cuda(path, CudaKvType::Bf16, false, false);
    let found = follow(&mut eager, &text, &[PROMPT]);
    assert_eq!(difference(&whole.rows, &found.rows), 0.0, "{name}: what is recorded is what is submitted");
    drop(eager);

    let mut deterministic = cuda(path, CudaKvType::Bf16, true, true);
    let alone = follow(&mut deterministic, &text, &[PROMPT]);
    compared.check(&format!("{name} deterministic"), &alone);
    let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|v| v.to_bits()).collect::<Vec<_>>();
    for (what, rows) in [
        ("among 31 others", follow_among_others(&mut deterministic, &text)),
        ("prompt in pieces", follow(&mut deterministic, &text, &[1, 16, 3, PROMPT - 20])),
        ("all of it as a prompt", follow(&mut deterministic, &text, &[text.len()])),
    ] {
        let (alone, rows) = (&alone.rows, &rows.rows);
        assert!(bits(alone) == bits(rows), "{name} deterministic, {what}: differs by {}", difference(alone, rows));
    }
    check_batches(&name, stored.as_ref(), &mut deterministic, true);
    drop(deterministic);

    let mut narrow = cuda(path, CudaKvType::E4m3, false, true);
    let found = follow(&mut narrow, &text, &[PROMPT]);
    compared.check_narrow(&format!("{name} FP8 keys and values"), &found);
}

#[test]
fn stored_texts_are_the_cpus() {
    for path in bundles() {
        stored::check_on_cpu(&path, &path.file_name().unwrap().to_string_lossy());
    }
}

#[test]
fn logits_are_the_cpus() {
    let mut failed = Vec::new();
    for path in if on_a_device() { bundles() } else { Vec::new() } {
        let started = std::time::Instant::now();
        let path_name = path.display().to_string();
        if std::panic::catch_unwind(|| check(&path)).is_err() {
            failed.push(path_name.clone());
        }
        eprintln!("{path_name}: {:.1} s", started.elapsed().as_secs_f32());
    }
    assert!(failed.is_empty(), "{} bundles: {failed:#?}", failed.len());
}
