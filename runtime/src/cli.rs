//! The command line of `vt-run`. Every flag has an environment twin, which the help names.

use crate::load::upload::{IoMode, Residency, UploadOptions, default_readers};
use clap::{Args as _, CommandFactory, FromArgMatches, Parser, ValueEnum};
#[cfg(feature = "remote")]
use std::path::Path;
use std::path::PathBuf;
use std::str::FromStr;

mod subcommands;

pub use subcommands::{Bench, Chat};

/// Loads a vt bundle and serves it over an OpenAI-compatible API, or answers a prompt.
///
/// Without --prompt, --chat, --prompt-ids, --plan or --load-only it serves.
///
/// Exit codes: 0 ok, 1 bench had requests that failed, 2 usage, 3 bundle or architecture invalid, 4 integrity failure, 5 device or memory, 6 I/O.
#[derive(Clone, Debug, Parser)]
#[command(name = "vt-run", version, max_term_width = 120)]
pub struct Cli {
    /// Folder of the bundle that vt-convert wrote, or a reference to one in a store: oci://, oci-layout:, s3://, gs://,
    /// az://, file://.
    #[arg(long, value_name = "DIR|REFERENCE", env = "VT_BUNDLE")]
    pub bundle: PathBuf,
    /// Refuse any bundle but the one with this id (the BLAKE3 of its manifest).
    #[arg(long, value_name = "HEX", env = "VT_EXPECT_ID")]
    pub expect_id: Option<String>,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[cfg(feature = "remote")]
    #[command(flatten)]
    pub store: StoreArgs,

    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub device: DeviceArgs,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub upload: UploadArgs,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub memory: MemoryArgs,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub prompt: PromptArgs,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub server: ServerArgs,

    /// Print the memory plan and exit. No weight is read.
    #[arg(long, env = "VT_PLAN", conflicts_with = "load_only")]
    pub plan: bool,
    /// Load and check the bundle, print where the time went, and exit.
    #[arg(long, env = "VT_LOAD_ONLY")]
    pub load_only: bool,
    /// Print JSON instead of text: the plan, or a prompt's answer with its token ids.
    #[arg(long, env = "VT_JSON")]
    pub json: bool,
    /// Print start-up phases, bytes and peak memory: to standard output with --load-only, else to standard error.
    #[arg(long, value_enum, value_name = "FORM", env = "VT_STATS")]
    pub stats: Option<StatsForm>,
    /// What is logged to standard error: error, warn, info, debug, trace, or per-module filters.
    #[arg(long, value_name = "FILTER", env = "VT_LOG", default_value = "info")]
    pub log: String,
}

/// Measures loading: the link's and the disk's own rates, then whole loads, in one run.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchLoad {
    /// Folder of the bundle, or a reference to one in a store.
    #[arg(long, value_name = "DIR|REFERENCE", env = "VT_BUNDLE")]
    pub bundle: PathBuf,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[cfg(feature = "remote")]
    #[command(flatten)]
    pub store: StoreArgs,
    /// Index of the GPU.
    #[arg(long, value_name = "N", env = "VT_DEVICE_INDEX", default_value_t = 0)]
    pub device_index: u32,
    /// Loads to make.
    #[arg(long, value_name = "N", env = "VT_REPEAT", default_value_t = 5)]
    pub repeat: u32,
    /// Drop the files from the page cache before every load.
    #[arg(long, env = "VT_COLD")]
    pub cold: bool,
    /// Leave out the disk's own rate, which takes long for a large bundle on a slow disk.
    #[arg(long, env = "VT_SKIP_DIRECT")]
    pub skip_direct: bool,
    /// Who checks the weights.
    #[arg(long, value_enum, env = "VT_VERIFY", default_value = "device")]
    pub verify: VerifyArg,
    /// Load with each of these values of --io, in every combination with the other lists.
    #[arg(long, value_enum, value_name = "IO,...", env = "VT_SWEEP_IO", value_delimiter = ',')]
    pub sweep_io: Vec<IoArg>,
    /// Load with each of these values of --upload-chunk.
    #[arg(long, value_name = "MIB,...", env = "VT_SWEEP_CHUNK", value_delimiter = ',')]
    pub sweep_chunk: Vec<u32>,
    /// Load with each of these values of --upload-part.
    #[arg(long, value_name = "MIB,...", env = "VT_SWEEP_PART", value_delimiter = ',')]
    pub sweep_part: Vec<u32>,
    /// Load with each of these values of --upload-depth.
    #[arg(long, value_name = "N,...", env = "VT_SWEEP_DEPTH", value_delimiter = ',')]
    pub sweep_depth: Vec<u16>,
    /// Load with each of these values of --upload-readers.
    #[arg(long, value_name = "N,...", env = "VT_SWEEP_READERS", value_delimiter = ',')]
    pub sweep_readers: Vec<u16>,
    /// Print JSON.
    #[arg(long, env = "VT_JSON")]
    pub json: bool,
    #[allow(missing_docs, reason = "clap would take it for a heading")]
    #[command(flatten)]
    pub upload: UploadArgs,
}

