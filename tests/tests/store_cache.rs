//! The cache of fetched bundles: one download for many processes, shared files, pruning, disks that cannot be written.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use vt_tests::disks::Tmpfs;
use vt_tests::process::{Ran, command, finish, run};
use vt_tests::servers::Registry;
use vt_tests::{fixtures, folders};

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn convert(input: &Path, output: &Path) {
    run("vt-convert", &[text(input), text(output), "--quiet"]).ok();
}

/// Loads a bundle through a cache.
fn load(reference: &str, cache: &Path) -> Ran {
    run("vt-run", &["--bundle", reference, "--cache-dir", text(cache), "--device", "cpu", "--load-only"])
}

/// Two bundles that differ in one small file, in a folder of bundles.
fn two(root: &Path) -> ([PathBuf; 2], [String; 2]) {
    fixtures::make_tiny(root, &["nvfp4"]);
    let bundles = [root.join("first"), root.join("second")];
    convert(&root.join("nvfp4"), &bundles[0]);
    std::fs::write(root.join("nvfp4/generation_config.json"), r#"{"temperature": 0.25}"#).expect("written");
    convert(&root.join("nvfp4"), &bundles[1]);
    let references = ["first", "second"].map(|name| format!("file://{}/store/{name}:v1", root.display()));
    for (bundle, reference) in bundles.iter().zip(&references) {
        run("vt-bundle", &["push", text(bundle), reference, "--quiet"]).ok();
    }
    (bundles, references)
}

#[test]
fn eight_processes_download_once() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    let input = root.path().join("moe");
    fixtures::make_moe(&input, 0.05);
    let bundle = root.path().join("bundle");
    convert(&input, &bundle);
    let reference = registry.reference("moe:v1");
    run("vt-bundle", &["push", text(&bundle), &reference, "--quiet"]).ok();
    let before = registry.requests(&["\"GET ", "/blobs/"]);
    let cache = root.path().join("cache");
    let args = ["--bundle", &reference, "--cache-dir", text(&cache), "--device", "cpu", "--load-only"];
    let start = || command("vt-run", &args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("started");
    let children: Vec<Child> = (0..8).map(|_| start()).collect();
    for child in children {
        let ended = child.wait_with_output().expect("ended");
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
    // Each process reads the manifest to learn what it wants; every other file moves once.
    let files = folders::files(&bundle).len() - 2;
    assert_eq!(registry.requests(&["\"GET ", "/blobs/"]) - before, 8 + files);
    let id = run("vt-bundle", &["id", text(&bundle)]).ok().out.trim().to_owned();
    folders::assert_equal(&bundle, &cache.join("bundles").join(&id));
    // Pinned by its id it needs no registry any more.
    drop(registry);
    load(&format!("{reference}@blake3:{id}"), &cache).ok();
    let ran = load(&reference, &cache).exits(6);
    assert!(ran.err.contains("cannot be reached"), "{ran:?}");
}

#[test]
fn files_are_shared_and_pruned() {
    let root = tempfile::tempdir().expect("temporary folder");
    let (bundles, references) = two(root.path());
    let cache = root.path().join("cache");
    for reference in &references {
        load(reference, &cache).ok();
    }
    let ids = bundles.each_ref().map(|b| run("vt-bundle", &["id", text(b)]).ok().out.trim().to_owned());
    let inode = |id: &str| {
        let segment = cache.join("bundles").join(id).join("segments/image-00000.bin");
        std::os::unix::fs::MetadataExt::ino(&segment.metadata().expect("there"))
    };
    assert_eq!(inode(&ids[0]), inode(&ids[1]), "the segment is there once");
    let flag = format!("--cache-dir={}", cache.display());
    let list = || run("vt-bundle", &["cache", "list", &flag, "--json"]).ok().json();
    let listed = list();
    let found: Vec<_> = listed.as_array().expect("list").iter().map(|e| e["reference"].as_str()).collect();
    assert_eq!(found.len(), 2);
    assert!(references.iter().all(|r| found.contains(&Some(r))), "{listed}");
    // The first is used again, so that the second goes first.
    let second = cache.join("info").join(format!("{}.json", ids[1]));
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    std::fs::File::options().write(true).open(second).and_then(|f| f.set_modified(old)).expect("made old");
    let size: u64 = folders::files(&bundles[0]).values().map(|bytes| bytes.len() as u64).sum();
    let pruned = run("vt-bundle", &["cache", "prune", &flag, "--max-size", &size.to_string(), "--json"]).ok().json();
    assert_eq!(pruned["removed"], serde_json::json!([ids[1]]));
    folders::assert_equal(&bundles[0], &cache.join("bundles").join(&ids[0]));
    run("vt-bundle", &["cache", "prune", &flag, "--max-size", "0"]).ok();
    assert_eq!(list(), serde_json::json!([]));
    assert!(folders::files(&cache.join("blobs")).is_empty());
    load(&references[1], &cache).ok();
}

#[test]
fn a_cache_without_links_is_bounded() {
    let root = tempfile::tempdir().expect("temporary folder");
    let (bundles, references) = two(root.path());
    let cache = root.path().join("cache");
    references.iter().for_each(|reference| drop(load(reference, &cache).ok()));
    let ids = bundles.each_ref().map(|b| run("vt-bundle", &["id", text(b)]).ok().out.trim().to_owned());
    // What a file system without hard links has: a copy in each bundle.
    for (bundle, id) in bundles.iter().zip(&ids) {
        let there = cache.join("bundles").join(id);
        std::fs::remove_dir_all(&there).expect("removed");
        folders::copy(bundle, &there);
    }
    let flag = format!("--cache-dir={}", cache.display());
    let size = |dir: &Path| folders::files(dir).values().map(|bytes| bytes.len() as u64).sum::<u64>();
    let limit = size(&bundles[0]) + 1000;
    let prune = |limit: u64| {
        run("vt-bundle", &["cache", "prune", &flag, "--max-size", &limit.to_string(), "--json"]).ok().json()
    };
    let pruned = prune(limit);
    assert_eq!(pruned["removed"].as_array().map(Vec::len), Some(1), "{pruned}");
    assert!(size(&cache.join("bundles")) <= limit && size(&cache.join("blobs")) == 0);
    assert_eq!(pruned["remaining_bytes"].as_u64(), Some(size(&cache.join("bundles"))));
    assert_eq!(prune(0)["removed"].as_array().map(Vec::len), Some(1));
    assert_eq!(size(&cache.join("bundles")), 0);
}

#[test]
fn damage_in_the_cache_is_not_served() {
    let root = tempfile::tempdir().expect("temporary folder");
    let (bundles, references) = two(root.path());
    let cache = root.path().join("cache");
    load(&references[0], &cache).ok();
    let id = run("vt-bundle", &["id", text(&bundles[0])]).ok().out.trim().to_owned();
    let segment = cache.join("bundles").join(&id).join("segments/image-00000.bin");
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(&segment, mode(0o644)).expect("made writable");
    let mut bytes = std::fs::read(&segment).expect("read");
    bytes[100] ^= 1;
    std::fs::write(&segment, &bytes).expect("written");
    // Without its store it cannot be mended; then it is not served.
    let store = root.path().join("store");
    std::fs::rename(&store, root.path().join("away")).expect("moved");
    let pinned = format!("{}@blake3:{id}", references[0]);
    let ran = load(&pinned, &cache).exits(4);
    assert!(ran.err.contains("corrupt") && ran.err.contains("cannot be fetched anew"), "{ran:?}");
    std::fs::rename(root.path().join("away"), &store).expect("moved");
    // Neither is it while another process uses it: its lock is held.
    let lock = std::fs::File::open(cache.join("locks").join(format!("{id}.lock"))).expect("there");
    lock.lock_shared().expect("locked");
    load(&references[0], &cache).exits(4);
    drop(lock);
    let ran = load(&references[0], &cache).ok();
    assert_eq!(ran.err.matches("segments/image-00000.bin was damaged").count(), 1, "{ran:?}");
    folders::assert_equal(&bundles[0], &cache.join("bundles").join(&id));
    let ran = load(&references[0], &cache).ok();
    assert!(!ran.err.contains("damaged"), "{ran:?}");
    std::fs::set_permissions(&segment, mode(0o644)).expect("made writable");
    std::fs::write(&segment, &bytes).expect("written");
    // A bundle that would share the damaged file gets a new one.
    load(&references[1], &cache).ok();
    // One that has lost a file is fetched again.
    let gone = cache.join("bundles").join(&id).join("assets/tokenizer.json");
    std::fs::remove_file(&gone).expect("removed");
    load(&references[0], &cache).ok();
    folders::assert_equal(&bundles[0], &cache.join("bundles").join(&id));
    // So is one whose manifest is another.
    let manifest = cache.join("bundles").join(&id).join("manifest.json");
    std::fs::write(&manifest, "{}").expect("written");
    load(&references[0], &cache).ok();
    folders::assert_equal(&bundles[0], &cache.join("bundles").join(&id));
}

#[test]
fn disks_that_are_full_or_read_only() {
    let root = tempfile::tempdir().expect("temporary folder");
    let (bundles, references) = two(root.path());
    let disk = root.path().join("disk");
    std::fs::create_dir(&disk).expect("folder");
    {
        let Some(_mounted) = Tmpfs::mount(&disk, "300k") else { return };
        let ran = load(&references[0], &disk.join("cache")).exits(6);
        assert!(ran.err.contains("bytes are needed") && ran.err.contains("--cache-dir"), "{ran:?}");
        let ran = run("vt-bundle", &["pull", &references[0], text(&disk.join("out"))]).exits(6);
        assert!(ran.err.contains("bytes are needed") && !disk.join("out").exists(), "{ran:?}");
    }
    // A disk that is full although it looked empty enough: a limit on the size of files, met in the middle of one.
    let cache = root.path().join("cache");
    let limited = |program: &str, args: &[&str]| {
        let plain = command(program, args);
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' XFSZ; ulimit -f 200; exec \"$0\" \"$@\""]);
        shell.arg(plain.get_program()).args(plain.get_args());
        finish(shell)
    };
    let args = ["--bundle", &references[0], "--cache-dir", text(&cache), "--device", "cpu", "--load-only"];
    let ran = limited("vt-run", &args).exits(6);
    assert!(ran.err.contains("make room"), "{ran:?}");
    load(&references[0], &cache).ok();
    let output = root.path().join("out");
    let ran = limited("vt-bundle", &["pull", &references[0], text(&output)]).exits(6);
    assert!(ran.err.contains("make room") && !output.exists(), "{ran:?}");
    run("vt-bundle", &["pull", &references[0], text(&output), "--quiet"]).ok();
    folders::assert_equal(&bundles[0], &output);

    let Some(mounted) = Tmpfs::mount(&disk, "20m") else { return };
    let cache = disk.join("cache");
    load(&references[0], &cache).ok();
    mounted.make_read_only();
    load(&references[0], &cache).ok();
    let ran = load(&references[1], &cache).exits(6);
    assert!(ran.err.contains("ead-only") && ran.err.contains("--cache-dir"), "{ran:?}");
}
