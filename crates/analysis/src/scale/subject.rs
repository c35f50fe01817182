//! The subject that runs on increasing numbers of simulated CPUs: a workload, or a recording, whose
//! threads have a CPU each.

use super::sizes;
use super::steady::{self, SteadyState, WarmUp};
use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::host;
use crate::number::plural;
use crate::replay::{Source, simulated};
use crate::run;
use crate::sample::Sample;
use crate::settings::Settings;
use crate::stop;
use faultless::PAGE_SIZE;
use faultless_virtual::rates::Operation;
use faultless_virtual::{Accounts, Config, HotPlace, Profile, Spent, Virtual};
use faultless_workload::{System, THREADS, Tiers, Workload, all};
use std::sync::Arc;

/// The number of hot places kept for a run.
const HOTTEST: usize = 10;
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

/// One run, or its steady window.
#[derive(Clone, Debug)]
pub struct Ran {
    /// The results, in simulated seconds.
    pub sample: Sample,
    /// The steady window, if the run has a warm-up. All other results are of this window.
    pub steady: Option<SteadyState>,
    /// The activity of the CPUs.
    pub accounts: Accounts,
    /// The places of the longest waits for lines.
    pub hottest: Vec<HotPlace>,
    /// The times of operations, in picoseconds, by kind.
    pub latencies: [Vec<u64>; Operation::ALL.len()],
}

