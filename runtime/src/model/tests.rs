//! Whole models of random weights against a forward pass written down plainly, and bundles that must be refused.

use super::*;
use crate::engine::model::{LogitsBuffer, LogitsWanted, Model, ModelError, SequenceStep};
use crate::load::upload::UploadOptions;
use crate::load::{
    CpuDevice, Device, FakeAccelerator, FakeArena, Faults, HostArena, LoadError, LoadedBundle, Resident, Uploading,
    Verify,
};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};
use vt_bundle::Bundle;
use vt_bundle::hash::leaf_digest;
use vt_bundle::layout::PLANE_ALIGN;
use vt_bundle::manifest as m;
use vt_bundle::mmap::ContiguousMap;
use vt_bundle::row_order::RowOrder;
use vt_bundle::writer::{SegmentWriter, write_asset, write_manifest};
use vt_kernels::Activations;
use vt_kernels::kv_cache::KvType;

const HIDDEN: usize = 24;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;
const WIDTH: usize = 40;
const VOCAB: usize = 30;
const EXPERTS: usize = 4;

/// A tensor by the names and rows of its parts, its other axes, and its values.
#[derive(Clone)]
#[allow(clippy::type_complexity)] // name, parts with their rows, shape, values
pub(in crate::model) struct Weights(Vec<(String, Vec<(String, usize)>, Vec<usize>, Vec<f32>)>);

