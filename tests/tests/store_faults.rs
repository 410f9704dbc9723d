//! Kills, lines that break, registries that lie: a clear error or a finished resume, and nothing wrong is ever there.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use vt_tests::process::{Numbers, Ran, command, run};
use vt_tests::servers::{BreakingLine, Registry};
use vt_tests::{fixtures, folders};

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn vt_bundle(args: &[&str]) -> Ran {
    run("vt-bundle", args)
}

fn start(args: &[&str]) -> Child {
    command("vt-bundle", args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("started")
}

/// A bundle of some tens of megabytes.
fn bundle(root: &Path, gib: f64) -> PathBuf {
    let (input, output) = (root.join("moe"), root.join("bundle"));
    fixtures::make_moe(&input, gib);
    run("vt-convert", &[text(&input), text(&output), "--quiet"]).ok();
    output
}

/// How often the tests kill; `VT_TEST_KILLS` says otherwise.
fn kills() -> u64 {
    std::env::var("VT_TEST_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(20)
}

/// Runs to the end and gives the time.
fn timed(args: &[&str]) -> Duration {
    let began = Instant::now();
    vt_bundle(args).ok();
    began.elapsed()
}

/// Kills a command at a random moment within `whole`; whether it was still running.
fn kill(args: &[&str], whole: Duration, numbers: &mut Numbers) -> bool {
    let mut child = start(args);
    std::thread::sleep(Duration::from_micros(numbers.below(whole.as_micros() as u64)));
    let running = child.try_wait().expect("asked").is_none();
    child.kill().expect("killed");
    child.wait().expect("ended");
    running
}

#[test]
fn killed_pushes_are_finished_by_the_next() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    let bundle = bundle(root.path(), 0.06);
    let whole = timed(&["push", text(&bundle), &registry.reference("whole:v1"), "--quiet"]);
    let mut numbers = Numbers(3);
    let mut running = 0;
    for n in 0..kills() {
        // Another repository each time: blobs of one are not seen in the other.
        let reference = registry.reference(&format!("killed/{n}:v1"));
        let push = ["push", text(&bundle), &reference, "--quiet"];
        running += u64::from(kill(&push, whole, &mut numbers));
        let output = root.path().join("out");
        let early = vt_bundle(&["pull", &reference, text(&output), "--quiet"]);
        // Either the tag is not there, or everything is.
        match early.code {
            Some(0) => folders::assert_equal(&bundle, &output),
            code => assert_eq!(code, Some(3), "kill {n}: {early:?}"),
        }
        let _ = std::fs::remove_dir_all(&output);
        vt_bundle(&push).ok();
        vt_bundle(&["pull", &reference, text(&output), "--quiet"]).ok();
        folders::assert_equal(&bundle, &output);
        std::fs::remove_dir_all(&output).expect("removed");
    }
    eprintln!("{running} of {} pushes were killed at work", kills());
    assert!(running > 0);
}

#[test]
fn killed_pulls_are_continued() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    let bundle = bundle(root.path(), 0.06);
    let reference = registry.reference("moe:v1");
    vt_bundle(&["push", text(&bundle), &reference, "--quiet"]).ok();
    let output = root.path().join("out");
    let pull = ["pull", &reference, text(&output), "--quiet"];
    let whole = timed(&pull);
    std::fs::remove_dir_all(&output).expect("removed");
    let mut numbers = Numbers(4);
    let mut running = 0;
    for n in 0..kills() {
        running += u64::from(kill(&pull, whole, &mut numbers));
        if !output.exists() {
            vt_bundle(&pull).ok();
        }
        folders::assert_equal(&bundle, &output);
        // Killed between the two last steps, a pull leaves a folder without data beside the whole bundle.
        let left = root.path().join("out.partial");
        if left.exists() {
            assert!(folders::files(&left).keys().all(|file| file == ".vt-pull"), "kill {n}");
            std::fs::remove_dir_all(&left).expect("removed");
        }
        std::fs::remove_dir_all(&output).expect("removed");
    }
    eprintln!("{running} of {} pulls were killed at work", kills());
    assert!(running > 0);
    assert!(registry.requests(&["\"GET ", "/blobs/", " 206 "]) > 0, "something was resumed by range");

    // The cache, too: what appears is whole.
    let cache = root.path().join("cache");
    let id = vt_bundle(&["id", text(&bundle)]).ok().out.trim().to_owned();
    let cached = cache.join("bundles").join(&id);
    let load = ["--bundle", &reference, "--cache-dir", text(&cache), "--device", "cpu", "--load-only"];
    for _ in 0..kills() {
        let mut child = command("vt-run", &load).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("started");
        std::thread::sleep(Duration::from_micros(numbers.below(whole.as_micros() as u64)));
        child.kill().expect("killed");
        child.wait().expect("ended");
        if cached.exists() {
            folders::assert_equal(&bundle, &cached);
            std::fs::remove_dir_all(&cache).expect("removed");
        }
    }
    run("vt-run", &load).ok();
    folders::assert_equal(&bundle, &cached);
}

