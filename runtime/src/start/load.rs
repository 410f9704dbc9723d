//! Open, plan, load: the stages of a start.

use super::Failure;
use super::device::{self, OpenedDevice};
use crate::cli::{ActivationsArg, Cli, KvCacheDtype, VerifyArg};
use crate::engine::model::{Model, ModelInfo};
use crate::engine::{EngineConfig, EngineHandle, SchedulerLimits};
use crate::load::{Assets, CpuDevice, LoadError, LoadedBundle, MemoryPlan, MemoryRequest, Verify, available_memory};
use crate::metrics::Metrics;
use crate::model::{CpuModel, CpuModelOptions, CudaModel, Graph, ModelConfig};
use crate::server::ModelCard;
use crate::stats::Startup;
use crate::text::{BundleText, TextAssets};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vt_bundle::mmap::ContiguousMap;
use vt_bundle::{Bundle, BundleError};
use vt_kernels::Activations;
use vt_kernels::kv_cache::KvType;

/// Sequences at once on the CPU where nothing is said.
const DEFAULT_SEQUENCES: usize = 16;
/// Tokens of a step on the CPU where nothing is said.
const DEFAULT_STEP_TOKENS: usize = 512;
/// Bytes of a load between two looks at the process's memory.
const SAMPLE_BYTES: u64 = 64 << 20;

/// A bundle that has been opened, understood and planned, and of which no weight has been read.
pub(super) enum Opened {
    Cpu(Box<OpenedCpu>),
    Cuda(Box<OpenedDevice>),
}

/// One that is going to run on the CPU.
pub(super) struct OpenedCpu {
    bundle: Bundle,
    config: ModelConfig,
    plan: MemoryPlan,
    options: CpuModelOptions,
    device: CpuDevice,
    verify: Verify,
}

/// A model that is ready to compute.
pub(super) struct Ready {
    pub model: LoadedModel,
    pub limits: SchedulerLimits,
}

/// A model on either device, and what was loaded with it.
pub(super) enum LoadedModel {
    Cpu(Box<CpuModel<ContiguousMap>>),
    Cuda(Box<CudaModel>),
}

impl LoadedModel {
    fn as_model(&self) -> &dyn Model {
        match self {
            Self::Cpu(model) => model.as_ref(),
            Self::Cuda(model) => model.as_ref(),
        }
    }

    pub(super) fn info(&self) -> &ModelInfo {
        self.as_model().info()
    }

    pub(super) fn into_model(self) -> Box<dyn Model> {
        match self {
            Self::Cpu(model) => model,
            Self::Cuda(model) => model,
        }
    }

    fn bundle(&self) -> &Bundle {
        match self {
            Self::Cpu(model) => model.loaded().bundle(),
            Self::Cuda(model) => model.loaded().bundle(),
        }
    }

    fn assets(&self) -> &Assets {
        match self {
            Self::Cpu(model) => model.loaded().assets(),
            Self::Cuda(model) => model.loaded().assets(),
        }
    }
}

impl Opened {
    pub(super) fn open(cli: &Cli, startup: &mut Startup) -> Result<Self, Failure> {
        let reason = match device::chosen(cli) {
            Ok(index) => return Ok(Self::Cuda(Box::new(OpenedDevice::open(cli, index, startup)?))),
            Err(reason) => reason,
        };
        tracing::info!("computing on the CPU: {reason}");
        Ok(Self::Cpu(Box::new(OpenedCpu::open(cli, startup)?)))
    }

    pub(super) fn plan(&self) -> &MemoryPlan {
        match self {
            Self::Cpu(opened) => &opened.plan,
            Self::Cuda(opened) => &opened.plan,
        }
    }

    /// Bytes of the device image.
    pub(super) fn image_bytes(&self) -> u64 {
        let bundle = match self {
            Self::Cpu(opened) => &opened.bundle,
            Self::Cuda(opened) => &opened.bundle,
        };
        bundle.manifest().image.size
    }

