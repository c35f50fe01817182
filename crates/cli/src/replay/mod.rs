//! `faultless replay`: replays a recorded program on the subsystem, or a trace of addresses on
//! simulated TLBs.

mod addresses;
mod fidelity;
mod page;
pub mod source;

use crate::compare::programs;
use crate::error::CliError;
use crate::html::{Drawing, Html, HtmlArgs};
use crate::interrupt;
use crate::output;
use crate::report::effect;
use crate::report::json::Json;
use crate::report::perf_stat::PerfStat;
use crate::report::progress::Progress;
use crate::report::{self, JsonArgs, Style, columns};
use crate::set::SetArgs;
use faultless::Locking;
use faultless_analysis::columns::{Column, Report, Topic};
use faultless_analysis::number::{grouped, plural};
use faultless_analysis::replay::{Effect, Fidelity, Replayed, Source, once, prefault};
use faultless_analysis::settings::{Settings, regime_of_policies};
use faultless_analysis::turns::Turns;
use faultless_analysis::{Figures, Number, Observer, run};
use faultless_native::Native;
use faultless_trace::Header;
pub use fidelity::print_report;
use source::Input;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Replays of each policy with `--policies`, the same number as in `compare`.
const TURNS: Turns = Turns::PROGRAMS;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless replay python
  faultless replay perf.data --set locking=per_vma
  faultless replay python --set prefault_max_order=5
  faultless replay app.fltrace --policies --json app.jsonl
  faultless replay app.fltrace --html app.html
  faultless replay app.fltrace --plot app.svg
  faultless replay app.lackey       TLB misses of a trace of addresses")]
