//! `faultless record`: runs `perf record` with the right options for this system, for a program or
//! for [running processes](live).

pub mod live;

use crate::error::CliError;
use crate::interrupt::SIGNALLED;
use crate::output::{self, Replacing};
use crate::report::progress::Reading;
use crate::report::{Style, processes, say};
use clap::ArgGroup;
use faultless_trace::compact;
use faultless_trace::record::{
    Extent, RecordError, Recorded, Setup, Signals, Unwind, find_program,
};
use signal_hook::consts::SIGINT;
use std::cell::OnceCell;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, IsTerminal};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use tempfile::NamedTempFile;

use live::LiveArgs;

/// The default file of the portable form.
const PORTABLE: &str = "recording.fltrace";

#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("subject").args(["program", "pid", "cgroup", "all"]).required(true))]
#[command(override_usage = "\
faultless record [OPTIONS] -- <CMD>...
       faultless record [OPTIONS] --pid <PID> | --cgroup <PATH> | --all")]
#[command(after_help = "\
Examples:
  faultless record -- python3 -c 'print(sum(range(10**6)))'
  faultless record -o build.fltrace --compact -- make -j2
  faultless record --pid 1234 --seconds 10
  faultless record --lesser -- ./app     without permission for tracepoints")]
pub struct RecordArgs {
    /// Write the recording to FILE; an existing file is kept as FILE.old [default: perf.data, or
    /// recording.fltrace with --compact, --pid, --cgroup or --all]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the small portable form (also selected by a name ending in .fltrace)
    #[arg(long)]
    pub compact: bool,
    #[command(flatten)]
    pub setup: SetupArgs,
    #[command(flatten)]
    pub live: LiveArgs,
    /// Run this program, with its arguments
    #[arg(last = true, value_name = "CMD")]
    pub program: Vec<OsString>,
}

/// The contents of a recording.
#[derive(Debug, clap::Args)]
pub struct SetupArgs {
    /// Accept an incomplete recording if permission for all events is missing
    #[arg(long)]
    pub lesser: bool,
    /// Record the call stack of each fault, and of each mmap, mremap and brk: by frame pointers
    /// (fp), or by unwind tables (dwarf), which need 8 KiB of disk space for each
    #[arg(long, value_name = "METHOD", num_args = 0..=1, require_equals = true,
        default_missing_value = "fp")]
    pub stacks: Option<Stacks>,
}

/// A way to record call stacks.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Stacks {
    /// By frame pointers
    Fp,
    /// By unwind tables
    Dwarf,
}

/// Records a program, and returns its exit status.
pub fn run(args: &RecordArgs) -> Result<ExitCode, CliError> {
    if let Some(subject) = args.live.subject() {
        return live::run(args, &subject);
    }
    // Signals sent to this process go to the program. Signals after the end of the program take
    // effect when the files are in place.
    let _signals = Signals::hold();
    // Wrong arguments are reported first, also on a system without perf.
    let name = args.program.first().map_or("".as_ref(), OsString::as_os_str);
    let program = find_program(name).map_err(|error| not_found(name, error))?;
    let named = |output: &PathBuf| output.extension().is_some_and(|e| e == compact::EXTENSION);
    let compact = args.compact || args.output.as_ref().is_some_and(named);
    let output = args.output(if compact { PORTABLE } else { "perf.data" })?;
    output::spare("-o", &output, &[&program])?;
    let setup = setup(&args.setup, false)?;
    let Some(recorded) = write(args, &setup, &output, compact)? else {
        return Ok(exit_code(ExitStatus::from_raw(SIGINT)));
    };
    report(&output, &recorded);
    Ok(exit_code(recorded.status))
}

impl RecordArgs {
    /// Returns the file of the recording, or `default`.
    fn output(&self, default: &str) -> Result<PathBuf, CliError> {
        let output = self.output.clone().unwrap_or_else(|| PathBuf::from(default));
        if output == Path::new("-") {
            let why = "standard output belongs to the program; -o ./- is a file of that name";
            return Err(CliError::Usage(format!("-o -: {why}")));
        }
        Ok(output)
    }
}

/// Prints the contents of a recording, and the next commands. Standard output belongs to the
/// program.
fn report(output: &Path, recorded: &Recorded) {
    for note in &recorded.notes {
        say!("faultless: {note}");
    }
    let size = fs::metadata(output).map_or(0, |meta| meta.len());
    let file = output.display();
    say!("{file}: {:.1} KB", size as f64 / 1e3);
    say!("{}", recorded.trace.summary());
    let style = Style::new(io::stderr().is_terminal());
    if let Some(table) = processes::table(&recorded.trace.processes_by_faults(), None, style) {
        say!("{table}");
    }
    let summary = recorded.trace.summary();
    if summary.user_faults + summary.kernel_faults == 0 {
        return;
    }
    let replay = match recorded.trace.header.every_fault() {
        Ok(()) => format!("faultless replay {file} --policies, or "),
        Err(_) => String::new(),
    };
    say!("next: {replay}faultless advise {file}");
}