impl Weights {
    /// A llama of two layers; projections fused or not, as `fused` says.
    fn random(seed: u32, fused: bool) -> Self {
        let mut state = seed;
        let mut list = Self(Vec::new());
        let mut add = |name: &str, parts: &[(&str, usize)], rest: &[usize]| {
            let rows: usize = parts.iter().map(|(_, n)| n).sum();
            let count = rows * rest.iter().product::<usize>();
            let values = (0..count).map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 8) as f32 / (1 << 24) as f32 - 0.5) * 0.5 + if rest.is_empty() { 1.0 } else { 0.0 }
            });
            let prefix = name.rsplit_once('.').map_or("", |(p, _)| p).rsplit_once('.').map_or("", |(p, _)| p);
            let named = |part: &str| if parts.len() == 1 { name.to_owned() } else { format!("{prefix}.{part}.weight") };
            let parts = parts.iter().map(|(p, n)| (named(p), *n)).collect();
            list.0.push((name.to_owned(), parts, rest.to_vec(), values.collect()));
        };
        add("model.embed_tokens.weight", &[("", VOCAB)], &[HIDDEN]);
        for layer in 0..2 {
            let at = format!("model.layers.{layer}");
            let qkv = [("q_proj", HEADS * DIM), ("k_proj", KV_HEADS * DIM), ("v_proj", KV_HEADS * DIM)];
            let gate_up = [("gate_proj", WIDTH), ("up_proj", WIDTH)];
            if fused {
                add(&format!("{at}.self_attn.qkv_proj.weight"), &qkv, &[HIDDEN]);
                add(&format!("{at}.mlp.gate_up_proj.weight"), &gate_up, &[HIDDEN]);
            } else {
                qkv.iter().for_each(|(p, n)| add(&format!("{at}.self_attn.{p}.weight"), &[("", *n)], &[HIDDEN]));
                gate_up.iter().for_each(|(p, n)| add(&format!("{at}.mlp.{p}.weight"), &[("", *n)], &[HIDDEN]));
            }
            add(&format!("{at}.self_attn.o_proj.weight"), &[("", HIDDEN)], &[HEADS * DIM]);
            add(&format!("{at}.mlp.down_proj.weight"), &[("", HIDDEN)], &[WIDTH]);
            add(&format!("{at}.input_layernorm.weight"), &[("", HIDDEN)], &[]);
            add(&format!("{at}.post_attention_layernorm.weight"), &[("", HIDDEN)], &[]);
        }
        add("model.norm.weight", &[("", HIDDEN)], &[]);
        list
    }

    /// A Mixtral of two layers with four experts. Those of the second layer differ: one has gate and up in tensors of their own,
    /// and a factor of its down projection.
    pub(in crate::model) fn routed(seed: u32) -> Self {
        let mut list = Self::random(seed, true);
        list.0.retain(|tensor| !tensor.0.contains(".mlp."));
        let mut state = seed;
        let mut add = |name: String, parts: &[(&str, usize)], k: usize| {
            let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
            let values = (0..rows * k).map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 24) as f32 - 0.5
            });
            let values = values.collect();
            let module = name.rsplit_once('.').unwrap().0;
            let parts = parts.iter().map(|(part, rows)| (format!("{module}{part}.weight"), *rows)).collect();
            list.0.push((format!("{name}.weight"), parts, vec![k], values));
        };
        for layer in 0..2 {
            let at = format!("model.layers.{layer}.block_sparse_moe");
            add(format!("{at}.gate"), &[(".gate", EXPERTS)], HIDDEN);
            for expert in 0..EXPERTS {
                let at = format!("{at}.experts.{expert}");
                if (layer, expert) == (1, 2) {
                    add(format!("{at}.w1"), &[(".w1", WIDTH)], HIDDEN);
                    add(format!("{at}.w3"), &[(".w3", WIDTH)], HIDDEN);
                } else {
                    add(format!("{at}.gate_up_proj"), &[(".w1", WIDTH), (".w3", WIDTH)], HIDDEN);
                }
                add(format!("{at}.w2"), &[(".w2", HIDDEN)], WIDTH);
            }
        }
        let factor = "model.layers.1.block_sparse_moe.experts.2.w2.scale".to_owned();
        list.0.push((factor.clone(), vec![(factor, 1)], Vec::new(), vec![1.5]));
        list
    }

    /// The values of every part by its name.
    fn parts(&self) -> BTreeMap<String, Vec<f32>> {
        let mut map = BTreeMap::new();
        for (_, parts, rest, values) in &self.0 {
            let mut at = 0;
            for (name, rows) in parts {
                let len = rows * rest.iter().product::<usize>();
                map.insert(name.clone(), values[at..at + len].to_vec());
                at += len;
            }
        }
        map
    }

    pub(in crate::model) fn write(&self, dir: &Path, architecture: &str) {
        let mut image: Vec<u8> = Vec::new();
        let mut tensors = Vec::new();
        for (name, parts, rest, values) in &self.0 {
            image.resize(image.len().next_multiple_of(PLANE_ALIGN as usize), 0);
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let plane = m::Plane {
                name: "data".into(),
                dtype: "f32".into(),
                offset: image.len() as u64,
                size: bytes.len() as u64,
            };
            image.extend(bytes);
            let mut row_start = 0;
            let parts = parts.iter().map(|(name, rows)| {
                row_start += *rows as u64;
                m::Part {
                    name: name.clone(),
                    source: name.clone(),
                    row_start: row_start - *rows as u64,
                    rows: *rows as u64,
                    row_order: RowOrder::Same,
                    scale: None,
                    input_scale: None,
                    pre_quant_scale: None,
                    low_rank: None,
                }
            });
            let parts: Vec<m::Part> = parts.collect();
            let rows = parts.iter().map(|p| p.rows).sum();
            tensors.push(m::Tensor {
                name: name.clone(),
                placement: m::Placement::Image,
                shape: std::iter::once(rows).chain(rest.iter().map(|&n| n as u64)).collect(),
                layout: m::Layout::RowMajor { dtype: "f32".into() },
                decode: "plain.f32@1".into(),
                scales: m::ScaleExactness::Exact,
                planes: vec![plane],
                parts,
                experts: None,
                min_compute_capability: None,
            });
        }
        let size = image.len() as u64;
        let writer = SegmentWriter::create(dir, m::Placement::Image, size).unwrap();
        writer.write_at(&image, 0).unwrap();
        let leaves = [leaf_digest(&image, 0, size)];
        let segments = writer.finish(&leaves).unwrap();
        let table = write_asset(dir, m::AssetRole::Leaves, "leaves.bin", &leaves.concat()).unwrap();
        let manifest = m::Manifest {
            format: m::FORMAT.into(),
            format_version: m::FORMAT_VERSION,
            model: m::Model {
                architecture: architecture.into(),
                config: config(architecture),
                conventions: Vec::new(),
            },
            quantization: m::Quantization { decodes: Vec::new(), declared: None },
            source: m::Source { kind: "safetensors".into(), files: Vec::new() },
            image: m::Image { size, segments },
            cold: m::Image::default(),
            tensors,
            kv_cache: None,
            assets: vec![table],
        };
        write_manifest(dir, &manifest).unwrap();
    }

    fn load(&self, architecture: &str) -> Result<CpuModel<ContiguousMap>, LoadError> {
        self.load_on(&CpuDevice::new(1), architecture)
    }

    fn load_on<D: Device>(&self, device: &D, architecture: &str) -> Result<CpuModel<D::Arena>, LoadError>
    where
        D::Arena: HostArena,
    {
        let dir = tempfile::tempdir().unwrap();
        self.write(dir.path(), architecture);
        let bundle = Bundle::open(dir.path())?;
        let config = ModelConfig::from_manifest(&bundle.manifest().model)?;
        let loaded = LoadedBundle::load(bundle, device, Verify::Device, &|_| ())?;
        let options = CpuModelOptions {
            threads: 2,
            activations: Activations::F32,
            deterministic: false,
            kv_type: KvType::F32,
            kv_blocks: 8,
            context_length: 64,
            max_batch_tokens: 32,
            max_batch_sequences: 4,
            rounding: None,
        };
        CpuModel::new(loaded, config, &options)
    }
}

