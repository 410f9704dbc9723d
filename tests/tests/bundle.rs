//! `vt-bundle` as a user meets it: what it prints, what it refuses, how it ends.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;
use vt_tests::process::{command, run};
use vt_tests::{fixtures, folders};

/// A converted fixture, with its source.
struct Made {
    root: tempfile::TempDir,
    source: PathBuf,
    bundle: PathBuf,
}

fn made(name: &str) -> Made {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &[name]);
    let (source, bundle) = (root.path().join(name), root.path().join("bundle"));
    run("vt-convert", &[&source, &bundle]).ok();
    Made { root, source, bundle }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are text")
}

#[test]
fn every_fixture_goes_there_and_back() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &[]);
    for name in ["bf16", "nvfp4", "fp8", "moe", "tiny.gguf"] {
        let (source, bundle) = (root.path().join(name), root.path().join(format!("{name}.bundle")));
        let export = root.path().join(format!("{name}.safetensors"));
        let restored = root.path().join(format!("{name}.restored"));
        run("vt-convert", &[text(&source), text(&bundle), "--verify"]).ok();
        let verified = run("vt-bundle", &["verify", text(&bundle), "--against", text(&source)]).ok();
        assert!(verified.out.contains("values have the bits of"), "{verified:?}");
        run("vt-bundle", &["restore", text(&bundle), text(&restored)]).ok();
        if source.is_dir() {
            folders::assert_equal(&source, &restored);
        } else {
            let back = std::fs::read(restored.join(name)).expect("restored file");
            assert!(back == std::fs::read(&source).expect("source"), "{name} differs");
        }
        run("vt-bundle", &["export", text(&bundle), text(&export), "--dequantize"]).ok();
        second_reader_agrees(&bundle, &export);
    }
}

/// The reader in Python, written from SPEC.md, decodes the bundle to the same bits.
fn second_reader_agrees(bundle: &Path, export: &Path) {
    let reader = fixtures::repository().join("format-spec/python/read_bundle.py");
    let output = std::process::Command::new("python3").arg(reader).arg(bundle).arg("--compare").arg(export).output();
    let output = output.expect("python3 is installed");
    assert!(output.status.success(), "{}: {}", bundle.display(), String::from_utf8_lossy(&output.stderr));
}

#[test]
fn export_is_plain_safetensors_under_the_usual_names() {
    let made = made("nvfp4");
    let file = made.root.path().join("out.safetensors");
    let args = ["export", text(&made.bundle), text(&file), "--dequantize"];
    run("vt-bundle", &args).ok();
    let bytes = std::fs::read(&file).expect("export");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    assert_eq!(header_len % 8, 0);
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).expect("header");
    let up = &header["model.layers.1.mlp.up_proj.weight"];
    assert_eq!((&up["dtype"], &up["shape"]), (&"F32".into(), &serde_json::json!([352, 256])));
    assert_eq!(header["model.layers.0.self_attn.k_proj.weight"]["shape"], serde_json::json!([128, 256]));
    assert_eq!(header["model.norm.weight"]["shape"], serde_json::json!([256]));
    let end = header.as_object().expect("object").values().filter_map(|t| t["data_offsets"][1].as_u64()).max();
    assert_eq!(end, Some((bytes.len() - 8 - header_len) as u64));
    // A file that is there is not replaced unasked.
    let refused = run("vt-bundle", &args).exits(2);
    assert!(refused.err.contains("--overwrite"), "{refused:?}");
    run("vt-bundle", &[&args[..], &["--overwrite"]].concat()).ok();
    run("vt-bundle", &["export", text(&made.bundle), text(&file)]).exits(2);
    let nowhere = made.root.path().join("no/such/folder/x.safetensors");
    run("vt-bundle", &["export", text(&made.bundle), text(&nowhere), "--dequantize"]).exits(6);
}

#[test]
fn restore_refuses_to_replace() {
    let made = made("fp8");
    let dir = made.root.path().join("back");
    run("vt-bundle", &["restore", text(&made.bundle), text(&dir)]).ok();
    std::fs::write(dir.join("config.json"), "{}").expect("changed");
    let refused = run("vt-bundle", &["restore", text(&made.bundle), text(&dir)]).exits(2);
    assert!(refused.err.contains("--overwrite"), "{refused:?}");
    run("vt-bundle", &["restore", text(&made.bundle), text(&dir), "--overwrite"]).ok();
    folders::assert_equal(&made.source, &dir);
}

