//! One run of one thing on one machine under one setting, and what came of it.

use crate::error::CliError;
use crate::host;
use crate::report::number::plural;
use crate::settings::Settings;
use crate::stat;
use faultless::{Counter, Errno, Totals};
use faultless_native::{Config, Native};
use faultless_workload::{Failure, Linux, Outcome, System, Tiers, Workload};

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Sample {
    /// What was done, in the unit of whoever did it.
    pub operations: u64,
    /// Page faults meanwhile.
    pub faults: u64,
    /// Seconds that it took.
    pub wall: f64,
    /// Seconds of processor time in the program.
    pub user: f64,
    /// Seconds of processor time in the system.
    pub system: f64,
    /// The machine's counters by their names; none on Linux, but of the faults.
    pub counters: Vec<(&'static str, u64)>,
}

impl Sample {
    /// Of a workload's outcome.
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

    /// The counters of `totals`, as a sample holds them.
    pub fn counters(totals: &Totals) -> Vec<(&'static str, u64)> {
        totals.iter().map(|(counter, count)| (counter.name(), count)).collect()
    }

    /// A counter, where the machine has it.
    pub fn counter(&self, counter: Counter) -> Option<u64> {
        let known = self.counters.iter().find(|(name, _)| *name == counter.name());
        known.map(|(_, count)| *count)
    }

    /// Faults per second.
    pub fn fault_rate(&self) -> f64 {
        rate(self.faults, self.wall)
    }

    /// Faults for each operation.
    pub fn faults_each(&self) -> f64 {
        self.faults as f64 / self.operations as f64
    }

    /// Operations per second.
    pub fn operation_rate(&self) -> f64 {
        rate(self.operations, self.wall)
    }
}

fn rate(count: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

/// What the subsystem and the host take to manage the memory of a native machine: one part in so many of it.
const MANAGED: u64 = 32;
/// Memory for each CPU beyond so many: a CPU keeps free frames that no other finds. What a machine has [to spare](stat::memory) is enough for the first ones.
const PER_CPU: u64 = 1 << 20;
const SPARED: usize = 128;

/// A native machine with `bytes` of memory, backed from the start, and `cpus` CPUs.
pub fn machine(bytes: u64, cpus: usize) -> Result<Native, CliError> {
    tiered(Tiers { fast: bytes, slow: 0 }, cpus)
}

/// A native machine with the memory that `workload` asks for, or that suffices for it.
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
    Native::new(config).map_err(|errno| CliError::failed(what(), errno.name()))
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

/// Runs `workload` on `system`, whose limit of VMAs `remedy` raises.
fn on<S: System>(
    system: &S,
    setting: &str,
    remedy: &str,
    workload: &Workload,
) -> Result<Outcome, CliError> {
    workload.run(system).map_err(|failure| {
        let name = workload.info().name;
        // The error is one for both.
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