fn config(architecture: &str) -> Value {
    let mut config = json!({
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
        "num_hidden_layers": 2, "intermediate_size": WIDTH, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "tie_word_embeddings": true, "rope_theta": 10000.0
    });
    if architecture == "mixtral" {
        config["num_local_experts"] = json!(EXPERTS);
        config["num_experts_per_tok"] = json!(2);
    }
    config
}

/// `W [N, K] x`.
fn times(w: &[f32], x: &[f64]) -> Vec<f64> {
    w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
}

fn norm(x: &[f64], w: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    x.iter().zip(w).map(|(v, w)| v / (mean + 1e-5).sqrt() * f64::from(*w)).collect()
}

fn rotate(heads: &mut [f64], position: usize) {
    for head in heads.chunks_exact_mut(DIM) {
        for i in 0..DIM / 2 {
            let angle = position as f64 * 10_000f64.powf(-2.0 * i as f64 / DIM as f64);
            let (a, b) = (head[i], head[i + DIM / 2]);
            head[i] = a * angle.cos() - b * angle.sin();
            head[i + DIM / 2] = b * angle.cos() + a * angle.sin();
        }
    }
}

/// Logits of every position, in f64 and without a cache.
fn reference(weights: &Weights, ids: &[u32]) -> Vec<Vec<f64>> {
    let w = weights.parts();
    let embedding = &w["model.embed_tokens.weight"];
    let row = |id: u32| embedding[id as usize * HIDDEN..][..HIDDEN].iter().map(|v| f64::from(*v)).collect();
    let mut stream: Vec<Vec<f64>> = ids.iter().map(|&id| row(id)).collect();
    for layer in 0..2 {
        let at = |name: &str| &w[&format!("model.layers.{layer}.{name}.weight")];
        let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (Vec::new(), Vec::new());
        for (position, x) in stream.iter_mut().enumerate() {
            let n = norm(x, at("input_layernorm"));
            let [mut q, mut k, v] = ["q_proj", "k_proj", "v_proj"].map(|p| times(at(&format!("self_attn.{p}")), &n));
            rotate(&mut q, position);
            rotate(&mut k, position);
            keys.push(k);
            values.push(v);
            let mut mixed = Vec::new();
            for (h, q) in q.chunks_exact(DIM).enumerate() {
                let own = h / (HEADS / KV_HEADS) * DIM..h / (HEADS / KV_HEADS) * DIM + DIM;
                let score = |k: &Vec<f64>| q.iter().zip(&k[own.clone()]).map(|(q, k)| q * k).sum::<f64>();
                let scores: Vec<f64> = keys.iter().map(|k| (score(k) / (DIM as f64).sqrt()).exp()).collect();
                let sum: f64 = scores.iter().sum();
                mixed.extend(own.map(|d| scores.iter().zip(&values).map(|(s, v)| s / sum * v[d]).sum::<f64>()));
            }
            x.iter_mut().zip(times(at("self_attn.o_proj"), &mixed)).for_each(|(x, o)| *x += o);
            let n = norm(x, at("post_attention_layernorm"));
            let [gate, up] = ["gate_proj", "up_proj"].map(|p| times(at(&format!("mlp.{p}")), &n));
            let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            x.iter_mut().zip(times(at("mlp.down_proj"), &inner)).for_each(|(x, d)| *x += d);
        }
    }
    stream.iter().map(|x| times(embedding, &norm(x, &w["model.norm.weight"]))).collect()
}

