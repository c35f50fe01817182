//! `faultless stat`: one run of one workload, in the form of `perf stat`.

use crate::args::{JsonArgs, MachineArg, StatArgs};
use crate::error::CliError;
use crate::host;
use crate::html::{Html, Page};
use crate::interrupt;
use crate::output;
use crate::profiles;
use crate::report::json::{Context, Json, Number};
use crate::report::number::plural;
use crate::report::perf_stat::PerfStat;
use crate::report::{self, say};
use crate::run::{self, Sample};
use crate::scale::page::{latencies, time};
use crate::scale::subject::{PROFILE, Subject};
use crate::settings::Settings;
use crate::suggest;
use faultless_virtual::rates::Operation;
use faultless_workload::{Kind, Linux, Outcome, PFT_HEADER, ParamError, Pft, System, Workload};
use serde_json::{Map, Value};
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Memory of the native machine beyond the requirement of the workload, in bytes.
const SPARE: u64 = 128 << 20;
/// The divisor of the memory written that gives the largest size of Linux's page tables for
/// adjacent pages.
const PAGE_TABLES: u64 = 256;

/// Runs one workload.
pub fn run(args: &StatArgs) -> Result<(), CliError> {
    let workload = Workload::parse(&args.workload, &args.params)
        .map_err(|error| CliError::Usage(explained(&error)))?;
    if args.machine == MachineArg::Linux && args.html.html.is_some() {
        let why = "--html shows simulated CPUs, and --machine linux runs on the host's kernel: give one of them";
        return Err(CliError::Usage(why.into()));
    }
    output::apart(&[("--json", args.json.json.as_deref()), ("--html", args.html.html.as_deref())])?;
    let html = Html::open(&args.html, &[])?;
    let json = Arc::new(Mutex::new(Json::open(&args.json, &[])?));
    let title = {
        let words: Vec<_> =
            std::iter::once(&args.workload).chain(&args.params).map(String::as_str).collect();
        format!("'{}'", words.join(" "))
    };
    let (outcome, sample, context) = match args.machine {
        MachineArg::Linux => {
            if !args.set.set.is_empty() {
                return Err(CliError::Usage("--set changes nothing on --machine linux".into()));
            }
            let written = workload.needs().written;
            if workload.needs().tiers.is_some() {
                say!(
                    "faultless: the host's memory stays unchanged: fast and ratio only set how much of it is used"
                );
            }
            host::afford(&title, written.saturating_add(written / PAGE_TABLES))?;
            let outcome = run::on_linux(&workload).map_err(|error| match error {
                CliError::Failed(_) if interrupt::requested() => {
                    let why = "interrupted; Linux reports its counts only at the end of a workload: limit it with seconds=N";
                    CliError::failed(&title, why)
                }
                error => error,
            })?;
            let sample = Sample::of(&outcome);
            (outcome, sample, Context::of(&workload, Linux::new().machine(), None))
        }
        MachineArg::Native => {
            let settings = Settings::new(&args.set.set);
            let context = Context::of(&workload, "native".into(), Some(&settings));
            let (outcome, sample) =
                native(&title, &settings, &workload, (&args.json, &json, &context))?;
            (outcome, sample, context)
        }
    };
    let (mut out, _) = report::output(&args.json);
    if let Some(row) = outcome.pft_row() {
        writeln!(out, "{PFT_HEADER}\n{row}")?;
    }
    let on = match args.machine {
        MachineArg::Native => format!("native ({})", context.setting),
        MachineArg::Linux => context.machine.clone(),
    };
    let text = counters(&format!("{title} on {on}"), &outcome, &sample).to_string();
    writeln!(out, "{text}\n")?;
    let mut json = json.lock().unwrap_or_else(PoisonError::into_inner);
    write_json(&mut json, &context, &outcome, &sample)?;
    html.write(|| page(&args.workload, context.cpus, &Settings::new(&args.set.set), &text))?;
    json.complete()
}

/// Returns the run as a page, with the cost of the workload's operations on the same number of
/// simulated CPUs.
fn page(
    workload: &str,
    cpus: usize,
    settings: &Settings,
    text: &str,
) -> Result<Option<Page>, CliError> {
    let subject = Arc::new(Subject::Workload(workload.to_owned(), Vec::new()));
    let profile = profiles::bundled(PROFILE)?;
    let Some((ran, _)) = subject.run(&profile, cpus, 0, settings)? else { return Ok(None) };
    let on = plural(cpus as u64, "CPU");
    let runs = [(settings.locking.name().to_owned(), &ran)];
    let mut page = Page::new(workload);
    page.plot(
        "Where the time goes",
        &format!("Time of each operation of a short run on {on}, simulated ({PROFILE}), divided by the activity of the CPU."),
        &time(&runs, subject.unit(), &on)?,
    );
    for (operation, name) in [(Operation::Fault, "faults"), (Operation::Map, "mmap and munmap")] {
        if let Some(picture) = latencies(&runs, operation, &format!("Latency of {name} on {on}"))? {
            let meaning =
                "Share of operations that take at most the time on the axis, in the same run.";
            page.plot(&format!("Latencies: {name}"), meaning, &picture);
        }
    }
    page.text("In figures", text);
    Ok(Some(page))
}

/// Returns the description of the error, with a suggestion for an unknown parameter.
pub fn explained(error: &ParamError) -> String {
    match error {
        ParamError::UnknownParam { name, known, .. } => {
            format!("{error}{}", suggest::hint(name, known.split(", ")))
        }
        _ => error.to_string(),
    }
}

