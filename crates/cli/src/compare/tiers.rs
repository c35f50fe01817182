//! `compare xsbench llm`: what deferred flushes change where memory is in tiers.
//!
//! Each workload runs at several ratios of the fast node to the slow one, with the knob `deferred_flush` off and on: on simulated CPUs, whose figures are the
//! same again and again, and on this machine. The rows are those that were published for deferred flushes (shootdowns, flushes, TLB misses, run time), and memory
//! in use and the latency of allocations.

use crate::error::CliError;
use crate::interrupt;
use crate::report::json::{Context, Json, Number};
use crate::report::number::{grouped, plural};
use crate::report::progress::Progress;
use crate::report::{Style, filled, table};
use crate::run;
use crate::scale::subject::{self, PROFILE, profile};
use crate::settings::Settings;
use crate::stat::explained;
use faultless::Counter;
use faultless_virtual::Profile;
use faultless_workload::{Outcome, Workload};
use std::io::Write;

/// A workload that is compared.
struct Subject {
    name: &'static str,
    /// What it is given for a short run and for a quick one.
    given: [&'static [&'static str]; 2],
    /// Of fast memory to slow memory, each with what a run that is not quick is given besides.
    ratios: &'static [(&'static str, Option<&'static str>)],
    /// Simulated CPUs.
    cpus: &'static [usize],
}

/// With 64 processes, or at 1:99 with as much fast memory as elsewhere, `llm` would take an hour.
const SUBJECTS: [Subject; 3] = [
    Subject {
        name: "xsbench",
        given: [&["fast=64M", "lookups=20000"], &["fast=4M", "lookups=2000"]],
        ratios: &[("1:1", None), ("1:2.3", None), ("1:4", None), ("1:8", None), ("1:99", None)],
        cpus: &[16, 64],
    },
    // No flush can be deferred: it must cost nothing.
    Subject {
        name: "xsbench",
        given: [
            &["fast=64M", "lookups=20000", "access=write"],
            &["fast=4M", "lookups=2000", "access=write"],
        ],
        ratios: &[("1:1", None), ("1:4", None), ("1:8", None)],
        cpus: &[16],
    },
    Subject {
        name: "llm",
        given: [&["passes=1"], &["fast=2M", "passes=2"]],
        ratios: &[
            ("1:1", Some("fast=16M")),
            ("1:2.3", Some("fast=16M")),
            ("1:4", Some("fast=16M")),
            ("1:8", Some("fast=16M")),
            ("1:99", Some("fast=1M")),
        ],
        cpus: &[16],
    },
];
/// Of a quick run.
const FEW: usize = 4;
/// The least that a change is told of in percent.
const FEWEST: f64 = 10.0;

/// The names of the workloads.
pub fn names() -> impl Iterator<Item = &'static str> {
    ["xsbench", "llm"].into_iter()
}

/// Whether `name` is one of the workloads here.
pub fn is_tiered(name: &str) -> bool {
    names().any(|known| known == name)
}

/// A figure of a run: its name, as results have it, its unit, and how it is told.
struct Figure {
    title: &'static str,
    metric: &'static str,
    unit: &'static str,
    /// What a unit of the table is of the figure's.
    scale: f64,
    of: fn(&Outcome) -> Option<f64>,
}

impl Figure {
    /// Whether `value` is so few that a ratio to it says nothing.
    fn is_few(&self, value: f64) -> bool {
        self.unit == "count" && value < FEWEST
    }
}

const fn counted(
    title: &'static str,
    metric: &'static str,
    of: fn(&Outcome) -> Option<f64>,
) -> Figure {
    Figure { title, metric, unit: "count", scale: 1.0, of }
}

const fn timed(
    title: &'static str,
    metric: &'static str,
    of: fn(&Outcome) -> Option<f64>,
) -> Figure {
    Figure { title, metric, unit: "ns", scale: 1.0, of }
}

fn count(outcome: &Outcome, name: &str) -> Option<f64> {
    outcome.counter(name).map(|count| count as f64)
}

