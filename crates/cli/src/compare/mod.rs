//! `faultless compare`, the main command: a result on one screen, and with `--details` all
//! measurements.
//!
//! Prints four tables: the cost of [one fault](faults), workloads on [many simulated CPUs](many),
//! the time of [recorded programs](programs) on this machine, and the effect of each
//! [mechanism](defaults). Each table follows its verdict, and [the machine and its noise](host)
//! come first. With `--details`, every workload and recording also runs on this machine under every
//! locking policy and with prefault up to increasing orders. These results are printed at the end
//! of each workload, and their [summary] before the four tables.

mod defaults;
mod details;
mod faults;
mod host;
mod many;
mod page;
pub mod programs;
mod subject;
mod summary;
pub mod tiers;
pub mod turns;
mod words;

pub use subject::ENTRIES;
pub use tiers::is_tiered;

use crate::args::CompareArgs;
use crate::calibrate::hardware::Effort;
use crate::error::CliError;
use crate::html::Html;
use crate::interrupt;
use crate::output;
use crate::profiles;
use crate::replay;
use crate::report::columns::{Report, Topic};
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{self, Style, filled};
use crate::scale::subject::PROFILE;
use crate::scale::subject::Subject as Simulated;
use crate::settings::{Assignment, Settings, orders, policies, regimes};
use defaults::{Defaults, Needs};
use faultless::PAGE_SIZE;
use faults::Faults;
use host::{Host, Noise};
use many::Many;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use subject::{Choice, Scale, Subject, subjects};
use turns::Turns;

/// Frames of the pool of pre-zeroed frames, if there is a pool: more than the number touched by the
/// largest workload.
const POOL: u64 = (160 << 20) / PAGE_SIZE;
/// The largest default number of threads.
const THREADS: usize = 16;

/// Returns the scale of the comparison.
fn scale(args: &CompareArgs) -> Scale {
    let host = std::thread::available_parallelism().map_or(2, usize::from);
    let threads = args.threads.map_or(host.min(THREADS), usize::from);
    match (args.quick, args.details) {
        (true, false) => {
            let replays = Turns { least: 5, most: 9, time: Duration::from_millis(500) };
            Scale { threads, seconds: 0.03, rounds: 5, replays, cpus: 16 }
        }
        (true, true) => {
            Scale { threads, seconds: 0.03, rounds: 5, replays: Turns::exactly(3), cpus: 16 }
        }
        (false, false) => {
            Scale { threads, seconds: 0.06, rounds: 15, replays: Turns::PROGRAMS, cpus: 64 }
        }
        (false, true) => {
            Scale { threads, seconds: 0.06, rounds: 15, replays: Turns::exactly(9), cpus: 64 }
        }
    }
}

/// Rejects options without an effect on the compared subjects: the workloads `tiered` in tiers, and
/// other subjects that are `chosen`, or all.
fn check(args: &CompareArgs, tiered: &[String], chosen: &[String]) -> Result<(), CliError> {
    let usage = |why: String| Err(CliError::Usage(why));
    if tiered.is_empty() {
        let tiers = &args.tiers;
        let given = [
            ("seeds", tiers.seeds.is_some()),
            ("ratios", !tiers.ratios.is_empty()),
            ("cpus", tiers.cpus.is_some()),
        ];
        return match given.iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => {
                usage(format!("--{option}: it is for xsbench and llm, and neither is named"))
            }
            None => Ok(()),
        };
    }
    let names = tiered.join(" and ");
    let given = &args.set.set;
    if let Some(set) = given.iter().find(|set| set.is_deferred_flush()) {
        let set = set.text();
        return usage(format!(
            "--set {set}: {names}: both settings of deferred_flush are compared"
        ));
    }
    let twice = given.iter().enumerate().find(|(at, set)| {
        let knob = |set: &Assignment| set.text().split('=').next().map(str::to_owned);
        given[..*at].iter().any(|before| knob(before) == knob(set))
    });
    if let Some((_, set)) = twice {
        return usage(format!("--set {}: {names}: a knob has one value there", set.text()));
    }
    if args.threads.is_some() && args.tiers.cpus.is_some() && chosen.is_empty() {
        return usage(format!("--threads: with --cpus, {names} does not run on this machine"));
    }
    if args.details && chosen.is_empty() {
        return usage(format!("--details: {names}: the table has all that is measured"));
    }
    Ok(())
}

