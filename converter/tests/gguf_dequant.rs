//! The decoders against ggml's own values: bit patterns of every type, and every tensor of the small models.

use std::path::{Path, PathBuf};

use serde_json::Value;
use vt_convert::dequant::ggml::{DequantError, dequantize};
use vt_convert::gguf::container::parse;

fn shared(rest: &str) -> Option<PathBuf> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/checkpoints/gguf")).join(rest);
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The first place where two arrays differ in bits.
fn first_difference(got: &[f32], want: &[f32]) -> Option<String> {
    assert_eq!(got.len(), want.len());
    let place = (0..got.len()).find(|&i| got[i].to_bits() != want[i].to_bits())?;
    Some(format!(
        "value {place}: {} ({:08x}), expected {} ({:08x})",
        got[place],
        got[place].to_bits(),
        want[place],
        want[place].to_bits()
    ))
}

/// The fixture also holds activation types, which the parser refuses: calls such a tensor I8, which takes fewer bytes.
fn relabel(bytes: &mut [u8], name: &str) {
    let mut info = (name.len() as u64).to_le_bytes().to_vec();
    info.extend(name.as_bytes());
    let at = bytes.windows(info.len()).position(|w| w == info).expect("the tensor") + info.len();
    let dims = usize::from(bytes[at]);
    bytes[at + 4 + 8 * dims..][..4].copy_from_slice(&24u32.to_le_bytes());
}

#[test]
fn random_bit_patterns_of_every_type_equal_ggml() {
    let Some(file) = shared("blocks-random.gguf") else { return };
    let mut bytes = read(&file);
    relabel(&mut bytes, "Q8_K");
    let expected: Vec<f32> = read(&file.with_file_name("blocks-random.expected.f32"))
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect();
    let index: Value = serde_json::from_slice(&read(&file.with_extension("json"))).expect("JSON");
    let header = parse("blocks-random.gguf", &bytes).expect("a valid file");
    let mut types = 0;
    for (entry, tensor) in index.as_array().expect("a list").iter().zip(&header.tensors) {
        let id = entry["id"].as_u64().expect("an id") as u32;
        if id == 15 {
            assert_eq!(dequantize(id, &[], &mut []), Err(DequantError::NoDecoder { id }));
            continue;
        }
        assert_eq!(id, tensor.kind.id, "{}", tensor.name);
        let start = entry["expected_offset_floats"].as_u64().expect("an offset");
        let count = entry["n"].as_u64().expect("a count") as usize;
        let at = (header.data_start + tensor.offset) as usize;
        let mut got = vec![0f32; count];
        dequantize(id, &bytes[at..at + tensor.len as usize], &mut got).expect("a storable type");
        if let Some(difference) = first_difference(&got, &expected[start as usize..start as usize + count]) {
            panic!("{}: {difference}", tensor.kind.name);
        }
        types += 1;
    }
    assert!(types >= 28, "{types} types only");
}

#[test]
fn lengths_that_do_not_agree_are_errors() {
    let mut out = [0f32; 32];
    assert!(dequantize(2, &[0; 18], &mut out).is_ok());
    assert!(matches!(dequantize(2, &[0; 17], &mut out), Err(DequantError::Length { .. })));
    assert!(matches!(dequantize(2, &[0; 36], &mut out), Err(DequantError::Length { .. })));
    assert!(matches!(dequantize(36, &[0; 18], &mut out), Err(DequantError::NoDecoder { id: 36 })));
    assert!(matches!(dequantize(1000, &[], &mut out), Err(DequantError::NoDecoder { id: 1000 })));
}

/// By hand, so that the orders are proven without the shared folder: nibble order, fifth bits, packed scales.
#[test]
fn known_blocks() {
    // Q4_1: d = 2, m = -1, byte j = 0x10 * (15 - j) + j.
    let mut block = vec![0x00, 0x40, 0x00, 0xbc];
    block.extend((0..16u8).map(|j| (15 - j) << 4 | j));
    let mut y = [0f32; 32];
    dequantize(3, &block, &mut y).expect("Q4_1");
    for j in 0..16 {
        assert_eq!(y[j], 2.0 * j as f32 - 1.0);
        assert_eq!(y[16 + j], 2.0 * (15 - j) as f32 - 1.0);
    }
    // Q5_0: d = 1, all nibbles 0, fifth bit of weights 3 and 20.
    let mut block = vec![0x00, 0x3c];
    block.extend((1u32 << 3 | 1 << 20).to_le_bytes());
    block.extend([0; 16]);
    dequantize(6, &block, &mut y).expect("Q5_0");
    for (j, v) in y.iter().enumerate() {
        assert_eq!(*v, if j == 3 || j == 20 { 0.0 } else { -16.0 });
    }
    // Q4_K: d = 1, dmin = 1; scale 5 = 0x2b, min 5 = 0x1c, codes of group 5 (high nibbles of the third chunk) all 3.
    let mut block = vec![0u8; 144];
    block[1] = 0x3c;
    block[3] = 0x3c;
    block[4 + 9] = 0xc << 4 | 0xb;
    block[4 + 1] = 2 << 6;
    block[4 + 5] = 1 << 6;
    block[16 + 64..16 + 96].fill(0x30);
    let mut y = [0f32; 256];
    dequantize(12, &block, &mut y).expect("Q4_K");
    for (j, v) in y.iter().enumerate() {
        assert_eq!(*v, if j / 32 == 5 { 43.0 * 3.0 - 28.0 } else { 0.0 }, "{j}");
    }
    // MXFP4: the smallest scale is subnormal.
    let mut block = [0u8; 17];
    block[1] = 0x91;
    let mut y = [0f32; 32];
    dequantize(39, &block, &mut y).expect("MXFP4");
    assert_eq!((y[0].to_bits(), y[16].to_bits()), (0x0020_0000, 0x8020_0000));
    // NVFP4: 0x7f is zero, 0xff is 240 (halved, times the doubled code).
    let mut block = [0u8; 36];
    block[..2].copy_from_slice(&[0x7f, 0xff]);
    block[4] = 1;
    block[12] = 1;
    let mut y = [0f32; 64];
    dequantize(40, &block, &mut y).expect("NVFP4");
    assert_eq!((y[0], y[16]), (0.0, 120.0 * 2.0));
}
