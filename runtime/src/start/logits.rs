//! `--logits`: what the model says at every position of a prompt, for comparisons with other engines.

use super::Failure;
use super::load::Ready;
use crate::cli::LogitsRows;
use crate::engine::model::{LogitsBuffer, LogitsWanted, SequenceStep};
use anyhow::Context;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Positions of one step: rows of logits are the largest buffer of the run.
const STEP_TOKENS: usize = 64;

/// Writes little-endian f32, `[positions, vocabulary]`.
pub(super) fn write(ready: Ready, ids: &[u32], rows: LogitsRows, path: &Path) -> Result<(), Failure> {
    let mut model = ready.model.into_model();
    let info = model.info().clone();
    let fault = |e: std::io::Error| Failure::new(6, anyhow::Error::new(e).context(path.display().to_string()));
    let blocks: Vec<u32> = (0..info.kv.blocks_for(ids.len()) as u32).collect();
    let mut file = BufWriter::new(File::create(path).map_err(fault)?);
    let mut logits = LogitsBuffer::new(info.vocab_size);
    let mut written = 0;
    let mut start_pos = 0;
    for tokens in ids.chunks(STEP_TOKENS.min(info.max_batch_tokens)) {
        let wanted = match rows {
            LogitsRows::All => LogitsWanted::All,
            LogitsRows::Last if start_pos + tokens.len() == ids.len() => LogitsWanted::Last,
            LogitsRows::Last => LogitsWanted::None,
        };
        let step = SequenceStep { tokens, start_pos, block_table: &blocks, logits: wanted };
        logits.reset(step.logits_rows());
        let computed = model.forward(&[step], &mut logits).context("the prompt cannot be computed");
        computed.map_err(|error| Failure { code: 3, error })?;
        for value in logits.rows_mut() {
            file.write_all(&value.to_le_bytes()).map_err(fault)?;
        }
        written += logits.rows();
        start_pos += tokens.len();
    }
    file.flush().map_err(fault)?;
    eprintln!("{}: f32 [{written}, {}]", path.display(), info.vocab_size);
    Ok(())
}
