//! Roles of tensors on checkpoints made in the test, and the public cases where they are at hand.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::safetensors::open;

const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/cases/gen");

/// Builds a checkpoint from (name, dtype, shape, fill byte or bytes).
struct Builder {
    tensors: Vec<(String, D, Vec<u64>, Vec<u8>)>,
    config: Value,
    quant: Option<Value>,
}

use crate::source::PlainDtype as D;

impl Builder {
    fn new() -> Self {
        let config = serde_json::json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true});
        Builder { tensors: Vec::new(), config, quant: None }
    }

    fn add(mut self, name: &str, dtype: D, shape: &[u64], fill: &[u8]) -> Self {
        let len = (shape.iter().product::<u64>() * dtype.size()) as usize;
        let data = fill.iter().copied().cycle().take(len).collect();
        self.tensors.push((name.into(), dtype, shape.into(), data));
        self
    }

    fn f32(self, name: &str, shape: &[u64], value: f32) -> Self {
        self.add(name, D::F32, shape, &value.to_le_bytes())
    }

    /// An NVFP4 weight of `[n, k]` with plain scales.
    fn nvfp4(self, module: &str, n: u64, k: u64) -> Self {
        self.add(&format!("{module}.weight"), D::U8, &[n, k / 2], &[0x21])
            .add(&format!("{module}.weight_scale"), D::F8E4M3, &[n, k / 16], &[0x38])
            .f32(&format!("{module}.weight_scale_2"), &[], 0.5)
    }

    fn without(mut self, name: &str) -> Self {
        self.tensors.retain(|t| t.0 != name);
        self
    }

    fn quantization(mut self, value: Value) -> Self {
        self.quant = Some(serde_json::json!({ "quantization": value }));
        self
    }

    fn config(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    fn resolve(&self) -> Result<(Resolution, Vec<String>), ResolveError> {
        let dir = tempfile::tempdir().unwrap();
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in &self.tensors {
            let begin = data.len();
            data.extend_from_slice(bytes);
            header.insert(
                name.clone(),
                serde_json::json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [begin, data.len()]}),
            );
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        file.extend(data);
        fs::write(dir.path().join("model.safetensors"), file).unwrap();
        fs::write(dir.path().join("config.json"), self.config.to_string()).unwrap();
        if let Some(quant) = &self.quant {
            fs::write(dir.path().join("hf_quant_config.json"), quant.to_string()).unwrap();
        }
        let checkpoint = open(dir.path()).unwrap();
        let mut warnings = Vec::new();
        let resolution = resolve(&checkpoint, ResolveOptions::default(), &mut warnings)?;
        // Every tensor has exactly one place.
        let mut places = vec![0; checkpoint.tensors.len()];
        for w in &resolution.weights {
            let svd = w.svd.iter().flat_map(|s| [s.a, s.b]);
            let optional = [w.global, w.zeros, w.g_idx, w.pre_quant_scale, w.input_scale];
            for i in [w.weight, w.scale].into_iter().chain(optional.into_iter().flatten()).chain(svd) {
                places[i] += 1;
            }
        }
        resolution.plain.iter().for_each(|&i| places[i] += 1);
        resolution.auxiliary.iter().for_each(|a| places[a.tensor] += 1);
        for kv in &resolution.kv_scales {
            let mut tensors: Vec<usize> = [kv.k, kv.v].into_iter().flatten().map(|(i, _)| i).collect();
            tensors.dedup();
            tensors.into_iter().for_each(|i| places[i] += 1);
        }
        for (i, count) in places.into_iter().enumerate() {
            // The packed shape is read and done with.
            let name = &checkpoint.tensors[i].name;
            assert!(count == 1 || name.ends_with("weight_shape"), "{name} has {count} places");
        }
        Ok((resolution, warnings))
    }

    fn error(&self) -> ResolveError {
        self.resolve().unwrap_err()
    }

    fn encoding(&self) -> SourceEncoding {
        let (r, _) = self.resolve().unwrap();
        assert_eq!(r.weights.len(), 1);
        r.weights[0].encoding
    }
}