#[test]
fn lines_that_break_are_picked_up() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    let bundle = bundle(root.path(), 0.02);
    // This registry forgets an upload whose line broke, so that an upload needs a line that holds for as long as it takes.
    let line = BreakingLine::to(registry.port, 120 << 20);
    let mut pushes = 0;
    while line.broken() == 0 {
        assert!(pushes < 20, "the line never broke while pushing");
        let reference = format!("oci://127.0.0.1:{}/broken/{pushes}:v1", line.port);
        vt_bundle(&["push", text(&bundle), &reference]).ok();
        pushes += 1;
    }
    let line = BreakingLine::to(registry.port, 4 << 20);
    let reference = format!("oci://127.0.0.1:{}/broken/{}:v1", line.port, pushes - 1);
    let output = root.path().join("out");
    let ran = vt_bundle(&["pull", &reference, text(&output)]).ok();
    assert!(line.broken() > 0 && ran.err.contains("trying again"), "{ran:?}");
    folders::assert_equal(&bundle, &output);
    assert!(registry.requests(&["\"GET ", "/blobs/", " 206 "]) > 0, "the download was resumed by range");
}

#[test]
fn wrong_blobs_are_refused() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    fixtures::make_tiny(root.path(), &["nvfp4"]);
    let bundle = root.path().join("bundle");
    run("vt-convert", &[text(&root.path().join("nvfp4")), text(&bundle), "--quiet"]).ok();
    let reference = registry.reference("tiny:v1");
    let digest = vt_bundle(&["push", text(&bundle), &reference, "--json"]).ok().json()["digest"].clone();
    let manifest = registry.blob(digest.as_str().and_then(|d| d.strip_prefix("sha256:")).expect("digest"));
    let image: serde_json::Value = serde_json::from_slice(&std::fs::read(&manifest).expect("read")).expect("JSON");
    let blob = |path: &str| {
        let layers = image["layers"].as_array().expect("layers");
        let layer = layers.iter().find(|l| l["annotations"]["org.cncf.model.filepath"] == path).expect("layer");
        registry.blob(layer["digest"].as_str().and_then(|d| d.strip_prefix("sha256:")).expect("digest"))
    };
    let output = root.path().join("out");
    let cache = root.path().join("cache");
    let id = vt_bundle(&["id", text(&bundle)]).ok().out.trim().to_owned();
    let load = ["--bundle", &reference, "--cache-dir", text(&cache), "--device", "cpu", "--load-only"];
    // The registry serves these as if they were what was pushed.
    for (path, named) in [("segments/image-00000.bin", "image-00000.bin"), ("manifest.json", "manifest.json")] {
        let file = blob(path);
        let right = std::fs::read(&file).expect("read");
        let mut lie = right.clone();
        lie[right.len() / 2] ^= 1;
        let sha256 = file.parent().and_then(Path::file_name).expect("a digest").to_str().expect("UTF-8").to_owned();
        // What is cut off shows as a line that breaks at the same place again and again.
        for (wrong, codes) in [(&lie[..], &[4][..]), (&right[..right.len() / 2], &[4, 6])] {
            std::fs::write(&file, wrong).expect("written");
            for ran in [vt_bundle(&["pull", &reference, text(&output), "--quiet"]), run("vt-run", &load)] {
                assert!(ran.code.is_some_and(|code| codes.contains(&code)), "{ran:?}");
                assert!(ran.err.contains(named) || ran.err.contains(&sha256), "{ran:?}");
            }
            assert!(!output.exists());
            assert!(!cache.join("bundles").join(&id).exists());
        }
        std::fs::write(&file, right).expect("written");
    }
    // A manifest that is not the one of the tag's digest.
    let right = std::fs::read(&manifest).expect("read");
    let changed = String::from_utf8(right.clone()).expect("UTF-8").replace("assets/leaves.bin", "assets/leaves.bim");
    std::fs::write(&manifest, changed).expect("written");
    let pinned = format!("{reference}@{}", digest.as_str().expect("digest"));
    let ran = vt_bundle(&["pull", &pinned, text(&output), "--quiet"]);
    assert!(matches!(ran.code, Some(3 | 4 | 6)) && !output.exists(), "{ran:?}");
    std::fs::write(&manifest, right).expect("written");
    vt_bundle(&["pull", &pinned, text(&output), "--quiet"]).ok();
    folders::assert_equal(&bundle, &output);
    run("vt-run", &load).ok();
}

