//! One damaged or hostile bundle per way that a bundle can be wrong: the reader names it and never panics.

use std::fs;
use std::path::Path;

use vt_bundle::codec::hf::nvfp4;
use vt_bundle::hash::{leaf_digest, to_hex};
use vt_bundle::layout::TiledMatrix;
use vt_bundle::manifest::{
    AssetRole, FORMAT, FORMAT_VERSION, Image, Layout, Manifest, Model, Part, Placement, Plane, Quantization,
    ScaleExactness, Segment, Source, SourceFile, Tensor,
};
use vt_bundle::reader::Leaves;
use vt_bundle::row_order::RowOrder;
use vt_bundle::writer::{write_asset, write_manifest};
use vt_bundle::{Bundle, BundleError};

const SEGMENT: &str = "segments/image-00000.bin";
/// The NVFP4 matrix `[24, 32]`: codes 1024, scales 128, global 4 bytes, each from a multiple of 256; then the norm.
const IMAGE_BYTES: usize = 2048;
const NORM_AT: u64 = 1536;
/// The largest integer that canonical JSON keeps exact.
const LARGEST: u64 = 1 << 53;

/// What makes a sound value wrong.
type Change<T> = fn(&mut T);

fn part(name: &str, rows: u64) -> Part {
    Part {
        name: name.into(),
        source: name.into(),
        row_start: 0,
        rows,
        row_order: RowOrder::Same,
        scale: None,
        input_scale: None,
        pre_quant_scale: None,
        low_rank: None,
    }
}

fn tensor(name: &str, shape: &[u64], layout: Layout, decode: &str, planes: Vec<Plane>) -> Tensor {
    Tensor {
        name: name.into(),
        placement: Placement::Image,
        shape: shape.to_vec(),
        layout,
        decode: decode.into(),
        scales: ScaleExactness::Exact,
        planes,
        parts: vec![part(name, shape[0])],
        experts: None,
        min_compute_capability: None,
    }
}

/// A sound bundle of two tensors.
fn make(dir: &Path) -> Manifest {
    let matrix = TiledMatrix::new(&nvfp4::MODELOPT_SPEC, 32, &[24], 16, [0, 0]).expect("valid geometry");
    let mut at = 0;
    let planes = matrix
        .planes()
        .map(|p| {
            let size = matrix.plane_bytes(p);
            let plane =
                Plane { name: matrix.plane_name(p).into(), dtype: matrix.plane_dtype(p).into(), offset: at, size };
            at = (at + size).next_multiple_of(256);
            plane
        })
        .collect();
    assert_eq!(at, NORM_AT);
    let image = vec![0u8; IMAGE_BYTES];
    fs::create_dir_all(dir.join("segments")).expect("folder");
    fs::write(dir.join(SEGMENT), &image).expect("written");
    let digest = leaf_digest(&image, 0, IMAGE_BYTES as u64);
    let leaves = write_asset(dir, AssetRole::Leaves, "assets/leaves.bin", &digest).expect("written");
    let marlin = Layout::Marlin { encoding: "e2m1".into(), group_size: Some(16), block: None, padded_shape: [64, 32] };
    let norm = Plane { name: "data".into(), dtype: "f32".into(), offset: NORM_AT, size: 128 };
    let manifest = Manifest {
        format: FORMAT.into(),
        format_version: FORMAT_VERSION,
        model: Model { architecture: "llama".into(), config: serde_json::json!({"eps": 1e-6}), conventions: vec![] },
        quantization: Quantization { decodes: vec![], declared: None },
        source: Source {
            kind: "safetensors".into(),
            files: vec![SourceFile { name: "model.safetensors".into(), size: 1, blake3: "0".repeat(64) }],
        },
        image: Image {
            size: IMAGE_BYTES as u64,
            segments: vec![Segment { file: SEGMENT.into(), size: IMAGE_BYTES as u64, blake3: to_hex(&digest) }],
        },
        cold: Image::default(),
        tensors: vec![
            tensor("a.weight", &[24, 32], marlin, "nvfp4.modelopt@1", planes),
            tensor("norm.weight", &[32], Layout::RowMajor { dtype: "f32".into() }, "plain.f32@1", vec![norm]),
        ],
        kv_cache: None,
        assets: vec![leaves],
    };
    write_manifest(dir, &manifest).expect("written");
    manifest
}

