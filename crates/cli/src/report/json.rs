//! JSON lines: one measurement an object, one object a line, written as results come.

use crate::args::JsonArgs;
use crate::error::CliError;
use crate::output;
use crate::run::Sample;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{self, LineWriter, Write};
use std::path::{Path, PathBuf};

/// Where and under what something was measured.
#[derive(Clone, Debug)]
pub struct Context {
    /// `native` or `linux-VERSION`.
    pub machine: String,
    /// A workload, or `replay:` and the name of a recording.
    pub workload: String,
    /// CPUs that ran it.
    pub cpus: usize,
    /// The knobs that tell this from other runs, or `default`.
    pub setting: String,
    /// What was run with: the parameters of a workload, what a recording is of, the machine of a boot.
    pub params: Map<String, Value>,
    /// All knobs, set or not; empty on Linux.
    pub knobs: Map<String, Value>,
}

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
}

/// Counts stay whole.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub enum Number {
    /// A count.
    Whole(u64),
    /// A rate or a time.
    Real(f64),
}

/// The file given with `--json`, or nothing.
pub struct Json {
    path: PathBuf,
    out: Option<Box<dyn Write>>,
}

impl Json {
    /// Opens the file that `args` name, if they do, which is none of the `inputs`.
    pub fn open(args: &JsonArgs, inputs: &[&Path]) -> Result<Self, CliError> {
        let Some(path) = args.json.as_deref() else {
            return Ok(Self { path: PathBuf::new(), out: None });
        };
        output::spare("--json", path, inputs)?;
        let out: Box<dyn Write> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            let file = File::create(path).map_err(|error| {
                CliError::failed(format_args!("--json {}", path.display()), error)
            })?;
            Box::new(LineWriter::new(file))
        };
        Ok(Self { path: path.to_owned(), out: Some(out) })
    }

    /// Writes one measurement.
    pub fn write(
        &mut self,
        context: &Context,
        metric: &str,
        unit: &str,
        value: Number,
    ) -> Result<(), CliError> {
        let Some(out) = &mut self.out else { return Ok(()) };
        let Context { machine, workload, cpus, setting, params, knobs } = context;
        let cpus = *cpus;
        let line = Line { machine, workload, cpus, setting, params, knobs, metric, unit, value };
        // One write a line: what another process reads is never half a line.
        let written = serde_json::to_string(&line)
            .map_err(io::Error::from)
            .and_then(|text| out.write_all(format!("{text}\n").as_bytes()));
        written.map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => CliError::Closed,
            _ => CliError::failed(format_args!("--json {}", self.path.display()), error),
        })
    }

    /// Writes a run: its rates, times and counts.
    pub fn sample(&mut self, context: &Context, sample: &Sample) -> Result<(), CliError> {
        let Sample { operations, faults, wall, user, system, counters } = sample;
        let rates = [
            ("faults_per_second", "1/s", sample.fault_rate()),
            ("operations_per_second", "1/s", sample.operation_rate()),
            ("wall_seconds", "s", *wall),
            ("user_seconds", "s", *user),
            ("system_seconds", "s", *system),
        ];
        for (metric, unit, value) in rates {
            self.write(context, metric, unit, Number::Real(value))?;
        }
        self.write(context, "operations", "count", Number::Whole(*operations))?;
        if counters.is_empty() {
            self.write(context, "faults", "count", Number::Whole(*faults))?;
        }
        counters
            .iter()
            .try_for_each(|(name, count)| self.write(context, name, "count", Number::Whole(*count)))
    }
}
