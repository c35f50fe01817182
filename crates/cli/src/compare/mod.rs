//! `faultless compare`, the main job: every workload and recording under every locking policy with
//! prefault off, and then under one policy with prefault up to higher and higher orders.
//!
//! The configurations of a workload take turns, in another order each round: other load of the machine
//! affects all of them alike, and their ratios are of one period of time. Results are printed and
//! written as each workload ends; the summary comes last.

mod subject;
mod summary;

pub use subject::ENTRIES;

use crate::args::CompareArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::report;
use crate::report::columns::Report;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::run;
use crate::settings::{Settings, policies, regimes};
use faultless::PAGE_SIZE;
use std::path::Path;
use subject::{Choice, Scale, subjects};

/// Memory of the workloads' machine in bytes, and for each thread.
const MEMORY: u64 = 256 << 20;
const MEMORY_PER_THREAD: u64 = 32 << 20;
/// Frames of the pool of pre-zeroed ones, where there is one: what the largest of the workloads touches, and more.
const POOL: u64 = (160 << 20) / PAGE_SIZE;
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
    let inputs: Vec<_> = args.only.iter().map(Path::new).collect();
    let mut json = Json::open(&args.json, &inputs)?;
    let choice = Choice {
        policies: policies(&args.set.set),
        regimes: regimes(&args.set.set, POOL),
        settings: Settings::new(&args.set.set),
    };
    let memory = MEMORY + MEMORY_PER_THREAD * threads as u64;
    let native = run::machine(memory, threads)?;
    let busy = load_average().filter(|load| *load > 0.3 * host as f64);
    let (mut out, style) = report::output(&args.json);

    let steps = subjects.iter().map(|s| s.rounds(&scale) * s.width(&choice)).sum::<usize>();
    let progress = Progress::new(steps as u64);
    let mut all: Vec<(String, Report)> = Vec::new();
    let mut failures = Vec::new();
    for subject in subjects {
        if interrupt::requested() {
            break;
        }
        let (name, rounds) = (subject.name(), subject.rounds(&scale));
        progress.begin(&name);
        let Some((mut report, ready)) = subject.prepare(&native, &choice)? else { break };
        let columns = &mut report.columns;
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
                    Ok(sample) => sample.into_iter().for_each(|sample| columns[at].push(sample)),
                    Err(error) => {
                        failed[at] = true;
                        failures.push(error.to_string());
                    }
                }
            }
            progress.advance(1);
        }
        if !report.is_empty() {
            progress.print(|| report.print(&mut *out, style))?;
            report.json(&mut json)?;
            all.push((name, report));
        }
    }
    drop(progress);
    summary::print(&mut *out, &all, &choice, style)?;
    if let Some(load) = busy.filter(|_| !all.is_empty()) {
        writeln!(
            out,
            "The host was busy at the start (load average {load} on {host} CPUs), so ratios vary from \
             run to run."
        )?;
    }
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    if failures.is_empty() { json.complete() } else { Err(CliError::Failed(failures.join("\n"))) }
}

/// Runnable threads of the host, averaged over the last minute.
fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}