/// CPUs that were interrupted, and flushes that were done at once. The first is the figure that has a target.
const FIGURES: [Figure; 14] = [
    counted("shootdown IPIs", "tlb_shootdown_sent", |it| {
        count(it, Counter::TlbShootdownSent.name())
    }),
    counted("flushes at once", "tlb_flush", |it| count(it, Counter::TlbFlush.name())),
    counted("flushes deferred", "flush_deferred", |it| count(it, Counter::FlushDeferred.name())),
    counted("settlements", "deferred_settled", |it| count(it, Counter::DeferredSettled.name())),
    counted("TLB misses, loads", "dtlb_load_misses", |it| count(it, "dTLB-load-misses")),
    counted("TLB misses, stores", "dtlb_store_misses", |it| count(it, "dTLB-store-misses")),
    counted("TLB misses, code", "itlb_load_misses", |it| count(it, "iTLB-load-misses")),
    counted("pages moved", "pgmigrate_success", |it| count(it, Counter::MigrateSuccess.name())),
    counted("pages evicted", "pgsteal", |it| count(it, Counter::PageStolen.name())),
    Figure {
        title: "run time, ms",
        metric: "wall_seconds",
        unit: "s",
        scale: 1e3,
        of: |it| Some(it.wall),
    },
    counted("frames in use, mean", "frames_in_use_mean", |it| it.footprint.mean()),
    timed("allocation p50, ns", "allocation_p50", |it| it.allocation(500)),
    timed("allocation p99, ns", "allocation_p99", |it| it.allocation(990)),
    timed("allocation p99.9, ns", "allocation_p99_9", |it| it.allocation(999)),
];

/// Where a workload runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    Simulated(usize),
    Native(usize),
}

/// One workload on one machine, at each ratio without deferral and with it.
struct Rows {
    title: String,
    on: On,
    /// Without and with.
    runs: Vec<(String, [Outcome; 2])>,
}

/// Runs the workloads `names`, and prints a table for each and each machine.
pub fn run(
    names: &[&str],
    (quick, threads): (bool, usize),
    settings: &Settings,
    json: &mut Json,
    (out, style): (&mut dyn Write, Style),
) -> Result<(), CliError> {
    let profile = profile(PROFILE)?;
    let mut plan = Vec::new();
    for subject in SUBJECTS.iter().filter(|subject| names.contains(&subject.name)) {
        let cpus = if quick { &[FEW] } else { subject.cpus };
        let simulated = cpus.iter().map(|cpus| On::Simulated(*cpus));
        plan.extend(simulated.chain([On::Native(threads)]).map(|on| (subject, on)));
    }
    let runs = plan.iter().map(|(subject, _)| subject.ratios.len() as u64 * 2).sum();
    let progress = Progress::new(runs);
    for (subject, on) in plan {
        let given = subject.given[usize::from(quick)];
        let subject = (subject, given, quick);
        let Some(rows) = measure(subject, on, (&profile, settings), json, &progress)? else {
            return Ok(());
        };
        progress.print(|| rows.print(out, style))?;
    }
    Ok(())
}

/// Runs one workload on one machine; `None` where the user interrupted it.
fn measure(
    (subject, given, quick): (&Subject, &'static [&'static str], bool),
    on: On,
    (profile, settings): (&Profile, &Settings),
    json: &mut Json,
    progress: &Progress,
) -> Result<Option<Rows>, CliError> {
    let threads = match on {
        On::Simulated(cpus) | On::Native(cpus) => cpus,
    };
    let place = match on {
        On::Simulated(cpus) => format!("{} simulated", plural(cpus as u64, "CPU")),
        On::Native(cpus) => format!("this machine, {}", plural(cpus as u64, "thread")),
    };
    let name = subject.name;
    let mut runs = Vec::new();
    for &(ratio, besides) in subject.ratios {
        let besides = besides.filter(|_| !quick);
        let words = given.iter().copied().chain(besides).map(str::to_owned);
        let words: Vec<_> =
            words.chain([format!("ratio={ratio}"), format!("threads={threads}")]).collect();
        let mut outcomes = Vec::new();
        for deferred in [false, true] {
            let state = if deferred { "on" } else { "off" };
            progress.begin(&format!("{name} {ratio} on {place}, deferred_flush {state}"));
            let knob = format!("deferred_flush={}", u8::from(deferred));
            let mut settings = settings.clone();
            settings.set(&knob.parse().map_err(CliError::Usage)?);
            let ran = one(name, &words, on, profile, &settings)?;
            let Some((outcome, context)) = ran else { return Ok(None) };
            for figure in &FIGURES {
                if let Some(value) = (figure.of)(&outcome) {
                    json.write(&context, figure.metric, figure.unit, Number::Real(value))?;
                }
            }
            outcomes.push(outcome);
            progress.advance(1);
        }
        if let Ok(pair) = <[Outcome; 2]>::try_from(outcomes) {
            let told = besides.map_or(ratio.to_owned(), |word| format!("{ratio}, {word}"));
            runs.push((told, pair));
        }
    }
    let title = format!("{name} {} on {place}", given.join(" "));
    Ok(Some(Rows { title, on, runs }))
}

