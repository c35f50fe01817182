//! One run of a workload on a machine under one setting.

use crate::error::Error;
use crate::host;
use crate::number::{plural, size};
use crate::settings::Settings;
use faultless::Errno;
use faultless_native::{Config, Native};
use faultless_workload::{Failure, Linux, Outcome, System, Tiers, Workload};

/// The divisor of a native machine's memory that gives the memory used by the subsystem and the
/// host to manage it.
const MANAGED: u64 = 32;
/// Bytes of memory for each CPU beyond `SPARED` CPUs: a CPU keeps free frames that are unavailable
/// to other CPUs. The [spare memory](memory) of a machine suffices for the first `SPARED`
/// CPUs.
const PER_CPU: u64 = 1 << 20;
const SPARED: usize = 128;

/// Memory of a machine beyond the requirement of its workload, in bytes.
const SPARE: u64 = 128 << 20;

/// Returns the memory of a native machine that suffices for the workload, in bytes, with an eighth
/// for tables.
pub fn memory(workload: &Workload) -> u64 {
    let needs = workload.needs();
    let wanted = needs.written.max(needs.largest);
    wanted.saturating_add(wanted / 8).saturating_add(SPARE)
}

/// Creates a native machine with `bytes` of memory, backed from the start, and `cpus` CPUs.
///
/// # Errors
/// The host has too little memory.
pub fn machine(bytes: u64, cpus: usize) -> Result<Native, Error> {
    tiered(Tiers { fast: bytes, slow: 0 }, cpus, true)
}

/// Creates a native machine like [`machine`], for counts without times. The host backs a page of
/// the memory at its first use, so the machine needs no more memory than its programs use at a
/// time.
///
/// # Errors
/// As [`machine`].
pub fn untimed_machine(bytes: u64, cpus: usize) -> Result<Native, Error> {
    tiered(Tiers { fast: bytes, slow: 0 }, cpus, false)
}

/// Creates a native machine with the memory required by `workload`.
///
/// # Errors
/// As [`machine`].
pub fn machine_for(workload: &Workload) -> Result<Native, Error> {
    let workers = workload.crew().workers;
    let kept = PER_CPU * workers.saturating_sub(SPARED) as u64;
    let all = Tiers { fast: memory(workload).saturating_add(kept), slow: 0 };
    tiered(workload.needs().tiers.unwrap_or(all), workers, true)
}

fn tiered(memory: Tiers, cpus: usize, populate: bool) -> Result<Native, Error> {
    let bytes = memory.bytes();
    let what = || format!("a native machine of {} and {}", size(bytes), plural(cpus as u64, "CPU"));
    host::afford(what(), bytes.saturating_add(bytes / MANAGED))?;
    let (memory_bytes, slow_bytes) = (memory.fast, memory.slow);
    let config = Config { memory_bytes, slow_bytes, cpus, populate, ..Config::default() };
    Native::new(config).map_err(|error| Error::machine(what(), error))
}

/// Runs `workload` on a native machine under `settings`.
///
/// # Errors
/// The workload failed.
pub fn on_native(
    native: &Native,
    settings: &Settings,
    workload: &Workload,
) -> Result<Outcome, Error> {
    settings.apply(native);
    on(native, &settings.label(), "--set max_map_count=N", workload)
}

/// Runs `workload` on the host's own kernel.
///
/// # Errors
/// The workload failed.
pub fn on_linux(workload: &Workload) -> Result<Outcome, Error> {
    on(&Linux::new(), "default", "sysctl vm.max_map_count=N", workload)
}

/// Runs `workload` on `system`. `remedy` is the setting that raises the limit of VMAs.
fn on<S: System>(
    system: &S,
    setting: &str,
    remedy: &str,
    workload: &Workload,
) -> Result<Outcome, Error> {
    workload.run(system).map_err(|failure| {
        let name = workload.info().name;
        // ENOMEM stands for both errors.
        let hint = match failure {
            Failure::Refused { errno, .. } if errno == Errno::ENOMEM.number() => {
                format!("; out of memory, or out of VMAs, and {remedy} allows more VMAs")
            }
            _ => String::new(),
        };
        let doing = format_args!("{name} on {} ({setting})", system.machine());
        Error::run(doing, format_args!("{failure}{hint}"))
    })
}
