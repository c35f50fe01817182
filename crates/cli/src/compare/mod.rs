//! `faultless compare`, the main job: every workload and recording under every policy.
//!
//! The configurations of a workload take turns, in another order each round: what else the machine
//! does hits all alike, and their ratios are of one stretch of time. Results are printed and
//! written as each workload ends; the summary comes last, where the eye is.

mod subject;

use crate::args::CompareArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::report::bars::{self, Bar};
use crate::report::columns::{Column, Measure, Report};
use crate::report::json::Json;
use crate::report::number::scaled;
use crate::report::progress::Progress;
use crate::report::table;
use crate::report::{self, Style};
use crate::run;
use crate::settings::{Settings, policies};
use faultless::Locking;
use std::io::Write;
use subject::{Scale, subjects};

/// Memory of the workloads' machine in bytes, and for each thread.
const MEMORY: u64 = 256 << 20;
const MEMORY_PER_THREAD: u64 = 32 << 20;
/// Threads where none are asked for, at most.
const THREADS: usize = 16;

/// Compares.
pub fn run(args: &CompareArgs) -> Result<(), CliError> {
    let host = std::thread::available_parallelism().map_or(2, usize::from);
    let threads = args.threads.map_or(host.min(THREADS), usize::from);
    let scale = if args.quick {
        Scale { threads, seconds: 0.03, rounds: 5, replays: 3 }
    } else {
        Scale { threads, seconds: 0.06, rounds: 15, replays: 9 }
    };
    let subjects = subjects(&args.only, &scale)?;
    let mut json = Json::open(args.json.json.as_deref())?;
    let policies = policies(&args.set.set);
    let settings = Settings::new(&args.set.set);
    let memory = MEMORY + MEMORY_PER_THREAD * threads as u64;
    let native = run::machine(memory, threads)?;
    let busy = load_average().filter(|load| *load > 0.3 * host as f64);
    let (mut out, style) = report::output(&args.json);

    let steps = subjects.iter().map(|s| s.rounds(&scale) * s.width(&policies)).sum::<usize>();
    let progress = Progress::new(steps as u64);
    let mut reports = Vec::new();
    let mut failures = Vec::new();
    for subject in subjects {
        if interrupt::requested() {
            break;
        }
        let (name, rounds) = (subject.name(), subject.rounds(&scale));
        progress.begin(&name);
        let (title, unit, mut columns, ready) = subject.prepare(&native, &policies, &settings)?;
        let width = columns.len();
        let mut failed = vec![false; width];
        for turn in 0..rounds * width {
            // Each round begins with another configuration.
            let at = (turn / width + turn % width) % width;
            if interrupt::requested() {
                break;
            }
            if !failed[at] {
                match ready.sample(&columns[at]) {
                    Ok(sample) => columns[at].samples.extend(sample),
                    Err(error) => {
                        failed[at] = true;
                        failures.push(error.to_string());
                    }
                }
            }
            progress.advance(1);
        }
        let report = Report { title, unit, columns };
        if !report.is_empty() {
            progress.print(|| report.print(&mut *out, style))?;
            report.json(&mut json)?;
            reports.push((name, report));
        }
    }
    drop(progress);
    summary(&mut *out, &reports, &policies, style)?;
    if let Some(load) = busy.filter(|_| !reports.is_empty()) {
        writeln!(
            out,
            "The host was busy at the start (load average {load} on {host} CPUs): take ratios near 1 as \
             noise."
        )?;
    }
    if interrupt::requested() {
        writeln!(out, "Interrupted: this is what there was.")?;
    }
    if failures.is_empty() { Ok(()) } else { Err(CliError::Failed(failures.join("\n"))) }
}

/// Runnable threads of the host, averaged over the last minute.
fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// The column of a policy, or of Linux; of several settings of a policy the last, the default.
fn column(report: &Report, locking: Option<Locking>) -> Option<&Column> {
    let of = |column: &&Column| column.settings().map(|settings| settings.locking) == locking;
    report.columns.iter().rev().find(of)
}

fn rate(report: &Report, locking: Option<Locking>) -> Option<f64> {
    column(report, locking)?.median().map(|sample| report.measure().rate(sample))
}

fn gain(report: &Report, of: Locking, over: Locking) -> Option<f64> {
    report.gain(column(report, Some(of))?, column(report, Some(over))?)
}

/// The picture of the whole: what the last policy makes of the first.
fn gains(
    out: &mut dyn Write,
    reports: &[(String, Report)],
    policies: &[Locking],
    style: Style,
) -> Result<(), CliError> {
    let (Some(&first), Some(&last)) = (policies.first(), policies.last()) else { return Ok(()) };
    let bar = |(name, report): &(String, Report)| {
        let value = gain(report, last, first)?;
        Some(Bar { name: name.clone(), value, note: String::new() })
    };
    let bars: Vec<_> = reports.iter().filter_map(bar).collect();
    writeln!(out, "\nSummary")?;
    if first != last && !bars.is_empty() {
        writeln!(out, "  {} against {}", last.name(), first.name())?;
        writeln!(out, "{}", bars::draw(&bars, |gain| format!("{gain:.2}x"), style))?;
    }
    Ok(())
}

/// A row a workload: its rate under each policy, and what the last policy makes of the first.
fn summary(
    out: &mut dyn Write,
    reports: &[(String, Report)],
    policies: &[Locking],
    style: Style,
) -> Result<(), CliError> {
    if reports.is_empty() {
        return Ok(());
    }
    let linux = reports.iter().flat_map(|(_, report)| &report.columns);
    let linux = linux.map(|column| &column.context.machine).find(|machine| *machine != "native");
    gains(out, reports, policies, style)?;
    let mut head = vec!["per second".to_owned(), "of".to_owned()];
    head.extend(policies.iter().map(|locking| locking.name().to_owned()));
    let last = policies.last().map_or("", |locking| locking.name());
    for earlier in policies.iter().rev().skip(1).rev() {
        head.push(format!("{last}\n/ {}", earlier.name()));
    }
    head.extend(linux.cloned());
    let mut table = table::numbers(&head, style);
    for (name, report) in reports {
        let of = match report.measure() {
            Measure::Faults => "faults",
            Measure::Operations => report.unit,
        };
        let show = |rate: Option<f64>| rate.map_or("-".to_owned(), |r| scaled(r).trim().to_owned());
        let mut cells = vec![name.clone(), of.to_owned()];
        cells.extend(policies.iter().map(|policy| show(rate(report, Some(*policy)))));
        if let Some((last, earlier)) = policies.split_last() {
            for policy in earlier {
                let gain = gain(report, *last, *policy);
                cells.push(gain.map_or("-".to_owned(), |gain| format!("{gain:.2}x")));
            }
        }
        if linux.is_some() {
            cells.push(show(rate(report, None)));
        }
        table::row(&mut table, cells);
    }
    writeln!(out, "{table}")?;
    if let Some(linux) = linux {
        writeln!(
            out,
            "{linux} is this host's kernel: each of its faults pays the hardware exception, which the \
             native\nmachine's software MMU does not; each native load and store pays the software MMU, \
             which the\nhost's do not. Compare policies within native; take {linux} as the scale."
        )?;
    }
    Ok(())
}
