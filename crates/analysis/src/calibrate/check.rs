//! Predictions of a profile beside measurements: every workload with one thread and more, and the
//! bundled recordings.
//!
//! A workload has the same size as in [`compare`](crate::compare), except workloads with files, and
//! the same size on both machines.

use super::Scope;
use super::hardware::{self, Effort};
use crate::compare::{ENTRIES, is_tiered};
use crate::context::{Basis, Context};
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::number::plural;
use crate::observer::Observer;
use crate::replay::{self, Source};
use crate::run;
use crate::scale::{Subject, sizes, subject};
use crate::settings::Settings;
use crate::stop;
use faultless_trace::recordings;
use faultless_virtual::Profile;
use faultless_workload::Workload;
use std::sync::Arc;

/// The largest accepted error of a prediction, in percent.
pub const NEAR: f64 = 15.0;
/// The numbers of threads to run, limited by the CPUs of the host.
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
/// Seconds of a run. Shorter than the time for which the host's other programs use a CPU at a time,
/// so that some runs are undisturbed.
const SECONDS: &str = "0.002";

/// One prediction.
#[derive(Clone, Debug)]
pub struct Row {
    /// The name of the workload or the recording.
    pub name: String,
    /// The number of threads.
    pub threads: usize,
    /// Operations per second, measured on the native machine.
    pub native: f64,
    /// Operations per second, predicted.
    pub simulated: f64,
    /// The conditions of the measurement.
    pub context: Context,
}

impl Row {
    /// Returns the excess of the prediction over the measured value, in percent.
    pub fn error(&self) -> f64 {
        100.0 * (self.simulated / self.native - 1.0)
    }

    /// Passes the prediction and the measured value to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures) -> Result<(), Error> {
        let predicted = self.context.with_basis(Basis::Predicted);
        for (context, metric, unit, value) in [
            (&self.context, "operations_per_second", "1/s", self.native),
            (&predicted, "predicted_operations_per_second", "1/s", self.simulated),
            (&predicted, "prediction_error", "%", self.error()),
        ] {
            figures.figure(context, metric, unit, Number::Real(value))?;
        }
        Ok(())
    }
}

/// A subject of a prediction.
#[derive(Debug)]
enum Task {
    /// A workload: its name in tables, its name, its parameters, and its number of threads.
    Workload {
        name: &'static str,
        of: &'static str,
        given: Vec<String>,
        threads: usize,
    },
    Recording(&'static recordings::Recording),
}

/// Returns the numbers of threads for which the host has CPUs: 1 and 2 in any case.
pub fn threads() -> impl Iterator<Item = usize> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    THREADS.into_iter().filter(move |threads| *threads <= cpus.max(2))
}

