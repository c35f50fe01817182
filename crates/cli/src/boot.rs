//! `faultless boot`: runs a Linux program on the bare machine. Passes the program's output through
//! as it arrives, returns its exit status, and prints the kernel's counters in the form of
//! `perf stat`.

use crate::error::CliError;
use crate::interrupt;
use crate::number::within;
use crate::report::json::Json;
use crate::report::perf_stat::PerfStat;
use crate::report::{JsonArgs, say};
use crate::set::SetArgs;
use clap::ValueEnum;
use faultless_analysis::number::plural;
use faultless_analysis::settings::Settings;
use faultless_analysis::{Context, Number, suggest};
use faultless_boot::accel::{kvm_opens, kvm_works};
use faultless_boot::{
    Accel, BootError, Clock, Disk, End, Limits, Machine, Nodes, Program, Run, Streams,
};
use faultless_workload::Kind;
use serde_json::Map;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless boot ./hello
  faultless boot --cpus 4 --set locking=per_vma ./stress --threads 4
  faultless boot --files ./root ./root/bin/busybox sh -c 'ls -l / | sort'
  faultless boot --memory 256M --swap 1G ./app   use more than the memory
  faultless boot --accel tcg ./app               do not try KVM
  faultless boot --clock deterministic ./app     reproducible runs")]
pub struct BootArgs {
    /// Set the number of CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = within(1..=64_u16))]
    pub cpus: u16,
    /// Set the memory size, from 32M to less than 1T, such as 512M or 2G
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = memory)]
    pub memory: u64,
    /// Divide the memory left to programs into one to eight nodes, by shares: 1:4 gives the second
    /// node four fifths. CPUs are in the first node, and allocation takes its pages first. Used
    /// pages are promoted to the first node and cold pages demoted; `move_pages` moves pages, too
    #[arg(long, value_name = "A:B", default_value_t)]
    pub nodes: Nodes,
    /// Show DIR to the program as its file system
    #[arg(long, value_name = "DIR")]
    pub files: Option<PathBuf>,
    /// Put the files on a disk instead of in memory, and read pages on demand. Pages that programs
    /// store to stay in memory. Holes of files take space in the disk's image, which is a temporary
    /// file
    #[arg(long)]
    pub disk: bool,
    /// Add a swap disk of SIZE, in whole MiB from 1M to less than 1T. When memory is short, private
    /// pages of the program are written to this disk, and read back on demand. Its image is a
    /// temporary file that grows with the data written
    #[arg(long, value_name = "SIZE", value_parser = swap)]
    pub swap: Option<u64>,
    /// Start the program in this directory, as seen by the program [default: /]
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<OsString>,
    /// Set an environment variable; repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<String>,
    /// Select the clock: `deterministic` counts an instruction as a nanosecond, and CPUs take turns
    #[arg(long, value_enum, default_value_t = ClockArg::Real)]
    pub clock: ClockArg,
    /// Select the accelerator that executes the program's instructions
    #[arg(long, value_enum, default_value_t = AccelArg::Auto)]
    pub accel: AccelArg,
    #[command(flatten)]
    pub set: SetArgs,
    /// Account for every frame of memory at the end; a missing frame is an error
    #[arg(long)]
    pub check: bool,
    /// Break the kernel on purpose, for tests
    #[arg(long, value_name = "NAME", hide = true)]
    pub plant: Vec<String>,
    /// Boot this kernel instead of the bundled one
    #[arg(long, value_name = "FILE", hide = true)]
    pub kernel: Option<PathBuf>,
    /// Stop the program after this number of seconds; the exit status is then 124
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
    #[command(flatten)]
    pub json: JsonArgs,
    /// Run this program. All words after its name are its arguments, options included
    #[arg(value_names = ["PROGRAM", "ARGS"], required = true, num_args = 1.., trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

impl BootArgs {
    /// Returns the program.
    pub fn program(&self) -> &Path {
        Path::new(self.command.first().map_or("".as_ref(), OsString::as_os_str))
    }

