//! Planning and loading for a CUDA device.

use super::{Failure, print, report, to_json};
use crate::cli::{Cli, DeviceName, KvCacheDtype, StatsForm, VerifyArg};
use crate::load::upload::{Share, load_shard};
use crate::load::{
    Accelerator, CudaAccelerator, DeviceMemory, LoadError, LoadReport, LoadedBundle, MemoryPlan, MemoryRequest,
    Uploading, Verify,
};
use crate::model::{CudaModel, CudaModelOptions, Graph, ModelConfig, StepLimits, cuda_workspace_bytes};
use crate::stats::{ProcessMemory, Startup, StartupReport, human_bytes};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use vt_bundle::{Bundle, BundleError};
use vt_kernels::cuda;
use vt_kernels::cuda::kv_cache::CudaKvType;

/// Sequences at once where nothing is said.
const DEFAULT_SEQUENCES: usize = 128;
/// Tokens of a step where nothing is said: products of that many rows run at the tensor cores' rate, and others wait some
/// tens of milliseconds for a part of a long prompt.
const DEFAULT_STEP_TOKENS: usize = 2048;
/// Bytes of a load between two looks at the process's memory.
const SAMPLE_BYTES: u64 = 256 << 20;

/// What `--load-only --stats` says of a device.
#[derive(Serialize)]
struct DeviceReport {
    #[serde(flatten)]
    startup: StartupReport,
    load: LoadReport,
    memory: DeviceUse,
    plan: MemoryPlan,
}

/// Memory of the device around the load, and of this process before it.
#[derive(Serialize)]
struct DeviceUse {
    total: u64,
    /// Held by the context, before the arena: what was not free then.
    used_before: u64,
    used_after: u64,
    arena: u64,
    /// Resident memory of the process with a context and nothing loaded.
    host_resident_idle: u64,
    /// The most during the load, above that.
    host_peak_above_idle: u64,
}

/// `--plan` and `--load-only`.
pub(super) fn run(cli: &Cli, index: u32, mut startup: Startup) -> Result<(), Failure> {
    if cli.plan {
        let total = match cli.memory.gpu_memory_bytes {
            Some(bytes) => bytes,
            None => cuda::device_memory(index).map_err(|e| failed(index, &e))?,
        };
        let (bundle, config) = open(cli, &mut startup)?;
        let plan = plan(cli, index, &bundle, &config, total, &mut startup)?;
        return print(&if cli.json { to_json(&plan)? } else { plan.table() });
    }
    let (bundle, config, plan, accelerator) = open_device(cli, index, &mut startup)?;
    let before = accelerator.context().memory().map_err(|e| failed(index, &e))?;
    // Staging memory is there already, and belongs to the load.
    let (idle, stocked) = (ProcessMemory::now(), accelerator.stocked_bytes());
    let uploading = Uploading { accelerator, options: cli.upload.options() };
    let verify = verify(cli);
    let done = AtomicU64::new(0);
    let progress = |bytes| {
        let sum = done.fetch_add(bytes, Ordering::Relaxed);
        if sum / SAMPLE_BYTES != (sum + bytes) / SAMPLE_BYTES {
            startup.sample();
        }
    };
    if cli.device.tp_size > 1 {
        let share = Share::new(&bundle, cli.device.tp_rank, cli.device.tp_size)?;
        let resident = load_shard(&uploading.accelerator, &bundle, &share, verify, &uploading.options, &progress)?;
        return print(&match cli.stats {
            Some(StatsForm::Json) => to_json(&resident.report)?,
            _ => shard_summary(cli, &share, &resident.report),
        });
    }
    let loaded = LoadedBundle::load(bundle, &uploading, verify, &progress)?;
    startup.record(&loaded.report().phases);
    let graph = startup.phase("graph", |_| Graph::resolve(&config, loaded.bundle()));
    graph.map_err(LoadError::from)?;
    for note in &loaded.report().notes {
        tracing::warn!("{note}");
    }
    let finished = startup.report();
    let after = uploading.accelerator.context().memory().map_err(|e| failed(index, &e))?;
    let idle = idle.map_or(0, |memory| (memory.anonymous + memory.file).saturating_sub(stocked));
    let memory = DeviceUse {
        total: after.total,
        used_before: before.total - before.free,
        used_after: after.total - after.free,
        arena: loaded.manifest().image.size,
        host_resident_idle: idle,
        host_peak_above_idle: finished.peak.resident.saturating_sub(idle),
    };
    match cli.stats.unwrap_or(StatsForm::Text) {
        StatsForm::Json => {
            print(&to_json(&DeviceReport { startup: finished, load: loaded.report().clone(), memory, plan })?)
        }
        StatsForm::Text => {
            report(&finished, StatsForm::Text, true)?;
            let load = loaded.report();
            if let Some(probe) = &load.probe {
                print(&format!("{probe}\n"))?;
            }
            print(&format!(
                "{}: {} resident, {}, read by {}, checked by the {}; host memory {} above idle\n",
                load.device,
                human_bytes(memory.arena),
                load.residency.name(),
                load.io,
                match load.verify {
                    Verify::Device => "device",
                    Verify::Host => "host",
                    Verify::Off => "nobody",
                },
                human_bytes(memory.host_peak_above_idle),
            ))
        }
    }
}

