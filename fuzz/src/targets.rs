//! One target per parser: how its input is made from a seed and a stream of numbers, and what is done with it.
//!
//! Whatever comes out is fine but a panic: errors are what hostile input earns.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vt_bundle::Bundle;
use vt_bundle::manifest::Placement;
use vt_convert::convert::prepare;
use vt_convert::open::Choices;
use vt_tests::process::{Numbers, run};
use vt_tests::{fixtures, folders};

use crate::mutate;

/// Names of the targets.
pub const NAMES: [&str; 6] = ["safetensors-header", "index", "config", "plan", "manifest", "gguf"];

/// A folder with a valid input, of which each run changes one file.
pub struct Target {
    name: String,
    /// What is opened.
    input: PathBuf,
    /// The file that is changed, its valid content, and where its JSON begins and ends in that.
    file: PathBuf,
    seed: Vec<u8>,
    json: std::ops::Range<usize>,
}

impl Target {
    /// Makes the seed in `dir`.
    ///
    /// # Panics
    /// If the fixtures cannot be made, which is a fault of the setup.
    pub fn new(name: &str, dir: &Path) -> Self {
        let fixture = match name {
            "gguf" => "tiny.gguf",
            "plan" | "index" => "moe",
            _ => "nvfp4",
        };
        fixtures::make_tiny(dir, &[fixture]);
        let mut input = dir.join(fixture);
        let file = match name {
            "index" => {
                let file = input.join("model.safetensors.index.json");
                let header = fs::read(input.join("model.safetensors")).expect("model");
                let tensors: Value = serde_json::from_slice(&header[header_range(&header)]).expect("header");
                let names = tensors.as_object().expect("object").keys().filter(|k| *k != "__metadata__");
                let map: serde_json::Map<String, Value> =
                    names.map(|k| (k.clone(), Value::from("model.safetensors"))).collect();
                fs::write(&file, serde_json::json!({"metadata": {}, "weight_map": map}).to_string()).expect("index");
                file
            }
            "config" => input.join("config.json"),
            "manifest" => {
                let bundle = dir.join("bundle");
                run("vt-convert", &[&input, &bundle]).ok();
                input = bundle;
                input.join("manifest.json")
            }
            "gguf" => input.clone(),
            _ => input.join("model.safetensors"),
        };
        let seed = fs::read(&file).expect("seed");
        let json = match name {
            "safetensors-header" | "plan" => header_range(&seed),
            "gguf" => 0..0,
            _ => 0..seed.len(),
        };
        Self { name: name.to_owned(), input, file, seed, json }
    }

    /// The next input for the changed file: what differs from the seed is in its first part, the rest is a hole.
    pub fn input(&self, numbers: &mut Numbers) -> Vec<u8> {
        if self.name == "gguf" {
            let mut bytes = self.seed.clone();
            mutate::bytes(numbers, &mut bytes);
            return bytes;
        }
        let mut json = self.seed[self.json.clone()].to_vec();
        let as_tree = self.name == "manifest" || self.name == "plan" || numbers.below(3) > 0;
        if as_tree && let Ok(mut value) = serde_json::from_slice(&json) {
            mutate::json(numbers, &mut value);
            json = match self.name.as_str() {
                "manifest" => serde_json_canonicalizer::to_vec(&value).unwrap_or(json),
                _ => value.to_string().into_bytes(),
            };
        } else {
            mutate::bytes(numbers, &mut json);
        }
        if self.json.start == 0 {
            return json;
        }
        let mut len = json.len() as u64;
        if self.name == "safetensors-header" && numbers.below(16) == 0 {
            len = numbers.below(u64::MAX);
        }
        [&len.to_le_bytes()[..], &json].concat()
    }

    /// Puts an input in place and opens it.
    pub fn run(&self, input: &[u8]) {
        if self.json.start > 0 {
            // A header changes its length; the data behind it is a hole of the right size.
            let file = fs::File::create(&self.file).expect("writable");
            file.write_all_at(input, 0).expect("written");
            let data = (self.seed.len() - self.json.end) as u64;
            file.set_len(input.len() as u64 + data).expect("extended");
        } else {
            fs::write(&self.file, input).expect("writable");
        }
        if self.name != "manifest" {
            // Opens, resolves, plans.
            let _ = prepare(&self.input, Choices::default());
            return;
        }
        fs::write(self.input.join("bundle.id"), format!("{}\n", blake3::hash(input).to_hex())).expect("written");
        let Ok(bundle) = Bundle::open(&self.input) else { return };
        for (tensor, geometry) in bundle.tensors() {
            let _ = (tensor.elements(), geometry);
        }
        for placement in [Placement::Image, Placement::Cold] {
            let _ = bundle.gaps(placement);
            if let Ok(map) = bundle.map(placement) {
                let _ = bundle.verify_padding(placement, map.bytes());
            }
        }
        let _ = bundle.leaves();
        bundle.manifest().assets.iter().for_each(|asset| drop(bundle.read_asset(asset)));
    }

    /// Keeps an input that made the program panic.
    pub fn keep(&self, input: &[u8], number: u64) -> PathBuf {
        let path = PathBuf::from(format!("crash-{}-{number}", self.name));
        fs::write(&path, input).expect("the current folder is writable");
        path
    }
}

/// Where the header of a safetensors file lies.
fn header_range(file: &[u8]) -> std::ops::Range<usize> {
    let len = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    8..8 + len
}

/// Runs what a crash left again.
pub fn replay(name: &str, dir: &Path, input: &Path) {
    let target = Target::new(name, dir);
    target.run(&fs::read(input).expect("input"));
    println!("{} files, no panic", folders::files(dir).len());
}