fn native(
    title: &str,
    settings: &Settings,
    workload: &Workload,
    (out, json, context): (&JsonArgs, &Arc<Mutex<Json>>, &Context),
) -> Result<(Outcome, Sample), CliError> {
    let native = run::machine_for(workload)?;
    // Shared with the handler of Ctrl-C, which may run until the process ends.
    let native = &*Box::leak(Box::new(native));
    let started = Instant::now();
    let title = format!("{title} on native ({}), interrupted", settings.label());
    let (json, context) = (Arc::clone(json), context.clone());
    let (mut text, _) = report::output(out);
    let guard = interrupt::on_request(move || {
        let seconds = started.elapsed().as_secs_f64();
        let counters = Sample::counters(&native.vm().totals());
        let mut json = json.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stat = PerfStat::new(title);
        stat.counters(&counters, seconds);
        stat.time(seconds, "time elapsed");
        let told = writeln!(text, "{stat}\n").map_err(CliError::from);
        let told = told.and_then(|()| json.interrupted(&context, &counters, seconds));
        if let Err(error) = told {
            say!("faultless: {error}");
        }
        json.keep_partial();
        // The workload cannot be stopped in the middle.
        std::process::exit(interrupt::status());
    });
    let outcome = run::on_native(native, settings, workload)?;
    drop(guard);
    let sample = Sample::of(&outcome);
    Ok((outcome, sample))
}

/// Returns the memory of a native machine that suffices for the workload, with an eighth for
/// tables.
pub fn memory(workload: &Workload) -> u64 {
    let needs = workload.needs();
    let wanted = needs.written.max(needs.largest);
    wanted.saturating_add(wanted / 8).saturating_add(SPARE)
}

fn counters(title: &str, outcome: &Outcome, sample: &Sample) -> PerfStat {
    let mut stat = PerfStat::new(title);
    stat.rate(outcome.operations, outcome.unit, outcome.wall);
    if sample.counters.is_empty() {
        stat.rate(outcome.faults, "faults", outcome.wall);
    }
    stat.counters(&sample.counters, outcome.wall);
    for (name, count) in &outcome.left {
        stat.row(*count, name, "at the end");
    }
    if !outcome.allocations.is_empty() {
        stat.row(outcome.allocations.len() as u64, "allocations", "first touches");
    }
    for (of_thousand, name) in [(500, "p50"), (990, "p99"), (999, "p99.9")] {
        if let Some(took) = outcome.allocation(of_thousand) {
            stat.row(took.round() as u64, &format!("ns-allocation-{name}"), "of first touches");
        }
    }
    if let Some(mean) = outcome.footprint.mean() {
        stat.row(mean.round() as u64, "frames-in-use", "mean");
        stat.row(outcome.footprint.most, "frames-in-use", "at most");
    }
    // The classic row has reported these figures.
    let told = outcome.pft_row().is_some();
    for (name, value) in outcome.extras.iter().filter(|_| !told) {
        stat.rate(*value as u64, name, outcome.wall);
    }
    stat.time(outcome.wall, "time elapsed");
    stat.time(outcome.user, "user");
    stat.time(outcome.system, "sys");
    stat
}

/// Returns the parameters of `workload` in force: sizes in bytes, times in seconds.
pub fn params(workload: &Workload) -> Map<String, Value> {
    let value = |kind: Kind, value: u64| match kind {
        Kind::Count(..) | Kind::Size => value.into(),
        Kind::Seconds => (value as f64 / 1e6).into(),
        Kind::Choice(_) => kind.show(value).into(),
    };
    let params = workload.params();
    params.map(|(param, is)| (param.name.to_owned(), value(param.kind, is))).collect()
}

impl Context {
    /// Creates the context of a run of `workload` under `settings`, or on Linux, which has no
    /// settings.
    pub fn of(workload: &Workload, machine: String, settings: Option<&Settings>) -> Self {
        Self {
            machine,
            workload: workload.info().name.into(),
            cpus: workload.crew().workers,
            setting: settings.map_or("default".into(), Settings::label),
            params: params(workload),
            knobs: settings.map(Settings::knobs).unwrap_or_default(),
        }
    }
}

/// Writes the results of a run.
pub fn write_json(
    json: &mut Json,
    context: &Context,
    outcome: &Outcome,
    sample: &Sample,
) -> Result<(), CliError> {
    json.sample(context, sample)?;
    for (name, value) in &outcome.extras {
        let unit = if *name == Pft::GIGABYTES { "GiB" } else { "count" };
        json.write(context, name, unit, Number::Real(*value))?;
    }
    for (name, count) in &outcome.left {
        json.write(context, name, "count", Number::Whole(*count))?;
    }
    if !outcome.allocations.is_empty() {
        let count = Number::Whole(outcome.allocations.len() as u64);
        json.write(context, "allocations", "count", count)?;
    }
    for (of_thousand, name) in
        [(500, "allocation_p50"), (990, "allocation_p99"), (999, "allocation_p99_9")]
    {
        if let Some(took) = outcome.allocation(of_thousand) {
            json.write(context, name, "ns", Number::Real(took))?;
        }
    }
    if let Some(mean) = outcome.footprint.mean() {
        json.write(context, "frames_in_use_mean", "count", Number::Real(mean))?;
        json.write(context, "frames_in_use_most", "count", Number::Whole(outcome.footprint.most))?;
    }
    Ok(())
}
