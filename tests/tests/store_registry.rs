//! Bundles in a real registry: pushed, listed, copied by other programs, pulled, served, signed.

use std::path::{Path, PathBuf};
use std::process::Command;

use vt_tests::process::{Ran, command, finish, run};
use vt_tests::servers::{PASSWORD, Registry, USER, is_installed};
use vt_tests::{fixtures, folders};

fn bundle(root: &Path, name: &str) -> PathBuf {
    fixtures::make_tiny(root, &[name]);
    let output = root.join("bundle");
    convert(&root.join(name), &output);
    output
}

fn convert(input: &Path, output: &Path) {
    let mut converting = command("vt-convert", &[input, output]);
    converting.arg("--quiet");
    finish(converting).ok();
}

fn vt_bundle(args: &[&str]) -> Ran {
    run("vt-bundle", args)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

#[test]
fn there_and_back() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    let bundle = bundle(root.path(), "nvfp4");
    let reference = registry.reference("team/tiny:v1");
    let pushed = vt_bundle(&["push", text(&bundle), &reference, "--json"]).ok().json();
    assert_eq!(pushed["uploaded_files"], pushed["files"]);
    let (before, digest) = (registry.uploads(), pushed["digest"].as_str().expect("digest").to_owned());
    let again = vt_bundle(&["push", text(&bundle), &reference, "--json"]).ok().json();
    assert_eq!((again["uploaded_files"].as_u64(), again["digest"].as_str()), (Some(0), Some(digest.as_str())));
    assert_eq!(registry.uploads(), before, "pushing twice uploads nothing");

    let id = vt_bundle(&["id", text(&bundle)]).ok().out.trim().to_owned();
    let listed = vt_bundle(&["list", &registry.reference("team/tiny"), "--json"]).ok().json();
    assert_eq!((listed[0]["tag"].as_str(), listed[0]["id"].as_str()), (Some("v1"), Some(id.as_str())));
    for (n, pin) in ["", &format!("@blake3:{id}"), &format!("@{digest}")].iter().enumerate() {
        let output = root.path().join(format!("out{n}"));
        vt_bundle(&["pull", &format!("{reference}{pin}"), text(&output), "--quiet"]).ok();
        folders::assert_equal(&bundle, &output);
        vt_bundle(&["verify", text(&output), "--quiet"]).ok();
    }
    let wrong = "0".repeat(64);
    for pin in [format!("@blake3:{wrong}"), format!("@sha256:{wrong}")] {
        let output = root.path().join("never");
        let ran = vt_bundle(&["pull", &format!("{reference}{pin}"), text(&output)]);
        assert!([Some(3), Some(4)].contains(&ran.code), "{ran:?}");
        assert!(!output.exists());
    }
    let ran = vt_bundle(&["pull", &registry.reference("team/tiny:v2"), text(&root.path().join("never"))]).exits(3);
    assert!(ran.err.contains("no tag v2") && ran.err.contains("vt-bundle list"), "{ran:?}");
    let ran = vt_bundle(&["pull", &reference, text(&bundle)]).exits(2);
    assert!(ran.err.contains("exists"), "{ran:?}");

    // What vt-run answers is what it answers from the folder.
    let cache = root.path().join("cache");
    let answer = |bundle: &str| {
        let args = ["--bundle", bundle, "--prompt-ids", "1,2,3", "--max-tokens", "8", "--json", "--log", "warn"];
        let mut answering = command("vt-run", &args);
        answering.args(["--device", "cpu", "--cache-dir"]).arg(&cache);
        finish(answering).ok().json()["token_ids"].clone()
    };
    assert_eq!(answer(&reference), answer(text(&bundle)));
}

