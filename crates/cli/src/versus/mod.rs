//! `faultless versus`: the same program files on the bare machine and on a stock Linux, in the
//! same QEMU, with a clock that counts instructions.
//!
//! `rows` measures the cost of faults and calls with one CPU. `counts` counts faults and shootdowns
//! with several CPUs. `reclaim` measures pages that are read from a disk, evicted or moved.
//! Prefault is off in all three. The rows of anonymous memory are then repeated with prefault, and
//! on pre-zeroed frames. Each boot is independent, so boots run in parallel on the host's CPUs.
//! Figures of disks vary between boots: these boots are repeated, and the median counts. The rows
//! are also measured on a Linux booted without mitigations and memory cgroups. Each Linux reports
//! its work that the bare kernel does not do ([`facts`]).

mod counts;
mod facts;
mod figures;
mod parts;
mod prefault;

use crate::error::CliError;
use crate::interrupt;
use crate::number::within;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{self, JsonArgs, Style, table};
use crate::set::SetArgs;
use faultless_analysis::number::plural;
use faultless_analysis::settings::{Assignment, Regime, Settings, regimes};
use faultless_analysis::{Context, Number, Observer};
use faultless_boot::linux::{LinuxMachine, Stock};
use faultless_boot::{Clock, Disk, End, Guest, Limits, Machine, Program, Streams, guest};
use figures::{Figure, Pair, Value, figures, verdict};
use parts::{Part, image};
use serde_json::Map;
use std::collections::VecDeque;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless versus
  faultless versus --set locking=mmap_lock --cpus 4
  faultless versus --kernel /boot/vmlinuz-6.12.43-amd64 --json versus.jsonl
  faultless versus --check     fail if a row misses a third of Linux")]
pub struct VersusArgs {
    /// Compare with this Linux kernel, a bzImage [default: Debian's newest 6.12]
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Count faults and shootdowns with these numbers of CPUs
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [2, 4],
          value_parser = within(2..=64_u16))]
    pub cpus: Vec<u16>,
    #[command(flatten)]
    pub set: SetArgs,
    /// Boot N times for each row that varies, as rows of disks do, and show the median
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = within(1..=100_u16))]
    pub runs: u16,
    #[command(flatten)]
    pub json: JsonArgs,
    /// Fail if a row costs more than a third of its cost on Linux
    #[arg(long)]
    pub check: bool,
}

/// Memory of either machine, and its CPU. Without fast strings, both kernels use the same counted
/// steps to zero a page.
const MEMORY: u64 = 1 << 30;
const CPU: &str = "max,-erms";
/// The timeout of a boot.
const PATIENCE: Duration = Duration::from_secs(600);

/// The boot parameters of [`LinuxRun::Reduced`].
const REDUCED: [&str; 2] = ["mitigations=off", "cgroup_disable=memory"];

/// An explanation of the second Linux and of repeated boots.
const COLUMNS: &str = "\
The target is a third of the first Linux. The second Linux is the same kernel without mitigations and memory cgroups: the difference
between the two is the cost of that work. A figure with a range is the median of several boots (--runs), with the least and the most:
such figures depend on the speed of the host's disk.";

/// An explanation of the counts.
const COUNTED: &str = "\
Faults are `pgfault` of /proc/vmstat; the target is at most the count of Linux. Shootdowns are requests to
another CPU to drop translations, the row TLB of /proc/interrupts; if the target is `none`, no other CPU can
hold a translation of the changed pages.";

/// Frames of the pool of pre-zeroed frames, if there is a pool: twice the number touched by a pass
/// of a row.
const POOL: u64 = 16384;
/// The idle time of the machine before each such pass, in milliseconds of its own clock: enough to
/// fill the pool.
const REST: u64 = 100;

/// A kernel to run under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Ours,
    Linux(LinuxRun),
}

/// A way to boot Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinuxRun {
    /// As the package configures the kernel.
    Default,
    /// With the words [`REDUCED`].
    Reduced,
}

