//! `vt-run bench` and `vt-run chat`.

use super::{DeviceArgs, MemoryArgs, share};
use std::path::PathBuf;

/// Measures generation, in this process or against a running server.
#[derive(Clone, Debug, clap::Args)]
pub struct Bench {
    /// Folder of the bundle to measure in this process, or a reference to one in a store.
    #[arg(long, value_name = "DIR|REFERENCE", env = "VT_BUNDLE", required_unless_present = "url")]
    pub bundle: Option<PathBuf>,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[cfg(feature = "remote")]
    #[command(flatten)]
    pub store: super::StoreArgs,
    /// Measure a running OpenAI-compatible server instead, such as http://127.0.0.1:8000.
    #[arg(long, value_name = "URL", env = "VT_URL")]
    pub url: Option<String>,
    /// Requests at once; several values are measured one after the other.
    #[arg(long, value_name = "N", env = "VT_CONCURRENCY", value_delimiter = ',', default_value = "1,8", value_parser = clap::value_parser!(u16).range(1..=32768))]
    pub concurrency: Vec<u16>,
    /// Requests to make at each concurrency; four times as many as run at once where this and --seconds are absent.
    #[arg(long, value_name = "N", env = "VT_REQUESTS", conflicts_with = "seconds", value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: Option<u32>,
    /// Seconds to go on making requests at each concurrency.
    #[arg(long, value_name = "N", env = "VT_SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: Option<u32>,
    /// Length of prompts, in tokens, or in words with --url; of several values each request takes one at random.
    #[arg(long, value_name = "N", env = "VT_INPUT_LEN", value_delimiter = ',', default_value = "128", value_parser = clap::value_parser!(u32).range(1..))]
    pub input_len: Vec<u32>,
    /// Tokens to generate; of several values each request takes one at random.
    #[arg(long, value_name = "N", env = "VT_OUTPUT_LEN", value_delimiter = ',', default_value = "64", value_parser = clap::value_parser!(u32).range(1..))]
    pub output_len: Vec<u32>,
    /// Share of the requests whose client leaves in the middle of the answer.
    #[arg(long, value_name = "SHARE", env = "VT_DISCONNECT_FRACTION", value_parser = share, requires = "url")]
    pub disconnect_fraction: Option<f64>,
    /// Share of the requests that are not valid, and that the server must refuse.
    #[arg(long, value_name = "SHARE", env = "VT_MALFORMED_FRACTION", value_parser = share, requires = "url")]
    pub malformed_fraction: Option<f64>,
    /// Name of the model in requests to a server; the first that it lists where absent.
    #[arg(long, value_name = "NAME", env = "VT_MODEL")]
    pub model: Option<String>,
    /// Key for the server.
    #[arg(long, value_name = "KEY", env = "VT_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Start of the random numbers that choose lengths and prompts.
    #[arg(long, value_name = "N", env = "VT_SEED", default_value_t = 1)]
    pub seed: u64,
    /// Print JSON.
    #[arg(long, env = "VT_JSON")]
    pub json: bool,
    /// What is logged to standard error.
    #[arg(long, value_name = "FILTER", env = "VT_LOG", default_value = "warn")]
    pub log: String,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub device: DeviceArgs,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub memory: MemoryArgs,
}

/// A conversation in the terminal.
#[derive(Clone, Debug, clap::Args)]
pub struct Chat {
    /// Folder of the bundle, or a reference to one in a store.
    #[arg(long, value_name = "DIR|REFERENCE", env = "VT_BUNDLE")]
    pub bundle: PathBuf,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[cfg(feature = "remote")]
    #[command(flatten)]
    pub store: super::StoreArgs,
    /// What the model is told before the conversation.
    #[arg(long, value_name = "TEXT", env = "VT_SYSTEM")]
    pub system: Option<String>,
    /// Tokens of one answer, at most; to the end of the context where absent.
    #[arg(long, value_name = "N", env = "VT_MAX_TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// Divides the logits; 0 always takes the most likely token; what the model's author recommends where absent, else 1.
    #[arg(long, value_name = "T", env = "VT_TEMPERATURE")]
    pub temperature: Option<f32>,
    /// Choose among the most likely tokens whose probability reaches this; likewise.
    #[arg(long, value_name = "P", env = "VT_TOP_P")]
    pub top_p: Option<f32>,
    /// Start of the random numbers; fresh ones where absent.
    #[arg(long, value_name = "N", env = "VT_SEED")]
    pub seed: Option<u64>,
    /// Jinja file that replaces the model's chat template.
    #[arg(long, value_name = "FILE", env = "VT_CHAT_TEMPLATE")]
    pub chat_template: Option<PathBuf>,
    /// What is logged to standard error.
    #[arg(long, value_name = "FILTER", env = "VT_LOG", default_value = "warn")]
    pub log: String,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub device: DeviceArgs,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub memory: MemoryArgs,
}