fn shard_summary(cli: &Cli, share: &Share, report: &LoadReport) -> String {
    let (rank, size) = (cli.device.tp_rank, cli.device.tp_size);
    let (bytes, rate) = (human_bytes(share.bytes()), report.upload_rate().unwrap_or(0.0) / 1e9);
    format!("{}: rank {rank} of {size}, {bytes} resident, read by {}, {rate:.2} GB/s\n", report.device, report.io)
}

fn failed(index: u32, error: &cuda::CudaError) -> LoadError {
    LoadError::Device { device: format!("cuda:{index}"), reason: error.to_string() }
}

/// Opens the bundle, plans, and makes a context. The driver starts while the manifest is read; the context, which takes
/// longest, is made once the plan says that the model fits.
fn open_device(
    cli: &Cli,
    index: u32,
    startup: &mut Startup,
) -> Result<(Bundle, ModelConfig, MemoryPlan, CudaAccelerator), Failure> {
    if !cuda::built() {
        return Err(failed(index, &cuda::CudaError::NotBuilt).into());
    }
    // With a limit given, what does not fit is refused before the driver is touched.
    let limited = cli.memory.gpu_memory_bytes;
    let early = match limited {
        Some(total) => {
            let (bundle, config) = open(cli, startup)?;
            let plan = plan(cli, index, &bundle, &config, total, startup)?;
            Some((bundle, config, plan))
        }
        None => None,
    };
    std::thread::scope(|scope| {
        let (send_total, total) = channel();
        let (go, wait) = channel::<()>();
        let driver = scope.spawn(move || {
            // Where the receiver is gone the start has failed, and says why itself.
            let _ = send_total.send(cuda::device_memory(index));
            match wait.recv() {
                Ok(()) => Some(CudaAccelerator::new(index)),
                Err(_) => None,
            }
        });
        let gone =
            || LoadError::Device { device: format!("cuda:{index}"), reason: "the driver's thread ended".to_owned() };
        let opened = match early {
            Some(opened) => opened,
            None => {
                let (bundle, config) = open(cli, startup)?;
                let total = startup.phase("driver", |_| total.recv()).map_err(|_| gone())?;
                let total = total.map_err(|e| failed(index, &e))?;
                let plan = plan(cli, index, &bundle, &config, total, startup)?;
                (bundle, config, plan)
            }
        };
        go.send(()).map_err(|_| gone())?;
        // Staging memory is touched while the driver makes the context.
        let image_bytes = opened.0.manifest().image.size;
        let touched = scope.spawn(move || cli.upload.options().touched(image_bytes));
        let accelerator = startup.phase("context", |_| driver.join());
        let accelerator = accelerator.ok().flatten().ok_or_else(gone)??;
        accelerator.stock(touched.join().unwrap_or_default());
        let (bundle, config, plan) = opened;
        Ok((bundle, config, plan, accelerator))
    })
}

fn open(cli: &Cli, startup: &mut Startup) -> Result<(Bundle, ModelConfig), Failure> {
    let bundle = startup.phase("open", |_| Bundle::open(&cli.bundle)).map_err(LoadError::from)?;
    if let Some(expected) = cli.expect_id.as_deref().filter(|id| !id.eq_ignore_ascii_case(bundle.id())) {
        let (path, found) = (cli.bundle.clone(), bundle.id().to_owned());
        return Err(LoadError::from(BundleError::Id { path, found, expected: expected.to_owned() }).into());
    }
    let config = ModelConfig::from_manifest(&bundle.manifest().model).map_err(LoadError::from)?;
    Ok((bundle, config))
}

fn plan(
    cli: &Cli,
    index: u32,
    bundle: &Bundle,
    config: &ModelConfig,
    total: u64,
    startup: &mut Startup,
) -> Result<MemoryPlan, Failure> {
    let limits = limits(cli, config);
    let request = MemoryRequest {
        max_model_len: cli.memory.max_model_len.map(|len| len as usize),
        max_num_seqs: limits.sequences,
        max_batch_tokens: limits.tokens,
        kv_element_bytes: kv_type(cli)?.bytes(),
        kv_cache_bytes: cli.memory.kv_cache_memory_bytes,
        available: None,
    };
    let (name, utilization) = (format!("cuda:{index}"), cli.memory.gpu_memory_utilization);
    let device = DeviceMemory { name, total, utilization };
    let image_bytes = bundle.manifest().image.size;
    let plan = startup.phase("plan", |_| {
        let workspace = cuda_workspace_bytes(config, bundle, &limits)?.unwrap_or(u64::MAX);
        MemoryPlan::for_device(config, image_bytes, workspace, &request, &device)
    });
    Ok(plan?)
}

