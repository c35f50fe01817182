//! The origin of a recording.

use crate::error::CliError;
use crate::interrupt;
use crate::report::progress::{Progress, Reading};
use crate::report::say;
use faultless_analysis::Observer;
use faultless_analysis::replay::Source;
use faultless_analysis::suggest;
use faultless_trace::lackey::Addresses;
use faultless_trace::{Kind, Trace, recordings};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

/// The file of standard input.
pub const STDIN: &str = "/dev/stdin";

/// The meaning of a recording's name.
#[derive(Clone, Debug)]
pub enum Origin {
    /// A bundled recording.
    Shipped(&'static recordings::Recording),
    /// A file.
    File(PathBuf),
}

impl Origin {
    /// Returns the origin named `from`, or `None` if neither exists. A bundled name takes
    /// precedence over a file of the same name; a path with a directory, such as `./sort`, is
    /// always the file. `-` is standard input.
    pub fn find(from: &Path) -> Option<Self> {
        if from == Path::new("-") {
            return Some(Self::File(PathBuf::from(STDIN)));
        }
        if let Some(shipped) = from.to_str().and_then(recordings::find) {
            return Some(Self::Shipped(shipped));
        }
        from.exists().then(|| Self::File(from.to_owned()))
    }

    /// Behaves like [`find`](Self::find), and informs the user of an ignored file of the same name.
    pub fn find_with_note(from: &Path) -> Option<Self> {
        let found = Self::find(from);
        if matches!(found, Some(Self::Shipped(_))) && from.exists() {
            let name = from.display();
            say!("faultless: {name} is the bundled recording; ./{name} names the file");
        }
        found
    }
}

/// An input of a replay.
#[derive(Debug)]
pub enum Input {
    /// A recording.
    Recording(Box<Source>),
    /// A recording with one in several faults, and its name.
    Sampled(String, Box<Trace>),
    /// A trace of addresses, and its name.
    Addresses(String, Addresses),
}

impl Input {
    /// Returns the input of a recording.
    ///
    /// # Errors
    /// The recording is inconsistent.
    pub fn of(name: String, trace: Trace) -> Result<Self, CliError> {
        if trace.header.omitted > 0 {
            return Ok(Self::Sampled(name, Box::new(trace)));
        }
        let progress = Progress::on_terminal(1);
        progress.begin("orders the operations");
        Ok(Self::Recording(Box::new(Source::new(name, trace)?)))
    }
}

/// Opens the input named `from`: a bundled recording or trace, or a file.
pub fn open(from: &Path) -> Result<Input, CliError> {
    let recording = |source| Input::Recording(Box::new(source));
    match Origin::find_with_note(from) {
        Some(Origin::Shipped(shipped)) => Ok(recording(Source::shipped(shipped)?)),
        Some(Origin::File(file)) => {
            // Reading a pipe may block, and there are no results to print yet.
            let _guard = interrupt::ends_at_once();
            not_typed(&file)?;
            let reading = Reading::new();
            let mut watch = |share| {
                reading.read(share);
                true
            };
            let opened = faultless_trace::open_watched(&file, &mut watch)
                .map_err(|error| CliError::Usage(error.to_string()))?;
            drop(reading);
            match opened {
                faultless_trace::Input::Recording(trace) => {
                    some_fault(&file, &trace)?;
                    Input::of(name_of(&file, &trace), trace)
                }
                faultless_trace::Input::Addresses(trace) => {
                    Ok(Input::Addresses(stem(&file), trace))
                }
            }
        }
        None => {
            if let Some(trace) = from.to_str().and_then(recordings::addresses) {
                return Ok(Input::Addresses(from.display().to_string(), trace));
            }
            let names: Vec<_> = recordings::names().collect();
            Err(CliError::Usage(format!(
                "{}: no such file, and no recording or trace of addresses of that name; there are {}{}",
                from.display(),
                names.join(", "),
                suggest::hint(&from.to_string_lossy(), names.iter().copied())
            )))
        }
    }
}

/// Returns an error for the recording `trace` in `file` without a fault.
fn some_fault(file: &Path, trace: &Trace) -> Result<(), CliError> {
    if trace.events.iter().any(|event| matches!(event.kind, Kind::Fault { .. })) {
        return Ok(());
    }
    let notes: String = trace.header.notes.iter().map(|note| format!("\n- {note}")).collect();
    let why = format!(
        "{}: the recording has no page fault: no setting of memory saves time in its period, and a \
         replay has no fault to repeat{notes}",
        file.display()
    );
    Err(CliError::Usage(why))
}

/// Returns an error for standard input that is a terminal.
fn not_typed(file: &Path) -> Result<(), CliError> {
    if file == Path::new(STDIN) && io::stdin().is_terminal() {
        let why = "standard input is a terminal: give a recording by a pipe or by <FILE";
        return Err(CliError::Usage(why.into()));
    }
    Ok(())
}

/// Returns a file's name without the extensions of its format.
fn stem(file: &Path) -> String {
    let name = file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy();
    name.strip_suffix(".lackey").unwrap_or(&name).to_owned()
}

/// Reads a recording of the user.
pub fn read(file: &Path) -> Result<Source, CliError> {
    let trace = {
        // Reading a pipe may block.
        let _guard = interrupt::ends_at_once();
        not_typed(file)?;
        faultless_trace::read(file).map_err(|e| CliError::Usage(e.to_string()))?
    };
    some_fault(file, &trace)?;
    Ok(Source::new(name_of(file, &trace), trace)?)
}

/// Returns the name of the recording `trace` in `file`. Warns about lost events.
fn name_of(file: &Path, trace: &Trace) -> String {
    if let Some(loss) = trace.header.loss() {
        say!("faultless: {}: {loss}", file.display());
    }
    let name = stem(file);
    // perf gives every file this name, and standard input has none.
    let unnamed = name == "perf" || file == Path::new(STDIN);
    if unnamed { trace.header.program.clone() } else { name }
}