pub struct ReplayArgs {
    /// Replay this recording or trace of addresses: a file, - for standard input, or the name of a
    /// bundled one
    #[arg(value_name = "FILE|NAME")]
    pub recording: PathBuf,
    #[command(flatten)]
    pub set: SetArgs,
    /// Compare the locking policies instead of running a single policy; prefault is off
    /// (prefault_max_order=0) unless --set gives an order
    #[arg(long)]
    pub policies: bool,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
    /// Draw the faults with prefault off and on, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

/// Replays a recording.
pub fn run(args: &ReplayArgs) -> Result<(), CliError> {
    args.set.one_value_each(&[])?;
    let locking = args.set.set.iter().find(|set| set.locking().is_some());
    if let Some(set) = locking.filter(|_| args.policies) {
        let why = "--policies compares all policies of locking: use one of the two options";
        return Err(CliError::Usage(format!("--set {}: {why}", set.text())));
    }
    let source = match source::open(&args.recording)? {
        Input::Recording(source) => Arc::new(source.replayable()?),
        Input::Sampled(name, trace) => {
            let why = trace.header.every_fault().err().unwrap_or_default();
            return Err(CliError::Usage(format!("{name}: {why}")));
        }
        Input::Addresses(name, trace) => return addresses::run(args, &name, trace),
    };
    if args.html.html.is_some() {
        // The page shows simulated CPUs.
        source.simulated_cpus()?;
    }
    output::apart(&[
        ("--json", args.json.json.as_deref()),
        ("--html", args.html.html.as_deref()),
        ("--plot", args.plot.as_deref()),
    ])?;
    let html = Html::open(&args.html, &[&args.recording])?;
    let plot = Drawing::open("--plot", args.plot.as_deref(), &[&args.recording])?;
    let mut json = Json::open(&args.json, &[&args.recording])?;
    let settings = Settings::new(&args.set.set);
    let (mut out, style) = report::output(&args.json);
    describe(&mut *out, &source)?;
    let text = if args.policies {
        let native = run::machine(source.memory(), source.cpus())?;
        under_policies(args, &native, &source, (&mut *out, style), &mut json)?
    } else {
        under(&settings, &source, &mut *out, &mut json)?
    };
    plot.write(|| page::plot(&source, &settings))?;
    html.write(|| page::page(&source, &settings, &text))?;
    json.complete()
}

/// Replays `source` under each policy, and prints the comparison. Returns the tables as text.
fn under_policies(
    args: &ReplayArgs,
    native: &Native,
    source: &Source,
    (out, style): (&mut dyn Write, Style),
    json: &mut Json,
) -> Result<String, CliError> {
    let settings = Settings::new(&args.set.set);
    let regime = regime_of_policies(&args.set.set);
    let columns: Vec<_> = Locking::ALL
        .into_iter()
        .map(|locking| {
            let settings = settings.with_locking(locking).with_regime(regime);
            Column::new(locking.name(), source.context(&settings), Some(settings))
        })
        .collect();
    let title = format!("replay:{}, prefault {}", source.name, regime.name());
    let (unit, topic) = ("operations", Topic::Locking);
    let mut report = Report { title, unit, topic, columns };
    let progress = Progress::new((TURNS.most * report.columns.len()) as u64);
    progress.begin(&report.title);
    let sample = |column: &Column| {
        let replayed = once(native, source, column.settings().unwrap_or(&settings))?;
        Ok(replayed.complete.then_some(replayed.sample))
    };
    let failed = TURNS.run(&mut report, sample, |steps| progress.advance(steps));
    drop(progress);
    if let Some(error) = failed.into_iter().next() {
        return Err(error.into());
    }
    let mut text = Vec::new();
    columns::print(&report, &mut text, style)?;
    programs::print(&mut text, &[(&source.name, &report)], style)?;
    out.write_all(&text)?;
    report.figures(json)?;
    if let Some((fidelity, _)) = fidelity::fidelity(source, &report) {
        writeln!(out, "recorded faults: {}, {}", grouped(fidelity.recorded), fidelity.remark())?;
    }
    print_report(source, &report, json)?;
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Replays `source` under `settings`, and prints the counters. Returns them as text.
fn under(
    settings: &Settings,
    source: &Source,
    out: &mut dyn Write,
    json: &mut Json,
) -> Result<String, CliError> {
    let progress = Progress::on_terminal(3);
    progress.begin("replays the recording");
    let mut replayed = {
        // Its memory is free again before the other replays.
        let native = run::machine(source.memory(), source.cpus())?;
        let replayed = once(&native, source, settings)?;
        if replayed.complete {
            native.audit(&[]).map_err(|discrepancy| {
                CliError::failed("frames do not add up after the replay", discrepancy)
            })?;
        }
        replayed
    };
    progress.advance(1);
    let context = source.context(settings);
    if settings.regime.order > 0 {
        progress.begin("replays the recording with and without prefault");
    }
    // Counted in a separate replay, because examining the pages takes time.
    let effects = match replayed.complete && settings.regime.order > 0 {
        true => prefault::effects(source, settings, &[settings.regime])?.unwrap_or_default(),
        false => Vec::new(),
    };
    drop(progress);
    let faults_off = match effects.first() {
        Some(effect) => {
            replayed.sample = effect.counted_in(replayed.sample);
            Some(effect.faults_off)
        }
        None => Some(replayed.sample.faults).filter(|_| settings.regime.order == 0),
    };
    let fidelity = faults_off.filter(|_| replayed.complete);
    let fidelity = fidelity.map(|faults| Fidelity::new(&source.trace, faults));
    let text = counters(source, settings, &replayed, &effects, fidelity).to_string();
    writeln!(out, "{text}\n")?;
    json.sample(&context, &replayed.sample)?;
    effects.iter().try_for_each(|effect| effect.figures(json, &context))?;
    for (metric, count) in [
        ("madvise_calls_left_out", replayed.advice_ignored),
        ("mappings_beyond_memory", replayed.unreserved),
    ] {
        json.write(&context, metric, "count", Number::Whole(count))?;
    }
    if let Some(fidelity) = fidelity {
        fidelity::print(fidelity, &source.name, json, &context)?;
    }
    Ok(text)
}

fn describe(out: &mut dyn Write, source: &Source) -> Result<(), CliError> {
    let header = &source.trace.header;
    writeln!(out, "\n {}: a recording of the program {}", source.name, header.program)?;
    if !header.made.is_empty() {
        writeln!(out, "   made with   {}", header.made.replace('\n', " "))?;
    }
    if !header.kernel.is_empty() {
        let thp = if header.thp.is_empty() { "not known" } else { &header.thp };
        let Header { kernel, cpus, .. } = header;
        writeln!(
            out,
            "   recorded on Linux {kernel}, {}, huge pages {thp}",
            plural((*cpus).into(), "CPU")
        )?;
    }
    writeln!(out, "   it did      {}", source.trace.summary())?;
    for note in &header.notes {
        writeln!(out, "   note        {note}")?;
    }
    for assumption in source.plan.assumptions() {
        writeln!(out, "   assumed     {assumption}")?;
    }
    Ok(())
}

fn counters(
    source: &Source,
    settings: &Settings,
    replayed: &Replayed,
    effects: &[Effect],
    fidelity: Option<Fidelity>,
) -> PerfStat {
    let sample = &replayed.sample;
    let stopped = if replayed.complete { "" } else { ", interrupted" };
    let title = format!("'replay:{}' on native ({}){stopped}", source.name, settings.label());
    let mut stat = PerfStat::new(title);
    stat.rate(sample.operations, "operations", sample.wall);
    stat.counters(&sample.counters, sample.wall);
    if replayed.advice_ignored > 0 {
        stat.row(replayed.advice_ignored, "madvise calls omitted", "");
    }
    if replayed.unreserved > 0 {
        stat.row(replayed.unreserved, "mappings beyond memory", "created with MAP_NORESERVE");
    }
    if let Some(fidelity) = fidelity {
        stat.row(fidelity.recorded, "recorded faults", fidelity.remark());
    }
    for (count, name, remark) in effects.iter().flat_map(effect::rows) {
        stat.row(count, name, remark);
    }
    stat.time(sample.wall, "time elapsed");
    stat.time(sample.user, "user");
    stat.time(sample.system, "sys");
    stat
}
