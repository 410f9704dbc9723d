//! Code planes against vectors that vLLM's own repack produced (`../shared/reference/marlin/golden`).

use std::path::Path;

use vt_bundle::tile::{CodePlane, TILE_CODES, TILE_K, TILE_N};

struct Golden {
    bytes: Vec<u8>,
    header: serde_json::Value,
    data: usize,
}

impl Golden {
    fn open() -> Option<Self> {
        let path = Path::new(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../shared/reference/marlin/golden/marlin_golden.safetensors"
        ));
        if !path.exists() {
            eprintln!("skipped: {} is not here", path.display());
            return None;
        }
        let bytes = std::fs::read(path).expect("readable");
        let len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let header = serde_json::from_slice(&bytes[8..8 + len]).expect("JSON");
        Some(Self { bytes, header, data: 8 + len })
    }

    fn names(&self) -> Vec<String> {
        self.header.as_object().expect("object").keys().cloned().collect()
    }

    fn tensor(&self, name: &str) -> (Vec<usize>, &[u8]) {
        let t = &self.header[name];
        let list = |key: &str| -> Vec<usize> {
            t[key].as_array().expect(name).iter().map(|v| v.as_u64().expect("integer") as usize).collect()
        };
        let range = list("data_offsets");
        (list("shape"), &self.bytes[self.data + range[0]..self.data + range[1]])
    }
}

/// Packs codes `q[k][n]` (given as a function) into a plane of `[K/16, N/64]` tiles.
fn pack(bits: u32, k: usize, n: usize, code: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    let plane = CodePlane { name: "q", bits, shift: 0 };
    let mut out = vec![0u8; k / TILE_K * (n / TILE_N) * plane.tile_bytes()];
    for (tile, bytes) in out.chunks_exact_mut(plane.tile_bytes()).enumerate() {
        let (tk, tn) = (tile / (n / TILE_N), tile % (n / TILE_N));
        let mut codes = [0u8; TILE_CODES];
        for c in 0..TILE_N {
            for r in 0..TILE_K {
                codes[c * TILE_K + r] = code(tk * TILE_K + r, tn * TILE_N + c);
            }
        }
        plane.pack_tile(&codes, bytes);
    }
    out
}

/// A case: its code planes as we pack them, and how many bytes of vLLM's tensor they must equal.
fn ours(golden: &Golden, case: &str) -> Option<(Vec<u8>, String)> {
    let names = golden.names();
    let has = |suffix: &str| names.iter().any(|n| *n == format!("{case}.{suffix}"));
    let get = |suffix: &str| golden.tensor(&format!("{case}.{suffix}"));
    if case.contains("_a81_") {
        return None; // the layout for 8-bit activations is another tile
    }
    if has("codes") {
        let (shape, codes) = get("codes");
        let bits = if case.contains("_b4_") { 4 } else { 8 };
        return Some((pack(bits, shape[0], shape[1], |k, n| codes[k * shape[1] + n]), "marlin".into()));
    }
    if has("w13") {
        let (shape, w) = get("w13");
        let (rows, half, k) = (shape[1], shape[1] / 2, shape[2] * 2);
        let padded = half.div_ceil(TILE_N) * TILE_N;
        let packed = (0..shape[0]).flat_map(|e| {
            pack(4, k, 2 * padded, |k, n| {
                let (part, row) = (n / padded, n % padded);
                if row >= half { 0 } else { nibble(&w[e * rows * shape[2]..], shape[2], part * half + row, k) }
            })
        });
        return Some((packed.collect(), "out_w13".into()));
    }
    let (weight, qweight) = (has("weight"), has("qweight"));
    if weight {
        let (shape, w) = get("weight");
        let packed4 = case.starts_with("nvfp4") || case.starts_with("mxfp4");
        let k = if packed4 { shape[1] * 2 } else { shape[1] };
        let n = shape[0].div_ceil(TILE_N) * TILE_N;
        let code = |k: usize, n: usize| match (n < shape[0], packed4) {
            (false, _) => 0,
            (true, true) => nibble(w, shape[1], n, k),
            (true, false) => w[n * shape[1] + k],
        };
        return Some((pack(if packed4 { 4 } else { 8 }, k, n, code), "out_weight".into()));
    }
    if qweight && case.starts_with("gptq") {
        let (shape, q) = get("qweight");
        let bits = if case.contains("_u4_") { 4 } else { 8 };
        let per_word = 32 / bits as usize;
        let code = |k: usize, n: usize| {
            let at = 4 * (k / per_word * shape[1] + n);
            let word = u32::from_le_bytes(q[at..at + 4].try_into().expect("four bytes"));
            (word >> (bits as usize * (k % per_word)) & ((1 << bits) - 1)) as u8
        };
        return Some((pack(bits, shape[0] * per_word, shape[1], code), "out_weight".into()));
    }
    None
}

fn nibble(bytes: &[u8], row_bytes: usize, row: usize, k: usize) -> u8 {
    let byte = bytes[row * row_bytes + k / 2];
    if k.is_multiple_of(2) { byte & 15 } else { byte >> 4 }
}

#[test]
fn code_planes_equal_vllms_repack() {
    let Some(golden) = Golden::open() else { return };
    let mut cases: Vec<String> =
        golden.names().iter().filter_map(|n| n.split_once('.').map(|(case, _)| case.to_owned())).collect();
    cases.dedup();
    let mut compared = 0;
    for case in &cases {
        let Some((packed, output)) = ours(&golden, case) else { continue };
        let (_, expected) = golden.tensor(&format!("{case}.{output}"));
        assert!(packed.len() <= expected.len(), "{case}: more bytes than vLLM's");
        let differs = packed.iter().zip(expected).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{case}: first differing byte of {output}");
        compared += 1;
    }
    // All but AWQ (its codec has a test of its own) and the 8-bit-activation tiles.
    assert_eq!(compared, 21);
}

/// The two words worked out in the Marlin layout notes, for machines without the golden files.
#[test]
fn known_words() {
    let four = pack(4, 64, 256, |k, n| if (k, n) == (37, 150) { 9 } else { 0 });
    let at = four.iter().position(|&b| b != 0).expect("one code was set");
    assert_eq!((at / 4, four[at] >> 4 == 0, at % 4), (1385, true, 2));
    let eight = pack(8, 64, 256, |k, n| if (k, n) == (37, 150) { 9 } else { 0 });
    assert_eq!(eight.iter().position(|&b| b != 0), Some(2770 * 4 + 2));
}