#[test]
fn encodings_by_type_and_shape() {
    use SourceEncoding as E;
    let b = Builder::new;
    assert_eq!(b().nvfp4("m", 4, 64).encoding(), E::Nvfp4 { group: 16, divides: false });
    let fp4 = |scale: D, columns: u64| {
        b().add("m.weight", D::U8, &[4, 32], &[0]).add("m.weight_scale", scale, &[4, columns], &[0x38])
    };
    assert_eq!(fp4(D::F8E4M3, 2).f32("m.weight_scale_2", &[1], 1.0).encoding(), E::Nvfp4 { group: 32, divides: false });
    assert_eq!(fp4(D::U8, 4).f32("m.weight_scale_2", &[], 1.0).encoding(), E::Nvfp4 { group: 16, divides: false });
    assert_eq!(fp4(D::U8, 2).encoding(), E::Mxfp4 { blocks: false });
    assert_eq!(fp4(D::F8E8M0, 2).encoding(), E::Mxfp4 { blocks: false });
    assert_eq!(
        fp4(D::F32, 1).without("m.weight").add("m.weight", D::U8, &[2, 128], &[0]).encoding(),
        E::Int4ModelOpt { group: 128 }
    );
    let ct = b().add("m.weight_packed", D::U8, &[4, 32], &[0]).add("m.weight_scale", D::F8E4M3, &[4, 4], &[0x38]);
    assert_eq!(ct.f32("m.weight_global_scale", &[1], 2.0).encoding(), E::Nvfp4 { group: 16, divides: true });

    let fp8 = |scale: D, shape: &[u64]| {
        let b = b().add("m.weight", D::F8E4M3, &[4, 64], &[0x38]).add("m.weight_scale", scale, shape, &[0x20, 0x3F]);
        b.encoding()
    };
    for shape in [&[][..], &[1], &[1, 1]] {
        assert_eq!(fp8(D::Bf16, shape), E::Fp8 { scales: Fp8Scales::Tensor });
    }
    assert_eq!(fp8(D::F32, &[4]), E::Fp8 { scales: Fp8Scales::Channel });
    assert_eq!(fp8(D::F16, &[4, 1]), E::Fp8 { scales: Fp8Scales::Channel });
    assert_eq!(fp8(D::F32, &[1, 1, 1, 1]), E::Fp8 { scales: Fp8Scales::Block([128, 128]) });
    assert_eq!(fp8(D::U8, &[4, 2]), E::Mxfp8);
    assert_eq!(fp8(D::F8E8M0, &[1, 1]), E::Fp8 { scales: Fp8Scales::Block([128, 128]) });
    let big = b().add("m.weight", D::F8E4M3, &[130, 64], &[0]).f32("m.weight_scale_inv", &[2, 1], 1.0);
    assert_eq!(big.encoding(), E::Fp8 { scales: Fp8Scales::Block([128, 128]) });

    let int8 = |shape: &[u64]| b().add("m.weight", D::I8, &[4, 64], &[1]).f32("m.weight_scale", shape, 1.0).encoding();
    assert_eq!(int8(&[4]), E::Int8 { scales: IntScales::Group(64), zero_points: false });
    assert_eq!(int8(&[4, 2]), E::Int8 { scales: IntScales::Group(32), zero_points: false });
    assert_eq!(int8(&[1]), E::Int8 { scales: IntScales::Tensor, zero_points: false });
}

fn packed(words: u64) -> Builder {
    let shape: Vec<u8> = [8u64, 64].iter().flat_map(|v| v.to_le_bytes()).collect();
    Builder::new().add("m.weight_packed", D::I32, &[8, words], &[0x12]).add("m.weight_shape", D::I64, &[2], &shape).add(
        "m.weight_scale",
        D::Bf16,
        &[8, 2],
        &[0x80, 0x3F],
    )
}

fn gptq(groups: &[i32]) -> Builder {
    let g_idx: Vec<u8> = groups.iter().flat_map(|v| v.to_le_bytes()).collect();
    Builder::new()
        .add("m.qweight", D::I32, &[8, 16], &[0x12])
        .add("m.qzeros", D::I32, &[2, 2], &[0x77])
        .add("m.scales", D::F16, &[2, 16], &[0, 0x3C])
        .add("m.g_idx", D::I32, &[64], &g_idx)
}