impl BenchLoad {
    /// Every combination of the lists, in their order; a list that is empty stands for the flag's own value.
    pub fn settings(&self) -> Vec<UploadOptions> {
        fn each<T: Copy>(settings: Vec<UploadArgs>, values: &[T], set: impl Fn(&mut UploadArgs, T)) -> Vec<UploadArgs> {
            if values.is_empty() {
                return settings;
            }
            let with = |args: UploadArgs| {
                values
                    .iter()
                    .map(|&value| {
                        let mut args = args.clone();
                        set(&mut args, value);
                        args
                    })
                    .collect::<Vec<_>>()
            };
            settings.into_iter().flat_map(with).collect()
        }
        let settings = each(vec![self.upload.clone()], &self.sweep_io, |args, io| args.io = io);
        let settings = each(settings, &self.sweep_chunk, |args, chunk| args.upload_chunk = chunk);
        let settings = each(settings, &self.sweep_part, |args, part| args.upload_part = part);
        let settings = each(settings, &self.sweep_depth, |args, depth| args.upload_depth = depth);
        let settings = each(settings, &self.sweep_readers, |args, readers| args.upload_readers = Some(readers));
        settings.iter().map(UploadArgs::options).collect()
    }
}

/// What the command line asks for.
#[derive(Clone, Debug)]
pub enum Invocation {
    /// Everything without a subcommand.
    Run(Box<Cli>),
    /// `bench-load`.
    BenchLoad(Box<BenchLoad>),
    /// `bench`.
    Bench(Box<Bench>),
    /// `chat`.
    Chat(Box<Chat>),
}

impl Invocation {
    /// Parses the process's arguments; ends the process where they are wrong or ask for help.
    pub fn parse() -> Self {
        let matches = vt_bundle::flags::with_environment(command()).get_matches();
        let parsed = match matches.subcommand() {
            Some(("bench", own)) => Bench::from_arg_matches(own).map(|b| Self::Bench(Box::new(b))),
            Some(("chat", own)) => Chat::from_arg_matches(own).map(|c| Self::Chat(Box::new(c))),
            Some((_, own)) => BenchLoad::from_arg_matches(own).map(|b| Self::BenchLoad(Box::new(b))),
            None => Cli::from_arg_matches(&matches).map(|c| Self::Run(Box::new(c))),
        };
        parsed.unwrap_or_else(|error| error.exit())
    }
}

#[cfg(feature = "remote")]
impl Invocation {
    /// The bundle that is asked for, and how a store is reached; `None` where there is none.
    pub fn bundle(&self) -> Option<(&Path, &StoreArgs)> {
        match self {
            Self::Run(cli) => Some((&cli.bundle, &cli.store)),
            Self::BenchLoad(bench) => Some((&bench.bundle, &bench.store)),
            Self::Bench(bench) => Some((bench.bundle.as_deref()?, &bench.store)),
            Self::Chat(chat) => Some((&chat.bundle, &chat.store)),
        }
    }

    /// Puts another bundle in the place of the one that is asked for.
    pub fn set_bundle(&mut self, dir: &Path) {
        match self {
            Self::Run(cli) => dir.clone_into(&mut cli.bundle),
            Self::BenchLoad(bench) => dir.clone_into(&mut bench.bundle),
            Self::Bench(bench) => bench.bundle = Some(dir.to_owned()),
            Self::Chat(chat) => dir.clone_into(&mut chat.bundle),
        }
    }
}

