//! Logits and greedy text of `vt-run` against stored references.
//!
//! With f32 activations a runtime that computes on the decoded weights differs from the reference by rounding alone; with
//! 8-bit activations the difference is measured as KL divergence, beside llama.cpp's own where that is stored.

// Whatever does not hold is a failure of the test.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use serde_json::Value;
use vt_tests::fixtures::{make_experts, make_tiny, shared, smollm2};
use vt_tests::process::run;

/// Largest difference of a logit with f32 activations.
const F32_LIMIT: f64 = 0.005;
/// Largest KL divergence at a position with 8-bit activations, in nats.
const KL_LIMIT: f64 = 0.005;

/// A reference: logits of a text, and what greedy decoding makes of it.
struct Reference {
    name: String,
    ids: Vec<u32>,
    /// Rows of the last positions of `ids`.
    logits: Vec<Vec<f32>>,
    greedy: Vec<u32>,
    /// Distance of the two largest logits at each step of `greedy`.
    margins: Vec<f32>,
    /// KL divergence of llama.cpp from the reference, mean over positions, where it was measured.
    llamacpp_kl: Option<f64>,
}

/// A tensor of a safetensors file as bytes.
fn safetensor(bytes: &[u8], name: &str) -> Option<(Value, Vec<u8>)> {
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let entry = header.get(name)?.clone();
    let [from, to] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize + 8 + header_len);
    Some((entry, bytes[from..to].to_vec()))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn rows(bytes: &[u8], width: usize) -> Vec<Vec<f32>> {
    floats(bytes).chunks_exact(width).map(<[f32]>::to_vec).collect()
}

impl Reference {
    /// `expected.safetensors` of an export.
    fn of_export(dir: &Path) -> Self {
        let bytes = std::fs::read(dir.join("expected.safetensors")).unwrap();
        let ids = |name: &str| {
            let (_, data) = safetensor(&bytes, name).unwrap_or_else(|| panic!("{} lacks {name}", dir.display()));
            data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect::<Vec<_>>()
        };
        let (entry, data) = safetensor(&bytes, "logits").unwrap();
        let width = entry["shape"][1].as_u64().unwrap() as usize;
        Self {
            name: dir.strip_prefix(dir.ancestors().nth(2).unwrap()).unwrap().display().to_string(),
            ids: ids("input_ids"),
            logits: rows(&data, width),
            greedy: ids("greedy_ids"),
            margins: floats(&safetensor(&bytes, "greedy_margin").unwrap().1),
            llamacpp_kl: None,
        }
    }

    /// An oracle of a GGUF file.
    fn of_oracle(json: &Path) -> Self {
        let oracle: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        let ids = |list: &Value| list.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
        let reference = &oracle["ref"];
        let width = reference["shape"][1].as_u64().unwrap() as usize;
        let file = json.with_file_name(reference["logits"].as_str().unwrap());
        let margins = reference["top1_top2_gap"].as_array().unwrap();
        Self {
            name: json.file_stem().unwrap().to_string_lossy().into_owned(),
            ids: ids(&oracle["prompt"]),
            logits: rows(&std::fs::read(file).unwrap(), width),
            greedy: ids(&reference["greedy"]),
            margins: margins.iter().map(|v| v.as_f64().unwrap() as f32).collect(),
            llamacpp_kl: oracle["llamacpp"]["kl"].as_f64(),
        }
    }
}

/// A bundle and the folder that goes with it.
struct Converted {
    bundle: PathBuf,
    dir: tempfile::TempDir,
}

fn convert(input: &Path) -> Converted {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("bundle");
    run("vt-convert", &[input.as_os_str(), bundle.as_os_str(), "--quiet".as_ref()]).ok();
    Converted { bundle, dir }
}