#[test]
fn packed_integers() {
    use SourceEncoding as E;
    assert_eq!(packed(8).encoding(), E::Packed { bits: 4, group: 32, zero_points: false });
    assert_eq!(packed(16).encoding(), E::Packed { bits: 8, group: 32, zero_points: false });
    let zeros = packed(8).add("m.weight_zero_point", D::I32, &[1, 2], &[0]);
    assert_eq!(zeros.encoding(), E::Packed { bits: 4, group: 32, zero_points: true });
    assert!(matches!(packed(9).error(), ResolveError::WeightShape { .. }));
    assert!(matches!(packed(8).without("m.weight_shape").error(), ResolveError::Missing { .. }));

    let in_order: Vec<i32> = (0..64).map(|k| k / 32).collect();
    assert_eq!(gptq(&in_order).encoding(), E::Gptq { bits: 4, group: 32, zero_minus_one: true });
    let v2 = gptq(&in_order).config(
        "quantization_config",
        serde_json::json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    );
    assert_eq!(v2.encoding(), E::Gptq { bits: 4, group: 32, zero_minus_one: false });
    let mut shuffled = in_order.clone();
    shuffled.swap(3, 40);
    assert!(matches!(gptq(&shuffled).error(), ResolveError::ActOrder { column: 3, found: 1, expected: 0, .. }));
    let awq = Builder::new().add("m.qweight", D::I32, &[64, 2], &[0x12]).add("m.qzeros", D::I32, &[2, 2], &[0x77]).add(
        "m.scales",
        D::F16,
        &[2, 16],
        &[0, 0x3C],
    );
    assert_eq!(awq.encoding(), E::Awq { bits: 4, group: 32 });
    assert!(matches!(awq.without("m.qzeros").error(), ResolveError::Missing { .. }));
}

#[test]
fn stacked_experts() {
    let gpt_oss = Builder::new()
        .add("e.gate_up_proj_blocks", D::U8, &[3, 8, 2, 16], &[0])
        .add("e.gate_up_proj_scales", D::U8, &[3, 8, 2], &[127])
        .add("e.gate_up_proj_bias", D::Bf16, &[3, 8], &[0]);
    let (r, _) = gpt_oss.resolve().unwrap();
    let w = &r.weights[0];
    assert_eq!((w.name.as_str(), w.shape, w.experts()), ("e.gate_up_proj", [8, 64], 3));
    assert!(w.bias.is_some() && w.stack.unwrap().transposed_name);
    let modelopt = Builder::new()
        .add("e.down_proj", D::U8, &[3, 32, 8], &[0])
        .add("e.down_proj_weight_scale", D::F8E4M3, &[3, 4, 8], &[0x38])
        .f32("e.down_proj_weight_scale_2", &[], 1.0)
        .f32("e.down_proj_input_scale", &[], 1.0);
    let (r, _) = modelopt.resolve().unwrap();
    let w = &r.weights[0];
    assert_eq!((w.shape, w.stack.unwrap().transposed, w.input_scale.is_some()), ([8, 64], true, true));
    let llama4 =
        Builder::new().add("e.down_proj", D::F8E4M3, &[3, 64, 8], &[0]).f32("e.down_proj_weight_scale", &[], 1.0);
    assert_eq!(llama4.resolve().unwrap().0.weights[0].shape, [8, 64]);
    let linear = Builder::new()
        .add("e.weight", D::U8, &[3, 8, 32], &[0])
        .add("e.weight_scale", D::F8E4M3, &[3, 8, 4], &[0x38])
        .f32("e.weight_scale_2", &[3], 1.0);
    assert_eq!(linear.resolve().unwrap().0.weights[0].shape, [8, 64]);
}

