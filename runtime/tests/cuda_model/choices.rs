//! Tokens that the device chooses.

use crate::SEQUENCES;
use crate::models::{Sequences, ids};
use vt_run::engine::SamplingParams;
use vt_run::engine::model::{LogitChange, LogitsBuffer, LogitsWanted, Model, RowChoice, SequenceStep};
use vt_run::engine::sampling::{Sampler, SamplingScratch, logprobs_of};
use vt_run::model::CudaModel;

/// Tokens that the device chooses are those that the host chooses from the same logits, of a recorded step and of one that is
/// not.
pub fn check_choices(name: &str, model: &mut CudaModel) {
    let vocabulary = model.info().vocab_size;
    let limit = vocabulary - 3;
    let all: Vec<Vec<u32>> = (0..9).map(|s| ids(s, 20, vocabulary)).collect();
    let sequences = Sequences::new(all, SEQUENCES, vocabulary);
    let params = |s: usize| SamplingParams {
        temperature: [0.0, 0.7, 1.3][s % 3],
        top_k: [0, 40, 0][s / 3],
        top_p: [1.0, 0.9, 1.0][s / 3],
        min_p: [0.0, 0.0, 0.05][s / 3],
        repetition_penalty: if s.is_multiple_of(2) { 1.0 } else { 1.2 },
        presence_penalty: if s == 4 { 0.5 } else { 0.0 },
        frequency_penalty: if s == 5 { 0.3 } else { 0.0 },
        logit_bias: if s == 7 { vec![(5, 3.0), (6, -2.0)] } else { Vec::new() },
        seed: Some(s as u64),
        logprobs: (s == 8).then_some(4),
    };
    let mut samplers: Vec<Sampler> =
        (0..9).map(|s| Sampler::new(params(s), s as u64 * 7919, &sequences.ids[s])).collect();
    for (position, count) in [(0, 5), (5, 1), (6, 1), (7, 1), (8, 9)] {
        let batch: Vec<SequenceStep<'_>> = (0..9)
            .map(|s| SequenceStep {
                tokens: &sequences.ids[s][position..position + count],
                start_pos: position,
                block_table: &sequences.blocks[s],
                logits: LogitsWanted::Last,
            })
            .collect();
        let mut logits = LogitsBuffer::new(vocabulary);
        logits.reset(9);
        model.forward(&batch, &mut logits).unwrap();
        let changes: Vec<Vec<LogitChange>> = samplers
            .iter()
            .map(|sampler| {
                let mut changes = Vec::new();
                sampler.changes(&[], &mut changes);
                changes
            })
            .collect();
        // Sequence 3 may only say even tokens.
        let mask = vec![0x5555_5555u32; limit.div_ceil(32)];
        let choices: Vec<RowChoice<'_>> = (0..9)
            .map(|s| {
                let (params, seed) = samplers[s].params();
                let mask = (s == 3).then_some(mask.as_slice());
                RowChoice { params, seed, position: position as u64, changes: &changes[s], mask }
            })
            .collect();
        assert!(model.can_choose(&choices));
        let mut chosen = Vec::new();
        model.forward_and_choose(&batch, &choices, limit, &mut chosen, &mut || ()).unwrap();
        let mut scratch = SamplingScratch::default();
        let mut tokens = Vec::new();
        for (s, found) in chosen.iter().enumerate() {
            let row = &mut logits.row_mut(s)[..limit];
            let raw = row.to_vec();
            samplers[s].adjust(row);
            if s == 3 {
                row.iter_mut().skip(1).step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY);
            }
            let token = samplers[s].choose(row, position as u64, &mut scratch).unwrap();
            assert_eq!(found.token, Some(token), "{name}: sequence {s} at {position}");
            if s == 8 {
                let expected = logprobs_of(&raw, token, 4, &mut scratch).unwrap();
                let (logprob, top) = found.logprobs.clone().unwrap();
                assert!((logprob - expected.logprob).abs() < 1e-4, "{name}: {logprob}, {expected:?}");
                assert!(top.iter().map(|t| t.0).eq(expected.top.iter().map(|t| t.0)), "{name}: {top:?}, {expected:?}");
            }
            tokens.push(token);
        }
        tokens.into_iter().zip(&mut samplers).for_each(|(token, sampler)| sampler.accept(token));
    }
}
