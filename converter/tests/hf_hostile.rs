//! Checkpoints that no exporter would write: any outcome but a panic, and what is let through is consistent.

use std::fs;

use proptest::prelude::*;
use vt_convert::catalog::{SourceDecoder, Storage};
use vt_convert::safetensors::{HfDecoder, ResolveOptions, catalog, open, resolve};
use vt_convert::source::PlainDtype as D;

/// Suffixes of the tensors of one module; the empty one is the module itself as a stacked parameter.
const SUFFIXES: [&str; 24] = [
    "",
    ".weight",
    ".weight_packed",
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_scale",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".scale",
    ".pre_quant_scale",
    ".input_scale",
    ".k_scale",
    ".weight_quantizer._svdquant_lora_a",
    ".weight_quantizer._svdquant_lora_b",
    "_blocks",
    "_scales",
    "_weight_scale",
    "_weight_scale_2",
];

const DTYPES: [D; 10] = [D::U8, D::U8, D::I8, D::I32, D::I64, D::F8E4M3, D::F8E8M0, D::F16, D::Bf16, D::F32];

/// Extents that fit one another often enough to get past the first checks.
const EXTENTS: [u64; 8] = [0, 1, 2, 4, 8, 16, 32, 64];

/// Opens, resolves, and decodes what is let through.
fn survives(dir: &std::path::Path) {
    let Ok(checkpoint) = open(dir) else { return };
    let mut warnings = Vec::new();
    let Ok(resolution) = resolve(&checkpoint, ResolveOptions::default(), &mut warnings) else { return };
    let catalog = catalog(&checkpoint, &resolution);
    let decoder = HfDecoder::new(resolution);
    for entry in &catalog.entries {
        if let Storage::Tiled { codec, shape, inputs, .. } = &entry.storage {
            assert_eq!(inputs.len(), codec.inputs(), "{}", entry.name);
            for (i, slice) in inputs.iter().enumerate() {
                assert_eq!(
                    codec.input_bytes(shape, i),
                    Some(slice.len),
                    "{} input {i} of {}",
                    entry.name,
                    codec.name()
                );
                assert!(slice.offset + slice.len <= checkpoint.tensors[slice.tensor].len, "{}", entry.name);
            }
            let mut out = vec![0.0; shape.n * shape.k];
            decoder.decode_rows(&checkpoint, entry, 0..shape.n as u64, &mut out);
        }
    }
}

fn write(dir: &std::path::Path, header: &[u8], data: &[u8], config: &[u8]) {
    let file = [&(header.len() as u64).to_le_bytes()[..], header, data].concat();
    fs::write(dir.join("model.safetensors"), file).expect("written");
    fs::write(dir.join("config.json"), config).expect("written");
}

type Tensor = (usize, D, Vec<u64>);

fn tensor() -> impl Strategy<Value = Tensor> {
    (
        0..SUFFIXES.len(),
        prop::sample::select(&DTYPES[..]),
        prop::collection::vec(prop::sample::select(&EXTENTS[..]), 0..4),
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_mix_of_tensors(tensors in prop::collection::vec(tensor(), 1..6), fill: u8) {
        let (mut header, mut len) = (serde_json::Map::new(), 0);
        for (suffix, dtype, shape) in &tensors {
            let bytes = shape.iter().product::<u64>() * dtype.size();
            let info = serde_json::json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [len, len + bytes]});
            if header.insert(format!("m{}", SUFFIXES[*suffix]), info).is_some() {
                return Ok(());
            }
            len += bytes;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let header = serde_json::to_vec(&header).expect("a header");
        write(dir.path(), &header, &vec![fill; len as usize], b"{}");
        survives(dir.path());
    }

    #[test]
    fn any_change_of_a_byte(place in any::<prop::sample::Index>(), value: u8, second in any::<prop::sample::Index>()) {
        let header = br#"{"m.weight":{"dtype":"U8","shape":[2,16],"data_offsets":[0,32]},"m.weight_scale":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[32,36]},"m.weight_scale_2":{"dtype":"F32","shape":[],"data_offsets":[36,40]}}"#;
        let config = br#"{"model_type":"llama","quantization_config":{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION","quantized_layers":{"m":{"quant_algo":"NVFP4","group_size":16}},"ignore":["lm_head","re:.*x"],"weight_block_size":[128,128]}}"#;
        let data = [&[0x21u8; 32][..], &[0x38; 4], &1f32.to_le_bytes()].concat();
        let mut all = [&header[..], config].concat();
        for index in [place, second] {
            let at = index.index(all.len());
            all[at] = value;
        }
        let dir = tempfile::tempdir().expect("a folder");
        write(dir.path(), &all[..header.len()], &data, &all[header.len()..]);
        survives(dir.path());
    }
}