/// The error of opening a bundle whose manifest was changed by `change` and signed again.
fn open_changed(change: impl FnOnce(&mut Manifest)) -> BundleError {
    let dir = tempfile::tempdir().expect("temporary folder");
    let mut manifest = make(dir.path());
    change(&mut manifest);
    write_manifest(dir.path(), &manifest).expect("written");
    Bundle::open(dir.path()).expect_err("a changed manifest must be refused")
}

/// The error of a sound bundle whose files were changed by `damage`, opened and verified in full.
fn check_damaged(damage: impl FnOnce(&Path)) -> BundleError {
    let dir = tempfile::tempdir().expect("temporary folder");
    make(dir.path());
    damage(dir.path());
    verify(dir.path()).expect_err("a damaged bundle must be refused")
}

fn verify(dir: &Path) -> Result<(), BundleError> {
    let bundle = Bundle::open(dir)?;
    for asset in &bundle.manifest().assets {
        bundle.read_asset(asset)?;
    }
    let leaves: Leaves = bundle.leaves()?;
    bundle.verify_files(Placement::Image, &leaves, &|_| {})?;
    let map = bundle.map(Placement::Image)?;
    bundle.verify_mapped(Placement::Image, map.bytes(), &leaves, &|_| {})?;
    bundle.verify_padding(Placement::Image, map.bytes())
}

/// Writes raw manifest bytes with a matching id.
fn sign(dir: &Path, bytes: &[u8]) {
    fs::write(dir.join("manifest.json"), bytes).expect("written");
    fs::write(dir.join("bundle.id"), format!("{}\n", blake3::hash(bytes).to_hex())).expect("written");
}

#[test]
fn a_sound_bundle_passes() {
    let dir = tempfile::tempdir().expect("temporary folder");
    make(dir.path());
    verify(dir.path()).expect("sound");
}

#[test]
fn damaged_files_are_named() {
    let flip = |name: &'static str, at: usize| {
        move |dir: &Path| {
            let path = dir.join(name);
            let mut bytes = fs::read(&path).expect("read");
            bytes[at] ^= 1;
            fs::write(path, bytes).expect("written");
        }
    };
    assert!(
        matches!(check_damaged(flip("manifest.json", 40)), BundleError::Hash { path, .. } if path.ends_with("manifest.json"))
    );
    assert!(matches!(check_damaged(flip("bundle.id", 3)), BundleError::Hash { .. }));
    assert!(
        matches!(check_damaged(flip("assets/leaves.bin", 3)), BundleError::Hash { path, .. } if path.ends_with("leaves.bin"))
    );
    match check_damaged(flip(SEGMENT, NORM_AT as usize + 5)) {
        BundleError::Leaf { path, leaf: 0, tensors, .. } => {
            assert!(path.ends_with(SEGMENT));
            assert!(tensors.contains(&"norm.weight".to_owned()));
        }
        other => panic!("{other}"),
    }
    let cut = |dir: &Path| fs::write(dir.join(SEGMENT), vec![0; IMAGE_BYTES - 1]).expect("written");
    assert!(matches!(check_damaged(cut), BundleError::Size { found: 2047, expected: 2048, .. }));
    for name in ["manifest.json", "bundle.id", SEGMENT, "assets/leaves.bin"] {
        let gone = |dir: &Path| fs::remove_file(dir.join(name)).expect("removed");
        assert!(matches!(check_damaged(gone), BundleError::Missing { path } if path.ends_with(name)), "{name}");
    }
}

