//! Interruptions, competitors and awkward places: the output is complete or not there, finished work is not done twice,
//! and nobody else's files are touched.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vt_tests::process::{Numbers, Ran, command, finish, run};
use vt_tests::{fixtures, folders};

fn convert(input: &Path, output: &Path, more: &[&str]) -> Ran {
    let mut command = command("vt-convert", &[input, output]);
    command.args(more);
    finish(command)
}

fn start(input: &Path, output: &Path) -> Child {
    let mut command = command("vt-convert", &[input, output]);
    command.args(["--threads", "1"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("started")
}

fn id(bundle: &Path) -> String {
    run("vt-bundle", &["id".as_ref(), bundle.as_os_str()]).ok().out
}

/// Records of one kind in the journal that an interrupted run left: tag, index (8 bytes), length (4), payload, check (8).
fn journalled(partial: &Path, tag: u8) -> u64 {
    let bytes = std::fs::read(partial.join("journal")).unwrap_or_default();
    let (mut at, mut found) = (0, 0);
    while let Some(head) = bytes.get(at..at + 13) {
        let len = u32::from_le_bytes(head[9..13].try_into().expect("four bytes")) as usize;
        at += 13 + len + 8;
        found += u64::from(at <= bytes.len() && head[0] == tag);
    }
    found
}

/// A checkpoint of a few hundred windows, its bundle, and how long that took.
fn moe(root: &Path) -> (PathBuf, String, Duration) {
    let (input, reference) = (root.join("moe"), root.join("reference"));
    fixtures::make_moe(&input, 0.15);
    let started = Instant::now();
    convert(&input, &reference, &["--threads", "1"]).ok();
    (input, id(&reference), started.elapsed())
}

#[test]
fn killed_runs_are_continued() {
    let root = tempfile::tempdir().expect("temporary folder");
    let (input, expected, whole) = moe(root.path());
    let kills = std::env::var("VT_TEST_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(8u64);
    let mut numbers = Numbers(11);
    let mut continued = 0;
    for kill in 0..kills {
        let output = root.path().join("out");
        let mut child = start(&input, &output);
        std::thread::sleep(Duration::from_micros(numbers.below(whole.as_micros() as u64)));
        child.kill().expect("killed");
        child.wait().expect("ended");
        if !output.exists() {
            let partial = root.path().join("out.partial");
            let (windows, pieces) = (journalled(&partial, b'I'), journalled(&partial, b'S'));
            let report = convert(&input, &output, &["--json", "--quiet"]).ok().json();
            assert_eq!(report["resumed_windows"].as_u64(), Some(windows), "kill {kill}");
            assert_eq!(report["resumed_source_bytes"].as_u64().map(|b| b > 0), Some(pieces > 0), "kill {kill}");
            continued += u64::from(windows + pieces > 0);
            assert!(!partial.exists());
        }
        assert_eq!(id(&output), expected, "kill {kill}");
        std::fs::remove_dir_all(&output).expect("removed");
    }
    eprintln!("{continued} of {kills} killed runs had something to continue");
    assert!(continued > 0);
}

#[test]
fn a_signal_stops_in_order_and_says_how_to_go_on() {
    let root = tempfile::tempdir().expect("temporary folder");
    let (input, expected, whole) = moe(root.path());
    let output = root.path().join("out");
    for (signal, name) in [("INT", "first"), ("TERM", "second")] {
        let child = start(&input, &output);
        std::thread::sleep(whole / 2);
        let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        assert!(sent.is_ok_and(|s| s.success()), "kill -s {signal}");
        let ended = child.wait_with_output().expect("ended");
        if ended.status.success() {
            // It was done before the signal came: nothing to see on a machine this fast.
            std::fs::remove_dir_all(&output).expect("removed");
            continue;
        }
        let text = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(130), "{name}: {text}");
        assert!(text.contains("out.partial") && text.contains("run the same command again"), "{name}: {text}");
        assert!(!output.exists() && root.path().join("out.partial").exists());
    }
    if !output.exists() {
        convert(&input, &output, &[]).ok();
    }
    assert_eq!(id(&output), expected);
    // Starting over gives the same bytes, too.
    let again = root.path().join("again");
    let mut child = start(&input, &again);
    std::thread::sleep(whole / 2);
    child.kill().expect("killed");
    child.wait().expect("ended");
    if !again.exists() {
        let report = convert(&input, &again, &["--no-resume", "--json", "--quiet"]).ok().json();
        assert_eq!(report["resumed_windows"], 0);
    }
    assert_eq!(id(&again), expected);
}

#[test]
fn of_eight_converters_one_writes() {
    let root = tempfile::tempdir().expect("temporary folder");
    let (input, expected, _) = moe(root.path());
    let output = root.path().join("out");
    let children: Vec<Child> = (0..8).map(|_| start(&input, &output)).collect();
    let mut written = 0;
    for child in children {
        let ended = child.wait_with_output().expect("ended");
        let text = String::from_utf8_lossy(&ended.stderr).into_owned();
        match ended.status.code() {
            Some(0) => written += 1,
            Some(6) => assert!(text.contains("another vt-convert"), "{text}"),
            Some(2) => assert!(text.contains("exists"), "{text}"),
            code => panic!("exit code {code:?}: {text}"),
        }
    }
    assert_eq!(written, 1);
    assert_eq!(id(&output), expected);
    assert!(!root.path().join("out.partial").exists());
}

#[test]
fn memory_bounds_leave_no_trace() {
    let root = tempfile::tempdir().expect("temporary folder");
    let (input, expected, _) = moe(root.path());
    for (n, more) in [["--max-memory", "64M"], ["--max-memory", "100M"], ["--threads", "3"]].iter().enumerate() {
        let output = root.path().join(n.to_string());
        convert(&input, &output, more).ok();
        assert_eq!(id(&output), expected, "{more:?}");
    }
}

#[test]
fn input_and_output_stay_apart() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["nvfp4", "tiny.gguf"]);
    let input = root.path().join("nvfp4");
    let before = folders::files(root.path());
    let link = root.path().join("link");
    std::os::unix::fs::symlink(&input, &link).expect("linked");
    let hard = root.path().join("hard.gguf");
    std::fs::hard_link(root.path().join("tiny.gguf"), &hard).expect("linked");
    for output in [link.clone(), link.join("out"), input.join("../nvfp4/out"), root.path().to_owned()] {
        convert(&input, &output, &["--overwrite"]).exits(2);
    }
    convert(&link, &input.join("out"), &[]).exits(2);
    convert(&root.path().join("tiny.gguf"), &hard, &["--overwrite"]).exits(2);
    // A folder of someone else at the place of the partial folder, the input itself included.
    let foreign = root.path().join("mine.partial");
    std::fs::rename(&input, &foreign).expect("moved");
    convert(&foreign, &root.path().join("mine"), &[]).exits(2);
    let other = root.path().join("tiny.gguf");
    let ran = convert(&other, &root.path().join("mine"), &[]).exits(2);
    assert!(ran.err.contains("mine.partial"), "{ran:?}");
    std::fs::rename(&foreign, &input).expect("moved back");
    std::fs::remove_file(&link).expect("removed");
    std::fs::remove_file(&hard).expect("removed");
    assert_eq!(folders::files(root.path()), before, "something was touched");
    let ran = convert(&input, &root.path().join("no/such/folder/out"), &[]).exits(6);
    assert!(ran.err.contains("create it first"), "{ran:?}");
}