#[test]
fn damage_in_a_store_is_mended_by_a_push_that_looks() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["nvfp4"]);
    let bundle = root.path().join("bundle");
    run("vt-convert", &[text(&root.path().join("nvfp4")), text(&bundle), "--quiet"]).ok();
    let output = root.path().join("out");
    let layout = format!("oci-layout:{}:v1", root.path().join("layout").display());
    let objects = format!("file://{}/objects/tiny:v1", root.path().display());
    let copied = format!("oci-layout:{}:v1", root.path().join("copied").display());
    vt_bundle(&["push", text(&bundle), &layout, "--quiet"]).ok();
    let whole = std::fs::read(bundle.join("segments/image-00000.bin")).expect("read");
    let stored = |dir: &str| {
        let files = folders::files(&root.path().join(dir));
        let name = files.into_iter().find(|(_, bytes)| *bytes == whole).expect("the segment").0;
        root.path().join(dir).join(name)
    };
    for (reference, dir, again) in [
        (&layout, "layout", ["push", text(&bundle)]),
        (&objects, "objects", ["push", text(&bundle)]),
        (&copied, "copied", ["copy", &layout]),
    ] {
        vt_bundle(&["push", text(&bundle), reference, "--quiet"]).ok();
        let blob = stored(dir);
        let mut wrong = whole.clone();
        wrong[whole.len() / 2] ^= 1;
        std::fs::write(&blob, &wrong).expect("written");
        let ran = vt_bundle(&["pull", reference, text(&output), "--quiet"]).exits(4);
        assert!(ran.err.contains("--verify-existing"), "{ran:?}");
        // A push that does not look takes it for what its name says.
        let push = [again[0], again[1], reference, "--json"];
        assert_eq!(vt_bundle(&push).ok().json()["uploaded_files"], 0);
        let mended = vt_bundle(&[&push[..], &["--verify-existing"]].concat()).ok().json();
        assert_eq!(mended["uploaded_files"], 1, "{mended}");
        vt_bundle(&["pull", reference, text(&output), "--quiet"]).ok();
        folders::assert_equal(&bundle, &output);
        std::fs::remove_dir_all(&output).expect("removed");
        let nothing = vt_bundle(&[&push[..], &["--verify-existing"]].concat()).ok().json();
        assert_eq!(nothing["uploaded_files"], 0, "{nothing}");
    }
    // A registry may keep what it has; then the push says so.
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    let reference = registry.reference("tiny:v1");
    vt_bundle(&["push", text(&bundle), &reference, "--quiet"]).ok();
    let blob = stored("registry");
    for wrong in [whole.iter().map(|b| b ^ 1).collect(), whole[1..].to_vec()] {
        std::fs::write(&blob, &wrong).expect("written");
        let ran = vt_bundle(&["push", text(&bundle), &reference, "--verify-existing", "--json"]);
        match ran.code {
            Some(0) => {
                vt_bundle(&["pull", &reference, text(&output), "--quiet"]).ok();
                std::fs::remove_dir_all(&output).expect("removed");
            }
            _ => {
                let sha256 = blob.parent().and_then(Path::file_name).and_then(|n| n.to_str()).expect("a digest");
                assert!(
                    ran.code == Some(4) && ran.err.contains(sha256) && ran.err.contains("removed there"),
                    "{ran:?}"
                );
            }
        }
    }
}

#[test]
fn what_cannot_be_reached_says_what_to_do() {
    let root = tempfile::tempdir().expect("temporary folder");
    let output = root.path().join("out");
    let began = Instant::now();
    for reference in ["oci://no-such-host.invalid/x:v1", "oci://127.0.0.1:1/x:v1"] {
        let ran = vt_bundle(&["pull", reference, text(&output), "--quiet"]).exits(6);
        assert!(ran.err.contains("cannot be reached") && ran.err.contains("check the name"), "{ran:?}");
    }
    let mut denied = command("vt-bundle", &["pull", "s3://bucket/x:v1", text(&output), "--quiet"]);
    for (key, _) in std::env::vars_os().filter(|(key, _)| key.to_string_lossy().starts_with("AWS_")) {
        denied.env_remove(key);
    }
    denied
        .env("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        .env("AWS_ACCESS_KEY_ID", "a")
        .env("AWS_SECRET_ACCESS_KEY", "b");
    let ran = vt_tests::process::finish(denied).exits(6);
    assert!(ran.err.contains("cannot be reached"), "{ran:?}");
    assert!(began.elapsed() < Duration::from_secs(120), "it took {:?}", began.elapsed());
    for reference in [
        "oci://host",
        "http://host/x",
        "oci://host/x@sha256:1",
        "s3://",
        "oci://user:hunter2@host/x:v1",
        "oci://ho st/x:v1",
        "oci://host:99999/x:v1",
        "oci://host/x-:v1",
    ] {
        let ran = vt_bundle(&["pull", reference, text(&output)]).exits(2);
        assert!(!ran.err.contains("hunter2"), "{ran:?}");
    }
    // What is in the way stays.
    let partial = root.path().join("out.partial");
    std::fs::create_dir(&partial).expect("folder");
    std::fs::write(partial.join("mine"), "mine").expect("written");
    fixtures::make_tiny(root.path(), &["nvfp4"]);
    let bundle = root.path().join("bundle");
    run("vt-convert", &[text(&root.path().join("nvfp4")), text(&bundle), "--quiet"]).ok();
    let reference = format!("oci-layout:{}:v1", root.path().join("layout").display());
    vt_bundle(&["push", text(&bundle), &reference, "--quiet"]).ok();
    let ran = vt_bundle(&["pull", &reference, text(&output)]).exits(2);
    assert!(ran.err.contains("out.partial") && partial.join("mine").exists(), "{ran:?}");
}
