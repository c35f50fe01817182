//! `faultless stat`: one run of one workload, in the form of `perf stat`.

use crate::error::CliError;
use crate::export::{Export, ExportArgs, Kept};
use crate::html::{Html, HtmlArgs, Page};
use crate::interrupt;
use crate::output;
use crate::profile;
use crate::report::json::Json;
use crate::report::perf_stat::PerfStat;
use crate::report::{self, JsonArgs, say};
use crate::scale::page::{latencies, time};
use crate::set::SetArgs;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser};
use faultless_analysis::number::plural;
use faultless_analysis::scale::{PROFILE, Subject};
use faultless_analysis::settings::Settings;
use faultless_analysis::{Context, Error, Figures, Sample, host, run};
use faultless_virtual::rates::Operation;
use faultless_workload::{Linux, Outcome, PFT_HEADER, System, Workload};
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless stat pft size=256M threads=2
  faultless stat page_fault1 seconds=2 --set locking=mmap_lock
  faultless stat pft --set prefault_max_order=5 --set zeroed_pool=40000
  faultless stat ebizzy threads=4 --machine linux")]
pub struct StatArgs {
    /// Run this workload
    #[arg(value_parser = PossibleValuesParser::new(workloads()))]
    pub workload: String,
    /// Set parameters of the workload, such as `threads=2`; `faultless workloads` lists them
    #[arg(value_name = "KEY=VALUE")]
    pub params: Vec<String>,
    #[command(flatten)]
    pub set: SetArgs,
    /// Select the machine that runs the workload
    #[arg(long, value_enum, default_value_t = MachineArg::Native)]
    pub machine: MachineArg,
    #[command(flatten)]
    pub export: ExportArgs,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
}

/// The workloads: clap lists them, and suggests a similar name for a wrong one.
fn workloads() -> Vec<PossibleValue> {
    let all = faultless_workload::all().iter();
    all.map(|info| PossibleValue::new(info.name).help(info.summary)).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MachineArg {
    /// The subsystem, on threads with a software MMU and TLB each
    Native,
    /// The host's own kernel
    Linux,
}

/// The divisor of the memory written that gives the largest size of Linux's page tables for
/// adjacent pages.
const PAGE_TABLES: u64 = 256;

/// Runs one workload.
pub fn run(args: &StatArgs) -> Result<(), CliError> {
    args.set.one_value_each(&[])?;
    let workload = Workload::parse(&args.workload, &args.params).map_err(Error::Parameter)?;
    if args.machine == MachineArg::Linux && args.html.html.is_some() {
        let why = "--html shows simulated CPUs, and --machine linux runs on the host's kernel: use one of the two";
        return Err(CliError::Usage(why.into()));
    }
    args.export.without_stacks()?;
    let outputs = [("--json", args.json.json.as_deref()), ("--html", args.html.html.as_deref())];
    output::apart(&outputs.into_iter().chain(args.export.files()).collect::<Vec<_>>())?;
    let export = Export::open(&args.export, &[])?;
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
                return Err(CliError::Usage("--set has no effect with --machine linux".into()));
            }
            let written = workload.needs().written;
            if workload.needs().tiers.is_some() {
                say!(
                    "faultless: the host's memory is unchanged: fast and ratio only set the size of the used memory"
                );
            }
            host::afford(&title, written.saturating_add(written / PAGE_TABLES))?;
            let outcome = run::on_linux(&workload).map_err(|error| match interrupt::requested() {
                true => {
                    let why = "interrupted; Linux reports its counts only at the end of a workload: limit it with seconds=N";
                    CliError::failed(&title, why)
                }
                false => error.into(),
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
    json.outcome(&context, &outcome, &sample)?;
    if export.has_figures() {
        let mut kept = Kept::default();
        kept.outcome(&context, &outcome, &sample)?;
        export.figures(&kept)?;
    }
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
    let profile = profile::bundled(PROFILE)?;
    let Some((ran, _)) = subject.run(&profile, cpus, 0, settings)? else { return Ok(None) };
    let on = plural(cpus as u64, "CPU");
    let runs = [(settings.locking.name().to_owned(), &ran)];
    let mut page = Page::new(workload);
    page.plot(
        "Time by activity",
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

fn native(
    title: &str,
    settings: &Settings,
    workload: &Workload,
    (out, json, context): (&JsonArgs, &Arc<Mutex<Json>>, &Context),
) -> Result<(Outcome, Sample), CliError> {
    let native = run::machine_for(workload)?;
    // Shared with the handler of Ctrl-C, which may run until the process ends.
    let native = &*Box::leak(Box::new(native));
    let (started, before) = (Instant::now(), native.vm().totals());
    let title =
        format!("{title} on native ({}), interrupted; with its preparation", settings.label());
    let (json, context) = (Arc::clone(json), context.clone());
    let (mut text, _) = report::output(out);
    let guard = interrupt::on_request(move || {
        let seconds = started.elapsed().as_secs_f64();
        let counters = Sample::counters(&native.vm().totals().since(&before));
        let mut json = json.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stat = PerfStat::new(title);
        stat.counters(&counters, seconds);
        stat.time(seconds, "time elapsed");
        let written = writeln!(text, "{stat}\n").map_err(CliError::from);
        let written = written.and_then(|()| Ok(json.interrupted(&context, &counters, seconds)?));
        if let Err(error) = written {
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
    let has_row = outcome.pft_row().is_some();
    for (name, value) in outcome.extras.iter().filter(|_| !has_row) {
        stat.rate(*value as u64, name, outcome.wall);
    }
    stat.time(outcome.wall, "time elapsed");
    stat.time(outcome.user, "user");
    stat.time(outcome.system, "sys");
    stat
}