/// One run.
fn one(
    name: &'static str,
    words: &[String],
    on: On,
    profile: &Profile,
    settings: &Settings,
) -> Result<Option<(Outcome, Context)>, CliError> {
    // A simulated machine stays on the thread that made it.
    let (words, profile, settings) = (words.to_vec(), profile.clone(), settings.clone());
    let run = move || -> Result<(Outcome, Context), CliError> {
        let workload =
            Workload::parse(name, &words).map_err(|error| CliError::Usage(explained(&error)))?;
        match on {
            On::Simulated(cpus) => {
                let system = subject::machine_for(&profile, cpus, &workload, 0)?;
                settings.apply_to_simulated(&system).map_err(|it| CliError::failed(name, it))?;
                let outcome = workload.run(&system).map_err(|it| CliError::failed(name, it))?;
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
    interrupt::unless_requested(run).transpose()
}

/// A figure without deferral, and its change with it.
fn cell(figure: &Figure, [off, on]: &[Outcome; 2]) -> String {
    let (Some(off), Some(on)) = ((figure.of)(off), (figure.of)(on)) else { return "-".into() };
    let [off, on] = [off, on].map(|value| value * figure.scale);
    let told = |value: f64| match value {
        value if value >= 100.0 || value.fract() == 0.0 => grouped(value.round() as u64),
        value => format!("{value:.1}"),
    };
    if figure.is_few(off) {
        return if on == off { told(off) } else { format!("{} -> {}", told(off), told(on)) };
    }
    format!("{} {:+.1} %", told(off), 100.0 * (on / off - 1.0))
}

impl Rows {
    fn print(&self, out: &mut dyn Write, style: Style) -> Result<(), CliError> {
        writeln!(out, "\n{}: without deferred flushes, and what they change", self.title)?;
        let head =
            std::iter::once("fast:slow").chain(self.runs.iter().map(|(ratio, _)| ratio.as_str()));
        let mut rows = table::numbers(&head.map(str::to_owned).collect::<Vec<_>>(), style);
        for figure in &FIGURES {
            let cells = self.runs.iter().map(|(_, pair)| cell(figure, pair));
            table::row(&mut rows, std::iter::once(figure.title.to_owned()).chain(cells));
        }
        writeln!(out, "{rows}")?;
        writeln!(out, "{}", filled(&self.verdict(), style.width))?;
        Ok(())
    }

    /// What it comes to. One run of each on this machine says nothing of times.
    fn verdict(&self) -> String {
        let [interrupts, time] = [&FIGURES[0], &FIGURES[9]].map(|figure| {
            let ratio = |(_, [off, on]): &(String, [Outcome; 2])| {
                let (off, on) = ((figure.of)(off)?, (figure.of)(on)?);
                (off != 0.0 && !figure.is_few(off)).then_some(on / off)
            };
            self.runs.iter().filter_map(ratio).collect::<Vec<_>>()
        });
        if interrupts.is_empty() {
            return "CPUs were interrupted less than ten times.".into();
        }
        let interrupts = super::words::fewer(interrupts.into_iter(), "interrupts");
        match self.on {
            On::Native(_) => format!(
                "Counted: {interrupts}. Times are of one run each, and other programs are in them."
            ),
            On::Simulated(_) => {
                let (least, most) = super::words::ends(time.into_iter());
                let change = |ratio: f64| format!("{:+.1} %", 100.0 * (ratio - 1.0));
                let time = super::words::range(change(least), change(most));
                format!("Simulated: {interrupts}; run time {time}.")
            }
        }
    }
}