/// Runs the comparison.
pub fn run(args: &CompareArgs) -> Result<(), CliError> {
    let scale = scale(args);
    let (tiered, chosen): (Vec<_>, Vec<_>) =
        args.chosen().into_iter().partition(|name| tiers::is_tiered(name));
    check(args, &tiered, &chosen)?;
    let subjects = subjects(&chosen, &scale)?;
    let inputs: Vec<_> = chosen.iter().map(Path::new).collect();
    output::apart(&[("--json", args.json.json.as_deref()), ("--html", args.html.html.as_deref())])?;
    let html = Html::open(&args.html, &inputs)?;
    let mut json = Json::open(&args.json, &inputs)?;
    let choice = Choice {
        policies: policies(&args.set.set),
        regimes: regimes(&args.set.set, POOL),
        settings: Settings::new(&args.set.set),
    };
    let (mut out, style) = report::output(&args.json);
    let mut tiers = Vec::new();
    if !tiered.is_empty() {
        let names: Vec<_> = tiered.iter().map(String::as_str).collect();
        let effort = tiers::Effort::new(args.quick, scale.threads, &args.tiers);
        tiers = tiers::run(&names, effort, &choice.settings, &mut json, (&mut *out, style))?;
        if interrupt::requested() {
            writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
        }
        if chosen.is_empty() || interrupt::requested() {
            html.write(|| page::of_tiers(&tiers, style))?;
            return json.complete();
        }
    }
    let screen = Screen::new(args, &subjects, &scale)?;

    let wanted = |subject: &Subject| {
        args.details || subject.topic == Topic::Locking && subject.is_recording()
    };
    let subjects: Vec<_> = subjects.into_iter().filter(wanted).collect();
    let measured: usize = subjects.iter().map(|it| it.turns(&scale).most * it.width(&choice)).sum();
    let progress = Progress::new((measured + screen.steps(&choice)) as u64);
    progress.begin("the machine");
    let host = Host::look(Effort { rounds: if args.quick { 3 } else { 9 } })?;
    let mut failures = Vec::new();
    let mut details = |report: &Report| match args.details {
        true => progress.print(|| report.print(&mut *out, style)),
        false => Ok(()),
    };
    let reports = details::measure(
        subjects,
        (&choice, &scale),
        (&mut json, &mut details),
        &progress,
        &mut failures,
    )?;
    if args.details {
        summary::print(&mut *out, &reports, &choice, style)?;
    }
    host.json(noise(&reports), &mut json)?;
    for (name, report) in programs(&reports) {
        let source = screen.recordings.iter().find(|source| source.name == name);
        source.map_or(Ok(()), |source| replay::tell_report(source, report, &mut json))?;
    }
    let tables = screen.run(&choice, &mut json, &progress, &mut failures)?;
    drop(progress);
    let mut text = Vec::new();
    tables.print(&mut text, &host, &reports, (args.details, style))?;
    out.write_all(&text)?;
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    if failures.is_empty() {
        let text = String::from_utf8_lossy(&text);
        let programs: Vec<_> = programs(&reports).collect();
        let measured = (&tables.faults, &tables.many);
        html.write(|| page::page(measured, &programs, (&tiers, style), &text).map(Some))?;
    }
    if failures.is_empty() { json.complete() } else { Err(CliError::Failed(failures.join("\n"))) }
}

/// The simulations for the four tables.
struct Screen<'a> {
    args: &'a CompareArgs,
    profile: faultless_virtual::Profile,
    cpus: usize,
    many: Vec<Arc<Simulated>>,
    recordings: Vec<Arc<replay::source::Source>>,
    orders: Vec<u8>,
}

/// The simulated results.
struct Tables {
    faults: Faults,
    many: Many,
    defaults: Defaults,
}