/// The largest step, and the longest sequence that may be asked for.
fn limits(cli: &Cli, config: &ModelConfig) -> StepLimits {
    let asked = cli.memory.max_model_len.map_or(usize::MAX, |len| len as usize);
    let sequences = cli.memory.max_num_seqs.map_or(DEFAULT_SEQUENCES, usize::from);
    let tokens = cli.memory.max_num_batched_tokens.map_or(DEFAULT_STEP_TOKENS, |tokens| tokens as usize);
    StepLimits { tokens, sequences, context: asked.min(config.max_positions) }
}

fn kv_type(cli: &Cli) -> Result<CudaKvType, Failure> {
    match cli.memory.kv_cache_dtype {
        KvCacheDtype::Auto | KvCacheDtype::Bf16 => Ok(CudaKvType::Bf16),
        KvCacheDtype::Fp8 => Ok(CudaKvType::E4m3),
        KvCacheDtype::F32 | KvCacheDtype::F16 => {
            Err(Failure::new(2, anyhow::anyhow!("--kv-cache-dtype f32 and f16 are the CPU's; a GPU takes bf16 or fp8")))
        }
    }
}

/// The GPU to compute on: the one that was asked for, or, where nothing was, the first if there is one and this build has
/// kernels. `Err` says why there is none.
pub(super) fn chosen(cli: &Cli) -> Result<u32, String> {
    match cli.device.device {
        DeviceName::Cuda(index) => Ok(index),
        DeviceName::Cpu => Err("as --device says".to_owned()),
        DeviceName::Auto if !cuda::built() => Err(cuda::CudaError::NotBuilt.to_string()),
        DeviceName::Auto => match cuda::device_count() {
            Ok(0) => Err("there is no GPU that this process may use".to_owned()),
            Ok(_) => Ok(0),
            Err(error) => Err(error.to_string()),
        },
    }
}

/// A bundle that is going to run on a GPU, and how.
pub(super) struct OpenedDevice {
    pub bundle: Bundle,
    pub config: ModelConfig,
    pub plan: MemoryPlan,
    uploading: Uploading<CudaAccelerator>,
    options: CudaModelOptions,
    verify: Verify,
}

impl OpenedDevice {
    /// Opens the bundle, plans, and makes a context.
    pub(super) fn open(cli: &Cli, index: u32, startup: &mut Startup) -> Result<Self, Failure> {
        if cli.device.tp_size > 1 {
            let reason = "--tp-size above 1 needs --load-only".to_owned();
            return Err(LoadError::Device { device: format!("cuda:{index}"), reason }.into());
        }
        let (bundle, config, plan, accelerator) = open_device(cli, index, startup)?;
        let limits = StepLimits { context: plan.max_model_len, ..limits(cli, &config) };
        let options = CudaModelOptions {
            kv_type: kv_type(cli)?,
            kv_blocks: plan.kv_blocks,
            limits,
            deterministic: cli.device.deterministic,
            graphs: !cli.device.enforce_eager,
            keep_routing: false,
        };
        let uploading = Uploading { accelerator, options: cli.upload.options() };
        Ok(Self { bundle, config, plan, uploading, options, verify: verify(cli) })
    }

    /// Uploads, checks, and builds the model. `progress` is called with bytes that have arrived.
    pub(super) fn into_model(
        self,
        startup: &mut Startup,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<CudaModel, Failure> {
        let Self { bundle, config, uploading, options, verify, .. } = self;
        let done = AtomicU64::new(0);
        let sampled = |bytes| {
            let sum = done.fetch_add(bytes, Ordering::Relaxed);
            if sum / SAMPLE_BYTES != (sum + bytes) / SAMPLE_BYTES {
                startup.sample();
            }
            progress(bytes);
        };
        let loaded = LoadedBundle::load(bundle, &uploading, verify, &sampled)?;
        startup.record(&loaded.report().phases);
        for note in &loaded.report().notes {
            tracing::warn!("{note}");
        }
        Ok(startup.phase("model", |_| CudaModel::new(loaded, config, &options))?)
    }
}

fn verify(cli: &Cli) -> Verify {
    match cli.device.verify {
        None | Some(VerifyArg::Device) => Verify::Device,
        Some(VerifyArg::Host) => Verify::Host,
        Some(VerifyArg::Off) => Verify::Off,
    }
}
