//! Greedy text: the CPU's, a stored one, and the same text whatever the batch.
//!
//! Where the two most likely tokens are further apart than what two ways of computing have been measured to differ by, both
//! say the same. What was measured comes from other positions than those that are judged.

use crate::compare::{choice, row_difference};
use crate::models::{ROOM, Sequences, ids};
use crate::routing::{check_parting, first_other, given};
use crate::{GENERATED, SEQUENCES, small};
use serde_json::Value;
use std::path::Path;
use vt_bundle::mmap::ContiguousMap;
use vt_run::engine::model::Model;
use vt_run::model::{CpuModel, CudaModel, StepRouting};

/// What lies beside a bundle as `NAME.reference.json`: a prompt, and where it is known what greedy decoding makes of it.
pub struct Stored {
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    /// Distance of the two largest logits at each step of `greedy`.
    margins: Vec<f32>,
}

impl Stored {
    pub fn of(bundle: &Path) -> Option<Self> {
        let name = bundle.file_name().unwrap().to_string_lossy();
        let bytes = std::fs::read(bundle.with_file_name(format!("{name}.reference.json"))).ok()?;
        let stored: Value = serde_json::from_slice(&bytes).unwrap();
        let list = |key: &str| stored[key].as_array().cloned().unwrap_or_default();
        let ids = |key| list(key).iter().map(|v| v.as_u64().unwrap() as u32).collect();
        let margins = list("margins").iter().map(|v| v.as_f64().unwrap() as f32).collect();
        Some(Self { prompt: ids("prompt"), greedy: ids("greedy"), margins })
    }
}

/// A text that was chosen greedily, and the logits that each of its tokens was chosen from.
struct Greedy {
    tokens: Vec<u32>,
    rows: Vec<Vec<f32>>,
}

impl Greedy {
    fn margins(&self) -> Vec<f32> {
        self.rows.iter().map(|row| choice(row).1).collect()
    }
}

/// Continues every prompt by `count` tokens, all in one batch.
fn generate(model: &mut dyn Model, prompts: &[Vec<u32>], count: usize) -> Vec<Greedy> {
    let vocabulary = model.info().vocab_size;
    let mut sequences = Sequences::new(prompts.to_vec(), prompts.len(), vocabulary);
    let mut texts: Vec<Greedy> = prompts.iter().map(|_| Greedy { tokens: Vec::new(), rows: Vec::new() }).collect();
    let mut parts: Vec<(usize, usize)> = (0..prompts.len()).map(|s| (s, 0)).collect();
    for _ in 0..count {
        for (s, row) in sequences.step_each(model, &parts).into_iter().enumerate() {
            parts[s].1 = sequences.ids[s].len();
            sequences.ids[s].push(choice(&row).0);
            texts[s].tokens.push(choice(&row).0);
            texts[s].rows.push(row);
        }
    }
    texts
}

/// Panics unless `found` is `expected` up to a step whose margin is below twice `difference`.
fn assert_text(what: &str, found: &[u32], expected: &[u32], margins: &[f32], difference: f32) {
    assert!(found.len() >= expected.len(), "{what}: {} tokens", found.len());
    let unsure = margins.iter().position(|&margin| margin < 2.0 * difference);
    match found.iter().zip(expected).position(|(f, e)| f != e) {
        None => eprintln!("{what}: equal over all {} tokens", expected.len()),
        Some(at) => {
            let first = unsure.unwrap_or(usize::MAX);
            assert!(
                at >= first,
                "{what}: differs at {at}, where the margin is {}, by more than {difference}: {found:?}, expected {expected:?}",
                margins[at]
            );
            eprintln!("{what}: equal over {at} tokens; the margin at {first} is {}", margins[first]);
        }
    }
}

/// Prompts of a batch: the stored one, or one of ours, and others of other lengths.
pub fn prompts(stored: Option<&Stored>, vocabulary: usize) -> Vec<Vec<u32>> {
    let first = stored.map_or_else(|| ids(40, 6, vocabulary), |stored| stored.prompt.clone());
    assert!(first.len() + GENERATED <= ROOM, "a stored prompt of {} tokens", first.len());
    std::iter::once(first).chain((1..SEQUENCES).map(|s| ids(40 + s, 1 + s % 17, vocabulary))).collect()
}

