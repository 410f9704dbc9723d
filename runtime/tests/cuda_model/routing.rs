//! Experts that the device took, against the CPU's.
//!
//! Where two experts are almost equally likely, rounding chooses between them, and from there on the two compute different
//! things. So the CPU computes with the device's choice, and what is asserted of the choice is that it follows from the device's
//! scores, that these are the CPU's but for rounding, and that the CPU would have chosen otherwise only where its own scores are
//! as close to each other as rounding brings them.

use crate::models::Sequences;
use vt_bundle::mmap::ContiguousMap;
use vt_run::model::{CpuModel, LayerRouting, StepRouting};

/// Largest difference of a score from the CPU's, as a share of the layer's largest.
const SCORE_SHARE: f32 = 0.03;
/// Scores that are no further apart are equal: the device compares what its exponential function makes of them.
const EQUAL: f32 = 1e-5;

/// The CPU's logits at each position of `text` with the experts given, and its own routing on the way.
pub fn given(cpu: &mut CpuModel<ContiguousMap>, text: &[u32], routing: &StepRouting) -> (Vec<Vec<f32>>, StepRouting) {
    let vocabulary = vt_run::engine::model::Model::info(cpu).vocab_size;
    Sequences::new(vec![text.to_vec()], 1, vocabulary).step_given(cpu, routing)
}

/// The first token for which two routings take other experts.
pub fn first_other(a: &StepRouting, b: &StepRouting) -> Option<usize> {
    let layers = a.layers.iter().zip(&b.layers).filter(|(a, _)| a.experts > 0);
    layers.filter_map(|(a, b)| (0..tokens(a)).find(|token| experts(a, *token) != experts(b, *token))).min()
}

fn tokens(layer: &LayerRouting) -> usize {
    layer.chosen.len() / layer.top_k
}

/// A token's experts in order.
fn experts(layer: &LayerRouting, token: usize) -> Vec<u32> {
    let mut experts = layer.chosen_of(token).to_vec();
    experts.sort_unstable();
    experts
}

/// Asserts that the choice follows from the scores.
fn check_choice(what: &str, layer: &LayerRouting, token: usize) {
    let (scores, chosen) = (layer.scores_of(token), experts(layer, token));
    assert!(
        chosen.windows(2).all(|pair| pair[0] != pair[1]),
        "{what}: token {token} takes an expert twice: {chosen:?}"
    );
    let of = |is_chosen: bool| {
        let scores = scores.iter().enumerate();
        scores.filter(move |(e, _)| chosen.contains(&(*e as u32)) == is_chosen).map(|(_, score)| *score)
    };
    let least = of.clone()(true).fold(f32::INFINITY, f32::min);
    let most = of(false).fold(f32::NEG_INFINITY, f32::max);
    assert!(least >= most - EQUAL, "{what}: token {token} takes a score of {least} and leaves one of {most}");
}

/// Asserts that two routings of one text on the device part where rounding chooses: all scores up to the first choice that
/// differs are the same but for rounding.
pub fn check_parting(what: &str, a: &StepRouting, b: &StepRouting) {
    let layers = || a.layers.iter().zip(&b.layers).enumerate().filter(|(_, (a, _))| a.experts > 0);
    let others = layers().filter_map(|(layer, (a, b))| {
        let token = (0..tokens(a)).find(|token| experts(a, *token) != experts(b, *token))?;
        Some((token, layer))
    });
    let first = others.min();
    assert!(first.is_some(), "{what}: the same experts, and logits that rounding does not explain");
    let Some((last, layer)) = first else { return };
    for (index, (a, b)) in layers() {
        // What comes after that choice is another computation.
        let end = if index <= layer { last + 1 } else { last };
        let largest = a.scores.iter().fold(0.0f32, |most, score| most.max(score.abs()));
        let (a, b) = (&a.scores[..end * a.experts], &b.scores[..end * b.experts]);
        let difference = a.iter().zip(b).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(
            difference <= SCORE_SHARE * largest,
            "{what}: layer {index}: a score before position {end} differs by {difference} of {largest}"
        );
    }
    eprintln!(
        "{what}: other experts from position {last}, layer {layer} on, by scores that are the same but for rounding"
    );
}

/// Asserts what is said above of the device's routing beside the CPU's.
pub fn check_routing(what: &str, device: &StepRouting, cpu: &StepRouting) {
    assert_eq!(device.layers.len(), cpu.layers.len(), "{what}");
    let (mut other, mut all) = (0, 0);
    let (mut widest, mut worst) = (0.0f32, 0.0f32);
    for (index, (device, cpu)) in device.layers.iter().zip(&cpu.layers).enumerate().filter(|(_, (d, _))| d.experts > 0)
    {
        let what = format!("{what}: layer {index}");
        assert_eq!((device.scores.len(), device.chosen.len()), (cpu.scores.len(), cpu.chosen.len()), "{what}");
        let largest = cpu.scores.iter().fold(0.0f32, |most, score| most.max(score.abs()));
        // Of tokens with the same choice, so that it comes from other places than those that are judged.
        let mut measured = 0.0f32;
        let mut margins = Vec::new();
        for token in 0..tokens(device) {
            check_choice(&what, device, token);
            let (own, found) = (cpu.scores_of(token), device.scores_of(token));
            let difference = own.iter().zip(found).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(
                difference <= SCORE_SHARE * largest,
                "{what}: token {token}: a score differs by {difference} of {largest}"
            );
            let (theirs, ours) = (experts(device, token), experts(cpu, token));
            if theirs == ours {
                measured = measured.max(difference);
                continue;
            }
            let least = |of: &[u32], without: &[u32]| {
                let scores = of.iter().filter(|e| !without.contains(e)).map(|e| own[*e as usize]);
                scores.fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), s| (low.min(s), high.max(s)))
            };
            // From the best that only the CPU takes to the worst that only the device takes.
            margins.push((token, least(&ours, &theirs).1 - least(&theirs, &ours).0));
        }
        for &(token, margin) in &margins {
            assert!(
                margin <= 2.0 * measured,
                "{what}: token {token}: the device takes an expert whose score is {margin} lower; scores differ by {measured}"
            );
            widest = widest.max(margin);
        }
        (other, all, worst) = (other + margins.len(), all + tokens(device), worst.max(measured));
    }
    eprintln!(
        "{what}: {other} of {all} choices of experts are not the CPU's, by scores up to {widest:.5} apart; \
         scores differ by up to {worst:.5}"
    );
}
