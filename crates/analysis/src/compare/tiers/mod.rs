//! The effect of deferred flushes in tiered memory.
//!
//! Each workload runs at several ratios of the fast node to the slow node, with the knob
//! `deferred_flush` off and on, on simulated CPUs, whose figures are reproducible, and on this
//! machine. The [figures] are the published figures of deferred flushes (shootdowns, flushes, TLB
//! misses, run time), and also memory in use and allocation latency.
//!
//! The choice of pages to evict or move depends on all earlier events, so a small initial
//! difference grows large. Each configuration therefore runs with several seeds of the workload.
//! The comparison uses means, and percentiles over the allocations of all seeds. Runs on simulated
//! CPUs that differ in seed or deferral run in parallel, one for each CPU of the host.

pub mod figures;

use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::host;
use crate::number::plural;
use crate::observer::Observer;
use crate::profile;
use crate::run;
use crate::scale::subject::{self, PROFILE};
use crate::settings::Settings;
use crate::stop;
use faultless_virtual::Profile;
use faultless_workload::{Outcome, Workload};
use figures::{FIGURES, Runs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{iter, thread};

/// A workload to compare.
struct Subject {
    name: &'static str,
    /// The parameters for a short run and for a quick run. With more than [`CPUS`] simulated CPUs
    /// the fast memory [per CPU](scaled) stays the same.
    given: [&'static [&'static str]; 2],
    /// Ratios of fast memory to slow memory.
    ratios: &'static [&'static str],
    /// Numbers of simulated CPUs.
    cpus: &'static [usize],
    /// Returns additional parameters of a run at a ratio, except for a quick run.
    besides: fn(&str) -> Option<&'static str>,
}

/// All ratios of fast memory to slow memory.
pub const RATIOS: [&str; 5] = ["1:1", "1:2.3", "1:4", "1:8", "1:99"];

const SUBJECTS: [Subject; 3] = [
    Subject {
        name: "xsbench",
        given: [&["fast=64M", "lookups=20000"], &["fast=4M", "lookups=2000"]],
        ratios: &RATIOS,
        cpus: &[16, 64],
        besides: |_| None,
    },
    // Stores leave no flush to defer, so the mechanism must have no cost.
    Subject {
        name: "xsbench",
        given: [
            &["fast=64M", "lookups=20000", "access=write"],
            &["fast=4M", "lookups=2000", "access=write"],
        ],
        ratios: &["1:1", "1:4", "1:8"],
        cpus: &[16],
        besides: |_| None,
    },
    // Each of its processes accesses all of memory and more. With the same memory at 1:99 a run
    // would take an hour, and with 64 processes many hours.
    Subject {
        name: "llm",
        given: [&["passes=1"], &["fast=2M", "passes=2"]],
        ratios: &RATIOS,
        cpus: &[16],
        besides: |ratio| Some(if ratio == "1:99" { "fast=1M" } else { "fast=16M" }),
    },
];
/// The number of simulated CPUs of a quick run.
const FEW: usize = 4;
/// The number of simulated CPUs up to which the `fast=` of a workload applies unchanged.
const CPUS: usize = 16;
/// The default number of seeds, and the number of a quick run.
const SEEDS: [u16; 2] = [3, 1];

/// Returns the names of the workloads.
pub fn names() -> impl Iterator<Item = &'static str> {
    ["xsbench", "llm"].into_iter()
}

/// Returns whether `name` is one of the workloads in tiers.
pub fn is_tiered(name: &str) -> bool {
    names().any(|known| known == name)
}

/// The machine that runs a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// This number of simulated CPUs.
    Simulated(usize),
    /// This number of threads on this machine.
    Native(usize),
}

/// A workload on one machine, at each ratio without deferral and with deferral.
#[derive(Debug)]
pub struct Rows {
    /// The workload, its parameters and the machine.
    pub title: String,
    /// The machine.
    pub on: On,
    /// The runs of each ratio.
    pub runs: Vec<(String, Runs)>,
}

/// The extent of the comparison.
#[derive(Clone, Copy, Debug)]
pub struct Effort<'a> {
    /// Less memory, fewer CPUs.
    pub quick: bool,
    /// Threads on this machine.
    pub threads: usize,
    /// The number of seeds of each configuration.
    pub seeds: u16,
    /// Ratios named by the user. Empty means the default.
    pub ratios: &'a [String],
    /// Numbers of simulated CPUs named by the user. If given, this machine is excluded.
    pub cpus: Option<&'a [usize]>,
}

