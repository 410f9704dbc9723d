//! Choosing tokens on the device: what the rows of a step are sent with, and what comes back.
//!
//! Axes: R rows of logits.

use super::step::StepLayout;
use crate::engine::model::{Chosen, RowChoice};
use vt_kernels::cuda::sampling::{MAX_TOP, MAX_VOCABULARY, SamplingEntry, SamplingResult, SamplingRow};

/// Room for changed logits and masks of a step: for 128 rows, some thousand changes and a mask of a large vocabulary each.
pub(super) const EXTRA_BYTES: u64 = 8 << 20;

/// Bytes of a mask, which starts at a multiple of 4.
fn mask_bytes(choice: &RowChoice<'_>) -> usize {
    4 * choice.mask.map_or(0, <[u32]>::len)
}

/// Bytes behind a step for its changes and masks.
fn extra_bytes(choices: &[RowChoice<'_>]) -> usize {
    choices.iter().map(|c| c.changes.len() * SamplingEntry::BYTES + mask_bytes(c)).sum()
}

/// Whether the kernels can choose these rows of a vocabulary.
pub(super) fn can_choose(choices: &[RowChoice<'_>], vocabulary: usize) -> bool {
    vocabulary <= MAX_VOCABULARY
        && choices.iter().all(|c| c.params.logprobs.is_none_or(|top| top <= MAX_TOP))
        && extra_bytes(choices) as u64 <= EXTRA_BYTES
}

/// Writes the rows, and behind the step their changes and masks; rows up to `rows` are padding. `address` is where the bytes
/// will be on the device. Returns how many bytes there are in all.
pub(super) fn fill(
    choices: &[RowChoice<'_>],
    rows: usize,
    layout: &StepLayout,
    address: u64,
    bytes: &mut [u8],
) -> usize {
    let mut end = layout.bytes as usize;
    let mut put = |bytes: &mut [u8], data: &[u8]| {
        bytes[end..end + data.len()].copy_from_slice(data);
        end += data.len();
    };
    let mut place = layout.bytes;
    for row in 0..rows {
        let parameters = match choices.get(row) {
            None => SamplingRow::greedy(),
            Some(choice) => {
                let entries = address + place;
                for change in choice.changes {
                    let entry = SamplingEntry {
                        token: change.token,
                        bias: change.bias,
                        output_count: change.output_count,
                        in_prompt: change.in_prompt,
                    };
                    put(bytes, &entry.to_bytes());
                }
                place += (choice.changes.len() * SamplingEntry::BYTES) as u64;
                let mask = if choice.mask.is_some() { address + place } else { 0 };
                choice.mask.iter().flat_map(|words| words.iter()).for_each(|word| put(bytes, &word.to_le_bytes()));
                place += mask_bytes(choice) as u64;
                let params = choice.params;
                SamplingRow {
                    seed: choice.seed,
                    position: choice.position,
                    mask,
                    entries,
                    entry_count: choice.changes.len() as u32,
                    temperature: params.temperature,
                    top_k: u32::try_from(params.top_k).unwrap_or(0),
                    top_p: params.top_p,
                    min_p: params.min_p,
                    repetition_penalty: params.repetition_penalty,
                    presence_penalty: params.presence_penalty,
                    frequency_penalty: params.frequency_penalty,
                    logprobs: params.logprobs.map(|top| top as u32),
                }
            }
        };
        let at = layout.choices as usize + row * SamplingRow::BYTES;
        bytes[at..at + SamplingRow::BYTES].copy_from_slice(&parameters.to_bytes());
    }
    end
}

/// The results of `count` rows.
pub(super) fn read(bytes: &[u8], count: usize, chosen: &mut Vec<Chosen>) {
    chosen.clear();
    let results = bytes.chunks_exact(SamplingResult::BYTES).take(count).map(SamplingResult::from_bytes);
    chosen.extend(results.map(|result| match result {
        Some(SamplingResult { token, logprobs }) => Chosen { token, logprobs },
        None => Chosen { token: None, logprobs: None },
    }));
}

#[cfg(test)]
mod tests {
    use super::super::step::StepShape;
    use super::*;
    use crate::engine::SamplingParams;
    use crate::engine::model::LogitChange;

    #[test]
    fn rows_name_their_changes_and_masks() {
        let params = SamplingParams { top_k: 7, logprobs: Some(3), ..SamplingParams::default() };
        let change = |token| LogitChange { token, bias: 0.5, output_count: 2, in_prompt: true };
        let (first, second) = ([change(4), change(9)], [change(1)]);
        let choice = |changes, mask| RowChoice { params: &params, seed: 11, position: 5, changes, mask };
        let choices = [choice(&first[..], None), choice(&second[..], Some(&[0xF0F0_F0F0, 1][..]))];
        assert!(can_choose(&choices, 1000) && !can_choose(&choices, MAX_VOCABULARY + 1));

        let shape = StepShape { tokens: 4, decode: 4, runs: 0, wanted: 4 };
        let layout = StepLayout::new(&shape, 1);
        let mut bytes = vec![0xEE; layout.bytes as usize + extra_bytes(&choices)];
        let base = 1 << 20;
        assert_eq!(fill(&choices, 4, &layout, base, &mut bytes), bytes.len());
        let word = |bytes: &[u8], at: u64| {
            u64::from_le_bytes(bytes[at as usize..at as usize + 8].try_into().expect("eight bytes"))
        };
        let behind = base + layout.bytes;
        let row = |index: u64| layout.choices + index * SamplingRow::BYTES as u64;
        assert_eq!([word(&bytes, row(0)), word(&bytes, row(0) + 8)], [11, 5]);
        assert_eq!([word(&bytes, row(0) + 16), word(&bytes, row(0) + 24)], [0, behind]);
        let entries = SamplingEntry::BYTES as u64;
        assert_eq!(
            [word(&bytes, row(1) + 16), word(&bytes, row(1) + 24)],
            [behind + 3 * entries, behind + 2 * entries]
        );
        assert_eq!(word(&bytes, layout.bytes + 3 * entries), 0x1_F0F0_F0F0);
        assert_eq!(bytes[row(2) as usize..][..SamplingRow::BYTES], SamplingRow::greedy().to_bytes());
    }
}