#[test]
fn a_missing_head_is_tied_only_when_asked() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["bf16"]);
    let input = root.path().join("bf16");
    remove_tensor(&input.join("model.safetensors"), "lm_head.weight");
    let output = root.path().join("out");
    let ran = convert(&input, &output, &[]).exits(3);
    assert!(ran.err.contains("lm_head.weight") && ran.err.contains("--tie-word-embeddings"), "{ran:?}");
    convert(&input, &output, &["--tie-word-embeddings", "--verify"]).ok();
    let text = std::fs::read(output.join("manifest.json")).expect("manifest");
    let manifest: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(manifest["model"]["config"]["tie_word_embeddings"], true);
    run("vt-bundle", &["verify".as_ref(), output.as_os_str(), "--against".as_ref(), input.as_os_str()]).ok();
    let restored = root.path().join("restored");
    run("vt-bundle", &["restore", &output.to_string_lossy(), &restored.to_string_lossy()]).ok();
    assert!(folders::files(&restored)["config.json"] == folders::files(&input)["config.json"]);
}

/// Takes a tensor out of a safetensors file.
fn remove_tensor(file: &Path, name: &str) {
    let bytes = std::fs::read(file).expect("read");
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let mut header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..start]).expect("header");
    let removed = header.remove(name).expect("the tensor is there");
    let ends = |v: &serde_json::Value| [0, 1].map(|i| v["data_offsets"][i].as_u64().expect("offset"));
    let [from, to] = ends(&removed);
    for (key, entry) in header.iter_mut().filter(|(key, _)| *key != "__metadata__") {
        let [begin, end] = ends(entry);
        assert!(end <= from || begin >= to, "{key} overlaps");
        if begin >= to {
            entry["data_offsets"] = serde_json::json!([begin - (to - from), end - (to - from)]);
        }
    }
    let mut head = serde_json::to_vec(&header).expect("JSON");
    head.resize(head.len().next_multiple_of(8), b' ');
    let mut out = (head.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(&head);
    out.extend_from_slice(&bytes[start..start + from as usize]);
    out.extend_from_slice(&bytes[start + to as usize..]);
    std::fs::write(file, out).expect("written");
}