fn join(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

impl Converted {
    /// Logits of every position, or of the last one alone, as the first token is chosen from.
    fn logits(&self, ids: &[u32], activations: &str, positions: &str) -> Vec<Vec<f32>> {
        let file = self.dir.path().join("logits.f32");
        let (bundle, out) = (self.bundle.to_str().unwrap(), file.to_str().unwrap());
        let ids_text = join(ids);
        let arguments = [
            "--bundle",
            bundle,
            "--prompt-ids",
            &ids_text,
            "--logits",
            out,
            "--logits-rows",
            positions,
            "--activations",
            activations,
        ];
        run("vt-run", &arguments).ok();
        let bytes = std::fs::read(&file).unwrap();
        let count = if positions == "last" { 1 } else { ids.len() };
        rows(&bytes, bytes.len() / 4 / count)
    }

    fn greedy(&self, ids: &[u32], count: usize, activations: &str) -> Vec<u32> {
        let (bundle, ids, count) = (self.bundle.to_str().unwrap(), join(ids), count.to_string());
        let arguments = [
            "--bundle",
            bundle,
            "--prompt-ids",
            &ids,
            "--max-tokens",
            &count,
            "--activations",
            activations,
            "--ignore-eos",
            "--json",
        ];
        let answer = run("vt-run", &arguments).ok().json();
        answer["token_ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
    }
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&v| f64::from(v - max).exp()).sum();
    row.iter().map(|&v| f64::from(v - max) - sum.ln()).collect()
}

/// KL divergence of `found` from `expected`, in nats.
fn kl(expected: &[f32], found: &[f32]) -> f64 {
    let (p, q) = (log_softmax(expected), log_softmax(found));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

fn largest_difference(expected: &[Vec<f32>], found: &[Vec<f32>]) -> f64 {
    let pairs = expected.iter().flatten().zip(found.iter().flatten());
    pairs.map(|(e, f)| f64::from((e - f).abs())).fold(0.0, f64::max)
}

/// The two largest, as (index, value).
fn top_two(row: &[f32]) -> [(usize, f32); 2] {
    let mut order: Vec<(usize, f32)> = row.iter().copied().enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    [order[0], order[1]]
}

/// Greedy text must agree until a step that a difference of `tolerance` in two logits can turn; says where it stopped.
fn assert_greedy(reference: &Reference, found: &[u32], tolerance: f64, mode: &str) {
    assert_eq!(found.len(), reference.greedy.len(), "{} {mode}", reference.name);
    let differs = found.iter().zip(&reference.greedy).position(|(f, e)| f != e);
    let unsure = reference.margins.iter().position(|&m| f64::from(m) < 2.0 * tolerance);
    match (differs, unsure) {
        (None, _) => eprintln!("{} {mode}: greedy text equal over all {} tokens", reference.name, found.len()),
        (Some(at), Some(first)) if at >= first => {
            let margin = reference.margins[first];
            eprintln!(
                "{} {mode}: greedy text equal over {at} tokens; the margin at {first} is {margin}",
                reference.name
            );
        }
        (Some(at), _) => panic!(
            "{} {mode}: greedy text differs at {at}, where the margin is {}: {found:?}, expected {:?}",
            reference.name, reference.margins[at], reference.greedy
        ),
    }
}

/// The whole rule for one checkpoint.
fn check(input: &Path, reference: &Reference) {
    let converted = convert(input);
    let skip = reference.ids.len() - reference.logits.len();

    let exact = converted.logits(&reference.ids, "f32", "all").split_off(skip);
    let difference = largest_difference(&reference.logits, &exact);
    eprintln!("{} f32: largest difference {difference:.6}", reference.name);
    assert!(difference <= F32_LIMIT, "{} f32: a logit differs by {difference}", reference.name);
    let greedy = converted.greedy(&reference.ids, reference.greedy.len(), "f32");
    assert_greedy(reference, &greedy, difference, "f32");

    // One run per position: tokens whose logits are wanted are computed more exactly than those that are only context.
    let ends = skip + 1..=reference.ids.len();
    let quantised: Vec<_> = ends.map(|end| converted.logits(&reference.ids[..end], "int8", "last").remove(0)).collect();
    let difference = largest_difference(&reference.logits, &quantised);
    let (mut worst, mut sum) = (0.0f64, 0.0);
    for (position, (expected, found)) in reference.logits.iter().zip(&quantised).enumerate() {
        let divergence = kl(expected, found);
        worst = worst.max(divergence);
        sum += divergence;
        let [first, second] = top_two(expected);
        if first.1 - second.1 > 1.0 {
            assert_eq!(top_two(found)[0].0, first.0, "{} int8: argmax at {position}", reference.name);
        }
    }
    let mean = sum / quantised.len() as f64;
    eprintln!("{} int8: KL mean {mean:.6}, largest {worst:.6}, largest difference {difference:.4}", reference.name);
    assert!(worst <= KL_LIMIT, "{} int8: KL {worst}", reference.name);
    if let Some(other) = reference.llamacpp_kl {
        assert!(mean <= other, "{} int8: mean KL {mean}, llama.cpp has {other}", reference.name);
    }
    let greedy = converted.greedy(&reference.ids, reference.greedy.len(), "int8");
    assert_greedy(reference, &greedy, difference, "int8");
}

fn export(name: &str) {
    if let Some(dir) = shared(&format!("checkpoints/modelopt/{name}")) {
        check(&dir, &Reference::of_export(&dir));
    }
}

fn gguf(stem: &str) {
    let (file, oracle) = (format!("checkpoints/gguf/tiny/{stem}.gguf"), format!("checkpoints/gguf/oracle/{stem}.json"));
    if let (Some(file), Some(oracle)) = (shared(&file), shared(&oracle)) {
        check(&file, &Reference::of_oracle(&oracle));
    }
}

macro_rules! exports {
    ($($test:ident: $name:literal,)*) => {$(
        #[test]
        fn $test() {
            export($name);
        }
    )*};
}

exports! {
    llama_bf16: "llama/bf16",
    llama_nvfp4: "llama/nvfp4",
    llama_fp8: "llama/fp8",
    llama_mixed: "llama/mixed_nvfp4_mlp_fp8_attn",
    llama_mixed_head: "llama/mixed_nvfp4_fp8_lm_head",
    llama_tied_nvfp4: "llama_tied/nvfp4",
    llama_nvfp4_kv_fp8: "llama/nvfp4_kv_fp8",
    llama_nvfp4_awq: "llama/nvfp4_awq_lite",
    llama_nvfp4_svdquant: "llama/nvfp4_svdquant",
    mistral_nvfp4: "mistral/nvfp4",
    qwen2_nvfp4: "qwen2/nvfp4",
    qwen3_nvfp4: "qwen3/nvfp4",
    qwen3_fp8: "qwen3/fp8",
    gemma3_nvfp4: "gemma3/nvfp4",
    qwen3_moe_fp8: "qwen3_moe/fp8",
    qwen3_moe_nvfp4: "qwen3_moe/nvfp4",
    llama_mxfp4: "llama/mxfp4",
    llama_fp8_block: "llama/fp8_pb_wo",
}

macro_rules! ggufs {
    ($($test:ident: $stem:literal,)*) => {$(
        #[test]
        fn $test() {
            gguf($stem);
        }
    )*};
}

ggufs! {
    gguf_llama_q4_1: "tiny-llama-pure-Q4_1",
    gguf_llama_q4_0: "tiny-llama-pure-Q4_0",
    gguf_llama_q4_k: "tiny-llama-pure-Q4_K",
    gguf_llama_q4_k_m: "tiny-llama-mix-Q4_K_M",
    gguf_llama_q3_k: "tiny-llama-pure-Q3_K",
    gguf_llama_mxfp4: "tiny-llama-pure-MXFP4",
    gguf_llama_scaled_nvfp4: "tiny-llama-scaled-NVFP4",
    gguf_qwen3_q4_k_m: "tiny-qwen3-mix-Q4_K_M",
    gguf_qwen3_moe_mxfp4: "tiny-qwen3moe-mix-MXFP4_MOE",
}

#[test]
fn smollm2_q4_1() {
    let oracle = shared("checkpoints/gguf/oracle/smollm2-135m-Q4_1.json");
    if let (Some(file), Some(oracle)) = (smollm2(), oracle) {
        check(&file, &Reference::of_oracle(&oracle));
    }
}

/// The export is put together by its own program from the stored part and the package's GGUF file.
#[test]
fn smollm2_nvfp4() {
    let (Some(stored), Some(_)) = (shared("checkpoints/modelopt/smollm2"), smollm2()) else { return };
    let Some(assembled) = std::env::var_os("VT_TEST_SMOLLM2_NVFP4").map(PathBuf::from) else {
        eprintln!("SKIPPED: VT_TEST_SMOLLM2_NVFP4 does not name the folder that smollm2/assemble.py wrote");
        return;
    };
    let mut reference = Reference::of_export(&stored.join("nvfp4"));
    reference.name = "smollm2/nvfp4".to_owned();
    check(&assembled, &reference);
}

/// Keys and values in 8 bits with the checkpoint's scales: close to the reference, and not the same as in 16.
#[test]
fn fp8_cache_with_the_scales_of_the_checkpoint() {
    let Some(dir) = shared("checkpoints/modelopt/llama/nvfp4_kv_fp8") else { return };
    let (converted, reference) = (convert(&dir), Reference::of_export(&dir));
    let out = converted.dir.path().join("logits.f32");
    let rows_with = |dtype: &str| {
        let (bundle, ids, out) = (converted.bundle.to_str().unwrap(), join(&reference.ids), out.to_str().unwrap());
        let what = ["--bundle", bundle, "--prompt-ids", &ids, "--logits", out, "--activations", "f32"];
        run("vt-run", &[&what[..], &["--kv-cache-dtype", dtype]].concat()).ok();
        let bytes = std::fs::read(out).unwrap();
        rows(&bytes, bytes.len() / 4 / reference.ids.len()).split_off(reference.ids.len() - reference.logits.len())
    };
    let (narrow, wide) = (rows_with("fp8"), rows_with("f16"));
    let divergences: Vec<f64> = reference.logits.iter().zip(&narrow).map(|(e, f)| kl(e, f)).collect();
    let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
    eprintln!("fp8 cache: KL mean {mean:.6}");
    assert!(mean < 0.005, "KL mean {mean}");
    assert!(narrow != wide, "the cache is not in 8 bits");
}

/// However a prompt is cut into steps, by however many threads it is computed, and whether or not logits of its other
/// positions are wanted (which is what tells an answer from a prompt).
#[test]
fn deterministic_logits_do_not_depend_on_the_steps() {
    let dir = tempfile::tempdir().unwrap();
    make_tiny(dir.path(), &["nvfp4"]);
    let converted = convert(&dir.path().join("nvfp4"));
    let ids: Vec<u32> = (0..75).map(|i| 3 + i * 37 % 250).collect();
    let out = converted.dir.path().join("logits.f32");
    let last_row = |flags: &[&str]| {
        let (bundle, ids, out) = (converted.bundle.to_str().unwrap(), join(&ids), out.to_str().unwrap());
        run("vt-run", &[&["--bundle", bundle, "--prompt-ids", &ids, "--logits", out][..], flags].concat()).ok();
        let bytes = std::fs::read(out).unwrap();
        let positions = if flags.contains(&"last") { 1 } else { ids.split(',').count() };
        bytes[bytes.len() / positions * (positions - 1)..].to_vec()
    };
    let whole = last_row(&["--deterministic", "--logits-rows", "last"]);
    assert!(!whole.is_empty());
    for (step, threads, rows) in [("1", "2", "last"), ("7", "1", "last"), ("64", "3", "all"), ("512", "2", "all")] {
        let ways = ["--max-num-batched-tokens", step, "--threads", threads, "--logits-rows", rows];
        let found = last_row(&[&["--deterministic"][..], &ways].concat());
        assert!(found == whole, "steps of {step} tokens, {threads} threads, logits of {rows}");
    }
    // Without the flag only the steps and threads do not matter.
    let quick = last_row(&["--logits-rows", "last"]);
    assert!(last_row(&["--max-num-batched-tokens", "1", "--threads", "1", "--logits-rows", "last"]) == quick);
    assert!(last_row(&["--logits-rows", "all"]) != quick, "the flag makes no difference to this model");
}

/// Largest difference of a logit from a checkpoint with the same values, stored as F32.
const TWIN_LIMIT: f64 = 2e-5;

/// Experts with input scales, low-rank branches and factors, and experts that differ from each other, say what a checkpoint
/// says in which all of that has been multiplied out.
#[test]
fn experts_say_what_their_plain_twins_say() {
    let dir = tempfile::tempdir().unwrap();
    let pairs = [
        ("qwen3_moe-awq", "qwen3_moe-awq-plain"),
        ("mixtral-svdquant", "mixtral-svdquant-plain"),
        ("qwen3_moe-mixed", "qwen3_moe-mixed-plain"),
        ("qwen3moe-scaled.gguf", "qwen3moe-scaled-plain.gguf"),
    ];
    make_experts(dir.path(), &pairs.map(|(name, _)| name));
    let ids = [5, 17, 33, 60, 99, 121, 7, 250, 12, 88];
    for (name, plain) in pairs {
        let logits = |name: &str| convert(&dir.path().join(name)).logits(&ids, "f32", "all");
        let difference = largest_difference(&logits(plain), &logits(name));
        eprintln!("{name}: largest difference from its plain twin {difference:.7}");
        assert!(difference <= TWIN_LIMIT, "{name}: a logit differs by {difference}");
    }
}

/// Mixtures of experts that are stacked in encodings of llama.cpp: 8-bit activations say what f32 ones say.
#[test]
fn experts_of_ggml_types() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["mixtral-K_M.gguf", "qwen3moe-raw.gguf"];
    make_experts(dir.path(), &names);
    let ids = [5, 17, 33, 60, 99, 121, 7, 250, 12, 88];
    for name in names {
        let converted = convert(&dir.path().join(name));
        let [exact, quantised] = ["f32", "int8"].map(|activations| converted.logits(&ids, activations, "last"));
        let divergence = kl(&exact[0], &quantised[0]);
        eprintln!("{name}: KL {divergence:.6}");
        assert!(divergence <= KL_LIMIT, "{name}: KL {divergence}");
    }
}