#[test]
fn padding_that_is_not_zero_is_named() {
    // Signed as if it belonged there: only the rule about padding can find it.
    for (at, place) in [(1023, "a.weight"), (1300, "bytes"), (2047, "bytes")] {
        let dir = tempfile::tempdir().expect("temporary folder");
        let mut manifest = make(dir.path());
        let mut image = vec![0u8; IMAGE_BYTES];
        image[at] = 0x10;
        fs::write(dir.path().join(SEGMENT), &image).expect("written");
        let digest = leaf_digest(&image, 0, IMAGE_BYTES as u64);
        manifest.image.segments[0].blake3 = to_hex(&digest);
        manifest.assets =
            vec![write_asset(dir.path(), AssetRole::Leaves, "assets/leaves.bin", &digest).expect("written")];
        write_manifest(dir.path(), &manifest).expect("written");
        match verify(dir.path()) {
            Err(BundleError::Padding { place: found, .. }) => assert!(found.contains(place), "{at}: {found}"),
            other => panic!("{at}: {other:?}"),
        }
    }
}

#[test]
fn bytes_that_are_not_canonical_are_refused() {
    let dir = tempfile::tempdir().expect("temporary folder");
    let manifest = make(dir.path());
    sign(dir.path(), &serde_json::to_vec_pretty(&manifest).expect("JSON"));
    assert!(matches!(Bundle::open(dir.path()), Err(BundleError::NotCanonical { .. })));
    sign(dir.path(), b"{\"format\":\"vt-bundle\",\"format_version\":1}");
    assert!(matches!(Bundle::open(dir.path()), Err(BundleError::Manifest { .. })));
    for garbage in [&b""[..], b"{", b"[]", b"\xff\xfe", b"null"] {
        sign(dir.path(), garbage);
        assert!(matches!(Bundle::open(dir.path()), Err(BundleError::Manifest { .. })), "{garbage:?}");
    }
    let deep = vec![b'['; 1 << 20];
    sign(dir.path(), &deep);
    assert!(matches!(Bundle::open(dir.path()), Err(BundleError::Manifest { .. })));
}

#[test]
fn unknown_versions_and_layouts_are_named() {
    assert!(matches!(open_changed(|m| m.format_version = 2), BundleError::Version { version: 2, .. }));
    assert!(matches!(open_changed(|m| m.format = "other".into()), BundleError::Version { .. }));
    let dir = tempfile::tempdir().expect("temporary folder");
    let text = String::from_utf8(make(dir.path()).canonical_bytes().expect("JSON")).expect("UTF-8");
    sign(dir.path(), text.replace("marlin-16x64@1", "marlin-16x64@9").as_bytes());
    let error = Bundle::open(dir.path()).expect_err("unknown layout").to_string();
    assert!(error.contains("marlin-16x64@9"), "{error}");
    let error = open_changed(|m| m.tensors[0].decode = "nvfp4.new@7".into()).to_string();
    assert!(error.contains("nvfp4.new@7") && error.contains("a.weight"), "{error}");
}

#[test]
fn impossible_tensors_are_named() {
    let changes: [(&str, Change<Manifest>); 19] = [
        ("axis of zero", |m| m.tensors[0].shape[1] = 0),
        ("axis beyond the limit", |m| m.tensors[0].shape[1] = 1 << 40),
        ("K that is no multiple of the group", |m| m.tensors[0].shape[1] = 31),
        ("shape of three axes", |m| m.tensors[0].shape.push(1)),
        ("shape that overflows", |m| m.tensors[1].shape = vec![32, LARGEST, LARGEST]),
        ("rows that differ from the parts", |m| m.tensors[0].shape[0] = 25),
        ("no parts", |m| m.tensors[0].parts.clear()),
        ("rows of a part that overflow", |m| m.tensors[1].parts[0].rows = LARGEST),
        ("part at another row", |m| m.tensors[0].parts[0].row_start = 64),
        ("group of zero", |m| set_group(m, Some(0))),
        ("no group", |m| set_group(m, None)),
        ("misaligned plane", |m| m.tensors[1].planes[0].offset += 4),
        ("plane outside the image", |m| m.tensors[1].planes[0].offset = 1 << 20),
        ("plane at the end of the address space", |m| m.tensors[1].planes[0].offset = LARGEST - 256),
        ("plane of another size", |m| m.tensors[1].planes[0].size = 124),
        ("plane that is missing", |m| m.tensors[0].planes.truncate(2)),
        ("overlapping planes", |m| m.tensors[1].planes[0].offset = 0),
        ("name listed twice", |m| m.tensors[1].name = "a.weight".into()),
        ("row order that does not fit", |m| {
            m.tensors[0].parts[0].row_order = RowOrder::RopeInterleaved { head_dim: 7 };
        }),
    ];
    for (what, change) in changes {
        match open_changed(change) {
            BundleError::Tensor { .. } | BundleError::Layout { .. } => {}
            other => panic!("{what}: {other}"),
        }
    }
}

