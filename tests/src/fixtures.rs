//! Checkpoints to test with.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the repository").to_owned()
}

/// Makes the tiny checkpoints of those names (`bf16`, `nvfp4`, `fp8`, `moe`, `tiny.gguf`) in `dir`.
///
/// # Panics
/// If python3 is not there or the program fails.
pub fn make_tiny(dir: &Path, names: &[&str]) {
    let program = repository().join("fixtures/make_tiny.py");
    let status = Command::new("python3").arg(program).arg(dir).args(names).status();
    assert!(status.expect("python3 is installed").success(), "make_tiny.py failed");
}

/// Makes the tiny mixtures of experts of those names (`qwen3_moe-awq` and so on), and their plain twins, in `dir`.
///
/// # Panics
/// If python3 is not there or the program fails.
pub fn make_experts(dir: &Path, names: &[&str]) {
    let program = repository().join("fixtures/make_experts.py");
    let status = Command::new("python3").arg(program).arg(dir).args(names).status();
    assert!(status.expect("python3 is installed").success(), "make_experts.py failed");
}

/// The folder of real exports outside the repository; says so where it is not there.
pub fn shared(what: &str) -> Option<PathBuf> {
    let path = repository().join("../shared").join(what);
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED: {} does not exist", path.display());
    None
}

/// The SmolLM2 GGUF that `quickstart.sh` downloads, or the file that `VT_TEST_MODEL` names; says so where it is not
/// there.
pub fn smollm2() -> Option<PathBuf> {
    let path = match std::env::var_os("VT_TEST_MODEL") {
        Some(path) => PathBuf::from(path),
        None => repository().join(".build/model/SmolLM2-135M-Instruct.Q4_1.gguf"),
    };
    if path.is_file() {
        return Some(path);
    }
    eprintln!("SKIPPED: {} does not exist; ./quickstart.sh downloads it", path.display());
    None
}

/// Makes a sharded Qwen3-MoE in NVFP4 of about `gib` GiB in `dir`, with small experts.
///
/// # Panics
/// If python3 is not there or the program fails.
pub fn make_moe(dir: &Path, gib: f64) {
    let program = repository().join("fixtures/make_moe.py");
    let mut command = Command::new("python3");
    command.arg(program).arg(dir).arg(gib.to_string());
    command.args(["--experts", "16", "--hidden", "512", "--inner", "256", "--shard-gib", &(gib / 2.5).to_string()]);
    assert!(command.status().expect("python3 is installed").success(), "make_moe.py failed");
}