#[test]
fn refusals() {
    use ResolveError as E;
    let b = Builder::new;
    let whole = || b().nvfp4("a.b", 4, 64);
    let missing = |e: E| match e {
        E::Missing { missing, .. } => missing,
        other => panic!("{other}"),
    };
    assert_eq!(missing(whole().without("a.b.weight_scale_2").error()), "a.b.weight_scale_2");
    assert_eq!(missing(whole().without("a.b.weight_scale").error()), "a.b.weight_scale");
    let flat = whole().without("a.b.weight_scale").add("a.b.weight_scale", D::F8E4M3, &[16], &[0x38]);
    assert!(matches!(flat.error(), E::Shape { found, .. } if found == [16]));
    let odd = whole().without("a.b.weight_scale").add("a.b.weight_scale", D::F8E4M3, &[4, 3], &[0x38]);
    assert!(matches!(odd.error(), E::Shape { .. }));
    for bad in [f32::NAN, f32::INFINITY, -1.0, 0.0] {
        let e = whole().without("a.b.weight_scale_2").f32("a.b.weight_scale_2", &[], bad).error();
        assert!(matches!(&e, E::Global { tensor, .. } if tensor == "a.b.weight_scale_2"), "{e}");
    }
    let zero = whole()
        .without("a.b.weight_scale_2")
        .without("a.b.weight_scale")
        .f32("a.b.weight_scale_2", &[], 0.0)
        .add("a.b.weight_scale", D::F8E4M3, &[4, 4], &[0xFF]);
    assert!(zero.resolve().unwrap().0.weights[0].all_zero);
    let count = whole().without("a.b.weight_scale_2").f32("a.b.weight_scale_2", &[3], 1.0).error();
    assert!(matches!(count, E::Shape { .. }));

    let fp8 = |scale: &str, shape: &[u64]| {
        b().add("m.weight", D::F8E4M3, &[192, 128], &[0x38]).f32(&format!("m.{scale}"), shape, 1.0)
    };
    assert!(matches!(fp8("other", &[]).error(), E::Missing { weight, .. } if weight == "m.weight"));
    let e = fp8("weight_scale", &[128]).error().to_string();
    assert!(["m.weight_scale", "192", "128"].iter().all(|t| e.contains(t)), "{e}");
    assert!(matches!(fp8("weight_scale", &[191]).error(), E::Shape { .. }));
    assert!(matches!(fp8("weight_scale", &[]).f32("m.scale", &[], 1.0).error(), E::TwoScales { .. }));
    let u8_grid = b().add("m.weight", D::F8E4M3, &[192, 128], &[0]).add("m.weight_scale_inv", D::U8, &[2, 1], &[127]);
    assert!(matches!(u8_grid.error(), E::Dtype { found: "U8", .. }));
    let e5m2 = b().add("m.weight", D::F8E5M2, &[4, 64], &[0]).error();
    assert!(matches!(e5m2, E::Dtype { found: "F8_E5M2", .. }));
    assert!(matches!(
        b().add("m.weight", D::F8E4M3, &[4], &[0]).f32("m.weight_scale", &[], 1.0).error(),
        E::WeightShape { .. }
    ));
    assert!(matches!(
        b().add("m.weight", D::F8E4M3, &[0, 4], &[0]).f32("m.weight_scale", &[], 1.0).error(),
        E::WeightShape { .. }
    ));
    assert!(matches!(b().add("stray", D::F8E4M3, &[4, 4], &[0]).error(), E::Missing { .. }));
    let twice = whole().add("a.b.weight_packed", D::U8, &[4, 32], &[0]).f32("a.b.weight_global_scale", &[1], 1.0);
    assert!(matches!(twice.error(), E::Twice { .. }));

    let untied =
        b().add("model.embed_tokens.weight", D::Bf16, &[4, 4], &[0]).config("tie_word_embeddings", false.into());
    assert!(matches!(untied.error(), E::HeadMissing { stated: true }));
    let narrow = untied.nvfp4("lm_head", 4, 64).config("hidden_size", 32.into());
    assert!(matches!(narrow.error(), E::HeadWidth { found: 64, .. }));

    use crate::safetensors::quant_config::QuantConfigError as Q;
    let layer = whole().quantization(serde_json::json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "NVFP5_TRIAL"}}}));
    assert!(
        matches!(layer.error(), E::Config(Q::UnknownAlgorithm { layer, value, .. }) if layer == "a.b" && value == "NVFP5_TRIAL")
    );
    let method = whole().config("quantization_config", serde_json::json!({"quant_method": "bitsandbytes"}));
    assert!(matches!(method.error(), E::Config(Q::UnknownMethod { .. })));
    let format = whole().config(
        "quantization_config",
        serde_json::json!({"quant_method": "compressed-tensors", "format": "marlin-24"}),
    );
    assert!(matches!(format.error(), E::Config(Q::UnknownFormat { .. })));
    let field = whole().quantization(serde_json::json!({"quant_algo": 4}));
    assert!(matches!(field.error(), E::Config(Q::Field { .. })));
}