/// Logits of all tokens, computed in steps of the given lengths, in the blocks given.
fn steps<A: HostArena>(model: &mut CpuModel<A>, ids: &[u32], lengths: &[usize], blocks: &[u32]) -> Vec<Vec<f32>> {
    let mut logits = LogitsBuffer::new(VOCAB);
    let (mut rows, mut start_pos) = (Vec::new(), 0);
    for &len in lengths {
        let tokens = &ids[start_pos..start_pos + len];
        logits.reset(len);
        let step = SequenceStep { tokens, start_pos, block_table: blocks, logits: LogitsWanted::All };
        model.forward(&[step], &mut logits).unwrap();
        rows.extend((0..len).map(|r| logits.row(r).to_vec()));
        start_pos += len;
    }
    rows
}

fn assert_close(found: &[Vec<f32>], expected: &[Vec<f64>]) {
    assert_eq!(found.len(), expected.len());
    for (position, (f, e)) in found.iter().zip(expected).enumerate() {
        for (f, e) in f.iter().zip(e) {
            assert!(close(*f, *e), "position {position}: {f}, expected {e}");
        }
    }
}

fn close(found: f32, expected: f64) -> bool {
    (f64::from(found) - expected).abs() < 1e-4
}

fn ids() -> Vec<u32> {
    (0..20).map(|i| (i * 7 + 3) % VOCAB as u32).collect()
}

#[test]
fn fused_or_not_whole_or_in_pieces_logits_are_the_reference() {
    for fused in [false, true] {
        let weights = Weights::random(5, fused);
        let expected = reference(&weights, &ids());
        let mut model = weights.load("llama").unwrap();
        for (lengths, blocks) in [(&[20][..], [0, 1]), (&[1, 14, 3, 1, 1], [5, 2]), (&[1; 20], [7, 6])] {
            assert_close(&steps(&mut model, &ids(), lengths, &blocks), &expected);
        }
    }
}

#[test]
fn sequences_of_a_batch_do_not_see_each_other() {
    let weights = Weights::random(6, true);
    let mut model = weights.load("llama").unwrap();
    let (a, b) = (ids(), vec![1, 2, 3]);
    let step = |tokens, block_table, logits| SequenceStep { tokens, start_pos: 0, block_table, logits };
    let batch = [step(&a, &[3, 0], LogitsWanted::Last), step(&b, &[1], LogitsWanted::All)];
    let mut logits = LogitsBuffer::new(VOCAB);
    logits.reset(4);
    model.forward(&batch, &mut logits).unwrap();
    assert_close(&[logits.row(0).to_vec()], &reference(&weights, &a)[19..]);
    assert_close(&(1..4).map(|r| logits.row(r).to_vec()).collect::<Vec<_>>(), &reference(&weights, &b));
}