/// The text of the first prompt, of the CPU and of a file, is the device's. `difference`: of the device's logits from the CPU's
/// over another text. The CPU takes the device's experts where there are any; a file's text was made with others where the CPU
/// takes others by itself.
pub fn check_against_cpu(
    name: &str,
    stored: Option<&Stored>,
    cpu: &mut CpuModel<ContiguousMap>,
    cuda: &mut CudaModel,
    difference: f32,
) {
    let vocabulary = cpu.info().vocab_size;
    let prompt = prompts(stored, vocabulary).remove(0);
    let (tokens, routing) = generate_routed(cuda, &prompt, GENERATED);
    let (expected, others) = if routing.layers.is_empty() {
        (generate(cpu, std::slice::from_ref(&prompt), GENERATED).remove(0), None)
    } else {
        let text = [&prompt[..], &tokens[..GENERATED - 1]].concat();
        let (mut rows, own) = given(cpu, &text, &routing);
        let rows = rows.split_off(prompt.len() - 1);
        let tokens = rows.iter().map(|row| choice(row).0).collect();
        (Greedy { tokens, rows }, Some(first_other(&routing, &own)))
    };
    let what = format!("{name} greedy text, the CPU's");
    match others {
        // Each token as it follows the device's text.
        Some(_) => {
            for (at, (found, expected)) in tokens.iter().zip(&expected.rows).enumerate() {
                let (token, margin) = choice(expected);
                assert!(
                    *found == token || margin < 2.0 * difference,
                    "{what}: differs at {at}, where the margin is {margin}, by more than {difference}"
                );
            }
            let equal = tokens.iter().zip(&expected.tokens).filter(|(f, e)| f == e).count();
            eprintln!("{what} by the device's experts: {equal} of {GENERATED} tokens");
        }
        None => assert_text(&what, &tokens, &expected.tokens, &expected.margins(), difference),
    }
    match stored {
        Some(stored) if !stored.greedy.is_empty() => {
            // The token at a position is chosen from what the text before it says.
            let same = others.flatten().map_or(GENERATED, |token| (token + 1).saturating_sub(prompt.len()));
            let count = stored.greedy.len().min(GENERATED).min(same);
            let (greedy, margins) = (&stored.greedy[..count], &stored.margins[..count]);
            let what = format!("{name} greedy text, stored");
            if same < GENERATED {
                eprintln!("{what}: the CPU takes other experts from there on: {count} tokens are compared");
            }
            assert_text(&what, &tokens, greedy, margins, difference);
        }
        _ => eprintln!("{name}: no stored text"),
    }
}

/// Continues a prompt by `count` tokens, and gives the experts that all tokens but the last took.
fn generate_routed(model: &mut CudaModel, prompt: &[u32], count: usize) -> (Vec<u32>, StepRouting) {
    let mut sequences = Sequences::new(vec![prompt.to_vec()], SEQUENCES, model.info().vocab_size);
    let (mut routing, mut tokens) = (StepRouting::default(), Vec::new());
    let mut part = (0, 0, prompt.len());
    for _ in 0..count {
        let rows = sequences.step_routed(model, &[part], &mut routing);
        let token = choice(&rows[rows.len() - 1]).0;
        part = (0, sequences.ids[0].len(), 1);
        sequences.ids[0].push(token);
        tokens.push(token);
    }
    (tokens, routing)
}

/// Each text alone and in a batch of 32: the same but for close choices of tokens, or of experts before them; or the same bits.
pub fn check_batches(name: &str, stored: Option<&Stored>, model: &mut CudaModel, same_bits: bool) {
    let prompts = prompts(stored, model.info().vocab_size);
    let count = if small() { 2 } else { GENERATED };
    let together = generate(model, &prompts, count);
    let alone: Vec<Greedy> =
        prompts.iter().map(|prompt| generate(model, std::slice::from_ref(prompt), count).remove(0)).collect();
    if same_bits {
        for (s, (alone, together)) in alone.iter().zip(&together).enumerate() {
            assert_eq!(alone.tokens, together.tokens, "{name} deterministic: text {s} in a batch");
            let bits = |text: &Greedy| text.rows.iter().flatten().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(alone) == bits(together), "{name} deterministic: logits of text {s} in a batch");
        }
        eprintln!("{name} deterministic: {SEQUENCES} texts have the same bits alone and together");
        return;
    }
    // Steps before a text's first other token, which have the same tokens before them.
    let same = |s: usize| {
        let pairs = alone[s].tokens.iter().zip(&together[s].tokens);
        pairs.take_while(|(a, t)| a == t).count()
    };
    let measured = (0..SEQUENCES)
        .flat_map(|s| (0..same(s)).map(move |i| (s, i)))
        .fold(0.0f32, |most, (s, i)| most.max(row_difference(&alone[s].rows[i], &together[s].rows[i])));
    let mut equal = 0;
    for (s, alone) in alone.iter().enumerate() {
        let at = same(s);
        equal += usize::from(at == count);
        if at < count {
            let margin = choice(&alone.rows[at]).1;
            let what = format!("{name}: text {s} differs at {at} in a batch");
            if margin > 2.0 * measured {
                let by_itself = routing_in_batch(model, &prompts[s..=s], 0, at + 1);
                let in_batch = routing_in_batch(model, &prompts, s, at + 1);
                assert!(!by_itself.layers.is_empty(), "{what}, margin {margin}, logits differ by {measured} elsewhere");
                check_parting(&what, &by_itself, &in_batch);
            }
        }
    }
    eprintln!("{name} alone and in a batch of {SEQUENCES}: logits differ by {measured:.5}, {equal} texts equal");
}

/// The routing of one of several prompts that are continued together, over its prompt and `steps - 1` tokens.
fn routing_in_batch(model: &mut CudaModel, prompts: &[Vec<u32>], s: usize, steps: usize) -> StepRouting {
    let mut sequences = Sequences::new(prompts.to_vec(), prompts.len(), model.info().vocab_size);
    let mut parts: Vec<(usize, usize)> = (0..prompts.len()).map(|s| (s, 0)).collect();
    let mut routing = StepRouting::default();
    for _ in 0..steps {
        let rows = sequences.step_each(model, &parts);
        sequences.append_routing(model, &parts, s, &mut routing);
        for (s, row) in rows.into_iter().enumerate() {
            parts[s].1 = sequences.ids[s].len();
            sequences.ids[s].push(choice(&row).0);
        }
    }
    routing
}
