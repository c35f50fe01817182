//! The subject that runs on increasing numbers of simulated CPUs: a workload, or a recording, whose
//! threads have a CPU each.

use super::counts::Counts;
use super::recording;
use super::sizes;
use crate::error::CliError;
use crate::host;
use crate::interrupt;
use crate::replay::source::{self, Input, Origin, Source};
use crate::report::json::Context;
use crate::report::number::plural;
use crate::run::Sample;
use crate::settings::Settings;
use crate::stat;
use crate::suggest;
use faultless::{MAX_CPUS, PAGE_SIZE};
use faultless_trace::recordings;
use faultless_virtual::rates::Operation;
use faultless_virtual::{Accounts, Config, HotPlace, Profile, Virtual};
use faultless_workload::{System, THREADS, Tiers, Workload, all};
use std::path::Path;
use std::sync::Arc;

/// Host memory of a simulated page and of a CPU, in bytes: tables of the machine and of the
/// subsystem.
const HOST_PER_PAGE: u64 = 160;
const HOST_PER_CPU: u64 = 1 << 20;
/// Memory of the machine for each CPU beyond the requirement of the program, in bytes: enough for
/// CPUs to keep blocks of free frames. Real machines have gigabytes, but the host keeps metadata of
/// all simulated memory.
const MEMORY_PER_CPU: u64 = 128 << 20;

/// The default simulated machine.
pub const PROFILE: &str = "two-socket";

/// The subject of a run.
#[derive(Debug)]
pub enum Subject {
    /// A workload, by name, with the user's parameters.
    Workload(String, Vec<String>),
    /// A recording.
    Recording(Arc<Source>),
}

/// One run.
#[derive(Clone, Debug)]
pub struct Ran {
    /// The results, in simulated seconds.
    pub sample: Sample,
    /// The activity of the CPUs.
    pub accounts: Accounts,
    /// The places of the longest waits for lines.
    pub hottest: Vec<HotPlace>,
    /// The times of operations, in picoseconds, by kind.
    pub latencies: [Vec<u64>; Operation::ALL.len()],
}

impl Subject {
    /// Finds the subject named `subject`, with the parameters of a workload.
    ///
    /// # Errors
    /// No such subject exists, or it does not accept the parameters.
    pub fn find(subject: &Path, params: &[String]) -> Result<Self, CliError> {
        let name = subject.to_string_lossy();
        if all().iter().any(|info| info.name == name) {
            return Ok(Self::Workload(name.into_owned(), params.to_vec()));
        }
        if Origin::find(subject).is_some() {
            let Input::Recording(source) = source::open(subject)? else {
                let why = "it is a trace of addresses, which has no faults and calls; `faultless replay` runs it";
                return Err(CliError::Usage(format!("{name}: {why}")));
            };
            if let Some(param) = params.first() {
                let why = "a recording has no parameters";
                return Err(CliError::Usage(format!("{name}: {param}: {why}")));
            }
            return Ok(Self::Recording(Arc::from(source)));
        }
        let mut known: Vec<_> = all().iter().map(|info| info.name).collect();
        known.extend(recordings::all().iter().map(|recording| recording.name));
        Err(CliError::Usage(format!(
            "{name}: no such workload, recording or file; there are {}{}",
            known.join(", "),
            suggest::hint(&name, known.iter().copied())
        )))
    }

    /// Returns the name in titles.
    pub fn name(&self) -> String {
        match self {
            Self::Workload(name, given) => {
                let words = std::iter::once(name).chain(given).map(String::as_str);
                words.collect::<Vec<_>>().join(" ")
            }
            Self::Recording(source) => format!("replay:{}", source.name),
        }
    }

    /// Returns the parameters of a run on `cpus` CPUs, as on the command line; empty for a
    /// recording.
    ///
    /// # Errors
    /// Describes an invalid parameter.
    pub fn parameters(&self, cpus: usize) -> Result<String, CliError> {
        let Self::Workload(name, given) = self else { return Ok(String::new()) };
        let workload = sizes::workload(name, given, cpus)?;
        let own = workload.params().filter(|(param, _)| param.name != THREADS.name);
        let words = own.map(|(param, value)| format!("{}={}", param.name, param.kind.show(value)));
        Ok(words.collect::<Vec<_>>().join(" "))
    }

