//! The small files of a bundle that a run reads.

use super::LoadError;
use vt_bundle::Bundle;
use vt_bundle::manifest::AssetRole;

/// Text assets, as bytes, each checked against its hash in the manifest.
#[derive(Debug)]
pub struct Assets {
    /// `tokenizer.json`.
    pub tokenizer: Option<Vec<u8>>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Vec<u8>>,
    /// The chat template, Jinja.
    pub chat_template: Option<Vec<u8>>,
    /// `generation_config.json`.
    pub generation_config: Option<Vec<u8>>,
}

impl Assets {
    /// Reads and checks them.
    ///
    /// # Errors
    /// [`LoadError::Bundle`] where a file cannot be read or is corrupt.
    pub fn read(bundle: &Bundle) -> Result<Self, LoadError> {
        let read = |role| bundle.manifest().asset(role).map(|asset| bundle.read_asset(asset)).transpose();
        Ok(Self {
            tokenizer: read(AssetRole::Tokenizer)?,
            tokenizer_config: read(AssetRole::TokenizerConfig)?,
            chat_template: read(AssetRole::ChatTemplate)?,
            generation_config: read(AssetRole::GenerationConfig)?,
        })
    }
}
