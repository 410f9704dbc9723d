//! Where the binaries under test are.

use std::path::PathBuf;
use std::time::SystemTime;

/// Path of one of the binaries.
///
/// # Panics
/// If it has not been built.
pub fn binary(name: &str) -> PathBuf {
    if let Some(dir) = std::env::var_os("VT_TEST_BIN_DIR") {
        let path = PathBuf::from(dir).join(name);
        assert!(path.is_file(), "{}: not there, although VT_TEST_BIN_DIR says so", path.display());
        return path;
    }
    let here = std::env::current_exe().expect("the test has a path");
    // target/<profile>/deps/<test>
    let target = here.ancestors().nth(3).expect("tests run from the build folder");
    let built = |path: &PathBuf| -> Option<SystemTime> { path.metadata().ok()?.modified().ok() };
    let candidates = ["release", "debug"].map(|profile| target.join(profile).join(name));
    let newest = candidates.into_iter().filter(|p| p.is_file()).max_by_key(built);
    newest.unwrap_or_else(|| panic!("{name} is not built; run `cargo build --release` first, as ./test.sh does"))
}