#[test]
fn other_programs_read_and_copy_it() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    if !is_installed("skopeo") {
        eprintln!("SKIPPED: skopeo is not installed (Debian package skopeo)");
        return;
    }
    let bundle = bundle(root.path(), "nvfp4");
    let address = |name: &str| format!("docker://127.0.0.1:{}/{name}", registry.port);
    let skopeo = |args: &[&str]| {
        let mut command = Command::new("skopeo");
        command.args(args);
        finish(command).ok()
    };
    vt_bundle(&["push", text(&bundle), &registry.reference("tiny:v1"), "--quiet"]).ok();
    let raw = skopeo(&["inspect", "--raw", "--tls-verify=false", &address("tiny:v1")]).json();
    assert_eq!(raw["artifactType"], "application/vnd.cncf.model.manifest.v1+json");
    assert_eq!(raw["config"]["mediaType"], "application/vnd.cncf.model.config.v1+json");
    let id = vt_bundle(&["id", text(&bundle)]).ok().out.trim().to_owned();
    assert_eq!(
        (&raw["annotations"]["vt.bundle.id"], &raw["annotations"]["vt.bundle.format-version"]),
        (&id.into(), &"1".into())
    );
    let layers = raw["layers"].as_array().expect("layers");
    assert_eq!(layers.len(), folders::files(&bundle).len());
    for layer in layers {
        let path = layer["annotations"]["org.cncf.model.filepath"].as_str().expect("path");
        assert_eq!(layer["annotations"]["org.opencontainers.image.title"], path);
        assert_eq!(layer["size"].as_u64(), Some(bundle.join(path).metadata().expect("there").len()));
        let kind = layer["mediaType"].as_str().expect("type");
        assert_eq!(
            kind == "application/vnd.cncf.model.weight.v1.raw",
            !path.contains("token") && kind.contains("weight.v1")
        );
    }
    // To a layout, and from there to another repository: both still pull.
    let layout = root.path().join("layout");
    let layout_of = |tag: &str| format!("oci:{}:{tag}", layout.display());
    skopeo(&["copy", "--src-tls-verify=false", &address("tiny:v1"), &layout_of("v1")]);
    skopeo(&["copy", "--dest-tls-verify=false", &layout_of("v1"), &address("back:v1")]);
    let references = [format!("oci-layout:{}:v1", layout.display()), registry.reference("back:v1")];
    for (n, reference) in references.iter().enumerate() {
        let output = root.path().join(format!("out{n}"));
        vt_bundle(&["pull", reference, text(&output), "--quiet"]).ok();
        folders::assert_equal(&bundle, &output);
    }
    // A layout that we write is one that skopeo reads.
    let ours = root.path().join("ours");
    vt_bundle(&["push", text(&bundle), &format!("oci-layout:{}:v1", ours.display()), "--quiet"]).ok();
    skopeo(&["copy", "--dest-tls-verify=false", &format!("oci:{}:v1", ours.display()), &address("ours:v1")]);
    let output = root.path().join("out-ours");
    vt_bundle(&["pull", &registry.reference("ours:v1"), text(&output), "--quiet"]).ok();
    folders::assert_equal(&bundle, &output);
}

#[test]
fn shared_files_are_sent_once() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    let first = bundle(root.path(), "nvfp4");
    let changed = root.path().join("nvfp4/generation_config.json");
    std::fs::write(&changed, r#"{"temperature": 0.25}"#).expect("written");
    let second = root.path().join("second");
    convert(&root.path().join("nvfp4"), &second);
    let (a, b) = (folders::files(&first), folders::files(&second));
    let new = b.values().filter(|bytes| !a.values().any(|other| other == *bytes)).count();
    assert!(new > 1 && new < b.len(), "{new} of {} files are new", b.len());
    vt_bundle(&["push", text(&first), &registry.reference("tiny:v1"), "--quiet"]).ok();
    let before = registry.uploads();
    let pushed = vt_bundle(&["push", text(&second), &registry.reference("tiny:v2"), "--json"]).ok().json();
    assert_eq!(pushed["uploaded_files"].as_u64(), Some(new as u64));
    // The configuration of the OCI manifest is the one blob that is no file.
    assert_eq!(registry.uploads() - before, new + 1);

    // Between repositories of one registry nothing moves at all.
    let before = registry.requests(&["\"PATCH "]);
    vt_bundle(&["copy", &registry.reference("tiny:v2"), &registry.reference("other/name:v2"), "--quiet"]).ok();
    assert_eq!(registry.requests(&["\"PATCH "]) - before, 1, "only the new configuration is sent");
    let output = root.path().join("out");
    vt_bundle(&["pull", &registry.reference("other/name:v2"), text(&output), "--quiet"]).ok();
    folders::assert_equal(&second, &output);
}

