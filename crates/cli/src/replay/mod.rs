//! `faultless replay`: replays a recorded program on the subsystem, or a trace of addresses on
//! simulated TLBs.

pub mod act;
mod addresses;
pub mod ahead;
pub mod engine;
pub mod fidelity;
mod gate;
mod page;
pub mod source;

use crate::args::ReplayArgs;
use crate::compare::programs;
use crate::compare::turns::Turns;
use crate::error::CliError;
use crate::html::{Drawing, Html};
use crate::interrupt;
use crate::output;
use crate::report::columns::{Column, Report, Topic};
use crate::report::effect::Effect;
use crate::report::json::{Context, Json, Number};
use crate::report::number::{grouped, plural};
use crate::report::perf_stat::PerfStat;
use crate::report::progress::Progress;
use crate::report::{self, say};
use crate::run;
use crate::settings::{Settings, ahead_of_policies, policies};
use engine::{ReplayError, Replayed};
use faultless_native::Native;
use faultless_trace::Header;
use fidelity::Fidelity;
use serde_json::Map;
use source::{Input, Source};
use std::io::Write;
use std::sync::Arc;

/// Replays of each policy with `--policies`, the same number as in `compare`.
const TURNS: Turns = Turns::PROGRAMS;

/// Replays a recording.
pub fn run(args: &ReplayArgs) -> Result<(), CliError> {
    let progress = Progress::on_terminal(3);
    progress.begin("reads the recording");
    let opened = source::open(&args.recording)?;
    drop(progress);
    let source = match opened {
        Input::Recording(source) => Arc::new(*source),
        Input::Addresses(name, trace) => return addresses::run(args, &name, trace),
    };
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
    let native = run::machine(source.memory(), source.cpus())?;
    if args.policies {
        let policies = policies(&args.set.set);
        let ahead = ahead_of_policies(&args.set.set);
        let columns: Vec<_> = policies
            .into_iter()
            .map(|locking| {
                let settings = settings.with_locking(locking).with_ahead(ahead);
                Column::new(locking.name(), source.context(&settings), Some(settings))
            })
            .collect();
        let title = format!("replay:{}, prefault {}", source.name, ahead.name());
        let (unit, topic) = ("operations", Topic::Locking);
        let mut report = Report { title, unit, topic, columns };
        let progress = Progress::new((TURNS.most * report.columns.len()) as u64);
        progress.begin(&report.title);
        let sample = |column: &Column| {
            let replayed = once(&native, &source, column.settings().unwrap_or(&settings))?;
            Ok(replayed.complete.then_some(replayed.sample))
        };
        let failed = TURNS.run(&mut report, sample, |steps| progress.advance(steps));
        drop(progress);
        if let Some(error) = failed.into_iter().next() {
            return Err(error);
        }
        let mut text = Vec::new();
        report.print(&mut text, style)?;
        programs::print(&mut text, &[(&source.name, &report)], style)?;
        out.write_all(&text)?;
        report.json(&mut json)?;
        if let Some((fidelity, _)) = fidelity(&source, &report) {
            writeln!(
                out,
                "recorded faults: {}, {}",
                grouped(fidelity.recorded),
                fidelity.remark()
            )?;
        }
        tell_report(&source, &report, &mut json)?;
        if interrupt::requested() {
            writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
        }
        plot.write(|| page::plot(&source, &settings))?;
        html.write(|| page::page(&source, &settings, &String::from_utf8_lossy(&text)))?;
        return json.complete();
    }
    let progress = Progress::on_terminal(3);
    progress.begin("replays the recording");
    let mut replayed = once(&native, &source, &settings)?;
    progress.advance(1);
    let context = source.context(&settings);
    if settings.ahead.order > 0 {
        progress.begin("replays the recording with and without prefault");
    }
    // Counted in a separate replay, because examining the pages takes time.
    let effects = match replayed.complete && settings.ahead.order > 0 {
        true => ahead::effects(&source, &settings, &[settings.ahead])?.unwrap_or_default(),
        false => Vec::new(),
    };
    drop(progress);
    let faults_off = match effects.first() {
        Some(effect) => {
            replayed.sample = effect.told(replayed.sample);
            Some(effect.faults_off)
        }
        None => Some(replayed.sample.faults).filter(|_| settings.ahead.order == 0),
    };
    let fidelity = faults_off.filter(|_| replayed.complete);
    let fidelity = fidelity.map(|faults| Fidelity::new(&source.trace, faults));
    let text = counters(&source, &settings, &replayed, &effects, fidelity).to_string();
    writeln!(out, "{text}\n")?;
    if replayed.complete {
        native.audit(&[]).map_err(|discrepancy| {
            CliError::failed("frames do not add up after the replay", discrepancy)
        })?;
    }
    json.sample(&context, &replayed.sample)?;
    effects.iter().try_for_each(|effect| effect.json(&mut json, &context))?;
    for (metric, count) in [
        ("madvise_calls_left_out", replayed.advice_ignored),
        ("mappings_beyond_memory", replayed.unreserved),
    ] {
        json.write(&context, metric, "count", Number::Whole(count))?;
    }
    fidelity.map_or(Ok(()), |fidelity| tell(fidelity, &source.name, &mut json, &context))?;
    plot.write(|| page::plot(&source, &settings))?;
    html.write(|| page::page(&source, &settings, &text))?;
    json.complete()
}

