//! One run of a workload on a machine under one setting, and its results.

use crate::error::CliError;
use crate::host;
use crate::report::number::plural;
use crate::settings::Settings;
use crate::stat;
use faultless::{Counter, Errno, Totals};
use faultless_native::{Config, Native};
use faultless_workload::{Failure, Linux, Outcome, System, Tiers, Workload};

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The number of operations, in the unit of the workload.
    pub operations: u64,
    /// Page faults during the run.
    pub faults: u64,
    /// The run time in seconds.
    pub wall: f64,
    /// Seconds of processor time in the program.
    pub user: f64,
    /// Seconds of processor time in the system.
    pub system: f64,
    /// The machine's counters by name. On Linux only the faults are counted, so the list is empty.
    pub counters: Vec<(&'static str, u64)>,
}

impl Sample {
    /// Creates a sample from the outcome of a workload.
    pub fn of(outcome: &Outcome) -> Self {
        Self {
            operations: outcome.operations,
            faults: outcome.faults,
            wall: outcome.wall,
            user: outcome.user,
            system: outcome.system,
            counters: outcome.counters.clone(),
        }
    }

    /// Returns the counters of `totals` in the form of a sample.
    pub fn counters(totals: &Totals) -> Vec<(&'static str, u64)> {
        totals.iter().map(|(counter, count)| (counter.name(), count)).collect()
    }

    /// Returns a counter, or `None` if the machine does not have it.
    pub fn counter(&self, counter: Counter) -> Option<u64> {
        let known = self.counters.iter().find(|(name, _)| *name == counter.name());
        known.map(|(_, count)| *count)
    }

    /// Returns the faults per second.
    pub fn fault_rate(&self) -> f64 {
        rate(self.faults, self.wall)
    }

    /// Returns the faults per operation.
    pub fn faults_each(&self) -> f64 {
        self.faults as f64 / self.operations as f64
    }

    /// Returns the operations per second.
    pub fn operation_rate(&self) -> f64 {
        rate(self.operations, self.wall)
    }
}

fn rate(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

/// The divisor of a native machine's memory that gives the memory used by the subsystem and the
/// host to manage it.
const MANAGED: u64 = 32;
/// Bytes of memory for each CPU beyond `SPARED` CPUs: a CPU keeps free frames that are unavailable
/// to other CPUs. The [spare memory](stat::memory) of a machine suffices for the first `SPARED`
/// CPUs.
const PER_CPU: u64 = 1 << 20;
const SPARED: usize = 128;

/// Creates a native machine with `bytes` of memory, backed from the start, and `cpus` CPUs.
pub fn machine(bytes: u64, cpus: usize) -> Result<Native, CliError> {
    tiered(Tiers { fast: bytes, slow: 0 }, cpus)
}

/// Creates a native machine with the memory required by `workload`.
pub fn machine_for(workload: &Workload) -> Result<Native, CliError> {
    let workers = workload.crew().workers;
    let kept = PER_CPU * workers.saturating_sub(SPARED) as u64;
    let all = Tiers { fast: stat::memory(workload).saturating_add(kept), slow: 0 };
    tiered(workload.needs().tiers.unwrap_or(all), workers)
}

fn tiered(memory: Tiers, cpus: usize) -> Result<Native, CliError> {
    let bytes = memory.bytes();
    let what =
        || format!("a native machine of {} and {}", host::size(bytes), plural(cpus as u64, "CPU"));
    host::afford(what(), bytes.saturating_add(bytes / MANAGED))?;
    let (memory_bytes, slow_bytes) = (memory.fast, memory.slow);
    let config = Config { memory_bytes, slow_bytes, cpus, populate: true, ..Config::default() };
    Native::new(config).map_err(|error| CliError::failed(what(), error))
}

/// Runs `workload` on a native machine under `settings`.
pub fn on_native(
    native: &Native,
    settings: &Settings,
    workload: &Workload,
) -> Result<Outcome, CliError> {
    settings.apply(native);
    on(native, &settings.label(), "--set max_map_count=N", workload)
}

/// Runs `workload` on the host's own kernel.
pub fn on_linux(workload: &Workload) -> Result<Outcome, CliError> {
    on(&Linux::new(), "default", "sysctl vm.max_map_count=N", workload)
}

/// Runs `workload` on `system`. `remedy` is the setting that raises the limit of VMAs.
fn on<S: System>(
    system: &S,
    setting: &str,
    remedy: &str,
    workload: &Workload,
) -> Result<Outcome, CliError> {
    workload.run(system).map_err(|failure| {
        let name = workload.info().name;
        // ENOMEM stands for both errors.
        let hint = match failure {
            Failure::Refused { errno, .. } if errno == Errno::ENOMEM.number() => {
                format!("; out of memory, or of VMAs, of which {remedy} allows more")
            }
            _ => String::new(),
        };
        let doing = format_args!("{name} on {} ({setting})", system.machine());
        CliError::failed(doing, format_args!("{failure}{hint}"))
    })
}