impl<'a> Screen<'a> {
    fn new(args: &'a CompareArgs, subjects: &[Subject], scale: &Scale) -> Result<Self, CliError> {
        let mut recordings = Vec::new();
        for subject in subjects.iter().filter(|subject| subject.topic == Topic::Ahead) {
            recordings.extend(subject.source().transpose()?);
        }
        let workload = |name: &str| Arc::new(Simulated::Workload(name.to_owned(), Vec::new()));
        let many = match args.chosen().iter().all(|name| tiers::is_tiered(name)) {
            true => many::WORKLOADS.iter().map(|name| workload(name)).collect(),
            false => {
                let mut names: Vec<_> =
                    subjects.iter().filter_map(Subject::workload_name).collect();
                names.dedup();
                let named = names.into_iter().map(workload);
                let recorded =
                    recordings.iter().map(|it| Arc::new(Simulated::Recording(Arc::clone(it))));
                named.chain(recorded).collect()
            }
        };
        let orders = orders(&args.set.set);
        Ok(Self {
            args,
            profile: profiles::bundled(PROFILE)?,
            cpus: scale.cpus,
            many,
            recordings,
            orders,
        })
    }

    fn needs(&self) -> Needs<'_> {
        Needs {
            profile: &self.profile,
            cpus: self.cpus,
            given: &self.args.set.set,
            mechanisms: self.args.chosen().is_empty(),
            recordings: &self.recordings,
            orders: &self.orders,
        }
    }

    /// Steps of progress.
    fn steps(&self, choice: &Choice) -> usize {
        Faults::STEPS + self.many.len() * choice.policies.len() + self.needs().steps()
    }

    fn run(
        &self,
        choice: &Choice,
        json: &mut Json,
        progress: &Progress,
        failures: &mut Vec<String>,
    ) -> Result<Tables, CliError> {
        let (policies, settings) = (&choice.policies[..], &choice.settings);
        progress.begin("faults, simulated");
        let done = || progress.advance(1);
        let faults = Faults::measure(&self.profile, policies, settings, json, done)?;
        let machine = (&self.profile, self.cpus);
        let many = Many::run(machine, &self.many, (policies, settings), json, progress, failures)?;
        let defaults = Defaults::run(&self.needs(), json, progress, failures)?;
        Ok(Tables { faults, many, defaults })
    }
}

impl Tables {
    fn print(
        &self,
        out: &mut dyn Write,
        host: &Host,
        reports: &[(String, Report)],
        (details, style): (bool, Style),
    ) -> Result<(), CliError> {
        let what = "Compared: locking of page faults (mmap_lock: Linux to 6.3; per_vma: Linux 6.4 to 6.14; speculative: no lock) \
                    and the other mechanisms, on simulated CPUs and with recorded programs on this machine.";
        writeln!(out, "{}", filled(what, style.width))?;
        host.print(out, style.width)?;
        if let Some(noise) = noise(reports) {
            noise.print(out, style.width)?;
        }
        self.faults.print(out, style)?;
        self.many.print(out, style)?;
        programs::print(out, &programs(reports).collect::<Vec<_>>(), style)?;
        self.defaults.print(out, style)?;
        if !details {
            let more = "More: compare --details; faultless scale (other numbers of CPUs), versus (beside Linux), advise (for the Linux that runs now).";
            writeln!(out, "{}", filled(more, style.width))?;
        }
        Ok(())
    }
}

/// Returns the recorded programs under each policy, by name.
fn programs(reports: &[(String, Report)]) -> impl Iterator<Item = (&str, &Report)> {
    let is_program = |(_, report): &&(String, Report)| {
        report.topic == Topic::Locking && report.unit == "operations"
    };
    reports
        .iter()
        .filter(is_program)
        .map(|(name, report)| (name.trim_start_matches("replay:"), report))
}

/// Returns the noise of the recorded programs' repetitions.
fn noise(reports: &[(String, Report)]) -> Option<Noise> {
    Noise::of(programs(reports).map(|(_, report)| report))
}