impl Effort<'_> {
    /// Returns the default number of seeds.
    pub fn default_seeds(quick: bool) -> u16 {
        SEEDS[usize::from(quick)]
    }

    /// Returns the machines that run `subject`.
    fn places(self, subject: &Subject) -> Vec<On> {
        let own = if self.quick { &[FEW] } else { subject.cpus };
        let simulated = self.cpus.unwrap_or(own).iter().map(|cpus| On::Simulated(*cpus));
        let native = self.cpus.is_none().then_some(On::Native(self.threads));
        simulated.chain(native).collect()
    }

    /// Returns the ratios of `subject`.
    fn ratios(self, subject: &Subject) -> Vec<&'static str> {
        let is_wanted = |ratio: &&str| match self.ratios {
            [] => subject.ratios.contains(ratio),
            wanted => wanted.iter().any(|it| it == ratio),
        };
        RATIOS.into_iter().filter(is_wanted).collect()
    }
}

/// Returns each of the workloads `names` with each of its machines.
fn plan(names: &[&str], effort: Effort<'_>) -> Vec<(&'static Subject, On)> {
    let mut plan = Vec::new();
    for subject in SUBJECTS.iter().filter(|subject| names.contains(&subject.name)) {
        plan.extend(effort.places(subject).into_iter().map(|on| (subject, on)));
    }
    plan
}

/// Returns the steps of progress of [`run()`].
pub fn steps(names: &[&str], effort: Effort<'_>) -> u64 {
    let plan = plan(names, effort);
    let ratios: usize = plan.iter().map(|(subject, _)| effort.ratios(subject).len()).sum();
    ratios as u64 * 2 * u64::from(effort.seeds)
}

/// Shows the results of a workload on one machine.
pub type Show<'a, E> = &'a mut dyn FnMut(&Rows) -> Result<(), E>;

