//! The container parser against whole files: hostile and unusual ones, and small ones built here.

mod raw_gguf;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use raw_gguf::Raw;
use vt_convert::dequant::ggml::check_blocks;
use vt_convert::gguf::GgufError;
use vt_convert::gguf::container::{Header, parse};

/// `../shared/<rest>` beside the repository, if it is there.
fn shared(rest: &str) -> Option<PathBuf> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).join(rest);
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("a readable folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    files.sort();
    files
}

/// The container and, as the packer does, its block scales.
fn judge(bytes: &[u8]) -> Result<(), String> {
    let header = parse("file.gguf", bytes).map_err(|e| e.to_string())?;
    for tensor in &header.tensors {
        let start = (header.data_start + tensor.offset) as usize;
        check_blocks(tensor.kind.id, &bytes[start..start + tensor.len as usize])
            .map_err(|e| format!("{} block {} {} not finite", tensor.name, e.block, e.field))?;
    }
    Ok(())
}

/// For each family of hostile files, a word that the message must hold.
const DEFECTS: &[(&str, &str)] = &[
    ("alignment-", "general.alignment"),
    ("array-count", "length of the array"),
    ("array-nested", "array of arrays"),
    ("array-strings-past-eof", "length of the array"),
    ("array-type", "unknown array element type"),
    ("bad-magic", "not a GGUF"),
    ("ggml-legacy", "not a GGUF"),
    ("empty-file", "empty"),
    ("magic-only", "version"),
    ("version-65536", "big-endian"),
    ("version-", "version"),
    ("header-truncated", "ends inside"),
    ("n-tensors", "tensor count"),
    ("n-kv", "key count"),
    ("key-length", "length of metadata key"),
    ("key-empty", "empty key"),
    ("key-duplicate", "twice"),
    ("key-nul", "NUL"),
    ("value-type", "unknown value type"),
    ("string-value", "length of the string"),
    ("bool-value", "boolean"),
    ("tensor-name-64", "name of tensor"),
    ("tensor-name-2^40", "name of tensor"),
    ("tensor-name-duplicate", "twice"),
    ("tensor-name-nul", "NUL"),
    ("tensor-name-not-utf8", "UTF-8"),
    ("tensor-name-path", "path"),
    ("n-dims", "dimensions"),
    ("dim-", "negative"),
    ("dims-product", "63 bits"),
    ("dims-zero", "dimension of 0"),
    ("bytes-", "bytes"),
    ("sizes-sum", "bytes"),
    ("type-9-", "activations"),
    ("type-15-", "activations"),
    ("type-2147483648", "unknown type"),
    ("type-255", "unknown type"),
    ("type-4294967295", "unknown type"),
    ("type-43", "unknown type"),
    ("type-", "withdrawn"),
    ("row-", "multiple of"),
    ("offset-misaligned", "alignment"),
    ("offset-overlap", "overlap"),
    ("offset-past-eof", "do not fit"),
    ("offset-wraps", "do not fit"),
    ("data-", "do not fit"),
    ("tensor-info-truncated", "ends inside"),
    ("q4_0-scale-nan", "not finite"),
    ("mxfp4-scale-255", "not finite"),
];

#[test]
fn hostile_files_are_refused_for_the_defect_in_their_name() {
    let Some(folder) = shared("checkpoints/gguf/hostile") else { return };
    for path in gguf_files(&folder) {
        let stem = path.file_stem().and_then(|s| s.to_str()).expect("a plain name").to_owned();
        let bytes = std::fs::read(&path).expect("a readable file");
        let start = Instant::now();
        let verdict = judge(&bytes);
        assert!(start.elapsed() < Duration::from_secs(1), "{stem}");
        // Gaps and tables out of order lose nothing: every range is checked by itself. An architecture is the model's concern.
        if ["offset-gap", "offset-out-of-order", "array-strings-zero-length-bomb", "architecture-is-u32"]
            .contains(&&*stem)
        {
            assert_eq!(verdict, Ok(()), "{stem}");
            continue;
        }
        let word = DEFECTS
            .iter()
            .find(|(family, _)| stem.starts_with(family))
            .unwrap_or_else(|| panic!("{stem}: no family"))
            .1;
        let message = verdict.expect_err(&stem);
        assert!(message.contains(word), "{stem}: {message:?} does not say {word:?}");
    }
}

#[test]
fn edge_files_parse_except_the_ones_without_meaning() {
    let Some(folder) = shared("checkpoints/gguf/edge") else { return };
    for path in gguf_files(&folder) {
        let stem = path.file_stem().and_then(|s| s.to_str()).expect("a plain name").to_owned();
        let bytes = std::fs::read(&path).expect("a readable file");
        let word = match stem.as_str() {
            "big-endian" => "big-endian",
            "empty-tensor-name" => "empty name",
            "zero-size-2d" | "zero-size-tensor" => "dimension of 0",
            _ => {
                judge(&bytes).unwrap_or_else(|e| panic!("{stem}: {e}"));
                continue;
            }
        };
        let message = judge(&bytes).expect_err(&stem);
        assert!(message.contains(word), "{stem}: {message}");
    }
}