/// How stores are reached, and where what comes from them is kept.
#[cfg(feature = "remote")]
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Stores")]
pub struct StoreArgs {
    /// Folder for bundles that are fetched; $XDG_CACHE_HOME/vt or ~/.cache/vt where absent.
    #[arg(long, value_name = "DIR", env = "VT_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Plain HTTP for every host; for this machine it is taken anyway.
    #[arg(long, env = "VT_PLAIN_HTTP")]
    pub plain_http: bool,
}

/// The whole definition, subcommands included.
pub fn command() -> clap::Command {
    let about = "Measure loading: the link's and the disk's own rates, then whole loads, in one run";
    let load = BenchLoad::augment_args(clap::Command::new("bench-load")).about(about);
    let about = "Measure generation, in this process or against a running server";
    let bench = Bench::augment_args(clap::Command::new("bench")).about(about);
    let chat = Chat::augment_args(clap::Command::new("chat")).about("Talk with the model in the terminal");
    let whole = Cli::command().subcommands([bench, chat, load]);
    whole.subcommand_negates_reqs(true).args_conflicts_with_subcommands(true)
}

impl Cli {
    /// What a subcommand shares with a run without one: this bundle, everything else by default.
    pub fn for_bundle(bundle: PathBuf, device: DeviceArgs, memory: MemoryArgs) -> Result<Self, clap::Error> {
        let whole = Self::try_parse_from(["vt-run", "--bundle", "."])?;
        Ok(Self { bundle, device, memory, ..whole })
    }

