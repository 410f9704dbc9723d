//! Hostile and odd checkpoints, one per error variant, and the public cases where they are at hand.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;

const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/cases/gen");

/// A safetensors file with that header and so many data bytes.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 7);
    bytes
}

fn tensor(name: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end.saturating_sub(begin))
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), r#"{"model_type":"llama"}"#).unwrap();
        Folder(dir)
    }

    fn with(self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        fs::write(self.0.path().join(name), bytes).unwrap();
        self
    }

    fn open(&self) -> Result<Checkpoint, SafetensorsError> {
        open(self.0.path())
    }
}

fn header_error(bytes: Vec<u8>) -> SafetensorsError {
    Folder::new().with("model.safetensors", bytes).open().unwrap_err()
}

#[test]
fn opens_a_plain_folder() {
    let header = format!(r#"{{"__metadata__":{{"format":"pt"}},{},{}}}   "#, tensor("b", 4, 6), tensor("a", 0, 4));
    let c = Folder::new()
        .with("model.safetensors", file(&header, 6))
        .with("tokenizer.json", "{}")
        .with(
            "tokenizer_config.json",
            r#"{"chat_template":[{"name":"tool","template":"T"},{"name":"default","template":"D"}]}"#,
        )
        .open()
        .unwrap();
    assert_eq!(c.tensors.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(c.tensors[1].offset, 8 + header.len() as u64 + 4);
    assert_eq!(c.data(&c.tensors[0]), [7; 4]);
    let files: Vec<_> = c.files.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(files, ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]);
    assert!(c.assets.contains(&("chat_template.jinja".into(), b"D".to_vec())));
    assert!(c.warnings.is_empty(), "{:?}", c.warnings);
}

#[test]
fn header_variants() {
    use SafetensorsError as E;
    assert!(matches!(header_error(vec![]), E::Empty { .. }));
    let lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n".to_vec();
    assert!(matches!(header_error(lfs), E::LfsPointer { .. }));
    assert!(
        matches!(header_error(b"../../blobs/e36".to_vec()), E::LinkText { target, .. } if target == "../../blobs/e36")
    );
    assert!(matches!(header_error(vec![1, 2, 3]), E::HeaderLength { .. }));
    assert!(
        matches!(header_error((1u64 << 40).to_le_bytes().to_vec()), E::HeaderLength { found, .. } if found == 1 << 40)
    );
    assert!(matches!(header_error(u64::MAX.to_le_bytes().to_vec()), E::HeaderLength { .. }));
    assert!(matches!(header_error(file("[1]", 0)), E::HeaderJson { .. }));
    assert!(matches!(header_error(file("{", 0)), E::HeaderJson { .. }));
    assert!(matches!(
        header_error(file(r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}"#, 0)),
        E::HeaderJson { .. }
    ));
    assert!(matches!(header_error(file(&"[".repeat(100_000), 0)), E::HeaderJson { .. }));
    let twice = format!("{{{},{}}}", tensor("a", 0, 1), tensor("a", 1, 2));
    assert!(matches!(header_error(file(&twice, 2)), E::DuplicateKey { name, .. } if name == "a"));
    let twice = r#"{"__metadata__":{"a":"1","a":"2"}}"#;
    assert!(matches!(header_error(file(twice, 0)), E::DuplicateKey { .. }));
    let dtype = r#"{"a":{"dtype":"F8_E4M3FNUZ","shape":[1],"data_offsets":[0,1]}}"#;
    assert!(matches!(header_error(file(dtype, 1)), E::Dtype { dtype, .. } if dtype == "F8_E4M3FNUZ"));
    let reversed = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[2,1]}}"#;
    assert!(matches!(header_error(file(reversed, 2)), E::RangeReversed { .. }));
    let short = r#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,15]}}"#;
    assert!(matches!(header_error(file(short, 15)), E::RangeSize { .. }));
    let huge = format!(r#"{{"a":{{"dtype":"F32","shape":[{0},{0}],"data_offsets":[0,0]}}}}"#, 1u64 << 40);
    assert!(matches!(header_error(file(&huge, 0)), E::RangeSize { expected, .. } if expected == "more than 2^64"));
    let overlap = format!("{{{},{}}}", tensor("a", 0, 4), tensor("b", 2, 6));
    assert!(matches!(header_error(file(&overlap, 6)), E::Overlap { second, .. } if second == "b"));
    let hole = format!("{{{},{}}}", tensor("a", 0, 4), tensor("b", 5, 6));
    assert!(matches!(header_error(file(&hole, 6)), E::Hole { len: 1, .. }));
    let whole = format!("{{{}}}", tensor("a", 0, 4));
    assert!(matches!(header_error(file(&whole, 3)), E::FileSize { .. }));
    assert!(matches!(header_error(file(&whole, 5)), E::FileSize { .. }));
    let far = format!("{{{}}}", tensor("a", u64::MAX - 4, u64::MAX));
    assert!(matches!(header_error(file(&far, 4)), E::FileSize { .. }));
}

#[test]
fn folder_variants() {
    use SafetensorsError as E;
    let shard = |name: &str| file(&format!("{{{}}}", tensor(name, 0, 4)), 4);
    let index = |map: &str| format!(r#"{{"weight_map":{{{map}}}}}"#);

    assert!(matches!(open(Path::new("/nonexistent/x")).unwrap_err(), E::Io { .. }));
    assert!(matches!(Folder::new().open().unwrap_err(), E::NoWeights { .. }));
    assert!(matches!(Folder::new().with("pytorch_model.bin", "x").open().unwrap_err(), E::OnlyPickle { .. }));
    let no_config = tempfile::tempdir().unwrap();
    fs::write(no_config.path().join("model.safetensors"), shard("a")).unwrap();
    assert!(matches!(open(no_config.path()).unwrap_err(), E::MissingFile { file, .. } if file == "config.json"));
    let bad = Folder::new().with("model.safetensors", shard("a")).with("config.json", "[]");
    assert!(matches!(bad.open().unwrap_err(), E::Json { .. }));

    let one = || Folder::new().with("model-00001-of-00002.safetensors", shard("a"));
    assert!(
        matches!(one().open().unwrap_err(), E::MissingShards { missing, .. } if missing == ["model-00002-of-00002.safetensors"])
    );
    let many = Folder::new().with("model-00001-of-99999.safetensors", shard("a"));
    assert!(matches!(many.open().unwrap_err(), E::MissingShards { .. }));
    let both = || one().with("model-00002-of-00002.safetensors", shard("b"));
    assert_eq!(both().open().unwrap().tensors.len(), 2);
    let dup = one().with("model-00002-of-00002.safetensors", shard("a"));
    assert!(matches!(dup.open().unwrap_err(), E::DuplicateTensor { tensor, .. } if tensor == "a"));
    let sets =
        Folder::new().with("x-00001-of-00001.safetensors", shard("a")).with("y-00001-of-00001.safetensors", shard("b"));
    assert!(matches!(sets.open().unwrap_err(), E::AmbiguousWeights { .. }));

    let wrong = index(r#""a":"model-00002-of-00002.safetensors","b":"model-00001-of-00002.safetensors""#);
    let e = both().with(INDEX_NAME, wrong).open().unwrap_err();
    assert!(matches!(e, E::IndexTensor { tensor, elsewhere: Some(_), .. } if tensor == "a"));
    let e = one().with(INDEX_NAME, index(r#""a":"model-00001-of-00002.safetensors","b":"gone.safetensors""#)).open();
    assert!(matches!(e.unwrap_err(), E::MissingShards { missing, .. } if missing == ["gone.safetensors"]));
    for name in ["../m.safetensors", "/m.safetensors", "a\\\\b.safetensors", "..", "", "m.bin"] {
        let e = one().with(INDEX_NAME, index(&format!(r#""a":"{name}""#))).open().unwrap_err();
        assert!(matches!(e, E::IndexName { .. }), "{name}: {e}");
    }
    let twice = index(r#""a":"model-00001-of-00002.safetensors","a":"model-00001-of-00002.safetensors""#);
    assert!(matches!(one().with(INDEX_NAME, twice).open().unwrap_err(), E::DuplicateKey { .. }));
    assert!(matches!(one().with(INDEX_NAME, index("")).open().unwrap_err(), E::Json { .. }));
    assert!(matches!(one().with(INDEX_NAME, "{}").open().unwrap_err(), E::Json { .. }));

    // The index decides between two copies; what it does not list is kept.
    let dup = both()
        .with("model-00001-of-00002.safetensors", file(&format!("{{{},{}}}", tensor("a", 0, 4), tensor("b", 4, 8)), 8));
    let c = dup.with(INDEX_NAME, index(r#""b":"model-00002-of-00002.safetensors""#)).open();
    let c = c.unwrap();
    assert_eq!(c.tensors.iter().map(|t| (t.name.as_str(), t.file)).collect::<Vec<_>>(), [("b", 0)]);
}

const INDEX_NAME: &str = "model.safetensors.index.json";

#[cfg(unix)]
#[test]
fn links() {
    let blobs = tempfile::tempdir().unwrap();
    let blob = blobs.path().join("abc");
    fs::write(&blob, file(&format!("{{{}}}", tensor("a", 0, 4)), 4)).unwrap();
    let folder = Folder::new();
    let link = folder.0.path().join("model.safetensors");
    std::os::unix::fs::symlink(&blob, &link).unwrap();
    let c = folder.open().unwrap();
    assert_eq!((c.files[0].name.as_str(), &c.files[0].path), ("model.safetensors", &blob.canonicalize().unwrap()));
    fs::remove_file(&blob).unwrap();
    let e = folder.open().unwrap_err();
    assert!(matches!(&e, SafetensorsError::DanglingLink { target, .. } if *target == blob), "{e}");
}

#[test]
fn one_file_as_input() {
    let a = file(&format!("{{{}}}", tensor("a", 0, 4)), 4);
    let folder = Folder::new().with("x.safetensors", &a).with("y.safetensors", &a);
    let c = open(&folder.0.path().join("y.safetensors")).unwrap();
    assert_eq!(c.files[0].name, "y.safetensors");
    assert_eq!(c.warnings.len(), 2, "{:?}", c.warnings);
}

/// Every container case of the public collection: refused with what must be mentioned, or opened.
#[test]
fn public_container_cases() {
    let Ok(cases) = fs::read_dir(CASES) else {
        eprintln!("skipped: {CASES} is not there");
        return;
    };
    let mut seen = 0;
    for case in cases.map(|c| c.unwrap().path()) {
        let id = case.file_name().unwrap().to_string_lossy().into_owned();
        if !id.starts_with("C5") && id != "C31_fnuz_dtype" {
            continue;
        }
        seen += 1;
        let expected: Value = serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
        let input: PathBuf = case.join(expected["input"].as_str().unwrap());
        match (open(&input), expected["outcome"].as_str().unwrap()) {
            (Ok(_), "ok") => {}
            (Err(e), "error") => {
                for text in expected["must_mention"].as_array().unwrap() {
                    assert!(e.to_string().contains(text.as_str().unwrap()), "{id}: {e}");
                }
            }
            (got, _) => panic!("{id}: {got:?}"),
        }
    }
    assert!(seen > 10);
}
