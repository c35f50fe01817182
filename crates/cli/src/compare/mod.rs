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
mod faults;
mod host;
mod many;
mod page;
pub mod programs;
mod summary;
mod tiers;
mod words;

use crate::error::CliError;
use crate::html::{Html, HtmlArgs};
use crate::interrupt;
use crate::number::within;
use crate::output;
use crate::profile;
use crate::replay;
use crate::replay::source::{Origin, read};
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{self, JsonArgs, Style, columns, filled};
use crate::scale::counts::Counts;
use crate::set::SetArgs;
use clap::builder::PossibleValuesParser;
use faultless::PAGE_SIZE;
use faultless_analysis::calibrate::hardware::Effort;
use faultless_analysis::columns::{Report, Topic};
use faultless_analysis::compare::defaults::{Defaults, Needs};
use faultless_analysis::compare::faults::Faults;
use faultless_analysis::compare::host::{Host, Noise};
use faultless_analysis::compare::many::{Many, WORKLOADS};
use faultless_analysis::compare::subject::{Recorded, subjects};
use faultless_analysis::compare::tiers::{self as tiered_runs, RATIOS, Rows};
use faultless_analysis::compare::{self, Choice, ENTRIES, Scale, Subject, is_tiered};
use faultless_analysis::rates::LEAST;
use faultless_analysis::replay::Source;
use faultless_analysis::scale::{PROFILE, Subject as Simulated};
use faultless_analysis::settings::{Assignment, Settings, orders, policies, regimes};
use faultless_analysis::turns::Turns;
use faultless_analysis::{Observer, suggest};
use faultless_trace::recordings;
use std::collections::HashSet;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless compare --quick
  faultless compare --only pft --only small_allocs
  faultless compare --set locking=per_vma --set locking=speculative
  faultless compare --only python --set prefault_max_order=9
  faultless compare app.fltrace              a recording of yours
  faultless compare --details                every workload on this machine
  faultless compare xsbench --ratios 1:4 --cpus 16 --seeds 10
  faultless compare --html compare.html      a page with plots
  faultless compare --json results.jsonl

Rows of xsbench and llm, and their counters (see `faultless counters`):
  shootdown interrupts   tlb_shootdown_sent
  flushes at once        tlb_flush
  flushes deferred       flush_deferred
  pages without a flush  flush_needless
  settlements            deferred_settled
  pages moved            pgmigrate_success
  pages evicted          pgsteal")]
pub struct CompareArgs {
    /// Run in a quarter of the time, with more noise and fewer simulated CPUs
    #[arg(long)]
    pub quick: bool,
    /// Run every workload on this machine too, and print all counters
    #[arg(long)]
    pub details: bool,
    #[command(flatten)]
    pub set: SetArgs,
    /// Set the threads of each workload of --details, and of `xsbench` and `llm` on this machine
    /// [default: the host's CPUs, at most 16]
    #[arg(long, value_name = "N", value_parser = within(1..=256_u16))]
    pub threads: Option<u16>,
    #[command(flatten)]
    pub tiers: TierArgs,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
    /// Run only these workloads and recordings, by name, or a recording of your own; the same as
    /// --only
    #[arg(value_name = "NAME|FILE")]
    pub subjects: Vec<String>,
    /// Run only these workloads and recordings, by name, or a recording of yours
    #[arg(long, value_name = "NAME|FILE")]
    pub only: Vec<String>,
}

/// The seeds, ratios and CPU counts of the comparison of `xsbench` and `llm`.
#[derive(Debug, clap::Args)]
pub struct TierArgs {
    /// Set the number of seeds of `xsbench` and `llm`, whose means are compared [default: 3, or 1
    /// with --quick]
    #[arg(long, value_name = "N", value_parser = within(1..=1000_u16))]
    pub seeds: Option<u16>,
    /// Set the ratios of fast to slow memory of `xsbench` and `llm` [default:
    /// 1:1,1:2.3,1:4,1:8,1:99]
    #[arg(long, value_name = "1:N,...", value_delimiter = ',', value_parser = PossibleValuesParser::new(RATIOS))]
    pub ratios: Vec<String>,
    /// Run `xsbench` and `llm` on these numbers of simulated CPUs, and not on this machine; with
    /// more than 16 CPUs the fast memory per CPU stays the same [default: 16 and, for xsbench, 64;
    /// and this machine]
    #[arg(long, value_name = "N,N..N")]
    pub cpus: Option<Counts>,
}