    /// A command line out of a test.
    #[cfg(all(test, feature = "remote"))]
    pub(crate) fn parse_for_test(args: &[&str]) -> Self {
        Self::try_parse_from([&["vt-run"], args].concat()).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Where and how to compute.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// auto, cpu, cuda or cuda:N. auto takes the CPU where there is no GPU or this build has no CUDA kernels.
    #[arg(long, value_name = "DEVICE", env = "VT_DEVICE", default_value = "auto")]
    pub device: DeviceName,
    /// Compute threads on the CPU; all processors that the process may use where absent.
    #[arg(long, value_name = "N", env = "VT_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Activations in matrix products on the CPU: 8-bit blocks (faster) or f32 (what weight-only references do).
    #[arg(long, value_enum, env = "VT_ACTIVATIONS", default_value = "int8")]
    pub activations: ActivationsArg,
    /// Make every text the same, bit for bit, whatever is computed beside it and whatever is in the prefix cache. With
    /// 8-bit activations on the CPU prompts take up to twice as long; on a GPU products take 16 rows at a time, which slows prompts.
    #[arg(long, env = "VT_DETERMINISTIC")]
    pub deterministic: bool,
    /// Submit every kernel of a step to the GPU instead of replaying recorded steps; slower, for diagnosis.
    #[arg(long, env = "VT_ENFORCE_EAGER")]
    pub enforce_eager: bool,
    /// Who checks the weights against the manifest before the first token; the device where it is a GPU, else the host.
    #[arg(long, value_enum, env = "VT_VERIFY")]
    pub verify: Option<VerifyArg>,
    /// This process's rank among --tp-size; loads its slice of every tensor.
    #[arg(long, value_name = "R", env = "VT_TP_RANK", default_value_t = 0)]
    pub tp_rank: u32,
    /// Degree of tensor parallelism. Above 1 only with --load-only.
    #[arg(long, value_name = "N", env = "VT_TP_SIZE", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub tp_size: u32,
}

/// How an image reaches a GPU. The defaults are the fastest that were measured.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Upload to a GPU")]
pub struct UploadArgs {
    /// How files are read: through the page cache, past it, out of a mapping; auto goes past it where they are not in it.
    #[arg(long, value_enum, env = "VT_IO", default_value = "auto")]
    pub io: IoArg,
    /// MiB of one copy and of one staging buffer; a power of two.
    #[arg(long, value_name = "MIB", env = "VT_UPLOAD_CHUNK", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub upload_chunk: u32,
    /// MiB that one reader reads at once: several fill a staging buffer together; a power of two.
    #[arg(long, value_name = "MIB", env = "VT_UPLOAD_PART", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub upload_part: u32,
    /// Staging buffers.
    #[arg(long, value_name = "N", env = "VT_UPLOAD_DEPTH", default_value_t = 6, value_parser = clap::value_parser!(u16).range(2..=4096))]
    pub upload_depth: u16,
    /// Threads that read; seven for every eight processors, at most 16, where absent.
    #[arg(long, value_name = "N", env = "VT_UPLOAD_READERS", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub upload_readers: Option<u16>,
    /// Drop the files from the page cache once they are read.
    #[arg(long, env = "VT_UPLOAD_DROP_CACHE")]
    pub upload_drop_cache: bool,
}

impl UploadArgs {
    /// As the loader takes them.
    pub fn options(&self) -> UploadOptions {
        let io = match self.io {
            IoArg::Auto => IoMode::Auto,
            IoArg::Mmap => IoMode::Mmap,
            IoArg::Pread => IoMode::Pread,
            IoArg::Direct => IoMode::Direct,
        };
        UploadOptions {
            chunk_bytes: u64::from(self.upload_chunk) << 20,
            part_bytes: u64::from(self.upload_part) << 20,
            depth: usize::from(self.upload_depth),
            readers: self.upload_readers.map_or_else(default_readers, usize::from),
            io,
            drop_cache: self.upload_drop_cache,
            residency: Residency::Auto,
        }
    }
}

/// Sizes.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Memory")]
pub struct MemoryArgs {
    /// Longest sequence, prompt and output together, in tokens; the model's own limit, or what fits, where absent.
    #[arg(long, value_name = "TOKENS", env = "VT_MAX_MODEL_LEN", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_model_len: Option<u32>,
    /// Sequences that are computed at once; where absent, 16 on the CPU and 128 on a GPU.
    #[arg(long, value_name = "N", env = "VT_MAX_NUM_SEQS", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub max_num_seqs: Option<u16>,
    /// Tokens of one step; longer prompts are computed in pieces. Where absent, 512 on the CPU and 2048 on a GPU.
    #[arg(long, value_name = "N", env = "VT_MAX_NUM_BATCHED_TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_num_batched_tokens: Option<u32>,
    /// Stored type of keys and values. On the CPU f32, f16 or fp8; auto is f32 with --activations f32, else f16. On a GPU
    /// bf16 or fp8; auto is bf16. fp8 is E4M3 with the scales that the checkpoint came with.
    #[arg(long, value_enum, env = "VT_KV_CACHE_DTYPE", default_value = "auto")]
    pub kv_cache_dtype: KvCacheDtype,
    /// Size of the key/value cache; where absent, on the CPU enough for all sequences, at most 4 GiB and what is available; on a
    /// GPU what --gpu-memory-utilization leaves.
    #[arg(long, value_name = "BYTES", env = "VT_KV_CACHE_MEMORY_BYTES")]
    pub kv_cache_memory_bytes: Option<u64>,
    /// Share of a GPU's memory that may be used.
    #[arg(long, value_name = "SHARE", env = "VT_GPU_MEMORY_UTILIZATION", default_value_t = 0.9, value_parser = share)]
    pub gpu_memory_utilization: f64,
    /// Plan as if the GPU had this much memory in all, at most what it has.
    #[arg(long, value_name = "BYTES", env = "VT_GPU_MEMORY_BYTES")]
    pub gpu_memory_bytes: Option<u64>,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && value <= 1.0 => Ok(value),
        _ => Err("expected a number above 0, at most 1".to_owned()),
    }
}

