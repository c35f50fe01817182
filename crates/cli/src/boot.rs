//! `faultless boot`: runs a Linux program on the bare machine. Passes the program's output through
//! as it arrives, returns its exit status, and prints the kernel's counters in the form of
//! `perf stat`.

use crate::args::{AccelArg, BootArgs, ClockArg};
use crate::error::CliError;
use crate::interrupt;
use crate::report::json::{Context, Json, Number};
use crate::report::number::plural;
use crate::report::perf_stat::PerfStat;
use crate::report::say;
use crate::settings::Settings;
use crate::suggest;
use faultless_boot::accel::{kvm_opens, kvm_works};
use faultless_boot::{Accel, BootError, Clock, Disk, End, Limits, Machine, Program, Run, Streams};
use nix::sys::signal::Signal;
use serde_json::Map;
use std::process::ExitCode;

/// The exit status of a run that exceeded its timeout, as `timeout` returns it.
const TIMED_OUT: u8 = 124;
/// The exit status of a program that keeps running after its output was closed, as a shell reports
/// SIGPIPE.
const BROKEN_PIPE: u8 = 128 + 13;

/// Boots a program.
pub fn run(args: &BootArgs) -> Result<ExitCode, CliError> {
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
                say!("faultless: {program}: killed by {}", signal_name(signal));
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

/// `SIGSEGV`, or the number of a real-time signal.
fn signal_name(number: u8) -> String {
    let name = Signal::try_from(i32::from(number));
    name.map_or_else(|_| format!("signal {number}"), |signal| signal.as_str().to_owned())
}

/// Returns the program: a file, or a bundled program.
fn program(args: &BootArgs) -> Result<Program, CliError> {
    if let Some(files) = &args.files {
        let said = |why: &dyn std::fmt::Display| format!("--files {}: {why}", files.display());
        let is_folder = std::fs::metadata(files).map(|it| it.is_dir());
        match is_folder {
            Ok(true) => {}
            Ok(false) => return Err(CliError::Usage(said(&"not a directory"))),
            Err(error) => return Err(CliError::Usage(said(&error))),
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
            let why =
                "--accel kvm cannot count instructions for --clock deterministic: give one of them";
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
    };
    for (name, count) in &run.report.counters {
        json.write(&context, name, "count", Number::Whole(*count))?;
    }
    if let End::Exited(status) = run.end {
        json.write(&context, "exit_status", "status", Number::Whole(status.into()))?;
    }
    json.write(&context, "wall_seconds", "s", Number::Real(run.wall.as_secs_f64()))
}
