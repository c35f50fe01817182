//! JSON lines: one measurement per object, one object per line.
//!
//! A pipe or a device gets each line together with its result. A file is put in place when the
//! results are complete, so a failed or interrupted run leaves an earlier file unchanged. Its
//! measurements go to another file, with a name ending in `.partial`.

use super::{JsonArgs, say};
use crate::error::CliError;
use crate::interrupt;
use crate::output::{self, Replacing};
use faultless_analysis::{Basis, Context, Error, Figures, Number};
use serde::Serialize;
use serde_json::{Map, Value};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::mem;
use std::path::{Path, PathBuf};

#[derive(Serialize)]
struct Line<'a> {
    machine: &'a str,
    workload: &'a str,
    cpus: usize,
    setting: &'a str,
    params: &'a Map<String, Value>,
    knobs: &'a Map<String, Value>,
    metric: &'a str,
    unit: &'a str,
    value: Number,
    basis: Basis,
}

/// The extension of the file with the results of an incomplete run, appended to the given name.
const PARTIAL: &str = ".partial";

/// The file given with `--json`, if any.
#[derive(Debug)]
pub struct Json {
    path: PathBuf,
    out: Out,
}

#[derive(Debug)]
enum Out {
    Nothing,
    Standard,
    /// A pipe or a device.
    Stream(File),
    /// A file, and its lines so far.
    File(Replacing, Vec<u8>),
}

impl Json {
    /// Opens the file named by `args`, if any, which must differ from the `inputs`.
    pub fn open(args: &JsonArgs, inputs: &[&Path]) -> Result<Self, CliError> {
        let Some(path) = args.json.as_deref() else {
            return Ok(Self { path: PathBuf::new(), out: Out::Nothing });
        };
        output::spare("--json", path, inputs)?;
        let out = if path == Path::new("-") {
            Out::Standard
        } else {
            let replacing = Replacing::new(path)
                .map_err(|error| CliError::Failed(format!("--json {error}")))?;
            if replacing.is_file() {
                Out::File(replacing, Vec::new())
            } else {
                let device = OpenOptions::new().write(true).open(path).map_err(|error| {
                    CliError::failed(format_args!("--json {}", path.display()), error)
                })?;
                Out::Stream(device)
            }
        };
        Ok(Self { path: path.to_owned(), out })
    }

    /// Completes the results: the file is moved to its place, unless the user interrupted the
    /// command.
    pub fn complete(&mut self) -> Result<(), CliError> {
        if interrupt::requested() {
            return Ok(());
        }
        match mem::replace(&mut self.out, Out::Nothing) {
            Out::File(replacing, lines) => {
                replacing.write(&lines).map_err(|error| CliError::Failed(format!("--json {error}")))
            }
            _ => Ok(()),
        }
    }

    /// Keeps the results of an incomplete run, and prints their location.
    pub fn keep_partial(&mut self) {
        let Out::File(_, lines) = mem::replace(&mut self.out, Out::Nothing) else { return };
        let path = self.path.display();
        if lines.is_empty() {
            return;
        }
        let mut partial = self.path.clone().into_os_string();
        partial.push(PARTIAL);
        let partial = PathBuf::from(partial);
        let was = if self.path.exists() { "is unchanged" } else { "was not written" };
        match Replacing::new(&partial).and_then(|file| file.write(&lines)) {
            Ok(()) => say!(
                "faultless: the results are not complete: partial results are in {}, and {path} {was}",
                partial.display()
            ),
            Err(error) => say!("faultless: --json {error}"),
        }
    }

    /// Writes one measurement.
    pub fn write(
        &mut self,
        context: &Context,
        metric: &str,
        unit: &str,
        value: Number,
    ) -> Result<(), CliError> {
        Ok(self.figure(context, metric, unit, value)?)
    }
}

impl Figures for Json {
    fn figure(
        &mut self,
        context: &Context,
        metric: &str,
        unit: &str,
        value: Number,
    ) -> Result<(), Error> {
        if matches!(self.out, Out::Nothing) {
            return Ok(());
        }
        let Context { machine, workload, cpus, setting, params, knobs, .. } = context;
        let (cpus, basis) = (*cpus, context.basis());
        let line =
            Line { machine, workload, cpus, setting, params, knobs, metric, unit, value, basis };
        // One write per line, so that another process never reads half a line.
        let written = serde_json::to_string(&line)
            .map_err(io::Error::from)
            .and_then(|text| self.out.write_all(format!("{text}\n").as_bytes()));
        written.map_err(|source| match source.kind() {
            io::ErrorKind::BrokenPipe => Error::Closed,
            _ => Error::Output { to: format!("--json {}", self.path.display()), source },
        })
    }
}

impl Drop for Json {
    /// A command that ends early keeps its partial results.
    fn drop(&mut self) {
        self.keep_partial();
    }
}

impl Out {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Nothing => Ok(()),
            Self::Standard => io::stdout().write_all(bytes),
            Self::Stream(device) => device.write_all(bytes),
            Self::File(_, lines) => lines.write_all(bytes),
        }
    }
}