/// One answer instead of a server.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// Continue this text and exit; the text is given to the model as it is.
    #[arg(long, value_name = "TEXT", env = "VT_PROMPT", group = "input")]
    pub prompt: Option<String>,
    /// Answer this message through the model's chat template and exit.
    #[arg(long, value_name = "TEXT", env = "VT_CHAT", group = "input")]
    pub chat: Option<String>,
    /// Continue these token ids, separated by commas, and exit.
    #[arg(long, value_name = "IDS", env = "VT_PROMPT_IDS", group = "input", value_delimiter = ',')]
    pub prompt_ids: Option<Vec<u32>>,
    /// Write the logits of the prompt, little-endian f32 [positions, vocabulary], and exit.
    #[arg(long, value_name = "FILE", env = "VT_LOGITS", requires = "input")]
    pub logits: Option<PathBuf>,
    /// Positions whose logits are written.
    #[arg(long, value_enum, env = "VT_LOGITS_ROWS", default_value = "all", requires = "logits")]
    pub logits_rows: LogitsRows,
    /// Tokens to generate, at most.
    #[arg(long, value_name = "N", env = "VT_MAX_TOKENS", default_value_t = 128)]
    pub max_tokens: usize,
    /// Divides the logits; 0 always takes the most likely token.
    #[arg(long, value_name = "T", env = "VT_TEMPERATURE", default_value_t = 0.0)]
    pub temperature: f32,
    /// Start of the random numbers; fresh ones where absent.
    #[arg(long, value_name = "N", env = "VT_SEED")]
    pub seed: Option<u64>,
    /// Choose among the most likely tokens whose probability reaches this.
    #[arg(long, value_name = "P", env = "VT_TOP_P", default_value_t = 1.0)]
    pub top_p: f32,
    /// Choose among this many most likely tokens; 0 is all.
    #[arg(long, value_name = "K", env = "VT_TOP_K", default_value_t = 0)]
    pub top_k: usize,
    /// Choose among tokens at least this likely relative to the most likely.
    #[arg(long, value_name = "P", env = "VT_MIN_P", default_value_t = 0.0)]
    pub min_p: f32,
    /// End the text before this string; may be given several times.
    #[arg(long, value_name = "TEXT", env = "VT_STOP")]
    pub stop: Vec<String>,
    /// Go on after tokens that end the text.
    #[arg(long, env = "VT_IGNORE_EOS")]
    pub ignore_eos: bool,
}

/// The HTTP server.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// Address to listen on.
    #[arg(long, env = "VT_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, env = "VT_PORT", default_value_t = 8000)]
    pub port: u16,
    /// Listen on a unix socket instead.
    #[arg(long, value_name = "PATH", env = "VT_UDS")]
    pub uds: Option<PathBuf>,
    /// Names that requests may use; the bundle's folder where absent.
    #[arg(long, value_name = "NAME", env = "VT_SERVED_MODEL_NAME", value_delimiter = ',')]
    pub served_model_name: Vec<String>,
    /// Answer requests for any model name.
    #[arg(long, env = "VT_ANY_MODEL_NAME")]
    pub any_model_name: bool,
    /// Key that requests must bring; may be given several times.
    #[arg(long, value_name = "KEY", env = "VT_API_KEY", hide_env_values = true)]
    pub api_key: Vec<String>,
    /// File with one key a line.
    #[arg(long, value_name = "FILE", env = "VT_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Web origins whose pages may use the server; * is all.
    #[arg(long, value_name = "ORIGIN", env = "VT_ALLOWED_ORIGINS", value_delimiter = ',')]
    pub allowed_origins: Vec<String>,
    /// Jinja file that replaces the model's chat template.
    #[arg(long, value_name = "FILE", env = "VT_CHAT_TEMPLATE")]
    pub chat_template: Option<PathBuf>,
    /// Tell what the model thinks from what it answers: by its tags where its template speaks of them, or not at all.
    #[arg(long, value_enum, value_name = "PARSER", env = "VT_REASONING_PARSER", default_value = "auto")]
    pub reasoning_parser: ReasoningParserArg,
    /// Requests that may wait; further ones are refused with 429.
    #[arg(long, value_name = "N", env = "VT_MAX_QUEUE", default_value_t = 256, value_parser = at_least_one)]
    pub max_queue: usize,
    /// Forget keys and values of earlier requests with the same beginning.
    #[arg(long, env = "VT_NO_ENABLE_PREFIX_CACHING")]
    pub no_enable_prefix_caching: bool,
    /// Seconds that requests under way have to end when the server is told to stop.
    #[arg(long, value_name = "SECONDS", env = "VT_SHUTDOWN_TIMEOUT", default_value_t = 30)]
    pub shutdown_timeout: u32,
    /// Prefix of the names of metrics.
    #[arg(long, value_name = "PREFIX", env = "VT_METRICS_PREFIX", default_value = "vt", value_parser = metric_name)]
    pub metrics_prefix: String,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least 1 is needed".to_owned()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}

/// What a name of Prometheus may consist of.
fn metric_name(text: &str) -> Result<String, String> {
    let letter = |c: char| c.is_ascii_alphabetic() || c == '_' || c == ':';
    if text.starts_with(letter) && text.chars().all(|c| letter(c) || c.is_ascii_digit()) {
        return Ok(text.to_owned());
    }
    Err("expected letters, digits, _ and :, not beginning with a digit".to_owned())
}