impl CompareArgs {
    /// Returns all named subjects, positional and of `--only`. Empty means everything.
    pub fn chosen(&self) -> Vec<String> {
        [&self.subjects[..], &self.only].concat()
    }
}

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
            let replays = Turns { least: LEAST, most: 9, time: Duration::from_millis(500) };
            Scale { threads, seconds: 0.03, rounds: LEAST, replays, cpus: 16 }
        }
        (true, true) => {
            let replays = Turns::exactly(LEAST);
            Scale { threads, seconds: 0.03, rounds: LEAST, replays, cpus: 16 }
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
            Some((option, _)) => usage(format!("--{option}: requires xsbench or llm")),
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
        return usage(format!("--set {}: {names}: only one value for a knob", set.text()));
    }
    if args.threads.is_some() && args.tiers.cpus.is_some() && chosen.is_empty() {
        return usage(format!("--threads: with --cpus, {names} does not run on this machine"));
    }
    if args.details && chosen.is_empty() {
        return usage(format!("--details: {names}: the table already has all measurements"));
    }
    Ok(())
}

/// Runs the comparison.
pub fn run(args: &CompareArgs) -> Result<(), CliError> {
    args.set.one_value_each(&["locking", "prefault_max_order"])?;
    let scale = scale(args);
    let (tiered, chosen): (Vec<_>, Vec<_>) =
        args.chosen().into_iter().partition(|name| is_tiered(name));
    check(args, &tiered, &chosen)?;
    let subjects = named(&chosen, &scale)?;
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
        tiers = in_tiers(&names, (args, &scale), &choice, (&mut *out, style), &mut json)?;
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
        true => progress.print(|| columns::print(report, &mut *out, style)),
        false => Ok(()),
    };
    let reports = compare::measure::<CliError>(
        subjects,
        (&choice, &scale),
        (&mut json, &mut details),
        &progress,
        &mut failures,
    )?;
    if args.details {
        summary::print(&mut *out, &reports, &choice, style)?;
    }
    host.figures(noise(&reports), &mut json)?;
    for (name, report) in programs(&reports) {
        let source = screen.recordings.iter().find(|source| source.name == name);
        source.map_or(Ok(()), |source| replay::print_report(source, report, &mut json))?;
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

/// Runs the workloads `names` in tiers, and prints a table for each and each machine.
fn in_tiers(
    names: &[&str],
    (args, scale): (&CompareArgs, &Scale),
    choice: &Choice,
    (out, style): (&mut dyn Write, Style),
    json: &mut Json,
) -> Result<Vec<Rows>, CliError> {
    let TierArgs { seeds, ratios, cpus } = &args.tiers;
    let effort = tiered_runs::Effort {
        quick: args.quick,
        threads: scale.threads,
        seeds: seeds.unwrap_or(tiered_runs::Effort::default_seeds(args.quick)),
        ratios,
        cpus: cpus.as_ref().map(|counts| &counts.0[..]),
    };
    let progress = Progress::new(tiered_runs::steps(names, effort));
    let mut show = |rows: &Rows| progress.print(|| tiers::print(rows, &mut *out, style));
    tiered_runs::run(names, effort, &choice.settings, (json, &mut show), &progress)
}

/// Returns the subjects named by `only`, or all. A name is first matched with the workloads, and
/// otherwise interpreted as by `replay`.
fn named(only: &[String], scale: &Scale) -> Result<Vec<Subject>, CliError> {
    let (mut workloads, mut recordings) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    for name in only {
        // Results name a recording in this form, too.
        let bare = name.strip_prefix("replay:").unwrap_or(name);
        let is_workload = ENTRIES.iter().any(|entry| entry.is_called(name));
        if !seen.insert((is_workload, bare)) {
            continue;
        }
        if is_workload {
            workloads.push(name.as_str());
            continue;
        }
        recordings.push(match Origin::find_with_note(Path::new(bare)) {
            Some(Origin::Shipped(recording)) => Recorded::Shipped(recording),
            Some(Origin::File(file)) => Recorded::File(Arc::new(read(&file)?.replayable()?)),
            None => return Err(unknown(name)),
        });
    }
    if only.is_empty() {
        workloads = ENTRIES.iter().map(|entry| entry.name).collect();
        recordings = recordings::all().iter().map(Recorded::Shipped).collect();
    }
    Ok(subjects(&workloads, &recordings, scale)?)
}

fn unknown(name: &str) -> CliError {
    let mut known: Vec<_> = ENTRIES.iter().map(|entry| entry.given().0).collect();
    known.extend(tiered_runs::names());
    known.extend(recordings::all().iter().map(|recording| recording.name));
    // Workloads under both topics are listed once.
    let mut named = HashSet::new();
    known.retain(|name| named.insert(*name));
    CliError::Usage(format!(
        "{name:?}: no such workload, recording or file; there are {}{}",
        known.join(", "),
        suggest::hint(name, known.iter().copied())
    ))
}

/// The simulations for the four tables.
struct Screen<'a> {
    args: &'a CompareArgs,
    profile: faultless_virtual::Profile,
    cpus: usize,
    many: Vec<Arc<Simulated>>,
    recordings: Vec<Arc<Source>>,
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
        for subject in subjects.iter().filter(|subject| subject.topic == Topic::Prefault) {
            recordings.extend(subject.source().transpose()?);
        }
        // Reported before the first run.
        recordings.iter().try_for_each(|source: &Arc<Source>| source.simulated_cpus().map(drop))?;
        let workload = |name: &str| Arc::new(Simulated::Workload(name.to_owned(), Vec::new()));
        let many = match args.chosen().iter().all(|name| is_tiered(name)) {
            true => WORKLOADS.iter().map(|name| workload(name)).collect(),
            false => {
                let mut names: Vec<_> =
                    subjects.iter().filter_map(Subject::workload_name).collect();
                // A workload under both topics has one row.
                let mut named = HashSet::new();
                names.retain(|name| named.insert(*name));
                let named = names.into_iter().map(workload);
                let recorded =
                    recordings.iter().map(|it| Arc::new(Simulated::Recording(Arc::clone(it))));
                named.chain(recorded).collect()
            }
        };
        let orders = orders(&args.set.set);
        Ok(Self {
            args,
            profile: profile::bundled(PROFILE)?,
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
        host::print(host, out, style.width)?;
        if let Some(noise) = noise(reports) {
            host::print_noise(noise, out, style.width)?;
        }
        faults::print(&self.faults, out, style)?;
        many::print(&self.many, out, style)?;
        programs::print(out, &programs(reports).collect::<Vec<_>>(), style)?;
        defaults::print(&self.defaults, out, style)?;
        if !details {
            let versus = if cfg!(feature = "machine") { " versus (beside Linux)," } else { "" };
            let more = format!(
                "More: compare --details; faultless scale (other numbers of CPUs),{versus} advise \
                 (for the Linux that runs now)."
            );
            writeln!(out, "{}", filled(&more, style.width))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        args: CompareArgs,
    }

    fn args(words: &[&str]) -> CompareArgs {
        let words = ["compare", "--quick"].iter().chain(words);
        Command::try_parse_from(words).expect("valid arguments").args
    }

    #[test]
    fn each_named_workload_has_one_row_on_many_cpus() {
        let args = args(&["--only", "pft", "--only", "small_allocs", "pft"]);
        let scale = scale(&args);
        let subjects = named(&args.chosen(), &scale).expect("workloads");
        // Both workloads under both topics.
        assert_eq!(subjects.len(), 4);
        let screen = Screen::new(&args, &subjects, &scale).expect("workloads");
        let rows: Vec<_> = screen.many.iter().map(|subject| subject.name()).collect();
        assert_eq!(rows, ["pft", "small_allocs"]);
    }

    #[test]
    fn recording_named_in_two_forms_is_compared_once() {
        let args = args(&["sort", "replay:sort"]);
        let scale = scale(&args);
        let subjects = named(&args.chosen(), &scale).expect("a recording");
        // Under both topics.
        assert_eq!(subjects.len(), 2);
        let screen = Screen::new(&args, &subjects, &scale).expect("a recording");
        assert_eq!((screen.many.len(), screen.recordings.len()), (1, 1));
    }
}
