//! Text to tokens and back: the tokenizer, the chat template, and what keeps a stream of tokens a
//! stream of whole characters.

pub mod chat_template;
pub mod detokenizer;
pub mod grammar;
pub mod output;
pub mod python_json;
pub mod stop;
pub mod strftime;
pub mod token_bytes;
pub mod tokenizer;

mod bundle_text;

pub use bundle_text::{BundleText, TextAssets};
pub use chat_template::ChatTemplate;
pub use detokenizer::{Detokenizer, TextPiece};
pub use grammar::{Grammar, Grammars};
pub use output::{OutputEvent, OutputOptions, OutputStream};
pub use stop::StopMatcher;
pub use tokenizer::Tokenizer;

use thiserror::Error;

/// Why text could not be turned into tokens, or a text asset of a bundle could not be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TextError {
    /// A text asset is not what its name says.
    #[error("{asset}: {reason}")]
    Asset {
        /// Name of the asset in the bundle.
        asset: &'static str,
        /// What was found, and where.
        reason: String,
    },
    /// The tokenizer refused a text.
    #[error("the tokenizer could not encode the text: {0}")]
    Encode(String),
    /// A text has far more tokens than the model can take; how many was not counted to the end.
    #[error("the text has more than {most} tokens, which are more than this model takes; shorten it")]
    TooLong {
        /// Tokens that it has more than.
        most: usize,
    },
    /// The bundle has no chat template, and a chat was asked for.
    #[error("this model has no chat template; use /v1/completions, or start the server with --chat-template")]
    NoChatTemplate,
    /// The chat template refused the conversation, with the template author's own words.
    #[error("the chat template refused the messages: {0}")]
    TemplateRefused(String),
    /// The chat template could not be rendered.
    #[error("the chat template failed: {0}")]
    Template(String),
    /// A grammar for the output is not valid, or too large.
    #[error("the output grammar cannot be used: {0}")]
    Grammar(String),
    /// The chat template ran longer, or wrote more, than any honest template does.
    #[error("the chat template exceeded its limit of {limit} {what}")]
    TemplateLimit {
        /// `steps` or `bytes of output`.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}
