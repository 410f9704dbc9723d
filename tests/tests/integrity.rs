//! Promise 4: every byte of a bundle is covered by BLAKE3, and a load checks it.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use vt_tests::process::{Numbers, Ran, run};
use vt_tests::{fixtures, folders};

/// Positions at which a bit is turned, per program.
const FLIPS: usize = 1000;

fn bundle(name: &str, root: &Path) -> PathBuf {
    fixtures::make_tiny(root, &[name]);
    let bundle = root.join("bundle");
    run("vt-convert", &[root.join(name), bundle.clone()]).ok();
    bundle
}

#[test]
fn hashes_are_those_of_public_tools() {
    let root = tempfile::tempdir().expect("temporary folder");
    // More than one leaf in the bf16 image, exactly one in the others.
    for name in ["bf16", "nvfp4"] {
        let bundle = bundle(name, &root.path().join(name));
        let b3sum = |file: &str| blake3::hash(&std::fs::read(bundle.join(file)).expect("file")).to_hex().to_string();
        let stored = std::fs::read_to_string(bundle.join("bundle.id")).expect("id");
        assert_eq!(stored, format!("{}\n", b3sum("manifest.json")));
        let manifest: serde_json::Value =
            serde_json::from_slice(&std::fs::read(bundle.join("manifest.json")).expect("manifest")).expect("JSON");
        let mut listed = 2;
        for list in [&manifest["image"]["segments"], &manifest["assets"]] {
            for entry in list.as_array().expect("list") {
                let file = entry["file"].as_str().expect("name");
                assert_eq!(entry["blake3"].as_str(), Some(b3sum(file).as_str()), "{file}");
                listed += 1;
            }
        }
        assert_eq!(folders::files(&bundle).len(), listed, "a file is in no list");
    }
}

/// Turns one bit of a file; turning it again restores the file.
fn flip(file: &Path, bit: u64) {
    let handle = std::fs::OpenOptions::new().read(true).write(true).open(file).expect("opened");
    let mut byte = [0u8];
    handle.read_exact_at(&mut byte, bit / 8).expect("read");
    byte[0] ^= 1 << (bit % 8);
    handle.write_all_at(&byte, bit / 8).expect("written");
}

/// Turns bits at random positions of the files that `affects` selects (each file alike, so that the small ones get
/// their share), and runs a program that must end with exit code 4 and name the file.
fn flips_are_refused(bundle: &Path, seed: u64, affects: fn(&str) -> bool, args: &(dyn Fn(&Path) -> Ran + Sync)) {
    let names: Vec<(String, u64)> = folders::files(bundle)
        .into_iter()
        .filter(|(name, bytes)| affects(name) && !bytes.is_empty())
        .map(|(name, bytes)| (name, bytes.len() as u64 * 8))
        .collect();
    assert!(names.iter().any(|(name, _)| name == "manifest.json"));
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for worker in 0..workers {
            let names = &names;
            scope.spawn(move || {
                // Each worker damages a copy of its own.
                let own = tempfile::tempdir().expect("temporary folder");
                let copy = own.path().join("bundle");
                folders::copy(bundle, &copy);
                let mut numbers = Numbers(seed ^ worker as u64);
                for _ in 0..FLIPS.div_ceil(workers) {
                    let (name, bits) = &names[numbers.below(names.len() as u64) as usize];
                    let (file, bit) = (copy.join(name), numbers.below(*bits));
                    flip(&file, bit);
                    let ran = args(&copy);
                    flip(&file, bit);
                    assert_eq!(ran.code, Some(4), "bit {bit} of {name}: {ran:?}");
                    // A damaged id is found by the manifest's hash, and the other way round.
                    let named = if name == "bundle.id" { "manifest.json" } else { name };
                    assert!(ran.err.contains(named), "bit {bit} of {name} is not named: {ran:?}");
                    if name.starts_with("segments/") {
                        assert!(ran.err.contains("leaf "), "the leaf of bit {bit} of {name} is not named: {ran:?}");
                    }
                }
                assert_eq!(args(&copy).code, Some(0), "the restored bundle");
            });
        }
    });
}

#[test]
fn verify_finds_any_flipped_bit() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle("nvfp4", root.path());
    flips_are_refused(&bundle, 1, |_| true, &|copy| {
        run("vt-bundle", &["verify".as_ref(), copy.as_os_str(), "--quiet".as_ref(), "--threads=1".as_ref()])
    });
}

#[test]
fn a_load_refuses_any_flipped_bit_that_it_reads() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle("nvfp4", root.path());
    // What only `restore` reads is not read by a load.
    let read = |name: &str| !name.starts_with("assets/restore.");
    flips_are_refused(&bundle, 2, read, &|copy| {
        run("vt-run", &["--bundle".as_ref(), copy.as_os_str(), "--load-only".as_ref(), "--threads=1".as_ref()])
    });
}

#[test]
fn verify_names_leaf_and_tensor() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle("bf16", root.path());
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(bundle.join("manifest.json")).expect("manifest")).expect("JSON");
    let tensor = manifest["tensors"].as_array().expect("tensors").last().expect("one");
    let offset = tensor["planes"][0]["offset"].as_u64().expect("offset");
    let segment = bundle.join("segments/image-00000.bin");
    flip(&segment, offset * 8);
    let ran = run("vt-bundle", &["verify".as_ref(), bundle.as_os_str()]).exits(4);
    let leaf = format!("leaf {} ", offset >> 20);
    let name = tensor["name"].as_str().expect("name");
    assert!(ran.err.contains(&leaf) && ran.err.contains(name), "{leaf}, {name}: {ran:?}");
    flip(&segment, offset * 8);
    // A table of leaves that is damaged itself does not hide damage to the segment.
    flip(&segment, offset * 8);
    flip(&bundle.join("assets/leaves.bin"), 77);
    let ran = run("vt-bundle", &["verify".as_ref(), bundle.as_os_str()]).exits(4);
    assert!(ran.err.contains("leaves.bin") && ran.err.contains("image-00000.bin"), "{ran:?}");
}

#[test]
fn missing_and_truncated_files_are_named() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle("fp8", root.path());
    for name in folders::files(&bundle).keys() {
        let copy = root.path().join("copy");
        folders::copy(&bundle, &copy);
        let file = copy.join(name);
        let len = file.metadata().expect("file").len();
        std::fs::OpenOptions::new().write(true).open(&file).expect("opened").set_len(len - 1).expect("truncated");
        let ran = run("vt-bundle", &["verify".as_ref(), copy.as_os_str()]).exits(4);
        assert!(ran.err.contains("manifest.json") || ran.err.contains(name), "{name}: {ran:?}");
        std::fs::remove_file(&file).expect("removed");
        let ran = run("vt-bundle", &["verify".as_ref(), copy.as_os_str()]).exits(3);
        assert!(ran.err.contains(name), "{name}: {ran:?}");
        std::fs::remove_dir_all(&copy).expect("removed");
    }
}
