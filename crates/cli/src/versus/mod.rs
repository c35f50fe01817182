//! `faultless versus`: the same program files on the bare machine and on a stock Linux, in the same
//! QEMU, on a clock that counts instructions.
//!
//! `rows` measures what faults and calls cost with one CPU; `counts` counts faults and shootdowns with
//! several. Each boot is by itself and its figures do not depend on what else the host does, so boots
//! run side by side on the host's CPUs.

mod counts;
mod figures;

use crate::args::VersusArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::report::json::{Context, Json, Number};
use crate::report::progress::Progress;
use crate::report::{self, Style, table};
use faultless_boot::linux::{LinuxMachine, Stock};
use faultless_boot::{Clock, End, Guest, Limits, Machine, Program, Streams, guest};
use figures::{Figure, figures};
use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Memory of either machine, and its CPU: without fast strings, both zero a page with the same count.
const MEMORY: u64 = 1 << 30;
const CPU: &str = "max,-erms";
/// A boot that takes longer does not end at all.
const PATIENCE: Duration = Duration::from_secs(600);

/// What Linux does in these figures, and the bare kernel does not.
const LINUX_ALSO: &str = "\
Linux's figures include what a general kernel does besides and ours does not: charging pages and page
tables to memory cgroups, zeroing every page as it is allocated (init_on_alloc, also those that are copied
over at once), NUMA policy, the lists and marks of reclaim, accounting per process and zone, hooks of
security modules, and the tick of its scheduler. Both zero a page with the same 512 stores of `rep stosq`.";

/// What the counts are.
const COUNTED: &str = "\
Faults are `pgfault` of /proc/vmstat, and are to be no more than on Linux. Shootdowns are requests that made
another CPU drop translations, the row TLB of /proc/interrupts; where they are to be `none`, no other CPU can
hold a translation of what changes.";

/// A kernel to run under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Ours,
    Linux,
}

/// One boot.
struct Job {
    side: Side,
    program: Guest,
    cpus: u16,
}

/// What came of a boot: the figures it printed, and what went wrong.
struct Done {
    side: Side,
    program: &'static str,
    cpus: u16,
    figures: Vec<Figure>,
    trouble: Option<String>,
}

/// Compares.
pub fn run(args: &VersusArgs) -> Result<(), CliError> {
    Machine::ready()?;
    let (rows, counts) = (guest("rows")?, guest("counts")?);
    let mut json = Json::open(args.json.json.as_deref())?;
    let (mut out, style) = report::output(&args.json);

    let sides = [Side::Ours, Side::Linux];
    let mut jobs: VecDeque<_> = sides.map(|side| Job { side, program: rows, cpus: 1 }).into();
    for &cpus in &args.cpus {
        jobs.extend(sides.map(|side| Job { side, program: counts, cpus }));
    }
    let progress = Progress::new(jobs.len() as u64 + 1);
    let stock = stock(args, &progress)?;
    progress.advance(1);
    let done = boot_all(jobs, args, &stock, &progress);
    drop(progress);

    let rows = tell_rows(&mut *out, &done, &stock, style)?;
    let mut phases = 0;
    for &cpus in &args.cpus {
        phases += tell_counts(&mut *out, &done, cpus, &stock, style)?;
    }
    writeln!(out, "{COUNTED}\n\n{LINUX_ALSO}")?;
    for done in &done {
        write_json(&mut json, args, done, &stock)?;
    }
    let troubles: Vec<_> = done.iter().filter_map(|done| done.trouble.clone()).collect();
    if !troubles.is_empty() {
        return Err(CliError::Failed(troubles.join("\n")));
    }
    if args.check && rows + phases > 0 {
        let (all_rows, all_phases) = ("cost more than a third of Linux's", "miss their bar");
        return Err(CliError::Failed(format!(
            "{rows} rows {all_rows}; {phases} phases of several CPUs {all_phases}"
        )));
    }
    Ok(())
}

/// The kernel to compare with.
fn stock(args: &VersusArgs, progress: &Progress) -> Result<Stock, CliError> {
    if let Some(file) = &args.kernel {
        return Ok(Stock::file(file)?);
    }
    if let Some(cached) = Stock::cached() {
        return Ok(cached);
    }
    progress.begin("downloading Debian's kernel package (100 MB, once)");
    Ok(Stock::download()?)
}

/// Does all jobs, as many at a time as the host has CPUs; in the order of the jobs.
fn boot_all(
    jobs: VecDeque<Job>,
    args: &VersusArgs,
    stock: &Stock,
    progress: &Progress,
) -> Vec<Done> {
    let workers = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let queue = Mutex::new(jobs.into_iter().enumerate());
    let done = Mutex::new(Vec::new());
    let work = || {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((place, job)) = next.filter(|_| !interrupt::requested()) else { return };
            let side = match job.side {
                Side::Ours => "the bare machine",
                Side::Linux => "Linux",
            };
            progress.begin(&format!("{} on {side}, {} CPUs", job.program.name, job.cpus));
            let result = boot(&job, args, stock);
            progress.advance(1);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((place, result));
        }
    };
    thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(place, _)| *place);
    done.into_iter().map(|(_, done)| done).collect()
}

