//! Promises 3 and 8: the same bytes whatever happens on the way, and output that is complete or not there.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use vt_tests::disks::Tmpfs;
use vt_tests::process::{Numbers, Ran, command, finish, run, run_measured};
use vt_tests::{fixtures, folders};

fn convert(input: &Path, output: &Path, more: &[&str]) -> Ran {
    let mut command = command("vt-convert", &[input, output]);
    command.args(more);
    finish(command)
}

/// Starts a conversion, ends it with SIGKILL after `wait`, and tells whether it was still at work.
fn kill_after(input: &Path, output: &Path, wait: Duration) -> bool {
    let mut command = command("vt-convert", &[input, output]);
    let mut child = command.args(["--threads", "1", "--quiet"]).stderr(Stdio::null()).spawn().expect("started");
    std::thread::sleep(wait);
    let at_work = child.try_wait().expect("waited").is_none();
    child.kill().expect("killed");
    child.wait().expect("ended");
    at_work
}

#[test]
fn threads_interruptions_and_verification_leave_no_trace() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &[]);
    for name in ["bf16", "nvfp4", "moe", "tiny.gguf"] {
        let input = root.path().join(name);
        let [one, two, resumed] = ["one", "two", "deeper/resumed"].map(|d| root.path().join(format!("{name}.{d}")));
        std::fs::create_dir_all(resumed.parent().expect("inside")).expect("folder");
        let started = Instant::now();
        convert(&input, &one, &["--threads", "1"]).ok();
        let whole = started.elapsed();
        convert(&input, &two, &["--threads", "2", "--verify", "--max-memory", "64M"]).ok();
        kill_after(&input, &resumed, whole / 2);
        if !resumed.exists() {
            convert(&input, &resumed, &[]).ok();
        }
        folders::assert_equal(&one, &two);
        folders::assert_equal(&one, &resumed);
    }
}

/// Kills at random moments: OUTPUT is complete or absent, and the next run gives the same bytes.
fn survives_kills(input: &Path, root: &Path, kills: usize, seed: u64) {
    let reference = root.join("reference");
    let started = Instant::now();
    convert(input, &reference, &["--threads", "1"]).ok();
    let whole = started.elapsed().as_micros() as u64;
    let id = run("vt-bundle", &["id".as_ref(), reference.as_os_str()]).ok().out;
    let mut numbers = Numbers(seed);
    let mut at_work = 0;
    for _ in 0..kills {
        let output = root.join("killed");
        at_work += usize::from(kill_after(input, &output, Duration::from_micros(numbers.below(whole))));
        if output.exists() {
            run("vt-bundle", &["verify".as_ref(), output.as_os_str()]).ok();
        } else {
            convert(input, &output, &["--quiet"]).ok();
        }
        assert_eq!(run("vt-bundle", &["id".as_ref(), output.as_os_str()]).ok().out, id);
        assert!(!root.join("killed.partial").exists(), "work is left behind");
        std::fs::remove_dir_all(&output).expect("removed");
    }
    assert!(at_work > kills / 4, "only {at_work} of {kills} conversions were still at work when they were killed");
}

#[test]
fn kills_leave_all_or_nothing() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["bf16"]);
    survives_kills(&root.path().join("bf16"), root.path(), 20, 3);
}

#[test]
fn kills_leave_all_or_nothing_of_a_real_model() {
    let Some(model) = fixtures::smollm2() else { return };
    let root = tempfile::tempdir().expect("temporary folder");
    survives_kills(&model, root.path(), 5, 4);
}

#[test]
fn a_full_disk_is_said_so() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["bf16"]);
    let disk = root.path().join("disk");
    std::fs::create_dir(&disk).expect("folder");
    let Some(_mounted) = Tmpfs::mount(&disk, "1m") else { return };
    let output = disk.join("out");
    let ran = convert(&root.path().join("bf16"), &output, &[]).exits(6);
    let numbers = ran.err.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<u64>().ok());
    let numbers: Vec<u64> = numbers.filter(|&n| n > 1000).collect();
    assert!(ran.err.contains("needs") && numbers.len() >= 2, "needed and free bytes: {ran:?}");
    assert_eq!(std::fs::read_dir(&disk).expect("listed").count(), 0, "something is left on the disk");
}

#[test]
fn an_existing_output_stays() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["nvfp4", "fp8"]);
    let output = root.path().join("out");
    convert(&root.path().join("nvfp4"), &output, &[]).ok();
    let id = run("vt-bundle", &["id".as_ref(), output.as_os_str()]).ok().out;
    let refused = convert(&root.path().join("fp8"), &output, &[]).exits(2);
    assert!(refused.err.contains("--overwrite"), "{refused:?}");
    assert_eq!(run("vt-bundle", &["id".as_ref(), output.as_os_str()]).ok().out, id);
    convert(&root.path().join("fp8"), &output, &["--overwrite"]).ok();
    assert_ne!(run("vt-bundle", &["id".as_ref(), output.as_os_str()]).ok().out, id);
    // Input and output must be apart, and a folder that is no bundle is never replaced.
    let input = root.path().join("nvfp4");
    for inside in [input.join("out"), input.clone()] {
        convert(&input, &inside, &["--overwrite"]).exits(2);
    }
    assert!(input.join("model.safetensors").is_file());
}