/// A workload's name and parameters.
type Given = (&'static str, &'static [&'static str]);

/// Workloads with files, which the native machine reads from the host once in each run. The sizes
/// are small, so that reading is quick and a run makes many passes. `text` then has no 2 MiB, for
/// which the virtual machine has no translations.
const FILES: [(&str, &str); 3] =
    [("page_fault2", "size=256K"), ("page_fault3", "size=256K"), ("text", "size=256K")];

/// Returns the subjects of `compare`, and all other workloads.
fn tasks(scope: Scope) -> Vec<Task> {
    let entries = ENTRIES.iter().filter(|entry| entry.compares_policies());
    let mut all: Vec<_> = entries.map(|entry| (entry.name, entry.given())).collect();
    for info in faultless_workload::all() {
        // A profile does not describe tiered memory.
        let known = all.iter().any(|(_, (of, _))| *of == info.name);
        if !known && !is_tiered(info.name) {
            all.push((info.name, (info.name, &[])));
        }
    }
    if scope == Scope::Quick {
        all.truncate(2);
    }
    let limit = format!("seconds={SECONDS}");
    let each = |(name, (of, params)): (&'static str, Given)| {
        let small =
            FILES.iter().find(|(file, _)| *file == of).map(|(_, size)| std::slice::from_ref(size));
        let given = small.unwrap_or(params).iter().map(|&param| param.to_owned());
        let given = given.chain([limit.clone()]);
        let given: Vec<_> = given.collect();
        threads().map(move |threads| Task::Workload { name, of, given: given.clone(), threads })
    };
    let workloads = all.into_iter().flat_map(each);
    let recordings = recordings::all().iter().map(Task::Recording);
    workloads.chain(recordings.filter(|_| scope == Scope::All)).collect()
}

/// Returns the steps of progress of [`run()`].
pub fn steps(scope: Scope) -> u64 {
    tasks(scope).len() as u64
}

/// Predicts and measures each subject, and passes the results to `figures`. After a request to
/// stop the result has the completed rows.
///
/// # Errors
/// A run failed, or a figure cannot be written.
pub fn run(
    profile: &Profile,
    settings: &Settings,
    scope: Scope,
    figures: &mut dyn Figures,
    observer: &dyn Observer,
) -> Result<Vec<Row>, Error> {
    let rounds = scope.rounds();
    let mut rows = Vec::new();
    for task in tasks(scope) {
        if stop::requested() {
            break;
        }
        let row = match task {
            Task::Workload { name, of, given, threads } => {
                observer.begin(&format!("{name}, {}", plural(threads as u64, "thread")));
                let workload = sizes::workload(of, &given, threads)?;
                measured(name, &workload, profile, settings, 2 * rounds)?
            }
            Task::Recording(recording) => {
                observer.begin(&format!("replay:{}", recording.name));
                let source = Source::shipped(recording)?;
                let Some(row) = recorded(source, profile, settings, rounds)? else { break };
                row
            }
        };
        row.figures(figures)?;
        rows.push(row);
        observer.advance(1);
    }
    Ok(rows)
}

/// Measures a line transfer to the other CPU again, for a profile of this machine. Returns the
/// nanoseconds if they differ from the profile: the host of a guest moves its CPUs.
///
/// # Errors
/// The process has fewer than two CPUs.
pub fn placement(profile: &Profile, scope: Scope) -> Result<Option<f64>, Error> {
    if profile.name != super::profile::NAME {
        return Ok(None);
    }
    let then = profile.line.complex_ns.value;
    let effort = Effort { rounds: scope.rounds() };
    let now = hardware::transfer(effort, hardware::two_cpus()?)?;
    Ok((100.0 * (now / then - 1.0).abs() > NEAR).then_some(now))
}

/// Predicts and measures one workload. The first run on either machine is discarded, so that the
/// memory is in the state left by an earlier run.
fn measured(
    name: &str,
    workload: &Workload,
    profile: &Profile,
    settings: &Settings,
    rounds: usize,
) -> Result<Row, Error> {
    let (threads, memory) = (workload.crew().workers, run::memory(workload));
    let failed = |error: &dyn std::fmt::Display| Error::run(name, error);
    let system = subject::machine(profile, threads, memory, 0)?;
    settings.apply_to_simulated(&system).map_err(|error| failed(&error))?;
    workload.run(&system).map_err(|error| failed(&error))?;
    let simulated = workload.run(&system).map_err(|error| failed(&error))?;

    let native = run::machine(memory, threads)?;
    run::on_native(&native, settings, workload)?;
    let mut fastest = 0f64;
    for _ in 0..rounds {
        let outcome = run::on_native(&native, settings, workload)?;
        fastest = fastest.max(outcome.operations_per_second());
    }
    let context = Context::of(workload, "native".into(), Some(settings));
    Ok(Row {
        name: name.to_owned(),
        threads,
        native: fastest,
        simulated: simulated.operations_per_second(),
        context: Context { workload: name.to_owned(), ..context },
    })
}

/// Predicts and measures one recording, with a CPU for each thread; `None` if the user requested a
/// stop.
fn recorded(
    source: Source,
    profile: &Profile,
    settings: &Settings,
    rounds: usize,
) -> Result<Option<Row>, Error> {
    let (name, threads) = (format!("replay:{}", source.name), source.cpus());
    let context = source.context(settings);
    let native = run::machine(source.memory(), threads)?;
    let mut fastest = 0f64;
    for _ in 0..rounds {
        let replayed = replay::once(&native, &source, settings)?;
        if !replayed.complete {
            return Ok(None);
        }
        fastest = fastest.max(replayed.sample.operation_rate());
    }
    let subject = Arc::new(Subject::Recording(Arc::new(source)));
    let ran = subject.run(profile, threads, 0, settings)?;
    Ok(ran.map(|(ran, _)| {
        let simulated = ran.sample.operation_rate();
        Row { name, threads, native: fastest, simulated, context }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;

    #[test]
    fn every_workload_is_predicted_with_one_thread_and_two() {
        let tasks = tasks(Scope::All);
        for info in faultless_workload::all().iter().filter(|info| !is_tiered(info.name)) {
            for wanted in [1, 2] {
                let found = tasks.iter().any(|task| match task {
                    Task::Workload { of, threads, .. } => *of == info.name && *threads == wanted,
                    Task::Recording(_) => false,
                });
                assert!(found, "{} {wanted}", info.name);
            }
        }
        let recorded = tasks.iter().filter(|task| matches!(task, Task::Recording(_))).count();
        assert_eq!(recorded, recordings::all().len());
    }

    #[test]
    fn placement_requires_two_cpus_only_for_a_profile_of_this_machine() {
        let placement = |name: &str| {
            let mut profile = Profile::bundled("two-socket").expect("it is bundled");
            profile.name = name.into();
            placement(&profile, Scope::Quick)
        };
        std::thread::scope(|scope| {
            let pinned = scope.spawn(|| {
                let this = Pid::from_raw(0);
                let allowed = sched_getaffinity(this).expect("this thread");
                let first = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu) == Ok(true));
                let mut one = CpuSet::new();
                one.set(first.expect("a CPU")).expect("a CPU of the set");
                sched_setaffinity(this, &one).expect("a CPU of the set");
                assert!(matches!(placement("two-socket"), Ok(None)));
                let error = placement(super::super::profile::NAME).expect_err("one CPU");
                assert!(error.to_string().contains("on more CPUs"), "{error}");
            });
            pinned.join().expect("no panic");
        });
    }
}