#[test]
fn disagreements_warn_once_and_name_both() {
    let warnings = |b: Builder| b.resolve().unwrap().1;
    let two = || Builder::new().nvfp4("a.x", 4, 64).nvfp4("a.y", 4, 64);
    assert!(warnings(two().quantization(serde_json::json!({"quant_algo": "NVFP4"}))).is_empty());
    let w = warnings(two().quantization(serde_json::json!({"quant_algo": "FP8"})));
    assert!(w.len() == 1 && w[0].contains("FP8") && w[0].contains("NVFP4") && w[0].contains("a.x and 1 more"), "{w:?}");
    let w = warnings(two().quantization(serde_json::json!({"quant_algo": "NVFP4", "exclude_modules": ["a*"]})));
    assert!(w.len() == 1 && w[0].contains("not quantised"), "{w:?}");
    let listed = serde_json::json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "nvfp4"}, "a.y": {"quant_algo": "FP8"}}});
    let w = warnings(two().quantization(listed));
    assert!(w.len() == 1 && w[0].contains("a.y") && !w[0].contains("more"), "{w:?}");
    let plain = Builder::new().add("a.x.weight", D::Bf16, &[4, 4], &[0]);
    let w = warnings(plain.quantization(
        serde_json::json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.x": {"quant_algo": "FP8"}}}),
    ));
    assert!(w.len() == 1 && w[0].contains("BF16"), "{w:?}");
}

#[test]
fn kv_scales_by_every_name() {
    let of = |names: &[&str]| {
        let b = names.iter().fold(Builder::new(), |b, n| b.f32(&format!("l.self_attn.{n}"), &[], 0.5));
        b.resolve().unwrap().0.kv_scales
    };
    for names in [
        &["k_proj.k_scale", "v_proj.v_scale"][..],
        &["k_proj.output_scale", "v_proj.output_scale"],
        &["kv_scale"],
        &["k_scale", "v_scale"],
    ] {
        let kv = of(names);
        assert_eq!(kv.len(), 1, "{names:?}");
        assert_eq!((kv[0].module.as_str(), kv[0].k.unwrap().1, kv[0].v.unwrap().1), ("l.self_attn", 0.5, 0.5));
    }
    let bad = Builder::new().f32("l.self_attn.k_proj.k_scale", &[], f32::NAN);
    assert!(matches!(bad.error(), ResolveError::Global { .. }));
    let announced = Builder::new().quantization(serde_json::json!({"quant_algo": null, "kv_cache_quant_algo": "FP8"}));
    assert_eq!(announced.resolve().unwrap().1.len(), 1);
}

/// The public cases about quantised weights: refused with what must be mentioned, or resolved. Cases whose fault is in a
/// value are refused later, while the data is read.
#[test]
fn public_cases() {
    let Ok(cases) = fs::read_dir(CASES) else {
        eprintln!("skipped: {CASES} is not there");
        return;
    };
    let by_value = ["C17_nan_scale_live_block", "C18_block_scale_negative", "C31_nan_weight"];
    let mut seen = 0;
    for case in cases.map(|c| c.unwrap().path()) {
        let id = case.file_name().unwrap().to_string_lossy().into_owned();
        let expected: Value = serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
        let input: PathBuf = case.join(expected["input"].as_str().unwrap());
        if input.join("model.gguf").exists() {
            continue;
        }
        let Ok(checkpoint) = open(&input) else { continue };
        seen += 1;
        let mut warnings = Vec::new();
        let outcome = resolve(&checkpoint, ResolveOptions::default(), &mut warnings);
        match (outcome, expected["outcome"].as_str().unwrap()) {
            (Ok(_), "ok") => {}
            (Ok(_), "error") if by_value.contains(&id.as_str()) => {}
            (Err(e), "error") => {
                for text in expected["must_mention"].as_array().unwrap() {
                    assert!(e.to_string().contains(text.as_str().unwrap()), "{id}: {e}");
                }
            }
            (got, _) => panic!("{id}: {got:?}"),
        }
        println!("{id}: {warnings:?}");
    }
    assert!(seen > 25);
}