impl Side {
    const LINUX: Self = Self::Linux(LinuxRun::Default);
    const REDUCED: Self = Self::Linux(LinuxRun::Reduced);
    const ALL: [Self; 3] = [Self::Ours, Self::LINUX, Self::REDUCED];
}

/// One boot.
struct Job {
    side: Side,
    program: Guest,
    cpus: u16,
    /// The prefault settings; off on Linux.
    regime: Regime,
    part: Part,
    /// The number of the boot among its repetitions, from 0.
    run: u16,
}

/// The result of a boot: its figures, and its error.
struct Done {
    side: Side,
    program: &'static str,
    cpus: u16,
    regime: Regime,
    part: Part,
    /// The arguments of the program.
    args: Vec<String>,
    /// The knobs, on the bare machine.
    set: Vec<String>,
    figures: Vec<Figure>,
    /// Facts of the kernel: names and texts.
    facts: Vec<(String, String)>,
    /// As in [`Job`].
    run: u16,
    trouble: Option<String>,
}

/// Runs the comparison.
pub fn run(args: &VersusArgs) -> Result<(), CliError> {
    args.set.one_value_each(&["prefault_max_order"])?;
    let mut json = Json::open(&args.json, args.kernel.as_deref().as_slice())?;
    // An unusable kernel is reported before QEMU is looked for.
    let given = args.kernel.as_deref().map(Stock::file).transpose();
    let given = given.map_err(|error| CliError::Usage(error.to_string()))?;
    Machine::ready()?;
    let (rows, reclaim, counts) = (guest("rows")?, guest("reclaim")?, guest("counts")?);
    let (mut out, style) = report::output(&args.json);

    let job = |side, program, cpus| {
        let (regime, part) = (Regime::OFF, Part::Plain);
        Job { side, program, cpus, regime, part, run: 0 }
    };
    let mut jobs: VecDeque<_> = Side::ALL.map(|side| job(side, rows, 1)).into();
    for &cpus in &args.cpus {
        jobs.extend([Side::Ours, Side::LINUX].map(|side| job(side, counts, cpus)));
    }
    let regimes = regimes(&args.set.set, POOL);
    let later = regimes.iter().filter(|regime| **regime != Regime::OFF);
    jobs.extend(later.map(|&regime| Job { regime, ..job(Side::Ours, rows, 1) }));
    let of_part = |side, part: Part| {
        let runs = if part.varies() { args.runs } else { 1 };
        (0..runs).map(move |run| Job { part, run, ..job(side, reclaim, 1) })
    };
    jobs.extend(Part::MORE.into_iter().flat_map(|part| of_part(Side::Ours, part)));
    let on_linux = |stock: Option<&Stock>| -> Vec<Job> {
        let fitting = Part::MORE.into_iter().filter(|part| stock.is_none_or(|it| part.fits(it)));
        let both = [Side::LINUX, Side::REDUCED];
        fitting
            .flat_map(|part| both.into_iter().flat_map(move |side| of_part(side, part)))
            .collect()
    };
    let progress = Progress::new((jobs.len() + on_linux(None).len()) as u64 + 1);
    let stock = given.map_or_else(|| stock(&progress), Ok)?;
    jobs.extend(on_linux(Some(&stock)));
    progress.advance(1);
    let done = boot_all(jobs, args, &stock, &progress);
    drop(progress);

    let mut rows = print_rows(&mut *out, &done, &stock, style)?;
    prefault::print(&mut *out, &done, &regimes, &stock, style)?;
    for part in Part::MORE {
        rows += part.print(&mut *out, &done, &stock, style)?;
    }
    let mut phases = 0;
    for &cpus in &args.cpus {
        phases += print_counts(&mut *out, &done, cpus, &stock, style)?;
    }
    let any =
        |program: &str| done.iter().any(|done| done.program == program && !done.figures.is_empty());
    if any("counts") {
        writeln!(out, "{COUNTED}\n")?;
    }
    if any("rows") || any("reclaim") {
        writeln!(out, "{COLUMNS}\n")?;
    }
    let kernels = [LinuxRun::Default, LinuxRun::Reduced].map(|run| {
        let same = |done: &&Done| done.side == Side::Linux(run) && !done.facts.is_empty();
        let known = done.iter().find(same).map_or(&[][..], |done| &done.facts);
        (facts::column(&stock.name, run), known)
    });
    facts::print(&mut *out, &kernels, CPU, style)?;
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    for done in &done {
        write_json(&mut json, done, &stock)?;
    }
    let troubles: Vec<_> = done.iter().filter_map(|done| done.trouble.clone()).collect();
    if !troubles.is_empty() {
        return Err(CliError::Failed(troubles.join("\n")));
    }
    json.complete()?;
    if args.check && rows + phases > 0 {
        let (all_rows, all_phases) = ("cost more than a third of Linux's", "miss their target");
        return Err(CliError::Failed(format!(
            "{rows} rows {all_rows}; {phases} phases of several CPUs {all_phases}"
        )));
    }
    Ok(())
}