/// Returns the remedy for the `error` of a command line `words` with a program that `--` does not
/// precede; `None` for other errors.
pub fn without_dashes(error: &clap::Error, words: &[OsString]) -> Option<String> {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return None };
    if error.kind() != ErrorKind::UnknownArgument || find_program(word.as_ref()).is_err() {
        return None;
    }
    let at = words.iter().position(|other| other == OsStr::new(word))?;
    let mut all: Vec<_> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    all.insert(at, "--".to_owned());
    all[0] = "faultless".to_owned();
    Some(format!("{word}: this is a program: put -- before it: {}", all.join(" ")))
}

/// Returns the error for a program that does not exist, or cannot be executed.
pub fn not_found(program: &OsStr, error: io::Error) -> CliError {
    CliError::Usage(RecordError::Run(program.display().to_string(), error).to_string())
}

/// Returns the method of recording on this system. Prints the events missing from the recording if
/// `--lesser` accepts an incomplete recording. With `stacks`, call stacks are recorded also without
/// the option.
pub fn setup(args: &SetupArgs, stacks: bool) -> Result<Setup, CliError> {
    let setup = Setup::find(args.lesser).map_err(|missing| {
        let hint = if !args.lesser && Setup::find(true).is_ok() {
            "\n--lesser accepts a recording without the events that need permission"
        } else {
            ""
        };
        CliError::Failed(format!("{missing}{hint}"))
    })?;
    if setup.extent() != Extent::Full {
        say!("faultless: this recording will not have all events:");
        for shortfall in setup.shortfalls() {
            say!("- {shortfall}");
        }
    }
    let unwind = args.stacks.map(|method| match method {
        Stacks::Fp => Unwind::FramePointers,
        Stacks::Dwarf => Unwind::Dwarf,
    });
    Ok(setup.with_stacks(unwind.or(stacks.then_some(Unwind::FramePointers))))
}

/// Records into `output`, which is written to only after success. Returns `None` if a signal ended
/// the reading of a complete file.
fn write(
    args: &RecordArgs,
    setup: &Setup,
    output: &Path,
    compact: bool,
) -> Result<Option<Recorded>, CliError> {
    let replacing = Replacing::new(output)?;
    if !compact && !replacing.is_file() {
        let why = "perf writes to files only; --compact also writes to pipes and devices";
        return Err(CliError::Usage(format!("-o {}: {why}", output.display())));
    }
    replacing.check_old()?;
    let data = replacing.temporary(output::FOR_OWNER)?;
    let warn = |note: &str| say!("faultless: {note}");
    let reading = OnceCell::new();
    let read = |share| reading.get_or_init(Reading::new).read(share);
    let recorded = setup.record(data.path(), &args.program, warn, read);
    drop(reading);
    let recorded = match recorded {
        Err(RecordError::Stopped) if !compact => {
            replacing.put_beside_old(data).map_err(|(error, data)| kept(error, data))?;
            say!("faultless: {}: complete, but not read back: interrupted", output.display());
            return Ok(None);
        }
        recorded => recorded.map_err(|error| {
            CliError::Failed(named_for(&error.to_string(), data.path(), output))
        })?,
    };
    if compact {
        let put = put_portable(&replacing, output, &recorded);
        put.map_err(|error| kept(error, data))?;
    } else {
        replacing.put_beside_old(data).map_err(|(error, data)| kept(error, data))?;
    }
    Ok(Some(recorded))
}

/// Writes the portable form, which holds all data used by replay.
fn put_portable(replacing: &Replacing, output: &Path, recorded: &Recorded) -> Result<(), CliError> {
    let bytes = compact::encode(output, &recorded.trace);
    let bytes = bytes.map_err(|error| CliError::Failed(error.to_string()))?;
    replacing.write_beside_old(&bytes)
}

/// Keeps the file of perf after the last step of a recording has failed with `error`. Returns the
/// error with the name of the file.
fn kept(error: CliError, data: NamedTempFile) -> CliError {
    match data.keep() {
        Ok((_, file)) => {
            let file = file.display();
            let what = "the recording is kept in the form of perf";
            CliError::Failed(format!("{error}\n{what}: {file}; next: faultless advise {file}"))
        }
        Err(_) => error,
    }
}

/// Replaces the name of the file written by perf with the name given by the user in `text`.
fn named_for(text: &str, data: &Path, output: &Path) -> String {
    text.replace(&*data.to_string_lossy(), &output.to_string_lossy())
}

/// Returns the exit code with which a shell reports the end of a program.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| SIGNALLED + signal));
    code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Args;
    use clap::Parser;

    #[test]
    fn program_without_dashes_is_named_as_a_program() {
        let why = |words: &[&str]| {
            let error = Args::try_parse_from(words).expect_err("wrong arguments");
            let words: Vec<_> = words.iter().map(OsString::from).collect();
            without_dashes(&error, &words)
        };
        let want =
            "/bin/sh: this is a program: put -- before it: faultless record -o x -- /bin/sh -c :";
        let got = why(&["bin/faultless", "record", "-o", "x", "/bin/sh", "-c", ":"]);
        assert_eq!(got.as_deref(), Some(want));
        assert!(why(&["faultless", "run", "--apply", "no-thp", "/bin/sh"]).is_some());
        assert_eq!(why(&["faultless", "record", "/no/such/program"]), None);
        assert_eq!(why(&["faultless", "record", "--no-such-option"]), None);
    }
}