#[test]
fn inspect_shows_people_and_programs_the_same() {
    let made = made("moe");
    let shown = run("vt-bundle", &["inspect", text(&made.bundle)]).ok().out;
    for expected in
        ["qwen3_moe", "0-1 ", "mlp.experts.gate_up_proj.weight", "marlin-16x64@1 e2m1 g16", "nvfp4.modelopt@1"]
    {
        assert!(shown.contains(expected), "{expected} is not in\n{shown}");
    }
    let json = run("vt-bundle", &["inspect", text(&made.bundle), "--json"]).ok().json();
    let id = run("vt-bundle", &["id", text(&made.bundle)]).ok().out;
    assert_eq!(json["id"].as_str(), Some(id.trim()));
    assert!(shown.contains(id.trim()));
    assert_eq!(json["tensors"], Value::Null);
    let all = run("vt-bundle", &["inspect", text(&made.bundle), "--json", "--tensors"]).ok().json();
    let elements: u64 = all["groups"].as_array().expect("groups").iter().filter_map(|g| g["elements"].as_u64()).sum();
    assert_eq!(Some(elements), all["parameters"].as_u64());
    let count: u64 = all["groups"].as_array().expect("groups").iter().filter_map(|g| g["tensors"].as_u64()).sum();
    assert_eq!(count as usize, all["tensors"].as_array().expect("tensors").len());
    let list = run("vt-bundle", &["inspect", text(&made.bundle), "--tensors"]).ok().out;
    assert!(list.contains("model.layers.1.mlp.experts.down_proj.weight"));
}

#[test]
fn expected_id_pins_a_bundle() {
    let made = made("fp8");
    let id = run("vt-bundle", &["id", text(&made.bundle)]).ok().out.trim().to_owned();
    run("vt-bundle", &["verify", text(&made.bundle), "--expect-id", &id]).ok();
    let other = run("vt-bundle", &["verify", text(&made.bundle), "--expect-id", &"0".repeat(64)]).exits(4);
    assert!(other.err.contains(&id), "{other:?}");
}

#[test]
fn verify_compares_with_the_right_source_only() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["nvfp4", "fp8"]);
    let (source, other, bundle) = (root.path().join("nvfp4"), root.path().join("fp8"), root.path().join("b"));
    run("vt-convert", &[&source, &bundle]).ok();
    run("vt-bundle", &["verify", text(&bundle), "--against", text(&other)]).exits(4);
    run("vt-bundle", &["verify", text(&bundle), "--against", text(&root.path().join("none"))]).exits(6);
    // One bit of one weight of the source.
    let file = source.join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("source");
    let last = bytes.len() - 1;
    bytes[last] ^= 0x10;
    std::fs::write(&file, bytes).expect("changed");
    let differs = run("vt-bundle", &["verify", text(&bundle), "--against", text(&source)]).exits(4);
    assert!(differs.err.contains("proj.weight"), "{differs:?}");
}

#[test]
fn diff_names_what_differs() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["nvfp4", "fp8"]);
    let [a, b, c] = ["a", "b", "c"].map(|name| root.path().join(name));
    run("vt-convert", &[root.path().join("nvfp4"), a.clone()]).ok();
    run("vt-convert", &[root.path().join("fp8"), b.clone()]).ok();
    run("vt-bundle", &["diff", text(&a), text(&a)]).ok();
    let found = run("vt-bundle", &["diff", text(&a), text(&b)]).exits(1);
    assert!(found.out.contains("nvfp4.modelopt@1 | fp8.tensor.f32@1"), "{found:?}");
    let json = run("vt-bundle", &["diff", text(&a), text(&b), "--json"]).exits(1).json();
    assert_eq!(json["equal"], false);
    // The same source but for one byte of one tensor.
    let file = root.path().join("nvfp4/model.safetensors");
    let mut bytes = std::fs::read(&file).expect("source");
    let last = bytes.len() - 1;
    bytes[last] ^= 0x10;
    std::fs::write(&file, bytes).expect("changed");
    run("vt-convert", &[root.path().join("nvfp4"), c.clone()]).ok();
    let found = run("vt-bundle", &["diff", text(&a), text(&c)]).exits(1);
    assert!(found.out.contains("plane scales: 1 of"), "{found:?}");
}

#[test]
fn what_is_no_bundle_is_refused() {
    let root = tempfile::tempdir().expect("temporary folder");
    for command in ["inspect", "id", "verify"] {
        let ran = run("vt-bundle", &[command, text(root.path())]).exits(3);
        assert!(ran.err.contains("manifest.json"), "{ran:?}");
        run("vt-bundle", &[command]).exits(2);
    }
    run("vt-bundle", &["no-such-command"]).exits(2);
    run("vt-bundle", &["--help"]).ok();
    let verified = run("vt-bundle", &["verify", "--json", text(root.path())]).exits(3);
    assert_eq!(verified.json()["result"], "invalid");
}

#[test]
fn files_that_no_hash_covers_are_named() {
    let made = made("fp8");
    std::fs::write(made.bundle.join("assets/extra.txt"), "x").expect("written");
    let ran = run("vt-bundle", &["verify", text(&made.bundle)]).ok();
    assert!(ran.err.contains("assets/extra.txt"), "{ran:?}");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let made = made("moe");
    let mut child = command("vt-bundle", &["inspect", text(&made.bundle), "--json", "--tensors"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    drop(child.stdout.take());
    let status = child.wait().expect("ended");
    let mut err = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut err).expect("text");
    assert!(status.success() && err.is_empty(), "{status}: {err}");
}

#[test]
fn completions_and_manual_come_from_one_definition() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(run("vt-bundle", &["completions", shell]).ok().out.contains("expect-id"));
    }
    assert!(run("vt-bundle", &["man"]).ok().out.contains("vt\\-bundle"));
}