/// Returns the kernel to compare with by default.
fn stock(progress: &Progress) -> Result<Stock, CliError> {
    let cached = Stock::cached();
    if let Some(complete) = cached.clone().filter(Stock::reads_disks) {
        return Ok(complete);
    }
    progress.begin("downloading Debian's kernel package (100 MB, once)");
    // An earlier version cached the image without the drivers, which most rows do not need.
    Ok(Stock::download().or_else(|error| cached.ok_or(error))?)
}

/// Runs all jobs, in parallel on the CPUs of the host. Returns the results in the order of the
/// jobs.
fn boot_all(
    jobs: VecDeque<Job>,
    args: &VersusArgs,
    stock: &Stock,
    progress: &Progress,
) -> Vec<Done> {
    let all = jobs.len();
    let workers = thread::available_parallelism().map_or(1, usize::from).min(all);
    let queue = Mutex::new(jobs.into_iter().enumerate());
    let done = Mutex::new(Vec::new());
    let work = || {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((place, job)) = next.filter(|_| !interrupt::requested()) else { return };
            let side = match job.side {
                Side::Ours => "the bare machine",
                Side::LINUX => "Linux",
                Side::Linux(LinuxRun::Reduced) => "Linux with less work",
            };
            let (name, cpus) = (job.program.name, plural(job.cpus.into(), "CPU"));
            let number = format!("boot {} of {all}, {name} on {side}, {cpus}", place + 1);
            progress.begin(&match (job.side, job.regime) {
                (Side::Ours, regime) => format!("{number}, prefault {}", regime.name()),
                _ => number,
            });
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

/// Runs one job. An error is part of the result, beside the figures before the error.
fn boot(job: &Job, args: &VersusArgs, stock: &Stock) -> Done {
    let mut program = Program::guest(job.program).args(job.args());
    let files = match job.part.files() {
        Ok(files) => files,
        Err(error) => {
            return done(job, args, stock, "", Some(format!("a file of its disk: {error}")));
        }
    };
    if let Some(files) = files.as_ref().filter(|_| job.side == Side::Ours) {
        program = program.files(files.path());
    }
    let limits = Limits { timeout: Some(PATIENCE), stop: Some(&interrupt::requested) };
    let (text, trouble) = match job.side {
        Side::Ours => {
            let machine = Machine {
                cpus: job.cpus,
                memory: job.part.memory(),
                nodes: job.part.nodes(),
                clock: Clock::Deterministic,
                cpu: CPU.into(),
                words: job.words(args),
                disk: files.is_some().then(Disk::default),
                swap: job.part.swap(),
                ..Machine::default()
            };
            let (mut output, mut errors) = (Vec::new(), Vec::new());
            let run = machine.run(&program, Streams::keep(&mut output, &mut errors), &limits);
            let trouble = match run {
                Ok(run) if run.end == End::Exited(0) => None,
                Ok(run) => {
                    let stderr = String::from_utf8_lossy(&errors);
                    let gap = if stderr.trim().is_empty() { "" } else { "; " };
                    Some(format!("{}{gap}{}", run.end, stderr.trim()))
                }
                Err(error) => Some(error.to_string()),
            };
            (String::from_utf8_lossy(&output).into_owned(), trouble)
        }
        Side::Linux(run) => {
            let reduced = (run == LinuxRun::Reduced).then_some(REDUCED);
            let machine = LinuxMachine {
                cpus: job.cpus,
                memory: job.part.memory(),
                nodes: job.part.nodes(),
                clock: Clock::Deterministic,
                cpu: CPU.into(),
                kernel: stock.clone(),
                disk: files.as_ref().map(image),
                swap: job.part.swap(),
                words: reduced.into_iter().flatten().map(str::to_owned).collect(),
            };
            match machine.run(&program, &limits) {
                Ok(run) => (run.console, run.cut.map(str::to_owned)),
                Err(error) => (String::new(), Some(error.to_string())),
            }
        }
    };
    done(job, args, stock, &text, trouble)
}

/// Returns the result of a boot that printed `text`.
fn done(job: &Job, args: &VersusArgs, stock: &Stock, text: &str, trouble: Option<String>) -> Done {
    let (figures, facts) = (figures(text), facts::facts(text));
    let silent = (trouble.is_none() && figures.is_empty()).then(|| match interrupt::requested() {
        // Ctrl-C on a terminal reaches QEMU, too.
        true => "interrupted".to_owned(),
        false => format!("no figures in the output: {}", text.trim()),
    });
    let name = |trouble| {
        let machine = if job.side == Side::Ours { "the bare machine" } else { &stock.name };
        let cpus = plural(job.cpus.into(), "CPU");
        format!("{} on {machine}, {cpus}: {trouble}", job.program.name)
    };
    let trouble = trouble.or(silent).map(name);
    let (set, args) = (job.set(args), job.args());
    let &Job { side, cpus, regime, part, run, program: Guest { name: program, .. } } = job;
    Done { side, program, cpus, regime, part, args, set, figures, facts, run, trouble }
}

impl Job {
    /// Returns the program's arguments. With prefault the program measures only the rows affected
    /// by prefault.
    fn args(&self) -> Vec<String> {
        let only = (self.regime != Regime::OFF).then(|| format!("row={}", prefault::ROWS[0]));
        let rest = (self.regime.pool > 0).then(|| format!("rest={REST}"));
        let facts =
            (self.program.name == "rows" && self.side != Side::Ours).then(|| "facts".to_owned());
        only.into_iter().chain(rest).chain(self.part.args(self.side)).chain(facts).collect()
    }

    /// Returns the knobs of the bare machine: the user's, followed by those of the job.
    fn set(&self, args: &VersusArgs) -> Vec<String> {
        let mut set: Vec<_> = args.set.set.iter().map(|set| set.text().to_owned()).collect();
        set.push(format!("prefault_max_order={}", self.regime.order));
        if self.regime.pool > 0 {
            set.push(format!("zeroed_pool={}", self.regime.pool));
        }
        set
    }

    /// Returns all boot parameters of the bare machine.
    fn words(&self, args: &VersusArgs) -> Vec<String> {
        let sets = self.set(args).into_iter().map(|set| format!("set={set}"));
        // The same parameter as for Linux, with several nodes.
        let stay = self.part.nodes().are_several().then(|| "numa_balancing=disable".to_owned());
        sets.chain(stay).collect()
    }
}

/// Returns the figures of a program on a side.
fn of<'a>(done: &'a [Done], side: Side, program: &str, cpus: u16, regime: Regime) -> &'a [Figure] {
    let wanted = (side, program, cpus, regime, Part::Plain);
    let same =
        |done: &&Done| (done.side, done.program, done.cpus, done.regime, done.part) == wanted;
    done.iter().find(same).map_or(&[], |done| &done.figures)
}

