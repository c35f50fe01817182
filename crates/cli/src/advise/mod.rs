//! `faultless advise`: the cost of a program's page faults on this host, and the settings of
//! today's Linux that reduce it.
//!
//! The program is [recorded](crate::record) once, and runs once without a recorder. A Go program
//! runs once more, for the trace of its garbage collector. With `--try` each setting that can be
//! applied to one run is [tried](trial).

mod causes;
mod page;
mod print;
mod sampled;
mod save;
mod trial;

use crate::error::CliError;
use crate::export::{Export, ExportArgs, Kept};
use crate::html::{Html, HtmlArgs};
use crate::interrupt;
use crate::number::within;
use crate::output;
use crate::record::live::{self, LiveArgs};
use crate::record::{self, SetupArgs, exit_code, not_found};
use crate::replay::source::{self, Input};
use crate::report::json::Json;
use crate::report::progress::{Progress, Reading};
use crate::report::{self, JsonArgs, say};
use clap::ArgGroup;
use faultless_analysis::advise::answer::Answer;
use faultless_analysis::advise::file::Advice;
use faultless_analysis::advise::program::Program;
use faultless_analysis::advise::{Measured, STEPS, count, measure};
use faultless_analysis::replay::Source;
use faultless_trace::plan::Plan;
use faultless_trace::record::{Signals, Subject, find_program};
use save::Save;
use std::cell::OnceCell;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use tempfile::NamedTempFile;

#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("subject")
    .args(["recording", "program", "pid", "cgroup", "all"])
    .required(true))]
#[command(override_usage = "\
faultless advise [OPTIONS] -- <CMD>...
       faultless advise [OPTIONS] <FILE|NAME>
       faultless advise [OPTIONS] --pid <PID> | --cgroup <PATH> | --all")]
#[command(after_help = "\
Examples:
  faultless advise -- python3 -c 'print(len({str(i) for i in range(10**6)}))'
  faultless advise app.fltrace
  faultless advise --pid 1234 --seconds 10
  faultless advise --try --save app.toml -- ./app
  faultless advise --try --sysfs --rounds 15 --json app.jsonl -- ./app")]
pub struct AdviseArgs {
    /// Analyse this recording: a file, - for standard input, or the name of a bundled one
    #[arg(value_name = "FILE|NAME")]
    pub recording: Option<PathBuf>,
    /// Apply each setting to runs of the program, and measure the saving
    #[arg(long = "try", conflicts_with_all = ["recording", "pid", "cgroup", "all"])]
    pub trial: bool,
    /// With --try, run N pairs for each setting, one run of each pair without the setting
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = within(2..=1000_u16), requires = "trial")]
    pub rounds: u16,
    /// With --try, drop the data files that the program maps from the page cache before each run,
    /// and try the settings for a cold page cache
    #[arg(long, requires = "trial")]
    pub cold: bool,
    /// Permit changes of system-wide settings (sizes of huge pages) during measurements. They are
    /// restored afterwards, also if the command is killed
    #[arg(long)]
    pub sysfs: bool,
    /// Write the advice that saves time to FILE, for `faultless run --advice FILE`; with --try, the
    /// advice with a confirmed saving. FILE is replaced when the results are complete
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    #[command(flatten)]
    pub setup: SetupArgs,
    #[command(flatten)]
    pub live: LiveArgs,
    #[command(flatten)]
    pub export: ExportArgs,
    #[command(flatten)]
    pub json: JsonArgs,
    #[command(flatten)]
    pub html: HtmlArgs,
    /// Run this program, with its arguments
    #[arg(last = true, value_name = "CMD")]
    pub program: Vec<OsString>,
}

impl AdviseArgs {
    /// Returns whether the command writes files beside its report.
    fn writes_files(&self) -> bool {
        let Self { save, json, html, export, .. } = self;
        let is_some = save.is_some() || json.json.is_some() || html.html.is_some();
        is_some || export.files().next().is_some()
    }
}

/// Returns `error` of a recording, with a hint about `--` if `file` is the name of a program.
fn behind(file: &Path, error: CliError) -> CliError {
    match error {
        CliError::Usage(why) if find_program(file.as_os_str()).is_ok() => {
            let name = file.display();
            CliError::Usage(format!("{why}; to run a program, use --: faultless advise -- {name}"))
        }
        error => error,
    }
}