/// Value of `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// A GPU where there is one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of that index.
    Cuda(u32),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(DeviceName::Auto),
            "cpu" => Ok(DeviceName::Cpu),
            "cuda" => Ok(DeviceName::Cuda(0)),
            _ => match text.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(index)) => Ok(DeviceName::Cuda(index)),
                _ => Err("expected auto, cpu, cuda or cuda:N".to_owned()),
            },
        }
    }
}

/// Value of `--activations`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ActivationsArg {
    /// 8-bit blocks.
    Int8,
    /// As they are.
    F32,
}

/// Value of `--verify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyArg {
    /// BLAKE3 of every leaf, on the GPU, in its final place.
    Device,
    /// BLAKE3 of every leaf, on the host.
    Host,
    /// Manifest, sizes and text assets only.
    Off,
}

/// Value of `--logits-rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogitsRows {
    /// Every position.
    All,
    /// The last one: exactly what the first token is chosen from.
    Last,
}

/// Value of `--io`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoArg {
    /// By what is in the page cache.
    Auto,
    /// Out of a mapping.
    Mmap,
    /// Through the page cache.
    Pread,
    /// Past the page cache (O_DIRECT).
    Direct,
}

/// Value of `--kv-cache-dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvCacheDtype {
    /// By the device and the activations.
    Auto,
    /// Exact; on the CPU.
    F32,
    /// Half the memory; on the CPU.
    F16,
    /// As the model computes; on a GPU.
    Bf16,
    /// E4M3 with the checkpoint's scales of keys and values, or ones; on either.
    Fp8,
}

/// Value of `--reasoning-parser`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReasoningParserArg {
    /// Where the model's template speaks of thoughts.
    Auto,
    /// Thoughts are part of the answer.
    None,
}

/// Value of `--stats`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StatsForm {
    /// For people.
    Text,
    /// For programs.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent_and_every_flag_has_a_twin() {
        command().debug_assert();
        let whole = command();
        let arguments = whole.get_arguments().chain(whole.get_subcommands().flat_map(clap::Command::get_arguments));
        for argument in arguments.filter(|a| !matches!(a.get_id().as_str(), "help" | "version")) {
            let long = argument.get_long().unwrap_or_else(|| panic!("{} has no long flag", argument.get_id()));
            let twin = format!("VT_{}", long.replace('-', "_").to_uppercase());
            assert_eq!(argument.get_env().and_then(|e| e.to_str()), Some(twin.as_str()), "--{long}");
            assert!(argument.get_help().is_some(), "--{long} has no help");
        }
    }

    #[test]
    fn sweeps_are_every_combination() {
        let parse = |arguments: &[&str]| {
            let arguments = ["bench-load", "--bundle", "b"].iter().chain(arguments);
            let matches = BenchLoad::augment_args(clap::Command::new("bench-load")).get_matches_from(arguments);
            BenchLoad::from_arg_matches(&matches).unwrap().settings()
        };
        assert_eq!(parse(&[]), [UploadOptions::default()]);
        let swept = parse(&["--sweep-chunk", "2,4", "--sweep-readers", "8,10,12", "--upload-depth", "24"]);
        let sizes: Vec<_> = swept.iter().map(|o| (o.chunk_bytes >> 20, o.depth, o.readers)).collect();
        assert_eq!(sizes, [(2, 24, 8), (2, 24, 10), (2, 24, 12), (4, 24, 8), (4, 24, 10), (4, 24, 12)]);
    }

    #[test]
    fn devices_by_name() {
        assert_eq!("cuda".parse(), Ok(DeviceName::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceName::Cuda(3)));
        for wrong in ["gpu", "cuda:", "cuda:x", ""] {
            assert!(wrong.parse::<DeviceName>().is_err());
        }
    }

    #[test]
    fn one_input_at_a_time() {
        assert!(Cli::try_parse_from(["vt-run", "--bundle", "b", "--prompt", "x", "--chat", "y"]).is_err());
        assert!(Cli::try_parse_from(["vt-run", "--bundle", "b", "--logits", "f"]).is_err());
        let cli = Cli::try_parse_from(["vt-run", "--bundle", "b", "--prompt-ids", "1,2,3"]).unwrap();
        assert_eq!(cli.prompt.prompt_ids, Some(vec![1, 2, 3]));
    }
}