/// Returns the figures of the rows of a part side by side, each over all runs.
fn pairs_of(done: &[Done], part: Part) -> Vec<Pair> {
    let runs = Side::ALL.map(|side| {
        let same = |done: &&Done| {
            let rows = done.program != "counts" && done.regime == Regime::OFF;
            rows && done.part == part && done.side == side
        };
        done.iter().filter(same).map(|done| &done.figures[..]).collect::<Vec<_>>()
    });
    figures::pairs(&runs)
}

/// Returns a table of rows, and the number of rows that miss their target.
fn table_of(pairs: &[Pair], stock: &Stock, style: Style) -> (String, usize) {
    let head = ["instructions", "of", "faultless", &stock.name, "ratio", "a third or less"];
    let less = [facts::column(&stock.name, LinuxRun::Reduced), "ratio".to_owned()];
    let head: Vec<_> = head.map(str::to_owned).into_iter().chain(less).collect();
    let mut table = table::numbers(&head, style);
    let mut missed = 0;
    for pair in pairs {
        let met = pair.within(3.0);
        missed += usize::from(met != Some(true));
        let ratio = |to| pair.ratio(to).map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
        let [ours, linux, reduced] = [pair.ours, pair.linux, pair.reduced].map(Value::cell);
        let first = [pair.name.clone(), pair.unit.clone(), ours, linux];
        let more = [ratio(pair.linux), verdict(met).to_owned(), reduced, ratio(pair.reduced)];
        table::row(&mut table, first.into_iter().chain(more));
    }
    (table.to_string(), missed)
}