#[test]
fn a_routing_that_is_given_is_computed_with() {
    let mut model = Weights::routed(9).load("mixtral").unwrap();
    let expected = steps(&mut model, &ids(), &[20], &[0, 1]);
    let mut logits = LogitsBuffer::new(VOCAB);
    logits.reset(20);
    let mut run = |tokens: &[u32], given: Option<&StepRouting>| {
        let step = SequenceStep { tokens, start_pos: 0, block_table: &[0, 1], logits: LogitsWanted::All };
        let own = model.forward_routed(&[step], given, &mut logits)?;
        Ok::<_, ModelError>((own, (0..20).map(|r| logits.row(r).to_vec()).collect::<Vec<_>>()))
    };
    let (own, rows) = run(&ids(), None).unwrap();
    assert_eq!(rows, expected);
    assert!(own.layers.iter().all(|l| (l.scores.len(), l.chosen.len()) == (20 * EXPERTS, 40)));
    for layer in &own.layers {
        for token in 0..20 {
            let (scores, chosen) = (layer.scores_of(token), layer.chosen_of(token));
            let rest = (0..EXPERTS as u32).filter(|e| !chosen.contains(e)).map(|e| scores[e as usize]);
            assert!(
                rest.fold(f32::MIN, f32::max) <= chosen.iter().map(|e| scores[*e as usize]).fold(f32::MAX, f32::min)
            );
        }
    }
    assert_eq!(run(&ids(), Some(&own)).unwrap(), (own.clone(), expected.clone()), "its own choice changes nothing");

    // Another expert for one token of the last layer: its logits and no others.
    let mut other = own.clone();
    let chosen = &mut other.layers[1].chosen[14..16];
    chosen[0] = (0..EXPERTS as u32).find(|expert| !chosen.contains(expert)).unwrap();
    let (again, rows) = run(&ids(), Some(&other)).unwrap();
    assert_eq!(again, own, "what the model says of itself");
    let differ: Vec<usize> = (0..20).filter(|row| rows[*row] != expected[*row]).collect();
    assert_eq!(differ, [7]);

    assert!(matches!(run(&ids()[..19], Some(&own)), Err(ModelError::InvalidStep { .. })), "another step's");
    other.layers[1].chosen[14] = EXPERTS as u32;
    assert!(matches!(run(&ids(), Some(&other)), Err(ModelError::InvalidStep { .. })), "an expert that is not there");
}

/// Addresses are likely to be the same again; nothing may be remembered by them.
#[test]
fn models_of_one_process_share_nothing() {
    let (first, second) = (Weights::random(7, true), Weights::random(8, true));
    for (a, b) in [(&first, &second), (&second, &first)] {
        let mut before = a.load("llama").unwrap();
        steps(&mut before, &ids(), &[20], &[0, 1]);
        drop(before);
        let mut after = b.load("llama").unwrap();
        assert_close(&steps(&mut after, &ids(), &[20], &[0, 1]), &reference(b, &ids()));
    }
}

/// An arena with an address on a device that gives freed addresses out again.
trait Placed: HostArena {
    fn address(&self) -> u64;
}

impl Placed for FakeArena {
    fn address(&self) -> u64 {
        FakeArena::address(self)
    }
}

/// What this project does not do: weights in a table by their address, which outlives the arena.
struct KeyedByAddress {
    device: Uploading<FakeAccelerator>,
    table: Mutex<HashMap<u64, Arc<[u8]>>>,
}

struct KeyedArena {
    arena: FakeArena,
    kept: Arc<[u8]>,
}

impl HostArena for KeyedArena {
    fn bytes(&self) -> &[u8] {
        &self.kept
    }
}

impl Placed for KeyedArena {
    fn address(&self) -> u64 {
        self.arena.address()
    }
}

impl Device for KeyedByAddress {
    type Arena = KeyedArena;

    fn name(&self) -> String {
        self.device.name()
    }