    /// Loads, checks, and builds the model. `progress` is called with bytes that have been checked.
    pub(super) fn into_model(self, startup: &mut Startup, progress: &(dyn Fn(u64) + Sync)) -> Result<Ready, Failure> {
        let model = match self {
            Self::Cpu(opened) => LoadedModel::Cpu(Box::new(opened.into_model(startup, progress)?)),
            Self::Cuda(opened) => LoadedModel::Cuda(Box::new(opened.into_model(startup, progress)?)),
        };
        let info = model.info();
        let limits = SchedulerLimits {
            sequences: info.max_batch_sequences,
            batch_tokens: info.max_batch_tokens,
            token_limit: info.vocab_size,
            prefix_cache: true,
        };
        Ok(Ready { model, limits })
    }
}

impl OpenedCpu {
    pub(super) fn open(cli: &Cli, startup: &mut Startup) -> Result<Self, Failure> {
        if cli.device.tp_size > 1 {
            let reason = "--tp-size above 1 needs --device cuda and --load-only".to_owned();
            return Err(LoadError::Device { device: "cpu".to_owned(), reason }.into());
        }
        let bundle = startup.phase("open", |_| Bundle::open(&cli.bundle)).map_err(LoadError::from)?;
        if let Some(expected) = cli.expect_id.as_deref().filter(|id| !id.eq_ignore_ascii_case(bundle.id())) {
            let (path, found) = (cli.bundle.clone(), bundle.id().to_owned());
            return Err(LoadError::from(BundleError::Id { path, found, expected: expected.to_owned() }).into());
        }
        let config = ModelConfig::from_manifest(&bundle.manifest().model).map_err(LoadError::from)?;
        let threads = match cli.device.threads {
            Some(threads) => usize::from(threads),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let activations = match cli.device.activations {
            ActivationsArg::Int8 => Activations::Int8,
            ActivationsArg::F32 => Activations::F32,
        };
        let kv_type = match (cli.memory.kv_cache_dtype, activations) {
            (KvCacheDtype::F32, _) | (KvCacheDtype::Auto, Activations::F32) => KvType::F32,
            (KvCacheDtype::F16, _) | (KvCacheDtype::Auto, Activations::Int8) => KvType::F16,
            (KvCacheDtype::Fp8, _) => KvType::E4m3,
            (KvCacheDtype::Bf16, _) => {
                let error = anyhow::anyhow!("--kv-cache-dtype bf16 is a GPU's; the CPU takes f32, f16 or fp8");
                return Err(Failure::new(2, error));
            }
        };
        let max_batch_tokens = cli.memory.max_num_batched_tokens.map_or(DEFAULT_STEP_TOKENS, |tokens| tokens as usize);
        let request = MemoryRequest {
            max_model_len: cli.memory.max_model_len.map(|len| len as usize),
            max_num_seqs: cli.memory.max_num_seqs.map_or(DEFAULT_SEQUENCES, usize::from),
            max_batch_tokens,
            kv_element_bytes: kv_type.bytes() as u64,
            kv_cache_bytes: cli.memory.kv_cache_memory_bytes,
            available: available_memory(),
        };
        let image_bytes = bundle.manifest().image.size;
        let plan = startup.phase("plan", |_| MemoryPlan::for_cpu(&config, image_bytes, &request))?;
        let options = CpuModelOptions {
            threads,
            activations,
            deterministic: cli.device.deterministic,
            kv_type,
            kv_blocks: plan.kv_blocks,
            context_length: plan.max_model_len,
            max_batch_tokens,
            max_batch_sequences: plan.max_num_seqs,
            rounding: None,
        };
        let verify = match cli.device.verify {
            None | Some(VerifyArg::Host | VerifyArg::Device) => Verify::Host,
            Some(VerifyArg::Off) => Verify::Off,
        };
        Ok(Self { bundle, config, plan, options, device: CpuDevice::new(threads), verify })
    }

    pub(super) fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Loads and checks, finds every tensor's place, and lets go.
    pub(super) fn load_only(self, startup: &mut Startup) -> Result<(), Failure> {
        let config = self.config.clone();
        let loaded = self.load(startup, &|_| ())?;
        startup.phase("graph", |_| Graph::resolve(&config, loaded.bundle())).map_err(LoadError::from)?;
        Ok(())
    }

    fn into_model(
        self,
        startup: &mut Startup,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<CpuModel<ContiguousMap>, Failure> {
        let (config, options) = (self.config.clone(), self.options);
        let loaded = self.load(startup, progress)?;
        Ok(startup.phase("model", |_| CpuModel::new(loaded, config, &options))?)
    }

    fn load(
        self,
        startup: &mut Startup,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<LoadedBundle<ContiguousMap>, Failure> {
        let checked = AtomicU64::new(0);
        let Self { bundle, device, verify, .. } = self;
        let name = if verify == Verify::Off { "map" } else { "verify" };
        let loaded = startup.phase(name, |startup| {
            LoadedBundle::load(bundle, &device, verify, &|bytes| {
                let before = checked.fetch_add(bytes, Ordering::Relaxed);
                if before / SAMPLE_BYTES != (before + bytes) / SAMPLE_BYTES {
                    startup.sample();
                }
                progress(bytes);
            })
        })?;
        if verify != Verify::Off {
            startup.moved(checked.into_inner());
        }
        Ok(loaded)
    }
}

impl Ready {
    /// Tokenizer and template; `None` where the bundle has no tokenizer and none is needed.
    pub(super) fn text(&self, cli: &Cli, needed: bool) -> Result<Option<BundleText>, Failure> {
        let assets = self.model.assets();
        let Some(tokenizer) = &assets.tokenizer else {
            if needed {
                let bundle = cli.bundle.display().to_string();
                return Err(LoadError::MissingAsset { bundle, what: "tokenizer" }.into());
            }
            return Ok(None);
        };
        let config = self.model.bundle().manifest().model.config.to_string();
        let text = BundleText::from_assets(&TextAssets {
            tokenizer,
            tokenizer_config: assets.tokenizer_config.as_deref(),
            chat_template: assets.chat_template.as_deref(),
            generation_config: assets.generation_config.as_deref(),
            config: Some(config.as_bytes()),
        });
        let text = text.map_err(|e| Failure::new(3, e))?;
        let mut text = text.with_limit(self.model.info().context_length);
        if let Some(path) = &cli.server.chat_template {
            let template = std::fs::read_to_string(path)
                .map_err(|e| Failure::new(6, anyhow::Error::new(e).context(path.display().to_string())))?;
            text.set_chat_template(&template).map_err(|e| Failure::new(3, e))?;
        }
        Ok(Some(text))
    }

    /// Starts the engine around the model.
    pub(super) fn into_engine(
        self,
        cli: &Cli,
        text: Option<&BundleText>,
        metrics: Arc<Metrics>,
    ) -> Result<EngineHandle, Failure> {
        let mut limits = self.limits;
        if let Some(text) = text {
            limits.token_limit = limits.token_limit.min(text.tokenizer().vocab_size());
        }
        limits.prefix_cache = !cli.server.no_enable_prefix_caching;
        let config = EngineConfig { limits, max_queue: cli.server.max_queue, max_sequence_tokens: None };
        EngineHandle::spawn(self.model.into_model(), config, metrics)
            .map_err(|source| LoadError::System { what: "the engine's thread", source }.into())
    }

    /// What the server says of the model.
    pub(super) fn card(&self, cli: &Cli) -> ModelCard {
        let manifest = self.model.bundle().manifest();
        let folder = std::fs::canonicalize(&cli.bundle).unwrap_or_else(|_| cli.bundle.clone());
        let name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
        let most = manifest.quantization.decodes.iter().max_by_key(|d| d.bytes);
        ModelCard {
            name: name.unwrap_or_else(|| "model".to_owned()),
            bundle_id: self.model.bundle().id().to_owned(),
            architecture: manifest.model.architecture.clone(),
            layout: most.map(|d| d.decode.clone()).unwrap_or_default(),
            format: manifest.format_version.to_string(),
        }
    }
}