/// Prints the cost of faults and calls. Returns the number of rows that miss their target.
fn print_rows(
    out: &mut dyn Write,
    done: &[Done],
    stock: &Stock,
    style: Style,
) -> Result<usize, CliError> {
    let pairs = pairs_of(done, Part::Plain);
    if pairs.is_empty() {
        return Ok(0);
    }
    let (table, missed) = table_of(&pairs, stock, style);
    writeln!(
        out,
        "\nOne CPU, one instruction a tick, CPU {CPU}, no randomness; prefault off (prefault_max_order=0)"
    )?;
    writeln!(out, "{table}\n")?;
    Ok(missed)
}

/// Prints the counts of several CPUs. Returns the number of phases that miss their target.
fn print_counts(
    out: &mut dyn Write,
    done: &[Done],
    cpus: u16,
    stock: &Stock,
    style: Style,
) -> Result<usize, CliError> {
    let [ours, linux] =
        [Side::Ours, Side::LINUX].map(|side| of(done, side, "counts", cpus, Regime::OFF));
    let phases = counts::phases(ours, linux);
    if phases.is_empty() {
        return Ok(0);
    }
    let (table, missed) = counts::render(&phases, &stock.name, style);
    writeln!(out, "{cpus} CPUs, taking turns")?;
    writeln!(out, "{table}\n")?;
    Ok(missed)
}

fn write_json(json: &mut Json, done: &Done, stock: &Stock) -> Result<(), CliError> {
    let (machine, setting, knobs) = match done.side {
        Side::Ours => {
            // Parsed successfully before the boot.
            let set: Vec<Assignment> = done.set.iter().filter_map(|it| it.parse().ok()).collect();
            ("bare".to_owned(), done.set.join(","), Settings::new(&set).knobs())
        }
        Side::Linux(run) => {
            let words = if run == LinuxRun::Reduced { REDUCED.join(",") } else { "default".into() };
            (format!("linux-{}", stock.name), words, Map::new())
        }
    };
    let context = Context {
        machine,
        workload: done.program.to_owned(),
        cpus: done.cpus.into(),
        setting,
        params: Map::from_iter([
            ("args".to_owned(), done.args.iter().map(String::as_str).collect()),
            ("memory".to_owned(), done.part.memory().into()),
            ("nodes".to_owned(), done.part.nodes().to_string().into()),
            ("clock".to_owned(), "deterministic".into()),
            ("cpu".to_owned(), CPU.into()),
            ("run".to_owned(), done.run.into()),
        ]),
        knobs,
        basis: None,
    };
    for figure in &done.figures {
        json.write(&context, &figure.name, &figure.unit, Number::Real(figure.value))?;
    }
    Ok(())
}