#[test]
fn credentials_are_used_and_never_shown() {
    let root = tempfile::tempdir().expect("temporary folder");
    let Some(registry) = Registry::start(&root.path().join("registry"), true) else { return };
    let bundle = bundle(root.path(), "nvfp4");
    let reference = registry.reference("tiny:v1");
    let host = format!("127.0.0.1:{}", registry.port);
    let docker = root.path().join("docker");
    let helpers = root.path().join("helpers");
    for folder in [&docker, &helpers] {
        std::fs::create_dir(folder).expect("folder");
    }
    let attempt = |config: &str, program: &str, args: &[&str]| {
        std::fs::write(docker.join("config.json"), config).expect("written");
        let mut command = command(program, args);
        command.env("DOCKER_CONFIG", &docker);
        command.env("PATH", format!("{}:{}", helpers.display(), std::env::var("PATH").unwrap_or_default()));
        let ran = finish(command);
        for shown in [&ran.out, &ran.err] {
            // In the clear, or as an `Authorization` header would have it.
            for secret in [PASSWORD, "YWxpY2U6aHVudGVyMnNlY3JldA=="] {
                assert!(!shown.contains(secret), "the password is shown: {shown}");
            }
        }
        ran
    };
    let push = ["push", text(&bundle), &reference];
    let wrong = format!(r#"{{"auths":{{"{host}":{{"auth":"YWxpY2U6d3Jvbmc="}}}}}}"#);
    for config in ["{}", &wrong] {
        let ran = attempt(config, "vt-bundle", &push).exits(6);
        assert!(ran.err.contains("docker login") && ran.err.contains("config.json"), "{ran:?}");
    }
    let ran = attempt(r#"{"credsStore":"vt-not-there"}"#, "vt-bundle", &push).exits(6);
    assert!(ran.err.contains("docker-credential-vt-not-there"), "{ran:?}");
    let right = format!(r#"{{"auths":{{"{host}":{{"auth":"YWxpY2U6aHVudGVyMnNlY3JldA=="}}}}}}"#);
    attempt(&right, "vt-bundle", &push).ok();
    let helper = helpers.join("docker-credential-vttest");
    let script = format!(
        "#!/bin/sh\nread host\n[ \"$host\" = {host} ] || exit 1\necho '{{\"Username\":\"{USER}\",\"Secret\":\"{PASSWORD}\"}}'\n"
    );
    std::fs::write(&helper, script).expect("written");
    std::fs::set_permissions(&helper, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("made executable");
    let helped = format!(r#"{{"credHelpers":{{"{host}":"vttest"}}}}"#);
    let output = root.path().join("out");
    attempt(&helped, "vt-bundle", &["pull", &reference, text(&output)]).ok();
    folders::assert_equal(&bundle, &output);
    // The loudest log there is.
    let cache = root.path().join("cache");
    let args =
        ["--bundle", &reference, "--cache-dir", text(&cache), "--device", "cpu", "--load-only", "--log", "trace"];
    attempt(&right, "vt-run", &args).ok();
    let manifest = vt_bundle(&["list", &reference]).exits(6);
    assert!(manifest.err.contains("docker login"), "{manifest:?}");
}

#[test]
fn signatures_travel_with_the_bundle() {
    let root = tempfile::tempdir().expect("temporary folder");
    if !is_installed("openssl") {
        eprintln!("SKIPPED: openssl is not installed");
        return;
    }
    let Some(registry) = Registry::start(&root.path().join("registry"), false) else { return };
    let bundle = bundle(root.path(), "nvfp4");
    let path = |name: &str| root.path().join(name).to_str().expect("UTF-8").to_owned();
    let openssl = |args: &[&str]| {
        let mut command = Command::new("openssl");
        command.args(args);
        finish(command).ok();
    };
    for name in ["ours", "theirs"] {
        let (private, public) = (path(&format!("{name}.pem")), path(&format!("{name}.pub")));
        openssl(&["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", &private]);
        openssl(&["pkey", "-in", &private, "-pubout", "-out", &public]);
    }
    let verify = |signature: &str, key: &str| {
        vt_bundle(&["verify", text(&bundle), "--signature", signature, "--key", &path(key), "--json", "--quiet"])
    };
    let reference = registry.reference("tiny:v1");
    vt_bundle(&["push", text(&bundle), &reference, "--quiet"]).ok();
    let ran = verify(&reference, "ours.pub").exits(4);
    assert!(ran.out.contains("there is none"), "{ran:?}");
    vt_bundle(&["sign", text(&bundle), "--key", &path("ours.pem"), "--attach", &reference, "--quiet"]).ok();
    assert!(verify(&reference, "ours.pub").ok().json()["signed_by"].is_string());
    let ran = verify(&reference, "theirs.pub").exits(4);
    assert!(ran.out.contains("by the key"), "{ran:?}");
    // Beside other signatures, and in a layout and an object store on disk.
    vt_bundle(&["sign", &reference, "--key", &path("theirs.pem"), "--quiet"]).ok();
    for key in ["ours.pub", "theirs.pub"] {
        verify(&reference, key).ok();
    }
    for other in [format!("oci-layout:{}:v1", path("layout")), format!("file://{}/tiny:v1", path("store"))] {
        vt_bundle(&["copy", &reference, &other, "--quiet"]).ok();
        vt_bundle(&["sign", &other, "--key", &path("ours.pem"), "--quiet"]).ok();
        verify(&other, "ours.pub").ok();
        // One that is damaged hides no other.
        let signatures = || {
            let files = folders::files(root.path()).into_iter();
            let stored = files.filter(|(name, _)| name.starts_with("layout/blobs/") || name.contains("/signatures/"));
            stored.filter(|(_, bytes)| bytes.windows(12).any(|w| w == b"dsseEnvelope"))
        };
        let mut before: Vec<String> = signatures().map(|(name, _)| name).collect();
        before.retain(|name| name.starts_with("layout/") == other.starts_with("oci-layout:"));
        vt_bundle(&["sign", &other, "--key", &path("theirs.pem"), "--quiet"]).ok();
        for (name, mut bytes) in signatures().filter(|(name, _)| before.contains(name)) {
            bytes[20] ^= 1;
            std::fs::write(root.path().join(name), bytes).expect("written");
        }
        let ran = verify(&other, "theirs.pub").ok();
        assert_eq!(
            (ran.err.matches("warning").count(), ran.err.contains("signature")),
            (before.len(), true),
            "{ran:?}"
        );
        let ran = verify(&other, "ours.pub").exits(4);
        assert!(ran.err.contains("digest is"), "{ran:?}");
    }
    // As a file; of another bundle it is refused, by `verify` and as a referrer.
    let file = path("bundle.sig.json");
    vt_bundle(&["sign", text(&bundle), "--key", &path("ours.pem"), "--signature", &file, "--quiet"]).ok();
    verify(&file, "ours.pub").ok();
    let other = root.path().join("other");
    fixtures::make_tiny(root.path(), &["fp8"]);
    convert(&root.path().join("fp8"), &other);
    let ran =
        vt_bundle(&["verify", text(&other), "--signature", &file, "--key", &path("ours.pub"), "--quiet"]).exits(4);
    assert!(ran.err.contains("signature"), "{ran:?}");
    let ran = vt_bundle(&["sign", text(&other), "--key", &path("ours.pem"), "--attach", &reference]).exits(4);
    assert!(ran.err.contains("of another bundle"), "{ran:?}");

    let python = std::env::var_os("VT_TEST_PYTHON").map(PathBuf::from);
    let python = python.unwrap_or_else(|| fixtures::repository().join(".build/venv/bin/python"));
    let there = Command::new(&python).args(["-c", "import model_signing"]).output();
    if !there.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: {} has no model_signing; ./test.sh installs it", python.display());
        return;
    }
    let theirs = |verb: &str, signature: &str, flag: &str, key: &str| {
        let mut command = Command::new(&python);
        command.args(["-m", "model_signing", verb, "key", text(&bundle), "--signature", signature, flag, &path(key)]);
        finish(command)
    };
    theirs("verify", &file, "--public_key", "ours.pub").ok();
    assert_ne!(theirs("verify", &file, "--public_key", "theirs.pub").code, Some(0));
    let signed = path("signed-by-them.json");
    theirs("sign", &signed, "--private_key", "theirs.pem").ok();
    verify(&signed, "theirs.pub").ok();
}
