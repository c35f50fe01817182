//! Predictions of a profile beside measurements: every workload with one thread and more, and the
//! bundled recordings.
//!
//! A workload has the same size as in `compare`, except workloads with [files](FILES), and the same
//! size on both machines.

use super::Scope;
use super::hardware::{self, Effort};
use crate::compare::{ENTRIES, is_tiered};
use crate::error::CliError;
use crate::interrupt;
use crate::replay::{self, source::Source};
use crate::report::json::{Context, Json, Number};
use crate::report::number::{grouped, plural};
use crate::report::progress::Progress;
use crate::report::{Style, table};
use crate::run;
use crate::scale::sizes;
use crate::scale::subject::{self, Subject};
use crate::settings::Settings;
use crate::stat;
use faultless_trace::recordings;
use faultless_virtual::Profile;
use faultless_workload::Workload;
use std::io::Write;
use std::sync::Arc;

/// The largest accepted error of a prediction, in percent.
const NEAR: f64 = 15.0;
/// The numbers of threads to run, limited by the CPUs of the host.
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
/// Seconds of a run. Shorter than the time for which the host's other programs use a CPU at a time,
/// so that some runs are undisturbed.
const SECONDS: &str = "0.002";

/// One prediction.
#[derive(Clone, Debug)]
pub struct Row {
    name: String,
    threads: usize,
    /// Operations per second.
    native: f64,
    simulated: f64,
    context: Context,
}

impl Row {
    /// Returns the excess of the prediction over the measured value, in percent.
    fn error(&self) -> f64 {
        100.0 * (self.simulated / self.native - 1.0)
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
fn threads() -> impl Iterator<Item = usize> {
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

/// Predicts and measures, and prints both.
///
/// # Errors
/// A run failed.
pub fn run(
    out: &mut dyn Write,
    json: &mut Json,
    profile: &Profile,
    settings: &Settings,
    (scope, style): (Scope, Style),
) -> Result<(), CliError> {
    let rounds = scope.rounds();
    let tasks = tasks(scope);
    let progress = Progress::new(tasks.len() as u64);
    let most = threads().max().unwrap_or(2);
    let mut rows = Vec::new();
    for task in tasks {
        if interrupt::requested() {
            break;
        }
        let row = match task {
            Task::Workload { name, of, given, threads } => {
                progress.begin(&format!("{name}, {}", plural(threads as u64, "thread")));
                let workload = sizes::workload(of, &given, threads)?;
                measured(name, &workload, profile, settings, 2 * rounds)?
            }
            Task::Recording(recording) => {
                progress.begin(&format!("replay:{}", recording.name));
                let source = Source::shipped(recording)?;
                let Some(row) = recorded(source, profile, settings, rounds)? else { break };
                row
            }
        };
        write_json(json, &row)?;
        rows.push(row);
        progress.advance(1);
    }
    drop(progress);
    print(out, rows, most, style)?;
    if interrupt::requested() { Ok(()) } else { placement(out, profile, rounds) }
}

/// Prints a warning if a line transfer to the other CPU now takes a different time than in the
/// profile, because the host of a guest moves its CPUs.
fn placement(out: &mut dyn Write, profile: &Profile, rounds: usize) -> Result<(), CliError> {
    let then = profile.line.complex_ns.value;
    let now = hardware::transfer(Effort { rounds }, hardware::two_cpus()?)?;
    if profile.name == super::profile::NAME && 100.0 * (now / then - 1.0).abs() > NEAR {
        writeln!(
            out,
            "A line takes {now:.0} ns to the other CPU now, {then:.0} ns in the profile: the rows of several threads are of another placement of CPUs."
        )?;
    }
    Ok(())
}

/// Predicts and measures one workload. The first run on either machine is discarded, so that the
/// memory is in the state left by an earlier run.
fn measured(
    name: &str,
    workload: &Workload,
    profile: &Profile,
    settings: &Settings,
    rounds: usize,
) -> Result<Row, CliError> {
    let (threads, memory) = (workload.crew().workers, stat::memory(workload));
    let failed = |error: &dyn std::fmt::Display| CliError::failed(name, error);
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
) -> Result<Option<Row>, CliError> {
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

fn write_json(json: &mut Json, row: &Row) -> Result<(), CliError> {
    for (metric, unit, value) in [
        ("operations_per_second", "1/s", row.native),
        ("predicted_operations_per_second", "1/s", row.simulated),
        ("prediction_error", "%", row.error()),
    ] {
        json.write(&row.context, metric, unit, Number::Real(value))?;
    }
    Ok(())
}

/// Sorts the rows, the largest error first.
fn sorted(mut rows: Vec<Row>) -> Vec<Row> {
    rows.sort_by(|one, other| other.error().abs().total_cmp(&one.error().abs()));
    rows
}

fn print(out: &mut dyn Write, rows: Vec<Row>, most: usize, style: Style) -> Result<(), CliError> {
    let rows = sorted(rows);
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\nWhat the profile predicts, simulated, and what the native machine does, the fastest of several runs; operations a second, the worst row first:\n"
    )?;
    let head = ["", "threads", "native", "simulated", "off by"].map(str::to_owned);
    let mut table = table::numbers(&head, style);
    for row in &rows {
        let over = if row.threads > most { " *" } else { "" };
        table::row(
            &mut table,
            [
                row.name.clone(),
                format!("{}{over}", row.threads),
                grouped(row.native.round() as u64),
                grouped(row.simulated.round() as u64),
                format!("{:+.1} %", row.error()),
            ],
        );
    }
    writeln!(out, "{table}")?;
    let near = rows.iter().filter(|row| row.error().abs() <= NEAR).count();
    writeln!(out, "\n{near} of {} rows are within {NEAR} %.", rows.len())?;
    if rows.iter().any(|row| row.threads > most) {
        writeln!(
            out,
            "* More threads than the host has CPUs for; simulated, each thread has one."
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    fn row(name: &str, native: f64, simulated: f64) -> Row {
        let context = Context {
            machine: "native".into(),
            workload: name.into(),
            cpus: 1,
            setting: String::new(),
            params: Map::new(),
            knobs: Map::new(),
        };
        Row { name: name.into(), threads: 1, native, simulated, context }
    }

    #[test]
    fn largest_error_is_first() {
        let rows =
            vec![row("near", 100.0, 110.0), row("low", 100.0, 60.0), row("high", 100.0, 130.0)];
        let mut out = Vec::new();
        print(&mut out, rows, 2, Style { terminal: false, width: 100 }).expect("it is a vector");
        let out = String::from_utf8(out).expect("text");
        let at = |name: &str| out.find(name).unwrap_or(usize::MAX);
        assert!(at("low") < at("high") && at("high") < at("near"), "{out}");
        assert!(out.contains("-40.0 %") && out.contains("1 of 3 rows"), "{out}");
    }

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
}
