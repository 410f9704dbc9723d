//! Bundles in object stores: an S3 server, and a folder of bundles.

use std::path::Path;

use vt_tests::process::{Ran, command, finish, run};
use vt_tests::servers::{PASSWORD, Registry, S3};
use vt_tests::{fixtures, folders};

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn bundle(root: &Path, name: &str, output: &str) -> std::path::PathBuf {
    fixtures::make_tiny(root, &[name]);
    let output = root.join(output);
    run("vt-convert", &[text(&root.join(name)), text(&output), "--quiet"]).ok();
    output
}

#[test]
fn there_and_back_through_s3() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(server) = S3::start(root.path()) else { return };
    let with = |program: &str, args: &[&str]| -> Ran {
        let mut command = command(program, args);
        command.envs(server.environment());
        let ran = finish(command);
        assert!(!ran.out.contains(PASSWORD) && !ran.err.contains(PASSWORD), "{ran:?}");
        ran
    };
    // Large enough for an upload in parts.
    let input = root.path().join("moe");
    fixtures::make_moe(&input, 0.03);
    let bundle = root.path().join("bundle");
    run("vt-convert", &[text(&input), text(&bundle), "--quiet"]).ok();
    let reference = "s3://models/team/moe:v1";
    let pushed = with("vt-bundle", &["push", text(&bundle), reference, "--json"]).ok().json();
    // `bundle.id` follows from the manifest and is not stored.
    assert_eq!(pushed["uploaded_files"].as_u64().map(|n| n + 1), pushed["files"].as_u64());
    let again = with("vt-bundle", &["push", text(&bundle), reference, "--json"]).ok().json();
    assert_eq!(again["uploaded_files"], 0);
    let output = root.path().join("out");
    with("vt-bundle", &["pull", reference, text(&output), "--quiet"]).ok();
    folders::assert_equal(&bundle, &output);
    let cache = root.path().join("cache");
    let args = ["--bundle", reference, "--cache-dir", text(&cache), "--device", "cpu", "--prompt-ids", "1,2,3"];
    with("vt-run", &[&args[..], &["--max-tokens", "4", "--json", "--log", "debug"]].concat()).ok();

    // Tags move, and the index keeps the others.
    let tiny = self::bundle(root.path(), "nvfp4", "tiny");
    with("vt-bundle", &["push", text(&tiny), "s3://models/team/moe:v2", "--quiet"]).ok();
    let listed = with("vt-bundle", &["list", "s3://models/team/moe", "--json"]).ok().json();
    let tags: Vec<&str> = listed.as_array().expect("list").iter().filter_map(|v| v["tag"].as_str()).collect();
    assert_eq!(tags, ["v1", "v2"]);
    // From store to store, and into the other kind of store where there is one.
    with("vt-bundle", &["copy", "s3://models/team/moe:v2", "s3://models/elsewhere/tiny:v1", "--quiet"]).ok();
    if let Some(registry) = Registry::start(&root.path().join("registry"), false) {
        let there = registry.reference("tiny:v1");
        with("vt-bundle", &["copy", "s3://models/elsewhere/tiny:v1", &there, "--quiet"]).ok();
        let output = root.path().join("from-registry");
        with("vt-bundle", &["pull", &there, text(&output), "--quiet"]).ok();
        folders::assert_equal(&tiny, &output);
        with("vt-bundle", &["copy", &there, "s3://models/again/tiny:v1", "--quiet"]).ok();
    }
    let ran = with("vt-bundle", &["pull", "s3://no-such-bucket/x:v1", text(&root.path().join("no"))]);
    assert!([Some(3), Some(6)].contains(&ran.code), "{ran:?}");
}

#[test]
fn eight_writers_of_one_index_lose_nothing() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle(root.path(), "nvfp4", "bundle");
    let server = S3::start(root.path());
    let mut stores = vec![format!("file://{}/store/tiny", root.path().display())];
    stores.extend(server.as_ref().map(|_| "s3://models/tiny".to_owned()));
    for store in stores {
        let children: Vec<_> = (0..8)
            .map(|n| {
                let mut command = command("vt-bundle", &["push", text(&bundle), &format!("{store}:v{n}"), "--quiet"]);
                command.envs(server.iter().flat_map(S3::environment));
                command.stderr(std::process::Stdio::piped()).spawn().expect("started")
            })
            .collect();
        for child in children {
            let ended = child.wait_with_output().expect("ended");
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        }
        let mut list = command("vt-bundle", &["list", &store, "--json"]);
        list.envs(server.iter().flat_map(S3::environment));
        assert_eq!(finish(list).ok().json().as_array().map(Vec::len), Some(8), "{store}");
    }
}