    /// Returns the arguments of the program.
    pub fn args(&self) -> &[OsString] {
        self.command.get(1..).unwrap_or_default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AccelArg {
    /// KVM if a machine runs under KVM (probed for up to one second), otherwise QEMU
    Auto,
    /// The host's processor
    Kvm,
    /// QEMU, by translation
    Tcg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClockArg {
    /// The host's time; CPUs run in parallel
    Real,
    /// Instructions; CPUs take turns, and runs are reproducible, except for the time of a disk
    Deterministic,
}

/// The longest permitted timeout of a program.
const LONGEST: Duration = Duration::from_secs(1000 * 86_400);

/// Parses a size of memory, in bytes.
fn memory(text: &str) -> Result<u64, String> {
    let bytes = Kind::Size.parse(text).filter(|bytes| (32 << 20..1 << 40).contains(bytes));
    bytes.ok_or_else(|| "a size from 32M to less than 1T, as 512M or 2G".to_owned())
}

/// Parses a size of a swap disk, in bytes.
fn swap(text: &str) -> Result<u64, String> {
    let is_fit = |bytes: &u64| (1 << 20..1 << 40).contains(bytes) && bytes.is_multiple_of(1 << 20);
    let bytes = Kind::Size.parse(text).filter(is_fit);
    bytes.ok_or_else(|| "a size in whole MiB, from 1M to less than 1T, as 256M or 2G".to_owned())
}

fn variable(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some((name, _)) if !name.is_empty() => Ok(text.to_owned()),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let seconds = seconds.filter(|time| !time.is_zero() && *time <= LONGEST);
    let days = LONGEST.as_secs() / 86_400;
    seconds.ok_or_else(|| format!("a number of seconds above 0, {days} days at most"))
}

/// Errors of the bare machine; bad programs are bad arguments.
impl From<BootError> for CliError {
    fn from(error: BootError) -> Self {
        match error {
            BootError::NoDirectory { .. } => Self::Usage(format!("--cwd: {error}")),
            BootError::Elf { .. } | BootError::Unfit { .. } | BootError::Memory { .. } => {
                Self::Usage(error.to_string())
            }
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// The exit status of a run that exceeded its timeout, as `timeout` returns it.
const TIMED_OUT: u8 = 124;
/// The exit status of a program that keeps running after its output was closed, as a shell reports
/// SIGPIPE.
const BROKEN_PIPE: u8 = 128 + 13;

/// Boots a program.
pub fn run(args: &BootArgs) -> Result<ExitCode, CliError> {
    args.set.one_value_each(&[])?;
    let program = program(args)?;
    let own = [Some(args.program()), args.files.as_deref(), args.kernel.as_deref()];
    let inputs: Vec<_> = own.into_iter().flatten().collect();
    let mut json = Json::open(&args.json, &inputs)?;
    let chosen = accel(args)?;
    let machine = machine(args, chosen.accel);
    let limits = Limits { timeout: args.timeout, stop: Some(&interrupt::requested) };
    let run = machine.run(&program, Streams::inherit(), &limits)?;
    for note in run.skipped.iter().chain(&run.report.messages) {
        say!("faultless: {note}");
    }
    // A machine that was stopped has reported no counts.
    if !run.report.counters.is_empty() {
        say!("{}\n", counters(args, &chosen, &run));
    }
    write_json(&mut json, args, &chosen, &run)?;
    let program = args.program().display();
    match run.end {
        End::Exited(status) => {
            if let Some(signal) = run.report.signal {
                let status = ExitStatus::from_raw(signal.into());
                say!("faultless: {program}: the program ended with {status}");
            }
            json.complete()?;
            Ok(ExitCode::from(status))
        }
        End::TimedOut => {
            say!("faultless: {program}: {}", run.end);
            Ok(ExitCode::from(TIMED_OUT))
        }
        End::Closed => {
            say!("faultless: {program}: stopped, as its output was closed");
            Ok(ExitCode::from(BROKEN_PIPE))
        }
        _ => Err(CliError::failed(program, run.end)),
    }
}

/// Returns the program: a file, or a bundled program.
fn program(args: &BootArgs) -> Result<Program, CliError> {
    if let Some(files) = &args.files {
        let explain = |why: &dyn std::fmt::Display| format!("--files {}: {why}", files.display());
        let is_folder = std::fs::metadata(files).map(|it| it.is_dir());
        match is_folder {
            Ok(true) => {}
            Ok(false) => return Err(CliError::Usage(explain(&"not a directory"))),
            Err(error) => return Err(CliError::Usage(explain(&error))),
        }
    }
    let file = match &args.files {
        Some(files) => Program::file_among(files, args.program()),
        None => Program::file(args.program()),
    };
    let program = match file {
        // A name without a directory may be that of a bundled program.
        Err(error @ BootError::File { .. }) if args.program().components().count() == 1 => {
            let name = args.program().to_string_lossy();
            let guest = faultless_boot::guest(&name);
            guest.map(Program::guest).map_err(|_| CliError::Usage(no_such(&name, &error)))?
        }
        program => program.map_err(|error| CliError::Usage(error.to_string()))?,
    };
    let mut program = args.env.iter().fold(program, Program::env).args(args.args());
    program.files.clone_from(&args.files);
    program.cwd.clone_from(&args.cwd);
    Ok(program)
}

/// Returns the error for a name of neither a file nor a bundled program.
fn no_such(name: &str, error: &BootError) -> String {
    let names: Vec<_> = faultless_boot::guests().into_iter().flatten().map(|it| it.name).collect();
    if names.is_empty() {
        return error.to_string();
    }
    let hint = suggest::hint(name, names.iter().copied());
    format!("{error}; bundled programs are {}{hint}", names.join(", "))
}

/// The accelerator that executes instructions.
struct Chosen {
    accel: Accel,
    /// The reason for not using KVM, if KVM was tried.
    why: Option<String>,
}

impl std::fmt::Display for Chosen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.accel)?;
        self.why.as_ref().map_or(Ok(()), |why| write!(f, ", as KVM does not work: {why}"))
    }
}

/// Selects the accelerator that executes instructions.
fn accel(args: &BootArgs) -> Result<Chosen, CliError> {
    let counted = args.clock == ClockArg::Deterministic;
    let (accel, why) = match args.accel {
        AccelArg::Kvm if counted => {
            let why = "--accel kvm cannot count instructions for --clock deterministic: use one of the two";
            return Err(CliError::Usage(why.into()));
        }
        AccelArg::Kvm => {
            kvm_opens().map_err(|why| CliError::failed("--accel kvm", why))?;
            (Accel::Kvm, None)
        }
        AccelArg::Auto if !counted => match kvm_works(args.cpus, args.memory) {
            Ok(()) => (Accel::Kvm, None),
            Err(why) => (Accel::Tcg, Some(why)),
        },
        AccelArg::Auto | AccelArg::Tcg => (Accel::Tcg, None),
    };
    Ok(Chosen { accel, why })
}

fn machine(args: &BootArgs, accel: Accel) -> Machine {
    let set = args.set.set.iter().map(|assignment| format!("set={}", assignment.text()));
    let plant = args.plant.iter().map(|name| format!("plant={name}"));
    Machine {
        cpus: args.cpus,
        memory: args.memory,
        nodes: args.nodes.clone(),
        clock: match args.clock {
            ClockArg::Real => Clock::Real,
            ClockArg::Deterministic => Clock::Deterministic,
        },
        accel,
        check: args.check,
        disk: args.disk.then(Disk::default),
        swap: args.swap,
        words: set.chain(plant).collect(),
        kernel: args.kernel.clone(),
        ..Machine::default()
    }
}

/// Returns the program and its arguments, as a user would type them.
fn title(args: &BootArgs) -> String {
    let words: Vec<_> = args.command.iter().map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

/// Returns the knobs that are set, or `default`.
fn setting(args: &BootArgs) -> String {
    let set: Vec<_> = args.set.set.iter().map(|assignment| assignment.text()).collect();
    if set.is_empty() { "default".into() } else { set.join(",") }
}

fn counters(args: &BootArgs, chosen: &Chosen, run: &Run) -> PerfStat {
    let cut = match run.end {
        End::Exited(_) => String::new(),
        _ => format!(", {}", run.end),
    };
    let title = format!(
        "'{}' on the bare machine ({}, {}){cut},\n {chosen}",
        title(args),
        setting(args),
        plural(args.cpus.into(), "CPU")
    );
    let mut stat = PerfStat::new(title);
    let wall = run.wall.as_secs_f64();
    // Counts per second of the host's time have no meaning on a clock of instructions.
    let seconds = if args.clock == ClockArg::Real { wall } else { 0.0 };
    stat.counters(&run.report.counters, seconds);
    stat.time(wall, "time elapsed");
    stat
}

fn write_json(
    json: &mut Json,
    args: &BootArgs,
    chosen: &Chosen,
    run: &Run,
) -> Result<(), CliError> {
    let deterministic = args.clock == ClockArg::Deterministic;
    let context = Context {
        machine: "bare".into(),
        workload: title(args),
        cpus: args.cpus.into(),
        setting: setting(args),
        params: Map::from_iter([
            ("args".to_owned(), args.args().iter().map(|arg| arg.to_string_lossy()).collect()),
            ("memory".to_owned(), args.memory.into()),
            ("nodes".to_owned(), args.nodes.to_string().into()),
            ("disk".to_owned(), args.disk.into()),
            ("swap".to_owned(), args.swap.unwrap_or(0).into()),
            ("accel".to_owned(), chosen.accel.name().into()),
            ("clock".to_owned(), if deterministic { "deterministic" } else { "real" }.into()),
        ]),
        knobs: Settings::new(&args.set.set).knobs(),
        basis: None,
    };
    for (name, count) in &run.report.counters {
        json.write(&context, name, "count", Number::Whole(*count))?;
    }
    if let End::Exited(status) = run.end {
        json.write(&context, "exit_status", "status", Number::Whole(status.into()))?;
    }
    json.write(&context, "wall_seconds", "s", Number::Real(run.wall.as_secs_f64()))
}