    fn load_image(
        &self,
        bundle: &Bundle,
        verify: Verify,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Resident<KeyedArena>, LoadError> {
        let Resident { arena, report } = self.device.load_image(bundle, verify, progress)?;
        let mut table = self.table.lock().unwrap();
        let kept = Arc::clone(table.entry(arena.address()).or_insert_with(|| arena.bytes().into()));
        Ok(Resident { arena: KeyedArena { arena, kept }, report })
    }
}

fn fake() -> Uploading<FakeAccelerator> {
    Uploading { accelerator: FakeAccelerator::new(Faults::default()), options: UploadOptions::default() }
}

/// Loads `first`, drops it, loads `second` at the address that it had; whether the second's logits are its own.
fn second_is_itself<D: Device<Arena: Placed>>(device: &D, first: &Weights, second: &Weights) -> bool {
    let mut before = first.load_on(device, "llama").unwrap();
    assert_close(&steps(&mut before, &ids(), &[20], &[0, 1]), &reference(first, &ids()));
    let address = before.loaded().arena().address();
    drop(before);
    let mut after = second.load_on(device, "llama").unwrap();
    assert_eq!(after.loaded().arena().address(), address, "the address is not used again, so nothing is tested");
    let (found, expected) = (steps(&mut after, &ids(), &[20], &[0, 1]), reference(second, &ids()));
    found.iter().flatten().zip(expected.iter().flatten()).all(|(f, e)| close(*f, *e))
}

#[test]
fn a_model_at_the_address_of_another_answers_as_itself() {
    let (a, b) = (Weights::random(11, true), Weights::random(12, true));
    for (first, second) in [(&a, &b), (&b, &a)] {
        assert!(second_is_itself(&fake(), first, second));
        let mutant = KeyedByAddress { device: fake(), table: Mutex::default() };
        assert!(!second_is_itself(&mutant, first, second), "the test does not see weights kept by address");
    }
}

#[test]
fn bundles_that_do_not_make_a_model_are_refused_by_name() {
    let weights = Weights::random(9, false);
    let refused = |weights: &Weights, architecture: &str| {
        let error = weights.load(architecture).unwrap_err();
        assert_eq!(error.exit_code(), 3);
        error.to_string()
    };
    assert!(refused(&weights, "rwkv").contains("\"rwkv\""));

    let mut missing = weights.clone();
    missing.0.retain(|t| t.0 != "model.layers.1.self_attn.k_proj.weight");
    assert!(refused(&missing, "llama").contains("model.layers.1.self_attn.k_proj.weight: missing"));
    // Qwen2 has biases that a llama has not.
    assert!(refused(&weights, "qwen2").contains("q_proj.bias: missing"));

    let mut unused = weights.clone();
    unused.0.push(("model.extra.weight".into(), vec![("model.extra.weight".into(), 4)], vec![], vec![0.0; 4]));
    assert!(refused(&unused, "llama").contains("model.extra.weight among them"));

    let mut shape = weights.clone();
    let norm = shape.0.last_mut().unwrap();
    (norm.1[0].1, norm.3) = (HIDDEN - 1, vec![1.0; HIDDEN - 1]);
    assert!(refused(&shape, "llama").contains("shape [23], the configuration gives [24]"));
}

#[test]
fn a_flipped_bit_is_refused_before_anything_is_computed() {
    let dir = tempfile::tempdir().unwrap();
    Weights::random(10, true).write(dir.path(), "llama");
    let bundle = Bundle::open(dir.path()).unwrap();
    let segment = dir.path().join(&bundle.manifest().image.segments[0].file);
    let mut bytes = std::fs::read(&segment).unwrap();
    bytes[1000] ^= 4;
    std::fs::write(&segment, bytes).unwrap();
    let error = LoadedBundle::load(bundle, &CpuDevice::new(2), Verify::Host, &|_| ()).unwrap_err();
    assert_eq!(error.exit_code(), 4);
    assert!(error.to_string().contains("model.embed_tokens.weight"), "{error}");
}
