//! `vt-run bench-load`.

use super::{Failure, print, to_json};
use crate::cli::{BenchLoad, VerifyArg};
use crate::load::bench::{self, BenchPlan, LoadBench};
use crate::load::{CudaAccelerator, LoadError, Verify};
use vt_bundle::Bundle;

/// Measures and prints.
///
/// # Errors
/// [`Failure`] with the exit code.
pub fn bench_load(args: &BenchLoad) -> Result<(), Failure> {
    let bundle = Bundle::open(&args.bundle).map_err(LoadError::from)?;
    let accelerator = CudaAccelerator::new(args.device_index)?;
    let verify = match args.verify {
        VerifyArg::Device => Verify::Device,
        VerifyArg::Host => Verify::Host,
        VerifyArg::Off => Verify::Off,
    };
    let (settings, repeat) = (args.settings(), args.repeat);
    let plan = BenchPlan { settings, repeat, cold: args.cold, direct: !args.skip_direct };
    let result: LoadBench = bench::run(&accelerator, &bundle, verify, &plan)?;
    print(&if args.json { to_json(&result)? } else { result.table() })
}
