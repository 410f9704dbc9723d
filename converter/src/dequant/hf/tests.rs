//! Against the digests that `make_fixtures.py` stored for every weight of the real exports.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::*;
use crate::safetensors::{ResolveOptions, open, resolve};

const EXPORTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/checkpoints/modelopt");

fn digest(values: &[f32]) -> String {
    let mut sha = Sha256::new();
    for v in values {
        // -0 counts as +0: the addition turns it.
        sha.update((v + 0.0).to_le_bytes());
    }
    sha.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Every weight of one export; returns how many were compared.
fn check_export(folder: &Path) -> usize {
    let expected: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let checkpoint = open(folder).unwrap();
    let mut warnings = Vec::new();
    let resolution = resolve(&checkpoint, ResolveOptions::default(), &mut warnings).unwrap();
    let allowed = |w: &String| w.contains("expected.safetensors") || w.contains("lm_head");
    assert!(checkpoint.warnings.iter().chain(&warnings).all(allowed), "{warnings:?}");
    let dequant = expected["dequant"].as_object().unwrap();
    let mut compared = 0;
    for w in &resolution.weights {
        let want = &dequant[&w.name];
        let [n, k] = w.shape;
        assert_eq!(want["shape"], serde_json::json!([n, k]), "{}", w.name);
        let mut values = vec![0.0; (n * k) as usize];
        dequantize_rows(&checkpoint, w, 0..n, &mut values);
        if let Some(svd) = w.svd {
            // The sum W + B A depends on how the product is summed; W itself is checked against it loosely.
            let (a, b) = (
                Floats::new(&checkpoint, &checkpoint.tensors[svd.a]),
                Floats::new(&checkpoint, &checkpoint.tensors[svd.b]),
            );
            let rank = a.len() / k as usize;
            for (row, line) in values.chunks_exact_mut(k as usize).enumerate() {
                for (column, value) in line.iter_mut().enumerate() {
                    *value += (0..rank).map(|r| b.get(row * rank + r) * a.get(r * k as usize + column)).sum::<f32>();
                }
            }
        }
        if let Some(p) = w.pre_quant_scale {
            fold_columns(&checkpoint, &checkpoint.tensors[p], &mut values);
        }
        let sum: f64 = values.iter().map(|v| f64::from(v.abs())).sum();
        let want_sum = want["abs_sum"].as_f64().unwrap();
        assert!((sum - want_sum).abs() <= 1e-6 * want_sum, "{}: {sum} {want_sum}", w.name);
        if w.svd.is_none() {
            assert_eq!(digest(&values), want["sha256_f32_le"].as_str().unwrap(), "{folder:?} {}", w.name);
            compared += 1;
        }
    }
    let quantised = |kind: &str| kind != "null";
    assert_eq!(
        resolution.weights.len(),
        dequant.values().filter(|v| v["kind"].as_str().is_some_and(quantised)).count()
    );
    compared
}

#[test]
fn every_export_decodes_to_the_stored_digests() {
    let mut folders: Vec<PathBuf> = Vec::new();
    for model in std::fs::read_dir(EXPORTS).into_iter().flatten().flatten() {
        for scheme in std::fs::read_dir(model.path()).into_iter().flatten().flatten() {
            // SmolLM2's export is put together by hand and lies elsewhere.
            if scheme.path().join("expected.json").exists() && model.file_name() != "smollm2" {
                folders.push(scheme.path());
            }
        }
    }
    if folders.is_empty() {
        eprintln!("skipped: {EXPORTS} is not there");
        return;
    }
    folders.sort();
    let compared: usize = folders.iter().map(|f| check_export(f)).sum();
    assert!(folders.len() >= 25 && compared > 300, "{} exports, {compared} weights", folders.len());
}