fn set_group(manifest: &mut Manifest, group: Option<u64>) {
    if let Layout::Marlin { group_size, .. } = &mut manifest.tensors[0].layout {
        *group_size = group;
    }
}

#[test]
fn impossible_experts_are_named() {
    use vt_bundle::manifest::Experts;
    let sound = Experts {
        count: 1,
        record_offset: 0,
        record_size: IMAGE_BYTES as u64,
        stride: Some(4096),
        offsets: None,
        record_hashes: 0,
    };
    let changes: [(&str, Change<Experts>); 7] = [
        ("no experts", |e| e.count = 0),
        ("more experts than the image holds", |e| e.count = 2),
        ("count that overflows", |e| e.count = LARGEST),
        ("stride of zero, endless experts", |e| (e.count, e.record_size, e.stride) = (LARGEST, 0, Some(0))),
        ("stride below the record", |e| e.stride = Some(1024)),
        ("neither stride nor offsets", |e| e.stride = None),
        ("record at an odd place", |e| e.record_offset = 256),
    ];
    for (what, change) in changes {
        let mut experts = sound.clone();
        change(&mut experts);
        match open_changed(|m| m.tensors[0].experts = Some(experts)) {
            BundleError::Tensor { tensor, .. } => assert_eq!(tensor, "a.weight"),
            other => panic!("{what}: {other}"),
        }
    }
}

#[test]
fn files_that_contradict_the_manifest_are_named() {
    let changes: [(&str, Change<Manifest>); 6] = [
        ("image of another size", |m| m.image.size += 1),
        ("segment above the limit", |m| {
            (m.image.size, m.image.segments[0].size) = (2 << 30, 2 << 30);
        }),
        ("file name that leaves the bundle", |m| m.assets[0].file = "../leaves.bin".into()),
        ("absolute file name", |m| m.assets[0].file = "/etc/passwd".into()),
        ("file listed twice", |m| m.assets.push(m.assets[0].clone())),
        ("source name that leaves its folder", |m| m.source.files[0].name = "a/../../b".into()),
    ];
    for (what, change) in changes {
        match open_changed(change) {
            BundleError::Inconsistent { .. } => {}
            other => panic!("{what}: {other}"),
        }
    }
    // Known only once the leaves are read.
    let dir = tempfile::tempdir().expect("temporary folder");
    let mut manifest = make(dir.path());
    manifest.assets = vec![write_asset(dir.path(), AssetRole::Leaves, "assets/leaves.bin", &[0; 64]).expect("written")];
    write_manifest(dir.path(), &manifest).expect("written");
    assert!(matches!(verify(dir.path()), Err(BundleError::Inconsistent { .. })));
    manifest.assets.clear();
    write_manifest(dir.path(), &manifest).expect("written");
    assert!(matches!(verify(dir.path()), Err(BundleError::Inconsistent { .. })));
}

#[test]
fn a_restore_without_its_recipe_says_so() {
    let dir = tempfile::tempdir().expect("temporary folder");
    make(dir.path());
    let bundle = Bundle::open(dir.path()).expect("sound");
    let out = tempfile::tempdir().expect("temporary folder");
    let error = vt_bundle::restore::restore(&bundle, out.path(), &|_| {}).expect_err("no recipe");
    assert!(matches!(error, BundleError::Recipe { .. }), "{error}");
}
