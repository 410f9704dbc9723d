//! Prompts of real models, short and long, and what another program answered.
//!
//! A stored answer is llama.cpp's, whose products take 8-bit activations: f32 on the CPU chooses the same tokens but where two
//! are about equally likely. CUDA is compared with the CPU, after every token of the stored answer: logits differ by no more
//! than rounding, and where the CPU's two largest ones are further apart than that, CUDA chooses the same token.

use crate::compare::{Noise, choice};
use crate::models::{Sequences, cpu, long_cuda};
use serde_json::Value;
use std::path::Path;
use vt_bundle::mmap::ContiguousMap;
use vt_run::engine::model::Model;
use vt_run::model::CpuModel;

/// Margins of logits below which 8-bit activations may choose another token.
const UNSURE: f32 = 0.6;

/// A prompt and the answer to it.
struct Text {
    tokens: Vec<u32>,
    prompt: usize,
}

impl Text {
    fn all_of(bundle: &Path) -> Vec<Self> {
        let name = bundle.file_name().unwrap().to_string_lossy();
        let Ok(bytes) = std::fs::read(bundle.with_file_name(format!("{name}.reference.json"))) else {
            return Vec::new();
        };
        let stored: Value = serde_json::from_slice(&bytes).unwrap();
        let texts = stored["texts"].as_array().cloned().unwrap_or_default();
        let list = |text: &Value, key: &str| -> Vec<u32> {
            text[key].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
        };
        let of = |text: &Value| {
            let (prompt, answer) = (list(text, "prompt"), list(text, "greedy"));
            Self { tokens: [&prompt[..], &answer].concat(), prompt: prompt.len() }
        };
        texts.iter().map(of).collect()
    }

    fn answer(&self) -> &[u32] {
        &self.tokens[self.prompt..]
    }

    /// The logits from which each token of the answer is chosen; the prompt in pieces, the answer in one step or token by token.
    fn logits(&self, model: &mut dyn Model, pieces: &[usize], one_by_one: bool) -> Vec<Vec<f32>> {
        let (vocabulary, last) = (model.info().vocab_size, self.tokens.len() - 1);
        let mut sequences = Sequences::long(self.tokens.clone(), vocabulary);
        let (mut rows, mut start) = (Vec::new(), 0);
        for &count in pieces {
            rows = sequences.step(model, &[(0, start, count)], false);
            start += count;
        }
        assert_eq!(start, self.prompt);
        let step = if one_by_one { 1 } else { last - start };
        for start in (start..last).step_by(step) {
            rows.extend(sequences.step(model, &[(0, start, step)], true));
        }
        rows
    }

    /// Ways to cut the prompt.
    fn cuts(&self) -> Vec<Vec<usize>> {
        let mut cuts = vec![vec![self.prompt]];
        for first in [&[3, 1][..], &[256, 64, 7], &[512]] {
            let sum = first.iter().sum();
            if self.prompt > sum {
                cuts.push([first, &[self.prompt - sum]].concat());
            }
        }
        cuts
    }
}

/// The CPU chooses the stored tokens.
pub fn check_on_cpu(path: &Path, name: &str) {
    for text in Text::all_of(path) {
        let rows = text.logits(&mut cpu(path), &[text.prompt], false);
        let mut equal = 0;
        for (at, (row, stored)) in rows.iter().zip(text.answer()).enumerate() {
            let (token, margin) = choice(row);
            let what = format!("{name}, a prompt of {}, token {at}", text.prompt);
            assert!(token == *stored || margin < UNSURE, "{what}: {token} by {margin}, {stored} is stored");
            equal += usize::from(token == *stored);
        }
        eprintln!("{name}, a prompt of {}: {equal} of {} tokens are the stored ones", text.prompt, rows.len());
    }
}

/// CUDA chooses what the CPU chooses, after every token of every stored text, however its prompt is cut.
pub fn check_on_device(path: &Path, name: &str, cpu: &mut dyn Model, rounded: &mut [CpuModel<ContiguousMap>]) {
    let texts = Text::all_of(path);
    if texts.is_empty() {
        return;
    }
    let expected: Vec<_> = texts.iter().map(|text| text.logits(cpu, &[text.prompt], false)).collect();
    let samples: Vec<Vec<Vec<Vec<f32>>>> = rounded
        .iter_mut()
        .map(|model| texts.iter().map(|text| text.logits(model, &[text.prompt], false)).collect())
        .collect();
    let noise = |i: usize| Noise::new(&expected[i], samples.iter().map(|sample| sample[i].clone()));
    let noise: Vec<Noise> = (0..texts.len()).map(noise).collect();
    for deterministic in [false, true] {
        let mut model = long_cuda(path, deterministic);
        for ((text, expected), noise) in texts.iter().zip(&expected).zip(&noise) {
            let mut first: Option<Vec<Vec<f32>>> = None;
            for cut in text.cuts() {
                let what = format!("{name}, a prompt of {} in {cut:?}, deterministic {deterministic}", text.prompt);
                let found = text.logits(&mut model, &cut, true);
                let judged = noise.judge(expected, &found);
                let other = expected.iter().zip(&found).filter(|(e, f)| choice(e).0 != choice(f).0);
                let other: Vec<f32> = other.map(|(e, _)| choice(e).1).collect();
                eprintln!("{what}: {judged}; other choices at margins {other:?}");
                assert!(judged.is_rounding(), "{what}: differs by more than rounding");
                assert!(other.iter().all(|margin| *margin <= 2.0 * judged.logit), "{what}: other choices");
                if deterministic {
                    let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|v| v.to_bits()).collect::<Vec<_>>();
                    let same = first.as_ref().is_none_or(|first| bits(first) == bits(&found));
                    assert!(same, "{what}: other bits than as a whole");
                    first.get_or_insert(found);
                }
            }
        }
    }
}