#[test]
fn metadata_of_every_type_is_read() {
    let Some(file) = shared("checkpoints/gguf/edge/every-kv-type.gguf") else { return };
    let bytes = std::fs::read(file).expect("a readable file");
    let header = parse("every.gguf", &bytes).expect("a valid file");
    let get = |key: &str| *header.metadata.get(key).unwrap_or_else(|| panic!("{key}"));
    for kind in ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"] {
        assert_eq!(get(&format!("edge.{kind}")).as_u64(), Some(100));
        let vt_convert::gguf::value::Value::Array(array) = get(&format!("edge.arr.{kind}")) else { panic!("{kind}") };
        assert_eq!(array.integers().expect("integers").collect::<Vec<_>>(), [1, 2, 3]);
    }
    assert_eq!(get("edge.f32").as_f64(), Some(0.5));
    assert_eq!(get("edge.bool").as_bool(), Some(true));
    assert_eq!(get("edge.str").as_str(), Some("h\u{e9}llo \u{2581}\u{1f600}"));
    assert_eq!(get("edge.str.notutf8").as_str(), None);
}

// ---------------------------------------------------------------------------------------------------------------------
// Files built here, so that the parser is proven without the shared folder.

fn refusal(bytes: &[u8]) -> GgufError {
    match parse("t.gguf", bytes) {
        Ok(Header { tensors, .. }) => panic!("accepted {tensors:?}"),
        Err(error) => error,
    }
}

#[test]
fn one_file_per_kind_of_error() {
    let one = || Raw::header(3, 1, 0);
    assert!(parse("t.gguf", &one().info(b"a", &[32, 2], 2, 0).data(36)).is_ok());
    assert!(matches!(refusal(b"lmgg....."), GgufError::Magic { .. }));
    assert!(matches!(refusal(&Raw::header(1, 0, 0).0), GgufError::Version { found: 1, .. }));
    assert!(matches!(refusal(&Raw::header(0x0300_0000, 0, 0).0), GgufError::BigEndian { .. }));
    assert!(matches!(refusal(&Raw::header(3, 0, 0).0[..20]), GgufError::Truncated { .. }));
    assert!(matches!(refusal(&Raw::header(3, u64::MAX, 0).0), GgufError::TooLarge { .. }));
    assert!(matches!(refusal(&Raw::header(3, 0, 7).0), GgufError::TooLarge { .. }));
    let key = |v: Raw| v.data(64);
    let kv = || Raw::header(3, 0, 1).str(b"k");
    assert!(matches!(refusal(&key(kv().u32(13))), GgufError::ValueType { .. }));
    assert!(matches!(refusal(&key(kv().u32(9).u32(9))), GgufError::NestedArray { .. }));
    assert!(matches!(refusal(&key(kv().u32(9).u32(4).u64(1 << 62))), GgufError::TooLarge { .. }));
    assert!(matches!(refusal(&key(kv().u32(7).u32(2))), GgufError::Bool { found: 2, .. }));
    assert!(matches!(refusal(&key(Raw::header(3, 0, 1).str(b"").u32(4))), GgufError::Key { .. }));
    let twice = Raw::header(3, 0, 2).str(b"k").u32(4).u32(1).str(b"k").u32(4).u32(1);
    assert!(matches!(refusal(&key(twice)), GgufError::DuplicateKey { .. }));
    let alignment = Raw::header(3, 0, 1).str(b"general.alignment").u32(4).u32(24);
    assert!(matches!(refusal(&key(alignment)), GgufError::Alignment { .. }));
    assert!(matches!(refusal(&one().info(b"\xff", &[1], 0, 0).data(32)), GgufError::TensorName { .. }));
    let double = Raw::header(3, 2, 0).info(b"a", &[8], 0, 0).info(b"a", &[8], 0, 32).data(64);
    assert!(matches!(refusal(&double), GgufError::DuplicateTensor { .. }));
    assert!(matches!(refusal(&one().info(b"a", &[1; 5], 0, 0).data(32)), GgufError::DimensionCount { found: 5, .. }));
    assert!(matches!(refusal(&one().info(b"a", &[0], 0, 0).data(32)), GgufError::Shape { .. }));
    assert!(matches!(refusal(&one().info(b"a", &[1 << 32, 1 << 31], 24, 0).data(32)), GgufError::Shape { .. }));
    assert!(matches!(refusal(&one().info(b"a", &[32], 36, 0).data(32)), GgufError::RemovedType { id: 36, .. }));
    assert!(matches!(refusal(&one().info(b"a", &[32], 9, 0).data(64)), GgufError::ActivationType { id: 9, .. }));
    assert!(matches!(refusal(&one().info(b"a", &[32], 99, 0).data(64)), GgufError::UnknownType { id: 99, .. }));
    assert!(matches!(refusal(&one().info(b"a", &[192, 4], 12, 0).data(512)), GgufError::RaggedRow { block: 256, .. }));
    assert!(matches!(refusal(&one().info(b"a", &[8], 0, 4).data(64)), GgufError::Misaligned { .. }));
    assert!(matches!(refusal(&one().info(b"a", &[8], 0, 32).data(63)), GgufError::OutOfFile { .. }));
    let shared = Raw::header(3, 2, 0).info(b"a", &[16], 0, 0).info(b"b", &[8], 0, 32).data(64);
    assert!(matches!(refusal(&shared), GgufError::Overlap { start: 32, end: 64, .. }));
}

proptest::proptest! {
    /// Any damage to a valid header is an error or a valid header, never a panic.
    #[test]
    fn damaged_headers_never_panic(place in 0usize..180, byte: u8, cut in 0usize..180) {
        let mut bytes = Raw::header(3, 2, 2)
            .str(b"k").u32(9).u32(8).u64(2).str(b"x").str(b"yy")
            .str(b"general.alignment").u32(4).u32(32)
            .info(b"a", &[32, 2], 2, 0).info(b"b", &[8], 0, 64).data(96);
        let place = place % bytes.len();
        bytes[place] = byte;
        let _ = judge(&bytes);
        let _ = judge(&bytes[..cut.min(bytes.len())]);
    }
}
