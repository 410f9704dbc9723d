//! Compiles the CUDA sources to fatbins that the library embeds.
//!
//! `VT_NVCC` names the compiler; otherwise `nvcc` is looked for on the `PATH`, in `CUDA_HOME` and in a Python environment at
//! `.build/nvcc` of the repository. Without one the library is built without kernels, unless `VT_CI=1`, where that is an
//! error. `VT_CUDA_ARCHS` lists the architectures (`90a,100f`), `all` is every supported one and PTX of the
//! newest; the default is the daily one.
//!
//! A fatbin is kept in `OUT_DIR` under a hash of its source, the headers that it includes, the flags and the compiler's
//! version, so that a change compiles what it touches.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// Every source below `cuda/`, without its suffix; the fatbin has that name (`load_module("blake3")`).
const SOURCES: &[&str] = &[
    "blake3",
    // Between the products of a layer.
    "forward/elementwise",
    "forward/embedding",
    "forward/norm",
    // Attention, its cache, and what comes after the logits.
    "attention/decode",
    "attention/decode_hopper",
    "attention/prefill",
    "attention/prefill_hopper",
    "kv_cache/write",
    // Products with matrices.
    "gemm/experts_float",
    "gemm/experts_ggml",
    "gemm/experts_integer",
    "gemm/generic",
    "gemm/rows",
    "gemm_hopper/few",
    "gemm_hopper/floats",
    "gemm_hopper/integers",
    "gemm_hopper/rows",
    "gemm/small_float",
    "gemm/small_ggml",
    "gemm/small_integer",
    // What a device can do.
    "measure/read",
    "moe/route",
    "moe/router",
    "moe/rows",
    "sampling/sample",
];
/// What a daily build targets: Hopper with its own instructions.
const DAILY: &str = "90a";
/// Ampere, Ada, Hopper, and the families of Blackwell, which cover GB10 and Thor.
const ALL: &str = "80,86,87,89,90a,100f,110f,120f";
/// PTX for chips to come, beside [`ALL`].
const NEWEST: &str = "120";
/// Compilers at once, at most: each takes about 1 GB.
const COMPILERS: usize = 4;

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

/// How sources are compiled.
struct Compiler<'a> {
    nvcc: &'a Path,
    flags: Vec<String>,
    /// What the compiler says of itself.
    version: Vec<u8>,
    out: &'a Path,
}

fn compile_all(nvcc: &Path, out: &Path) -> String {
    let list = env::var("VT_CUDA_ARCHS").ok().filter(|v| !v.is_empty()).unwrap_or_else(|| DAILY.to_owned());
    let (list, portable) = if list == "all" { (ALL.to_owned(), true) } else { (list, false) };
    let mut flags: Vec<String> =
        ["-std=c++17", "-O3", "-Werror", "all-warnings", "-Icuda", "-fatbin"].map(str::to_owned).into();
    flags.extend(list.split(',').map(|arch| format!("-gencode=arch=compute_{0},code=sm_{0}", arch.trim())));
    if portable {
        flags.push(format!("-gencode=arch=compute_{NEWEST},code=compute_{NEWEST}"));
    }
    let version = match Command::new(nvcc).arg("--version").output() {
        Ok(output) => output.stdout,
        Err(error) => panic!("{}: {error}", nvcc.display()),
    };
    let compiler = Compiler { nvcc, flags, version, out };
    let waiting = Mutex::new(SOURCES.iter());
    let next = || waiting.lock().ok().and_then(|mut sources| sources.next());
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(COMPILERS);
    let mut fatbins: Vec<(&str, PathBuf)> = std::thread::scope(|scope| {
        let work = || std::iter::from_fn(next).map(|name| (*name, compiler.compile(name))).collect::<Vec<_>>();
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a source did not compile")).collect()
    });
    fatbins.sort_unstable();
    let entries = fatbins.iter().map(|(name, path)| format!("({name:?}, include_bytes!({path:?})), "));
    format!("&[{}]", entries.collect::<String>())
}

impl Compiler<'_> {
    /// The fatbin of a source: the one of an earlier build where nothing that goes into it has changed.
    fn compile(&self, name: &str) -> PathBuf {
        let source = Path::new("cuda").join(name).with_extension("cu");
        let mut hasher = DefaultHasher::new();
        (&self.flags, &self.version).hash(&mut hasher);
        let mut seen = BTreeSet::new();
        hash_source(&source, &mut seen, &mut hasher);
        let prefix = name.replace('/', "-");
        let fatbin = self.out.join(format!("{prefix}.{:016x}.fatbin", hasher.finish()));
        if fatbin.is_file() {
            return fatbin;
        }
        self.remove_older(&prefix);
        // Renamed when complete, so that an interrupted build leaves none that looks finished.
        let partial = fatbin.with_extension("partial");
        let mut command = Command::new(self.nvcc);
        command.args(&self.flags).arg("-o").arg(&partial).arg(&source);
        match command.output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => panic!("{}: {}", source.display(), String::from_utf8_lossy(&output.stderr)),
            Err(error) => panic!("{}: {error}", self.nvcc.display()),
        }
        fs::rename(&partial, &fatbin).expect("OUT_DIR can be written");
        fatbin
    }

    fn remove_older(&self, prefix: &str) {
        for entry in fs::read_dir(self.out).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.split('.').next() == Some(prefix) && name.ends_with(".fatbin") {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Hashes a source and, once each, the headers of ours that it includes (`#include "common/mma.cuh"`, from `cuda/` or from
/// the folder of the file).
fn hash_source(path: &Path, seen: &mut BTreeSet<PathBuf>, hasher: &mut DefaultHasher) {
    if !seen.insert(path.to_owned()) {
        return;
    }
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.hash(hasher);
    let quoted = |line: &str| line.trim().strip_prefix("#include \"")?.split('"').next().map(str::to_owned);
    for header in text.lines().filter_map(quoted) {
        let beside = path.with_file_name(&header);
        let header = if beside.is_file() { beside } else { Path::new("cuda").join(header) };
        hash_source(&header, seen, hasher);
    }
}