/// Does one job; what goes wrong is part of the result, beside the figures that came before.
fn boot(job: &Job, args: &VersusArgs, stock: &Stock) -> Done {
    let program = Program::guest(job.program);
    let limits = Limits { timeout: Some(PATIENCE), stop: Some(&interrupt::requested) };
    let (text, trouble) = match job.side {
        Side::Ours => {
            let machine = Machine {
                cpus: job.cpus,
                memory: MEMORY,
                clock: Clock::Deterministic,
                cpu: CPU.into(),
                words: args.set.set.iter().map(|set| format!("set={}", set.text())).collect(),
                ..Machine::default()
            };
            let (mut output, mut errors) = (Vec::new(), Vec::new());
            let run = machine.run(&program, Streams::keep(&mut output, &mut errors), &limits);
            let trouble = match run {
                Ok(run) if run.end == End::Exited(0) => None,
                Ok(run) => {
                    Some(format!("{}; {}", run.end, String::from_utf8_lossy(&errors).trim()))
                }
                Err(error) => Some(error.to_string()),
            };
            (String::from_utf8_lossy(&output).into_owned(), trouble)
        }
        Side::Linux => {
            let machine = LinuxMachine {
                cpus: job.cpus,
                memory: MEMORY,
                clock: Clock::Deterministic,
                cpu: CPU.into(),
                kernel: stock.clone(),
            };
            match machine.run(&program, &limits) {
                Ok(run) => (run.console, run.cut.map(str::to_owned)),
                Err(error) => (String::new(), Some(error.to_string())),
            }
        }
    };
    let figures = figures(&text);
    let silent = (trouble.is_none() && figures.is_empty())
        .then(|| format!("it printed no figures; it printed: {}", text.trim()));
    let name = |trouble| {
        let machine = if job.side == Side::Ours { "the bare machine" } else { &stock.name };
        format!("{} on {machine}, {} CPUs: {trouble}", job.program.name, job.cpus)
    };
    let trouble = trouble.or(silent).map(name);
    Done { side: job.side, program: job.program.name, cpus: job.cpus, figures, trouble }
}

/// The figures of a program on a side.
fn of<'a>(done: &'a [Done], side: Side, program: &str, cpus: u16) -> &'a [Figure] {
    let same = |done: &&Done| (done.side, done.program, done.cpus) == (side, program, cpus);
    done.iter().find(same).map_or(&[], |done| &done.figures)
}

/// Prints what faults and calls cost; how many rows miss their bar.
fn tell_rows(
    out: &mut dyn Write,
    done: &[Done],
    stock: &Stock,
    style: Style,
) -> Result<usize, CliError> {
    let pairs = figures::pairs(of(done, Side::Ours, "rows", 1), of(done, Side::Linux, "rows", 1));
    let head = ["instructions", "of", "faultless", &stock.name, "ratio", "a third or less"];
    let mut table = table::numbers(&head.map(str::to_owned), style);
    let mut missed = 0;
    for pair in &pairs {
        let met = pair.within(3.0);
        missed += usize::from(!met);
        let ratio = pair.ratio().map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
        let met = if met { "yes" } else { "NO" };
        let [ours, linux] = [pair.ours, pair.linux].map(figures::show);
        table::row(
            &mut table,
            [pair.name.clone(), pair.unit.clone(), ours, linux, ratio, met.to_owned()],
        );
    }
    writeln!(out, "\nOne CPU, one instruction a tick, CPU {CPU}, no randomness")?;
    writeln!(out, "{table}\n")?;
    Ok(missed)
}

/// Prints what several CPUs counted; how many phases miss their bar.
fn tell_counts(
    out: &mut dyn Write,
    done: &[Done],
    cpus: u16,
    stock: &Stock,
    style: Style,
) -> Result<usize, CliError> {
    let [ours, linux] = [Side::Ours, Side::Linux].map(|side| of(done, side, "counts", cpus));
    let (table, missed) = counts::tell(&counts::phases(ours, linux), &stock.name, style);
    writeln!(out, "{cpus} CPUs, taking turns")?;
    writeln!(out, "{table}\n")?;
    Ok(missed)
}

fn write_json(
    json: &mut Json,
    args: &VersusArgs,
    done: &Done,
    stock: &Stock,
) -> Result<(), CliError> {
    let set: Vec<_> = args.set.set.iter().map(|assignment| assignment.text()).collect();
    let (machine, setting) = match done.side {
        Side::Ours if !set.is_empty() => ("bare".to_owned(), set.join(",")),
        Side::Ours => ("bare".to_owned(), "default".to_owned()),
        Side::Linux => (format!("linux-{}", stock.name), "default".to_owned()),
    };
    let context =
        Context { machine, workload: done.program.to_owned(), cpus: done.cpus.into(), setting };
    for figure in &done.figures {
        json.write(&context, &figure.name, &figure.unit, Number::Real(figure.value))?;
    }
    Ok(())
}
