//! Compiles the CUDA sources to fatbins that the library embeds.
//!
//! `VT_NVCC` names the compiler; otherwise `nvcc` is looked for on the `PATH`, in `CUDA_HOME` and in a Python environment at
//! `.build/nvcc` of the repository. Without one the library is built without kernels, unless `VT_CI=1`, where that is an
//! error. `VT_CUDA_ARCHS` lists the architectures (`90a,100a`), `all` is every supported one and PTX of the oldest; the
//! default is the daily one.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Every source, by the name of its fatbin.
const SOURCES: [&str; 1] = ["blake3"];
/// What a daily build targets: Hopper with its own instructions.
const DAILY: &str = "90a";
/// Ampere, Ada, Hopper, and both Blackwells.
const ALL: &str = "80,86,89,90a,100a,120a";

fn main() {
    for name in ["VT_NVCC", "VT_CUDA_ARCHS", "VT_CI", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=cuda");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let table = match find_nvcc() {
        Some(nvcc) => compile_all(&nvcc, &out),
        None if env::var("VT_CI").is_ok_and(|v| v == "1") => {
            panic!("VT_CI=1 and no nvcc: set VT_NVCC, or install one into .build/nvcc")
        }
        // No warning: a machine without a GPU builds like this every day, and vt-run says plainly what it lacks.
        None => "&[]".to_owned(),
    };
    fs::write(out.join("fatbins.rs"), table).expect("OUT_DIR can be written");
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(path) = env::var_os("VT_NVCC").filter(|v| !v.is_empty()) {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "VT_NVCC: {} is not a file", path.display());
        return Some(path);
    }
    let on_path = env::var_os("PATH").map(|p| env::split_paths(&p).collect::<Vec<_>>()).unwrap_or_default();
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
    on_path.into_iter().chain(home).chain(environment()).map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file())
}

/// Folder of the compiler in `.build/nvcc`, as the packages of NVIDIA for Python lay it out.
fn environment() -> Option<PathBuf> {
    let repository = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR")?).parent()?.to_owned();
    let installed = repository.join(".build/nvcc");
    // Watching a path that does not exist would run this script, and compile what follows from it, on every build.
    if installed.exists() {
        println!("cargo::rerun-if-changed={}", installed.display());
    }
    let lib = installed.join("lib");
    let python = fs::read_dir(lib).ok()?.flatten().map(|entry| entry.path()).find(|path| path.is_dir())?;
    Some(python.join("site-packages/nvidia/cu13/bin"))
}

fn compile_all(nvcc: &Path, out: &Path) -> String {
    let list = env::var("VT_CUDA_ARCHS").ok().filter(|v| !v.is_empty()).unwrap_or_else(|| DAILY.to_owned());
    let (list, portable) = if list == "all" { (ALL.to_owned(), true) } else { (list, false) };
    let mut targets: Vec<OsString> =
        list.split(',').map(|arch| format!("-gencode=arch=compute_{0},code=sm_{0}", arch.trim()).into()).collect();
    if portable {
        targets.push("-gencode=arch=compute_80,code=compute_80".into());
    }
    let mut table = String::from("&[");
    for name in SOURCES {
        let (source, fatbin) =
            (Path::new("cuda").join(name).with_extension("cu"), out.join(name).with_extension("fatbin"));
        let mut command = Command::new(nvcc);
        command.args(["-std=c++17", "-O3", "-Werror", "all-warnings", "-fatbin"]).args(&targets);
        command.arg("-o").arg(&fatbin).arg(&source);
        match command.output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => panic!("{}: {}", source.display(), String::from_utf8_lossy(&output.stderr)),
            Err(error) => panic!("{}: {error}", nvcc.display()),
        }
        table.push_str(&format!("({name:?}, include_bytes!({:?})), ", fatbin.display().to_string()));
    }
    table + "]"
}