    /// Returns the counted unit, in the plural.
    pub fn unit(&self) -> &'static str {
        match self {
            Self::Workload(name, _) => {
                all().iter().find(|info| info.name == *name).map_or("operations", |info| info.unit)
            }
            Self::Recording(_) => "operations",
        }
    }

    /// Returns the numbers of CPUs for the runs.
    ///
    /// # Errors
    /// The given numbers do not fit the subject.
    pub fn counts(&self, given: Option<&Counts>, profile: &Profile) -> Result<Counts, CliError> {
        match self {
            Self::Workload(name, params) => {
                let counts = given.cloned().unwrap_or_else(|| Counts::doubling(profile.cpus()));
                // Invalid parameters are reported before the first run.
                counts
                    .0
                    .iter()
                    .try_for_each(|cpus| sizes::workload(name, params, *cpus).map(drop))?;
                Ok(counts)
            }
            Self::Recording(source) => {
                let threads = source.plan.threads().len();
                if given.is_some() {
                    let why = "a CPU for each of its threads, of which there are";
                    let name = self.name();
                    return Err(CliError::Usage(format!("--cpus: {name} has {why} {threads}")));
                }
                if threads > MAX_CPUS {
                    let why = format!(
                        "it has {threads} threads, and at most {MAX_CPUS} CPUs can be simulated"
                    );
                    return Err(CliError::Usage(format!("{}: {why}", self.name())));
                }
                Ok(Counts(vec![threads]))
            }
        }
    }

    /// Runs the subject on a new machine; `None` as soon as the user requests a stop.
    ///
    /// # Errors
    /// The host has too little memory, or the run failed.
    pub fn run(
        self: &Arc<Self>,
        profile: &Profile,
        cpus: usize,
        seed: u64,
        settings: &Settings,
    ) -> Result<Option<(Ran, Context)>, CliError> {
        // A machine stays on its thread, so the whole run is on one thread.
        let (subject, profile, settings) = (Arc::clone(self), profile.clone(), settings.clone());
        let run = move || subject.run_here(&profile, cpus, seed, &settings);
        interrupt::unless_requested(run).transpose()
    }

    /// Runs the subject on this thread.
    fn run_here(
        &self,
        profile: &Profile,
        cpus: usize,
        seed: u64,
        settings: &Settings,
    ) -> Result<(Ran, Context), CliError> {
        let failed = |error: &dyn std::fmt::Display| {
            let on =
                format!("{} on {} ({})", self.name(), plural(cpus as u64, "CPU"), settings.label());
            CliError::failed(on, error)
        };
        match self {
            Self::Workload(name, given) => {
                let workload: Workload = sizes::workload(name, given, cpus)?;
                let system = machine_for(profile, cpus, &workload, seed)?;
                settings.apply_to_simulated(&system).map_err(|error| failed(&error))?;
                let outcome = workload.run(&system).map_err(|error| failed(&error))?;
                let mut context = Context::of(&workload, system.machine(), Some(settings));
                context.params.insert("seed".into(), seed.into());
                Ok((Ran::new(&system, Sample::of(&outcome)), context))
            }
            Self::Recording(source) => {
                let system = machine(profile, cpus, source.memory(), seed)?;
                settings.apply_to_simulated(&system).map_err(|error| failed(&error))?;
                let sample =
                    recording::replay(&system, &source.plan).map_err(|error| failed(&error))?;
                let mut context = Context { machine: system.machine(), ..source.context(settings) };
                context.params.insert("seed".into(), seed.into());
                let ran = Ran::new(&system, sample);
                system.audit(&[]).map_err(|error| failed(&error))?;
                Ok((ran, context))
            }
        }
    }
}

impl Ran {
    /// Creates the results of a run on `system`, which has run no other subject.
    fn new(system: &Virtual, sample: Sample) -> Self {
        Self {
            sample,
            accounts: system.accounts(),
            hottest: system.hottest(super::HOTTEST),
            latencies: Operation::ALL.map(|operation| system.latencies(operation)),
        }
    }

    /// Returns the line transfers per fault, or per operation.
    pub fn transfers_each(&self, by_faults: bool) -> f64 {
        let count = if by_faults { self.sample.faults } else { self.sample.operations };
        self.accounts.transfers as f64 / count.max(1) as f64
    }

    /// Returns the share of CPU time of each of [`Spent::ALL`](faultless_virtual::Spent::ALL), in
    /// percent.
    pub fn shares(&self) -> Vec<f64> {
        let all = self.accounts.spent.iter().sum::<u64>().max(1) as f64;
        self.accounts.spent.iter().map(|spent| 100.0 * *spent as f64 / all).collect()
    }
}

/// Creates a machine with the memory required by `workload`.
///
/// # Errors
/// As [`machine`].
pub fn machine_for(
    profile: &Profile,
    cpus: usize,
    workload: &Workload,
    seed: u64,
) -> Result<Virtual, CliError> {
    match workload.needs().tiers {
        Some(tiers) => of_memory(profile, cpus, tiers, seed),
        None => machine(profile, cpus, stat::memory(workload), seed),
    }
}

/// Creates a machine for a program that needs `memory` bytes.
///
/// # Errors
/// The host has too little memory.
pub fn machine(
    profile: &Profile,
    cpus: usize,
    memory: u64,
    seed: u64,
) -> Result<Virtual, CliError> {
    let fast = memory.saturating_add(MEMORY_PER_CPU * cpus as u64);
    of_memory(profile, cpus, Tiers { fast, slow: 0 }, seed)
}

/// Returns the host memory of a simulated machine, in bytes.
pub fn host_bytes(cpus: usize, memory: Tiers) -> u64 {
    memory.bytes() / PAGE_SIZE * HOST_PER_PAGE + HOST_PER_CPU * cpus as u64
}

fn of_memory(
    profile: &Profile,
    cpus: usize,
    memory: Tiers,
    seed: u64,
) -> Result<Virtual, CliError> {
    let (memory_bytes, slow_bytes) = (memory.fast, memory.slow);
    let what = format!("a simulated machine of {}", plural(cpus as u64, "CPU"));
    host::afford(&what, host_bytes(cpus, memory))?;
    Virtual::new(profile, Config { cpus, memory_bytes, slow_bytes, seed })
        .map_err(|errno| CliError::failed(what, errno.name()))
}