/// Runs the workloads `names`, and returns the results for each and each machine. Each is passed to
/// `show` as soon as it is complete. After a request to stop or a failed run, the last result has
/// the complete ratios.
///
/// # Errors
/// A run failed, or the results cannot be shown or written. The results before a failed run have
/// been passed to `show`.
pub fn run<E: From<Error>>(
    names: &[&str],
    effort: Effort<'_>,
    settings: &Settings,
    (figures, show): (&mut dyn Figures, Show<'_, E>),
    observer: &dyn Observer,
) -> Result<Vec<Rows>, E> {
    let profile = profile::bundled(PROFILE)?;
    let mut all = Vec::new();
    for (subject, on) in plan(names, effort) {
        let machine = (on, &profile, settings);
        let (rows, ended) = measure(subject, machine, effort, figures, observer)?;
        if !rows.runs.is_empty() {
            show(&rows)?;
            all.push(rows);
        }
        match ended {
            Ended::Completed => {}
            Ended::Interrupted => break,
            Ended::Failed(error) => return Err(error.into()),
        }
    }
    Ok(all)
}

/// The end of the runs of a workload on one machine.
#[derive(Debug)]
enum Ended {
    Completed,
    Interrupted,
    Failed(Error),
}

impl Ended {
    /// Returns the earlier of two ends.
    fn or(self, later: Self) -> Self {
        if matches!(self, Self::Completed) { later } else { self }
    }
}

/// Runs one workload on one machine. The result has the ratios whose runs are complete.
///
/// # Errors
/// The settings are invalid, or the results cannot be written.
fn measure(
    subject: &Subject,
    (on, profile, settings): (On, &Profile, &Settings),
    effort: Effort<'_>,
    figures: &mut dyn Figures,
    observer: &dyn Observer,
) -> Result<(Rows, Ended), Error> {
    let threads = match on {
        On::Simulated(cpus) | On::Native(cpus) => cpus,
    };
    let place = match on {
        On::Simulated(cpus) => format!("{} simulated", plural(cpus as u64, "CPU")),
        On::Native(cpus) => format!("this machine, {}", plural(cpus as u64, "thread")),
    };
    let name = subject.name;
    let given = subject.given[usize::from(effort.quick)];
    let given: Vec<_> = given.iter().map(|word| scaled(word, on)).collect();
    let mut settings = [settings.clone(), settings.clone()];
    for (settings, knob) in settings.iter_mut().zip(["deferred_flush=0", "deferred_flush=1"]) {
        settings.set(&knob.parse().map_err(|why: String| Error::setting(knob, why))?);
    }
    let mut all = Vec::new();
    let mut ended = Ended::Completed;
    for ratio in effort.ratios(subject) {
        let access = given.iter().find(|word| word.starts_with("access="));
        let access = access.map_or(String::new(), |word| format!(" {word}"));
        observer.begin(&format!("{name} {ratio}{access} on {place}"));
        let besides = (subject.besides)(ratio).filter(|_| !effort.quick);
        let besides = besides.map(|word| scaled(word, on));
        let words = |seed: u16| -> Vec<_> {
            let own =
                [format!("ratio={ratio}"), format!("threads={threads}"), format!("seed={seed}")];
            given.iter().chain(&besides).cloned().chain(own).collect()
        };
        let seeds = (0..effort.seeds).map(words);
        let jobs: Vec<_> =
            seeds.flat_map(|words| settings.iter().map(move |it| (words.clone(), it))).collect();
        let bytes = jobs.first().map_or(0, |(words, _)| host_bytes(name, words, threads));
        let ran = side_by_side(width(on, jobs.len(), bytes), jobs.len(), |at| {
            let (words, settings) = &jobs[at];
            let ran = one(name, words, on, profile, settings);
            observer.advance(1);
            ran
        });
        let mut runs = Runs::default();
        for (at, ran) in ran.into_iter().enumerate() {
            let (outcome, context) = match ran {
                Ok(Some(ran)) => ran,
                // The results of the other runs are kept.
                Ok(None) => {
                    ended = ended.or(Ended::Interrupted);
                    continue;
                }
                Err(error) => {
                    ended = ended.or(Ended::Failed(error));
                    continue;
                }
            };
            for figure in &FIGURES {
                if let Some(value) = figure.of(&outcome) {
                    figures.figure(&context, figure.metric, figure.unit, Number::Real(value))?;
                }
            }
            let side = if at % 2 == 0 { &mut runs.off } else { &mut runs.on };
            side.push(outcome);
        }
        if !matches!(ended, Ended::Completed) {
            break;
        }
        all.push((besides.map_or(ratio.to_owned(), |word| format!("{ratio}, {word}")), runs));
    }
    let title = format!("{name} {} on {place}", given.join(" "));
    let seeds = match effort.seeds {
        1 => String::new(),
        seeds => format!(", mean of {seeds} seeds"),
    };
    Ok((Rows { title: format!("{title}{seeds}"), on, runs: all }, ended))
}

/// Returns a parameter of a workload, with fast memory scaled to the amount per CPU of [`CPUS`]
/// CPUs. The share of flushes that cannot be deferred depends on the memory per CPU.
fn scaled(word: &str, on: On) -> String {
    let scale = |amount: &str| match on {
        On::Simulated(cpus) => Some(amount.parse::<usize>().ok()? * cpus.max(CPUS) / CPUS),
        On::Native(_) => None,
    };
    let amount = word.strip_prefix("fast=").and_then(|word| word.strip_suffix('M'));
    amount.and_then(scale).map_or(word.to_owned(), |amount| format!("fast={amount}M"))
}

/// Returns the host memory of the simulated machine of a run, in bytes; 0 for an invalid run, which
/// is rejected later.
fn host_bytes(name: &str, words: &[String], cpus: usize) -> u64 {
    let tiers = Workload::parse(name, words).ok().and_then(|workload| workload.needs().tiers);
    tiers.map_or(0, |tiers| subject::host_bytes(cpus, tiers))
}

/// Returns the CPUs of the host.
fn cpus() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the number of `count` runs to execute in parallel. Simulated machines run in parallel as
/// far as the host's memory suffices, each with `bytes`. On this machine runs are sequential,
/// because their times are measured.
fn width(on: On, count: usize, bytes: u64) -> usize {
    match on {
        On::Simulated(_) => {
            let most = cpus().min(count);
            let fits = |width: &usize| host::afford("", *width as u64 * bytes).is_ok();
            (1..=most).rev().find(fits).unwrap_or(1)
        }
        On::Native(_) => 1,
    }
}

/// Returns the result of `run` for each of `count` numbers, with `width` runs in parallel.
fn side_by_side<R: Send>(width: usize, count: usize, run: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let numbers = iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        numbers.take_while(|at| *at < count).map(|at| (at, run(at))).collect::<Vec<_>>()
    };
    let mut results: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..width).map(|_| scope.spawn(work)).collect();
        let joined = workers.into_iter().map(thread::ScopedJoinHandle::join);
        joined.flat_map(|it| it.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Executes one run.
fn one(
    name: &'static str,
    words: &[String],
    on: On,
    profile: &Profile,
    settings: &Settings,
) -> Result<Option<(Outcome, Context)>, Error> {
    // A simulated machine stays on the thread that created it.
    let (words, profile, settings) = (words.to_vec(), profile.clone(), settings.clone());
    let run = move || -> Result<(Outcome, Context), Error> {
        let workload = Workload::parse(name, &words).map_err(Error::Parameter)?;
        match on {
            On::Simulated(cpus) => {
                let system = subject::machine_for(&profile, cpus, &workload, 0)?;
                settings.apply_to_simulated(&system).map_err(|it| Error::run(name, it))?;
                let outcome = workload.run(&system).map_err(|it| Error::run(name, it))?;
                let machine = faultless_workload::System::machine(&system);
                Ok((outcome, Context::of(&workload, machine, Some(&settings))))
            }
            On::Native(_) => {
                let native = run::machine_for(&workload)?;
                let outcome = run::on_native(&native, &settings, &workload)?;
                Ok((outcome, Context::of(&workload, "native".into(), Some(&settings))))
            }
        }
    };
    stop::unless_requested(run).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_memory_scales_with_cpus() {
        let scaled = |word, cpus| scaled(word, On::Simulated(cpus));
        assert_eq!(
            [4, 16, 64].map(|cpus| scaled("fast=64M", cpus)),
            ["64M", "64M", "256M"].map(|it| format!("fast={it}"))
        );
        assert_eq!(scaled("lookups=20000", 64), "lookups=20000");
        assert_eq!(super::scaled("fast=64M", On::Native(64)), "fast=64M");
    }

    #[test]
    fn results_are_in_order_and_native_runs_are_sequential() {
        let numbers: Vec<usize> = (0..100).collect();
        let width = |bytes| width(On::Simulated(4), 100, bytes);
        assert_eq!(side_by_side(width(0), 100, |at| at), numbers);
        assert_eq!((width(0), width(u64::MAX / 1024)), (cpus().min(100), 1), "memory for one");
        let running = AtomicUsize::new(0);
        let beside = side_by_side(super::width(On::Native(4), 20, 0), 20, |_| {
            let beside = running.fetch_add(1, Ordering::Relaxed);
            thread::sleep(std::time::Duration::from_millis(1));
            running.fetch_sub(1, Ordering::Relaxed);
            beside
        });
        assert_eq!(beside, [0; 20]);
    }

    #[test]
    fn failure_keeps_the_completed_ratios() {
        let subject = Subject {
            name: "xsbench",
            given: [&["fast=1M", "lookups=10"], &[]],
            ratios: &RATIOS,
            cpus: &[1],
            besides: |ratio| (ratio == "1:8").then_some("no_such=parameter"),
        };
        let effort = Effort { quick: false, threads: 1, seeds: 1, ratios: &[], cpus: None };
        let profile = Profile::bundled(PROFILE).expect("it is bundled");
        let machine = (On::Simulated(1), &profile, &Settings::new(&[]));
        let (rows, ended) =
            measure(&subject, machine, effort, &mut (), &()).expect("the figures are dropped");
        let ratios: Vec<_> = rows.runs.iter().map(|(ratio, _)| ratio.as_str()).collect();
        assert_eq!(ratios, ["1:1", "1:2.3", "1:4"]);
        assert!(rows.runs.iter().all(|(_, runs)| runs.off.len() == 1 && runs.on.len() == 1));
        let Ended::Failed(error) = ended else { panic!("{ended:?}") };
        assert!(error.to_string().contains("no_such"), "{error}");
    }
}