impl Subject {
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
    pub fn parameters(&self, cpus: usize) -> Result<String, Error> {
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

    /// Checks whether the subject can have a warm-up.
    ///
    /// # Errors
    /// The subject is a recording.
    pub fn check_warm_up(&self) -> Result<(), Error> {
        match self {
            Self::Workload(..) => Ok(()),
            Self::Recording(_) => {
                let why = "a recording has no steady state, because its threads do different work: remove --warm-up";
                Err(Error::input(self.name(), why))
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
    ) -> Result<Option<(Ran, Context)>, Error> {
        self.run_after(None, profile, cpus, seed, settings)
    }

    /// Runs the subject like [`run`](Self::run), and excludes the warm-up, if any, from the results:
    /// see [`steady`].
    ///
    /// # Errors
    /// The errors of [`run`](Self::run), or the run is too short for a required warm-up.
    pub fn run_after(
        self: &Arc<Self>,
        warm_up: Option<WarmUp>,
        profile: &Profile,
        cpus: usize,
        seed: u64,
        settings: &Settings,
    ) -> Result<Option<(Ran, Context)>, Error> {
        // A machine stays on its thread, so the whole run is on one thread.
        let (subject, profile, settings) = (Arc::clone(self), profile.clone(), settings.clone());
        let run = move || subject.run_here(warm_up, &profile, cpus, seed, &settings);
        stop::unless_requested(run).transpose()
    }

    /// Runs the subject on this thread.
    fn run_here(
        &self,
        warm_up: Option<WarmUp>,
        profile: &Profile,
        cpus: usize,
        seed: u64,
        settings: &Settings,
    ) -> Result<(Ran, Context), Error> {
        let doing =
            || format!("{} on {} ({})", self.name(), plural(cpus as u64, "CPU"), settings.label());
        let failed = |error: &dyn std::fmt::Display| Error::run(doing(), error);
        match self {
            Self::Workload(name, given) => {
                let workload: Workload = sizes::workload(name, given, cpus)?;
                let system = machine_for(profile, cpus, &workload, seed)?;
                settings.apply_to_simulated(&system).map_err(|error| failed(&error))?;
                if let Some(warm_up) = warm_up {
                    system.measure_steady(cpus, warm_up.calls);
                }
                let outcome = workload.run(&system).map_err(|error| failed(&error))?;
                let mut context = Context::of(&workload, system.machine(), Some(settings));
                context.params.insert("seed".into(), seed.into());
                let Some(window) = system.steady() else {
                    return Ok((Ran::new(&system, Sample::of(&outcome)), context));
                };
                let (sample, steady) = match steady::results(doing(), &window, outcome.operations) {
                    Ok(results) => results,
                    Err(_) if warm_up.is_some_and(|warm_up| warm_up.optional) => {
                        return Ok((Ran::new(&system, Sample::of(&outcome)), context));
                    }
                    Err(error) => return Err(error),
                };
                context.params.insert("warm_up".into(), steady.warm_up.into());
                let ran = Ran::new(&system, sample);
                Ok((Ran { steady: Some(steady), accounts: window.accounts, ..ran }, context))
            }
            Self::Recording(source) => {
                if warm_up.is_some() {
                    self.check_warm_up()?;
                }
                source.simulated_cpus()?;
                let system = machine(profile, cpus, source.memory(), seed)?;
                settings.apply_to_simulated(&system).map_err(|error| failed(&error))?;
                let sample =
                    simulated::replay(&system, &source.plan).map_err(|error| failed(&error))?;
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
            steady: None,
            accounts: system.accounts(),
            hottest: system.hottest(HOTTEST),
            latencies: Operation::ALL.map(|operation| system.latencies(operation)),
        }
    }

    /// Returns the line transfers per fault, or per operation.
    pub fn transfers_each(&self, by_faults: bool) -> f64 {
        let count = if by_faults { self.sample.faults } else { self.sample.operations };
        self.accounts.transfers as f64 / count.max(1) as f64
    }

    /// Returns the share of CPU time of each of [`Spent::ALL`], in percent.
    pub fn shares(&self) -> Vec<f64> {
        let all = self.accounts.spent.iter().sum::<u64>().max(1) as f64;
        self.accounts.spent.iter().map(|spent| 100.0 * *spent as f64 / all).collect()
    }

    /// Passes the results to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures, context: &Context) -> Result<(), Error> {
        figures.sample(context, &self.sample)?;
        if let Some(steady) = self.steady {
            let calls = Number::Whole(steady.calls);
            figures.figure(context, "steady_calls", "count", calls)?;
            let (metric, calls) = match steady.start_up {
                Some(calls) => ("start_up_calls", calls),
                None => ("start_up_calls_min", steady.warm_up),
            };
            figures.figure(context, metric, "count", Number::Whole(calls))?;
        }
        for (metric, count) in [
            ("line_transfers", self.accounts.transfers),
            ("line_fetches", self.accounts.fetches),
            ("interrupts", self.accounts.interrupts),
        ] {
            figures.figure(context, metric, "count", Number::Whole(count))?;
        }
        for (on, share) in Spent::ALL.iter().zip(self.shares()) {
            let metric = format!("time in {}", on.name());
            figures.figure(context, &metric, "%", Number::Real(share))?;
        }
        for (operation, took) in Operation::ALL.iter().zip(&self.latencies) {
            let mut took = took.clone();
            took.sort_unstable();
            let Some(last) = took.len().checked_sub(1) else { continue };
            for (name, percent) in [("p50", 50), ("p99", 99), ("max", 100)] {
                let metric = format!("{}_latency_{name}", operation.name());
                let nanoseconds = took[last * percent / 100] as f64 / 1000.0;
                figures.figure(context, &metric, "ns", Number::Real(nanoseconds))?;
            }
        }
        for place in &self.hottest {
            let metric = format!("wait for {} at {}:{}", place.of, place.file, place.line);
            figures.figure(context, &metric, "s", Number::Real(place.waited as f64 * 1e-12))?;
        }
        Ok(())
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
) -> Result<Virtual, Error> {
    match workload.needs().tiers {
        Some(tiers) => of_memory(profile, cpus, tiers, seed),
        None => machine(profile, cpus, run::memory(workload), seed),
    }
}

/// Creates a machine for a program that needs `memory` bytes.
///
/// # Errors
/// The host has too little memory.
pub fn machine(profile: &Profile, cpus: usize, memory: u64, seed: u64) -> Result<Virtual, Error> {
    let fast = memory.saturating_add(MEMORY_PER_CPU * cpus as u64);
    of_memory(profile, cpus, Tiers { fast, slow: 0 }, seed)
}

/// Returns the host memory of a simulated machine, in bytes.
pub fn host_bytes(cpus: usize, memory: Tiers) -> u64 {
    memory.bytes() / PAGE_SIZE * HOST_PER_PAGE + HOST_PER_CPU * cpus as u64
}

fn of_memory(profile: &Profile, cpus: usize, memory: Tiers, seed: u64) -> Result<Virtual, Error> {
    let (memory_bytes, slow_bytes) = (memory.fast, memory.slow);
    let what = format!("a simulated machine of {}", plural(cpus as u64, "CPU"));
    host::afford(&what, host_bytes(cpus, memory))?;
    Virtual::new(profile, Config { cpus, memory_bytes, slow_bytes, seed })
        .map_err(|errno| Error::machine(what, errno.name()))
}
