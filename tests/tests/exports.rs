//! Real exports of other people's tools, where they are at hand: lossless, reversible, equal to the stored references.

use std::path::{Path, PathBuf};

use serde_json::Value;
use vt_tests::fixtures::shared;
use vt_tests::process::run;

/// Folders below `dir` that are checkpoints.
fn checkpoints(dir: &Path, found: &mut Vec<PathBuf>) {
    if dir.join("config.json").is_file() {
        found.push(dir.to_owned());
        return;
    }
    let entries = std::fs::read_dir(dir).expect("listed").map(|e| e.expect("entry").path());
    let mut entries: Vec<PathBuf> = entries.filter(|p| p.is_dir()).collect();
    entries.sort();
    for entry in entries {
        checkpoints(&entry, found);
    }
}

/// Converts, compares with the source, restores, and compares every file.
fn round_trip(source: &Path, root: &Path) -> PathBuf {
    let (bundle, restored) = (root.join("bundle"), root.join("restored"));
    run("vt-convert", &[source.as_os_str(), bundle.as_os_str(), "--quiet".as_ref()]).ok();
    let args = ["verify".as_ref(), bundle.as_os_str(), "--against".as_ref(), source.as_os_str()];
    run("vt-bundle", &args).ok();
    run("vt-bundle", &["restore".as_ref(), bundle.as_os_str(), restored.as_os_str()]).ok();
    for (name, bytes) in vt_tests::folders::files(&restored) {
        let original = if source.is_dir() { source.join(&name) } else { source.with_file_name(&name) };
        assert!(bytes == std::fs::read(&original).expect("source file"), "{} differs", original.display());
    }
    bundle
}

/// Weights of an export against `expected.json`: SHA-256 of the f32 values, -0 counted as +0.
fn expected(source: &Path, export: &Path) {
    let Ok(text) = std::fs::read(source.join("expected.json")) else { return };
    let expected: Value = serde_json::from_slice(&text).expect("expected.json");
    let Some(weights) = expected["dequant"].as_object() else { return };
    let bytes = std::fs::read(export).expect("export");
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).expect("header");
    // Low-rank branches stay tensors of their own in an export; the reference has them multiplied in.
    for (name, weight) in weights.iter().filter(|(_, w)| !w["kind"].as_str().unwrap_or("").contains("svdquant")) {
        let offsets = &header[name]["data_offsets"];
        let at = |i: usize| start + offsets[i].as_u64().unwrap_or_else(|| panic!("{name} is not exported")) as usize;
        let mut values = bytes[at(0)..at(1)].to_vec();
        for value in values.chunks_exact_mut(4).filter(|v| **v == [0, 0, 0, 0x80]) {
            value[3] = 0;
        }
        let found = sha256(&values);
        assert_eq!(weight["sha256_f32_le"].as_str(), Some(found.as_str()), "{name} of {}", source.display());
    }
}

/// SHA-256 in hexadecimal, by coreutils.
fn sha256(bytes: &[u8]) -> String {
    use std::io::Write;
    let mut child = std::process::Command::new("sha256sum")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("sha256sum is installed");
    child.stdin.take().expect("piped").write_all(bytes).expect("written");
    let output = child.wait_with_output().expect("ended");
    String::from_utf8_lossy(&output.stdout).split_whitespace().next().unwrap_or_default().to_owned()
}

fn all_of(family: &str) {
    let Some(dir) = shared(&format!("checkpoints/modelopt/{family}")) else { return };
    let mut sources = Vec::new();
    checkpoints(&dir, &mut sources);
    assert!(!sources.is_empty(), "{} holds no checkpoints", dir.display());
    for source in sources {
        let root = tempfile::tempdir().expect("temporary folder");
        let bundle = round_trip(&source, root.path());
        let export = root.path().join("export.safetensors");
        let args = ["export".as_ref(), bundle.as_os_str(), export.as_os_str(), "--dequantize".as_ref()];
        run("vt-bundle", &args).ok();
        expected(&source, &export);
    }
}

#[test]
fn llama_exports() {
    all_of("llama");
}

#[test]
fn tied_llama_exports() {
    all_of("llama_tied");
}

#[test]
fn other_architectures() {
    for family in ["mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "gemma3"] {
        all_of(family);
    }
}

#[test]
fn odd_exports_and_probes() {
    all_of("odd");
    all_of("probe");
}

#[test]
fn tiny_gguf_files() {
    let Some(dir) = shared("checkpoints/gguf/tiny") else { return };
    for entry in std::fs::read_dir(dir).expect("listed") {
        let root = tempfile::tempdir().expect("temporary folder");
        round_trip(&entry.expect("entry").path(), root.path());
    }
}
