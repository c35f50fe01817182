//! `faultless advise`: the cost of a program's page faults on this host, and the settings of
//! today's Linux that reduce it.
//!
//! The program is [recorded](crate::record) once, and runs once without a recorder. The recording
//! yields the effect of each setting in faults ([`findings`]), measurements on this host the cost
//! of a fault ([`costs`]), and their product is the advice ([`items`]). With `--try` each setting
//! that can be applied to one run is applied ([`once`]), and the prediction is printed beside the
//! measurement ([`trial`]).

mod allocator;
mod collector;
mod costs;
mod counter;
mod findings;
mod heap;
mod interval;
mod items;
mod once;
mod preload;
mod print;
mod program;
mod runtime;
mod supervise;
mod sysfs;
mod thp_flag;
mod trial;

use crate::args::AdviseArgs;
use crate::error::CliError;
use crate::interrupt;
use crate::output::{FOR_OWNER, Replacing};
use crate::record::{self, exit_code};
use crate::replay::source::{self, Input, Source};
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{self, say};
use collector::Collector;
use costs::Meter;
use faultless_trace::plan::Plan;
use faultless_trace::record::{RecordError, Signals, find_program};
use findings::Findings;
use items::Apply;
use once::once;
use print::Answer;
use program::Program;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitCode, ExitStatus};
use sysfs::{Shmem, Sizes};

/// Rounds in which costs are measured before anything is predicted.
const ROUNDS: usize = 7;

/// Returns `error` of a recording, with a hint about `--` if `file` is the name of a program.
fn behind(file: &Path, error: CliError) -> CliError {
    match error {
        CliError::Usage(why) if find_program(file.as_os_str()).is_ok() => {
            let name = file.display();
            CliError::Usage(format!("{why}; a program goes behind --: faultless advise -- {name}"))
        }
        error => error,
    }
}

/// Records or reads, counts, measures, and prints. Returns the exit status of the program.
pub fn run(args: &AdviseArgs) -> Result<ExitCode, CliError> {
    let inputs: Vec<&Path> = args.recording.iter().map(|file| file.as_path()).collect();
    let name = args.program.first().map(OsString::as_os_str);
    let found = name.map(|name| {
        find_program(name).map_err(|error| {
            CliError::Usage(RecordError::Run(name.display().to_string(), error).to_string())
        })
    });
    let found = found.transpose()?;
    let inputs: Vec<&Path> = inputs.into_iter().chain(found.as_deref()).collect();
    let mut json = Json::open(&args.json, &inputs)?;
    let (mut source, status) = match &args.recording {
        Some(file) => {
            interrupt::install();
            match source::open(file).map_err(|error| behind(file, error))? {
                Input::Recording(source) => (*source, None),
                Input::Addresses(name, _) => {
                    let why = "a trace of addresses has no faults; give a recording of `faultless record`";
                    return Err(CliError::Usage(format!("{name}: {why}")));
                }
            }
        }
        None => {
            let (source, status, daemon) = recorded(args)?;
            if daemon {
                say!(
                    "faultless: nothing is predicted for a program that runs on in the background"
                );
                return Ok(exit_code(status));
            }
            interrupt::install();
            (source, Some(status))
        }
    };
    let code = status.map_or(ExitCode::SUCCESS, exit_code);
    if status.is_some_and(|status| status.signal().is_some()) {
        // The recorder has reported the signal.
        say!("faultless: nothing is predicted for a program that a signal ends");
        return Ok(code);
    }
    let name = name.unwrap_or(OsStr::new(&source.trace.header.program));
    let program = Program::of(name, &source.trace);
    // The advice needs no plan for concurrent threads.
    source.plan = Plan::default();
    let progress = Progress::on_terminal(Findings::STEPS + ROUNDS as u64);
    let (sizes, shmem) = (Sizes::read(), Shmem::read());
    let mut findings = Findings::of(&source, program, sizes, shmem, &progress)?;
    let mut meter = Meter::new(args.sysfs, findings.census.shared > 0)?;
    let mut plain = None;
    for round in 0..ROUNDS {
        // One round suffices for a result. Without a plain run, the result uses the time of the
        // recording.
        if round > 0 && interrupt::requested() {
            break;
        }
        progress.begin("measures what a page costs");
        meter.round()?;
        progress.advance(1);
        // The plain run is in the middle of the rounds, so that both run under the same load.
        if plain.is_none() && status.is_some() {
            progress.print(|| {
                say!(
                    "faultless: the program runs a second time, without the recorder; its output is dropped, and Ctrl-C ends this run"
                );
                Ok::<_, CliError>(())
            })?;
            progress.begin("runs the program without the recorder");
            plain = once(&args.program, &Apply::Nothing)?;
            if program.go && !runtime::chosen() && !interrupt::requested() {
                findings.collector = Some(Collector::of_run(&args.program)?);
            }
        }
    }
    drop(progress);
    if plain.is_some_and(|run| run.thp_off) {
        findings.switch_huge_off();
    }
    let answer = Answer::new(&findings, meter.costs(), plain, &source.trace);
    let (mut out, style) = report::output(&args.json);
    let context = answer.context(&source, args);
    answer.print(&mut *out, style)?;
    answer.json(&mut json, &context)?;
    if args.trial && !interrupt::requested() {
        trial::run(
            args,
            &findings,
            &mut meter,
            &answer,
            (&mut *out, style),
            (&mut json, &context),
        )?;
    }
    json.complete()?;
    Ok(code)
}

/// Records the program, which keeps its input and output. Also returns whether processes of the
/// program are still running.
fn recorded(args: &AdviseArgs) -> Result<(Source, ExitStatus, bool), CliError> {
    // Signals sent to this process go to the program.
    let _signals = Signals::hold();
    let setup = record::setup(args.lesser)?;
    let place = std::env::temp_dir().join("faultless-advise");
    let data = Replacing::new(&place)?.temporary(FOR_OWNER)?;
    let warn = |note: &str| say!("faultless: {note}");
    let recorded = setup.record(data.path(), &args.program, warn);
    let recorded = recorded.map_err(|error| CliError::Failed(error.to_string()))?;
    for note in &recorded.notes {
        say!("faultless: {note}");
    }
    let name = recorded.trace.header.program.clone();
    Ok((Source::new(name, recorded.trace)?, recorded.status, !recorded.left.is_empty()))
}