/// Records or reads, counts, measures, and prints. Returns the exit status of the program.
pub fn run(args: &AdviseArgs) -> Result<ExitCode, CliError> {
    let name = args.program.first().map(OsString::as_os_str);
    let found = name.map(|name| find_program(name).map_err(|error| not_found(name, error)));
    let found = found.transpose()?;
    let inputs: Vec<&Path> =
        args.recording.as_deref().into_iter().chain(found.as_deref()).collect();
    let outputs = [
        ("--json", args.json.json.as_deref()),
        ("--save", args.save.as_deref()),
        ("--html", args.html.html.as_deref()),
    ];
    output::apart(&outputs.into_iter().chain(args.export.files()).collect::<Vec<_>>())?;
    let save = args.save.as_deref().map(|file| Save::new(file, &inputs)).transpose()?;
    let export = Export::open(&args.export, &inputs)?;
    let html = Html::open(&args.html, &inputs)?;
    let mut json = Json::open(&args.json, &inputs)?;
    let subject = args.live.subject();
    let running = subject.as_ref().and_then(program_of);
    let input = match (&args.recording, &subject) {
        (Some(file), _) => Some(read(file)?),
        (None, Some(subject)) => match recorded_live(args, subject)? {
            Ok(input) => Some(input),
            Err(program) => {
                // The recorder has reported that no setting helps.
                json.complete()?;
                save.map_or(Ok(()), |save| save.write(&program, &[]))?;
                return Ok(ExitCode::SUCCESS);
            }
        },
        (None, None) => None,
    };
    let (mut source, status) = match input {
        Some(Input::Recording(source)) => (*source, None),
        Some(Input::Sampled(name, trace)) => {
            args.export.every_fault(&name)?;
            if args.html.html.is_some() {
                let why = format!("--html: {name} omits faults: record a shorter time");
                return Err(CliError::Usage(why));
            }
            let (out, style) = report::output(&args.json);
            let mut out = Copied::new(out, args.writes_files());
            sampled::run(&name, &trace, (&mut out, style), &mut json)?;
            let saved = save.map_or(Ok(()), |save| save.write(&trace.header.program, &[]));
            CliError::together([out.printed(), json.complete(), saved])?;
            return Ok(ExitCode::SUCCESS);
        }
        Some(Input::Addresses(name, _)) => {
            let why = "a trace of addresses has no faults; use a recording of `faultless record`";
            return Err(CliError::Usage(format!("{name}: {why}")));
        }
        None => {
            let (source, status, daemon) = recorded(args)?;
            if daemon {
                say!("faultless: no prediction for a program that continues in the background");
                return Ok(exit_code(status));
            }
            interrupt::install();
            (source, Some(status))
        }
    };
    let code = status.map_or(ExitCode::SUCCESS, exit_code);
    if status.is_some_and(|status| status.signal().is_some()) {
        // The recorder has reported the signal.
        say!("faultless: no prediction for a program that ends by a signal");
        return Ok(code);
    }
    export.check(&source.trace)?;
    let name = name.or(running.as_ref().map(|path| path.as_os_str()));
    let name = name.unwrap_or(OsStr::new(&source.trace.header.program));
    let mut program = Program::of(name, &source.trace);
    if let Some(Subject::Processes(pids)) = &subject {
        pids.iter().for_each(|pid| program.add_mapped(*pid));
    }
    // The advice needs no plan for concurrent threads.
    source.plan = Plan::default();
    let progress = Progress::on_terminal(STEPS);
    let command = status.is_some().then_some(&args.program[..]);
    let findings = {
        // There are no results to print yet.
        let _guard = interrupt::ends_at_once();
        count(&source, program, &progress)?
    };
    let measured = measure(findings, command, args.sysfs, args.cold, &progress)?;
    drop(progress);
    let (advice, written) = advise(args, &source, measured, &mut json, (&export, html))?;
    // The failure of one file must not prevent the others.
    let saved = save.map_or(Ok(()), |save| save.write(&source.trace.header.program, &advice));
    CliError::together([written, json.complete(), saved])?;
    Ok(code)
}

/// Reads a recording.
fn read(file: &Path) -> Result<Input, CliError> {
    interrupt::install();
    source::open(file).map_err(|error| behind(file, error))
}