#[test]
fn a_dry_run_tells_the_size_and_writes_nothing() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["fp8"]);
    let (input, output) = (root.path().join("fp8"), root.path().join("out"));
    let plan = convert(&input, &output, &["--dry-run", "--json"]).ok().json();
    assert!(!output.exists());
    convert(&input, &output, &[]).ok();
    let made = run("vt-bundle", &["inspect".as_ref(), output.as_os_str(), "--json".as_ref()]).ok().json();
    assert_eq!(plan["image_bytes"], made["image"]["size"]);
    let assets: u64 = made["assets"].as_array().expect("assets").iter().filter_map(|a| a["size"].as_u64()).sum();
    assert!(assets <= plan["assets_bytes_bound"].as_u64().expect("bound"));
}

#[test]
fn broken_input_is_named_and_leaves_nothing() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["nvfp4"]);
    let (input, output) = (root.path().join("nvfp4"), root.path().join("out"));
    let file = input.join("model.safetensors");
    let len = file.metadata().expect("file").len();
    std::fs::OpenOptions::new().write(true).open(&file).expect("opened").set_len(len - 100).expect("truncated");
    let ran = convert(&input, &output, &[]).exits(3);
    assert!(ran.err.contains("model.safetensors"), "{ran:?}");
    assert!(!output.exists() && !root.path().join("out.partial").exists());
    convert(&root.path().join("none"), &output, &[]).exits(6);
    finish(command("vt-convert", &[&input])).exits(2);
}

#[test]
fn memory_stays_bounded() {
    let Some(model) = fixtures::smollm2() else { return };
    let root = tempfile::tempdir().expect("temporary folder");
    let output = root.path().join("out");
    let (ran, peak) = run_measured("vt-convert", &[&model, &output]);
    ran.ok();
    assert!(peak <= 200 << 20, "vt-convert had {peak} bytes of anonymous memory");
    let (ran, peak) = run_measured("vt-run", &["--bundle".as_ref(), output.as_os_str(), "--load-only".as_ref()]);
    ran.ok();
    assert!(peak > 0 && peak <= 100 << 20, "vt-run had {peak} bytes of anonymous memory");
}

#[test]
fn a_dry_run_needs_no_output_and_says_where_it_cannot_write() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["nvfp4"]);
    let input = root.path().join("nvfp4");
    let path = input.to_str().expect("UTF-8");
    let plan = run("vt-convert", &[path, "--dry-run", "--json"]).ok().json();
    assert!(plan["image_bytes"].is_u64() || plan.is_object(), "{plan}");
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a device that is always full");
    let mut command = command("vt-convert", &[path, "--dry-run"]);
    command.stdout(full).stderr(std::process::Stdio::null());
    assert_eq!(command.status().expect("run").code(), Some(6));
}

#[test]
fn switches_in_the_environment_are_set_as_people_set_them() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["nvfp4"]);
    let input = root.path().join("nvfp4");
    let dry = |value: &str| {
        let mut command = command("vt-convert", &[input.as_os_str(), root.path().join("out").as_os_str()]);
        command.env("VT_DRY_RUN", value).env("VT_THREADS", "");
        finish(command)
    };
    for on in ["1", "true", "yes"] {
        dry(on).ok();
        assert!(!root.path().join("out").exists(), "{on}");
    }
    dry("perhaps").exits(2);
    dry("").ok();
    assert!(root.path().join("out").exists());
    std::fs::remove_dir_all(root.path().join("out")).expect("removed");
    dry("0").ok();
    let bundle = root.path().join("out");
    for (program, args) in [("vt-bundle", ["inspect"]), ("vt-run", ["--plan"])] {
        let mut command = command(program, &args);
        command.env("VT_JSON", "1").env("VT_THREADS", "");
        match program {
            "vt-bundle" => command.arg(&bundle),
            _ => command.args(["--device", "cpu", "--bundle"]).arg(&bundle),
        };
        finish(command).ok().json();
    }
}

#[test]
fn what_is_no_checkpoint_is_called_what_it_is() {
    let root = tempfile::tempdir().expect("temporary folder");
    fixtures::make_tiny(root.path(), &["nvfp4"]);
    let (input, bundle, again) = (root.path().join("nvfp4"), root.path().join("bundle"), root.path().join("again"));
    convert(&input, &bundle, &[]).ok();
    let ran = convert(&bundle, &again, &[]).exits(3);
    assert!(ran.err.contains("is a vt bundle") && ran.err.contains("restore"), "{ran:?}");
    // A device in the place of a file of the folder.
    std::fs::remove_file(input.join("model.safetensors")).expect("removed");
    std::os::unix::fs::symlink("/dev/null", input.join("model.safetensors")).expect("linked");
    let ran = convert(&input, &again, &[]).exits(3);
    assert!(ran.err.contains("not a regular file"), "{ran:?}");
    // A pipe that nobody writes to, called as GGUF files are.
    let folder = root.path().join("pipes");
    std::fs::create_dir(&folder).expect("folder");
    let made = std::process::Command::new("mkfifo").arg(folder.join("model.gguf")).status().expect("run");
    assert!(made.success());
    let ran = convert(&folder, &again, &[]).exits(3);
    assert!(ran.err.contains("not a regular file"), "{ran:?}");
    let ran = convert(&root.path().join("bundle"), &again, &["--max-memory", "1"]).exits(2);
    assert!(ran.err.contains("at least"), "{ran:?}");
}
