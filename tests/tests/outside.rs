//! Outputs that are their own input, or lie inside it: refused before anything is written.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use vt_tests::process::{command, finish, run};
use vt_tests::{fixtures, folders};

/// Runs in `root`, with paths as a user types them.
fn run_in(root: &Path, program: &str, args: &[&str]) -> vt_tests::process::Ran {
    let mut command = command(program, args);
    command.current_dir(root);
    finish(command)
}

/// Every folder and file below a folder; links are not followed.
fn contents(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in std::fs::read_dir(&dir).expect("folder") {
            let entry = entry.expect("entry");
            let kind = entry.file_type().expect("type");
            let bytes = if kind.is_file() { std::fs::read(entry.path()).expect("file") } else { Vec::new() };
            found.insert(entry.path(), bytes);
            left.extend(kind.is_dir().then(|| entry.path()));
        }
    }
    found
}

#[test]
fn nothing_is_written_into_the_folder_of_a_bundle() {
    let temporary = tempfile::tempdir().expect("temporary folder");
    let root = temporary.path();
    fixtures::make_tiny(root, &["fp8"]);
    run("vt-convert", &[&root.join("fp8"), &root.join("n")]).ok();
    symlink("n", root.join("link")).expect("link");
    // Two bundles whose folders are called as those in which stores on a disk keep what they have.
    for name in ["store/blobs", "layout/blobs"] {
        std::fs::create_dir_all(root.join(name).parent().expect("parent")).expect("folder");
        folders::copy(&root.join("n"), &root.join(name));
    }
    let whole = contents(root);
    let refused = |args: &[&str], part: &str| {
        let ran = run_in(root, "vt-bundle", args).exits(2);
        assert!(ran.err.contains("inside"), "{args:?}: {ran:?}");
        assert!(contents(root) == whole, "{args:?} wrote something: {part}");
    };
    let spellings = ["n", "./n", "n/", "./n/../n", "link", "link/new", "n/new", "n/new/deep", "store/../n/new"];
    for dir in spellings {
        for bundle in ["n", "link"] {
            refused(&["restore", bundle, dir], "restore");
            refused(&["restore", bundle, dir, "--overwrite"], "restore --overwrite");
        }
    }
    for file in ["n/x.safetensors", "link/x.safetensors", "./n/../n/segment.bin", "n/manifest.json"] {
        refused(&["export", "n", file, "--dequantize", "--overwrite"], "export");
        refused(&["sign", "n", "--key", "none.pem", "--signature", file], "sign");
    }
    for inside in ["oci-layout:n:v1", "oci-layout:link:v1", "oci-layout:n/deep:v1", "oci-layout:./n/../n:v1"] {
        refused(&["push", "n", inside], "push");
    }
    let at = |place: &str| format!("file://{}/{place}", root.display());
    refused(&["push", "n", &at("n/name:v1")], "push");
    refused(&["push", "link", &at("n/deep/name:v1")], "push");
    refused(&["push", "store/blobs", &at("store/name:v1")], "push");
    refused(&["push", "layout/blobs", "oci-layout:layout:v1"], "push");

    // Beside it, all of this is what it always was; a file of the source may have any name.
    run_in(root, "vt-bundle", &["restore", "n", "n/../back"]).ok();
    folders::assert_equal(&root.join("fp8"), &root.join("back"));
    run_in(root, "vt-bundle", &["export", "link", "link/../x.safetensors", "--dequantize"]).ok();
    run_in(root, "vt-bundle", &["push", "n", &at("shelf/name:v1")]).ok();
    run_in(root, "vt-bundle", &["push", "n", "oci-layout:shelf2:v1"]).ok();
    run_in(root, "vt-bundle", &["verify", "n"]).ok();
}

#[test]
fn nothing_is_written_among_the_files_of_a_store() {
    let temporary = tempfile::tempdir().expect("temporary folder");
    let root = temporary.path();
    fixtures::make_tiny(root, &["fp8"]);
    run("vt-convert", &[&root.join("fp8"), &root.join("n")]).ok();
    let stored = format!("file://{}/shelf/n:v1", root.display());
    for reference in [stored.as_str(), "oci-layout:layout:v1"] {
        run_in(root, "vt-bundle", &["push", "n", reference]).ok();
    }
    symlink("shelf", root.join("link")).expect("link");
    let whole = contents(root);
    let refused = |args: &[&str]| {
        let ran = run_in(root, "vt-bundle", args).exits(2);
        assert!(ran.err.contains("inside"), "{args:?}: {ran:?}");
        assert!(contents(root) == whole, "{args:?} wrote something");
    };
    for dir in ["shelf/blobs/m", "link/index/m", "shelf/blobs/../index/m"] {
        refused(&["pull", &stored, dir]);
    }
    refused(&["pull", "oci-layout:layout:v1", "layout/blobs/m"]);
    refused(&["copy", &stored, "oci-layout:shelf/blobs/deep:v1"]);
    // Another name or tag in the same store, and a folder beside its own, are what stores are for.
    run_in(root, "vt-bundle", &["copy", &stored, &format!("file://{}/link/m:v2", root.display())]).ok();
    run_in(root, "vt-bundle", &["copy", "oci-layout:layout:v1", "oci-layout:./layout:v2"]).ok();
    run_in(root, "vt-bundle", &["pull", &stored, "shelf/m"]).ok();
    folders::assert_equal(&root.join("n"), &root.join("shelf/m"));
}

#[test]
fn a_conversion_is_never_its_own_input() {
    let temporary = tempfile::tempdir().expect("temporary folder");
    let root = temporary.path();
    fixtures::make_tiny(root, &["fp8", "tiny.gguf"]);
    run("vt-convert", &[&root.join("fp8"), &root.join("n")]).ok();
    symlink("fp8", root.join("link")).expect("link");
    symlink("tiny.gguf", root.join("file")).expect("link");
    let whole = contents(root);
    let same = [
        ("fp8", "fp8"),
        ("fp8", "./fp8/../fp8"),
        ("fp8", "link"),
        ("link", "fp8/new"),
        ("fp8", "link/new"),
        ("tiny.gguf", "tiny.gguf"),
        ("file", "tiny.gguf"),
        ("tiny.gguf", "file"),
        ("tiny.gguf", "."),
    ];
    for (input, output) in same {
        let ran = run_in(root, "vt-convert", &[input, output, "--overwrite"]).exits(2);
        assert!(ran.err.contains("OUTPUT"), "{input} {output}: {ran:?}");
        assert!(contents(root) == whole, "{input} {output} wrote something");
    }
    // A bundle is no checkpoint.
    run_in(root, "vt-convert", &["n", "n", "--overwrite"]).exits(2);
    assert!(contents(root) == whole, "the bundle was changed");
}