/// Returns the fidelity and the context of the first configuration of `report`, a replay of
/// `source`, if its prefault is off.
fn fidelity<'r>(source: &Source, report: &'r Report) -> Option<(Fidelity, &'r Context)> {
    let first = report.columns.first()?;
    first.settings().filter(|settings| settings.ahead.order == 0)?;
    Some((Fidelity::new(&source.trace, first.median()?.faults), &first.context))
}

/// Reports whether the faults of `report`, a replay of `source`, match the recorded faults, with a
/// warning if they do not.
pub fn tell_report(source: &Source, report: &Report, json: &mut Json) -> Result<(), CliError> {
    let told = fidelity(source, report);
    told.map_or(Ok(()), |(fidelity, context)| tell(fidelity, &source.name, json, context))
}

/// Reports whether the faults match the recorded faults, with a warning if they do not.
fn tell(
    fidelity: Fidelity,
    name: &str,
    json: &mut Json,
    context: &Context,
) -> Result<(), CliError> {
    if let Some(warning) = fidelity.warning(name) {
        say!("faultless: {warning}");
    }
    fidelity.json(json, context)
}

/// Replays once under `settings`.
pub fn once(native: &Native, source: &Source, settings: &Settings) -> Result<Replayed, CliError> {
    settings.apply(native);
    engine::replay(native, &source.plan, interrupt::requested)
        .map_err(|error| failed(source, settings, error))
}

fn failed(source: &Source, settings: &Settings, error: ReplayError) -> CliError {
    CliError::failed(format_args!("replay of {} under {}", source.name, settings.label()), error)
}

impl Source {
    /// Returns the context of a replay under `settings`.
    pub fn context(&self, settings: &Settings) -> Context {
        Context {
            machine: "native".into(),
            workload: format!("replay:{}", self.name),
            cpus: self.cpus(),
            setting: settings.label(),
            params: Map::from_iter([
                ("recording".to_owned(), self.name.as_str().into()),
                ("program".to_owned(), self.trace.header.program.as_str().into()),
                ("threads".to_owned(), self.trace.threads.len().into()),
                ("processes".to_owned(), self.trace.processes.len().into()),
            ]),
            knobs: settings.knobs(),
        }
    }
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
        stat.row(replayed.advice_ignored, "madvise calls left out", "");
    }
    if replayed.unreserved > 0 {
        stat.row(replayed.unreserved, "mappings beyond memory", "made with MAP_NORESERVE");
    }
    if let Some(fidelity) = fidelity {
        stat.row(fidelity.recorded, "recorded faults", fidelity.remark());
    }
    for (count, name, remark) in effects.iter().flat_map(Effect::rows) {
        stat.row(count, name, remark);
    }
    stat.time(sample.wall, "time elapsed");
    stat.time(sample.user, "user");
    stat.time(sample.system, "sys");
    stat
}