/// Prints the answer, and tries the advice if requested. Returns the advice that saves time, and
/// the errors of the exports and the page.
fn advise(
    args: &AdviseArgs,
    source: &Source,
    measured: Measured,
    json: &mut Json,
    (export, html): (&Export, Html),
) -> Result<(Vec<Advice>, Result<(), CliError>), CliError> {
    let Measured { findings, mut meter, plain, data } = measured;
    let answer = Answer::new(&findings, meter.costs(), plain, &source.trace);
    let (out, style) = report::output(&args.json);
    let mut out = Copied::new(out, args.writes_files());
    let context = answer.context(source, &args.program, args.sysfs);
    print::print(&answer, &mut out, style)?;
    let listed = answer.figures(json, &context).map_err(CliError::from);
    let mut exported = Ok(());
    if export.has_figures() {
        let mut kept = Kept::default();
        answer.figures(&mut kept, &context)?;
        exported = export.figures(&kept);
    }
    let stacks = export.stacks(&answer, &source.trace);
    if !args.trial {
        print::next::print(&answer, &args.program, &mut out)?;
    }
    let (advice, tried) = if args.trial {
        trial::run(args, &mut meter, (&answer, &data), (&mut out, style), (json, &context))?
    } else {
        (answer.chosen(), Vec::new())
    };
    let text = String::from_utf8_lossy(&out.text);
    let page =
        html.write(|| page::page(&answer, &source.trace, (&tried, args.cold), &text).map(Some));
    Ok((advice, CliError::together([listed, exported, stacks, page, out.printed()])))
}

/// An output whose text goes to a page, too. If the command also writes files, an error of the
/// output does not prevent these files.
struct Copied {
    out: Box<dyn Write + Send>,
    text: Vec<u8>,
    /// Whether the command also writes files.
    continues: bool,
    /// The first error of the output.
    error: Option<io::Error>,
}

impl Copied {
    fn new(out: Box<dyn Write + Send>, continues: bool) -> Self {
        Self { out, text: Vec::new(), continues, error: None }
    }

    /// Returns the error of the output.
    fn printed(self) -> Result<(), CliError> {
        self.error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Writes to the output with `write`, unless an earlier write has failed.
    fn attempt(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        if self.error.is_some() {
            return Ok(());
        }
        match write(&mut self.out) {
            Err(error) if self.continues => {
                self.error = Some(error);
                Ok(())
            }
            result => result,
        }
    }
}

impl Write for Copied {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.attempt(|out| out.write_all(bytes))?;
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.attempt(|out| out.flush())
    }
}

/// Returns the file of the first running process.
fn program_of(subject: &Subject) -> Option<PathBuf> {
    let Subject::Processes(pids) = subject else { return None };
    fs::read_link(format!("/proc/{}/exe", pids.first()?)).ok()
}

/// Records running processes until a signal, or for the given time. Returns the name of the program
/// in `Err` if the recording has no page fault.
fn recorded_live(args: &AdviseArgs, subject: &Subject) -> Result<Result<Input, String>, CliError> {
    let data = temporary()?;
    let live = {
        // A signal ends the recording.
        let _signals = Signals::hold();
        let setup = record::setup(&args.setup, args.export.needs_stacks())?;
        live::record(&setup, data.path(), subject, &args.live)
            .map_err(|error| CliError::Failed(error.to_string()))?
    };
    interrupt::install();
    for note in &live.recorded.notes {
        say!("faultless: {note}");
    }
    let has_fault = live.has_fault();
    let trace = live.recorded.trace;
    let name = trace.header.program.clone();
    if !has_fault {
        return Ok(Err(name));
    }
    Input::of(name, trace).map(Ok)
}

/// Creates the file in which perf records.
fn temporary() -> Result<NamedTempFile, CliError> {
    let file = tempfile::Builder::new().prefix("faultless-advise.").tempfile();
    file.map_err(|error| CliError::failed(std::env::temp_dir().display(), error))
}

/// Records the program, which keeps its input and output. Also returns whether processes of the
/// program are still running.
fn recorded(args: &AdviseArgs) -> Result<(Source, ExitStatus, bool), CliError> {
    // Signals sent to this process go to the program.
    let _signals = Signals::hold();
    let setup = record::setup(&args.setup, args.export.needs_stacks())?;
    let data = temporary()?;
    let warn = |note: &str| say!("faultless: {note}");
    let reading = OnceCell::new();
    let read = |share| reading.get_or_init(Reading::new).read(share);
    let recorded = setup.record(data.path(), &args.program, warn, read);
    drop(reading);
    let recorded = recorded.map_err(|error| CliError::Failed(error.to_string()))?;
    for note in &recorded.notes {
        say!("faultless: {note}");
    }
    let name = recorded.trace.header.program.clone();
    Ok((Source::new(name, recorded.trace)?, recorded.status, !recorded.left.is_empty()))
}
