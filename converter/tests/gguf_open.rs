//! Opening models: names, row order, configuration, split sets, refusals by message.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use vt_bundle::row_order::RowOrder;
use vt_convert::catalog::Storage;
use vt_convert::gguf::{GgufMetadata, catalog, check_tensor, open};
use vt_convert::source::Checkpoint;

fn shared(rest: &str) -> Option<PathBuf> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).join(rest);
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

fn files_of(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("a readable folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    files.sort();
    files
}

fn opened(path: &Path) -> (Checkpoint, GgufMetadata) {
    open(path).unwrap_or_else(|e| panic!("{e}"))
}

fn refusal(path: &Path) -> String {
    match open(path) {
        Ok((checkpoint, metadata)) => match catalog(&checkpoint, &metadata) {
            Ok(_) => panic!("{} was accepted", path.display()),
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    }
}

#[test]
fn small_models_open_with_names_and_configuration() {
    let Some(folder) = shared("checkpoints/gguf/tiny") else { return };
    for path in files_of(&folder) {
        let (checkpoint, metadata) = opened(&path);
        assert!(metadata.names.iter().all(|n| !n.unknown), "{}", path.display());
        let config = &checkpoint.config;
        assert_eq!((&config["hidden_size"], &config["num_hidden_layers"]), (&json!(512), &json!(2)));
        assert_eq!(config["rms_norm_eps"], json!(1e-5));
        let described = catalog(&checkpoint, &metadata).unwrap_or_else(|e| panic!("{e}"));
        let find = |name: &str| described.entries.iter().find(|e| e.name == name).unwrap_or_else(|| panic!("{name}"));
        let q = find("model.layers.1.self_attn.q_proj.weight");
        if config["model_type"] == "llama" {
            assert_eq!(q.row_order, RowOrder::RopeInterleaved { head_dim: 64 });
            assert_eq!(find("model.layers.1.self_attn.v_proj.weight").row_order, RowOrder::Same);
        } else {
            assert_eq!(q.row_order, RowOrder::Same);
        }
        if config["model_type"] == "qwen3_moe" {
            let Storage::Tiled { shape, inputs, .. } = &find("model.layers.0.mlp.experts.3.down_proj.weight").storage
            else {
                panic!("a tiled expert");
            };
            assert_eq!((shape.n, shape.k), (512, 256));
            assert_eq!(inputs[0].offset, 3 * inputs[0].len);
            assert_eq!(config["num_experts_per_tok"], json!(2));
        }
        if path.to_string_lossy().contains("scaled-NVFP4") {
            assert!(q.scale.is_some());
            assert!(described.conventions.contains(&"scale-multiplies-output".to_owned()));
        }
    }
}

#[test]
fn any_part_of_a_split_model_opens_the_whole() {
    let Some(folder) = shared("checkpoints/gguf/split") else { return };
    let mut seen: Option<(Value, usize)> = None;
    for path in files_of(&folder) {
        let (checkpoint, _) = opened(&path);
        assert_eq!(checkpoint.files.len(), 3);
        let this = (checkpoint.config.clone(), checkpoint.tensors.len());
        assert_eq!(*seen.get_or_insert(this.clone()), this);
        assert_eq!(checkpoint.config["tie_word_embeddings"], json!(false), "the head is in a later part");
    }
}

/// Case folders whose input must be refused, and those that must open.
#[test]
fn cases_hold() {
    let Some(folder) = shared("cases/gen") else { return };
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let case = entry.expect("an entry").path();
        let name = case.file_name().and_then(|n| n.to_str()).expect("a plain name").to_owned();
        if !("C34".."C50").contains(&&name[..3]) || !name.starts_with('C') {
            continue;
        }
        let expected: Value =
            serde_json::from_slice(&std::fs::read(case.join("expected.json")).expect("expected.json")).expect("JSON");
        let input = case.join(expected["input"].as_str().expect("an input"));
        if expected["outcome"] == "error" {
            let message = refusal(&input);
            for word in expected["must_mention"].as_array().into_iter().flatten() {
                let word = word.as_str().expect("a word");
                assert!(message.contains(word), "{name}: {message:?} does not say {word:?}");
            }
        } else {
            let (checkpoint, metadata) = opened(&input);
            let described = catalog(&checkpoint, &metadata).unwrap_or_else(|e| panic!("{name}: {e}"));
            for weight in expected["reference"].as_object().into_iter().flatten().map(|(k, _)| k) {
                assert!(described.entries.iter().any(|e| e.name == *weight), "{name}: no {weight}");
            }
        }
        count += 1;
    }
    assert!(count > 25, "{count} cases");
}

#[test]
fn hostile_files_are_refused_as_models_too() {
    let Some(folder) = shared("checkpoints/gguf/hostile") else { return };
    for path in files_of(&folder) {
        let message = refusal(&path);
        if path.ends_with("q4_0-scale-nan.gguf") {
            assert!(message.contains("not finite"), "{message}");
        }
    }
}

fn sha256(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|b| format!("{b:02x}")).collect()
}

/// Every tensor's bytes and values, by the hashes that ggml's own decoder gave.
#[test]
fn every_tensor_has_the_bytes_and_values_of_the_oracle() {
    let Some(folder) = shared("checkpoints/gguf/oracle") else { return };
    for entry in std::fs::read_dir(&folder).expect("a readable folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|e| e != "json") {
            continue;
        }
        let stem = path.file_stem().and_then(|s| s.to_str()).expect("a plain name");
        let file = ["tiny", "split"]
            .map(|f| folder.join("..").join(f).join(format!("{stem}.gguf")))
            .into_iter()
            .find(|f| f.exists());
        // The model that comes from a package is not beside its oracle.
        let Some(file) = file else { continue };
        let oracle: Value = serde_json::from_slice(&std::fs::read(&path).expect("readable")).expect("JSON");
        let (checkpoint, _) = opened(&file);
        for want in oracle["tensors"].as_array().expect("tensors") {
            let name = want["name"].as_str().expect("a name");
            let tensor = checkpoint.tensor(name).unwrap_or_else(|| panic!("{stem}: no {name}"));
            let data = checkpoint.data(tensor);
            check_tensor(stem, tensor, data).unwrap_or_else(|e| panic!("{e}"));
            let id = vt_convert::gguf::types::TYPES
                .iter()
                .find(|t| t.source_dtype() == tensor.dtype)
                .expect("a type of the table")
                .id;
            let mut values = vec![0f32; tensor.shape.iter().product::<u64>() as usize];
            vt_convert::dequant::ggml::dequantize(id, data, &mut values).expect("a decoder");
            let bits: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(sha256(data), want["raw_sha256"], "{stem}: bytes of {name}");
            assert_eq!(sha256(&bits), want["f32_sha256"], "{stem}: values of {name}");
        }
    }
}
