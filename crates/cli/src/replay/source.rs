//! Where a recording comes from, and what it needs.

use crate::error::CliError;
use crate::interrupt;
use crate::report::say;
use crate::suggest;
use faultless::PAGE_SIZE;
use faultless_trace::lackey::Addresses;
use faultless_trace::plan::Plan;
use faultless_trace::{Kind, Trace, recordings};
use std::path::{Path, PathBuf};

const MAP_POPULATE: u32 = 0x8000;

/// What a user means by the name of a recording.
#[derive(Clone, Debug)]
pub enum Origin {
    /// One that comes with faultless.
    Shipped(&'static recordings::Recording),
    /// A file.
    File(PathBuf),
}

impl Origin {
    /// Returns what `from` names, or `None` if it names neither. A bundled name goes before a file
    /// of the same name; a path with a directory, such as `./sort`, names the file.
    pub fn find(from: &Path) -> Option<Self> {
        if let Some(shipped) = from.to_str().and_then(recordings::find) {
            return Some(Self::Shipped(shipped));
        }
        from.exists().then(|| Self::File(from.to_owned()))
    }

    /// As [`find`](Self::find). Informs the user that a file of the same name is ignored.
    pub fn find_told(from: &Path) -> Option<Self> {
        let found = Self::find(from);
        if matches!(found, Some(Self::Shipped(_))) && from.exists() {
            let name = from.display();
            say!("faultless: {name} is the bundled recording; ./{name} names the file");
        }
        found
    }
}

/// A recording, ready to be replayed.
#[derive(Debug)]
pub struct Source {
    /// As results name it: a shipped recording's own name, or the file's without extension, or the
    /// program's where that is `perf.data`.
    pub name: String,
    /// What was recorded.
    pub trace: Trace,
    /// What will be done.
    pub plan: Plan,
}

/// What there is to replay.
#[derive(Debug)]
pub enum Input {
    /// A recording.
    Recording(Box<Source>),
    /// A trace of addresses, and its name.
    Addresses(String, Addresses),
}

/// Opens what `from` names: something that comes with faultless, or a file.
pub fn open(from: &Path) -> Result<Input, CliError> {
    let recording = |source| Input::Recording(Box::new(source));
    match Origin::find_told(from) {
        Some(Origin::Shipped(shipped)) => Source::shipped(shipped).map(recording),
        Some(Origin::File(file)) => {
            let opened = {
                // A pipe may keep us waiting.
                let _guard = interrupt::ends_at_once();
                faultless_trace::open(&file).map_err(|e| CliError::Usage(e.to_string()))?
            };
            match opened {
                faultless_trace::Input::Recording(trace) => {
                    Source::of_file(&file, trace).map(recording)
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

/// A file's name without extensions that say what it is.
fn stem(file: &Path) -> String {
    let name = file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy();
    name.strip_suffix(".lackey").unwrap_or(&name).to_owned()
}

impl Source {
    /// A file of the user's.
    pub fn file(file: &Path) -> Result<Self, CliError> {
        let trace = {
            // A pipe may keep us waiting.
            let _guard = interrupt::ends_at_once();
            faultless_trace::read(file).map_err(|e| CliError::Usage(e.to_string()))?
        };
        Self::of_file(file, trace)
    }

    fn of_file(file: &Path, trace: Trace) -> Result<Self, CliError> {
        if let Some(loss) = trace.header.loss() {
            say!("faultless: {}: {loss}", file.display());
        }
        let name = stem(file);
        // What perf calls every file tells nothing.
        let name = if name == "perf" { trace.header.program.clone() } else { name };
        Self::new(name, trace)
    }

    /// A recording that comes with faultless.
    pub fn shipped(recording: &recordings::Recording) -> Result<Self, CliError> {
        let trace = recording.trace().map_err(|error| CliError::Failed(error.to_string()))?;
        Self::new(recording.name.to_owned(), trace)
    }

    /// Of `trace`, under a name.
    pub fn new(name: String, trace: Trace) -> Result<Self, CliError> {
        let plan =
            Plan::new(&trace).map_err(|error| CliError::Usage(format!("{name}: {error}")))?;
        Ok(Self { name, trace, plan })
    }

    /// CPUs of the machine to replay it on: one for each thread, if that many can be.
    pub fn cpus(&self) -> usize {
        self.plan.threads().len().clamp(1, faultless::MAX_CPUS)
    }

    /// Bytes of memory enough to replay it: each page that is touched or populated once, twice over
    /// for tables and for what is freed with delay.
    pub fn memory(&self) -> u64 {
        let mut pages = self.trace.summary().distinct_pages as u64;
        for event in &self.trace.events {
            if let Kind::Map { len, flags, .. } = event.kind
                && flags & MAP_POPULATE != 0
            {
                pages += len / PAGE_SIZE;
            }
        }
        pages * 2 * PAGE_SIZE + (64 << 20)
    }
}