#[test]
fn a_folder_of_bundles() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle(root.path(), "nvfp4", "bundle");
    let store = root.path().join("store");
    let reference = format!("file://{}/tiny:v1", store.display());
    run("vt-bundle", &["push", text(&bundle), &reference, "--quiet"]).ok();
    let output = root.path().join("out");
    run("vt-bundle", &["pull", &reference, text(&output), "--quiet"]).ok();
    folders::assert_equal(&bundle, &output);
    let id = run("vt-bundle", &["id", text(&bundle)]).ok().out.trim().to_owned();
    // A bundle is found by its id, without a tag.
    let by_id = root.path().join("by-id");
    let pinned = format!("file://{}/tiny@blake3:{id}", store.display());
    run("vt-bundle", &["pull", &pinned, text(&by_id), "--quiet"]).ok();
    // A damaged blob is named and nothing of it is kept.
    let segment = run("vt-bundle", &["list", &reference, "--json"]).ok().json();
    let files = segment["files"].as_array().expect("files");
    let image =
        files.iter().find(|f| f["file"].as_str().is_some_and(|n| n.starts_with("segments/"))).expect("a segment");
    let blob = store.join("blobs/blake3").join(image["blake3"].as_str().expect("digest"));
    let mut bytes = std::fs::read(&blob).expect("read");
    bytes[1000] ^= 1;
    std::fs::write(&blob, &bytes).expect("written");
    let never = root.path().join("never");
    let ran = run("vt-bundle", &["pull", &reference, text(&never)]).exits(4);
    assert!(ran.err.contains("image-00000.bin") && !never.exists(), "{ran:?}");
    std::fs::write(&blob, &bytes[..bytes.len() - 1]).expect("written");
    let ran = run("vt-bundle", &["pull", &reference, text(&never)]).exits(4);
    assert!(ran.err.contains("truncated") && !never.exists(), "{ran:?}");
    // A push finds a blob of another size and mends it.
    run("vt-bundle", &["push", text(&bundle), &reference, "--quiet"]).ok();
    run("vt-bundle", &["pull", &reference, text(&never), "--quiet"]).ok();
    folders::assert_equal(&bundle, &never);
    // A damaged bundle is not made known.
    let image = bundle.join("segments/image-00000.bin");
    let mut bytes = std::fs::read(&image).expect("read");
    bytes[77] ^= 1;
    std::fs::write(&image, bytes).expect("written");
    for target in [
        format!("file://{}/new/tiny:v1", root.path().display()),
        format!("oci-layout:{}/lay:v1", root.path().display()),
    ] {
        let ran = run("vt-bundle", &["push", text(&bundle), &target]).exits(4);
        assert!(ran.err.contains("image-00000.bin"), "{ran:?}");
        run("vt-bundle", &["list", &target]).exits(3);
    }
}

#[test]
fn files_may_be_called_as_they_like() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle(root.path(), "nvfp4", "bundle");
    let path = bundle.join("manifest.json");
    let mut manifest = std::fs::read_to_string(&path).expect("read");
    // Names that programs give to unfinished work, and one that would colour a terminal.
    let names = ["p", "p.part", "\u{1b}[31mred", ".vt-pull"];
    let assets: Vec<String> = folders::files(&bundle).into_keys().filter(|name| name.starts_with("assets/")).collect();
    assert!(assets.len() >= names.len());
    for (asset, name) in assets.iter().zip(names) {
        std::fs::rename(bundle.join(asset), bundle.join(name)).expect("renamed");
        let quoted = |name: &str| serde_json::Value::from(name).to_string();
        manifest = manifest.replace(&quoted(asset), &quoted(name));
    }
    std::fs::write(&path, &manifest).expect("written");
    std::fs::write(bundle.join("bundle.id"), format!("{}\n", blake3::hash(manifest.as_bytes()))).expect("written");
    let (reference, output) = (format!("file://{}/store/odd:v1", root.path().display()), root.path().join("out"));
    run("vt-bundle", &["push", text(&bundle), &reference, "--quiet"]).ok();
    run("vt-bundle", &["pull", &reference, text(&output), "--quiet", "--jobs", "8"]).ok();
    folders::assert_equal(&bundle, &output);
    assert!(!root.path().join("out.partial").exists());
    let listed = run("vt-bundle", &["list", &reference]).ok();
    assert!(listed.out.contains("\\u001b[31mred") && !listed.out.contains('\u{1b}'), "{listed:?}");
    let json = run("vt-bundle", &["list", &reference, "--json"]).ok().json();
    assert!(json["files"].as_array().expect("files").iter().any(|f| f["file"] == names[2]), "{json}");
    std::fs::remove_file(bundle.join(names[2])).expect("removed");
    let ran = run("vt-bundle", &["push", text(&bundle), &reference, "--quiet"]);
    assert!(ran.code != Some(0) && !ran.err.contains('\u{1b}'), "{ran:?}");
}
